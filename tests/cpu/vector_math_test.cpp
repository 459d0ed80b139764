// exp, tanh and the conversions of 16-bit formats, swept at every instruction set level that this machine has.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "generator/cpu/ir_float.hpp"
#include "tests/cpu/cpu_test_support.hpp"
#include "tests/support/number_formats.hpp"

namespace flce::test {
namespace {

using Arg = FunctionBuilder::Arg;
using Map = void (*)(const void* in, void* out, std::int64_t count);
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class VectorMath : public testing::TestWithParam<IsaLevel> {
protected:
    /// out[i] = function(in[i]), in whole vectors.
    static std::vector<float> map(llvm::Value* (*function)(FunctionBuilder&, llvm::Value*, int), std::vector<float> in) {
        const auto f = emitted<Map>(GetParam(), "map", [&](llvm::Module& module) {
            FunctionBuilder b(module, GetParam().target(), "map", {Arg::pointer, Arg::pointer, Arg::i64});
            const int lanes = GetParam().target().lanes();
            b.loop(b.i64(0), b.arg(2), lanes, [&](llvm::Value* i) {
                llvm::Value* x = b.load_float(b.at(b.arg(0), i, 4), DType::fp32, lanes);
                b.store_float(function(b, x, lanes), b.at(b.arg(1), i, 4), DType::fp32, lanes);
            });
            b.finish();
        });
        const std::size_t size = in.size();
        in.resize((size + 15) / 16 * 16);
        std::vector<float> out(in.size());
        f.call(in.data(), out.data(), static_cast<std::int64_t>(in.size()));
        out.resize(size);
        return out;
    }

    /// Distance in units of the last place of the true value, taken as fp32.
    static double ulps(float got, double truth) {
        const auto nearest = static_cast<float>(truth);
        const double ulp = double(std::nextafter(std::fabs(nearest), kInfinity)) - std::fabs(double(nearest));
        return std::fabs(double(got) - truth) / ulp;
    }

    static std::vector<float> sweep(double from, double to, int count) {
        std::vector<float> values;
        for (int i = 0; i < count; ++i) values.push_back(static_cast<float>(from + (to - from) * i / (count - 1)));
        return values;
    }
};

TEST_P(VectorMath, ExpOverTheNormalRange_WithinOneAndAHalfUlp) {
    auto x = sweep(-87.3, 88.7, 2'000'003);
    const auto near_zero = sweep(-1.0, 1.0, 500'001);
    x.insert(x.end(), near_zero.begin(), near_zero.end());
    const auto y = map(emit_exp, x);
    double worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, ulps(y[i], std::exp(double(x[i]))));
    EXPECT_LE(worst, 1.5);
    RecordProperty("worst_ulps", std::to_string(worst));
}

TEST_P(VectorMath, ExpAtTheEnds_SaturatesAndKeepsNan) {
    const auto y = map(emit_exp, {0.F, -0.F, 88.73F, 1e4F, kInfinity, -104.F, -1e4F, -3e38F, -kInfinity, std::nanf("")});
    EXPECT_EQ(y[0], 1.F);
    EXPECT_EQ(y[1], 1.F);
    for (int i = 2; i <= 4; ++i) EXPECT_EQ(y[static_cast<std::size_t>(i)], kInfinity);
    for (int i = 5; i <= 8; ++i) EXPECT_EQ(y[static_cast<std::size_t>(i)], 0.F);
    EXPECT_TRUE(std::isnan(y[9]));
}

TEST_P(VectorMath, ExpBelowTheNormalRange_IsSmallAndNotNegative) {
    for (float y : map(emit_exp, sweep(-104.5, -87.4, 1001))) {
        EXPECT_GE(y, 0.F);
        EXPECT_LE(y, std::numeric_limits<float>::min());
    }
}

TEST_P(VectorMath, Tanh_WithinTwoUlps) {
    auto x = sweep(-10, 10, 2'000'001);
    const auto near_zero = sweep(-0.7, 0.7, 500'001);
    x.insert(x.end(), near_zero.begin(), near_zero.end());
    for (int e = -120; e < 0; ++e) x.push_back(std::ldexp(1.3F, e));
    const auto y = map(emit_tanh, x);
    double worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, ulps(y[i], std::tanh(double(x[i]))));
    EXPECT_LE(worst, 2.0);
    RecordProperty("worst_ulps", std::to_string(worst));
}

TEST_P(VectorMath, TanhAtTheEnds_SaturatesAndKeepsNan) {
    const auto y = map(emit_tanh, {0.F, 50.F, -50.F, 1e4F, -1e4F, 3e38F, kInfinity, -kInfinity, std::nanf("")});
    const float expected[] = {0.F, 1.F, -1.F, 1.F, -1.F, 1.F, 1.F, -1.F};
    for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(y[i], expected[i]) << i;
    EXPECT_TRUE(std::isnan(y[8]));
}

/// destination[i] = source[i], converted.
auto emitted_copy(const IsaLevel& level, DType from, DType to) {
    return emitted<Map>(level, "copy", [&level, from, to](llvm::Module& module) {
        FunctionBuilder b(module, level.target(), "copy", {Arg::pointer, Arg::pointer, Arg::i64});
        const int lanes = level.target().lanes();
        b.loop(b.i64(0), b.arg(2), lanes, [&](llvm::Value* i) {
            llvm::Value* x = b.load_float(b.at(b.arg(0), i, from == DType::fp32 ? 4 : 2), from, lanes);
            b.store_float(x, b.at(b.arg(1), i, to == DType::fp32 ? 4 : 2), to, lanes);
        });
        b.finish();
    });
}

TEST_P(VectorMath, SixteenBitToFloat_IsExactForEveryPattern) {
    std::vector<std::uint16_t> bits(65536);
    std::iota(bits.begin(), bits.end(), 0);
    std::vector<float> out(bits.size());
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        emitted_copy(GetParam(), dtype, DType::fp32).call(bits.data(), out.data(), 65536);
        for (std::size_t i = 0; i < bits.size(); ++i) {
            const float expected = dtype == DType::bf16 ? from_bf16(bits[i]) : from_fp16(bits[i]);
            if (std::isnan(expected)) {
                EXPECT_TRUE(std::isnan(out[i])) << i;
            } else {
                EXPECT_EQ(std::bit_cast<std::uint32_t>(out[i]), std::bit_cast<std::uint32_t>(expected)) << to_string(dtype) << " " << i;
            }
        }
    }
}

TEST_P(VectorMath, FloatToSixteenBit_RoundsToNearestEven) {
    std::vector<float> in;
    for (std::uint64_t bits = 0; bits < (1ULL << 32); bits += 9973) in.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    for (std::uint32_t half = 0; half < 65536; half += 7) {  // ties, and numbers next to them
        for (const float value : {from_fp16(static_cast<std::uint16_t>(half)), from_bf16(static_cast<std::uint16_t>(half))}) {
            const auto b = std::bit_cast<std::uint32_t>(value);
            for (const std::uint32_t offset : {0x1000U, 0xfffU, 0x1001U, 0x8000U, 0x7fffU, 0x8001U})
                in.push_back(std::bit_cast<float>(b + offset));
        }
    }
    for (const float value : {65504.F, 65519.F, 65520.F, 1e5F, kInfinity, 5.96e-8F, 2.98e-8F, 2.99e-8F, 6.1e-5F}) {
        in.push_back(value);
        in.push_back(-value);
    }
    in.resize((in.size() + 15) / 16 * 16);
    std::vector<std::uint16_t> out(in.size());
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        emitted_copy(GetParam(), DType::fp32, dtype).call(in.data(), out.data(), static_cast<std::int64_t>(in.size()));
        for (std::size_t i = 0; i < in.size(); ++i) {
            if (std::isnan(in[i])) {
                EXPECT_TRUE(std::isnan(dtype == DType::bf16 ? from_bf16(out[i]) : from_fp16(out[i])));
            } else {
                ASSERT_EQ(out[i], dtype == DType::bf16 ? to_bf16(in[i]) : to_fp16(in[i])) << to_string(dtype) << " " << in[i];
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Isa, VectorMath, testing::ValuesIn(isa_levels()), isa_name);

}  // namespace
}  // namespace flce::test
