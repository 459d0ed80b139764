// Stores accumulators: whole rows of a tile in 16-byte pieces.
#pragma once

#include "flce/sm80/mainloop.cuh"

namespace flce {

/// Passes a tile of 16-bit values between memory and staging rows in shared memory, padded by one access against bank conflicts.
template <class T, class TileT, bool kAligned>
struct StagedTile {
    enum : int { kPitch = TileT::kBlockN * 2 + 16 };
    enum : int { kChunks = TileT::kBlockN / 8 };
    enum : int { kBytes = TileT::kBlockM * kPitch };

    static __device__ __forceinline__ unsigned pair(int row, int column) { return static_cast<unsigned>(row * kPitch + column * 2); }

    /// `move(staging offset, element pointer, count of valid elements)` for every 8 elements of this thread.
    /// kAligned: they exist or not.
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
            if constexpr (kAligned) {
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
            if constexpr (kAligned) {
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

/// Shared memory of a kernel that writes one tile: the ring, and over it, when it is drained, the staging of a 16-bit tile.
template <class MainloopT, class TileT>
struct RingOrStaging {
    enum : int { kStagedBytes = StagedTile<typename MainloopT::T, TileT, true>::kBytes };
    enum : int { kBytes = MainloopT::kSmemBytes > kStagedBytes ? MainloopT::kSmemBytes : kStagedBytes };
};

/// Calls `visit(pointer, both, first, second)` for the pairs of neighbouring accumulators that lie in `target`, `both` false where only the
/// first one does. kAligned: pairs exist or not, and are 8-byte aligned.
template <bool kAligned, class MainloopT, class Visit>
__device__ __forceinline__ void for_each_pair(const MainloopT& mainloop, typename MainloopT::Accumulators& c,
                                              const TileTarget<float>& target, const Visit& visit) {
    const int row0 = mainloop.place.row(0, 0);
    const int column0 = mainloop.place.column(0, 0);
    float* const first_row = target.origin + row0 * target.ld + column0;
#pragma unroll
    for (int i = 0; i < MainloopT::kPiecesA; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = i * 16 + h * 8;
            float* const at = first_row + row * target.ld;
            const int columns = row < target.rows - row0 ? target.columns - column0 : 0;
#pragma unroll
            for (int j = 0; j < MainloopT::kColumnPieces; ++j) {
                if (j * 8 < columns) visit(at + j * 8, kAligned || j * 8 + 1 < columns, c[i][j][2 * h], c[i][j][2 * h + 1]);
            }
        }
    }
}

/// c += what a row-major fp32 matrix holds.
template <bool kAligned, class MainloopT>
__device__ __forceinline__ void add_tile(const MainloopT& mainloop, typename MainloopT::Accumulators& c, const TileTarget<float>& from) {
    for_each_pair<kAligned>(mainloop, c, from, [](const float* at, bool both, float& first, float& second) {
        if constexpr (kAligned) {
            const float2 old = *reinterpret_cast<const float2*>(at);
            first += old.x;
            second += old.y;
        } else {
            first += at[0];
            if (both) second += at[1];
        }
    });
}

/// Multiplies every accumulator.
template <class MainloopT>
__device__ __forceinline__ void scale_tile(typename MainloopT::Accumulators& c, float factor) {
#pragma unroll
    for (int i = 0; i < MainloopT::kPiecesA; ++i)
#pragma unroll
        for (int j = 0; j < MainloopT::kColumnPieces; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[i][j][e] *= factor;
}

/// Writes c, in fp32 straight from the registers (four threads fill a sector), 16-bit types through shared memory. kAccumulate adds the
/// memory's contents first and rounds once. The mainloop's ring must be drained. kAligned: rows are 16-byte aligned and 16-byte pieces
/// exist or not.
template <class Out, class TileT, bool kAligned, bool kAccumulate, class MainloopT>
__device__ __forceinline__ void store_tile(const MainloopT& mainloop, typename MainloopT::Accumulators& c, const TileTarget<Out>& target) {
    if constexpr (sizeof(Out) == 4) {
        if constexpr (kAccumulate) add_tile<kAligned>(mainloop, c, target);
        for_each_pair<kAligned>(mainloop, c, target, [](float* at, bool both, float first, float second) {
            if constexpr (kAligned) {
                *reinterpret_cast<float2*>(at) = make_float2(first, second);
            } else {
                at[0] = first;
                if (both) at[1] = second;
            }
        });
    } else {
        using Staged = StagedTile<Out, TileT, kAligned>;
        if constexpr (kAccumulate) {
            Staged::read(target, mainloop.smem);
            __syncthreads();  // the old values are there for all
        }
        const unsigned first = mainloop.smem + Staged::pair(mainloop.place.row(0, 0), mainloop.place.column(0, 0));
#pragma unroll
        for (int i = 0; i < MainloopT::kPiecesA; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const unsigned at = first + Staged::pair(i * 16 + h * 8, 0);
#pragma unroll
                for (int j = 0; j < MainloopT::kColumnPieces; ++j) {
                    float low = c[i][j][2 * h];
                    float high = c[i][j][2 * h + 1];
                    if constexpr (kAccumulate) {
                        const unsigned old = ptx::ld_shared_b32(at + j * 16);
                        low += Numeric<Out>::first(old);
                        high += Numeric<Out>::second(old);
                    }
                    ptx::st_shared_b32(at + j * 16, Numeric<Out>::pack(low, high));
                }
            }
        }
        __syncthreads();  // the tile is complete
        Staged::write(target, mainloop.smem);
    }
}

}  // namespace flce
