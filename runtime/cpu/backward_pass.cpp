// Backward: vocabulary chunk after chunk, and row block after row block where tokens are many. A step computes a block's logits again or
// takes what forward retained of them, turns them into their gradient dz, packed for both uses, and multiplies it: grad_hidden += dz·W_c,
// grad_weight_c = dzᵀ·H. The tasks that multiply step s and those that compute the dz of step s + 1 run together, so that threads meet
// once a step.
#include <algorithm>
#include <cstring>
#include <optional>

#include "runtime/cpu/divergence.hpp"
#include "runtime/cpu/fp8_gradients.hpp"
#include "runtime/cpu/passes.hpp"
#include "runtime/cpu/teacher.hpp"
#include "templates/common/fp8_codes.cuh"

namespace flce {
namespace {

/// A chunk of the vocabulary for a block of tokens.
struct Step {
    std::int64_t index = 0;  ///< parity decides which of the two buffers holds its dz
    std::int64_t token = 0;
    std::int64_t rows = 0;
    std::int64_t vocab = 0;
    std::int64_t columns = 0;
    bool first_block = false, last_block = false;  ///< first block of rows: a chunk's grad_weight and grad_bias begin; last block: they are
                                                   ///< complete
    bool first_chunk = false, last_chunk = false;  ///< first chunk of the vocabulary: a block's grad_hidden begins; last chunk: it is
                                                   ///< complete
};

/// A grid of tiles over a matrix.
struct TileGrid {
    Blocks rows;
    Blocks columns;
    [[nodiscard]] std::int64_t count() const { return rows.count * columns.count; }
    [[nodiscard]] TileRange range(std::int64_t tile) const {
        const std::int64_t row = tile % rows.count;
        const std::int64_t column = tile / rows.count;
        return {rows.begin(row), rows.length(row), columns.begin(column), columns.length(column)};
    }
};

class BackwardPass {
public:
    BackwardPass(const CpuContext& context, const CpuCall& call)
        : context_(context),
          code_(context.code),
          plan_(context.plan.cpu),
          call_(call),
          spec_(call.spec()),
          layout_(cpu_backward_layout(call.spec(), context.plan, context.threads, call.num_tokens(), call.vocab_columns())),
          workspace_(call.pointer(Slot::workspace)),
          element_(static_cast<std::int64_t>(element_bytes(spec_.dtype))),
          grad_element_(static_cast<std::int64_t>(element_bytes(spec_.grad_weight_dtype))),
          options_(call.loss_options()),
          teacher_(call),
          divisors_(call.mean_divisors()),
          retained_(cpu_retained(context.plan, call.num_tokens(), call.vocab_columns(),
                                 has_teacher_head(spec_) ? 0 : call.value(Slot::retained_bytes))) {
        if (has_teacher_head(spec_)) divergence_.emplace(call);
        if (!is_fp8(spec_)) return;
        fp8_.emplace(context, call, reinterpret_cast<float*>(workspace_ + layout_.weight_sum),
                     reinterpret_cast<float*>(workspace_ + layout_.hidden_sum));
    }

    void run() {
        // Both gradients go along with each other, chunk by chunk.
        if (static_cast<BackwardStage>(call_.value(Slot::stage)) == BackwardStage::rest) return;
        clear_what_no_step_writes();
        if (fp8_) fp8_->find_powers([this](std::int64_t token) { return grad_row(token, 0); });
        const std::int64_t blocks = layout_.row_blocks.count;
        const std::int64_t steps = blocks * layout_.chunks.count;
        for (std::int64_t s = 0; s <= steps && steps > 0; ++s) {
            if (s < steps) prepare(step(s), s == 0 || blocks > 1);
            run_tasks(s > 0 ? step(s - 1) : Step{}, s < steps ? step(s) : Step{});
        }
    }

private:
    [[nodiscard]] Step step(std::int64_t s) const {
        const std::int64_t block = s % layout_.row_blocks.count;
        const std::int64_t chunk = s / layout_.row_blocks.count;
        return {.index = s,
                .token = layout_.row_blocks.begin(block),
                .rows = layout_.row_blocks.length(block),
                .vocab = layout_.chunks.begin(chunk),
                .columns = layout_.chunks.length(chunk),
                .first_block = block == 0,
                .last_block = block + 1 == layout_.row_blocks.count,
                .first_chunk = chunk == 0,
                .last_chunk = chunk + 1 == layout_.chunks.count};
    }

    // Places of a step's results.
    [[nodiscard]] PackedA hidden_panels() const { return {workspace_ + layout_.hidden_panels, depth_units(plan_, spec_.hidden_size)}; }
    [[nodiscard]] PackedA teacher_panels() const {
        return {workspace_ + layout_.teacher_panels, depth_units(plan_, spec_.teacher_hidden_size)};
    }
    [[nodiscard]] PackedA dlogits_rows(const Step& s) const {
        return {workspace_ + layout_.dlogits_rows + s.index % 2 * layout_.dlogits_rows_stride, depth_units(plan_, s.columns)};
    }
    [[nodiscard]] PackedA dlogits_columns(const Step& s) const {
        return {workspace_ + layout_.dlogits_columns + s.index % 2 * layout_.dlogits_columns_stride, depth_units(plan_, s.rows)};
    }
    [[nodiscard]] float* column_sums(const Step& s, std::int64_t tile) const {
        return reinterpret_cast<float*>(workspace_ + layout_.column_sums + s.index % 2 * layout_.column_sums_stride) + tile * s.columns;
    }
    [[nodiscard]] Fp8Rows fp8_memory() const {
        return {layout_.slot, workspace_ + layout_.slot_offset, layout_.slots, reinterpret_cast<float*>(workspace_ + layout_.row_factors),
                reinterpret_cast<float*>(workspace_ + layout_.row_scales)};
    }
    [[nodiscard]] Fp8Row* fp8_rows(const Step& s) const {
        return reinterpret_cast<Fp8Row*>(workspace_ + layout_.fp8_rows + s.index % 2 * layout_.fp8_rows_stride);
    }
    [[nodiscard]] Fp8Step fp8_step(const Step& s) const { return {fp8_rows(s), s.token, s.rows, s.vocab, s.first_chunk, s.first_block}; }
    [[nodiscard]] float* hidden_factors(const Step& s) const {
        return reinterpret_cast<float*>(workspace_ + layout_.hidden_factors + s.index % 2 * layout_.hidden_factors_stride);
    }
    [[nodiscard]] GradRow* grad_rows() const { return reinterpret_cast<GradRow*>(workspace_ + layout_.grad_rows); }
    [[nodiscard]] bool wants(Slot gradient) const { return call_.has(gradient); }

    void prepare(const Step& s, bool new_rows) const {
        if (new_rows && is_fp8(spec_)) {
            pack_hidden_codes(context_, call_, fp8_memory(), hidden_panels(), s.token, s.rows);
        } else if (new_rows) {
            pack_hidden_rows(context_, call_, Slot::hidden, hidden_panels(), s.token, s.rows);
            if (divergence_) pack_hidden_rows(context_, call_, Slot::teacher_hidden, teacher_panels(), s.token, s.rows);
        }
        for (std::int64_t i = 0; i < padded_rows(s.rows); ++i) {
            grad_rows()[i] = i < s.rows ? grad_row(s.token + i, s.vocab) : kInertRow;
            if (!fp8_) continue;
            fp8_rows(s)[i] = fp8_->row(grad_rows()[i]);
            hidden_factors(s)[i] = fp8_rows(s)[i].factor * fp8::power_of_two(fp8_->hidden_power());
        }
    }

    [[nodiscard]] std::int64_t padded_rows(std::int64_t rows) const { return (rows + plan_.micro_m - 1) / plan_.micro_m * plan_.micro_m; }

    /// Upstream gradients of one token as coefficients of its logits.
    [[nodiscard]] GradRow grad_row(std::int64_t token, std::int64_t first_column) const {
        const std::int64_t y = call_.valid_label(token);
        if (y < 0) return kInertRow;
        const RowUpstream upstream = upstream_of(call_, token, divisors_, options_);
        const float lse = call_.pointer<const float>(Slot::lse)[token];
        const float entropy = call_.element(Slot::entropy, token, 0.F);
        const std::int64_t own = call_.column_of(y);
        const std::int64_t column = own - first_column;
        const bool near = own >= 0 && column >= 0 && column < layout_.chunks.size;
        const RowCoefficients coefficients =
            row_coefficients(upstream, lse, entropy, call_.class_weight_of_target(token, y), teacher_.sum(token), options_);
        const float exponent = is_fp8(spec_) ? fp8::exponent_of_sum(lse, spec_.fp8_dlogits == Fp8Dlogits::e4m3) : 0.F;
        const fp8::RowShares shares = fp8::row_shares(coefficients.a, coefficients.b, lse);
        return {lse,
                coefficients,
                call_.temperature(token),
                near ? static_cast<std::int32_t>(column) : GradRow::kElsewhere,
                call_.row_group(token),
                exponent,
                shares.at_lse,
                shares.slope};
    }

    void run_tasks(const Step& done, const Step& next) const {
        const Blocks hidden_columns = fixed_blocks(spec_.hidden_size, plan_.block_n);
        const bool multiply = done.rows > 0;
        const TileGrid hidden{row_tiles(plan_, done.rows), hidden_columns};
        const TileGrid weight{row_tiles(plan_, done.columns), hidden_columns};
        const TileGrid logits{row_tiles(plan_, next.rows), fixed_blocks(next.columns, plan_.block_n)};
        const std::int64_t hidden_tasks = multiply && wants(Slot::grad_hidden) ? hidden.count() : 0;
        const std::int64_t logit_tasks = next.rows > 0 ? logits.count() : 0;
        const std::int64_t weight_tasks = multiply && wants(Slot::grad_weight) ? weight.count() : 0;
        const std::int64_t bias_tasks = multiply && wants(Slot::grad_bias) ? 1 : 0;
        // Longest tasks first.
        context_.workers->run(hidden_tasks + logit_tasks + weight_tasks + bias_tasks, layout_.slots,
                              [&](std::int64_t task, std::int64_t worker) {
                                  const WorkerSlot slot(layout_.slot, workspace_ + layout_.slot_offset + worker * layout_.slot.bytes);
                                  if (task < hidden_tasks) return multiply_hidden(slot, done, hidden.range(task));
                                  task -= hidden_tasks;
                                  if (task < logit_tasks)
                                      return differentiate_logits(slot, next, logits.range(task), task % logits.rows.count);
                                  task -= logit_tasks;
                                  if (task < weight_tasks) return multiply_weight(slot, done, weight.range(task));
                                  sum_bias(done, hidden.rows.count);
                              });
    }

    /// A tile of logits, its gradient, and that packed: by rows for grad_hidden, by columns for grad_weight.
    void differentiate_logits(const WorkerSlot& slot, const Step& s, const TileRange& range, std::int64_t row_tile) const {
        const std::int64_t ld = plan_.block_n;
        const std::int64_t rows = padded_rows(range.rows);
        slot.load_strip(context_, call_, s.vocab + range.column, range.columns);
        if (retained_.holds(s.vocab + range.column)) {
            take_retained(slot.tile, s, range);
        } else {
            multiply_logits(context_, call_, slot, hidden_panels(), fp8_memory().scales, s.vocab + range.column, range);
        }
        if (divergence_) {
            differentiate_divergence(slot, s, range, rows);
        } else {
            code_.backward_tile(slot.tile, ld, rows, range.columns, ld, slot.bias, slot.class_weight, context_.transform_parameters.data(),
                                grad_rows() + range.row, range.column, slot.class_offset, slot.class_groups);
        }
        if (teacher_.present()) subtract_teacher(slot.tile, s, range);
        if (fp8_) fp8_->round_tile(slot.tile, fp8_step(s), range);
        if (wants(Slot::grad_hidden)) {
            const PackedA packed = dlogits_rows(s);
            for (std::int64_t i = 0; i < rows; i += plan_.micro_m) {
                code_.pack_dlogits_rows(slot.tile + i * ld, ld, packed.at(plan_, range.row + i, depth_units(plan_, range.column)),
                                        plan_.micro_m, range.columns);
            }
        }
        if (wants(Slot::grad_weight)) {
            const PackedA packed = dlogits_columns(s);
            for (std::int64_t j = 0; j < range.columns; j += plan_.micro_m) {
                code_.pack_dlogits_columns(slot.tile + j, ld, packed.at(plan_, range.column + j, depth_units(plan_, range.row)),
                                           plan_.micro_m, range.rows);
            }
        }
        if (!wants(Slot::grad_bias)) return;
        float* const sums = column_sums(s, row_tile) + range.column;
        if (fp8_) return fp8_->sum_columns(slot.tile, fp8_step(s), range, sums);
        code_.column_sums(slot.tile, ld, range.rows, range.columns, sums);
    }

    /// The student's tile of hidden · weightᵀ becomes its gradient, 0 beyond the range.
    void differentiate_divergence(const WorkerSlot& slot, const Step& s, const TileRange& range, std::int64_t rows) const {
        TileRange strip = range;
        strip.column = 0;
        multiply_tile(code_, plan_, teacher_panels(), teacher_weight_for_logits(context_, call_, s.vocab + range.column), strip,
                      spec_.teacher_hidden_size, slot.b_block, slot.teacher_tile);
        for (std::int64_t i = 0; i < rows; ++i) {
            float* row = slot.tile + i * plan_.block_n;
            const GradRow& of_row = grad_rows()[range.row + i];
            const std::int64_t columns = i < range.rows && of_row.target != GradRow::kIgnored ? range.columns : 0;
            if (columns > 0) divergence_->differentiate(slot, of_row, s.token + range.row + i, i * plan_.block_n, columns);
            std::fill(row + columns, row + plan_.block_n, 0.F);
        }
    }

    /// Subtracts the probabilities of the tokens' teacher from the tile of gradients, while they are fp32.
    void subtract_teacher(float* tile, const Step& s, const TileRange& range) const {
        for (std::int64_t i = 0; i < range.rows; ++i) {
            const std::int64_t token = s.token + range.row + i;
            if (call_.valid_label(token) < 0) continue;
            const float weight = teacher_weight(upstream_of(call_, token, divisors_, options_), options_);
            teacher_.subtract(token, weight, tile + i * plan_.block_n, s.vocab + range.column, range.columns);
        }
    }

    /// The tile as forward left it, 0 where it only fills up register blocks.
    void take_retained(float* tile, const Step& s, const TileRange& range) const {
        const std::byte* from =
            call_.pointer(Slot::retained) + retained_.offset(s.vocab + range.column, range.columns, s.token + range.row);
        for (std::int64_t i = 0; i < padded_rows(range.rows); ++i) {
            float* row = tile + i * plan_.block_n;
            const std::int64_t columns = i < range.rows ? range.columns : 0;
            std::memcpy(row, from + i * 4 * range.columns, static_cast<std::size_t>(4 * columns));
            std::fill(row + columns, row + plan_.block_n, 0.F);
        }
    }

    void multiply_hidden(const WorkerSlot& slot, const Step& s, const TileRange& range) const {
        const bool vocab_major = spec_.layout == WeightLayout::vocab_major;
        const auto weight_element = static_cast<std::int64_t>(element_bytes(weight_dtype(spec_)));
        UnpackedB weight{.data = call_.pointer(Slot::weight) + s.vocab * weight_element * (vocab_major ? spec_.hidden_size : 1),
                         .ld = vocab_major ? spec_.hidden_size : spec_.padded_vocab_size,
                         .element_bytes = weight_element,
                         .depth_contiguous = !vocab_major,
                         .pack = code_.pack_weight_grad};
        if (is_quantized(spec_)) {
            weight = {.pack = code_.pack_weight_grad,
                      .quantized = QuantizedWeight(call_),
                      .first_class = s.vocab,
                      .dequantized = slot.dequantized};
        }
        if (is_fp8(spec_)) {
            weight = {.depth_contiguous = !vocab_major,
                      .pack = code_.pack_weight_grad,
                      .dequantized = slot.dequantized,
                      .rounded = fp8_->weight(s.vocab)};
        }
        const std::int64_t d = spec_.hidden_size;
        const std::int64_t offset = (s.token + range.row) * d + range.column;
        const bool in_place = sums_in_place();
        float* accumulator =
            reinterpret_cast<float*>(in_place ? call_.pointer(Slot::grad_hidden) : workspace_ + layout_.hidden_accumulator);
        const auto apply = [&](StoreTile store, const float* from, std::int64_t ld, void* to, std::int64_t to_ld) {
            store(from, ld, to, to_ld, range.rows, range.columns);
        };
        // A sum that goes on in the same order, wherever a chunk ends, does not depend on how wide chunks are.
        const bool goes_on = spec_.batch_invariant && !s.first_chunk;
        if (goes_on) apply(code_.write_float, accumulator + offset, d, slot.tile, plan_.block_n);
        multiply_tile(code_, plan_, dlogits_rows(s), weight, range, s.columns, slot.b_block, slot.tile, goes_on);
        if (fp8_) fp8_->finish_hidden(slot.tile, fp8_step(s), range);
        const bool begins = s.first_chunk || goes_on;
        if (in_place || !s.last_chunk) {
            apply(begins ? code_.write_float : code_.add_float, slot.tile, plan_.block_n, accumulator + offset, d);
        } else {
            if (!begins) apply(code_.add_float, accumulator + offset, d, slot.tile, plan_.block_n);
            apply(code_.store_hidden, slot.tile, plan_.block_n, call_.pointer(Slot::grad_hidden) + offset * element_, d);
        }
        if (s.last_chunk) zero_ignored(s.token + range.row, range);
    }

    /// A row of zeros times the weight is not 0 where the weight holds infinities or NaN.
    void zero_ignored(std::int64_t first_token, const TileRange& range) const {
        const std::int64_t d = spec_.hidden_size;
        for (std::int64_t i = 0; i < range.rows; ++i) {
            if (call_.valid_label(first_token + i) >= 0) continue;
            const auto element = static_cast<std::int64_t>(element_bytes(grad_hidden_dtype(spec_)));
            std::byte* row = call_.pointer(Slot::grad_hidden) + ((first_token + i) * d + range.column) * element;
            std::memset(row, 0, static_cast<std::size_t>(range.columns * element));
        }
    }

    void multiply_weight(const WorkerSlot& slot, const Step& s, const TileRange& range) const {
        const std::int64_t d = spec_.hidden_size;
        UnpackedB hidden{.data = call_.pointer(Slot::hidden) + s.token * d * element_,
                         .ld = d,
                         .element_bytes = element_,
                         .depth_contiguous = false,
                         .pack = code_.pack_hidden_grad,
                         .call = &call_,
                         .first_token = s.token};
        if (is_fp8(spec_)) {
            hidden.dequantized = slot.dequantized;
            hidden.rounded = Fp8Numbers(spec_.dtype, hidden.data, d, Fp8Numbers::Rounding::e4m3, hidden_factors(s));
        }
        multiply_tile(code_, plan_, dlogits_columns(s), hidden, range, s.rows, slot.b_block, slot.tile);
        if (fp8_) fp8_->finish_weight(slot.tile, fp8_step(s), range);
        float* accumulator = reinterpret_cast<float*>(workspace_ + layout_.weight_accumulator) + range.row * d + range.column;
        if (!s.last_block) {
            (s.first_block ? code_.write_float : code_.add_float)(slot.tile, plan_.block_n, accumulator, d, range.rows, range.columns);
            return;
        }
        if (!s.first_block) code_.add_float(accumulator, d, slot.tile, plan_.block_n, range.rows, range.columns);
        const bool vocab_major = spec_.layout == WeightLayout::vocab_major;
        const std::int64_t vocab = s.vocab + range.row;
        const std::int64_t offset = vocab_major ? vocab * d + range.column : range.column * spec_.padded_vocab_size + vocab;
        code_.store_weight(slot.tile, plan_.block_n, call_.pointer(Slot::grad_weight) + offset * grad_element_,
                           vocab_major ? d : spec_.padded_vocab_size, range.rows, range.columns);
    }

    void sum_bias(const Step& s, std::int64_t tiles) const {
        auto* sums = reinterpret_cast<float*>(workspace_ + layout_.bias_accumulator);
        for (std::int64_t tile = 0; tile < tiles; ++tile) {
            const bool first = s.first_block && tile == 0;
            (first ? code_.write_float : code_.add_float)(column_sums(s, tile), s.columns, sums, s.columns, 1, s.columns);
        }
        if (!s.last_block) return;
        code_.store_bias(sums, s.columns, call_.pointer(Slot::grad_bias) + s.vocab * grad_element_, s.columns, 1, s.columns);
    }

    /// grad_hidden is fp32, and so its own accumulator.
    [[nodiscard]] bool sums_in_place() const { return grad_hidden_dtype(spec_) == DType::fp32; }

    void clear_what_no_step_writes() const {
        const bool no_step = call_.num_tokens() == 0 || call_.vocab_columns() == 0;
        if (no_step && wants(Slot::grad_hidden)) {
            const auto elements = call_.num_tokens() * spec_.hidden_size;
            clear(Slot::grad_hidden, 0, elements * static_cast<std::int64_t>(element_bytes(grad_hidden_dtype(spec_))));
        }
        if (spec_.grad_weight_mode == GradMode::write) clear_padding(no_step ? 0 : call_.vocab_columns());
    }

    /// Gradients of the weight's rows from `first` on, which are only padding or, where there is no token, everything.
    void clear_padding(std::int64_t first) const {
        const std::int64_t bytes = (call_.value(Slot::weight_rows) - first) * grad_element_;
        if (wants(Slot::grad_weight)) {
            if (spec_.layout == WeightLayout::vocab_major) {
                clear(Slot::grad_weight, first * spec_.hidden_size * grad_element_, bytes * spec_.hidden_size);
            } else {
                for (std::int64_t d = 0; d < spec_.hidden_size; ++d) {
                    clear(Slot::grad_weight, (d * spec_.padded_vocab_size + first) * grad_element_, bytes);
                }
            }
        }
        if (!wants(Slot::grad_bias)) return;
        const std::int64_t biases = is_shard(spec_) ? call_.value(Slot::weight_rows) : spec_.vocab_size;
        clear(Slot::grad_bias, first * grad_element_, (biases - first) * grad_element_);
    }

    void clear(Slot gradient, std::int64_t first_byte, std::int64_t bytes) const {
        if (bytes > 0) std::memset(call_.pointer(gradient) + first_byte, 0, static_cast<std::size_t>(bytes));
    }

    static constexpr GradRow kInertRow{0.F, {0.F, 0.F, 0.F, 0.F}, 1.F, GradRow::kIgnored, -1, 0.F, 1.F, 0.F};

    const CpuContext& context_;
    const CpuFunctions& code_;
    const CpuPlan& plan_;
    const CpuCall& call_;
    const Spec& spec_;
    const CpuBackwardLayout layout_;
    std::byte* const workspace_;
    const std::int64_t element_;
    const std::int64_t grad_element_;
    const LossOptions options_;
    const CpuTeacher teacher_;
    const MeanDivisors divisors_;
    const CpuRetained retained_;
    std::optional<CpuDivergence> divergence_;
    std::optional<Fp8Gradients> fp8_;
};

}  // namespace

void run_cpu_backward(const CpuContext& context, const CpuCall& call) { BackwardPass(context, call).run(); }

}  // namespace flce
