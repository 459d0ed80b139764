// The output layers of models, as their config.json describes them.
#pragma once

#include <filesystem>
#include <vector>

#include "flce/spec.hpp"

namespace flce {

/// The layers that a trainer of a config.json's model may ask for. Tied weights have two layers: one whose kernel adds the gradient to the
/// embedding table's, and one whose kernel writes the gradient by itself, as a plain autograd step asks for (autograd adds the two). Throws
/// ArgumentError naming the file.
[[nodiscard]] std::vector<Spec> read_hf_config(const std::filesystem::path& path);

}  // namespace flce
