// Everything that a generated configuration of path cuda_sm80 instantiates.
#pragma once

#include "flce/common/dequantize_weight.cuh"
#include "flce/common/references.cuh"
#include "flce/common/retain_kernels.cuh"
#include "flce/common/round_weight.cuh"
#include "flce/common/row_kernels.cuh"
#include "flce/common/shard_kernels.cuh"
#include "flce/sm80/dlogits.cuh"
#include "flce/sm80/forward.cuh"
#include "flce/sm80/gradients.cuh"
