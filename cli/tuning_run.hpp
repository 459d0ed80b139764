// What a call of the tuner says of itself in the records that it writes.
#pragma once

#include <string>

#include "records/record.hpp"

namespace flce::cli {

/// Now, here: the date, flce's version, the device, its driver and clocks.
[[nodiscard]] TuningRun provenance(const Device& device, const std::string& commit);

/// Names a run: when, and which of those that began then.
[[nodiscard]] std::string run_id(const TuningRun& run);

}  // namespace flce::cli
