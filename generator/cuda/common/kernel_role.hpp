// The kernels of a kernel set, each by its work. Every path has kernels of its own for these roles; `source` of a path says which of them a
// set has.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace flce {

// clang-format off
#define FLCE_KERNEL_ROLES(X)                                                                              \
    /* Forward. */                                                                                        \
    X(forward) X(forward_few /* with few tokens */) X(references) X(teacher_logits) X(merge_stretch)      \
    X(top_classes) X(named_tiles)                                                                         \
    X(row_outputs) X(shard_sums /* for row_outputs where the vocabulary lies on several ranks */)         \
    /* Merge, which has merge_shards in the place of row_outputs. */                                      \
    X(merge_shards) X(reduce_loss)                                                                        \
    /* Backward. backward_chunks: the three GEMMs of all chunks; hidden_chunks: without grad_weight. */   \
    X(row_coefficients) X(retained_rows) X(smoothing_sums) X(smoothing_totals) X(retained_bias)           \
    X(dlogits) X(grad_hidden) X(grad_weight) X(backward_chunks) X(hidden_chunks)                          \
    X(teacher_dlogits) X(teacher_bias) X(grad_bias) X(scatter_rows) X(make_room) X(zero_columns)          \
    /* A divergence from a teacher's head. */                                                             \
    X(divergence_sums) X(divergence_mixture) X(divergence_outputs) X(divergence_retained)                 \
    X(divergence_shard_sums) X(divergence_pairs) X(heads_sums /* with both products */) X(heads_mixture)   \
    X(heads_dlogits) X(divergence_gradients) X(divergence_scales)                                         \
    /* Around the products of a library. */                                                               \
    X(stale_sums) X(stale_rows) X(scaled_hidden) X(finish_hidden) X(finish_weight)                        \
    /* Over the ids of each row alone. */                                                                 \
    X(gather_forward) X(gather_hidden) X(sort_counts) X(sort_sums) X(sort_places) X(gather_weight)        \
    X(gather_joints)                                                                                      \
    /* Products of numbers in 8 bits. */                                                                  \
    X(fp8_codes) X(fp8_scales) X(fp8_both_codes) X(fp8_turn_weight) X(fp8_turn_hidden) X(fp8_targets) X(fp8_powers)        \
    X(fp8_merge) X(fp8_stale) X(fp8_rows) X(fp8_target_dz) X(fp8_finish) X(fp8_order)                    \
    X(fp8_target_rows) X(fp8_bias)                                                                        \
    /* Both passes. */                                                                                    \
    X(prepare) X(gather_rows) X(round_weight)
// clang-format on

#define FLCE_ROLE(name) name,
enum class KernelRole : std::uint8_t { FLCE_KERNEL_ROLES(FLCE_ROLE) };
#undef FLCE_ROLE

#define FLCE_ROLE_NAME(name) std::string_view(#name),
inline constexpr std::array kKernelRoleNames = {FLCE_KERNEL_ROLES(FLCE_ROLE_NAME)};
#undef FLCE_ROLE_NAME
inline constexpr std::size_t kKernelRoleCount = kKernelRoleNames.size();

/// "grad_hidden": the name without the prefix that symbols of cubins have.
[[nodiscard]] constexpr std::string_view to_string(KernelRole role) { return kKernelRoleNames.at(static_cast<std::size_t>(role)); }

}  // namespace flce
