// The logits of classes that rows name, from the accumulators of forward's tiles.
#pragma once

#include "flce/sm90/logit_form.cuh"
#include "flce/sm90/named_tiles.cuh"

namespace flce {

/// The row's accumulator of a column that the thread has: pick_column by bits of the column, half as many instructions where many columns
/// are picked.
template <int kFirst = 0, int kCount = 32, int kColumnPieces>
__device__ __forceinline__ float pick_by_bits(const float (&c)[kColumnPieces][4], int h, int within) {
    static_assert(kColumnPieces <= 32, "columns of a tile of up to 256");
    if constexpr (kCount == 1) {
        return (within & 1) != 0 ? c[kFirst][2 * h + 1] : c[kFirst][2 * h];
    } else {
        const float low = pick_by_bits<kFirst, kCount / 2>(c, h, within);
        if constexpr (kFirst + kCount / 2 >= kColumnPieces) {
            return low;
        } else {
            const float high = pick_by_bits<kFirst + kCount / 2, kCount / 2>(c, h, within);
            return (within & 8 * (kCount / 2)) != 0 ? high : low;
        }
    }
}

/// A quad of lanes shares rows. Each lane brings the record of one of them before a tile is multiplied, and picks the logits of names whose
/// columns it has.
template <class Launch, class Form>
struct NamedPicks {
    using Problem = typename Launch::Problem;
    using TileT = typename Launch::TileT;
    enum : int { kRows = 2 * Form::kPieces };
    static_assert(kRows <= 4, "a lane for each row of a quad");
    enum : int { kBytes = Problem::picks_named ? 128 * TileT::kConsumers * 8 : 0 };

    const Launch& launch;
    const PlaceSm90<TileT>& place;
    const unsigned smem;  ///< this thread's record; records of its quad lie side by side

    /// Brings the records of a tile, before its products. None of a tile that is gone through again: its logits are outputs by then.
    __device__ __forceinline__ void begin(int tile, int row_cluster) const {
        __syncwarp();  // no lane reads records of the tile before any more
        const int of_quad = place.lane % 4;
        if (of_quad >= kRows) return;
        const int row = launch.first_row(row_cluster) + place.row(of_quad / 2, of_quad % 2);
        const bool exists = row < launch.share.rows && !launch.goes_again();
        ptx::cp_async_ca_8(smem, launch.p.named.records + static_cast<long long>(exists ? row : 0) * launch.p.named.tiles + tile,
                           exists ? 8 : 0);
    }
    /// Waits for them.
    __device__ __forceinline__ void wait() const {
        ptx::cp_async_wait_all();
        __syncwarp();  // every lane's is there
    }
    /// Picks logits of row (i, h), row `row` of the launch, from a thread's accumulators.
    __device__ __forceinline__ void pick(const Form& form, const float (&c)[Form::kColumnPieces][4], int i, int h, int row) const {
        TileRecord record{ptx::ld_shared_b64(smem + static_cast<unsigned>((2 * i + h - place.lane % 4) * 8))};
        if (record.is_list()) record = record.of_lane(place.lane % 4);
        while (record.has_any()) {
            TileName name{};
            int within = -1;
            do {
                name = record.take(launch.p.named.names + static_cast<long long>(row) * launch.p.teacher.top_k);
                within = name.column() - place.column(0, 0);
            } while (record.has_any() && !has_column<Form::kColumnPieces>(within));
            if (!has_column<Form::kColumnPieces>(within)) return;
            const long long of_caller = listed_row<Problem>(launch.p.list, launch.p.targets, row).row;
            teacher_logit<Problem>(launch.p.teacher, of_caller, name.place()) = form.logit(pick_by_bits(c, h, within));
        }
    }
};

}  // namespace flce
