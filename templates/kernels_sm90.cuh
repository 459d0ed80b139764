// Everything a generated configuration of path cuda_sm90a instantiates.
#pragma once

#include "flce/backward_chunks_sm90.cuh"
#include "flce/backward_sm90.cuh"
#include "flce/forward_sm90.cuh"
#include "flce/retain_kernels.cuh"
#include "flce/round_weight.cuh"
#include "flce/row_kernels.cuh"
