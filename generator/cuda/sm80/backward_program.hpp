// Path cuda_sm80: the launches of a backward pass.
#pragma once

#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/common/workspace.hpp"
#include "generator/launch_program.hpp"

namespace flce::sm80 {

[[nodiscard]] LaunchProgram backward_program(const Spec& spec, const Plan& plan, const CudaSource& source, const BackwardLayout& layout);

}  // namespace flce::sm80
