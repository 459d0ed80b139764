// The library's one logger: named "flce", to stderr. A program that has registered a spdlog logger of that name gets the messages instead.
#pragma once

#include <spdlog/logger.h>

namespace flce {

/// Starts at level warn; the runtime applies FLCE_LOG. Never destroyed, so that it may be used while the process shuts down.
[[nodiscard]] spdlog::logger& logger();

}  // namespace flce
