// Origin of measurements: facts about itself that a run of the tuner writes into records.
#pragma once

#include <string>

#include "records/record.hpp"

namespace flce {

/// The run that begins now: the date, flce's version, the device, its driver and clocks.
[[nodiscard]] TuningRun provenance(const Device& device, const std::string& commit);

/// A run's id: its date and eight random digits.
[[nodiscard]] std::string run_id(const TuningRun& run);

}  // namespace flce
