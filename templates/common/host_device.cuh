// Functions of plain C++ that the host and kernels both call.
#pragma once

#if defined(__CUDACC__)
#define FLCE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLCE_HOST_DEVICE inline
#endif
