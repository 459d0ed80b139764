// 9.7.16 wgmma: d += a · b by a warpgroup, both operands in shared memory, fp32 accumulation. Operands are described by matrix
// descriptors; kTransA and kTransB are 1 where the operand's dimension of the result is the contiguous one.
#pragma once

#include "flce/sm90/ptx.cuh"

namespace flce::ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// The accumulators of a warp: d[j][…] is the m64n8 piece j. Operand lists for the widths that tiles use, and for eight
// columns.
#define FLCE_ACCUMULATORS_4(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define FLCE_ACCUMULATORS_16(d, j) \
    FLCE_ACCUMULATORS_4(d, j), FLCE_ACCUMULATORS_4(d, j + 1), FLCE_ACCUMULATORS_4(d, j + 2), FLCE_ACCUMULATORS_4(d, j + 3)
#define FLCE_ACCUMULATORS_64(d, j) \
    FLCE_ACCUMULATORS_16(d, j), FLCE_ACCUMULATORS_16(d, j + 4), FLCE_ACCUMULATORS_16(d, j + 8), FLCE_ACCUMULATORS_16(d, j + 12)
#define FLCE_REGISTERS_4 "%0, %1, %2, %3"
#define FLCE_REGISTERS_32                                                    \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLCE_REGISTERS_64                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLCE_REGISTERS_96                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLCE_REGISTERS_128                                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define FLCE_WGMMA(type, n, count, accumulators, a, b, trans_a, trans_b)                            \
    asm volatile(                                                                                   \
        "{\n"                                                                                       \
        ".reg .pred keep;\n"                                                                        \
        "setp.eq.u32 keep, 0, 0;\n"                                                                 \
        "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FLCE_REGISTERS_##count \
        "}, %" #a ", %" #b ", keep, 1, 1, %" #trans_a ", %" #trans_b                                \
        ";\n"                                                                                       \
        "}\n"                                                                                       \
        : accumulators                                                                              \
        : "l"(descriptor_a), "l"(descriptor_b), "n"(kTransA), "n"(kTransB))

#define FLCE_ACC FLCE_ACCUMULATORS_4(d, 0)
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_m64n8k16_bf16(float (&d)[1][4], unsigned long long descriptor_a, unsigned long long descriptor_b) {
    FLCE_WGMMA("bf16", 8, 4, FLCE_ACC, 4, 5, 6, 7);
}
#undef FLCE_ACC
#define FLCE_ACC FLCE_ACCUMULATORS_16(d, 0), FLCE_ACCUMULATORS_16(d, 4)
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_m64n64k16_bf16(float (&d)[8][4], unsigned long long descriptor_a, unsigned long long descriptor_b) {
    FLCE_WGMMA("bf16", 64, 32, FLCE_ACC, 32, 33, 34, 35);
}
#undef FLCE_ACC
#define FLCE_ACC FLCE_ACCUMULATORS_64(d, 0)
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_m64n128k16_bf16(float (&d)[16][4], unsigned long long descriptor_a, unsigned long long descriptor_b) {
    FLCE_WGMMA("bf16", 128, 64, FLCE_ACC, 64, 65, 66, 67);
}
#undef FLCE_ACC
#define FLCE_ACC FLCE_ACCUMULATORS_64(d, 0), FLCE_ACCUMULATORS_16(d, 16), FLCE_ACCUMULATORS_16(d, 20)
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_m64n192k16_bf16(float (&d)[24][4], unsigned long long descriptor_a, unsigned long long descriptor_b) {
    FLCE_WGMMA("bf16", 192, 96, FLCE_ACC, 96, 97, 98, 99);
}
#undef FLCE_ACC
#define FLCE_ACC FLCE_ACCUMULATORS_64(d, 0), FLCE_ACCUMULATORS_64(d, 16)
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_m64n256k16_bf16(float (&d)[32][4], unsigned long long descriptor_a, unsigned long long descriptor_b) {
    FLCE_WGMMA("bf16", 256, 128, FLCE_ACC, 128, 129, 130, 131);
}
#undef FLCE_ACC
#define FLCE_ACC FLCE_ACCUMULATORS_4(d, 0)
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_m64n8k16_f16(float (&d)[1][4], unsigned long long descriptor_a, unsigned long long descriptor_b) {
    FLCE_WGMMA("f16", 8, 4, FLCE_ACC, 4, 5, 6, 7);
}
#undef FLCE_ACC
#define FLCE_ACC FLCE_ACCUMULATORS_16(d, 0), FLCE_ACCUMULATORS_16(d, 4)
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_m64n64k16_f16(float (&d)[8][4], unsigned long long descriptor_a, unsigned long long descriptor_b) {
    FLCE_WGMMA("f16", 64, 32, FLCE_ACC, 32, 33, 34, 35);
}
#undef FLCE_ACC
#define FLCE_ACC FLCE_ACCUMULATORS_64(d, 0)
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_m64n128k16_f16(float (&d)[16][4], unsigned long long descriptor_a, unsigned long long descriptor_b) {
    FLCE_WGMMA("f16", 128, 64, FLCE_ACC, 64, 65, 66, 67);
}
#undef FLCE_ACC
#define FLCE_ACC FLCE_ACCUMULATORS_64(d, 0), FLCE_ACCUMULATORS_16(d, 16), FLCE_ACCUMULATORS_16(d, 20)
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_m64n192k16_f16(float (&d)[24][4], unsigned long long descriptor_a, unsigned long long descriptor_b) {
    FLCE_WGMMA("f16", 192, 96, FLCE_ACC, 96, 97, 98, 99);
}
#undef FLCE_ACC
#define FLCE_ACC FLCE_ACCUMULATORS_64(d, 0), FLCE_ACCUMULATORS_64(d, 16)
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_m64n256k16_f16(float (&d)[32][4], unsigned long long descriptor_a, unsigned long long descriptor_b) {
    FLCE_WGMMA("f16", 256, 128, FLCE_ACC, 128, 129, 130, 131);
}
#undef FLCE_ACC

#undef FLCE_WGMMA
#undef FLCE_ACCUMULATORS_64
#undef FLCE_ACCUMULATORS_16
#undef FLCE_ACCUMULATORS_4
#undef FLCE_REGISTERS_4
#undef FLCE_REGISTERS_32
#undef FLCE_REGISTERS_64
#undef FLCE_REGISTERS_96
#undef FLCE_REGISTERS_128

}  // namespace flce::ptx
