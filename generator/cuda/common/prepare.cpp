#include "generator/cuda/common/prepare.hpp"

#include "generator/cuda/common/launch_builder.hpp"

namespace flce {

bool sums_class_weights(const Spec& spec) noexcept { return spec.class_weight && spec.label_smoothing > 0; }

Statement prepare_launch(const Spec& spec, const CudaSource& source, const Preparation& preparation) {
    const Expr blocks_of_list = select(equal(preparation.list, 0), 0, ceil_div(slot(Slot::num_tokens), kReduceThreads));
    LaunchBuilder<PrepareParams> launch(source.kernel(KernelRole::prepare), 1 + blocks_of_list);
    if (is_shard(spec)) {
        launch.set(&PrepareParams::target_class_weight, slot(Slot::target_class_weight))
            .set(&PrepareParams::class_weight_total, slot(Slot::class_weight_total));
    }
    launch.set(&PrepareParams::class_weight, slot(Slot::class_weight))
        .set(&PrepareParams::scalars, scalars_at())
        .set_targets(&PrepareParams::targets, spec, 0)
        .set_count(&PrepareParams::count)
        .set(&PrepareParams::token_weight, slot(Slot::token_weight))
        .set(&PrepareParams::temperature, slot(Slot::temperature))
        .set(&PrepareParams::list, preparation.list)
        .set(&PrepareParams::counters, workspace_at(preparation.counters))
        .set(&PrepareParams::counter_count, preparation.counter_count)
        .set(&PrepareParams::num_tokens, slot(Slot::num_tokens))
        .set(&PrepareParams::want_class_weights, sums_class_weights(spec) ? 1 : 0)
        .set(&PrepareParams::want_count, preparation.want_count);
    if (preparation.outputs) {
        const Expr each = reduces_by(ReductionCode::none);
        const Expr outputs[kRowOutputs] = {select(each, slot(Slot::loss), 0),
                                           select(each, slot(Slot::z_loss), 0),
                                           slot(Slot::lse),
                                           slot(Slot::logprobs),
                                           slot(Slot::entropy),
                                           slot(Slot::log_sum_sq_probs)};
        for (std::size_t i = 0; i < kRowOutputs; ++i) launch.set_element(&PrepareParams::outputs, i, outputs[i]);
        launch.set(&PrepareParams::top1, slot(Slot::top1)).set(&PrepareParams::invalid_label, slot(Slot::invalid_label));
    }
    return launch.build();
}

namespace {

constexpr std::int64_t kElementsOfBlock = std::int64_t{8} * kRowThreads;  // elements of vocab_major rows that a block rounds

Statement dequantize_launch(const Spec& spec, const CudaSource& source, const Expr& first, const Expr& rows, const Expr& rounded) {
    using Params = DequantizeWeightParams;
    LaunchBuilder<Params> launch(source.kernel(KernelRole::round_weight), ceil_div(rows * spec.hidden_size, kElementsOfBlock));
    launch.set(&Params::weight, slot(Slot::weight))
        .set(&Params::scale, slot(Slot::weight_scale))
        .set(&Params::tensor_scale, slot(Slot::weight_tensor_scale))
        .set(&Params::dequantized, rounded)
        .set(&Params::first_row, first)
        .set(&Params::rows, rows);
    return {If{less(0, slot(Slot::num_tokens)), {launch.build()}}};
}

}  // namespace

Statement round_weight_launch(const Spec& spec, const CudaSource& source, const Expr& first, const Expr& rows, const Expr& rounded) {
    if (is_quantized(spec)) return dequantize_launch(spec, source, first, rows, rounded);
    const bool vocab_major = spec.layout == WeightLayout::vocab_major;
    const auto element = static_cast<std::int64_t>(element_bytes(weight_dtype(spec)));
    const Expr squares = ceil_div(rows, kRoundedTile) * ceil_div(spec.hidden_size, kRoundedTile);
    const Expr blocks = vocab_major ? ceil_div(rows * spec.hidden_size, kElementsOfBlock) : squares;
    LaunchBuilder<RoundWeightParams> launch(source.kernel(KernelRole::round_weight), blocks);
    launch.set(&RoundWeightParams::weight, slot(Slot::weight) + first * (element * (vocab_major ? spec.hidden_size : 1)))
        .set(&RoundWeightParams::rounded, rounded)
        .set(&RoundWeightParams::rows, rows);
    return {If{less(0, slot(Slot::num_tokens)), {launch.build()}}};
}

}  // namespace flce
