// From accumulators to memory: whole rows of a tile in 16-byte pieces.
#pragma once

#include "flce/mainloop_sm80.cuh"

namespace flce {

/// Where a tile of a row-major matrix goes and how much of it exists.
template <class T>
struct TileTarget {
    T* origin;
    long long ld;  // elements
    int rows;      // valid ones from the origin
    int columns;
};

/// Passes a tile of 16-bit values between memory and staging rows in shared memory, padded by one access against bank conflicts.
template <class T, class TileT, bool kAligned>
struct StagedTile {
    static constexpr int kPitch = TileT::kBlockN * 2 + 16;
    static constexpr int kChunks = TileT::kBlockN / 8;
    static constexpr int kBytes = TileT::kBlockM * kPitch;

    static __device__ __forceinline__ unsigned pair(int row, int column) { return static_cast<unsigned>(row * kPitch + column * 2); }

    /// `move(staging offset, element pointer, count of valid elements, whole)` for every 8 elements of this thread.
    template <class Move>
    static __device__ __forceinline__ void for_each(const TileTarget<T>& target, const Move& move) {
#pragma unroll 4
        for (int c = static_cast<int>(threadIdx.x); c < TileT::kBlockM * kChunks; c += TileT::kThreads) {
            const int row = c / kChunks;
            const int column = c % kChunks * 8;
            const int count = min(target.columns - column, 8);
            if (row < target.rows && count > 0) move(pair(row, column), target.origin + row * target.ld + column, count);
        }
    }

    static __device__ __forceinline__ void read(const TileTarget<T>& target, unsigned smem) {
        for_each(target, [&](unsigned offset, const T* from, int count) {
            unsigned words[4] = {0u, 0u, 0u, 0u};
            if (kAligned && count == 8) {
                ptx::ld_global_v4(words, from);
            } else {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    if (e < count) words[e / 2] |= static_cast<unsigned>(from[e].bits) << (e % 2 * 16);
                }
            }
            ptx::st_shared_v4(smem + offset, words);
        });
    }

    static __device__ __forceinline__ void write(const TileTarget<T>& target, unsigned smem) {
        for_each(target, [&](unsigned offset, T* to, int count) {
            unsigned words[4];
            ptx::ld_shared_v4(words, smem + offset);
            if (kAligned && count == 8) {
                ptx::st_global_v4(to, words);
            } else {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    if (e < count) to[e].bits = static_cast<unsigned short>(words[e / 2] >> (e % 2 * 16));
                }
            }
        });
    }
};

/// Calls `visit(row, column, first, second)` for the pairs of neighbouring accumulators.
template <class MainloopT, class TileT, class Visit>
__device__ __forceinline__ void for_each_pair(const MainloopT& mainloop, typename MainloopT::Accumulators& c, const Visit& visit) {
#pragma unroll
    for (int i = 0; i < MainloopT::kPiecesA; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < MainloopT::kColumnPieces; ++j)
                visit(mainloop.place.row(i, h), mainloop.place.column(j, 0), c[i][j][2 * h], c[i][j][2 * h + 1]);
}

/// c += what a row-major fp32 matrix holds. kAligned: pairs are 8-byte aligned.
template <class TileT, bool kAligned, class MainloopT>
__device__ __forceinline__ void add_tile(const MainloopT& mainloop, typename MainloopT::Accumulators& c, const TileTarget<float>& from) {
    for_each_pair<MainloopT, TileT>(mainloop, c, [&](int row, int column, float& first, float& second) {
        const float* at = from.origin + row * from.ld + column;
        if (row < from.rows && column < from.columns) {
            if (kAligned && column + 1 < from.columns) {
                const float2 old = *reinterpret_cast<const float2*>(at);
                first += old.x;
                second += old.y;
            } else {
                first += at[0];
                if (column + 1 < from.columns) second += at[1];
            }
        }
    });
}

/// Writes c, in fp32 straight from the registers (four threads fill a sector), 16-bit types through shared memory. kAccumulate adds what is
/// there first and rounds once. The mainloop's ring must be drained.
template <class Out, class TileT, bool kAligned, bool kAccumulate, class MainloopT>
__device__ __forceinline__ void store_tile(const MainloopT& mainloop, typename MainloopT::Accumulators& c, const TileTarget<Out>& target) {
    if constexpr (sizeof(Out) == 4) {
        if constexpr (kAccumulate) add_tile<TileT, kAligned>(mainloop, c, target);
        for_each_pair<MainloopT, TileT>(mainloop, c, [&](int row, int column, float first, float second) {
            float* at = target.origin + row * target.ld + column;
            if (row < target.rows && column < target.columns) {
                if (kAligned && column + 1 < target.columns) {
                    *reinterpret_cast<float2*>(at) = make_float2(first, second);
                } else {
                    at[0] = first;
                    if (column + 1 < target.columns) at[1] = second;
                }
            }
        });
    } else {
        using Staged = StagedTile<Out, TileT, kAligned>;
        if constexpr (kAccumulate) {
            Staged::read(target, mainloop.smem);
            __syncthreads();  // the old values are there for all
        }
        for_each_pair<MainloopT, TileT>(mainloop, c, [&](int row, int column, float first, float second) {
            const unsigned at = mainloop.smem + Staged::pair(row, column);
            if constexpr (kAccumulate) {
                const unsigned old = ptx::ld_shared_b32(at);
                first += Numeric<Out>::first(old);
                second += Numeric<Out>::second(old);
            }
            ptx::st_shared_b32(at, Numeric<Out>::pack(first, second));
        });
        __syncthreads();  // the tile is complete
        Staged::write(target, mainloop.smem);
    }
}

}  // namespace flce
