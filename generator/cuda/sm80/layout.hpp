// How forward of cuda_sm80 cuts its work: blocks of rows × parts of the vocabulary that are reduced apart (splits).
#pragma once

#include "generator/cuda/common/cuda_path.hpp"

namespace flce::sm80 {

[[nodiscard]] ForwardRows forward_rows(const Spec& spec, const Device& device, const Plan& plan);
/// Splits of a launch over `rows` tokens.
[[nodiscard]] Expr forward_splits(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows);

}  // namespace flce::sm80
