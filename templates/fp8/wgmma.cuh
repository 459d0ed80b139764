// 9.7.16 wgmma of 8-bit operands: d += a · b by a warpgroup, both contiguous along k in shared memory, 32 deep. `keep` 0: d is ignored.
#pragma once

#include "flce/sm90/mainloop.cuh"

namespace flce::ptx {

#define FLCE_SUMS_4(type, d, j) "+" type(d[j][0]), "+" type(d[j][1]), "+" type(d[j][2]), "+" type(d[j][3])
#define FLCE_SUMS_16(type, d, j) \
    FLCE_SUMS_4(type, d, j), FLCE_SUMS_4(type, d, j + 1), FLCE_SUMS_4(type, d, j + 2), FLCE_SUMS_4(type, d, j + 3)
#define FLCE_SUMS_64(type, d, j) \
    FLCE_SUMS_16(type, d, j), FLCE_SUMS_16(type, d, j + 4), FLCE_SUMS_16(type, d, j + 8), FLCE_SUMS_16(type, d, j + 12)
#define FLCE_PLACES_32                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLCE_PLACES_64                                                                   \
    FLCE_PLACES_32                                                                       \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLCE_PLACES_96                                                                   \
    FLCE_PLACES_64                                                                       \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLCE_PLACES_128                                                                              \
    FLCE_PLACES_96                                                                                   \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define FLCE_WGMMA_K32(types, n, count, sums, a, b, kept, scales)                                                                        \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #kept                                                                        \
                 ", 0;\n"                                                                                                                \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32" types " {" FLCE_PLACES_##count "}, %" #a ", %" #b ", keep" scales ";\n}\n" \
                 : sums                                                                                                                  \
                 : "l"(descriptor_a), "l"(descriptor_b), "r"(keep))

#define FLCE_WGMMA_WIDTHS(name, Sum, letter, types, scales)                                                                              \
    __device__ __forceinline__ void name(Sum(&d)[8][4], unsigned long long descriptor_a, unsigned long long descriptor_b, int keep) {    \
        FLCE_WGMMA_K32(types, 64, 32, FLCE_ARGUMENTS(FLCE_SUMS_16(letter, d, 0), FLCE_SUMS_16(letter, d, 4)), 32, 33, 34, scales);       \
    }                                                                                                                                    \
    __device__ __forceinline__ void name(Sum(&d)[16][4], unsigned long long descriptor_a, unsigned long long descriptor_b, int keep) {   \
        FLCE_WGMMA_K32(types, 128, 64, FLCE_ARGUMENTS(FLCE_SUMS_64(letter, d, 0)), 64, 65, 66, scales);                                  \
    }                                                                                                                                    \
    __device__ __forceinline__ void name(Sum(&d)[24][4], unsigned long long descriptor_a, unsigned long long descriptor_b, int keep) {   \
        FLCE_WGMMA_K32(types, 192, 96,                                                                                                   \
                       FLCE_ARGUMENTS(FLCE_SUMS_64(letter, d, 0), FLCE_SUMS_16(letter, d, 16), FLCE_SUMS_16(letter, d, 20)), 96, 97, 98, \
                       scales);                                                                                                          \
    }                                                                                                                                    \
    __device__ __forceinline__ void name(Sum(&d)[32][4], unsigned long long descriptor_a, unsigned long long descriptor_b, int keep) {   \
        FLCE_WGMMA_K32(types, 256, 128, FLCE_ARGUMENTS(FLCE_SUMS_64(letter, d, 0), FLCE_SUMS_64(letter, d, 16)), 128, 129, 130, scales); \
    }
#define FLCE_ARGUMENTS(...) __VA_ARGS__

FLCE_WGMMA_WIDTHS(wgmma_e4m3_e4m3, float, "f", ".f32.e4m3.e4m3", ", 1, 1")
FLCE_WGMMA_WIDTHS(wgmma_e5m2_e4m3, float, "f", ".f32.e5m2.e4m3", ", 1, 1")
FLCE_WGMMA_WIDTHS(wgmma_e4m3_e5m2, float, "f", ".f32.e4m3.e5m2", ", 1, 1")
FLCE_WGMMA_WIDTHS(wgmma_s8_s8, int, "r", ".s32.s8.s8", "")

#undef FLCE_ARGUMENTS
#undef FLCE_WGMMA_WIDTHS
#undef FLCE_WGMMA_K32
#undef FLCE_PLACES_128
#undef FLCE_PLACES_96
#undef FLCE_PLACES_64
#undef FLCE_PLACES_32
#undef FLCE_SUMS_64
#undef FLCE_SUMS_16
#undef FLCE_SUMS_4

}  // namespace flce::ptx
