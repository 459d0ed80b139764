// The library's one logger: named "flce", to stderr. A program that has registered a spdlog logger of that name gets the messages instead.
#pragma once

#include <spdlog/logger.h>

#include <string>

namespace flce {

/// Starts at level warn; the runtime applies FLCE_LOG. Never destroyed, so that it may be used while the process shuts down.
[[nodiscard]] spdlog::logger& logger();

/// A warning about something that many objects of a process run into: said by the first, the others' are for debugging.
void warn_once_in_process(const std::string& message);

}  // namespace flce
