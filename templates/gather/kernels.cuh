// Everything that a generated configuration of path cuda_gather instantiates.
#pragma once

#include "flce/common/row_kernels.cuh"
#include "flce/common/shard_kernels.cuh"
#include "flce/gather/grad_weight.cuh"
#include "flce/gather/rows.cuh"
#include "flce/gather/sort.cuh"
