// Which plan a kernel gets: the caller's, a record's, or the cost model's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "autotune/record_store.hpp"
#include "flce/plan.hpp"

namespace flce {

struct PlanQuery {
    const Spec& spec;  ///< normalized
    const Device& device;
    std::string_view plan;  ///< canonical text from the caller; empty: choose one
    std::int64_t scratch_bytes = kDefaultScratchBytes;
    std::int64_t limit_bytes = 0;  ///< on workspace and retained together; 0: none
    std::int64_t num_tokens = 0;   ///< 0: not known
    int threads = 0;               ///< of CPU kernels; 0: one on each core
};

struct PlanAnswer {
    Plan plan;
    std::string source;  ///< in a few words, for people
};

/// An explicit plan; else the best legal one of the nearest record that has any; else the cost model's. Throws PlanError where the
/// explicit plan is not legal or there is none.
[[nodiscard]] PlanAnswer plan_for(const PlanQuery& query, RecordStore& records);
/// Why it is that plan, for Explanation. It goes through all candidates again: for whoever asks, not for each kernel.
[[nodiscard]] std::vector<std::string> answer_reasons(const PlanQuery& query, const PlanAnswer& answer);

}  // namespace flce
