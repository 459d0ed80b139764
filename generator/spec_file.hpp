// The one place where the generator layer touches a file: parse_spec("@file.json").
#pragma once

#include <string>
#include <string_view>

namespace flce {

/// The whole text of a small file. Throws EnvironmentError naming the path where it cannot be read, SpecError where it is beyond 1 MiB.
[[nodiscard]] std::string read_spec_file(std::string_view path);

}  // namespace flce
