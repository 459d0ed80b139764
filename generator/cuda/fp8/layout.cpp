#include "generator/cuda/fp8/layout.hpp"

#include <algorithm>
#include <utility>

#include "generator/cuda/common/launch_builder.hpp"
#include "generator/cuda/fp8/path.hpp"
#include "templates/fp8/params.cuh"

namespace flce::fp8 {
namespace {

constexpr std::int64_t kReserveBytes = 160 << 10;  // scalars, what alignment costs, and positions of a least chunk without a token

/// Bytes of scratch beside what grows with a chunk: tokens are rounded up to groups of positions.
std::int64_t reserve_bytes(const Spec& spec) { return kReserveBytes + kFp8TokenGroup * spec.hidden_size + 8 * spec.vocab_size; }

/// Adds label smoothing's sums, which backward has there.
std::int64_t backward_reserve_bytes(const Spec& spec) { return reserve_bytes(spec) + smoothing_bytes(spec); }

/// Bytes of a row's partial sums.
std::int64_t sums_bytes(const Spec& spec) { return std::int64_t{4} * partial_fields(spec); }

std::int64_t grad_row_bytes(const Spec& spec) {
    return spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype));
}

/// Columns [first, end) in chunks that are nearly alike, of at most `most`, a multiple of kFp8Quantum.
Cut cut_columns(const Expr& first, const Expr& end, const Expr& most) {
    const Expr columns = end - first;
    const Expr count = ceil_div(columns, most);
    return {first, end, round_up(ceil_div(columns, max(count, 1)), kFp8Quantum), count};
}

/// Columns [first, end) in chunks of `width` columns, but for the last.
Cut cut_chunks(const Expr& first, const Expr& end, const Expr& width) { return {first, end, width, ceil_div(end - first, width)}; }

/// Whole quanta of columns, at least one.
Expr whole_quanta(const Expr& columns) { return max(round_down(columns, kFp8Quantum), kFp8Quantum); }

/// Columns of a chunk, of at most `most`, that make whole waves of grad_weight's tiles where there is one.
Expr whole_waves(const Spec& spec, const Device& device, const Gemms& gemms, const Expr& most) {
    std::int64_t rows = std::int64_t{gemms.cluster_blocks} * gemms.gradient.block_m;
    std::int64_t of_hidden = gemms.gradient.block_n;
    if (is_hidden_major(spec)) std::swap(rows, of_hidden);
    const std::int64_t across = (spec.hidden_size + of_hidden - 1) / of_hidden;
    const std::int64_t clusters = device.gpu.sm_count / gemms.cluster_blocks;
    const Expr waves = floor_div(floor_div(most, rows) * across, clusters);
    const Expr width = floor_div(waves * clusters, across) * rows;
    return select(less(width, kFp8Quantum), most, whole_quanta(width));
}

/// Bytes of a class's codes that are made; a weight of codes has them.
std::int64_t made_codes_bytes(const Spec& spec) { return is_quantized(spec) ? 0 : code_pitch(spec); }

/// Bytes of a class's exponentials by classes.
Expr turned_bytes(const Spec& spec) { return turns_exponentials(spec) ? token_positions() : Expr(0); }

/// Bytes of a chunk's column where logits are made again.
Expr again_bytes(const Spec& spec) { return slot(Slot::num_tokens) + turned_bytes(spec) + (made_codes_bytes(spec) + spec.hidden_size); }

/// Whether a gradient of the weight is written, whose memory may be lent.
bool writes_gradient(const Spec& spec) { return spec.grad_weight_mode == GradMode::write && !is_hidden_major(spec) && !is_quantized(spec); }

/// Places of a chunk of `width` columns from `begin` on, an address.
ChunkPlaces chunk_places(const Spec& spec, const Expr& begin, const Expr& width) {
    Pieces pieces(begin);
    ChunkPlaces places;
    places.turned_weight = pieces.take(width * spec.hidden_size);
    places.weight_codes = pieces.take(width * made_codes_bytes(spec));
    places.exponentials = pieces.take(width * slot(Slot::num_tokens));
    places.turned = pieces.take(width * turned_bytes(spec));
    return places;
}

}  // namespace

bool is_hidden_major(const Spec& spec) { return spec.layout == WeightLayout::hidden_major; }

std::int64_t code_pitch(const Spec& spec) { return multiple_above(spec.hidden_size, 16); }

Expr token_positions() { return round_up(max(slot(Slot::num_tokens), 1), kFp8TokenGroup); }

RetainedFp8 retained_layout(const Spec& spec, const Plan& plan) {
    RetainedFp8 r;
    if (plan.strategy != Strategy::retain) return r;
    const Expr n = slot(Slot::num_tokens);
    const Expr columns = vocab_columns(spec);
    const Expr whole_pitch = round_up(columns, kFp8ClassGroup);
    Pieces pieces;
    pieces.take(static_cast<std::int64_t>(sizeof(Fp8Largest)));
    r.powers = pieces.take(n * 4);
    r.target_logits = pieces.take(n * 4);
    r.exponentials = pieces.end();
    const Expr numbers = pieces.end();
    pieces.take(n * whole_pitch);
    r.most = pieces.end() + turned_bytes(spec) * columns;
    const Expr bytes = slot(Slot::retained_bytes);
    const Expr column = max(n, 1) + turned_bytes(spec);
    const auto columns_in = [&](const Expr& memory, const Expr& of_column) {
        const Expr fitting = floor_div(max(memory - numbers - 2 * kWorkspaceAlignment, 0), of_column);
        return min(round_down(fitting, kFp8Quantum), round_down(columns, kFp8Quantum));
    };
    const std::int64_t row_bytes = grad_row_bytes(spec);
    // A lent gradient's rows are written where exponentials by rows were, and before those by columns.
    const Expr of_lent = max(max(n, 1), row_bytes) + token_positions();
    if (writes_gradient(spec)) {
        const Expr gradient = columns * row_bytes;
        r.lendable = select(less(0, n) && less(0, columns_in(gradient, of_lent)), gradient, 0);
        r.lent = slot(Slot::retained_in_grad_weight) && less(0, bytes);
    }
    const Expr all = and_not(less(r.most, bytes + 1), r.lent);
    r.columns = select(all, columns, columns_in(bytes, select(r.lent, of_lent, column)));
    r.pitch = select(all, whole_pitch, r.columns);
    const Expr behind_rows = r.exponentials + round_up(n * r.pitch, kWorkspaceAlignment);
    r.turned = select(r.lent, max(behind_rows, round_up(r.columns * row_bytes, kWorkspaceAlignment)), behind_rows);
    return r;
}

ForwardLayoutFp8 forward_layout(const Spec& spec, const Plan& plan) {
    const Expr n = slot(Slot::num_tokens);
    ForwardLayoutFp8 f;
    f.retained = retained_layout(spec, plan);
    f.rows = max(n, 1);
    f.launches = min(n, 1);
    f.partial_rows = f.running_rows = round_up(n, 32);
    f.sums_run = true;
    Pieces pieces;
    pieces.take(static_cast<std::int64_t>(sizeof(PassScalars)));
    f.largest = pieces.take(static_cast<std::int64_t>(sizeof(Fp8Largest)));
    f.target_logits = pieces.take(n * 4);
    f.loss_partials = pieces.take(ceil_div(n, kOutputRows) * static_cast<std::int64_t>(sizeof(LossPartial)));
    f.running = pieces.take(f.running_rows * sums_bytes(spec));
    f.powers = pieces.take(n * 4);
    f.again = pieces.take(ceil_div(n, kFp8ClusterRows) * 4);
    f.row_scales = pieces.take(n * 4);
    f.hidden_codes = pieces.take(n * code_pitch(spec));
    // A column takes its codes, its scale (and factor), and its part of a tile's sums.
    const std::int64_t tile = sum_columns(gemms_of(plan.path), spec);
    const std::int64_t codes = made_codes_bytes(spec) + (is_hidden_major(spec) ? 8 : 4);
    const Expr most = floor_div((plan.scratch_bytes - reserve_bytes(spec)) * tile, codes * tile + f.partial_rows * sums_bytes(spec));
    f.cut = cut_columns(0, spec.vocab_size, whole_quanta(most));
    // A shard with fewer classes has fewer stretches, of the same width.
    if (is_shard(spec)) f.cut = cut_chunks(0, vocab_columns(spec), f.cut.width);
    f.column_scales = pieces.take(f.cut.width * 4);
    if (is_hidden_major(spec)) f.column_factors = pieces.take(f.cut.width * 4);
    f.weight_codes = pieces.take(f.cut.width * made_codes_bytes(spec));
    f.partials = pieces.take(floor_div(f.cut.width, tile) * f.partial_rows * sums_bytes(spec));
    f.total = pieces.end();
    return f;
}

namespace {

/// Whether the call has a grad_weight that will be written, whose memory is free until then: 0 or 1.
Expr has_free_gradient(const Spec& spec) { return spec.grad_weight_mode == GradMode::write ? present(Slot::grad_weight) : Expr(0); }

/// Chunks of the columns behind the retained ones: wide ones, at the end of grad_weight's memory while the rows there are not written, and
/// the rest in scratch. Costs of a chunk beside its products do not depend on its width, so each is as wide as the memory behind its own
/// rows allows, whatever the plan's chunk, which is a limit in scratch. A hidden_major gradient has no wide
/// ones: each of its rows has columns of every chunk.
void place_again(const Spec& spec, const Device& device, const Plan& plan, const Expr& scratch, BackwardLayoutFp8& b) {
    constexpr int kWide = 7;  // the last of them is a sixth of the first where each takes a quarter
    constexpr std::int64_t kAlignments = 8 * kWorkspaceAlignment;
    const std::int64_t row_bytes = grad_row_bytes(spec);
    const Expr columns = vocab_columns(spec);
    const Expr all_bytes = columns * row_bytes;
    const Expr fitting = whole_quanta(floor_div(plan.scratch_bytes - backward_reserve_bytes(spec), again_bytes(spec)));
    const Expr in_scratch = whole_waves(spec, device, gemms_of(plan.path), min(fitting, whole_quanta(plan.vocab_chunk)));
    Expr rest = b.retained.columns;
    for (int i = 0; i < (writes_gradient(spec) ? kWide : 0); ++i) {
        const Expr bytes = max(all_bytes - kAlignments - rest * row_bytes, 0);
        const Expr width = whole_waves(spec, device, gemms_of(plan.path), whole_quanta(floor_div(bytes, again_bytes(spec) + row_bytes)));
        const Expr begin = all_bytes - kAlignments - width * again_bytes(spec);
        const Expr fits = less(in_scratch, width) && less((rest + width) * row_bytes, begin + 1);
        b.again.push_back({rest, columns, width, select(has_free_gradient(spec), fits, 0)});
        b.again_places.push_back(chunk_places(spec, round_up(slot(Slot::grad_weight) + begin, kWorkspaceAlignment), width));
        rest = rest + b.again.back().count * width;
    }
    b.again.push_back(cut_chunks(rest, columns, in_scratch));
    b.again_places.push_back(chunk_places(spec, scratch, in_scratch));
}

/// Chunks of the retained columns' weight turned over, in grad_weight's memory where that is free.
void place_kept(const Spec& spec, const Expr& scratch, const Expr& room, BackwardLayoutFp8& b) {
    const Expr free = max(vocab_columns(spec) * grad_row_bytes(spec) - kWorkspaceAlignment, 0);
    const Expr wide = round_down(floor_div(free, spec.hidden_size), kFp8Quantum);
    const Expr takes = and_not(less(0, wide) && has_free_gradient(spec), b.retained.lent);
    b.kept = cut_columns(0, b.retained.columns, select(takes, wide, whole_quanta(floor_div(room, spec.hidden_size))));
    b.kept_places.turned_weight = select(takes, round_up(slot(Slot::grad_weight), kWorkspaceAlignment), scratch);
}

}  // namespace

BackwardLayoutFp8 backward_layout(const Spec& spec, const Device& device, const Plan& plan) {
    const Expr n = slot(Slot::num_tokens);
    BackwardLayoutFp8 b;
    b.retained = retained_layout(spec, plan);
    // Exponentials that forward has kept know nothing of the entropy's gradient.
    if (spec.outputs.entropy) b.retained.columns = select(present(Slot::grad_entropy), 0, b.retained.columns);
    b.rows = max(n, 1);
    b.row_blocks = min(n, 1);
    Pieces pieces;
    pieces.take(static_cast<std::int64_t>(sizeof(PassScalars)));
    b.largest = pieces.take(static_cast<std::int64_t>(sizeof(Fp8Largest)));
    b.coefficients = pieces.take(n * 16);
    b.row_targets = pieces.take(n * 8);
    if (spec.temperature) b.row_temperatures = pieces.take(n * 4);
    for (Expr* numbers : {&b.powers, &b.factors, &b.target_dz, &b.target_logits, &b.order, &b.row_scales}) *numbers = pieces.take(n * 4);
    if (spec.outputs.entropy) b.row_shares = pieces.take(n * 8);
    if (spec.label_smoothing > 0) {
        b.row_smoothing = pieces.take(n * 4);
        b.smoothing = pieces.take(smoothing_bytes(spec));
    }
    const std::int64_t classes = multiple_above(spec.vocab_size, kFp8Quantum);  // tiles read scales to their ends
    for (Expr* numbers : {&b.class_scales, &b.class_factors}) *numbers = pieces.take(classes * 4);
    b.hidden_codes = pieces.take(n * code_pitch(spec));
    b.hidden_turned = pieces.take(token_positions() * spec.hidden_size);
    b.sum = pieces.take(n * (4 * spec.hidden_size));
    const Expr scratch = workspace_at(pieces.end());
    const Expr room = max(plan.scratch_bytes - backward_reserve_bytes(spec), again_bytes(spec) * kFp8Quantum);
    place_kept(spec, scratch, room, b);
    place_again(spec, device, plan, scratch, b);
    b.total = pieces.end() + room;
    return b;
}

std::int64_t least_scratch_bytes(const Spec& spec, const Plan& /*plan*/) {
    return backward_reserve_bytes(spec) + kFp8Quantum * (code_pitch(spec) + spec.hidden_size + 4);
}

}  // namespace flce::fp8
