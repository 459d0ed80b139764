// Everything that a generated configuration of path cuda_lt instantiates.
#pragma once

#include "flce/common/dequantize_weight.cuh"
#include "flce/common/references.cuh"
#include "flce/common/retain_kernels.cuh"
#include "flce/common/round_weight.cuh"
#include "flce/common/row_kernels.cuh"
#include "flce/common/shard_kernels.cuh"
#include "flce/common/top_kernels.cuh"
#include "flce/lt/divergence.cuh"
#include "flce/lt/dlogits.cuh"
#include "flce/lt/finish.cuh"
#include "flce/lt/forward.cuh"
#include "flce/lt/stale_rows.cuh"
