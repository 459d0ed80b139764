#include <algorithm>
#include <cmath>
#include <utility>

#include "generator/cuda/launch_builder.hpp"
#include "generator/cuda/programs.hpp"
#include "generator/cuda/tile_rules.hpp"

namespace flce {
namespace {

// Loop variables.
constexpr int kFirstPass = 0;  // row block, while coefficients are computed for the first time
constexpr int kChunk = 1;
constexpr int kRowBlock = 2;

Expr present(Slot which) { return equal(equal(slot(which), 0), 0); }

/// Writes the launches of one backward pass.
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
          element_(static_cast<std::int64_t>(element_bytes(spec.dtype))),
          grad_element_(static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype))) {}

    LaunchProgram program() {
        LaunchProgram program;
        program.variable_count = 3;
        program.body.push_back({If{equal(prepared_with_rows(), 0), {prepare_launch(spec_, source_, {layout_.scalars, counted(), list_})}}});
        program.body.push_back({Loop{kFirstPass, layout_.row_blocks, {coefficients(variable(kFirstPass))}}});
        const Expr wanted = max(present(Slot::grad_hidden), max(present(Slot::grad_weight), present(Slot::grad_bias)));
        if (retains()) program.body.push_back({If{min(less(0, kept_), less(0, slot(Slot::num_tokens))), retained_steps()}});
        std::vector<Statement> chunks;
        // What the retained part has left where listed hidden states are to lie is not needed any more.
        if (sm90()) chunks.push_back({If{min(listing_, less(kept_, spec_.vocab_size)), {gather_hidden()}}});
        const Stretch wide{kept_, layout_.wide_chunk, layout_.wide_chunks, slot(Slot::grad_weight) + layout_.wide_dlogits};
        if (wide.chunks.constant() == nullptr) add_chunks(wide, chunks);
        const Expr rest = kept_ + wide.chunks * wide.width;
        add_chunks({rest, layout_.chunk, ceil_div(Expr(spec_.vocab_size) - rest, layout_.chunk), at(layout_.dlogits)}, chunks);
        program.body.push_back({If{wanted, std::move(chunks)}});
        if (sm90()) program.body.push_back({If{min(listing_, present(Slot::grad_hidden)), {scatter_grad_hidden()}}});
        if (spec_.grad_weight_mode == GradMode::write) zero_the_rest(program);
        return program;
    }

private:
    Expr at(const Expr& offset) const { return slot(Slot::workspace) + offset; }
    Expr first_row(const Expr& block) const { return block * layout_.rows; }
    Expr row_count(const Expr& block) const { return min(slot(Slot::num_tokens) - first_row(block), layout_.rows); }
    /// Chunks of one width, from a column of the vocabulary on.
    struct Stretch {
        Expr begin{0};
        Expr width{0};
        Expr chunks{0};
        Expr dlogits{0};  ///< address
    };
    void add_chunks(const Stretch& stretch, std::vector<Statement>& to) {
        stretch_ = stretch;
        to.push_back({Loop{kChunk, stretch.chunks, {Statement{Loop{kRowBlock, layout_.row_blocks, chunk_steps()}}}}});
    }
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
        return min(equal(layout_.row_blocks, 1), less(slot(Slot::num_tokens), kRowThreads + 1));
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
        const Expr address = select(listing_, compact_hidden(), slot(Slot::hidden));
        const Expr row = first_row(variable(kRowBlock));
        return {address + row * (spec_.hidden_size * element_), spec_.hidden_size, row_count(variable(kRowBlock)), spec_.hidden_size};
    }
    /// Hidden states of listed rows, or scaled ones beside retained exponentials: where grad_hidden's sum would be, or in grad_hidden itself, which is
    /// written after they have been used.
    Expr compact_hidden() const {
        const Expr summed = min(present(Slot::grad_hidden), less(kept_, spec_.vocab_size));
        return select(summed, slot(Slot::grad_hidden), at(layout_.hidden_accumulator));
    }
    /// Row `row` of a caller's tensor, or its first where rows are listed.
    Expr from_row(const Expr& row) const { return select(listing_, 0, row); }
    /// Whether grad_hidden's last part writes it: of a row block it would write over hidden states of the others.
    Expr scatters_sum() const { return min(listing_, min(less(1, layout_.row_blocks), less(kept_, spec_.vocab_size))); }

    template <class Params>
    void list(LaunchBuilder<Params>& launch, const Expr& first) const {
        launch.set_list(&Params::list, list_, at(layout_.scalars), first);
    }
    Statement gather_hidden() const {
        LaunchBuilder<GatherRowsParams> launch(source_.kernel("gather_rows"), ceil_div(slot(Slot::num_tokens), kRowThreads / 32));
        launch.set(&GatherRowsParams::hidden, slot(Slot::hidden))
            .set(&GatherRowsParams::compact, compact_hidden())
            .set(&GatherRowsParams::rows, slot(Slot::num_tokens));
        list(launch, 0);
        return launch.build();
    }
    Statement scatter_grad_hidden() const {
        LaunchBuilder<ScatterRowsParams> launch(source_.kernel("scatter_rows"), ceil_div(slot(Slot::num_tokens), kRowThreads / 32));
        launch.set(&ScatterRowsParams::accumulator, select(scatters_sum(), at(layout_.hidden_accumulator), 0))
            .set(&ScatterRowsParams::grad_hidden, slot(Slot::grad_hidden))
            .set(&ScatterRowsParams::scalars, at(layout_.scalars))
            .set(&ScatterRowsParams::rows, slot(Slot::num_tokens));
        list(launch, 0);
        return launch.build();
    }
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
    /// The chunk of the weight or of its gradient.
    Matrix weight_matrix(Slot which) const {
        const Expr address = weight_at(which, element_);
        if (vocab_major()) return {address, spec_.hidden_size, column_count(), spec_.hidden_size};
        return {address, column_count(), spec_.hidden_size, spec_.padded_vocab_size};
    }

    Statement coefficients(const Expr& block) const {
        const Expr row = from_row(first_row(block));
        const Expr none = equal(slot(Slot::reduction), static_cast<std::int64_t>(ReductionCode::none));
        LaunchBuilder<RowCoefficientsParams> launch(source_.kernel("row_coefficients"), ceil_div(row_count(block), kRowThreads));
        launch.set(&RowCoefficientsParams::class_weight, slot(Slot::class_weight))
            .set(&RowCoefficientsParams::scalars, at(layout_.scalars))
            .set_targets(&RowCoefficientsParams::targets, row)
            .set_list(&RowCoefficientsParams::list, list_, at(layout_.scalars), first_row(block))
            .set_count(&RowCoefficientsParams::count)
            .set(&RowCoefficientsParams::lse, slot(Slot::lse) + row * 4)
            .set(&RowCoefficientsParams::entropy, advanced(slot(Slot::entropy), row, 4))
            .set(&RowCoefficientsParams::grad_loss, advanced(slot(Slot::grad_loss), none * row, 4))
            .set(&RowCoefficientsParams::grad_lse, advanced(slot(Slot::grad_lse), row, 4))
            .set(&RowCoefficientsParams::grad_logprob, advanced(slot(Slot::grad_logprob), row, 4))
            .set(&RowCoefficientsParams::grad_entropy, advanced(slot(Slot::grad_entropy), row, 4))
            .set(&RowCoefficientsParams::coefficients, at(layout_.coefficients))
            .set(&RowCoefficientsParams::row_targets, at(layout_.row_targets))
            .set(&RowCoefficientsParams::rows, row_count(block))
            .set(&RowCoefficientsParams::prepares, prepared_with_rows())
            .set(&RowCoefficientsParams::want_count, counted())
            .set_float(&RowCoefficientsParams::label_smoothing, static_cast<float>(spec_.label_smoothing))
            .set_float(&RowCoefficientsParams::smoothing_per_class,
                       static_cast<float>(spec_.label_smoothing / static_cast<double>(spec_.vocab_size)))
            .set_float(&RowCoefficientsParams::z_loss_weight, static_cast<float>(spec_.z_loss))
            .set_float(&RowCoefficientsParams::absent_grad_loss, spec_.outputs.loss ? 1.0F : 0.0F)
            .set_float(&RowCoefficientsParams::derivative_bound, static_cast<float>(std::abs(spec_.logit_scale)));
        return launch.build();
    }

    std::vector<Statement> chunk_steps() const {
        std::vector<Statement> steps;
        steps.push_back({If{less(1, layout_.row_blocks), {coefficients(variable(kRowBlock))}}});
        steps.push_back(dlogits());
        // grad_weight first: hidden states may lie in grad_hidden.
        steps.push_back({If{present(Slot::grad_weight), {grad_weight()}}});
        steps.push_back({If{present(Slot::grad_hidden), {grad_hidden()}}});
        if (spec_.bias) steps.push_back({If{present(Slot::grad_bias), {grad_bias()}}});
        return steps;
    }

    Statement dlogits() const {
        if (!sm90()) return dlogits_launch<DlogitsParams>().build();
        const GemmTile& tile = plan_.cuda.dlogits;
        auto launch = dlogits_launch<DlogitsSm90Params>();
        map(launch, &DlogitsSm90Params::hidden_map, hidden_matrix(), tile.block_m);
        map(launch, &DlogitsSm90Params::weight_map, weight_matrix(Slot::weight),
            vocab_major() ? tile.block_n / kClusterBlocks : kSecondRows);
        map(launch, &DlogitsSm90Params::dlogits_map, dlogits_matrix(), kFirstRows);
        list(launch, first_row(variable(kRowBlock)));
        return launch.build();
    }

    template <class Params>
    LaunchBuilder<Params> dlogits_launch() const {
        const Expr rows = row_count(variable(kRowBlock));
        const Expr bias_partials = spec_.bias ? select(present(Slot::grad_bias), at(layout_.bias_partials), 0) : Expr(0);
        LaunchBuilder<Params> launch(source_.kernel("dlogits"), grid(plan_.cuda.dlogits, rows, column_count()));
        launch.set(&DlogitsParams::hidden, hidden_at(variable(kRowBlock)))
            .set(&DlogitsParams::weight, weight_at(Slot::weight, element_))
            .set(&DlogitsParams::bias, advanced(slot(Slot::bias), first_column(), element_))
            .set(&DlogitsParams::class_weight, advanced(slot(Slot::class_weight), first_column(), 4))
            .set(&DlogitsParams::scalars, at(layout_.scalars))
            .set(&DlogitsParams::coefficients, at(layout_.coefficients))
            .set(&DlogitsParams::row_targets, at(layout_.row_targets))
            .set(&DlogitsParams::dlogits, stretch_.dlogits)
            .set(&DlogitsParams::bias_partials, bias_partials)
            .set(&DlogitsParams::ld, stretch_.width)
            .set(&DlogitsParams::first_column, first_column())
            .set(&DlogitsParams::rows, rows)
            .set(&DlogitsParams::columns, column_count())
            .set_transform(&Params::transform, spec_);
        return launch;
    }

    Statement grad_hidden() const {
        if (!sm90()) return grad_hidden_launch<GradHiddenParams>().build();
        const GemmTile& tile = plan_.cuda.grad_hidden;
        auto launch = grad_hidden_launch<GradHiddenSm90Params>();
        launch.set(&GradHiddenSm90Params::column_shift, kOneBlock);
        map(launch, &GradHiddenSm90Params::dlogits_map, dlogits_operand(), tile.block_m);
        map(launch, &GradHiddenSm90Params::weight_map, weight_matrix(Slot::weight),
            vocab_major() ? kSecondRows : tile.block_n / kClusterBlocks);
        const Expr row = first_row(variable(kRowBlock));
        const Matrix sum{at(layout_.hidden_accumulator) + row * (spec_.hidden_size * 4), spec_.hidden_size, row_count(variable(kRowBlock)),
                         spec_.hidden_size};
        map(launch, &GradHiddenSm90Params::accumulator_map, sum, kFirstRows, 4);
        list(launch, row);
        return launch.build();
    }

    template <class Params>
    LaunchBuilder<Params> grad_hidden_launch() const {
        const Expr row = first_row(variable(kRowBlock));
        const Expr rows = row_count(variable(kRowBlock));
        const Expr result = slot(Slot::grad_hidden) + from_row(row) * (spec_.hidden_size * element_);
        // fp32 sums in place.
        const Expr sum = spec_.dtype == DType::fp32 ? result : at(layout_.hidden_accumulator) + row * (spec_.hidden_size * 4);
        LaunchBuilder<Params> launch(source_.kernel("grad_hidden"), grid(plan_.cuda.grad_hidden, rows, spec_.hidden_size));
        launch.set(&GradHiddenParams::dlogits, stretch_.dlogits)
            .set(&GradHiddenParams::weight, weight_at(Slot::weight, element_))
            .set(&GradHiddenParams::scalars, at(layout_.scalars))
            .set(&GradHiddenParams::accumulator, sum)
            .set(&GradHiddenParams::grad_hidden, result)
            .set(&GradHiddenParams::ld, stretch_.width)
            .set(&GradHiddenParams::rows, rows)
            .set(&GradHiddenParams::columns, column_count())
            .set(&GradHiddenParams::first, equal(first_column(), 0))
            .set(&GradHiddenParams::last, min(equal(first_column() + column_count(), spec_.vocab_size), equal(scatters_sum(), 0)));
        return launch;
    }

    Statement grad_weight() const {
        if (!sm90()) return grad_weight_launch<GradWeightParams>().build();
        auto launch = grad_weight_launch<GradWeightSm90Params>();
        launch.set(&GradWeightSm90Params::column_shift, kOneBlock);
        map(launch, &GradWeightSm90Params::dlogits_map, dlogits_operand(), vocab_major() ? kFirstRows : kSecondRows);
        map(launch, &GradWeightSm90Params::hidden_map, hidden_matrix(), vocab_major() ? kSecondRows : kFirstRows);
        if (grad_element_ == 2) map(launch, &GradWeightSm90Params::grad_weight_map, weight_matrix(Slot::grad_weight), kFirstRows);
        list(launch, first_row(variable(kRowBlock)));
        return launch.build();
    }

    template <class Params>
    LaunchBuilder<Params> grad_weight_launch() const {
        const Expr m = vocab_major() ? column_count() : Expr(spec_.hidden_size);
        const Expr n = vocab_major() ? Expr(spec_.hidden_size) : column_count();
        const Expr accumulator = select(less(1, layout_.row_blocks), at(layout_.weight_accumulator), 0);
        LaunchBuilder<Params> launch(source_.kernel("grad_weight"), grid(plan_.cuda.grad_weight, m, n));
        launch.set(&GradWeightParams::dlogits, stretch_.dlogits)
            .set(&GradWeightParams::hidden, hidden_at(variable(kRowBlock)))
            .set(&GradWeightParams::scalars, at(layout_.scalars))
            .set(&GradWeightParams::accumulator, accumulator)
            .set(&GradWeightParams::grad_weight, weight_at(Slot::grad_weight, grad_element_))
            .set(&GradWeightParams::ld, stretch_.width)
            .set(&GradWeightParams::accumulator_ld, vocab_major() ? Expr(spec_.hidden_size) : stretch_.width)
            .set(&GradWeightParams::rows, row_count(variable(kRowBlock)))
            .set(&GradWeightParams::columns, column_count())
            .set(&GradWeightParams::first, equal(variable(kRowBlock), 0))
            .set(&GradWeightParams::last, is_last(kRowBlock, layout_.row_blocks));
        return launch;
    }

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
    Matrix kept_weight(Slot which) const {
        if (vocab_major()) return {slot(which), spec_.hidden_size, kept_, spec_.hidden_size};
        return {slot(which), kept_, spec_.hidden_size, spec_.padded_vocab_size};
    }
    std::vector<Statement> retained_steps() const {
        std::vector<Statement> rows;
        rows.push_back({If{less(1, layout_.row_blocks), {coefficients(variable(kRowBlock))}}});
        rows.push_back(retained_rows());
        std::vector<Statement> steps;
        steps.push_back({Loop{kRowBlock, layout_.row_blocks, std::move(rows)}});
        // grad_hidden first: grad_weight may take the place of what it reads.
        steps.push_back({If{present(Slot::grad_hidden), {retained_grad_hidden()}}});
        steps.push_back({If{present(Slot::grad_weight), {retained_grad_weight()}}});
        return steps;
    }

    Statement retained_rows() const {
        const Expr row = first_row(variable(kRowBlock));
        const Expr rows = row_count(variable(kRowBlock));
        LaunchBuilder<RetainedRowsParams> launch(source_.kernel("retained_rows"), ceil_div(rows, kRowThreads / 32));
        launch.set(&RetainedRowsParams::hidden, slot(Slot::hidden) + from_row(row) * (spec_.hidden_size * element_))
            .set_list(&RetainedRowsParams::list, list_, at(layout_.scalars), row)
            .set(&RetainedRowsParams::coefficients, at(layout_.coefficients))
            .set(&RetainedRowsParams::row_targets, at(layout_.row_targets))
            .set(&RetainedRowsParams::scalars, at(layout_.scalars))
            .set(&RetainedRowsParams::references, retained_at(retained_.references) + row * 4)
            .set(&RetainedRowsParams::target_logits, retained_at(retained_.target_logits) + row * 4)
            .set(&RetainedRowsParams::exponentials, retained_at(retained_.exponentials) + row * (kRetainedColumns * element_))
            .set(&RetainedRowsParams::scaled_hidden, compact_hidden() + row * (spec_.hidden_size * element_))
            .set(&RetainedRowsParams::row_scales, retained_at(retained_.row_scales) + row * 4)
            .set(&RetainedRowsParams::counters, at(layout_.counters))
            .set(&RetainedRowsParams::counter_count, layout_.counter_count)
            .set(&RetainedRowsParams::block_bytes, retained_.block_bytes)
            .set(&RetainedRowsParams::rows, rows)
            .set(&RetainedRowsParams::columns, kept_)
            .set_float(&RetainedRowsParams::derivative, static_cast<float>(spec_.logit_scale));
        return launch.build();
    }

    Statement retained_grad_hidden() const {
        const GemmTile& tile = plan_.cuda.grad_hidden;
        const Expr n = slot(Slot::num_tokens);
        const Matrix sum{at(layout_.hidden_accumulator), spec_.hidden_size, n, spec_.hidden_size};
        LaunchBuilder<GradHiddenSm90Params> launch(source_.kernel("grad_hidden"), grid(tile, n, spec_.hidden_size));
        launch.set(&GradHiddenParams::scalars, at(layout_.scalars))
            .set(&GradHiddenParams::accumulator, sum.address)
            .set(&GradHiddenParams::grad_hidden, slot(Slot::grad_hidden))
            .set(&GradHiddenParams::rows, n)
            .set(&GradHiddenParams::columns, kept_)
            .set(&GradHiddenParams::first, 1)
            .set(&GradHiddenParams::last, equal(kept_, spec_.vocab_size))
            .set(&GradHiddenSm90Params::row_scales, retained_at(retained_.row_scales))
            .set(&GradHiddenSm90Params::pace, at(layout_.counters))
            .set(&GradHiddenSm90Params::column_shift, kRetainedShift);
        map(launch, &GradHiddenSm90Params::dlogits_map, exponentials(), tile.block_m);
        map(launch, &GradHiddenSm90Params::weight_map, kept_weight(Slot::weight),
            vocab_major() ? kSecondRows : tile.block_n / kClusterBlocks);
        map(launch, &GradHiddenSm90Params::accumulator_map, sum, kFirstRows, 4);
        list(launch, 0);
        return launch.build();
    }

    Statement retained_grad_weight() const {
        const GemmTile& tile = plan_.cuda.grad_weight;
        const Expr n = slot(Slot::num_tokens);
        const Matrix hidden{compact_hidden(), spec_.hidden_size, n, spec_.hidden_size};
        LaunchBuilder<GradWeightSm90Params> launch(
            source_.kernel("grad_weight"),
            grid(tile, vocab_major() ? kept_ : Expr(spec_.hidden_size), vocab_major() ? Expr(spec_.hidden_size) : kept_));
        // Two consumers have half of each tile, or each has half of the tiles.
        const std::int64_t warps = takes_turns(tile) ? 4 : 8;
        const std::int64_t readers = kRetainedColumns / tile.block_m * ((spec_.hidden_size + tile.block_n - 1) / tile.block_n) * warps;
        launch.set(&GradWeightParams::scalars, at(layout_.scalars))
            .set(&GradWeightParams::grad_weight, slot(Slot::grad_weight))
            .set(&GradWeightParams::rows, n)
            .set(&GradWeightParams::columns, kept_)
            .set(&GradWeightParams::first, 1)
            .set(&GradWeightParams::last, 1)
            .set(&GradWeightSm90Params::readers,
                 select(equal(slot(Slot::retained), slot(Slot::grad_weight)), at(layout_.counters) + 2 * kPaceCounters * 4, 0))
            .set(&GradWeightSm90Params::pace, at(layout_.counters) + kPaceCounters * 4)
            .set(&GradWeightSm90Params::block_bytes, retained_.block_bytes)
            .set(&GradWeightSm90Params::readers_of_block, readers)
            .set(&GradWeightSm90Params::column_shift, kRetainedShift);
        map(launch, &GradWeightSm90Params::dlogits_map, exponentials(), vocab_major() ? kFirstRows : kSecondRows);
        map(launch, &GradWeightSm90Params::hidden_map, hidden, vocab_major() ? kSecondRows : kFirstRows);
        if (grad_element_ == 2) map(launch, &GradWeightSm90Params::grad_weight_map, kept_weight(Slot::grad_weight), kFirstRows);
        list(launch, 0);
        return launch.build();
    }

    Statement grad_bias() const {
        LaunchBuilder<GradBiasParams> launch(source_.kernel("grad_bias"), ceil_div(column_count(), kRowThreads));
        launch.set(&GradBiasParams::bias_partials, at(layout_.bias_partials))
            .set(&GradBiasParams::scalars, at(layout_.scalars))
            .set(&GradBiasParams::accumulator, at(layout_.bias_accumulator))
            .set(&GradBiasParams::grad_bias, slot(Slot::grad_bias) + first_column() * grad_element_)
            .set(&GradBiasParams::ld, stretch_.width)
            .set_list(&GradBiasParams::list, list_, at(layout_.scalars), first_row(variable(kRowBlock)))
            .set(&GradBiasParams::rows, row_count(variable(kRowBlock)))
            .set(&GradBiasParams::block_rows, rows_of_bias_partial(plan_))
            .set(&GradBiasParams::columns, column_count())
            .set(&GradBiasParams::first, equal(variable(kRowBlock), 0))
            .set(&GradBiasParams::last, is_last(kRowBlock, layout_.row_blocks));
        return launch.build();
    }

    /// What no chunk writes: gradients past the vocabulary, and everything when there is no token.
    void zero_the_rest(LaunchProgram& program) const {
        const std::int64_t weight_bytes = spec_.padded_vocab_size * spec_.hidden_size * grad_element_;
        const Expr no_token = equal(slot(Slot::num_tokens), 0);
        std::vector<Statement> weight;
        weight.push_back({If{no_token, {Statement{MemsetZero{slot(Slot::grad_weight), weight_bytes}}}}});
        if (zeroes_columns(spec_)) {
            const std::int64_t count = (spec_.padded_vocab_size - spec_.vocab_size) * spec_.hidden_size;
            LaunchBuilder<ZeroColumnsParams> launch(source_.kernel("zero_columns"), ceil_div(count, kRowThreads));
            launch.set(&ZeroColumnsParams::data, slot(Slot::grad_weight))
                .set(&ZeroColumnsParams::columns, spec_.padded_vocab_size)
                .set(&ZeroColumnsParams::first_column, spec_.vocab_size)
                .set(&ZeroColumnsParams::rows, spec_.hidden_size);
            weight.push_back(launch.build());
        } else if (spec_.padded_vocab_size > spec_.vocab_size) {
            const std::int64_t kept = spec_.vocab_size * spec_.hidden_size * grad_element_;
            weight.push_back({MemsetZero{slot(Slot::grad_weight) + kept, weight_bytes - kept}});
        }
        program.body.push_back({If{present(Slot::grad_weight), std::move(weight)}});
        if (spec_.bias) {
            const Expr empty = min(no_token, present(Slot::grad_bias));
            program.body.push_back({If{empty, {Statement{MemsetZero{slot(Slot::grad_bias), spec_.vocab_size * grad_element_}}}}});
        }
    }

    const Spec& spec_;
    std::int64_t clusters_;
    const Plan& plan_;
    const CudaSource& source_;
    const BackwardLayout& layout_;
    RetainedLayout retained_;
    Expr kept_;        ///< columns of the vocabulary whose exponentials there are
    Expr listing_;     ///< whether ignored tokens are left out
    Expr list_;        ///< address, or 0
    Stretch stretch_;  ///< that is being written
    std::int64_t element_;
    std::int64_t grad_element_;
};

}  // namespace

LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                               const BackwardLayout& layout) {
    return BackwardWriter(spec, device, plan, source, layout).program();
}

}  // namespace flce
