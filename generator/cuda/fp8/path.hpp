// The paths cuda_fp8 (Hopper's wgmma) and cuda_fp8_sm89 (mma.sync): products of numbers in 8 bits, for specs with fp8. They differ in their
// three GEMMs alone. The main loop's ring, clusters and panels of cuda_fp8 are those of cuda_sm90a (templates/sm90).
#pragma once

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/fp8/gemms.hpp"
#include "generator/cuda/fp8/layout.hpp"

namespace flce {

extern const CudaPath kPathFp8;
extern const CudaPath kPathFp8Sm89;

namespace fp8 {

[[nodiscard]] LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                            const ForwardLayoutFp8& layout);
[[nodiscard]] LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                             const BackwardLayoutFp8& layout);

}  // namespace fp8
}  // namespace flce
