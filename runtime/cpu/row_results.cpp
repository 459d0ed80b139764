#include "runtime/cpu/row_results.hpp"

namespace flce {

RowOutputs CpuRowResults::write(std::int64_t token, const RowSums& sums, float class_weight, float teacher_cross_entropy) const {
    const RowOutputs outputs = row_outputs(sums, class_weight, call_.token_weight(token), teacher_cross_entropy, options_);
    write_outputs(token, outputs, sums.top1 == FLCE_NO_CLASS ? 0 : sums.top1);
    return outputs;
}

void CpuRowResults::write_ignored(std::int64_t token) const { write_outputs(token, RowOutputs{}, -1); }

void CpuRowResults::write_outputs(std::int64_t token, const RowOutputs& outputs, std::int64_t top1) const {
    const auto write = [&](Slot slot, float value) {
        if (call_.has(slot)) call_.pointer<float>(slot)[token] = value;
    };
    write(Slot::lse, outputs.lse);
    write(Slot::logprobs, outputs.logprob);
    write(Slot::entropy, outputs.entropy);
    write(Slot::log_sum_sq_probs, outputs.log_sum_sq_probs);
    if (call_.has(Slot::top1)) call_.pointer<std::int64_t>(Slot::top1)[token] = top1;
    if (call_.reduction() == ReductionCode::none) {
        write(Slot::loss, outputs.cross_entropy + outputs.z_loss);
        write(Slot::z_loss, outputs.z_loss);
    }
}

void CpuRowResults::write_reduced(const MeanDivisors& divisors) const {
    if (call_.reduction() == ReductionCode::none) return;
    const auto divide = [](double sum, double divisor) { return divisor == 0 ? 0 : sum / divisor; };  // no valid token: 0
    const double z_loss = divide(z_loss_, divisors.z_loss);
    const double loss = divide(cross_entropy_, divisors.cross_entropy) + z_loss;
    if (call_.has(Slot::loss)) *call_.pointer<float>(Slot::loss) = static_cast<float>(loss);
    if (call_.has(Slot::z_loss)) *call_.pointer<float>(Slot::z_loss) = static_cast<float>(z_loss);
}

}  // namespace flce
