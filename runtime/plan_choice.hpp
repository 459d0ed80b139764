// Choice of a kernel's plan: the caller's, a record's, or the cost model's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flce/plan.hpp"
#include "records/record_store.hpp"

namespace flce {

struct PlanQuery {
    const Spec& spec;  ///< normalized
    const Device& device;
    std::string_view plan;  ///< canonical text from the caller; empty: choose one
    PlanRequest request{};
    int threads = 0;                 ///< threads of CPU kernels; 0: one on each core
    std::optional<PlanPath> path{};  ///< the only path of a GPU that is chosen from (FLCE_PATH)
    bool without_library = false;    ///< plans that call cuBLASLt are passed over
};

/// Times that were measured, and of what.
struct MeasuredTime {
    double ms = 0;  ///< median of forward and backward together
    std::int64_t num_tokens = 0;
    std::size_t candidates = 0;  ///< candidates that the record compares
    std::string origin;          ///< the file, or "shipped with flce: NAME"
    bool other_kernels = false;  ///< measured with kernels of another version than this library's
};

struct PlanAnswer {
    Plan plan;
    std::string source;                      ///< source in a few words, for people
    std::optional<MeasuredTime> measured;    ///< time in the record that the plan is from, where the record is for the call's bucket of
                                             ///< tokens
    std::vector<std::string> passed_over{};  ///< better measured plans that the call's memory has no room for, and why
};

/// A device as calls on `threads` of its threads see it (0: all of its cores). GPUs are not changed.
[[nodiscard]] Device with_threads(Device device, int threads);

/// The median of a record that has timed exactly this plan on this device, for exactly query.request and with retained values as
/// RecordKey::retained says; records of this version's kernels come before others.
[[nodiscard]] std::optional<MeasuredTime> measured_time(const PlanQuery& query, const Plan& plan, std::string_view retained,
                                                        RecordStore& records);

/// An explicit plan; else the best legal one of the nearest record that has any; else the cost model's. Throws PlanError where the
/// explicit plan is not legal or there is none.
[[nodiscard]] PlanAnswer plan_for(const PlanQuery& query, RecordStore& records);
/// Reasons for the plan, for Explanation. The function goes through all candidates again, so it is for people who ask, not for each kernel.
[[nodiscard]] std::vector<std::string> answer_reasons(const PlanQuery& query, const PlanAnswer& answer);
/// One line: what forward and backward take over the query's bucket of tokens, measured where the plan's record is of that bucket, else
/// modelled.
[[nodiscard]] std::string time_reason(const PlanQuery& query, const PlanAnswer& answer);

}  // namespace flce
