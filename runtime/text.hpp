// Numbers, messages and files as people write and read them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace flce {

/// "1048576", "64K", "64M", "2G" (binary multiples, an optional "iB" or "B"). Throws ArgumentError naming the option.
[[nodiscard]] std::int64_t parse_bytes(std::string_view option, std::string_view text);
/// "412 B", "1.5 KiB", "64.0 MiB".
[[nodiscard]] std::string human_bytes(double bytes);
/// "812 ns", "3.42 ms", "1.25 s".
[[nodiscard]] std::string human_seconds(double seconds);
/// An error's message without the list of details that may follow it.
[[nodiscard]] std::string first_line(std::string_view text);

/// A file's text. Throws ArgumentError naming the file where it cannot be read.
[[nodiscard]] std::string read_text_file(const std::filesystem::path& path);

}  // namespace flce
