// One call's arguments as the CPU backend reads them: typed accessors over the slots, and what follows from spec and slots once a call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "flce/flce.hpp"
#include "generator/call_slots.hpp"
#include "templates/common/row_math.cuh"

namespace flce {

/// Divisors of a mean's cross entropies and z-losses; 1 for the other reductions.
struct MeanDivisors {
    double cross_entropy = 1;
    double z_loss = 1;
};

class CpuCall {
public:
    CpuCall(const Spec& spec, const std::int64_t* slots) : spec_(spec), slots_(slots) {}

    [[nodiscard]] const Spec& spec() const { return spec_; }
    [[nodiscard]] std::int64_t value(Slot slot) const { return slots_[static_cast<std::size_t>(slot)]; }
    template <class T = std::byte>
    [[nodiscard]] T* pointer(Slot slot) const {
        return reinterpret_cast<T*>(value(slot));
    }
    [[nodiscard]] bool has(Slot slot) const { return value(slot) != 0; }
    /// Element `index` of a fp32 tensor, or `absent`.
    [[nodiscard]] float element(Slot slot, std::int64_t index, float absent) const {
        return has(slot) ? pointer<const float>(slot)[index] : absent;
    }

    [[nodiscard]] std::int64_t num_tokens() const { return value(Slot::num_tokens); }
    [[nodiscard]] ReductionCode reduction() const { return static_cast<ReductionCode>(value(Slot::reduction)); }
    [[nodiscard]] std::int64_t label(std::int64_t token) const {
        return value(Slot::target_bits) == 64 ? pointer<const std::int64_t>(Slot::target)[token]
                                              : pointer<const std::int32_t>(Slot::target)[token];
    }
    [[nodiscard]] bool is_ignored(std::int64_t token) const { return label(token) == value(Slot::ignore_index); }
    /// Whether neither the token's label nor its temperature is a fault. For tokens that are not ignored.
    [[nodiscard]] bool is_right(std::int64_t token) const {
        const std::int64_t y = label(token);
        return y >= 0 && y < whole_vocab_size(spec_) && is_temperature(temperature(token));
    }
    /// Classes that this call's weight has, and the label of the first.
    [[nodiscard]] std::int64_t vocab_columns() const { return value(Slot::vocab_columns); }
    [[nodiscard]] std::int64_t vocab_start() const { return value(Slot::vocab_start); }
    /// The weight's row of a label; −1 where another shard has it.
    [[nodiscard]] std::int64_t column_of(std::int64_t label) const {
        const std::int64_t column = label - vocab_start();
        return label >= 0 && column >= 0 && column < vocab_columns() ? column : -1;
    }
    /// The token's label, or −1 for a token that is ignored or has a fault.
    [[nodiscard]] std::int64_t valid_label(std::int64_t token) const { return is_ignored(token) || !is_right(token) ? -1 : label(token); }
    [[nodiscard]] float temperature(std::int64_t token) const { return element(Slot::temperature, token, 1.F); }
    [[nodiscard]] float token_weight(std::int64_t token) const { return element(Slot::token_weight, token, 1.F); }
    /// The k-th class that the token's teacher names; −1: none, or a fault.
    [[nodiscard]] std::int64_t teacher_id(std::int64_t token, std::int64_t k) const {
        const std::int64_t id = given_teacher_id(token, k);
        return id < whole_vocab_size(spec_) ? std::max<std::int64_t>(id, -1) : -1;
    }
    [[nodiscard]] float class_weight(std::int64_t column) const { return element(Slot::class_weight, column, 1.F); }
    [[nodiscard]] float class_offset(std::int64_t column) const { return element(Slot::class_offset, column, 0.F); }
    /// Group whose classes count for nothing for the token, but for its target; −1: none.
    [[nodiscard]] std::int32_t row_group(std::int64_t token) const {
        constexpr std::int32_t kNone = -1;
        return has(Slot::row_group) ? std::max(pointer<const std::int32_t>(Slot::row_group)[token], kNone) : kNone;
    }
    /// Class weight of the token's target, whose label is `label`. A shard has it from merge.
    [[nodiscard]] float class_weight_of_target(std::int64_t token, std::int64_t label) const {
        return has(Slot::target_class_weight) ? pointer<const float>(Slot::target_class_weight)[token] : class_weight(label);
    }

    [[nodiscard]] LossOptions loss_options() const;
    /// Σ of the class weights that the call has.
    [[nodiscard]] double sum_of_class_weights() const;
    [[nodiscard]] MeanDivisors mean_divisors() const;
    /// The smallest token with a fault goes where the caller asked for it.
    void report_invalid_label() const;

private:
    [[nodiscard]] std::int64_t given_teacher_id(std::int64_t token, std::int64_t k) const {
        const std::int64_t at = token * spec_.teacher_top_k + k;
        return value(Slot::teacher_bits) == 64 ? pointer<const std::int64_t>(Slot::teacher_ids)[at]
                                               : pointer<const std::int32_t>(Slot::teacher_ids)[at];
    }
    /// Every class that the token's teacher names is one, or −1.
    [[nodiscard]] bool has_right_teacher(std::int64_t token) const;

    const Spec& spec_;
    const std::int64_t* slots_;
};

/// Gradients that reach a token of a backward call.
[[nodiscard]] RowUpstream upstream_of(const CpuCall& call, std::int64_t token, const MeanDivisors& divisors, const LossOptions& options);

}  // namespace flce
