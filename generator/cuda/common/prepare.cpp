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
        .set(&PrepareParams::scalars, workspace_at(preparation.scalars))
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
                                           slot(Slot::logprob),
                                           slot(Slot::entropy),
                                           slot(Slot::log_sum_sq_probs)};
        for (std::size_t i = 0; i < kRowOutputs; ++i) launch.set_element(&PrepareParams::outputs, i, outputs[i]);
        launch.set(&PrepareParams::top1, slot(Slot::top1)).set(&PrepareParams::invalid_label, slot(Slot::invalid_label));
    }
    return launch.build();
}

}  // namespace flce
