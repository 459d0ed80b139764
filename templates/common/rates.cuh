// Kernels whose rates bound others: what a GPU multiplies with mma.sync, and what it reads from its L2 cache.
#pragma once

#include "flce/common/ptx.cuh"

namespace flce {

struct MmaRateParams {
    float* sums;  ///< [blocks, kThreads]
    int rounds;   ///< slices of 64 that a block multiplies
    int unused;
};

/// The tensor cores multiply what ldmatrix reads from shared memory. Nothing is copied and nothing is waited for, and operands are random,
/// since the power that a multiplication takes depends on its bits. Eight warps, each with 64 × 64 of a block's 128 × 256, as the widest
/// tiles of cuda_sm80 have them. kSlices slices of both operands, in rows of 128 bytes whose pieces of 16 are exchanged by the row's
/// number, so that ldmatrix meets no bank twice.
struct MmaRate {
    enum : int { kThreads = 256 };
    enum : int { kWarpsM = 2 };
    enum : int { kBlockM = 128 };
    enum : int { kBlockN = 256 };
    enum : int { kRowBytes = 128 };
    enum : int { kSlices = 2 };
    enum : int { kSliceBytes = (kBlockM + kBlockN) * kRowBytes };
    enum : int { kSmemBytes = kSlices * kSliceBytes };
    enum : int { kSteps = 4 };  ///< steps of 16 in a slice
    enum : int { kSum = 32 };   ///< rounds after which sums begin again: a hidden size of 2048
    /// Operations of a block in a round.
    enum : long long { kOperations = 2ll * kBlockM * kBlockN * 64 };

    struct Fragments {
        unsigned a[4][4];
        unsigned b[4][4];
    };

    unsigned smem;
    unsigned lane;
    unsigned first_a;  ///< the warp's first row of A, and of B behind it
    unsigned first_b;

    __device__ __forceinline__ explicit MmaRate(unsigned char* shared) : smem(ptx::shared_address(shared)), lane(threadIdx.x % 32) {
        const unsigned warp = threadIdx.x / 32;
        first_a = warp % kWarpsM * 64;
        first_b = kBlockM + warp / kWarpsM * 64;
    }

    static __device__ __forceinline__ unsigned scrambled(unsigned bits) {
        bits = (bits ^ bits >> 16) * 2146121005u;
        bits = (bits ^ bits >> 15) * 2221713035u;
        return bits ^ bits >> 16;
    }
    /// Nearly a normal distribution: the sum of four bytes, and so of every size, as hidden states and weights are.
    static __device__ __forceinline__ float random(unsigned number) {
        const unsigned bits = scrambled(number * 2654435761u + 1u);
        const int sum = static_cast<int>((bits & 255u) + (bits >> 8 & 255u) + (bits >> 16 & 255u) + (bits >> 24));
        return static_cast<float>(sum - 510) * 0x1p-7f;
    }
    static __device__ __forceinline__ void fill(unsigned char* shared) {
        for (unsigned i = threadIdx.x; i < kSmemBytes / 4; i += kThreads) {
            const unsigned number = 2u * (i + blockIdx.x * (kSmemBytes / 4));
            reinterpret_cast<unsigned*>(shared)[i] = ptx::cvt_rn_bf16x2_f32(random(number + 1u), random(number));
        }
        __syncthreads();
    }

    __device__ __forceinline__ unsigned address(unsigned slice, unsigned row, unsigned piece) const {
        return slice + row * kRowBytes + ((piece ^ row) & 7u) * 16u;
    }
    __device__ __forceinline__ void read(unsigned slice, int step, Fragments& f) const {
#pragma unroll
        for (unsigned piece = 0; piece < 4; ++piece) {
            const unsigned along = static_cast<unsigned>(step) * 2u;
            ptx::ldmatrix_x4(f.a[piece], address(slice, first_a + piece * 16 + lane % 16, along + lane / 16));
            ptx::ldmatrix_x4(f.b[piece], address(slice, first_b + piece * 16 + lane / 16 * 8 + lane % 8, along + lane / 8 % 2));
        }
    }
    static __device__ __forceinline__ void multiply(const Fragments& f, float (&c)[4][8][4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) ptx::mma_m16n8k16_bf16(c[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]);
    }

    static __device__ __forceinline__ void clear(float (&c)[4][8][4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) c[i][j][e] = 0.f;
    }

    __device__ __forceinline__ void run(const MmaRateParams& p) const {
        float c[4][8][4] = {};
        Fragments f[2];
        read(smem, 0, f[0]);
#pragma unroll 1
        for (int round = 0; round < p.rounds; ++round) {
            if (round % kSum == 0) clear(c);
            const unsigned slice = smem + static_cast<unsigned>(round % kSlices) * kSliceBytes;
            const unsigned next = smem + static_cast<unsigned>((round + 1) % kSlices) * kSliceBytes;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                read(step + 1 < kSteps ? slice : next, (step + 1) % kSteps, f[(step + 1) % 2]);
                multiply(f[step % 2], c);
            }
        }
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += c[i][j][0] + c[i][j][1] + c[i][j][2] + c[i][j][3];
        p.sums[blockIdx.x * kThreads + threadIdx.x] = sum;
    }
};

struct ReadRateParams {
    const uint4* data;  ///< [count]
    float* sums;        ///< [blocks, kThreads]
    long long count;
    int rounds;  ///< times that everything is read
    int unused;
};

/// All blocks together read the same memory again and again, past the SMs' own caches.
struct ReadRate {
    enum : int { kThreads = 512 };

    static __device__ __forceinline__ uint4 read(const uint4* from) {
        uint4 value;
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "l"(from));
        return value;
    }
    static __device__ __forceinline__ void run(const ReadRateParams& p) {
        const long long step = static_cast<long long>(gridDim.x) * kThreads;
        const long long thread = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
        unsigned sum = 0;
#pragma unroll 1
        for (int round = 0; round < p.rounds; ++round) {
#pragma unroll 8
            for (long long i = thread; i < p.count; i += step) {
                const uint4 value = read(p.data + i);
                sum ^= value.x ^ value.y ^ value.z ^ value.w;
            }
        }
        p.sums[thread] = static_cast<float>(sum);
    }
};

}  // namespace flce
