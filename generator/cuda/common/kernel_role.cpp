#include "generator/cuda/common/kernel_role.hpp"

namespace flce {

std::string_view to_string(KernelRole role) noexcept {
    switch (role) {
        case KernelRole::forward: return "forward";
        case KernelRole::forward_few: return "forward_few";
        case KernelRole::references: return "references";
        case KernelRole::teacher_logits: return "teacher_logits";
        case KernelRole::teacher_dlogits: return "teacher_dlogits";
        case KernelRole::teacher_bias: return "teacher_bias";
        case KernelRole::merge_stretch: return "merge_stretch";
        case KernelRole::row_outputs: return "row_outputs";
        case KernelRole::shard_sums: return "shard_sums";
        case KernelRole::merge_shards: return "merge_shards";
        case KernelRole::reduce_loss: return "reduce_loss";
        case KernelRole::row_coefficients: return "row_coefficients";
        case KernelRole::retained_rows: return "retained_rows";
        case KernelRole::smoothing_sums: return "smoothing_sums";
        case KernelRole::smoothing_totals: return "smoothing_totals";
        case KernelRole::retained_bias: return "retained_bias";
        case KernelRole::dlogits: return "dlogits";
        case KernelRole::grad_hidden: return "grad_hidden";
        case KernelRole::grad_weight: return "grad_weight";
        case KernelRole::backward_chunks: return "backward_chunks";
        case KernelRole::hidden_chunks: return "hidden_chunks";
        case KernelRole::grad_bias: return "grad_bias";
        case KernelRole::scatter_rows: return "scatter_rows";
        case KernelRole::make_room: return "make_room";
        case KernelRole::zero_columns: return "zero_columns";
        case KernelRole::prepare: return "prepare";
        case KernelRole::gather_rows: return "gather_rows";
        case KernelRole::round_weight: return "round_weight";
    }
    return "";
}

}  // namespace flce
