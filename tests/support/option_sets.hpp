// Every option of a Spec alone, and all of them together.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "flce/spec.hpp"

namespace flce {

// How gtest names parameters; it looks in the namespace of the type.
inline void PrintTo(DType dtype, std::ostream* out) { *out << to_string(dtype); }
inline void PrintTo(WeightLayout layout, std::ostream* out) { *out << to_string(layout); }

}  // namespace flce

namespace flce::test {

struct OptionSet {
    const char* name;
    void (*apply)(Spec&);  ///< to a Spec whose sizes, dtype and layout are set
    friend std::ostream& operator<<(std::ostream& out, const OptionSet& set) { return out << set.name; }
};

inline void apply_everything(Spec& s) {
    s.bias = true;
    s.class_weight = true;
    s.class_offset = true;
    s.logit_scale = 0.75;
    s.softcap = 20.0;
    s.label_smoothing = 0.1;
    s.z_loss = 1e-2;
    s.temperature = s.token_weight = s.dft = true;
    s.outputs = {true, true, true, true, true, true};
}

/// Groups with every option that they may have.
inline void apply_everything_with_groups(Spec& s) {
    apply_everything(s);
    s.label_smoothing = 0;
    s.class_groups = true;
}

/// A teacher with every option that it may have.
inline void apply_everything_with_teacher(Spec& s) {
    apply_everything(s);
    s.class_weight = s.dft = false;
    s.teacher_top_k = 5;
    s.hard_weight = 0.3;
}

/// A softmax over a token's own classes with every option that it may have.
inline void apply_everything_with_support(Spec& s) {
    apply_everything(s);
    s.class_weight = s.dft = false;
    s.label_smoothing = s.z_loss = 0;
    s.teacher_top_k = 9;
    s.support = true;
    s.outputs = {true, true, false, true};
}

/// A parameter in fp32 under autocast.
inline void apply_weight_fp32(Spec& s) { s.weight_dtype = s.grad_weight_dtype = DType::fp32; }

inline void apply_padding(Spec& s) { s.padded_vocab_size = (s.vocab_size + 64) / 64 * 64 + 8; }

/// Options that change the computation.
[[nodiscard]] inline const std::vector<OptionSet>& loss_options() {
    static const std::vector<OptionSet> sets = {
        {"plain", [](Spec&) {}},
        {"bias", [](Spec& s) { s.bias = true; }},
        {"logit_scale", [](Spec& s) { s.logit_scale = 0.35; }},
        {"softcap", [](Spec& s) { s.softcap = 5.0; }},
        {"label_smoothing", [](Spec& s) { s.label_smoothing = 0.1; }},
        {"z_loss", [](Spec& s) { s.z_loss = 1e-2; }},
        {"class_weight", [](Spec& s) { s.class_weight = true; }},
        {"lse", [](Spec& s) { s.outputs = {true, true, false, false}; }},
        {"logprobs", [](Spec& s) { s.outputs = {false, false, true, false}; }},
        {"entropy", [](Spec& s) { s.outputs = {true, false, false, true}; }},
        {"class_offset", [](Spec& s) { s.class_offset = true; }},
        {"class_offset_softcap",
         [](Spec& s) {
             s.class_offset = true;
             s.softcap = 5.0;
             s.teacher_top_k = 4;
             s.outputs.entropy = s.outputs.lse = true;
         }},
        {"class_groups", [](Spec& s) { s.class_groups = true; }},
        {"class_groups_softcap",
         [](Spec& s) {
             s.class_groups = true;
             s.softcap = 5.0;
         }},
        {"offset_gradient",
         [](Spec& s) {
             s.bias = s.class_offset = s.offset_gradient = true;
             s.logit_scale = 0.35;
             s.softcap = 5.0;
             s.teacher_top_k = 4;
         }},
        {"temperature", [](Spec& s) { s.temperature = true; }},
        {"token_weight", [](Spec& s) { s.token_weight = true; }},
        {"dft", [](Spec& s) { s.dft = s.outputs.logprobs = true; }},
        {"top1", [](Spec& s) { s.outputs.top1 = true; }},
        {"log_sum_sq_probs", [](Spec& s) { s.outputs.log_sum_sq_probs = true; }},
        {"teacher", [](Spec& s) { s.teacher_top_k = 4; }},
        {"support",
         [](Spec& s) {
             s.teacher_top_k = 6;
             s.support = true;
             s.outputs.lse = true;
         }},
        {"everything", apply_everything},
        {"everything_groups", apply_everything_with_groups},
        {"everything_teacher", apply_everything_with_teacher},
        {"everything_support", apply_everything_with_support},
    };
    return sets;
}

/// Options that change where gradients go and what memory looks like; together with every loss option in the last.
[[nodiscard]] inline const std::vector<OptionSet>& memory_options() {
    static const std::vector<OptionSet> sets = {
        {"padded", apply_padding},
        {"grad_fp32", [](Spec& s) { s.grad_weight_dtype = DType::fp32; }},
        {"weight_fp32", apply_weight_fp32},
        {"everything_weight_fp32",
         [](Spec& s) {
             apply_everything(s);
             apply_padding(s);
             apply_weight_fp32(s);
         }},
        {"accumulate",
         [](Spec& s) {
             s.grad_weight_mode = GradMode::accumulate;
             s.bias = true;
         }},
        {"accumulate_fp32",
         [](Spec& s) {
             s.grad_weight_mode = GradMode::accumulate;
             s.grad_weight_dtype = DType::fp32;
             s.bias = true;
         }},
        {"tied",
         [](Spec& s) {
             s.tied = s.layout == WeightLayout::vocab_major;  // hidden_major cannot be an embedding table
             s.grad_weight_mode = GradMode::accumulate;
         }},
        {"teacher_weight_fp32_accumulate",
         [](Spec& s) {
             apply_everything_with_teacher(s);
             apply_padding(s);
             apply_weight_fp32(s);
             s.grad_weight_mode = GradMode::accumulate;
         }},
        {"support_weight_fp32_accumulate",
         [](Spec& s) {
             apply_everything_with_support(s);
             apply_padding(s);
             apply_weight_fp32(s);
             s.grad_weight_mode = GradMode::accumulate;
         }},
        {"everything_padded_accumulate",
         [](Spec& s) {
             apply_everything(s);
             apply_padding(s);
             s.grad_weight_mode = GradMode::accumulate;
             s.grad_weight_dtype = DType::fp32;
         }},
    };
    return sets;
}

[[nodiscard]] inline std::vector<OptionSet> all_options() {
    std::vector<OptionSet> sets = loss_options();
    sets.insert(sets.end(), memory_options().begin(), memory_options().end());
    return sets;
}

[[nodiscard]] inline Spec make_spec(std::int64_t hidden_size, std::int64_t vocab_size, DType dtype, WeightLayout layout,
                                    const OptionSet& options) {
    Spec spec;
    spec.hidden_size = hidden_size;
    spec.vocab_size = vocab_size;
    spec.dtype = spec.grad_weight_dtype = dtype;
    spec.layout = layout;
    options.apply(spec);
    return spec.normalized();
}

inline constexpr DType kDtypes[] = {DType::bf16, DType::fp16, DType::fp32};
inline constexpr WeightLayout kLayouts[] = {WeightLayout::vocab_major, WeightLayout::hidden_major};

/// Compiled with a sanitizer: programs run several times slower, so matrices are thinned.
inline constexpr bool kSanitized = sizeof(FLCE_SANITIZE) > 1;

}  // namespace flce::test
