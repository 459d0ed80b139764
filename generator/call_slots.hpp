// The arguments of one forward or backward call as an array of 64-bit slots: what launch programs, the compiled launchers and the CPU
// backend read. The runtime validates the public argument structs once and fills the slots; nothing behind them checks anything again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "generator/call_tensors.hpp"

namespace flce {

/// How the per-token losses become what `loss` receives.
enum class ReductionCode : std::int64_t { none = 0, sum = 1, mean = 2, weighted_mean = 3 };

/// Dtype of `num_valid`, the caller's count of valid tokens.
enum class CountCode : std::int64_t { fp32 = 0, int32 = 1, int64 = 2 };

/// Part of a backward pass that a call does, since a pass may be cut in two: BackwardStage.
enum class StageCode : std::int64_t { whole = 0, first = 1, rest = 2 };

/// Walk of the vocabulary that a forward or merge of a shard's divergence is about: DivergenceWalk.
enum class WalkCode : std::int64_t { sums = 0, mixture = 1 };

// clang-format off
#define FLCE_CALL_SCALARS(X)                                                                              \
    X(num_tokens)                                                                                         \
    X(target_bits)             /* 32 or 64 */                                                             \
    X(teacher_bits)            /* bits of teacher_ids: 32 or 64 */                                        \
    X(ignore_index)                                                                                       \
    X(reduction)               /* ReductionCode */                                                        \
    X(num_valid_code)          /* CountCode */                                                            \
    X(workspace)                                                                                          \
    X(workspace_bytes)         /* bytes that the caller has given */                                      \
    X(retained)                /* forward writes, backward reads; 0: nothing is retained */               \
    X(retained_bytes)                                                                                     \
    X(retained_in_grad_weight) /* 0 or 1: in the gradient's own memory, which may be written over it */   \
    X(vocab_start)             /* label of the weight's first row in a shard; else 0 */                   \
    X(vocab_columns)           /* rows of the weight that are classes: vocab_size, in a shard any fewer */ \
    X(weight_rows)             /* with padding: padded_vocab_size, in a shard fewer */                    \
    X(num_shards)              /* merge alone */                                                          \
    X(stage)                   /* StageCode */                                                            \
    X(walk)                    /* WalkCode */                                                             \
    X(hidden_ready)            /* 0 or 1: hidden may be read in the first of two stages */                \
    X(fp8_hidden_scale)        /* bits of the spec's, as fp32 has it; 0: none is given */             \
    X(fp8_weight_scale)
// clang-format on

/// The tensors of FLCE_CALL_TENSORS come first, in its order: device addresses (host addresses for the CPU) as integers, 0 where absent.
enum class Slot : std::uint32_t {
#define FLCE_SLOT(name, ...) name,
    FLCE_CALL_TENSORS(FLCE_SLOT) FLCE_CALL_SCALARS(FLCE_SLOT)
#undef FLCE_SLOT
        count
};

inline constexpr std::size_t kSlotCount = static_cast<std::size_t>(Slot::count);
using CallSlots = std::array<std::int64_t, kSlotCount>;

#define FLCE_SLOT_NAME(name, ...) std::string_view(#name),
inline constexpr std::array<std::string_view, kSlotCount> kSlotNames = {FLCE_CALL_TENSORS(FLCE_SLOT_NAME)
                                                                            FLCE_CALL_SCALARS(FLCE_SLOT_NAME)};
#undef FLCE_SLOT_NAME

}  // namespace flce
