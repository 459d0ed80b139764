// The order in which many chunks of the vocabulary are worked on in one launch. Plain C++: the host tests it.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/sum_parts.cuh"
#else
#include "templates/common/sum_parts.cuh"
#endif

namespace flce {

enum : int { kSumSlice = 64 };  ///< columns of the vocabulary; parts of a sum are multiples

/// Tiles of a chunk, in the order of their counters: dlogits (D), grad_hidden (H), grad_weight (W).
enum class ChunkKind : int { dlogits, grad_hidden, grad_weight };

/// Phases, each with tiles of one kind:
///
///     D₀ D₁ W₀ H₀₁ W₁ | D₂ D₃ W₂ H₂₃ W₃ | … | Dᵢ Dⱼ Wᵢ Wⱼ Hᵢⱼ
///
/// Two chunks' dlogits lie side by side, and grad_hidden's sum is gone through once for both. Another phase lies between each writer of a
/// place of dlogits, its readers and the next writer, so that counters which order them are rarely waited for. The last sum becomes
/// grad_hidden. grad_hidden may lie where the hidden states are that grad_weight needs: the last sum comes last.
///
/// Where there are few rows, grad_hidden's sum has parts as SumParts says, whose tiles lie below each other; a later kernel adds them
/// up.
///
/// Where grad_hidden alone is wanted (Shape::kHiddenOnly), no order of the chunks is asked for. Halves of the rows take turns with a chunk
/// of the vocabulary, even numbers being the first half's, and each half has a place and a sum of its own:
///
///     D₀ D₁ H₀ H₁ | D₂ D₃ H₂ H₃ | …
///
/// Shape has rows(), columns(), even_width() and pair_width(), as BackwardChunksSm90Params has them, and parts(), or with kHiddenOnly
/// half_rows(). A tile is of a cluster.
template <class Shape, int kHidden, int kClusterRows, int kBlockColumns>
struct ChunkPhases {
    Shape shape;
    ChunkKind kind = ChunkKind::dlogits;
    int chunk = 0;  ///< number of the chunk; the first of two for a sum over two chunks

    FLCE_HOST_DEVICE explicit ChunkPhases(const Shape& shape_) : shape(shape_) {}

    enum : bool { kHalves = Shape::kHiddenOnly };

    /// Column at which a chunk's dlogits begin in the two places that lie beside each other, and column at which the chunk begins in the
    /// vocabulary.
    FLCE_HOST_DEVICE int place_of(int c) const { return kHalves ? 0 : c % 2 * shape.even_width(); }
    FLCE_HOST_DEVICE int begin_of(int c) const { return c / 2 * shape.pair_width() + place_of(c); }
    /// Rows of a chunk, and the first of them.
    FLCE_HOST_DEVICE int first_row_of(int c) const {
        if constexpr (kHalves) return c % 2 * shape.half_rows();
        return 0;
    }
    FLCE_HOST_DEVICE int rows_of(int c) const {
        if constexpr (kHalves) {
            if (c % 2 == 0 && shape.half_rows() < shape.rows()) return shape.half_rows();
        }
        return shape.rows() - first_row_of(c);
    }
    /// Columns of the chunk, or of the two that are summed.
    FLCE_HOST_DEVICE int width_of(ChunkKind k, int c) const {
        const int end = kHalves || c % 2 != 0 || k == ChunkKind::grad_hidden ? shape.pair_width() : shape.even_width();
        const int width = end - place_of(c);
        const int left = shape.columns() - begin_of(c);
        return width < left ? width : left;
    }
    /// Whether nothing comes behind this pair.
    FLCE_HOST_DEVICE bool is_last(int c) const { return (c / 2 + 1) * shape.pair_width() >= shape.columns(); }
    /// Whether the pair of the even chunk c is only that one.
    FLCE_HOST_DEVICE bool is_alone(int c) const {
        if constexpr (kHalves) return shape.rows() <= shape.half_rows();
        return begin_of(c) + shape.even_width() >= shape.columns();
    }

    FLCE_HOST_DEVICE int clusters_of(ChunkKind k, int c) const {
        const int clusters = up_div(k == ChunkKind::grad_weight ? width_of(k, c) : rows_of(c), kClusterRows);
        return !kHalves && k == ChunkKind::grad_hidden && shape.parts() > 1 ? clusters * parts_of(c).count : clusters;
    }
    /// Parts of the sum over a pair.
    FLCE_HOST_DEVICE PartSlices parts_of(int c) const { return {sum_slices(c), shape.parts()}; }
    FLCE_HOST_DEVICE int sum_slices(int c) const { return up_div(width_of(ChunkKind::grad_hidden, c), kSumSlice); }
    /// Rows from one part to the next.
    FLCE_HOST_DEVICE int rows_of_part() const { return up_div(shape.rows(), kClusterRows) * kClusterRows; }
    FLCE_HOST_DEVICE int columns_of(ChunkKind k, int c) const {
        return up_div(k == ChunkKind::dlogits ? width_of(k, c) : kHidden, kBlockColumns);
    }
    FLCE_HOST_DEVICE unsigned tiles_of(ChunkKind k, int c) const { return static_cast<unsigned>(clusters_of(k, c) * columns_of(k, c)); }

    /// Goes on to the next phase; false where this was the last.
    FLCE_HOST_DEVICE bool advance() {
        const bool even = chunk % 2 == 0;
        const int first = chunk - chunk % 2;
        if (kHalves) {
            if (even && !is_alone(chunk)) {
                ++chunk;
                return true;
            }
            if (kind == ChunkKind::grad_hidden && is_last(chunk)) return false;
            chunk = kind == ChunkKind::dlogits ? first : first + 2;
            kind = kind == ChunkKind::dlogits ? ChunkKind::grad_hidden : ChunkKind::dlogits;
            return true;
        }
        if (kind == ChunkKind::dlogits) {
            const bool both = even && !is_alone(chunk);
            kind = both ? ChunkKind::dlogits : ChunkKind::grad_weight;
            chunk = both ? chunk + 1 : first;
        } else if (kind == ChunkKind::grad_weight && even) {
            const bool both = is_last(chunk) && !is_alone(chunk);
            kind = both ? ChunkKind::grad_weight : ChunkKind::grad_hidden;
            chunk += both ? 1 : 0;
        } else if (kind == ChunkKind::grad_weight) {
            kind = is_last(chunk) ? ChunkKind::grad_hidden : ChunkKind::dlogits;
            chunk = is_last(chunk) ? first : chunk + 1;
        } else {
            if (is_last(chunk)) return false;
            kind = ChunkKind::grad_weight;
            ++chunk;
        }
        return true;
    }

    /// Calls `wait(kind, chunk)` for the phases that have to be done before tiles of this phase may begin: data that these tiles read has
    /// to be written, data that they write over has to be read, and a sum needs its earlier parts added.
    template <class Wait>
    FLCE_HOST_DEVICE void for_each_needed(const Wait& wait) const {
        if (kHalves) {
            if (kind == ChunkKind::grad_hidden) wait(ChunkKind::dlogits, chunk);
            if (chunk >= 2) wait(ChunkKind::grad_hidden, chunk - 2);
            return;
        }
        if (kind == ChunkKind::dlogits) {
            if (chunk < 2) return;
            wait(ChunkKind::grad_hidden, chunk / 2 * 2 - 2);
            wait(ChunkKind::grad_weight, chunk - 2);
            return;
        }
        wait(ChunkKind::dlogits, chunk);
        if (kind == ChunkKind::grad_weight) return;
        if (!is_alone(chunk)) wait(ChunkKind::dlogits, chunk + 1);
        if (chunk > 0) wait(ChunkKind::grad_hidden, chunk - 2);
    }
    /// Calls `wait(kind, chunk)` for the readers of hidden states that have to be done before the last sum is written over those states.
    template <class Wait>
    FLCE_HOST_DEVICE void for_each_reader_of_hidden(const Wait& wait) const {
        if (kHalves) {
            wait(ChunkKind::dlogits, chunk);
            if (!is_alone(chunk)) wait(ChunkKind::dlogits, chunk ^ 1);
            return;
        }
        wait(ChunkKind::grad_weight, chunk);
        if (!is_alone(chunk)) wait(ChunkKind::grad_weight, chunk + 1);
        if (chunk > 0) wait(ChunkKind::grad_weight, chunk - 1);
    }

private:
    static FLCE_HOST_DEVICE int up_div(int a, int b) { return (a + b - 1) / b; }
};

}  // namespace flce
