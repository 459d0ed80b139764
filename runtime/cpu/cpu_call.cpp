#include "runtime/cpu/cpu_call.hpp"

#include <atomic>

namespace flce {

double CpuCall::sum_of_class_weights() const {
    double total = 0;
    for (std::int64_t j = 0; j < vocab_columns(); ++j) total += class_weight(j);
    return total;
}

LossOptions CpuCall::loss_options() const {
    double total = static_cast<double>(whole_vocab_size(spec_));
    if (has(Slot::class_weight_total)) {
        total = *pointer<const float>(Slot::class_weight_total);
    } else if (has(Slot::class_weight)) {
        total = sum_of_class_weights();
    }
    return {.label_smoothing = static_cast<float>(spec_.label_smoothing),
            .smoothing_per_class = static_cast<float>(spec_.label_smoothing / static_cast<double>(whole_vocab_size(spec_))),
            .class_weight_total = static_cast<float>(total),
            .z_loss = static_cast<float>(spec_.z_loss),
            .dft = spec_.dft,
            .hard_weight = spec_.teacher_top_k > 0 ? static_cast<float>(spec_.hard_weight) : 1.F};
}

MeanDivisors CpuCall::mean_divisors() const {
    const bool weighted = reduction() == ReductionCode::weighted_mean;
    if (reduction() != ReductionCode::mean && !weighted) return {};
    if (has(Slot::num_valid)) {
        double given = 0;
        switch (static_cast<CountCode>(value(Slot::num_valid_code))) {
            case CountCode::fp32: given = *pointer<const float>(Slot::num_valid); break;
            case CountCode::int32: given = *pointer<const std::int32_t>(Slot::num_valid); break;
            case CountCode::int64: given = static_cast<double>(*pointer<const std::int64_t>(Slot::num_valid)); break;
        }
        // Nothing to divide by gives 0, and so does a number that is not a count, like on the GPU.
        const double divisor = given > 0 ? given : 0;
        return {divisor, divisor};
    }
    MeanDivisors sums{0, 0};
    for (std::int64_t i = 0; i < num_tokens(); ++i) {
        const std::int64_t y = valid_label(i);
        if (y < 0) continue;
        const double token = weighted ? token_weight(i) : 1.;
        sums.cross_entropy += token * class_weight_of_target(i, y);
        sums.z_loss += token;
    }
    return sums;
}

RowUpstream upstream_of(const CpuCall& call, std::int64_t token, const MeanDivisors& divisors, const LossOptions& options) {
    const bool per_token = call.reduction() == ReductionCode::none;
    const double loss = call.element(Slot::grad_loss, per_token ? token : 0, call.spec().outputs.loss ? 1.F : 0.F);
    const double factor = loss_factor(call.token_weight(token), call.element(Slot::logprobs, token, 0.F), options);
    const auto divide = [&](double divisor) { return divisor == 0 ? 0.F : static_cast<float>(loss * factor / divisor); };
    return {.cross_entropy = divide(divisors.cross_entropy),
            .z_loss = divide(divisors.z_loss),
            .lse = call.element(Slot::grad_lse, token, 0.F),
            .logprob = call.element(Slot::grad_logprobs, token, 0.F),
            .entropy = call.element(Slot::grad_entropy, token, 0.F)};
}

bool CpuCall::has_right_teacher(std::int64_t token) const {
    for (std::int64_t k = 0; k < spec_.teacher_top_k; ++k) {
        const std::int64_t id = given_teacher_id(token, k);
        if (id < -1 || id >= whole_vocab_size(spec_)) return false;
    }
    return true;
}

void CpuCall::report_invalid_label() const {
    if (!has(Slot::invalid_label)) return;
    for (std::int64_t i = 0; i < num_tokens(); ++i) {
        if (is_ignored(i) || (is_right(i) && has_right_teacher(i))) continue;
        // Calls on several threads may share the word.
        const std::atomic_ref<std::uint64_t> smallest(*pointer<std::uint64_t>(Slot::invalid_label));
        std::uint64_t seen = smallest.load(std::memory_order_relaxed);
        while (static_cast<std::uint64_t>(i) < seen && !smallest.compare_exchange_weak(seen, static_cast<std::uint64_t>(i))) {
        }
        return;
    }
}

}  // namespace flce
