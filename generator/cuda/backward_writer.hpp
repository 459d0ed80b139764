// Writes the launches of one backward pass: for each chunk of the vocabulary logits' gradients and what is made of them, before that what forward has
// retained. What is sized where is BackwardLayout's.
#pragma once

#include <cstddef>
#include <vector>

#include "generator/cuda/launch_builder.hpp"
#include "generator/cuda/programs.hpp"
#include "generator/cuda/tile_rules.hpp"
#include "templates/sum_parts.cuh"

namespace flce {

class BackwardWriter {
public:
    BackwardWriter(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source, const BackwardLayout& layout)
        : spec_(spec),
          clusters_(device.gpu.sm_count / kClusterBlocks),
          plan_(plan),
          source_(source),
          layout_(layout),
          retained_(retained_layout(spec, plan)),
          kept_(retained_.columns),
          listing_(lists_rows(plan)),
          list_(select(listing_, slot(Slot::workspace) + layout.list, 0)),
          all_kept_(equal(kept_, spec.vocab_size)),
          first_columns_(
              select(less(0, kept_), kept_, select(less(0, layout.wide_chunks), layout.wide_chunk, min(layout.chunk, spec.vocab_size)))),
          element_(static_cast<std::int64_t>(element_bytes(spec.dtype))),
          joined_(layout.joined && (present(Slot::grad_hidden) && present(Slot::grad_weight))),
          grad_element_(static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype))) {}

    [[nodiscard]] LaunchProgram program();

private:
    // Loop variables.
    static constexpr int kFirstPass = 0;  ///< row block, while coefficients are computed for the first time
    static constexpr int kChunk = 1;
    static constexpr int kRowBlock = 2;

    static Expr present(Slot which) { return !equal(slot(which), 0); }
    Expr at(const Expr& offset) const { return slot(Slot::workspace) + offset; }
    Expr tickets() const { return at(layout_.scalars + static_cast<std::int64_t>(offsetof(PassScalars, tickets))); }
    Expr first_row(const Expr& block) const { return block * layout_.rows; }
    Expr row_count(const Expr& block) const { return min(slot(Slot::num_tokens) - first_row(block), layout_.rows); }
    /// Chunks of one width, from a column of the vocabulary on.
    struct Stretch {
        Expr begin{0};
        Expr width{0};
        Expr chunks{0};
        Expr dlogits{0};  ///< address
        Expr even{0};     ///< width of every other chunk, where joined ones are halves of these
    };
    /// Chunk by chunk, or joined.
    void add_chunks(const Stretch& stretch, std::vector<Statement>& to);
    Expr first_column() const { return stretch_.begin + variable(kChunk) * stretch_.width; }
    Expr column_count() const { return min(Expr(spec_.vocab_size) - first_column(), stretch_.width); }
    /// Whether the divisor of a mean has to be counted.
    static Expr counted() {
        const Expr mean = equal(slot(Slot::reduction), static_cast<std::int64_t>(ReductionCode::mean));
        return select(present(Slot::num_valid), 0, mean);
    }
    /// Whether one block of row_coefficients has every token, so that it does prepare's part as well: a launch less.
    Expr prepared_with_rows() const {
        if (spec_.class_weight && spec_.label_smoothing > 0) return 0;  // prepare sums over the vocabulary
        return equal(layout_.row_blocks, 1) && less(slot(Slot::num_tokens), kRowThreads + 1);
    }
    Expr is_last(int loop, const Expr& count) const { return equal(variable(loop) + 1, count); }

    /// Address of the chunk's first row (or column) in the weight or its gradient.
    Expr weight_at(Slot which, std::int64_t element) const {
        const std::int64_t step = spec_.layout == WeightLayout::vocab_major ? spec_.hidden_size : 1;
        return slot(which) + first_column() * (step * element);
    }
    Expr hidden_at(const Expr& block) const { return slot(Slot::hidden) + first_row(block) * (spec_.hidden_size * element_); }

    bool retains() const { return plan_.strategy == Strategy::retain; }
    bool sm90() const { return plan_.path == PlanPath::cuda_sm90a; }
    bool vocab_major() const { return spec_.layout == WeightLayout::vocab_major; }

    /// Blocks for m × n results: one a tile, or persistent clusters.
    Expr grid(const GemmTile& tile, const Expr& m, const Expr& n) const {
        if (!sm90()) return ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n);
        return min(ceil_div(m, kClusterBlocks * tile.block_m) * ceil_div(n, tile.block_n), clusters_) * kClusterBlocks;
    }

    /// The same for grad_hidden, whose sum may have several parts.
    Expr sum_grid(const Expr& rows) const {
        const Expr all = grid(plan_.cuda.grad_hidden, rows, spec_.hidden_size);
        return sm90() ? min(all * std::int64_t{SumParts::kMost}, clusters_ * kClusterBlocks) : all;
    }

    // What tensor maps show, and how many rows one copy takes: of an operand that is contiguous along the sum, its part of the tile; of others 64
    // elements of the sum. The second operand comes in as many parts as a cluster has blocks.
    using Matrix = LaunchBuilder<DlogitsSm90Params>::Matrix;
    static constexpr int kFirstRows = 64;
    static constexpr int kSecondRows = 64 / kClusterBlocks;

    template <class Params>
    void map(LaunchBuilder<Params>& launch, TensorMap Params::* member, const Matrix& m, int box_rows, int element_bytes = 2) const {
        launch.set_map(member, {m.address, m.columns, m.rows, m.row_elements, m.blocks, m.block_bytes}, box_rows, element_bytes);
    }
    Matrix hidden_matrix() const {
        const Expr row = first_row(variable(kRowBlock));
        return {compact_hidden() + row * (spec_.hidden_size * element_), spec_.hidden_size, row_count(variable(kRowBlock)),
                spec_.hidden_size};
    }
    /// Hidden states of listed rows, or of all with zeros for ignored ones, or scaled ones beside retained exponentials: where grad_hidden's
    /// sum would be, or in grad_hidden itself, which is written after they have been used.
    Expr compact_hidden() const {
        const Expr summed = present(Slot::grad_hidden) && less(kept_, spec_.vocab_size);
        return select(summed, slot(Slot::grad_hidden), at(layout_.hidden_accumulator));
    }
    /// Row `row` of a caller's tensor, or its first where rows are listed.
    Expr from_row(const Expr& row) const { return select(listing_, 0, row); }
    /// Whether grad_hidden's last part writes it: of a row block it would write over hidden states of the others.
    Expr scatters_sum() const { return listing_ && (less(1, layout_.row_blocks) && !all_kept_); }
    /// Address of grad_hidden's sum: behind hidden states where they lie in its place.
    Expr sum_at() const { return at(layout_.hidden_accumulator) + all_kept_ * round_up(hidden_bytes(), kWorkspaceAlignment); }
    Expr hidden_bytes() const { return slot(Slot::num_tokens) * (spec_.hidden_size * element_); }

    /// Rows from there on.
    Expr room() const {
        const std::int64_t row_bytes = 4 * spec_.hidden_size;
        return floor_div(layout_.sum_rows * row_bytes - all_kept_ * round_up(hidden_bytes(), kWorkspaceAlignment), row_bytes);
    }

    /// How the sum over the vocabulary may be divided; the same where chunks are joined, so that calls for one gradient alone have the same bits. Row blocks
    /// have tiles enough.
    template <class Params, class Holder>
    void share(LaunchBuilder<Params>& launch, SumShare Holder::* member) const {
        const GemmTile& tile = plan_.cuda.grad_hidden;
        const GemmTile& joined = plan_.cuda.dlogits;
        const auto tiles_across = [&](const GemmTile& t) { return (spec_.hidden_size + t.block_n - 1) / t.block_n; };
        // Parts lie where either kernel's clusters of rows begin.
        const Expr undivided = tile.block_m == joined.block_m ? Expr(0) : layout_.joined;
        launch.set(member, &SumShare::room, select(less(1, layout_.row_blocks), 0, room()))
            .set(member, &SumShare::cluster_rows, std::int64_t{kClusterBlocks} * tile.block_m)
            .set(member, &SumShare::column_tiles, select(layout_.joined && equal(kept_, 0), tiles_across(joined), tiles_across(tile)))
            .set(member, &SumShare::clusters, clusters_)
            .set(member, &SumShare::slices, select(undivided, 0, ceil_div(first_columns_, 64)));
    }

    template <class Params>
    void list(LaunchBuilder<Params>& launch, const Expr& first) const {
        launch.set_list(&Params::list, list_, at(layout_.scalars), first);
    }
    Statement gather_hidden() const;
    Statement scatter_grad_hidden() const;
    Matrix dlogits_matrix() const { return {stretch_.dlogits, column_count(), row_count(variable(kRowBlock)), stretch_.width}; }
    /// Dlogits as an operand: where exponentials may be in its place, one block, which is as they lie.
    Matrix dlogits_operand() const {
        Matrix m = dlogits_matrix();
        if (retains()) {
            m.blocks = 1;
            m.block_bytes = kWorkspaceAlignment;
        }
        return m;
    }
    static constexpr int kOneBlock = 31;  ///< BlockedMap's shift
    /// `columns` of the vocabulary, of the weight or of its gradient.
    Matrix weight_matrix(const Expr& address, const Expr& columns) const {
        if (vocab_major()) return {address, spec_.hidden_size, columns, spec_.hidden_size};
        return {address, columns, spec_.hidden_size, spec_.padded_vocab_size};
    }
    /// The chunk's weight as GEMMs read it: where it lies, or rounded, which is vocab_major.
    bool reads_vocab_major() const { return vocab_major() || rounds_weight(spec_); }
    Expr weight_operand() const { return rounds_weight(spec_) ? at(layout_.rounded_weight) : weight_at(Slot::weight, element_); }
    Matrix weight_chunk() const {
        if (rounds_weight(spec_)) return {weight_operand(), spec_.hidden_size, column_count(), spec_.hidden_size};
        return weight_matrix(weight_operand(), column_count());
    }

    Statement coefficients(const Expr& block) const;

    // A chunk of the vocabulary.
    std::vector<Statement> chunk_steps() const;
    Statement dlogits() const;
    template <class Params>
    LaunchBuilder<Params> dlogits_launch() const;
    Statement grad_hidden() const;
    template <class Params>
    LaunchBuilder<Params> grad_hidden_launch() const;
    Statement grad_weight() const;

    template <class Params>
    LaunchBuilder<Params> grad_weight_launch() const;

    // All chunks of a stretch in one launch.
    std::vector<Statement> joined_steps() const;

    // The part of the vocabulary that forward retained, all tokens at once: plain GEMMs, with the rows' scales in hidden and in grad_hidden's epilogue.

    Expr retained_at(const Expr& offset) const { return slot(Slot::retained) + offset; }
    Matrix exponentials() const {
        return {retained_at(retained_.exponentials),
                kRetainedColumns,
                slot(Slot::num_tokens),
                kRetainedColumns,
                retained_.blocks,
                retained_.block_bytes};
    }
    std::vector<Statement> retained_steps() const;
    Statement retained_rows() const;
    Statement retained_grad_hidden() const;
    Statement retained_grad_weight() const;

    Statement grad_bias() const;

    /// What no chunk writes: gradients past the vocabulary, and everything when there is no token.
    void zero_the_rest(LaunchProgram& program) const;

    const Spec& spec_;
    std::int64_t clusters_;
    const Plan& plan_;
    const CudaSource& source_;
    const BackwardLayout& layout_;
    RetainedLayout retained_;
    Expr kept_;           ///< columns of the vocabulary whose exponentials there are
    Expr listing_;        ///< whether ignored tokens are left out
    Expr list_;           ///< address, or 0
    Expr all_kept_;       ///< 1: nothing is computed again
    Expr first_columns_;  ///< of the vocabulary, in the first launch of grad_hidden
    Stretch stretch_;     ///< that is being written
    std::int64_t element_;
    Expr joined_;  ///< whether a stretch's chunks are one launch
    std::int64_t grad_element_;
};

}  // namespace flce
