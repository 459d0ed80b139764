#include "flce/spec.hpp"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <array>
#include <bit>
#include <cfloat>
#include <cmath>

#include "flce/error.hpp"
#include "generator/spec_file.hpp"
#include "generator/spec_keys.hpp"

namespace flce {
namespace {

/// Sizes beyond this are typing errors; below it tile indices fit 32 bits with room for rounding up.
constexpr std::int64_t kMostSize = 1LL << 30;

template <class Value>
[[noreturn]] void refuse(std::string_view field, const Value& value, std::string_view rule) {
    throw SpecError(fmt::format("spec: {} = {}: must be {}", field, value, rule));
}

void check_sizes(const Spec& s) {
    if (s.hidden_size < 8 || s.hidden_size % 8 != 0 || s.hidden_size > kMostSize) {
        refuse("hidden_size (D)", s.hidden_size, "a multiple of 8 from 8 to 2^30 (rows of 16 bytes)");
    }
    const std::int64_t fewest = is_shard(s) ? 1 : 2;
    if (s.vocab_size < fewest || s.vocab_size > kMostSize) {
        refuse("vocab_size (V)", s.vocab_size, fmt::format("from {} to 2^30", fewest));
    }
    if (s.padded_vocab_size < s.vocab_size || s.padded_vocab_size > kMostSize) {
        refuse("padded_vocab_size", s.padded_vocab_size, fmt::format("at least vocab_size = {} and at most 2^30", s.vocab_size));
    }
    if (s.whole_vocab_size != 0 && (s.whole_vocab_size < s.vocab_size || s.whole_vocab_size > kMostSize)) {
        refuse("whole_vocab_size", s.whole_vocab_size,
               fmt::format("0 (no shard), or at least vocab_size = {} and at most 2^30", s.vocab_size));
    }
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(s.hidden_size * 8, s.padded_vocab_size, &bytes)) {
        refuse("padded_vocab_size", s.padded_vocab_size,
               fmt::format("small enough for hidden_size = {} that 8·D·P bytes fit in 64 bits", s.hidden_size));
    }
}

/// Row kernels keep a token's ids in shared memory.
constexpr int kMostTeacherTopK = 1024;

/// Option values reach the kernels as fp32, so they have to exist there.
bool fits_fp32(double value) { return std::isfinite(value) && std::abs(value) <= FLT_MAX && (value == 0.0 || std::abs(value) >= FLT_MIN); }

void check_options(const Spec& s) {
    if (!fits_fp32(s.logit_scale) || s.logit_scale == 0.0) refuse("logit_scale", s.logit_scale, "finite in fp32 and not 0");
    // A subnormal softcap has no reciprocal in fp32.
    if (!fits_fp32(s.softcap) || s.softcap < 0.0 || (s.softcap != 0.0 && !fits_fp32(1.0 / s.softcap))) {
        refuse("softcap", s.softcap, "0 (off) or above 0, finite in fp32 and so its reciprocal");
    }
    if (!(s.label_smoothing >= 0.0 && s.label_smoothing <= 1.0)) refuse("label_smoothing", s.label_smoothing, "from 0 to 1");
    if (!(s.z_loss >= 0.0 && s.z_loss <= FLT_MAX)) refuse("z_loss", s.z_loss, "at least 0 and finite in fp32");
    if (s.outputs == Outputs{.loss = false}) {
        refuse("outputs", "(none)", "at least one of loss, lse, logprobs, entropy, top1 and log_sum_sq_probs");
    }
    if (s.teacher_top_k < 0 || s.teacher_top_k > kMostTeacherTopK) {
        refuse("teacher_top_k", s.teacher_top_k, fmt::format("0 (none) to {}", kMostTeacherTopK));
    }
    if (!(s.hard_weight >= 0.0 && s.hard_weight <= 1.0)) refuse("hard_weight", s.hard_weight, "from 0 to 1");
    if (s.teacher_top_k == 0 && s.hard_weight != 0.0) refuse("hard_weight", s.hard_weight, "0 where there is no teacher_top_k");
    // A mean divides by the sum of class weights, and dft multiplies by the target's probability: both are about one hard target.
    if (s.teacher_top_k > 0 && s.class_weight) refuse("class_weight", true, "false where there is a teacher_top_k");
    if (s.teacher_top_k > 0 && s.dft) refuse("dft", true, "false where there is a teacher_top_k");
    if (s.teacher_top_k > 0 && !s.outputs.loss) refuse("teacher_top_k", s.teacher_top_k, "0 where outputs has no loss");
    if (s.dft && !s.outputs.logprobs) refuse("dft", true, "false where outputs has no logprobs, which backward reads for it");
}

void check_kinds(const Spec& s) {
    if (s.dtype > DType::fp32) refuse("dtype", static_cast<int>(s.dtype), "bf16, fp16 or fp32");
    if (s.layout > WeightLayout::hidden_major) refuse("layout", static_cast<int>(s.layout), "vocab_major or hidden_major");
    if (s.grad_weight_mode > GradMode::accumulate) refuse("grad_weight_mode", static_cast<int>(s.grad_weight_mode), "write or accumulate");
    if (s.grad_weight_dtype != s.dtype && s.grad_weight_dtype != DType::fp32) {
        refuse(
            "grad_weight_dtype", to_string(s.grad_weight_dtype),
            fmt::format("the dtype ({}) or fp32 (it follows dtype in a literal, not where dtype is assigned later)", to_string(s.dtype)));
    }
    if (weight_dtype(s) != s.dtype && weight_dtype(s) != DType::fp32) {
        refuse("weight_dtype", to_string(weight_dtype(s)), fmt::format("the dtype ({}) or fp32", to_string(s.dtype)));
    }
    if (s.grad_hidden_dtype && s.grad_hidden_dtype != s.dtype && (s.grad_hidden_dtype != DType::fp32 || !is_shard(s))) {
        refuse("grad_hidden_dtype", to_string(*s.grad_hidden_dtype),
               fmt::format("the dtype ({}), or fp32 where there is a whole_vocab_size", to_string(s.dtype)));
    }
    if (s.tied && s.layout != WeightLayout::vocab_major) {
        refuse("layout", to_string(s.layout), "vocab_major where tied is set (an embedding table is [V, D])");
    }
}

std::string_view trimmed(std::string_view text) {
    const std::size_t first = text.find_first_not_of(" \t\r\n");
    if (first == std::string_view::npos) return {};
    return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

void set_item(SpecBuilder& builder, std::string_view item) {
    const std::size_t equals = item.find('=');
    const std::string_view key = trimmed(item.substr(0, equals));
    if (key.empty()) throw SpecError(fmt::format("spec: '{}' has no key; write key=value or a bare flag between commas", item));
    if (equals != std::string_view::npos) {
        builder.set(key, trimmed(item.substr(equals + 1)));
    } else if (spec_key_kind(key) == SpecKeyKind::flag) {
        builder.set(key, "true");
    } else {
        throw SpecError(
            fmt::format("spec: {} has no value; write {}=value (only flags, such as tied and bias, may stand alone)", key, key));
    }
}

}  // namespace

Spec Spec::normalized() const {
    Spec s = *this;
    if (s.padded_vocab_size == 0) s.padded_vocab_size = s.vocab_size;
    check_sizes(s);
    check_kinds(s);
    if (s.weight_dtype == s.dtype) s.weight_dtype.reset();
    if (s.grad_hidden_dtype == s.dtype) s.grad_hidden_dtype.reset();
    check_options(s);
    for (double Spec::* value : {&Spec::softcap, &Spec::label_smoothing, &Spec::z_loss, &Spec::hard_weight})
        s.*value += 0.0;  // −0 becomes 0
    return s;
}

std::string Spec::text() const {
    std::string out;
    for (const SpecEntry& entry : spec_entries(*this)) {
        if (!out.empty()) out += ',';
        out += entry.key;
        if (entry.kind != SpecKeyKind::flag) out += '=' + entry.value;
    }
    return out;
}

Spec parse_spec(std::string_view text) {
    text = trimmed(text);
    if (text.starts_with('@')) return parse_spec_json(read_spec_file(text.substr(1)));
    if (text.starts_with('{')) return parse_spec_json(text);
    if (text.empty()) throw SpecError("spec: the text is empty; write for example D=2048,V=151936,dtype=bf16");
    SpecBuilder builder;
    for (std::string_view rest = text;;) {
        const std::size_t comma = rest.find(',');
        set_item(builder, trimmed(rest.substr(0, comma)));
        if (comma == std::string_view::npos) return builder.finish();
        rest.remove_prefix(comma + 1);
    }
}

bool is_shard(const Spec& spec) noexcept { return spec.whole_vocab_size != 0; }

std::int64_t whole_vocab_size(const Spec& spec) noexcept { return is_shard(spec) ? spec.whole_vocab_size : spec.vocab_size; }

DType weight_dtype(const Spec& spec) noexcept { return spec.weight_dtype.value_or(spec.dtype); }

DType grad_hidden_dtype(const Spec& spec) noexcept { return spec.grad_hidden_dtype.value_or(spec.dtype); }

bool rounds_weight(const Spec& spec) noexcept { return weight_dtype(spec) != spec.dtype; }

std::size_t element_bytes(DType dtype) noexcept { return dtype == DType::fp32 ? 4 : 2; }

std::string_view to_string(DType dtype) noexcept {
    switch (dtype) {
        case DType::bf16: return "bf16";
        case DType::fp16: return "fp16";
        case DType::fp32: return "fp32";
    }
    return "?";
}

std::string_view to_string(WeightLayout layout) noexcept {
    switch (layout) {
        case WeightLayout::vocab_major: return "vocab_major";
        case WeightLayout::hidden_major: return "hidden_major";
    }
    return "?";
}

std::string_view to_string(GradMode mode) noexcept {
    switch (mode) {
        case GradMode::write: return "write";
        case GradMode::accumulate: return "accumulate";
    }
    return "?";
}

std::size_t SpecHash::operator()(const Spec& s) const noexcept {
    std::uint64_t bits = 0;
    for (const auto field : {static_cast<std::uint64_t>(s.dtype), static_cast<std::uint64_t>(weight_dtype(s)),
                             static_cast<std::uint64_t>(grad_hidden_dtype(s)), static_cast<std::uint64_t>(s.layout),
                             static_cast<std::uint64_t>(s.grad_weight_dtype), static_cast<std::uint64_t>(s.grad_weight_mode)}) {
        bits = bits << 4 | field;
    }
    for (const bool flag : {s.tied, s.bias, s.class_weight, s.temperature, s.token_weight, s.batch_invariant, s.dft, s.outputs.loss,
                            s.outputs.lse, s.outputs.logprobs, s.outputs.entropy, s.outputs.top1, s.outputs.log_sum_sq_probs}) {
        bits = bits << 1 | static_cast<std::uint64_t>(flag);
    }
    auto real = [](double value) { return std::bit_cast<std::uint64_t>(value + 0.0); };  // 0 and −0 are equal
    const std::array<std::uint64_t, 11> words = {static_cast<std::uint64_t>(s.hidden_size),
                                                 static_cast<std::uint64_t>(s.vocab_size),
                                                 static_cast<std::uint64_t>(s.padded_vocab_size),
                                                 static_cast<std::uint64_t>(s.whole_vocab_size),
                                                 bits,
                                                 real(s.logit_scale),
                                                 real(s.softcap),
                                                 real(s.label_smoothing),
                                                 real(s.z_loss),
                                                 static_cast<std::uint64_t>(s.teacher_top_k),
                                                 real(s.hard_weight)};
    return XXH3_64bits(words.data(), sizeof(words));
}

}  // namespace flce
