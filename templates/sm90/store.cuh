// Stores a consumer's accumulators.
#pragma once

#include "flce/sm90/mainloop.cuh"

namespace flce {

/// Shared memory through which a consumer hands results to the copy engine: panels of 64 rows × 128 bytes, swizzled. kWidth panels side by
/// side go out at once, kBuffers such groups are used in turn.
template <class T, class TileT, int kWidth, int kBuffers>
struct PanelStore {
    enum : int { kPanelBytes = 64 * 128 };
    enum : int { kPanelColumns = 128 / static_cast<int>(sizeof(T)) };
    enum : int { kConsumerBytes = kPanelBytes * kWidth * kBuffers };
    enum : int { kBarrierBytes = 0 };
    enum : int { kBytes = kConsumerBytes * TileT::kConsumers };

    PlaceSm90<TileT> place;
    unsigned staging;  ///< this consumer's panels
    unsigned group;    ///< the group at hand
    bool issues;       ///< one thread hands panels over

    /// `consumer_bytes`: from one consumer's panels to the other's, where they share the place with others.
    __device__ __forceinline__ PanelStore(unsigned all_staging, const PlaceSm90<TileT>& place_, int consumer_bytes = kConsumerBytes)
        : place(place_),
          staging(all_staging + static_cast<unsigned>(max(place.consumer, 0) * consumer_bytes)),
          group(staging),
          issues(threadIdx.x % 128 == 0) {}

    /// Waits until the group's last contents have left.
    __device__ __forceinline__ void open() const {
        if (issues) ptx::cp_async_bulk_wait_group_read<kBuffers - 1>();
        ptx::barrier_sync(1 + place.consumer, 128);
    }

    /// Writes factor · accumulators [first, …) of a row into the group, rounded to T.
    template <int kColumnPieces>
    __device__ __forceinline__ void put(const float (&c)[kColumnPieces][4], int h, int first, float factor) const {
        const unsigned base = row_address(group, h);
#pragma unroll
        for (int j = 0; j < kPanelColumns / 8 * kWidth; ++j) {
            const unsigned panel = static_cast<unsigned>(j * 8 / kPanelColumns * kPanelBytes);
            const unsigned chunk =
                static_cast<unsigned>(j * 8 % kPanelColumns * static_cast<int>(sizeof(T)));  // bytes from the row's start
            const float low = c[first + j][2 * h] * factor;
            const float high = c[first + j][2 * h + 1] * factor;
            if constexpr (sizeof(T) == 4) {
                ptx::st_shared_v2_f32((base ^ chunk) + panel, low, high);
            } else {
                ptx::st_shared_b32((base ^ chunk) + panel, Numeric<T>::pack(low, high));
            }
        }
    }

    /// Hands the group over, to be written from (x, y) of `map` on, or added to the memory's contents; elements outside the map are not
    /// written.
    template <class Map>
    __device__ __forceinline__ void close(const Map& map, int x, int y, bool add = false) {
        ptx::fence_proxy_async();
        ptx::barrier_sync(1 + place.consumer, 128);
        if (issues) {
#pragma unroll
            for (int panel = 0; panel < kWidth; ++panel) {
                copy(map, x + panel * kPanelColumns, y, group + static_cast<unsigned>(panel * kPanelBytes), add);
            }
            ptx::cp_async_bulk_commit_group();
        }
        if constexpr (kBuffers > 1)
            group = group == staging + kConsumerBytes - kPanelBytes * kWidth ? staging : group + kPanelBytes * kWidth;
    }

    /// Shared memory may go away after this.
    __device__ __forceinline__ void finish() const {
        if (issues) ptx::cp_async_bulk_wait_group<0>();
    }

protected:
    /// Place of this thread's first elements of a row. Eight rows, eight different chunks of 16 bytes: no bank twice.
    __device__ __forceinline__ unsigned row_address(unsigned panels, int h) const {
        const int row = place.warp * 16 + h * 8 + place.lane / 4;
        unsigned base = panels + static_cast<unsigned>(row * 128 + ((row & 7) * 16 ^ place.lane % 4 * 2 * static_cast<int>(sizeof(T))));
        asm volatile("" : "+r"(base));  // eight addresses kept from tile to tile would not fit beside the accumulators
        return base;
    }

private:
    static __device__ __forceinline__ void copy(const TensorMap& map, int x, int y, unsigned from, bool add) {
        if (add) {
            ptx::cp_reduce_async_bulk_tensor_2d_add(&map, x, y, from);
        } else {
            ptx::cp_async_bulk_tensor_2d_store(&map, x, y, from);
        }
    }
    static __device__ __forceinline__ void copy(const BlockedMap& m, int x, int y, unsigned from, bool /*add*/) {
        ptx::cp_async_bulk_tensor_3d_store(&m.map, m.column(x), y, m.block(x), from);
    }
};

/// Panels of a 16-bit matrix that is added to: the copy engine brings the memory's contents, the first two panels of a tile while it is
/// multiplied.
template <class T, class TileT>
struct PanelUpdate : PanelStore<T, TileT, 1, 2> {
    using Store = PanelStore<T, TileT, 1, 2>;
    enum : int { kBuffers = 2 };
    enum : int { kBarrierBytes = 8 * kBuffers * TileT::kConsumers };
    enum : int { kBytes = Store::kBytes + kBarrierBytes };

    unsigned barriers;
    unsigned parities = 0;  ///< a bit each

    /// All threads of a consumer.
    __device__ __forceinline__ PanelUpdate(unsigned all_staging, const PlaceSm90<TileT>& place, int consumer_bytes = Store::kConsumerBytes)
        : Store(all_staging, place, consumer_bytes) {
        barriers = all_staging + static_cast<unsigned>(consumer_bytes * TileT::kConsumers + 8 * kBuffers * max(place.consumer, 0));
        if (place.consumer < 0) return;
        if (this->issues) {
            for (int buffer = 0; buffer < kBuffers; ++buffer) ptx::mbarrier_init(barrier(buffer), 1);
            ptx::fence_mbarrier_init();
        }
        ptx::barrier_sync(1 + place.consumer, 128);
    }

    /// Brings a tile's panel number `panel`, from (x, y) of `map`, when its buffer's last contents have left.
    __device__ __forceinline__ void fetch(const TensorMap& map, int panel, int x, int y) const {
        if (!this->issues) return;
        const int buffer = panel % kBuffers;
        ptx::cp_async_bulk_wait_group_read<0>();
        ptx::mbarrier_arrive_expect_tx(barrier(buffer), Store::kPanelBytes);
        ptx::cp_async_bulk_tensor_2d_load(this->staging + static_cast<unsigned>(buffer * Store::kPanelBytes), &map, x, y, barrier(buffer));
    }

    /// c = factor · c + a panel as it lies at `from`, for accumulators [first, …).
    template <int kColumnPieces>
    __device__ __forceinline__ void add_old(unsigned from, float (&c)[kColumnPieces][4], int first, float factor) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned base = this->row_address(from, h);
#pragma unroll
            for (int j = 0; j < Store::kPanelColumns / 8; ++j) {
                const unsigned old = ptx::ld_shared_b32(base ^ static_cast<unsigned>(j * 8 * static_cast<int>(sizeof(T))));
                c[first + j][2 * h] = c[first + j][2 * h] * factor + Numeric<T>::first(old);
                c[first + j][2 * h + 1] = c[first + j][2 * h + 1] * factor + Numeric<T>::second(old);
            }
        }
    }

    /// Adds factor · accumulators [first, …) to the panel, rounded once.
    template <int kColumnPieces>
    __device__ __forceinline__ void add(const float (&c)[kColumnPieces][4], int panel, int first, float factor) {
        const int buffer = panel % kBuffers;
        ptx::mbarrier_wait_parity(barrier(buffer), parities >> buffer & 1u);
        parities ^= 1u << buffer;
        this->group = this->staging + static_cast<unsigned>(buffer * Store::kPanelBytes);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned base = this->row_address(this->group, h);
#pragma unroll
            for (int j = 0; j < Store::kPanelColumns / 8; ++j) {
                const unsigned at = base ^ static_cast<unsigned>(j * 8 * static_cast<int>(sizeof(T)));
                const unsigned old = ptx::ld_shared_b32(at);
                const float low = c[first + j][2 * h] * factor + Numeric<T>::first(old);
                const float high = c[first + j][2 * h + 1] * factor + Numeric<T>::second(old);
                ptx::st_shared_b32(at, Numeric<T>::pack(low, high));
            }
        }
    }

private:
    __device__ __forceinline__ unsigned barrier(int buffer) const { return barriers + 8u * static_cast<unsigned>(buffer); }
};

/// Reads or writes two neighbouring elements of a row-major matrix, the second only where it exists. kAligned: it always does.
template <class T, bool kAligned>
struct Pair {
    static __device__ __forceinline__ float2 load(const T* at, bool both) {
        if constexpr (kAligned && sizeof(T) == 4) return *reinterpret_cast<const float2*>(at);
        if constexpr (kAligned && sizeof(T) == 2) {
            const unsigned pair = *reinterpret_cast<const unsigned*>(at);
            return make_float2(Numeric<T>::first(pair), Numeric<T>::second(pair));
        }
        return make_float2(to_float(at[0]), both ? to_float(at[1]) : 0.f);
    }
    static __device__ __forceinline__ void store(T* at, bool both, float first, float second) {
        if constexpr (kAligned && sizeof(T) == 4) {
            *reinterpret_cast<float2*>(at) = make_float2(first, second);
        } else if constexpr (kAligned) {
            *reinterpret_cast<unsigned*>(at) = Numeric<T>::pack(first, second);
        } else {
            at[0] = Numeric<T>::from_float(first);
            if (both) at[1] = Numeric<T>::from_float(second);
        }
    }
};

/// Calls `visit(pointer, both, first, second)` for the pairs of neighbouring accumulators that lie in `target`.
template <bool kAligned, class T, class MainloopT, class Visit>
__device__ __forceinline__ void for_each_pair_sm90(const MainloopT& mainloop, typename MainloopT::Accumulators& c,
                                                   const TileTarget<T>& target, const Visit& visit) {
    const int row0 = mainloop.place.row(0, 0);
    const int column0 = mainloop.place.column(0, 0);
    T* const first_row = target.origin + row0 * target.ld + column0;
#pragma unroll
    for (int i = 0; i < MainloopT::kPiecesA; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = i * 64 + h * 8;
            T* const at = first_row + row * target.ld;
            const int columns = row < target.rows - row0 ? target.columns - column0 : 0;
#pragma unroll
            for (int j = 0; j < MainloopT::kColumnPieces; ++j) {
                if (j * 8 < columns) visit(at + j * 8, kAligned || j * 8 + 1 < columns, c[i][j][2 * h], c[i][j][2 * h + 1]);
            }
        }
    }
}

/// Writes factor · c to rows of a matrix with an even number of columns, each where `row_of` says.
template <class T, class MainloopT, class RowOf>
__device__ __forceinline__ void store_rows_sm90(const MainloopT& mainloop, typename MainloopT::Accumulators& c, const TileTarget<T>& to,
                                                float factor, const RowOf& row_of) {
    const int column0 = mainloop.place.column(0, 0);
#pragma unroll
    for (int i = 0; i < MainloopT::kPiecesA; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = mainloop.place.row(i, h);
            if (row >= to.rows) continue;
            T* const at = to.origin + row_of(row) * to.ld + column0;
#pragma unroll
            for (int j = 0; j < MainloopT::kColumnPieces; ++j) {
                if (j * 8 + column0 < to.columns)
                    Pair<T, true>::store(at + j * 8, true, c[i][j][2 * h] * factor, c[i][j][2 * h + 1] * factor);
            }
        }
    }
}

/// c = what a row-major matrix holds; 0 outside.
template <bool kAligned, class T, class MainloopT>
__device__ __forceinline__ void load_tile_sm90(const MainloopT& mainloop, typename MainloopT::Accumulators& c, const TileTarget<T>& from) {
    for_each_pair_sm90<kAligned>(mainloop, c, from, [](const T* at, bool both, float& first, float& second) {
        const float2 old = Pair<T, kAligned>::load(at, both);
        first = old.x;
        second = old.y;
    });
}

/// c += what a row-major matrix holds.
template <bool kAligned, class T, class MainloopT>
__device__ __forceinline__ void add_tile_sm90(const MainloopT& mainloop, typename MainloopT::Accumulators& c, const TileTarget<T>& from) {
    for_each_pair_sm90<kAligned>(mainloop, c, from, [](const T* at, bool both, float& first, float& second) {
        const float2 old = Pair<T, kAligned>::load(at, both);
        first += old.x;
        second += old.y;
    });
}

/// Writes factor · c, kAccumulate: plus the memory's contents, rounded once. kAligned: pairs exist or not, and are aligned.
template <bool kAligned, bool kAccumulate, class T, class MainloopT>
__device__ __forceinline__ void store_tile_sm90(const MainloopT& mainloop, typename MainloopT::Accumulators& c, const TileTarget<T>& to,
                                                float factor) {
    for_each_pair_sm90<kAligned>(mainloop, c, to, [&](T* at, bool both, float first, float second) {
        first *= factor;
        second *= factor;
        if constexpr (kAccumulate) {
            const float2 old = Pair<T, kAligned>::load(at, both);
            first += old.x;
            second += old.y;
        }
        Pair<T, kAligned>::store(at, both, first, second);
    });
}

}  // namespace flce
