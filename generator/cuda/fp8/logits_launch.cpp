#include "generator/cuda/fp8/logits_launch.hpp"

#include <utility>
#include <vector>

namespace flce::fp8 {
namespace {

LaunchBuilder<Fp8CodesParams> codes_of(const Spec& spec, const CudaSource& source, const CodesAt& at) {
    using Params = Fp8CodesParams;
    LaunchBuilder<Params> launch(source.kernel(KernelRole::fp8_codes), warps_grid(at.rows));
    launch.set(&Params::from, at.from)
        .set(&Params::codes, at.codes)
        .set(&Params::scales, at.scales)
        .set(&Params::largest, at.largest)
        .set(&Params::unless, at.unless)
        .set(&Params::pitch, code_pitch(spec))
        .set(&Params::rows, at.rows);
    if (has_fp8_scales(spec)) launch.set(&Params::given_scale, slot(at.given_scale));
    return launch;
}

}  // namespace

Expr warps_grid(const Expr& rows) { return ceil_div(rows, kRowThreads / 32); }

Expr weight_row_at(const Spec& spec, const Expr& row) {
    const auto element = static_cast<std::int64_t>(is_quantized(spec) ? 1 : element_bytes(spec.dtype));
    return slot(Slot::weight) + row * (is_hidden_major(spec) ? element : spec.hidden_size * element);
}

Expr weight_scale_at(const Expr& row) { return slot(Slot::weight_scale) + row * 4; }

Statement given_scales_launch(const CudaSource& source, const CodesAt& at, const Expr& first) {
    using Params = Fp8GivenScalesParams;
    const Expr blocks = select(at.largest, warps_grid(at.rows), ceil_div(at.rows, kRowThreads));
    LaunchBuilder<Params> launch(source.kernel(KernelRole::fp8_scales), blocks);
    launch.set(&Params::from, at.from)
        .set(&Params::given, weight_scale_at(first))
        .set(&Params::scales, at.scales)
        .set(&Params::largest, at.largest)
        .set(&Params::rows, at.rows);
    return launch.build();
}

Statement scales_launch(const Spec& spec, const CudaSource& source, const CodesAt& at) {
    using Params = Fp8CodesParams;
    const Expr blocks = is_hidden_major(spec) ? ceil_div(at.rows, kFp8Square) : warps_grid(at.rows);
    LaunchBuilder<Params> launch(source.kernel(KernelRole::fp8_scales), blocks);
    launch.set(&Params::from, at.from)
        .set(&Params::scales, at.scales)
        .set(&Params::row_factors, at.factors)
        .set(&Params::largest, at.largest)
        .set(&Params::unless, at.unless)
        .set(&Params::rows, at.rows);
    if (has_fp8_scales(spec)) launch.set(&Params::given_scale, slot(at.given_scale));
    return launch.build();
}

LaunchBuilder<Fp8TurnParams> turn_launch(const Spec& spec, const CudaSource& source, KernelRole kernel, const TurnAt& at) {
    using Params = Fp8TurnParams;
    Expr across = (spec.hidden_size + kFp8Square - 1) / kFp8Square;
    Expr down = ceil_div(at.rows, kFp8Square);
    // Blocks that run side by side have neighbours in memory.
    if (is_hidden_major(spec) && kernel != KernelRole::fp8_turn_hidden) std::swap(across, down);
    LaunchBuilder<Params> launch(source.kernel(kernel), across, down);
    launch.set(&Params::from, at.from)
        .set(&Params::codes, at.codes)
        .set(&Params::largest, at.largest)
        .set(&Params::positions, at.positions)
        .set(&Params::rows, at.rows);
    return launch;
}

std::vector<Statement> weight_codes_steps(const Spec& spec, const CudaSource& source, const CodesAt& at) {
    if (!is_hidden_major(spec)) return {codes_of(spec, source, at).build()};
    using Params = Fp8TurnParams;
    LaunchBuilder<Params> codes = turn_launch(spec, source, KernelRole::fp8_both_codes, {at.from, at.rows, 0, 0, 0});
    codes.set(&Params::row_codes, at.codes).set(&Params::row_factors, at.factors).set(&Params::unless, at.unless);
    return {scales_launch(spec, source, at), codes.build()};
}

Statement hidden_codes_launch(const Spec& spec, const CudaSource& source, const Expr& codes, const Expr& scales) {
    using Params = Fp8CodesParams;
    const CodesAt at{.from = slot(Slot::hidden),
                     .rows = slot(Slot::num_tokens),
                     .codes = codes,
                     .scales = scales,
                     .given_scale = Slot::fp8_hidden_scale};
    LaunchBuilder<Params> launch = codes_of(spec, source, at);
    launch.set_targets(&Params::targets, spec, 0).set(&Params::temperature, slot(Slot::temperature));
    return launch.build();
}

Expr logits_grid(const Gemms& gemms, const Spec& spec, const Device& device, const Expr& columns) {
    return grid_of(gemms, device, logits_tile(gemms, spec), slot(Slot::num_tokens), columns);
}

namespace {

template <class Matrix>
Statement logits_launch_of(const Gemms& gemms, const Spec& spec, LaunchBuilder<ForwardParams> launch, const LogitsAt& at) {
    using Params = Fp8LogitsOf<Matrix>;
    const Expr n = slot(Slot::num_tokens);
    const GemmTile& tile = logits_tile(gemms, spec);
    const std::int64_t pitch = code_pitch(spec);
    const Expr stores = turns_exponentials(spec) ? less(0, at.stored) : Expr(0);
    LaunchBuilder<Params> full(std::move(launch));
    set_matrix(full, &Params::hidden_map, {at.hidden_codes, pitch, n, pitch}, tile.block_m, 1);
    set_matrix(full, &Params::weight_map, {at.weight_codes, pitch, at.columns, pitch}, tile.block_n / gemms.cluster_blocks, 1);
    // There is always something to map; where nothing is stored it is not used.
    set_matrix(full, &Params::turned_map,
               {select(stores, at.turned, at.hidden_codes), select(stores, token_positions(), pitch), select(stores, at.stored, n),
                select(stores, token_positions(), pitch)},
               tile.block_n, 1);
    full.set(&Params::row_scales, at.row_scales)
        .set(&Params::column_scales, at.column_scales)
        .set(&Params::powers, at.powers)
        .set(&Params::exponentials, at.exponentials)
        .set(&Params::again, at.again)
        .set(&Params::unless, at.unless)
        .set(&Params::pitch, at.pitch)
        .set(&Params::first_column, at.first)
        .set(&Params::columns, at.columns)
        .set(&Params::stored, at.stored)
        .set(&Params::sums, at.sums);
    if (spec.outputs.entropy) full.set(&Params::row_shares, at.row_shares);
    return build_with_rows(std::move(full), spec, {slot(Slot::temperature)});
}

}  // namespace

Statement logits_launch(const Gemms& gemms, const Spec& spec, LaunchBuilder<ForwardParams> launch, const LogitsAt& at) {
    if (gemms.maps) return logits_launch_of<TensorMap>(gemms, spec, std::move(launch), at);
    return logits_launch_of<PlainMatrix>(gemms, spec, std::move(launch), at);
}

Statement targets_launch(const Spec& spec, const CudaSource& source, const Expr& target_logits) {
    using Params = Fp8TargetsParams;
    LaunchBuilder<Params> launch(source.kernel(KernelRole::fp8_targets), warps_grid(slot(Slot::num_tokens)));
    launch.set(&Params::hidden, slot(Slot::hidden))
        .set(&Params::weight, slot(Slot::weight))
        .set(&Params::bias, slot(Slot::bias))
        .set(&Params::class_offset, slot(Slot::class_offset))
        .set_targets(&Params::targets, spec, 0)
        .set(&Params::temperature, slot(Slot::temperature))
        .set(&Params::target_logits, target_logits)
        .set_transform(&Params::transform, spec)
        .set(&Params::rows, slot(Slot::num_tokens));
    if (has_fp8_scales(spec)) {
        launch.set(&Params::hidden_scale, slot(Slot::fp8_hidden_scale)).set(&Params::weight_scale, slot(Slot::fp8_weight_scale));
    }
    if (!is_quantized(spec)) return launch.build();
    LaunchBuilder<Fp8TargetsOfCodesParams> of_codes(std::move(launch));
    return of_codes.set(&Fp8TargetsOfCodesParams::class_scales, slot(Slot::weight_scale)).build();
}

}  // namespace flce::fp8
