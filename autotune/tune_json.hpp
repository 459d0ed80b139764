// Records and runs of the tuner as JSON: what `flce tune --json` prints, and C and Python return.
#pragma once

#include "autotune/tuner.hpp"
#include "records/named_records.hpp"
#include "runtime/json.hpp"

namespace flce {

[[nodiscard]] NamedRecord named(const Tuned& tuned);
[[nodiscard]] Json record_summary(const NamedRecord& named);
/// One object: the keys of a single layer stand beside "items" too.
[[nodiscard]] Json tune_report_json(const Tuner& tuner);

}  // namespace flce
