// The table of paths. A new one is a line here, and an include.
#include <fmt/format.h>

#include <array>

#include "flce/error.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/fp8/path.hpp"
#include "generator/cuda/gather/path.hpp"
#include "generator/cuda/lt/path.hpp"
#include "generator/cuda/sm80/path.hpp"
#include "generator/cuda/sm90/path.hpp"

namespace flce {

std::span<const CudaPath* const> cuda_paths() noexcept {
    static constexpr std::array<const CudaPath*, 6> kPaths = {&kPathSm80, &kPathSm90, &kPathLt, &kPathGather, &kPathFp8, &kPathFp8Sm89};
    return kPaths;
}

const CudaPath& cuda_path(PlanPath path) {
    for (const CudaPath* known : cuda_paths()) {
        if (known->id == path) return *known;
    }
    throw InternalError(fmt::format("path number {} is no GPU's", static_cast<int>(path)));
}

const CudaPath* own_cuda_path(const Spec& spec, const Device& device) {
    for (const CudaPath* path : cuda_paths()) {
        if (path->is_preferred(spec, device) && !path->problem(spec, device, Strategy::recompute)) return path;
    }
    return nullptr;
}

CudaProgram generate_cuda(const Spec& spec, const Device& device, const Plan& plan) {
    return cuda_path(plan.path).generate(spec, device, plan);
}

}  // namespace flce
