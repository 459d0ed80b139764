// Records to test with.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "records/record.hpp"

namespace flce::test {

inline Device h100() { return describe_device("h100"); }
inline Spec tuned_spec() { return parse_spec("D=2048,V=151936,dtype=bf16"); }

inline TuningRun run_of(std::string driver = "580.1") {
    return {.date = "2026-11-21T12:00:00Z",
            .version = "0.1.0",
            .commit = "abc",
            .device = "NVIDIA H100 80GB HBM3",
            .driver = std::move(driver),
            .clocks = "1980 MHz"};
}

/// A record with times of the given plans in one run, ranked as they are listed.
inline Record record_of(const RecordKey& key, const std::vector<std::pair<std::string, std::vector<double>>>& times,
                        const std::string& run = "run1") {
    Record record{.key = key};
    record.runs[run] = run_of();
    int rank = 0;
    for (const auto& [plan, samples] : times) record.candidates[plan] = {.rank = rank++, .times_ms = {{run, samples}}};
    return record;
}

inline RecordKey key_at(const PlanRequest& request, std::string_view retained = kRetainedAutomatically) {
    return record_key(tuned_spec(), h100(), request, retained);
}
inline RecordKey key_at(std::int64_t num_tokens) { return key_at(PlanRequest{.num_tokens = num_tokens}); }

}  // namespace flce::test
