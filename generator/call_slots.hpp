// The arguments of one forward or backward call as an array of 64-bit slots: what launch programs, the compiled launchers and the CPU backend
// read. The runtime validates the public argument structs once and fills the slots; nothing behind them checks anything again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace flce {

/// How the per-token losses become what `loss` receives.
enum class ReductionCode : std::int64_t { none = 0, sum = 1, mean = 2 };

/// Dtype of `num_valid`, the caller's count of valid tokens.
enum class CountCode : std::int64_t { fp32 = 0, int32 = 1, int64 = 2 };

// Pointers are device pointers (host pointers for the CPU) as integers; 0 means absent.
enum class Slot : std::uint32_t {
    num_tokens,
    hidden,        // [N, D]
    weight,        // [padded_vocab_size, D] or [D, padded_vocab_size]
    bias,          // [V]
    class_weight,  // [V] fp32
    target,        // [N]
    target_bits,   // 32 or 64
    ignore_index,
    reduction,       // ReductionCode
    num_valid,       // scalar that mean divides by; 0: valid tokens are counted (with class weights: their class weights summed)
    num_valid_code,  // CountCode
    loss,            // fp32: [N] for none, scalar otherwise
    z_loss,          // fp32, like loss: the z-loss part, already in loss
    lse,             // [N] fp32; forward writes, backward reads
    logprob,         // [N] fp32
    entropy,         // [N] fp32; forward writes, backward reads when grad_entropy is given
    invalid_label,   // one u64: atomicMin of the index of a row whose label is out of range; the caller sets it to ~0
    grad_loss,       // fp32: [N] for none, scalar otherwise; 0 means 1
    grad_lse,        // [N] fp32
    grad_logprob,    // [N] fp32
    grad_entropy,    // [N] fp32
    grad_hidden,     // [N, D]; 0: not wanted
    grad_weight,     // like weight; 0: not wanted
    grad_bias,       // [V]; 0: not wanted
    workspace,
    retained,  // forward writes, backward reads; 0: nothing is retained
    retained_bytes,
    retained_in_grad_weight,  // 0 or 1: laid out so that grad_weight may be written over it, in that gradient's own memory
    workspace_bytes,          // that the caller has given
    count
};

inline constexpr std::size_t kSlotCount = static_cast<std::size_t>(Slot::count);
using CallSlots = std::array<std::int64_t, kSlotCount>;

}  // namespace flce
