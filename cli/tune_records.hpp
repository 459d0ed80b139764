// flce tune --show, --diff, --merge: records that have been measured, in any file or directory.
#pragma once

#include <vector>

#include "cli/tune_flags.hpp"
#include "cli/tune_report.hpp"

namespace flce::cli {

/// Writes --report and the page beside it, where they were asked for. `tuned`: the device that was measured now; null: none.
void write_report(const TuneFlags& flags, const std::vector<NamedRecord>& records, const Device* tuned);

// Actions of flce tune on records. Each returns an exit code.
[[nodiscard]] int show_records(const TuneFlags& flags);
[[nodiscard]] int diff_records(const TuneFlags& flags);
/// Records of one key become one; with --out they are written there (a directory where there are several keys), else into the user's
/// directory.
[[nodiscard]] int merge_records(const TuneFlags& flags);

}  // namespace flce::cli
