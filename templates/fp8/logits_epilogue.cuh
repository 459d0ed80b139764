// Epilogue of logits from codes, whatever multiplies them: sums of their exponentials, and exponentials in 8 bits, both ways.
#pragma once

#include "flce/common/logit_epilogue.cuh"
#include "flce/fp8/codes.cuh"

namespace flce {

/// Four warps have 128 rows of a tile, in two pieces of 64, and all of kColumns columns: accumulator [i][j][2·h + e] of a thread is at
/// place.row(i, h), place.column(j, e). Self says which columns and rows these are (first_row, first_column), and how exponentials
/// [classes, positions of tokens] leave (open_panel, put_turned, send, which also gives targets code 0).
template <class Self, class Problem, class MainloopT, class ParamsT>
struct LogitsEpilogueFp8 {
    using Params = ParamsT;
    enum : int { kPieces = MainloopT::kPiecesA };
    enum : int { kColumnPieces = MainloopT::kColumnPieces };
    enum : int { kColumns = 8 * kColumnPieces };
    static_assert(kPieces == 2 && kColumns % kFp8ClassGroup == 0, "a thread has four tokens of a class, and 16 classes of a group");
    /// Powers of two above a row's own from which on exponentials are not added up as they are.
    enum : int { kMostAbove = 100 };
    enum : int { kFarAbove = Problem::entropy ? 16 : +kMostAbove };  // sums of exponentials times logits are differences of these
    enum : int { kLeastPower = -200 };                               // exponentials of less are 0
    static constexpr float kNatsOfPower = 0.693147181f;
    using Logits = float[kPieces][kColumnPieces][4];
    using OfRows = float[kPieces][2];
    /// Sums of the rows' exponentials, and of these times powers of two above the rows' own, where the entropy is asked for.
    struct Sums {
        OfRows exponentials = {};
        OfRows with_powers = {};
    };
    using Fields = PartialFields<Problem>;

    const Params& p;
    MainloopT loop;

    __device__ __forceinline__ LogitsEpilogueFp8(const Params& params, const MainloopT& mainloop) : p(params), loop(mainloop) {}

    /// Works on a tile's sums of codes.
    __device__ __forceinline__ void epilogue(typename MainloopT::Accumulators& c) {
        Logits z;
        to_products(c, z);
        OfRows weighted = {};
        to_logits<Problem>(p, loop.place, p.first_column + n(), kColumns, [&](int of) { return temperature(m() + of); }, z, weighted);
        if constexpr (!Problem::int8_logits) write_targets(z);
        if constexpr (Problem::label_smoothing) {
            if (p.sums != 0) write_weighted(weighted);
        }
        OfRows powers;
        load_rows(p.powers, 0.f, powers);
        // Where biases were read as well, what follows from the lane does not fit beside the logits, and is worked out anew.
        if constexpr (Problem::bias) asm volatile("" : "+r"(loop.place.lane));
        const bool anew = p.sums != 0 && write_largest(z, powers);
        Sums sums;
        add(z, powers, sums);
        if (p.sums != 0 && !anew) write_sums(powers, sums);
        if (n() < p.stored) self().send();
    }

private:
    __device__ __forceinline__ Self& self() { return static_cast<Self&>(*this); }
    __device__ __forceinline__ const Self& self() const { return static_cast<const Self&>(*this); }
    __device__ __forceinline__ int m() const { return self().first_row(); }
    __device__ __forceinline__ int n() const { return self().first_column(); }

    __device__ __forceinline__ int row(int i, int h) const { return m() + loop.place.row(i, h); }
    /// A number of each of the thread's rows; `absent` behind the last row.
    __device__ __forceinline__ void load_rows(const float* from, float absent, OfRows& to) const {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) to[i][h] = ptx::ld_global(from + row(i, h), row(i, h) < p.rows, absent);
    }

    __device__ __forceinline__ float temperature(int of) const {
        if constexpr (Problem::temperature) return of < p.rows ? p.temperatures[of] : 1.f;
        return 1.f;
    }

    /// Targets among the thread's columns.
    __device__ __forceinline__ void write_targets(const Logits& z) const {
        const int first = p.first_column + n() + loop.place.column(0, 0);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int of = row(r / 2, r % 2);
            const int within = of < p.rows ? load_target<Problem>(p.targets, of) - first : -1;
            if (has_column<kColumnPieces>(within)) p.target_logits[of] = pick_column(z[r / 2], r % 2, within);
        }
    }
    /// Sums of codes become hidden · weightᵀ.
    __device__ __forceinline__ void to_products(const typename MainloopT::Accumulators& c, Logits& z) const {
        OfRows scales;
        load_rows(p.row_scales, 0.f, scales);
        const float* const of_columns = p.column_scales + n() + loop.place.column(0, 0);
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
                far = far || fp8::power_of_logit(most, powers[i][h]) > kFarAbove;
                largest[i][h] = most == -infinity() ? lowest_logit() : most;
            }
        put(largest, 0);
        far = __any_sync(0xffffffffu, far);
        if (far) add_anew(z, largest);
        return far;
    }
    __device__ __forceinline__ void add_anew(const Logits& z, const OfRows& largest) const {
        Sums sums;
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float power = (z[i][j][2 * h + e] - largest[i][h]) * log2_e();
                        const float exponential = ptx::ex2_approx_ftz(power);
                        sums.exponentials[i][h] += exponential;
                        if constexpr (Problem::entropy) add_with_power(exponential, power, sums.with_powers[i][h]);
                    }
            }
        add_lanes(sums.exponentials);
        put(sums.exponentials, 1);
        if constexpr (Problem::entropy) {
            add_lanes(sums.with_powers);
            if (row_of_lane() < p.rows) *partial_at(Fields::kExpZ) = of_lane(sums.with_powers) * kNatsOfPower;
        }
    }
    static __device__ __forceinline__ void add_with_power(float exponential, float power, float& sum) {
        sum = __fmaf_rn(exponential, fmaxf(power, +kLeastPower), sum);
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
        return p.partials + (n() / kColumns * +Fields::kCount + field) * p.partial_rows + row_of_lane();
    }
    __device__ __forceinline__ void put(const OfRows& numbers, int field) const {
        if (row_of_lane() < p.rows) *partial_at(field) = of_lane(numbers);
    }

    /// The tile's part of each row's Σ c_j·z_j.
    __device__ __forceinline__ void write_weighted(OfRows& weighted) const {
        add_lanes(weighted);
        put(weighted, Fields::kWeighted);
    }

    /// Adds a tile's exponentials to the rows' sums, and stores the codes of the columns before p.stored. A thread's 16 columns of a group
    /// of classes lie side by side in a row, and its four tokens of a column in a word.
    __device__ __forceinline__ void add(const Logits& z, const OfRows& powers, Sums& sums) {
        if (n() >= p.stored) {
            add_groups<false>(z, powers, sums, 0u);
            return;
        }
        add_groups<true>(z, powers, sums, Problem::turns_exponentials ? self().open_panel() : 0u);
    }
    template <bool kStores>
    __device__ __forceinline__ void add_groups(const Logits& z, const OfRows& powers, Sums& sums, unsigned panel) const {
#pragma unroll
        for (int group = 0; group < kColumns / kFp8ClassGroup; ++group) add_group<kStores>(z, powers, sums, group, panel);
    }

    template <bool kStores>
    __device__ __forceinline__ void add_group(const Logits& z, const OfRows& powers, Sums& sums, int group, unsigned panel) const {
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
                    const float power = fp8::power_of_logit(logit, powers[r / 2][r % 2]);
                    x[e] = ptx::ex2_approx_ftz(power);
                    if constexpr (Problem::entropy) add_with_power(x[e], power, sums.with_powers[r / 2][r % 2]);
                }
                sums.exponentials[r / 2][r % 2] += (x[0] + x[1]) + (x[2] + x[3]);
                if constexpr (kStores) words[r][jj] = w[r] = codes_of(x, z, group * 8 + jj * 2, r);
            }
            if constexpr (kStores && Problem::turns_exponentials) self().put_turned(w, group * kFp8ClassGroup + jj * 16, panel);
        }
        if constexpr (kStores) put_rows(words, n() + group * kFp8ClassGroup);
    }
    /// Codes of a row's exponentials, whose first two columns are in piece `piece`.
    __device__ __forceinline__ unsigned codes_of(float (&x)[4], const Logits& z, int piece, int r) const {
        if constexpr (Problem::stores_derivative) {
            const LogitDerivative<Problem> derivative(p.transform, temperature(row(r / 2, r % 2)));
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] *= derivative(z[r / 2][piece + e / 2][r % 2 * 2 + e % 2]);
        }
        if constexpr (Problem::entropy) {
            if (p.row_shares != nullptr) {
                const int of = row(r / 2, r % 2);
                const float2 share = of < p.rows ? reinterpret_cast<const float2*>(p.row_shares)[of] : make_float2(0.f, 0.f);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float logit = z[r / 2][piece + e / 2][r % 2 * 2 + e % 2];
                    x[e] = x[e] == 0.f ? 0.f : x[e] * __fmaf_rn(share.y, logit, share.x);  // a logit may be -infinity
                }
            }
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
    /// The tile's part of each row's sums, of which its largest logit, which this lane has written, is the reference.
    __device__ __forceinline__ void write_sums(const OfRows& powers, Sums& sums) const {
        add_lanes(sums.exponentials);
        if constexpr (Problem::entropy) add_lanes(sums.with_powers);
        if (row_of_lane() >= p.rows) return;
        const float largest = *static_cast<volatile float*>(partial_at(0));
        // Sums far below the power are 0, or nothing beside those of other tiles: their factor stays finite.
        const float above = fp8::power_of_logit(largest, of_lane(powers));
        const float share = ptx::ex2_approx_ftz(fminf(-above, +kMostAbove));
        const float sum = of_lane(sums.exponentials);
        *partial_at(1) = sum * share;
        if constexpr (Problem::entropy) {
            const float with_powers = sum > 0.f ? __fmaf_rn(-above, sum, of_lane(sums.with_powers)) : 0.f;
            *partial_at(Fields::kExpZ) = with_powers * (share * kNatsOfPower);
        }
    }
};

}  // namespace flce
