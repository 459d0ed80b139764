// The kernels of a kernel set, each by its work. Every path has kernels of its own for these roles; cuda_source says which of them a set
// has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace flce {

enum class KernelRole : std::uint8_t {
    // Forward.
    forward,
    forward_few,    ///< forward with few tokens
    references,
    teacher_logits,
    merge_stretch,
    row_outputs,
    shard_sums,  ///< in the place of row_outputs where the vocabulary lies on several ranks
    // Merge, which has merge_shards in the place of row_outputs.
    merge_shards,
    reduce_loss,
    // Backward.
    row_coefficients,
    retained_rows,
    smoothing_sums,
    smoothing_totals,
    retained_bias,
    dlogits,
    grad_hidden,
    grad_weight,
    backward_chunks,  ///< the three above, of all chunks of the vocabulary in one launch
    hidden_chunks,    ///< backward_chunks without grad_weight
    teacher_dlogits,
    teacher_bias,
    grad_bias,
    scatter_rows,
    make_room,
    zero_columns,
    // Both passes.
    prepare,
    gather_rows,
    round_weight,
};
inline constexpr std::size_t kKernelRoleCount = static_cast<std::size_t>(KernelRole::round_weight) + 1;

/// "grad_hidden": the name without the prefix that symbols of cubins have.
[[nodiscard]] std::string_view to_string(KernelRole role) noexcept;

}  // namespace flce
