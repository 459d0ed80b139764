#include "autotune/reference.hpp"
#include "flce/error.hpp"
#include "runtime/layer/layer.hpp"

namespace flce {

ReferenceProblem reference_problem(const Spec& spec, const RandomLayer& layer) {
    if (has_teacher_head(spec)) throw SpecError("teacher_hidden_size: a divergence has no fp64 reference here, for check and tune");
    if (spec.support) throw SpecError("support: a softmax over a token's ids has no fp64 reference here, for check and tune");
    if (spec.top_k > 0) throw SpecError("top_k: the classes of the largest logits have no fp64 reference here, for check and tune");
    return {.spec = spec,
            .num_tokens = layer.num_tokens,
            .hidden = layer.hidden.data(),
            .weight = layer.weight.data(),
            .bias = layer.bias.data(),
            .class_weight = layer.class_weight,
            .class_offset = layer.class_offset,
            .class_group = layer.class_group,
            .row_group = layer.row_group,
            .target = layer.target,
            .temperature = layer.temperature,
            .token_weight = layer.token_weight,
            .teacher_ids = layer.teacher_ids,
            .teacher_probs = layer.teacher_probs,
            .grad_loss = layer.grad_loss,
            .grad_lse = layer.grad_lse,
            .grad_logprobs = layer.grad_logprobs,
            .grad_entropy = layer.grad_entropy};
}

}  // namespace flce
