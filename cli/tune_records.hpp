// flce tune --show, --diff, --merge: records that have been measured, in any file or directory.
#pragma once

#include <vector>

#include "cli/tune_flags.hpp"
#include "cli/tune_report.hpp"

namespace flce::cli {

/// Writes --html, where it was asked for.
void write_html(const TuneFlags& flags, const std::vector<NamedRecord>& records);

// Actions of flce tune on records. Each returns an exit code.
[[nodiscard]] int show_records(const TuneFlags& flags);
[[nodiscard]] int diff_records(const TuneFlags& flags);
/// Records of one key become one; with --out they are written there (a directory where there are several keys), else into the user's
/// directory.
[[nodiscard]] int merge_records(const TuneFlags& flags);

}  // namespace flce::cli
