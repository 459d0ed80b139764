// The kernels of a kernel set, each by what it does. Every path has kernels of its own for these roles; cuda_source says which of them a
// set has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace flce {

enum class KernelRole : std::uint8_t {
    // Of a forward pass.
    forward,
    forward_few,    ///< of few tokens
    references,
    teacher_logits,
    merge_stretch,
    row_outputs,
    shard_sums,  ///< in its place where the vocabulary lies on several ranks
    // Of merge, as row_outputs of forward.
    merge_shards,
    reduce_loss,
    // Of a backward pass.
    row_coefficients,
    retained_rows,
    smoothing_sums,
    smoothing_totals,
    retained_bias,
    dlogits,
    grad_hidden,
    grad_weight,
    backward_chunks,  ///< the three above, of all chunks of the vocabulary in one launch
    hidden_chunks,    ///< the same without grad_weight
    teacher_dlogits,
    teacher_bias,
    grad_bias,
    scatter_rows,
    make_room,
    zero_columns,
    // Of both.
    prepare,
    gather_rows,
    round_weight,
};
inline constexpr std::size_t kKernelRoleCount = static_cast<std::size_t>(KernelRole::round_weight) + 1;

/// "grad_hidden": the name without the prefix that symbols of cubins have.
[[nodiscard]] std::string_view to_string(KernelRole role) noexcept;

}  // namespace flce
