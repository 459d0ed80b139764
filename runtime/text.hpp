// Numbers and messages as people read them.
#pragma once

#include <string>
#include <string_view>

namespace flce {

/// "412 B", "1.5 KiB", "64.0 MiB".
[[nodiscard]] std::string human_bytes(double bytes);
/// "812 ns", "3.42 ms", "1.25 s".
[[nodiscard]] std::string human_seconds(double seconds);
/// An error's message without the list of details that may follow it.
[[nodiscard]] std::string first_line(std::string_view text);

}  // namespace flce
