// Logits from codes of hidden and of the weight, by turns: sums of their exponentials, and exponentials in 8 bits, both ways.
#pragma once

#include "flce/common/logit_epilogue.cuh"
#include "flce/fp8/codes.cuh"
#include "flce/fp8/mainloop.cuh"

namespace flce {

template <class Problem, class TileT>
struct LogitsFp8 {
    static_assert(TileT::kBlockM == 128 && TileT::kTurns && TileT::kBlockN % kFp8ClassGroup == 0);
    using Mainloop = MainloopFp8<TileT, Problem::int8_logits ? CodesFp8::s8_s8 : CodesFp8::e4m3_e4m3>;
    using Params = TemperedOf<Problem, Fp8LogitsParams>;
    enum : int { kPieces = Mainloop::kPiecesA };
    enum : int { kColumnPieces = Mainloop::kColumnPieces };
    enum : int { kPanelBytes = TileT::kBlockN * kFp8TokenGroup };
    enum : int { kPanelsAt = Mainloop::kRingBytes };
    enum : int { kBarriersAt = kPanelsAt + TileT::kConsumers * kPanelBytes };
    enum : int { kSmemBytes = kBarriersAt + Mainloop::kBarrierBytes };
    enum : int { kThreads = TileT::kThreads };
    /// Registers of the producer's threads and of consumers': 128 · 24 + 256 · 240 ≤ 65536.
    enum : int { kFewRegisters = 24 };
    enum : int { kManyRegisters = 240 };
    /// Powers of two above a row's own from which on exponentials are not added up as they are.
    enum : int { kMostAbove = 100 };
    using Logits = float[kPieces][kColumnPieces][4];
    using OfRows = float[kPieces][2];
    using Fields = PartialFields<Problem>;

    const Params& p;
    Mainloop loop;
    TileWalk<TileT, 2 * Problem::raster> walk;  // operands of half the bytes
    bool issues;

    __device__ __forceinline__ explicit LogitsFp8(const Params& params)
        : p(params), loop(dynamic_smem, kBarriersAt), walk(params.rows, params.columns), issues(threadIdx.x % 128 == 0) {}

    __device__ __forceinline__ void run() {
        const unsigned clusters = gridDim.x / TileT::kCluster;
        const unsigned first = blockIdx.x / TileT::kCluster;
        constexpr int kSlices = ceil_div(Problem::hidden_size, Mainloop::kDepth);
        const bool idle = p.unless != nullptr && *p.unless == 0u;
        if (loop.place.consumer < 0) {
            ptx::setmaxnreg_dec<kFewRegisters>();
            if (threadIdx.x == 0 && !idle) {
                for (unsigned t = first; walk.go_to(t, loop.rank); t += clusters) {
                    if (is_wanted()) loop.produce(p.hidden_map, p.weight_map, walk.m, walk.n, kSlices);
                }
            }
        } else {
            ptx::setmaxnreg_inc<kManyRegisters>();
            int holder = 0;
#pragma unroll 1
            for (unsigned t = first; !idle && go_to(t); t += clusters) {
                if (!is_wanted()) continue;
                const bool mine = holder == loop.place.consumer;
                holder ^= 1;
                if (!mine) {
                    loop.skip(kSlices);
                    continue;
                }
                typename Mainloop::Accumulators c;
                Mainloop::clear(c);
                loop.consume(c, kSlices);
                asm volatile("" : "+r"(loop.place.lane), "+r"(loop.place.warp));
                epilogue(c);
            }
            if (issues) ptx::cp_async_bulk_wait_group<0>();
        }
        loop.meet();
    }

private:
    /// Goes to a consumer's tile. Sizes of the walk are worked out again for each: beside the accumulators they would not fit.
    __device__ __forceinline__ bool go_to(unsigned tile) {
        int rows = p.rows;
        int columns = p.columns;
        asm volatile("" : "+r"(rows), "+r"(columns));
        const TileWalk<TileT, 2 * Problem::raster> again(rows, columns);
        walk.clusters_m = again.clusters_m;
        walk.tiles_n = again.tiles_n;
        walk.count = again.count;
        return walk.go_to(tile, loop.rank);
    }
    __device__ __forceinline__ bool is_wanted() const { return p.again == nullptr || p.again[walk.m / kFp8ClusterRows] != 0u; }

    __device__ __forceinline__ int row(int i, int h) const { return walk.m + loop.place.row(i, h); }
    /// A number of each of the thread's rows; `absent` behind the last row.
    __device__ __forceinline__ void load_rows(const float* from, float absent, OfRows& to) const {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) to[i][h] = ptx::ld_global(from + row(i, h), row(i, h) < p.rows, absent);
    }

    __device__ __forceinline__ void epilogue(typename Mainloop::Accumulators& c) {
        Logits z;
        to_products(c, z);
        OfRows weighted = {};
        to_logits<Problem>(
            p, loop.place, p.first_column + walk.n, TileT::kBlockN, [&](int of) { return temperature(walk.m + of); }, z, weighted);
        if constexpr (!Problem::int8_logits) write_targets(z);
        if constexpr (Problem::label_smoothing) {
            if (p.sums != 0) write_weighted(weighted);
        }
        OfRows powers;
        load_rows(p.powers, 0.f, powers);
        // Where biases were read as well, what follows from the lane does not fit beside the logits, and is worked out anew.
        if constexpr (Problem::bias) asm volatile("" : "+r"(loop.place.lane));
        const bool anew = p.sums != 0 && write_largest(z, powers);
        OfRows sums = {};
        add(z, powers, sums);
        if (p.sums != 0 && !anew) write_sums(powers, sums);
        if (walk.n < p.stored) send();
    }

    __device__ __forceinline__ float temperature(int of) const {
        if constexpr (Problem::temperature) return of < p.rows ? p.temperatures[of] : 1.f;
        return 1.f;
    }

    /// Targets among the thread's columns.
    __device__ __forceinline__ void write_targets(const Logits& z) const {
        const int first = p.first_column + walk.n + loop.place.column(0, 0);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int of = row(r / 2, r % 2);
            const int within = of < p.rows ? load_target<Problem>(p.targets, of) - first : -1;
            if (has_column<kColumnPieces>(within)) p.target_logits[of] = pick_column(z[r / 2], r % 2, within);
        }
    }
    /// A row's target has code 0, in both copies, which are there. A thread has a row.
    __device__ __forceinline__ void erase_target() const {
        int within = loop.place.warp * 32 + loop.place.lane;
        int m = walk.m;
        int n = walk.n;
        // Numbers that follow from these are worked out here: kept beside the accumulators they would not fit.
        asm volatile("" : "+r"(within), "+r"(m), "+r"(n));
        const int of = m + within;
        const int column = of < p.rows ? load_target<Problem>(p.targets, of) - (p.first_column + n) : -1;
        if (column < 0 || column >= TileT::kBlockN || n + column >= p.stored) return;
        p.exponentials[of * p.pitch + n + class_position(column)] = 0u;
        const int position = token_position(within);
        ptx::st_shared_b8(panel() + static_cast<unsigned>(column * kFp8TokenGroup + (position / 16 ^ column % 8) * 16 + position % 16), 0u);
    }

    /// Sums of codes become hidden · weightᵀ.
    __device__ __forceinline__ void to_products(const typename Mainloop::Accumulators& c, Logits& z) const {
        OfRows scales;
        load_rows(p.row_scales, 0.f, scales);
        const float* const of_columns = p.column_scales + walk.n + loop.place.column(0, 0);
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j) {
            const float2 scale = *reinterpret_cast<const float2*>(of_columns + j * 8);
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    z[i][j][2 * h] = fp8::product_of(static_cast<float>(c[i][j][2 * h]), scales[i][h], scale.x);
                    z[i][j][2 * h + 1] = fp8::product_of(static_cast<float>(c[i][j][2 * h + 1]), scales[i][h], scale.y);
                }
        }
    }

    /// Each row's largest logit of the tile, in all four of its lanes, is written. Returns whether a row of the warp is far above its
    /// power: then the sums are written as well, anew, with the largest logits as references.
    __device__ __forceinline__ bool write_largest(const Logits& z, const OfRows& powers) const {
        OfRows largest;
        bool far = false;
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float most = fmaxf(z[i][0][2 * h], z[i][0][2 * h + 1]);
#pragma unroll
                for (int j = 1; j < kColumnPieces; ++j) most = fmaxf(most, fmaxf(z[i][j][2 * h], z[i][j][2 * h + 1]));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                far = far || fp8::power_of_logit(most, powers[i][h]) > kMostAbove;
                largest[i][h] = most == -infinity() ? lowest_logit() : most;
            }
        put(largest, 0);
        far = __any_sync(0xffffffffu, far);
        if (far) add_anew(z, largest);
        return far;
    }
    __device__ __forceinline__ void add_anew(const Logits& z, const OfRows& largest) const {
        OfRows sums = {};
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) sums[i][h] += ptx::ex2_approx_ftz((z[i][j][2 * h + e] - largest[i][h]) * log2_e());
            }
        add_lanes(sums);
        put(sums, 1);
    }
    /// Sums of a row's four lanes, in all of them.
    static __device__ __forceinline__ void add_lanes(OfRows& sums) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            float& sum = sums[r / 2][r % 2];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        }
    }
    /// A quad's four rows' numbers are written by a lane each.
    __device__ __forceinline__ int row_of_lane() const {
        const int r = loop.place.lane % 4;
        return row(0, 0) + r / 2 * 64 + r % 2 * 8;
    }
    __device__ __forceinline__ float of_lane(const OfRows& numbers) const {
        const int r = loop.place.lane % 4;
        return r == 0 ? numbers[0][0] : r == 1 ? numbers[0][1] : r == 2 ? numbers[1][0] : numbers[1][1];
    }
    __device__ __forceinline__ float* partial_at(int field) const {
        return p.partials + (walk.n / TileT::kBlockN * +Fields::kCount + field) * p.partial_rows + row_of_lane();
    }
    __device__ __forceinline__ void put(const OfRows& numbers, int field) const {
        if (row_of_lane() < p.rows) *partial_at(field) = of_lane(numbers);
    }

    /// The tile's part of each row's Σ c_j·z_j.
    __device__ __forceinline__ void write_weighted(OfRows& weighted) const {
        add_lanes(weighted);
        put(weighted, Fields::kWeighted);
    }

    __device__ __forceinline__ unsigned panel() const {
        return loop.smem + kPanelsAt + static_cast<unsigned>(loop.place.consumer * kPanelBytes);
    }
    /// Adds a tile's exponentials to the rows' sums, and stores the codes of the columns before p.stored. A thread's 16 columns of a group
    /// of classes lie side by side in a row, and its four tokens of a column in a word.
    __device__ __forceinline__ void add(const Logits& z, const OfRows& powers, OfRows& sums) {
        if (walk.n >= p.stored) {
            add_groups<false>(z, powers, sums, 0u);
            return;
        }
        if (issues) ptx::cp_async_bulk_wait_group_read<0>();
        ptx::barrier_sync(1 + loop.place.consumer, 128);
        add_groups<true>(z, powers, sums, panel());
    }
    /// The tile's codes by columns leave the panel.
    __device__ __forceinline__ void send() {
        ptx::barrier_sync(1 + loop.place.consumer, 128);
        erase_target();
        ptx::fence_proxy_async();
        ptx::barrier_sync(1 + loop.place.consumer, 128);
        if (!issues) return;
        ptx::cp_async_bulk_tensor_2d_store(&p.turned_map, walk.m, walk.n, panel());
        ptx::cp_async_bulk_commit_group();
    }
    template <bool kStores>
    __device__ __forceinline__ void add_groups(const Logits& z, const OfRows& powers, OfRows& sums, unsigned panel) const {
#pragma unroll
        for (int group = 0; group < TileT::kBlockN / kFp8ClassGroup; ++group) add_group<kStores>(z, powers, sums, group, panel);
    }

    template <bool kStores>
    __device__ __forceinline__ void add_group(const Logits& z, const OfRows& powers, OfRows& sums, int group, unsigned panel) const {
        unsigned words[4][4];  // [row][16 columns]
#pragma unroll
        for (int jj = 0; jj < 4; ++jj) {
            unsigned w[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                float x[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float logit = z[r / 2][group * 8 + jj * 2 + e / 2][r % 2 * 2 + e % 2];
                    x[e] = ptx::ex2_approx_ftz(fp8::power_of_logit(logit, powers[r / 2][r % 2]));
                }
                sums[r / 2][r % 2] += (x[0] + x[1]) + (x[2] + x[3]);
                if constexpr (kStores) words[r][jj] = w[r] = codes_of(x, z, group * 8 + jj * 2, r);
            }
            if constexpr (kStores) put_turned(w, group * kFp8ClassGroup + jj * 16, panel);
        }
        if constexpr (kStores) put_rows(words, walk.n + group * kFp8ClassGroup);
    }
    /// Codes of a row's exponentials, whose first two columns are in piece `piece`.
    __device__ __forceinline__ unsigned codes_of(float (&x)[4], const Logits& z, int piece, int r) const {
        if constexpr (Problem::stores_derivative) {
            const LogitDerivative<Problem> derivative(p.transform, temperature(row(r / 2, r % 2)));
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] *= derivative(z[r / 2][piece + e / 2][r % 2 * 2 + e % 2]);
        }
        return pack_fp8<Problem::e5m2_dlogits>(x[0], x[1], x[2], x[3]);
    }
    /// A thread's 16 columns of a group, which begins at `first`, of its four rows.
    __device__ __forceinline__ void put_rows(const unsigned (&words)[4][4], int first) const {
        if (first >= p.stored) return;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            if (row(r / 2, r % 2) >= p.rows) continue;
            unsigned char* const at = p.exponentials + row(r / 2, r % 2) * p.pitch + (first + loop.place.lane % 4 * 16);
            *reinterpret_cast<uint4*>(at) = make_uint4(words[r][0], words[r][1], words[r][2], words[r][3]);
        }
    }
    /// Puts a thread's four rows of four columns, in 16 from `first` on, into the panel: bytes of a word become tokens, (i, h) = (0, 0),
    /// (0, 1), (1, 0), (1, 1).
    __device__ __forceinline__ void put_turned(unsigned (&w)[4], int first, unsigned panel) const {
        const int chunk = loop.place.warp * 2 + loop.place.lane / 16;
        const int within = loop.place.lane / 4 % 4 * 4;
        turn_4x4(w);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int column = first + e / 2 * 8 + loop.place.lane % 4 * 2 + e % 2;
            ptx::st_shared_b32(panel + static_cast<unsigned>(column * kFp8TokenGroup + ((chunk ^ (column & 7)) * 16) + within), w[e]);
        }
    }

    /// The tile's part of each row's sums, of which its largest logit, which this lane has written, is the reference.
    __device__ __forceinline__ void write_sums(const OfRows& powers, OfRows& sums) const {
        add_lanes(sums);
        if (row_of_lane() >= p.rows) return;
        const float largest = *static_cast<volatile float*>(partial_at(0));
        // Sums far below the power are 0, or nothing beside those of other tiles: their factor stays finite.
        const float share = ptx::ex2_approx_ftz(fminf(-fp8::power_of_logit(largest, of_lane(powers)), +kMostAbove));
        *partial_at(1) = of_lane(sums) * share;
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void logits_fp8(const TemperedOf<Problem, Fp8LogitsParams>& p) {
    prefetch_maps(p.hidden_map, p.weight_map, p.turned_map);
    LogitsFp8<Problem, TileT>(p).run();
}

}  // namespace flce
