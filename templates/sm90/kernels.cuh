// Everything that a generated configuration of path cuda_sm90a instantiates.
#pragma once

#include "flce/common/dequantize_weight.cuh"
#include "flce/common/retain_kernels.cuh"
#include "flce/common/round_weight.cuh"
#include "flce/common/row_kernels.cuh"
#include "flce/common/shard_kernels.cuh"
#include "flce/common/top_kernels.cuh"
#include "flce/sm90/backward.cuh"
#include "flce/sm90/backward_chunks.cuh"
#include "flce/sm90/forward.cuh"
#include "flce/sm90/grad_weight.cuh"
#include "flce/sm90/named_tiles.cuh"
#include "flce/sm90/references.cuh"
#include "flce/sm90/scatter_rows.cuh"
