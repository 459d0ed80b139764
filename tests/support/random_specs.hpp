// Specs and options drawn at random, small, for property tests.
#pragma once

#include <array>
#include <vector>

#include "tests/support/kernel_run.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/random.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {

// One draw after the other.
class Draw {
public:
    explicit Draw(std::uint64_t seed) : stream_{seed} {}
    bool coin(double probability = 0.5) { return stream_.uniform(next_++) < probability; }
    std::int64_t below(std::int64_t count) { return stream_.below(next_++, count); }
    double uniform(double low, double high) { return low + (high - low) * stream_.uniform(next_++); }

private:
    Stream stream_;
    std::uint64_t next_ = 0;
};

/// Half of the weights that may be quantised are, by their sizes, so that nothing more is drawn.
inline void quantize_some(Spec& s) {
    const bool trained =
        s.tied || s.grad_weight_mode == GradMode::accumulate || s.teacher_top_k > 0 || s.layout != WeightLayout::vocab_major;
    if (trained || s.dtype == DType::fp32 || s.hidden_size % 16 != 0 || s.vocab_size % 2 == 0) return;
    s.weight_dtype.reset();
    s.weight_format = s.vocab_size % 4 == 1 ? WeightFormat::e4m3 : WeightFormat::nvfp4;
}

inline Spec random_spec(Draw& draw) {
    Spec s;
    s.hidden_size = 8 * (1 + draw.below(20));
    s.vocab_size = 2 + (draw.coin(0.3) ? draw.below(8) : draw.below(300));
    if (draw.coin(0.4)) s.padded_vocab_size = s.vocab_size + draw.below(70);
    s.dtype = kDtypes[draw.below(3)];
    s.grad_weight_dtype = draw.coin() ? s.dtype : DType::fp32;
    if (s.dtype != DType::fp32 && draw.coin()) s.weight_dtype = DType::fp32;
    s.grad_weight_mode = draw.coin(0.3) ? GradMode::accumulate : GradMode::write;
    s.layout = kLayouts[draw.below(2)];
    s.tied = s.layout == WeightLayout::vocab_major && draw.coin(0.2);
    s.bias = draw.coin();
    s.class_weight = draw.coin(0.4);
    if (draw.coin()) s.logit_scale = draw.uniform(-1.5, 1.5);
    if (draw.coin(0.4)) s.softcap = draw.uniform(1, 40);
    if (draw.coin(0.4)) s.label_smoothing = draw.coin(0.1) ? 1.0 : draw.uniform(0, 0.4);
    if (draw.coin(0.4)) s.z_loss = draw.uniform(0, 0.02);
    s.class_offset = draw.coin(0.3);
    s.offset_gradient = s.bias && s.class_offset && draw.coin(0.3);
    s.temperature = draw.coin(0.3);
    s.token_weight = draw.coin(0.3);
    s.outputs = {draw.coin(0.85), draw.coin(0.4), draw.coin(0.4), draw.coin(0.4), draw.coin(0.3), draw.coin(0.3)};
    if (s.outputs == Outputs{.loss = false}) s.outputs.loss = true;
    s.dft = s.outputs.logprobs && draw.coin(0.4);
    if (s.outputs.loss && draw.coin(0.3)) {
        s.teacher_top_k = 1 + static_cast<int>(draw.below(draw.coin(0.2) ? 256 : 12));
        s.hard_weight = draw.coin() ? 0 : draw.uniform(0, 1);
        s.class_weight = s.dft = false;
        if (draw.coin(0.4)) {
            s.support = true;
            s.hard_weight = s.label_smoothing = s.z_loss = 0;
            s.outputs.logprobs = s.outputs.top1 = s.outputs.log_sum_sq_probs = false;
        } else if (s.teacher_top_k > 128) {
            s.teacher_top_k *= 2;  // forward of some GPUs picks so many classes from its own tiles
        }
    }
    s.class_groups = s.teacher_top_k == 0 && s.label_smoothing == 0 && draw.coin(0.5);
    quantize_some(s);
    return s.normalized();
}

inline ProblemOptions random_options(Draw& draw, bool weighted, std::uint64_t seed) {
    ProblemOptions o;
    o.num_tokens = draw.coin(0.1) ? draw.below(3) : 1 + draw.below(260);
    o.ignored = static_cast<Ignored>(draw.below(3) == 0 ? 0 : draw.coin(0.1) ? 2 : 1);
    o.logits = draw.coin(0.1) ? Logits::saturated : Logits::moderate;
    o.target_bits = draw.coin() ? 64 : 32;
    o.ignore_index = draw.coin(0.2) ? draw.below(4) : -100;
    o.reduction = static_cast<Reduction>(draw.below(weighted ? 4 : 3));
    if (o.reduction == Reduction::mean && draw.coin(0.3)) {
        o.num_valid = static_cast<double>(1 + draw.below(5000));
        o.num_valid_type = std::array{ScalarType::fp32, ScalarType::int32, ScalarType::int64}[draw.below(3)];
    }
    o.invalid_labels = draw.coin(0.2);
    o.upstream = draw.coin(0.8);
    o.seed = seed;
    return o;
}

/// Shards that have the whole vocabulary, and sometimes padding behind it, or nothing.
inline std::vector<std::int64_t> random_rows(Draw& draw, std::int64_t vocab_size, bool equal) {
    const std::int64_t count = 1 + draw.below(5);
    std::vector<std::int64_t> rows;
    if (equal) {
        rows.assign(static_cast<std::size_t>(count), (vocab_size + count - 1) / count + (draw.coin(0.3) ? draw.below(9) : 0));
        return rows;
    }
    std::int64_t left = vocab_size;
    for (std::int64_t i = 1; i < count; ++i) {
        rows.push_back(draw.below(left + 1));
        left -= rows.back();
    }
    rows.push_back(left + (draw.coin(0.3) ? draw.below(20) : 0));
    if (draw.coin(0.1)) rows.push_back(draw.below(12));
    return rows;
}

}  // namespace flce::test
