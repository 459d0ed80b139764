// Rules of cuda_sm80's kernels for tiles, and the resources that kernels take of an SM.
#pragma once

#include "generator/cuda/common/cuda_path.hpp"

namespace flce::sm80 {

[[nodiscard]] CudaPath::Reason tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);
[[nodiscard]] KernelBlock block(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);

}  // namespace flce::sm80
