// Typing errors in a command line that cannot be parsed.
#pragma once

#include <span>
#include <string>

namespace CLI {
class App;
}

namespace flce::cli {

/// One sentence about the first word of `arguments` (without the program's name) that is no subcommand or option of `app`, with the nearest
/// that there is; empty where all of them are known.
[[nodiscard]] std::string unknown_name(const CLI::App& app, std::span<const char* const> arguments);

}  // namespace flce::cli
