// Tuning records for people: tables, differences, and one self-contained page.
#pragma once

#include <string>
#include <vector>

#include "autotune/tune_json.hpp"
#include "cli/command.hpp"
#include "records/named_records.hpp"

namespace flce::cli {

/// Text beside the seconds in a search's progress: "34 candidates, best 3.42 ms".
[[nodiscard]] std::string tuning_note(std::size_t candidates, double best_ms);

/// A record's layer and device, its runs, and its candidates, the quickest first: at most `most`, 0 for all. Says why where the chosen
/// candidate has not the least median.
[[nodiscard]] std::string record_table(const NamedRecord& named, std::size_t most);
/// Candidates of both records side by side, candidates of one alone, and other differences.
[[nodiscard]] std::string record_difference(const NamedRecord& a, const NamedRecord& b);
[[nodiscard]] Json record_difference_json(const NamedRecord& a, const NamedRecord& b);
/// One HTML page without anything from elsewhere: a section a record with candidates, times, the winner, and memory against time.
[[nodiscard]] std::string html_report(const std::vector<NamedRecord>& records);

}  // namespace flce::cli
