// Guess at the name that an unknown one was probably meant to be.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace flce {

/// The one of `names` that `asked` is most like, blind to case and to characters that are neither letter nor digit; empty where it is like
/// none of them. A name that holds the whole of `asked` is like it; so is one that a few letters (a third of the longer one's) have to be
/// changed, left out, put in or exchanged for. The first of several equally near names.
[[nodiscard]] std::string nearest_name(std::string_view asked, std::span<const std::string> names);

/// "; did you mean NAME?" with the nearest name; empty where there is none.
[[nodiscard]] std::string suggestion(std::string_view asked, std::span<const std::string> names);

}  // namespace flce
