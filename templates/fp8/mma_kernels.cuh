// Everything that a generated configuration of path cuda_fp8_sm89 instantiates.
#pragma once

#include "flce/common/retain_kernels.cuh"
#include "flce/common/row_kernels.cuh"
#include "flce/common/shard_kernels.cuh"
#include "flce/fp8/mma_gradients.cuh"
#include "flce/fp8/mma_logits.cuh"
#include "flce/fp8/rows.cuh"
#include "flce/fp8/target_rows.cuh"
