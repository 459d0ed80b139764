#include "generator/spec_keys.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "flce/error.hpp"
#include "generator/nearest_name.hpp"

namespace flce {
namespace {

[[noreturn]] void bad_spec_value(std::string_view key, std::string_view value, std::string_view allowed) {
    throw SpecError(fmt::format("spec: {}={}: must be {}", key, value, allowed));
}

std::int64_t read_integer(std::string_view key, std::string_view value) {
    std::int64_t result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size()) bad_spec_value(key, value, "an integer that fits in 64 bits");
    return result;
}

int read_int(std::string_view key, std::string_view value) {
    const std::int64_t result = read_integer(key, value);
    if (!std::in_range<int>(result)) bad_spec_value(key, value, "an integer that fits in 32 bits");
    return static_cast<int>(result);
}

double read_real(std::string_view key, std::string_view value) {
    double result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size()) bad_spec_value(key, value, "a finite number");
    return result;
}

bool read_flag(std::string_view key, std::string_view value) {
    if (value == "true" || value == "1") return true;
    if (value == "false" || value == "0") return false;
    bad_spec_value(key, value, "true or false (or the bare key)");
}

template <class Enum>
Enum read_enum(std::string_view key, std::string_view value, std::initializer_list<Enum> all) {
    std::string allowed;
    for (Enum e : all) {
        if (to_string(e) == value) return e;
        allowed += (allowed.empty() ? "" : " or ") + std::string(to_string(e));
    }
    bad_spec_value(key, value, allowed);
}

DType read_dtype(std::string_view key, std::string_view value) {
    if (const auto dtype = parse_dtype(value)) return *dtype;
    bad_spec_value(key, value, "bf16 (bfloat16), fp16 (float16) or fp32 (float32)");
}

/// The weight's dtype, or the format of its codes.
void read_weight_dtype(Spec& spec, std::string_view key, std::string_view value) {
    const std::string_view name = value.starts_with("torch.") ? value.substr(6) : value;
    if (name == "e4m3" || name == "float8_e4m3fn") {
        spec.weight_format = WeightFormat::e4m3;
    } else if (name == "nvfp4") {
        spec.weight_format = WeightFormat::nvfp4;
    } else if (const auto dtype = parse_dtype(value)) {
        spec.weight_dtype = dtype;
    } else {
        bad_spec_value(key, value, "bf16 (bfloat16), fp16 (float16), fp32 (float32), e4m3 (float8_e4m3fn) or nvfp4");
    }
}

struct OutputName {
    std::string_view name;
    bool Outputs::* member;
};
constexpr std::array kOutputNames = {
    OutputName{"loss", &Outputs::loss},         OutputName{"lse", &Outputs::lse},
    OutputName{"logprobs", &Outputs::logprobs}, OutputName{"entropy", &Outputs::entropy},
    OutputName{"top1", &Outputs::top1},         OutputName{"log_sum_sq_probs", &Outputs::log_sum_sq_probs}};

Outputs read_outputs(std::string_view key, std::string_view value) {
    Outputs outputs{.loss = false};
    std::string_view rest = value;
    while (true) {
        const std::size_t plus = rest.find('+');
        const std::string_view name = rest.substr(0, plus);
        const auto* known = std::ranges::find(kOutputNames, name, &OutputName::name);
        if (known == kOutputNames.end())
            bad_spec_value(key, value, "names out of loss, lse, logprobs, entropy, top1 and log_sum_sq_probs joined by '+'");
        if (outputs.*known->member) bad_spec_value(key, value, "names joined by '+', each of them once");
        outputs.*known->member = true;
        if (plus == std::string_view::npos) return outputs;
        rest.remove_prefix(plus + 1);
    }
}

std::string outputs_text(const Outputs& outputs) {
    std::string text;
    for (const OutputName& o : kOutputNames) {
        if (outputs.*o.member) text += (text.empty() ? "" : "+") + std::string(o.name);
    }
    return text;
}

/// Shortest decimal that reads back to the same double.
std::string real_text(double value) {
    std::array<char, 32> buffer{};
    const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
    return {buffer.data(), result.ptr};
}

struct SpecKey {
    std::string_view name;  ///< key in canonical texts
    SpecKeyKind kind;
    void (*read)(Spec& spec, std::string_view key, std::string_view value);
};

using Text = std::string_view;
constexpr std::array kKeys = {
    SpecKey{"D", SpecKeyKind::integer, [](Spec& s, Text k, Text v) { s.hidden_size = read_integer(k, v); }},
    SpecKey{"V", SpecKeyKind::integer, [](Spec& s, Text k, Text v) { s.vocab_size = read_integer(k, v); }},
    SpecKey{"padded_vocab_size", SpecKeyKind::integer, [](Spec& s, Text k, Text v) { s.padded_vocab_size = read_integer(k, v); }},
    SpecKey{"whole_vocab_size", SpecKeyKind::integer, [](Spec& s, Text k, Text v) { s.whole_vocab_size = read_integer(k, v); }},
    SpecKey{"dtype", SpecKeyKind::word, [](Spec& s, Text k, Text v) { s.dtype = read_dtype(k, v); }},
    SpecKey{"layout", SpecKeyKind::word,
            [](Spec& s, Text k, Text v) { s.layout = read_enum(k, v, {WeightLayout::vocab_major, WeightLayout::hidden_major}); }},
    SpecKey{"tied", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.tied = read_flag(k, v); }},
    SpecKey{"weight_dtype", SpecKeyKind::word, [](Spec& s, Text k, Text v) { read_weight_dtype(s, k, v); }},
    SpecKey{"weight_block", SpecKeyKind::integer, [](Spec& s, Text k, Text v) { s.weight_block = read_int(k, v); }},
    SpecKey{"grad_hidden_dtype", SpecKeyKind::word, [](Spec& s, Text k, Text v) { s.grad_hidden_dtype = read_dtype(k, v); }},
    SpecKey{"grad_weight_dtype", SpecKeyKind::word, [](Spec& s, Text k, Text v) { s.grad_weight_dtype = read_dtype(k, v); }},
    SpecKey{"grad_weight_mode", SpecKeyKind::word,
            [](Spec& s, Text k, Text v) { s.grad_weight_mode = read_enum(k, v, {GradMode::write, GradMode::accumulate}); }},
    SpecKey{"bias", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.bias = read_flag(k, v); }},
    SpecKey{"class_weight", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.class_weight = read_flag(k, v); }},
    SpecKey{"class_offset", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.class_offset = read_flag(k, v); }},
    SpecKey{"class_groups", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.class_groups = read_flag(k, v); }},
    SpecKey{"offset_gradient", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.offset_gradient = read_flag(k, v); }},
    SpecKey{"temperature", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.temperature = read_flag(k, v); }},
    SpecKey{"token_weight", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.token_weight = read_flag(k, v); }},
    SpecKey{"batch_invariant", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.batch_invariant = read_flag(k, v); }},
    SpecKey{"dft", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.dft = read_flag(k, v); }},
    SpecKey{"logit_scale", SpecKeyKind::real, [](Spec& s, Text k, Text v) { s.logit_scale = read_real(k, v); }},
    SpecKey{"softcap", SpecKeyKind::real, [](Spec& s, Text k, Text v) { s.softcap = read_real(k, v); }},
    SpecKey{"label_smoothing", SpecKeyKind::real, [](Spec& s, Text k, Text v) { s.label_smoothing = read_real(k, v); }},
    SpecKey{"z_loss", SpecKeyKind::real, [](Spec& s, Text k, Text v) { s.z_loss = read_real(k, v); }},
    SpecKey{"teacher_top_k", SpecKeyKind::integer, [](Spec& s, Text k, Text v) { s.teacher_top_k = read_int(k, v); }},
    SpecKey{"hard_weight", SpecKeyKind::real, [](Spec& s, Text k, Text v) { s.hard_weight = read_real(k, v); }},
    SpecKey{"support", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.support = read_flag(k, v); }},
    SpecKey{"teacher_hidden_size", SpecKeyKind::integer, [](Spec& s, Text k, Text v) { s.teacher_hidden_size = read_integer(k, v); }},
    SpecKey{"divergence_beta", SpecKeyKind::real, [](Spec& s, Text k, Text v) { s.divergence_beta = read_real(k, v); }},
    SpecKey{"teacher_bias", SpecKeyKind::flag, [](Spec& s, Text k, Text v) { s.teacher_bias = read_flag(k, v); }},
    SpecKey{"teacher_logit_scale", SpecKeyKind::real, [](Spec& s, Text k, Text v) { s.teacher_logit_scale = read_real(k, v); }},
    SpecKey{"teacher_softcap", SpecKeyKind::real, [](Spec& s, Text k, Text v) { s.teacher_softcap = read_real(k, v); }},
    SpecKey{"top_k", SpecKeyKind::integer, [](Spec& s, Text k, Text v) { s.top_k = read_int(k, v); }},
    SpecKey{"fp8", SpecKeyKind::word, [](Spec& s, Text k, Text v) { s.fp8 = read_enum(k, v, {Fp8Operands::int8, Fp8Operands::e4m3}); }},
    SpecKey{"fp8_dlogits", SpecKeyKind::word,
            [](Spec& s, Text k, Text v) { s.fp8_dlogits = read_enum(k, v, {Fp8Dlogits::e5m2, Fp8Dlogits::e4m3}); }},
    SpecKey{"fp8_hidden_scale", SpecKeyKind::real, [](Spec& s, Text k, Text v) { s.fp8_hidden_scale = read_real(k, v); }},
    SpecKey{"fp8_weight_scale", SpecKeyKind::real, [](Spec& s, Text k, Text v) { s.fp8_weight_scale = read_real(k, v); }},
    SpecKey{"outputs", SpecKeyKind::words, [](Spec& s, Text k, Text v) { s.outputs = read_outputs(k, v); }},
};

/// Key of one of the two sizes by its field's name; canonical texts have the letters.
std::string_view canonical_key(std::string_view name) {
    if (name == "hidden_size") return "D";
    if (name == "vocab_size") return "V";
    return name;
}

const SpecKey& find_key(std::string_view name) {
    const auto* key = std::ranges::find(kKeys, canonical_key(name), &SpecKey::name);
    if (key != kKeys.end()) return *key;
    std::vector<std::string> names{"hidden_size", "vocab_size"};
    for (const SpecKey& k : kKeys) names.emplace_back(k.name);
    if (const std::string near = suggestion(name, names); !near.empty()) {
        throw SpecError(fmt::format("spec: unknown key '{}'{}", name, near));
    }
    std::string known = "D (hidden_size), V (vocab_size)";
    for (const SpecKey& k : kKeys) known += k.name == "D" || k.name == "V" ? "" : ", " + std::string(k.name);
    throw SpecError(fmt::format("spec: unknown key '{}'; known keys are {}", name, known));
}

/// The bias of a quantised weight may have a gradient.
DType default_grad_weight_dtype(const Spec& spec) { return is_quantized(spec) ? spec.dtype : weight_dtype(spec); }

GradMode default_grad_mode(const Spec& spec) { return spec.tied ? GradMode::accumulate : GradMode::write; }

}  // namespace

std::optional<DType> parse_dtype(std::string_view name) {
    if (name.starts_with("torch.")) name.remove_prefix(6);
    if (name == "bf16" || name == "bfloat16") return DType::bf16;
    if (name == "fp16" || name == "float16" || name == "half") return DType::fp16;
    if (name == "fp32" || name == "float32" || name == "float") return DType::fp32;
    return std::nullopt;
}

SpecKeyKind spec_key_kind(std::string_view key) { return find_key(key).kind; }

std::string_view bare_value(std::string_view key) {
    const SpecKey& known = find_key(key);
    if (known.name == "fp8") return to_string(Fp8Operands::int8);
    return known.kind == SpecKeyKind::flag ? "true" : "";
}

std::vector<SpecEntry> spec_entries(const Spec& spec) {
    std::vector<SpecEntry> entries;
    auto add = [&](std::string_view key, bool differs, std::string value) {
        if (differs) entries.push_back({key, spec_key_kind(key), std::move(value)});
    };
    add("D", true, std::to_string(spec.hidden_size));
    add("V", true, std::to_string(spec.vocab_size));
    add("padded_vocab_size", spec.padded_vocab_size != spec.vocab_size && spec.padded_vocab_size != 0,
        std::to_string(spec.padded_vocab_size));
    add("whole_vocab_size", spec.whole_vocab_size != 0, std::to_string(spec.whole_vocab_size));
    add("dtype", true, std::string(to_string(spec.dtype)));
    add("layout", spec.layout != WeightLayout::vocab_major, std::string(to_string(spec.layout)));
    add("tied", spec.tied, "true");
    const auto weight = is_quantized(spec) ? to_string(spec.weight_format) : to_string(weight_dtype(spec));
    add("weight_dtype", rounds_weight(spec) || is_quantized(spec), std::string(weight));
    add("weight_block", spec.weight_block != 0, std::to_string(spec.weight_block));
    add("grad_hidden_dtype", grad_hidden_dtype(spec) != spec.dtype, std::string(to_string(grad_hidden_dtype(spec))));
    add("grad_weight_dtype", spec.grad_weight_dtype != default_grad_weight_dtype(spec), std::string(to_string(spec.grad_weight_dtype)));
    add("grad_weight_mode", spec.grad_weight_mode != default_grad_mode(spec), std::string(to_string(spec.grad_weight_mode)));
    add("bias", spec.bias, "true");
    add("class_weight", spec.class_weight, "true");
    add("class_offset", spec.class_offset, "true");
    add("class_groups", spec.class_groups, "true");
    add("offset_gradient", spec.offset_gradient, "true");
    add("temperature", spec.temperature, "true");
    add("token_weight", spec.token_weight, "true");
    add("batch_invariant", spec.batch_invariant, "true");
    add("dft", spec.dft, "true");
    add("logit_scale", spec.logit_scale != 1.0, real_text(spec.logit_scale));
    add("softcap", spec.softcap != 0.0, real_text(spec.softcap));
    add("label_smoothing", spec.label_smoothing != 0.0, real_text(spec.label_smoothing));
    add("z_loss", spec.z_loss != 0.0, real_text(spec.z_loss));
    add("teacher_top_k", spec.teacher_top_k != 0, std::to_string(spec.teacher_top_k));
    add("hard_weight", spec.hard_weight != 0.0, real_text(spec.hard_weight));
    add("support", spec.support, "true");
    add("teacher_hidden_size", spec.teacher_hidden_size != 0, std::to_string(spec.teacher_hidden_size));
    add("divergence_beta", spec.divergence_beta != 0.0, real_text(spec.divergence_beta));
    add("teacher_bias", spec.teacher_bias, "true");
    add("teacher_logit_scale", spec.teacher_logit_scale != 1.0, real_text(spec.teacher_logit_scale));
    add("teacher_softcap", spec.teacher_softcap != 0.0, real_text(spec.teacher_softcap));
    add("top_k", spec.top_k != 0, std::to_string(spec.top_k));
    add("fp8", is_fp8(spec), std::string(to_string(spec.fp8)));
    add("fp8_dlogits", spec.fp8_dlogits != Fp8Dlogits::e5m2, std::string(to_string(spec.fp8_dlogits)));
    add("fp8_hidden_scale", spec.fp8_hidden_scale != 0.0, real_text(spec.fp8_hidden_scale));
    add("fp8_weight_scale", spec.fp8_weight_scale != 0.0, real_text(spec.fp8_weight_scale));
    add("outputs", spec.outputs != Outputs{}, outputs_text(spec.outputs));
    return entries;
}

bool SpecBuilder::given(std::string_view key) const { return std::ranges::find(given_, key) != given_.end(); }

void SpecBuilder::set(std::string_view key, std::string_view value) {
    const SpecKey& known = find_key(key);
    if (given(known.name))
        throw SpecError(fmt::format("spec: key '{}' is given twice (again as '{}'); each key may be given once", key, value));
    known.read(spec_, key, value);
    given_.emplace_back(known.name);
}

Spec SpecBuilder::finish() {
    for (std::string_view key : {"D", "V"}) {
        if (!given(key)) throw SpecError(fmt::format("spec: {} is missing; D (hidden_size) and V (vocab_size) are required", key));
    }
    if (given("padded_vocab_size") && spec_.padded_vocab_size <= 0) {
        bad_spec_value("padded_vocab_size", std::to_string(spec_.padded_vocab_size), "at least V");
    }
    if (!given("grad_weight_dtype")) spec_.grad_weight_dtype = default_grad_weight_dtype(spec_);
    if (!given("grad_weight_mode")) spec_.grad_weight_mode = default_grad_mode(spec_);
    return spec_.normalized();
}

}  // namespace flce
