// Path cuda_sm80: the launches of a forward pass.
#pragma once

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/common/workspace.hpp"
#include "generator/launch_program.hpp"

namespace flce::sm80 {

[[nodiscard]] LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                            const ForwardLayout& layout);

}  // namespace flce::sm80
