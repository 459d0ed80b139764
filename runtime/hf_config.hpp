// The output layers of models, as their config.json describes them.
#pragma once

#include <filesystem>
#include <vector>

#include "flce/spec.hpp"

namespace flce {

/// The layers that a trainer of a config.json's model may ask for. Of tied weights there are two: the gradient added to the embedding
/// table's by the kernel, and written by itself, which is what a plain autograd step asks for (autograd adds the two). Throws ArgumentError
/// naming the file.
[[nodiscard]] std::vector<Spec> read_hf_config(const std::filesystem::path& path);

}  // namespace flce
