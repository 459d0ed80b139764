#include "flce/spec.hpp"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
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
constexpr double kLeastMixture = 0x1p-10;
/// A row's classes are ranked in shared memory.
constexpr int kMostTopK = 256;
constexpr int kWeightBlock = 128;
/// Sums of products of int8 fit into int32.
constexpr std::int64_t kMostInt8Depth = 1LL << 17;

/// The weight's form as texts have it.
std::string_view weight_text(const Spec& s) { return is_quantized(s) ? to_string(s.weight_format) : to_string(weight_dtype(s)); }

/// Option values reach the kernels as fp32, so they have to exist there.
bool fits_fp32(double value) { return std::isfinite(value) && std::abs(value) <= FLT_MAX && (value == 0.0 || std::abs(value) >= FLT_MIN); }

void check_logits(std::string_view of, double logit_scale, double softcap) {
    if (!fits_fp32(logit_scale) || logit_scale == 0.0) refuse(fmt::format("{}logit_scale", of), logit_scale, "finite in fp32 and not 0");
    // A subnormal softcap has no reciprocal in fp32.
    if (!fits_fp32(softcap) || softcap < 0.0 || (softcap != 0.0 && !fits_fp32(1.0 / softcap))) {
        refuse(fmt::format("{}softcap", of), softcap, "0 (off) or above 0, finite in fp32 and so its reciprocal");
    }
}

/// A divergence has no target, and its teacher's head is a whole one.
void check_teacher_head(const Spec& s) {
    if (!has_teacher_head(s)) {
        constexpr std::string_view kNeedsHead = "left out where there is no teacher_hidden_size";
        if (s.divergence_beta != 0.0) refuse("divergence_beta", s.divergence_beta, kNeedsHead);
        if (s.teacher_bias) refuse("teacher_bias", true, kNeedsHead);
        if (s.teacher_logit_scale != 1.0) refuse("teacher_logit_scale", s.teacher_logit_scale, kNeedsHead);
        if (s.teacher_softcap != 0.0) refuse("teacher_softcap", s.teacher_softcap, kNeedsHead);
        return;
    }
    if (s.teacher_hidden_size < 8 || s.teacher_hidden_size % 8 != 0 || s.teacher_hidden_size > kMostSize) {
        refuse("teacher_hidden_size", s.teacher_hidden_size, "0 (none), or a multiple of 8 from 8 to 2^30 (rows of 16 bytes)");
    }
    // Closer to 0 or 1, a mixture's terms and 1 - beta have no digits left in fp32.
    const double from_end = std::min(s.divergence_beta, 1.0 - s.divergence_beta);
    if (!(from_end == 0.0 || from_end >= kLeastMixture)) {
        refuse("divergence_beta", s.divergence_beta, "0, 1, or from 2^-10 to 1 - 2^-10");
    }
    check_logits("teacher_", s.teacher_logit_scale, s.teacher_softcap);
    constexpr std::string_view kNoTarget = "left out where there is a teacher_hidden_size, whose divergence has no target";
    if (s.label_smoothing != 0.0) refuse("label_smoothing", s.label_smoothing, kNoTarget);
    if (s.z_loss != 0.0) refuse("z_loss", s.z_loss, kNoTarget);
    if (s.class_weight) refuse("class_weight", true, kNoTarget);
    if (s.class_offset) refuse("class_offset", true, "false where there is a teacher_hidden_size, whose heads have biases");
    if (s.dft) refuse("dft", true, kNoTarget);
    if (s.teacher_top_k != 0) refuse("teacher_top_k", s.teacher_top_k, "0 where there is a teacher_hidden_size: one teacher a layer");
    if (s.batch_invariant) refuse("batch_invariant", true, "false where there is a teacher_hidden_size");
    if (rounds_weight(s)) refuse("weight_dtype", weight_text(s), "the dtype where there is a teacher_hidden_size");
    if (s.top_k != 0) refuse("top_k", s.top_k, "0 where there is a teacher_hidden_size: a top_k is of one head");
    if (!s.outputs.loss || s.outputs.logprobs || s.outputs.top1 || s.outputs.log_sum_sq_probs) {
        refuse("outputs", "(others)", "loss, and beside it lse and entropy, where there is a teacher_hidden_size");
    }
}

/// A softmax over a token's own classes has no target among others, and no sum over the vocabulary.
void check_support(const Spec& s) {
    if (!s.support) return;
    constexpr std::string_view kOfVocabulary = "left out with support, whose softmax is over a token's ids alone";
    if (s.teacher_top_k == 0) refuse("support", true, "false where there is no teacher_top_k, the number of ids");
    if (s.hard_weight != 0.0) refuse("hard_weight", s.hard_weight, kOfVocabulary);
    if (s.label_smoothing != 0.0) refuse("label_smoothing", s.label_smoothing, kOfVocabulary);
    if (s.z_loss != 0.0) refuse("z_loss", s.z_loss, kOfVocabulary);
    if (s.top_k != 0) refuse("top_k", s.top_k, kOfVocabulary);
    if (s.outputs.logprobs || s.outputs.top1 || s.outputs.log_sum_sq_probs) {
        refuse("outputs", "(others)", "loss, and beside it lse and entropy, with support");
    }
}

/// Classes that a row's group rules out have no place among a teacher's, in a list of the largest, or in a sum over all classes.
void check_class_groups(const Spec& s) {
    if (!s.class_groups) return;
    constexpr std::string_view kOfAllClasses = "left out with class_groups, which rule classes out of a row's softmax";
    if (s.label_smoothing != 0.0) refuse("label_smoothing", s.label_smoothing, kOfAllClasses);
    if (s.teacher_top_k != 0) refuse("teacher_top_k", s.teacher_top_k, kOfAllClasses);
    if (has_teacher_head(s)) refuse("teacher_hidden_size", s.teacher_hidden_size, kOfAllClasses);
    if (s.top_k != 0) refuse("top_k", s.top_k, kOfAllClasses);
}

void check_options(const Spec& s) {
    check_logits("", s.logit_scale, s.softcap);
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
    if (s.top_k < 0 || s.top_k > std::min<std::int64_t>(kMostTopK, whole_vocab_size(s))) {
        refuse("top_k", s.top_k, fmt::format("0 (none) to {}, and no more than the vocabulary has classes", kMostTopK));
    }
    if (s.top_k > 0 && rounds_weight(s) && !is_quantized(s)) {
        refuse("weight_dtype", weight_text(s), "the dtype, e4m3 or nvfp4 where there is a top_k");
    }
    check_support(s);
    check_class_groups(s);
    if (s.offset_gradient && !(s.bias && s.class_offset)) {
        refuse("offset_gradient", true, "false where there is no class_offset, and no bias as whose gradient backward writes it");
    }
    if (s.dft && !s.outputs.logprobs) refuse("dft", true, "false where outputs has no logprobs, which backward reads for it");
}

/// A quantised weight has a gradient of neither itself nor an embedding.
void check_quantized(const Spec& s) {
    if (s.weight_format > WeightFormat::nvfp4) {
        refuse("weight_format", static_cast<int>(s.weight_format), "numbers, e4m3 or nvfp4");
    }
    const bool blocks = s.weight_format == WeightFormat::e4m3 && s.weight_block == kWeightBlock;
    if (s.weight_block != 0 && !blocks) {
        refuse("weight_block", s.weight_block, "0 (a scale a row), or with weight_dtype=e4m3 also 128 (a scale for each 128 x 128)");
    }
    if (!is_quantized(s)) return;
    const std::string format = fmt::format("where weight_dtype is {}", to_string(s.weight_format));
    if (s.weight_dtype && s.weight_dtype != DType::fp32) {
        refuse("weight_dtype", to_string(*s.weight_dtype), "left out " + format + ", whose numbers are fp32 before they are rounded");
    }
    if (s.dtype == DType::fp32) refuse("dtype", to_string(s.dtype), "bf16 or fp16 " + format + "; cast hidden");
    if (s.layout != WeightLayout::vocab_major) refuse("layout", to_string(s.layout), "vocab_major " + format);
    if (s.hidden_size % 16 != 0) refuse("hidden_size (D)", s.hidden_size, "a multiple of 16 " + format);
    const std::string frozen = format + ", which is frozen";
    if (s.tied) refuse("tied", true, "false " + frozen + "; dequantise the table to train it");
    if (s.grad_weight_mode != GradMode::write) refuse("grad_weight_mode", to_string(s.grad_weight_mode), "write " + frozen);
}

void check_fp8_scales(const Spec& s) {
    const auto check = [](std::string_view field, double scale) {
        if (!(scale == 0.0 || (scale >= 0x1p-100 && scale <= 0x1p100))) {
            refuse(field, scale, "from 2^-100 to 2^100, the number that one code stands for, or left out (a scale a row)");
        }
    };
    check("fp8_hidden_scale", s.fp8_hidden_scale);
    check("fp8_weight_scale", s.fp8_weight_scale);
    if (is_quantized(s)) return;
    constexpr std::string_view kBoth = "given together with the other one's: both scales of fp8, or neither";
    if (s.fp8_hidden_scale == 0.0 && s.fp8_weight_scale != 0.0) refuse("fp8_hidden_scale", "(none)", kBoth);
    if (s.fp8_hidden_scale != 0.0 && s.fp8_weight_scale == 0.0) {
        refuse("fp8_weight_scale", "(none)", fmt::format("{}. Hidden's alone is for weight_dtype=e4m3, whose scales are given", kBoth));
    }
}

/// Refuses weights in memory that an FP8 head does not multiply.
void check_fp8_weight(const Spec& s) {
    if (!is_quantized(s)) {
        if (weight_dtype(s) == s.dtype) return;
        refuse("weight_dtype", weight_text(s),
               fmt::format("{} as hidden is, with fp8 (under autocast: keep this layer's parameter in {}, or give weight.to(...)); or "
                           "leave fp8 out",
                           to_string(s.dtype), to_string(s.dtype)));
    }
    if (s.weight_format != WeightFormat::e4m3) {
        refuse("weight_dtype", weight_text(s), "e4m3 with a scale a row where codes are multiplied as they are; leave fp8 out");
    }
    if (s.weight_block != 0) {
        refuse("weight_block", s.weight_block, "0 (a scale a row) with fp8, whose products have one scale a class; leave fp8 out");
    }
    if (s.fp8 != Fp8Operands::e4m3) {
        refuse("fp8", to_string(s.fp8), "e4m3 where weight_dtype is e4m3, whose codes are multiplied as they are: flce.Fp8('e4m3')");
    }
    if (s.fp8_weight_scale != 0.0) {
        refuse("fp8_weight_scale", s.fp8_weight_scale,
               "left out where weight_dtype is e4m3, whose scales are given: scales=(fp8_hidden_scale, None)");
    }
}

/// Refuses options that products in 8 bits have no arithmetic for.
void check_fp8(const Spec& s) {
    if (s.fp8 > Fp8Operands::e4m3) refuse("fp8", static_cast<int>(s.fp8), "int8 or e4m3, or left out");
    if (s.fp8_dlogits > Fp8Dlogits::e4m3) refuse("fp8_dlogits", static_cast<int>(s.fp8_dlogits), "e5m2 or e4m3");
    if (!is_fp8(s)) {
        constexpr std::string_view kNeedsFp8 = "left out where there is no fp8";
        if (s.fp8_dlogits != Fp8Dlogits::e5m2) refuse("fp8_dlogits", to_string(s.fp8_dlogits), kNeedsFp8);
        if (s.fp8_hidden_scale != 0.0) refuse("fp8_hidden_scale", s.fp8_hidden_scale, kNeedsFp8);
        if (s.fp8_weight_scale != 0.0) refuse("fp8_weight_scale", s.fp8_weight_scale, kNeedsFp8);
        return;
    }
    check_fp8_scales(s);
    const auto without = [](std::string_view option) { return fmt::format("{} with fp8; leave fp8 out", option); };
    check_fp8_weight(s);
    if (s.hidden_size > kMostInt8Depth && s.fp8 == Fp8Operands::int8) {
        refuse("hidden_size (D)", s.hidden_size, fmt::format("at most {} with fp8=int8, whose sums are int32", kMostInt8Depth));
    }
    if (has_teacher_head(s)) refuse("teacher_hidden_size", s.teacher_hidden_size, without("0"));
    if (s.teacher_top_k != 0) refuse("teacher_top_k", s.teacher_top_k, without("0"));
    if (s.top_k != 0) refuse("top_k", s.top_k, without("0"));
    if (s.label_smoothing != 0.0 && s.softcap != 0.0) {
        refuse("label_smoothing", s.label_smoothing,
               "0 with fp8 and a softcap, under which its gradient is no product of a number of the token and one of the class; leave "
               "fp8, the softcap or label_smoothing out");
    }
    if (s.class_groups) refuse("class_groups", true, without("false"));
    if (s.batch_invariant) refuse("batch_invariant", true, without("false"));
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
        refuse("weight_dtype", to_string(weight_dtype(s)), fmt::format("the dtype ({}), fp32, e4m3 or nvfp4", to_string(s.dtype)));
    }
    check_quantized(s);
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
    } else if (const std::string_view value = bare_value(key); !value.empty()) {
        builder.set(key, value);
    } else {
        throw SpecError(
            fmt::format("spec: {} has no value; write {}=value (only flags, such as tied and bias, and fp8 may stand alone)", key, key));
    }
}

}  // namespace

Spec Spec::normalized() const {
    Spec s = *this;
    if (s.padded_vocab_size == 0) s.padded_vocab_size = s.vocab_size;
    check_sizes(s);
    check_kinds(s);
    if (s.weight_dtype == s.dtype || is_quantized(s)) s.weight_dtype.reset();
    if (s.grad_hidden_dtype == s.dtype) s.grad_hidden_dtype.reset();
    check_options(s);
    check_teacher_head(s);
    check_fp8(s);
    for (double Spec::* value :
         {&Spec::softcap, &Spec::label_smoothing, &Spec::z_loss, &Spec::hard_weight, &Spec::divergence_beta, &Spec::teacher_softcap})
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

bool has_teacher_head(const Spec& spec) noexcept { return spec.teacher_hidden_size != 0; }

Spec teacher_head(const Spec& spec) {
    Spec head{.hidden_size = spec.teacher_hidden_size, .vocab_size = spec.vocab_size, .dtype = spec.dtype, .layout = spec.layout};
    head.bias = spec.teacher_bias;
    head.temperature = spec.temperature;
    head.logit_scale = spec.teacher_logit_scale;
    head.softcap = spec.teacher_softcap;
    if (is_shard(spec)) {
        head.padded_vocab_size = spec.padded_vocab_size;
        head.whole_vocab_size = spec.whole_vocab_size;
    }
    return head.normalized();
}

std::int64_t whole_vocab_size(const Spec& spec) noexcept { return is_shard(spec) ? spec.whole_vocab_size : spec.vocab_size; }

DType weight_dtype(const Spec& spec) noexcept { return is_quantized(spec) ? DType::fp32 : spec.weight_dtype.value_or(spec.dtype); }

DType grad_hidden_dtype(const Spec& spec) noexcept { return spec.grad_hidden_dtype.value_or(spec.dtype); }

bool rounds_weight(const Spec& spec) noexcept { return weight_dtype(spec) != spec.dtype && !is_fp8(spec); }

bool is_quantized(const Spec& spec) noexcept { return spec.weight_format != WeightFormat::numbers; }

bool is_fp8(const Spec& spec) noexcept { return spec.fp8 != Fp8Operands::none; }

bool has_fp8_scales(const Spec& spec) noexcept { return spec.fp8_hidden_scale != 0.0; }

std::int64_t weight_row_bytes(const Spec& spec) noexcept {
    switch (spec.weight_format) {
        case WeightFormat::numbers: break;
        case WeightFormat::e4m3: return spec.hidden_size;
        case WeightFormat::nvfp4: return spec.hidden_size / 2;
    }
    return spec.hidden_size * static_cast<std::int64_t>(element_bytes(weight_dtype(spec)));
}

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

std::string_view to_string(WeightFormat format) noexcept {
    switch (format) {
        case WeightFormat::numbers: return "numbers";
        case WeightFormat::e4m3: return "e4m3";
        case WeightFormat::nvfp4: return "nvfp4";
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

std::string_view to_string(Fp8Operands operands) noexcept {
    switch (operands) {
        case Fp8Operands::none: return "none";
        case Fp8Operands::int8: return "int8";
        case Fp8Operands::e4m3: return "e4m3";
    }
    return "?";
}

std::string_view to_string(Fp8Dlogits dlogits) noexcept {
    switch (dlogits) {
        case Fp8Dlogits::e5m2: return "e5m2";
        case Fp8Dlogits::e4m3: return "e4m3";
    }
    return "?";
}

std::size_t SpecHash::operator()(const Spec& s) const noexcept {
    std::uint64_t bits = 0;
    for (const auto field : {static_cast<std::uint64_t>(s.dtype), static_cast<std::uint64_t>(weight_dtype(s)),
                             static_cast<std::uint64_t>(s.weight_format), static_cast<std::uint64_t>(s.weight_block != 0),
                             static_cast<std::uint64_t>(grad_hidden_dtype(s)), static_cast<std::uint64_t>(s.layout),
                             static_cast<std::uint64_t>(s.grad_weight_dtype), static_cast<std::uint64_t>(s.grad_weight_mode),
                             static_cast<std::uint64_t>(s.fp8) << 1 | static_cast<std::uint64_t>(s.fp8_dlogits)}) {
        bits = bits << 4 | field;
    }
    for (const bool flag : {s.tied, s.bias, s.class_weight, s.class_offset, s.class_groups, s.offset_gradient, s.temperature,
                            s.token_weight, s.batch_invariant, s.dft, s.support, s.teacher_bias, s.outputs.loss, s.outputs.lse,
                            s.outputs.logprobs, s.outputs.entropy, s.outputs.top1, s.outputs.log_sum_sq_probs}) {
        bits = bits << 1 | static_cast<std::uint64_t>(flag);
    }
    auto real = [](double value) { return std::bit_cast<std::uint64_t>(value + 0.0); };  // 0 and −0 are equal
    const std::array<std::uint64_t, 18> words = {static_cast<std::uint64_t>(s.hidden_size),
                                                 static_cast<std::uint64_t>(s.vocab_size),
                                                 static_cast<std::uint64_t>(s.padded_vocab_size),
                                                 static_cast<std::uint64_t>(s.whole_vocab_size),
                                                 bits,
                                                 real(s.logit_scale),
                                                 real(s.softcap),
                                                 real(s.label_smoothing),
                                                 real(s.z_loss),
                                                 static_cast<std::uint64_t>(s.teacher_top_k),
                                                 real(s.hard_weight),
                                                 static_cast<std::uint64_t>(s.teacher_hidden_size),
                                                 real(s.divergence_beta),
                                                 real(s.teacher_logit_scale),
                                                 real(s.teacher_softcap),
                                                 static_cast<std::uint64_t>(s.top_k),
                                                 real(s.fp8_hidden_scale),
                                                 real(s.fp8_weight_scale)};
    return XXH3_64bits(words.data(), sizeof(words));
}

}  // namespace flce
