// Everything a generated configuration instantiates.
#pragma once

#include "flce/dlogits_kernel.cuh"
#include "flce/forward_kernel.cuh"
#include "flce/gradient_kernels.cuh"
#include "flce/round_weight.cuh"
#include "flce/row_kernels.cuh"
