// Text for those who decode it: paths are bytes, and messages that name them need not be UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace flce {

/// `text` with every byte that is no part of a UTF-8 sequence written as \xNN.
[[nodiscard]] std::string as_utf8(std::string_view text);

}  // namespace flce
