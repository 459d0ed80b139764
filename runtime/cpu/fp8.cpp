#include "runtime/cpu/fp8.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "runtime/cpu/passes.hpp"
#include "runtime/cpu/quantized_weight.hpp"
#include "runtime/layer/number_formats.hpp"
#include "templates/common/fp8_codes.cuh"

namespace flce {
namespace {

template <class Bits>
Bits bits_at(const std::byte* numbers, std::int64_t i) {
    Bits bits;
    std::memcpy(&bits, numbers + i * static_cast<std::int64_t>(sizeof(Bits)), sizeof(Bits));
    return bits;
}

/// fp16_to_float without fp32's subnormal numbers on the way, which workers take for 0.
float fp16_number(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
    const std::uint32_t magnitude = bits & 0x7fffU;
    const float subnormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24F;
    const float normal = std::bit_cast<float>((magnitude << 13) + (magnitude < 0x7c00U ? 112U << 23 : 224U << 23));
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude < 0x400U ? subnormal : normal) | sign);
}

/// Calls body(number of index i) for a dtype that is known when this is compiled.
template <class Body>
void with_numbers(DType dtype, const std::byte* numbers, const Body& body) {
    switch (dtype) {
        case DType::bf16: return body([numbers](std::int64_t i) { return bf16_to_float(bits_at<std::uint16_t>(numbers, i)); });
        case DType::fp16: return body([numbers](std::int64_t i) { return fp16_number(bits_at<std::uint16_t>(numbers, i)); });
        case DType::fp32: return body([numbers](std::int64_t i) { return std::bit_cast<float>(bits_at<std::uint32_t>(numbers, i)); });
    }
}

/// Largest of the numbers' bits without their signs, which are ordered as the numbers are: NaN is above infinity. Those from `end` on are
/// left out.
template <class Bits>
Bits largest_bits(const std::byte* numbers, std::int64_t count, Bits end) {
    constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
    Bits largest = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const Bits magnitude = bits_at<Bits>(numbers, i) & kMagnitude;
        const Bits taken = magnitude < end ? magnitude : Bits{0};
        largest = taken > largest ? taken : largest;
    }
    return largest;
}

/// Largest |x|, NaN where there is one; without those that are not finite where `finite`.
float largest_of(DType dtype, const std::byte* numbers, std::int64_t count, bool finite) {
    switch (dtype) {
        case DType::bf16: return bf16_to_float(largest_bits<std::uint16_t>(numbers, count, finite ? 0x7f80 : 0xffff));
        case DType::fp16: return fp16_number(largest_bits<std::uint16_t>(numbers, count, finite ? 0x7c00 : 0xffff));
        case DType::fp32: break;
    }
    return std::bit_cast<float>(largest_bits<std::uint32_t>(numbers, count, finite ? 0x7f800000U : 0xffffffffU));
}

constexpr std::int64_t kColumnsAtATime = 64;

/// Numbers of the largest magnitude of `count` columns, at most kColumnsAtATime, as their bits without signs are ordered.
template <class Bits>
std::array<Bits, kColumnsAtATime> largest_of_columns(const std::byte* numbers, std::int64_t rows, std::int64_t pitch, std::int64_t count) {
    constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
    std::array<Bits, kColumnsAtATime> largest{};
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t j = 0; j < count; ++j) {
            const Bits magnitude = bits_at<Bits>(numbers, row * pitch + j) & kMagnitude;
            Bits& most = largest[static_cast<std::size_t>(j)];
            most = std::max(most, magnitude);
        }
    }
    return largest;
}

/// largest_of each of `count` columns of a hidden_major weight, NaN where there is one.
void largest_of_classes(const Spec& spec, const std::byte* weight, std::int64_t count, float* largest) {
    const auto put = [&](const auto& bits) {
        const auto* const numbers = reinterpret_cast<const std::byte*>(bits.data());
        with_numbers(spec.dtype, numbers, [&](const auto& number) {
            for (std::int64_t j = 0; j < count; ++j) largest[j] = number(j);
        });
    };
    if (spec.dtype == DType::fp32) {
        put(largest_of_columns<std::uint32_t>(weight, spec.hidden_size, spec.padded_vocab_size, count));
    } else {
        put(largest_of_columns<std::uint16_t>(weight, spec.hidden_size, spec.padded_vocab_size, count));
    }
}

bool is_hidden_major(const Spec& spec) { return spec.layout == WeightLayout::hidden_major; }

/// The weight from class `first` on.
const std::byte* weight_from(const CpuCall& call, std::int64_t first) {
    const Spec& spec = call.spec();
    const auto element = static_cast<std::int64_t>(is_quantized(spec) ? 1 : element_bytes(spec.dtype));
    return call.pointer(Slot::weight) + first * element * (is_hidden_major(spec) ? 1 : spec.hidden_size);
}

/// Scales of codes, of class `first` and those behind it.
const float* scales_from(const CpuCall& call, std::int64_t first) { return call.pointer<const float>(Slot::weight_scale) + first; }

float number_of(std::byte code) { return e4m3_numbers()[std::to_integer<std::size_t>(code)]; }

/// Largest |number| of a row of codes that is finite, of its scale.
float largest_of_codes(const std::byte* codes, std::int64_t count, float scale) {
    constexpr unsigned kMagnitude = 0x7f;  // NaN, which is left out; codes without their signs are ordered as their numbers are
    unsigned largest = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const unsigned magnitude = std::to_integer<unsigned>(codes[i]) & kMagnitude;
        largest = magnitude != kMagnitude ? std::max(largest, magnitude) : largest;
    }
    return number_of(static_cast<std::byte>(largest)) * std::fabs(scale);
}

/// A row's factor and scale in its operand of the logits, of its largest number.
fp8::RowScale row_scale_of(const Spec& spec, double given, float largest) {
    const float most = spec.fp8 == Fp8Operands::int8 ? fp8::int8_most() : fp8::e4m3_most();
    return given != 0.0 ? fp8::given_row_scale(largest, static_cast<float>(given)) : fp8::row_scale(largest, most);
}

}  // namespace

void Fp8Numbers::load(std::int64_t row, std::int64_t column, std::int64_t count, float* to) const {
    if (are_codes_) return load_codes(row, column, count, to);
    const std::int64_t element = static_cast<std::int64_t>(element_bytes(dtype_));
    with_numbers(dtype_, rows_ + (row * pitch_ + column) * element, [&](const auto& number) {
        const auto load_by = [&](const auto& factor) {
            if (rounding_ == Rounding::int8) {
                for (std::int64_t i = 0; i < count; ++i) to[i] = fp8::rounded_to_int8(number(i) * factor(i));
            } else {
                for (std::int64_t i = 0; i < count; ++i) to[i] = fp8::rounded_to_e4m3(number(i) * factor(i));
            }
        };
        if (factors_ != nullptr && factors_of_ == FactorsOf::columns) {
            load_by([of = factors_ + column](std::int64_t i) { return of[i]; });
        } else {
            load_by([all = factors_ != nullptr ? factors_[row] : factor_](std::int64_t) { return all; });
        }
    });
}

Fp8Numbers Fp8Numbers::of_codes(const std::byte* codes, std::int64_t pitch, const float* scales, float factor) {
    Fp8Numbers numbers(DType::fp32, codes, pitch, Rounding::e4m3, scales, factor);
    numbers.are_codes_ = true;
    return numbers;
}

void Fp8Numbers::load_codes(std::int64_t row, std::int64_t column, std::int64_t count, float* to) const {
    const std::byte* const codes = rows_ + row * pitch_ + column;
    if (factors_ == nullptr) {
        for (std::int64_t i = 0; i < count; ++i) to[i] = number_of(codes[i]);
        return;
    }
    for (std::int64_t i = 0; i < count; ++i) to[i] = fp8::rounded_to_e4m3(number_of(codes[i]) * factors_[row] * factor_);
}

Fp8Numbers fp8_logits_weight(const CpuCall& call, std::int64_t first, const float* factors) {
    const Spec& spec = call.spec();
    const std::byte* const from = weight_from(call, first);
    if (is_quantized(spec)) return Fp8Numbers::of_codes(from, spec.hidden_size, nullptr);
    if (!is_hidden_major(spec)) return {spec.dtype, from, spec.hidden_size, logits_rounding(spec), factors};
    return {spec.dtype, from, spec.padded_vocab_size, logits_rounding(spec), factors, 1.F, Fp8Numbers::FactorsOf::columns};
}

Fp8Numbers fp8_gradient_weight(const CpuCall& call, std::int64_t first, float factor) {
    const Spec& spec = call.spec();
    const std::byte* const from = weight_from(call, first);
    if (is_quantized(spec)) return Fp8Numbers::of_codes(from, spec.hidden_size, scales_from(call, first), factor);
    const std::int64_t pitch = is_hidden_major(spec) ? spec.padded_vocab_size : spec.hidden_size;
    return {spec.dtype, from, pitch, Fp8Numbers::Rounding::e4m3, nullptr, factor};
}

Fp8Numbers::Rounding logits_rounding(const Spec& spec) noexcept {
    return spec.fp8 == Fp8Operands::int8 ? Fp8Numbers::Rounding::int8 : Fp8Numbers::Rounding::e4m3;
}

void fp8_row_scales(const Spec& spec, double given, const std::byte* rows, std::int64_t count, float* factors, float* scales) {
    const std::int64_t row_bytes = spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.dtype));
    for (std::int64_t i = 0; i < count; ++i) {
        const fp8::RowScale scale = row_scale_of(spec, given, largest_of(spec.dtype, rows + i * row_bytes, spec.hidden_size, false));
        factors[i] = scale.factor;
        scales[i] = scale.scale;
    }
}

void fp8_class_scales(const CpuCall& call, std::int64_t first, std::int64_t count, float* factors, float* scales) {
    const Spec& spec = call.spec();
    if (is_quantized(spec)) {
        std::fill_n(factors, count, 1.F);
        std::copy_n(scales_from(call, first), count, scales);
        return;
    }
    if (!is_hidden_major(spec)) return fp8_row_scales(spec, spec.fp8_weight_scale, weight_from(call, first), count, factors, scales);
    for (std::int64_t j = 0; j < count; j += kColumnsAtATime) {
        largest_of_classes(spec, weight_from(call, first + j), std::min(kColumnsAtATime, count - j), scales + j);
    }
    for (std::int64_t j = 0; j < count; ++j) {
        const fp8::RowScale scale = row_scale_of(spec, spec.fp8_weight_scale, scales[j]);
        factors[j] = scale.factor;
        scales[j] = scale.scale;
    }
}

void LargestNumber::add(float number) noexcept {
    if (!std::isfinite(number)) return;
    const auto bits = std::bit_cast<std::uint32_t>(number);
    std::uint32_t seen = bits_.load(std::memory_order_relaxed);
    while (bits > seen && !bits_.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
    }
}

float largest_finite(DType dtype, const std::byte* numbers, std::int64_t count) { return largest_of(dtype, numbers, count, true); }

void add_multiple(DType dtype, const std::byte* numbers, std::int64_t count, float factor, float* to) {
    with_numbers(dtype, numbers, [&](const auto& number) {
        for (std::int64_t i = 0; i < count; ++i) to[i] += factor * number(i);
    });
}

namespace {

/// sum_of_rows of rows that `add(row, first column, width, times, to)` adds.
template <class Add>
void sum_of_added_rows(const CpuContext& context, std::int64_t count, std::int64_t columns,
                       const std::function<float(std::int64_t)>& factor, const Add& add, float* sums) {
    constexpr std::int64_t kColumnsPerTask = 256;
    constexpr std::int64_t kRowsAtATime = 256;  // rows that have a sum of their own, which then joins the whole
    const Blocks tasks = fixed_blocks(columns, kColumnsPerTask);
    context.workers->run(tasks.count, context.threads, [&](std::int64_t task, std::int64_t) {
        const std::int64_t first = tasks.begin(task);
        const std::int64_t width = tasks.length(task);
        std::fill_n(sums + first, width, 0.F);
        for (std::int64_t begin = 0; begin < count; begin += kRowsAtATime) {
            std::array<float, kColumnsPerTask> part{};
            for (std::int64_t i = begin; i < std::min(begin + kRowsAtATime, count); ++i) {
                const float times = factor(i);
                if (times != 0.F) add(i, first, width, times, part.data());
            }
            for (std::int64_t k = 0; k < width; ++k) sums[first + k] += part[static_cast<std::size_t>(k)];
        }
    });
}

/// sum_of_classes of a weight of codes.
void sum_of_codes(const CpuContext& context, const CpuCall& call, float* sums) {
    const std::int64_t d = call.spec().hidden_size;
    const auto class_weight = [&](std::int64_t column) { return call.class_weight(column); };
    const auto add = [&](std::int64_t row, std::int64_t first, std::int64_t width, float times, float* to) {
        const std::byte* const codes = weight_from(call, row) + first;
        const float scale = *scales_from(call, row);
        for (std::int64_t k = 0; k < width; ++k) to[k] += times * (number_of(codes[k]) * scale);
    };
    sum_of_added_rows(context, call.vocab_columns(), d, class_weight, add, sums);
}

}  // namespace

void sum_of_rows(const CpuContext& context, DType dtype, const std::byte* rows, std::int64_t count, std::int64_t columns,
                 const std::function<float(std::int64_t)>& factor, float* sums) {
    const auto element = static_cast<std::int64_t>(element_bytes(dtype));
    const auto add = [&](std::int64_t row, std::int64_t first, std::int64_t width, float times, float* to) {
        add_multiple(dtype, rows + (row * columns + first) * element, width, times, to);
    };
    sum_of_added_rows(context, count, columns, factor, add, sums);
}

void sum_of_classes(const CpuContext& context, const CpuCall& call, float* sums) {
    constexpr std::int64_t kRowsPerTask = 16;
    constexpr std::int64_t kClassesAtATime = 256;  // rows that sum_of_rows has
    const Spec& spec = call.spec();
    if (is_quantized(spec)) return sum_of_codes(context, call, sums);
    const std::int64_t columns = call.vocab_columns();
    if (!is_hidden_major(spec)) {
        const auto class_weight = [&](std::int64_t column) { return call.class_weight(column); };
        return sum_of_rows(context, spec.dtype, call.pointer(Slot::weight), columns, spec.hidden_size, class_weight, sums);
    }
    const std::int64_t row_bytes = spec.padded_vocab_size * static_cast<std::int64_t>(element_bytes(spec.dtype));
    const Blocks tasks = fixed_blocks(spec.hidden_size, kRowsPerTask);
    context.workers->run(tasks.count, context.threads, [&](std::int64_t task, std::int64_t) {
        for (std::int64_t k = tasks.begin(task); k < tasks.begin(task) + tasks.length(task); ++k) {
            with_numbers(spec.dtype, call.pointer(Slot::weight) + k * row_bytes, [&](const auto& number) {
                sums[k] = 0;
                for (std::int64_t begin = 0; begin < columns; begin += kClassesAtATime) {
                    float part = 0;
                    for (std::int64_t j = begin; j < std::min(begin + kClassesAtATime, columns); ++j) {
                        const float times = call.class_weight(j);
                        if (times != 0.F) part += times * number(j);
                    }
                    sums[k] += part;
                }
            });
        }
    });
}

void scale_products(float* tile, std::int64_t ld, std::int64_t rows, std::int64_t columns, const float* row_scales,
                    const float* class_scales) {
    for (std::int64_t i = 0; i < rows; ++i) {
        float* row = tile + i * ld;
        for (std::int64_t j = 0; j < columns; ++j) row[j] = fp8::product_of(row[j], row_scales[i], class_scales[j]);
    }
}

namespace {

int power_of_codes(const CpuContext& context, const CpuCall& call) {
    constexpr std::int64_t kRowsPerTask = 256;
    const std::int64_t d = call.spec().hidden_size;
    const Blocks tasks = fixed_blocks(call.vocab_columns(), kRowsPerTask);
    LargestNumber largest;
    context.workers->run(tasks.count, context.threads, [&](std::int64_t task, std::int64_t) {
        for (std::int64_t row = tasks.begin(task); row < tasks.begin(task) + tasks.length(task); ++row) {
            largest.add(largest_of_codes(weight_from(call, row), d, *scales_from(call, row)));
        }
    });
    return fp8::e4m3_power(largest.value());
}

}  // namespace

int fp8_weight_power(const CpuContext& context, const CpuCall& call) {
    constexpr std::int64_t kRowsPerTask = 256;
    const Spec& spec = call.spec();
    if (is_quantized(spec)) return power_of_codes(context, call);
    const bool hidden_major = is_hidden_major(spec);
    const std::int64_t rows = hidden_major ? spec.hidden_size : call.vocab_columns();
    const std::int64_t columns = hidden_major ? call.vocab_columns() : spec.hidden_size;
    const std::int64_t pitch = hidden_major ? spec.padded_vocab_size : spec.hidden_size;
    const std::int64_t row_bytes = pitch * static_cast<std::int64_t>(element_bytes(spec.dtype));
    const Blocks tasks = fixed_blocks(rows, hidden_major ? 1 : kRowsPerTask);
    LargestNumber largest;
    context.workers->run(tasks.count, context.threads, [&](std::int64_t task, std::int64_t) {
        const std::byte* const from = call.pointer(Slot::weight) + tasks.begin(task) * row_bytes;
        largest.add(largest_finite(spec.dtype, from, tasks.length(task) * columns));
    });
    return fp8::e4m3_power(largest.value());
}

void round_exponentials(const Spec& spec, float* tile, std::int64_t ld, std::int64_t rows, std::int64_t columns) {
    for (std::int64_t i = 0; i < rows; ++i) {
        float* row = tile + i * ld;
        if (spec.fp8_dlogits == Fp8Dlogits::e5m2) {
            for (std::int64_t j = 0; j < columns; ++j) row[j] = fp8::rounded_to_e5m2(row[j]);
        } else {
            for (std::int64_t j = 0; j < columns; ++j) row[j] = fp8::rounded_to_e4m3(row[j]);
        }
    }
}

}  // namespace flce
