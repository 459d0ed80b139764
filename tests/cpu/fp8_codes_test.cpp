// Codes of 8 bits against nearest numbers by search, and the scales that bring operands into their range.
#include "templates/common/fp8_codes.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "runtime/layer/number_formats.hpp"

namespace flce {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Format {
    const char* name;
    int bits;
    int bias;
    float most;
    float (*rounded)(float);
    unsigned char (*code)(float);
};
const Format kFormats[] = {{"e4m3", 3, 7, 448.F, fp8::rounded_to_e4m3, fp8::e4m3_code},
                           {"e5m2", 2, 15, 57344.F, fp8::rounded_to_e5m2, fp8::e5m2_code}};

/// The number of a code without a sign, in the order of codes.
double number_of(const Format& format, int code) {
    const int exponent = code >> format.bits;
    const double mantissa = code & ((1 << format.bits) - 1);
    const double unit = std::ldexp(1.0, 1 - format.bias - format.bits);
    if (exponent == 0) return mantissa * unit;
    return std::ldexp(mantissa + (1 << format.bits), exponent - 1) * unit;
}

/// The nearest code, the even one of two that are equally near, the largest for everything beyond it.
int nearest_code(const Format& format, double size) {
    size = std::min<double>(size, format.most);
    int best = 0;
    for (int code = 1; number_of(format, code) <= format.most; ++code) {
        const double distance = std::abs(number_of(format, code) - size);
        const double best_distance = std::abs(number_of(format, best) - size);
        if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
    }
    return best;
}

TEST(Fp8Codes, Numbers_AreRoundedToTheNearest) {
    std::mt19937_64 random(7);
    for (const Format& format : kFormats) {
        std::vector<float> numbers = {0.F, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min(), 1e30F, kInfinity};
        for (int code = 0; number_of(format, code) <= format.most; ++code) {
            const auto here = static_cast<float>(number_of(format, code));
            const auto between = static_cast<float>((number_of(format, code) + number_of(format, code + 1)) / 2);
            for (const float x : {here, between}) {
                for (const float near : {x, std::nextafter(x, 0.F), std::nextafter(x, kInfinity)}) numbers.push_back(near);
            }
        }
        std::uniform_real_distribution<float> octave(-20.F, 20.F);
        for (int i = 0; i < 2000; ++i) numbers.push_back(std::exp2(octave(random)));
        for (const float x : numbers) {
            const int expected = nearest_code(format, x);
            for (const float sign : {1.F, -1.F}) {
                EXPECT_EQ(format.code(sign * x), expected | (sign < 0 ? 0x80 : 0)) << format.name << " of " << sign * x;
                EXPECT_EQ(format.rounded(sign * x), sign * static_cast<float>(number_of(format, expected))) << format.name;
            }
        }
        EXPECT_EQ(format.code(kNaN) & 0x7f, 0x7f);
        EXPECT_TRUE(std::isnan(format.rounded(kNaN)));
    }
}

TEST(Fp8Codes, E4m3_IsThatOfAQuantisedWeight) {
    for (int bits = 0; bits < 1 << 16; ++bits) {
        const float x = bf16_to_float(static_cast<std::uint16_t>(bits));
        if (std::isnan(x)) continue;
        ASSERT_EQ(fp8::e4m3_code(x), float_to_e4m3(x)) << x;
        ASSERT_EQ(fp8::rounded_to_e4m3(x), e4m3_to_float(float_to_e4m3(x))) << x;
    }
}

TEST(Fp8Codes, Int8_IsRoundedToEvenAndEndsAt127) {
    const std::pair<float, float> cases[] = {{0.5F, 0.F},     {1.5F, 2.F},         {-0.5F, 0.F},        {-2.5F, -2.F},  {126.5F, 126.F},
                                             {126.6F, 127.F}, {127.00001F, 127.F}, {-127.4F, -127.F},   {1e30F, 127.F}, {-1e30F, -127.F},
                                             {0.49999F, 0.F}, {3.4999F, 3.F},      {-kInfinity, -127.F}};
    for (const auto& [x, expected] : cases) EXPECT_EQ(fp8::rounded_to_int8(x), expected) << x;
    EXPECT_TRUE(std::isfinite(fp8::rounded_to_int8(kNaN)));
}

TEST(Fp8Codes, RowScales_BringTheLargestToTheEnd) {
    for (const float most : {fp8::int8_most(), fp8::e4m3_most()}) {
        for (const float largest : {1.F, 3e38F, 0x1p-100F, 0.3F}) {
            const fp8::RowScale s = fp8::row_scale(largest, most);
            EXPECT_NEAR(largest * s.factor / most, 1.F, 2e-7F) << largest;
            EXPECT_NEAR(most * s.scale / largest, 1.F, 2e-7F) << largest;
        }
        for (const float largest : {0.F, 0x1p-101F, std::numeric_limits<float>::denorm_min()}) {
            EXPECT_EQ(fp8::row_scale(largest, most).factor, 0.F);
            EXPECT_EQ(fp8::row_scale(largest, most).scale, 0.F);
        }
        for (const float largest : {kInfinity, kNaN}) EXPECT_TRUE(std::isnan(fp8::row_scale(largest, most).scale));
    }
}

TEST(Fp8Codes, GivenRowScales_AreThoseOfAllRows) {
    for (const float scale : {1.F, 100.F / 448.F, 0x1p-100F, 0x1p100F}) {
        for (const float largest : {1.F, 3e38F, 0x1p-120F}) {
            EXPECT_EQ(fp8::given_row_scale(largest, scale).factor, 1.F / scale) << largest;
            EXPECT_EQ(fp8::given_row_scale(largest, scale).scale, scale) << largest;
        }
        EXPECT_EQ(fp8::given_row_scale(0.F, scale).factor, 0.F) << "a row of zeros, or an ignored token's";
        for (const float largest : {kInfinity, kNaN}) {
            EXPECT_EQ(fp8::given_row_scale(largest, scale).factor, 0.F);
            EXPECT_TRUE(std::isnan(fp8::given_row_scale(largest, scale).scale));
        }
    }
    for (const float beyond : {1e38F * 1e10F, 449.F, 464.F, 1e30F}) {
        EXPECT_EQ(fp8::rounded_to_e4m3(beyond), 448.F);
        EXPECT_EQ(fp8::rounded_to_e4m3(-beyond), -448.F);
        EXPECT_EQ(fp8::rounded_to_int8(beyond), 127.F);
        EXPECT_EQ(fp8::rounded_to_int8(-beyond), -127.F);
    }
}

TEST(Fp8Codes, E4m3Power_IsTheLargestThatFits) {
    std::mt19937_64 random(11);
    std::uniform_real_distribution<float> octave(-110.F, 120.F);
    std::vector<float> numbers = {448.F, std::nextafter(448.F, 1e9F), 1.75F, std::nextafter(1.75F, 2.F), 1.F, 3e38F};
    for (int i = 0; i < 2000; ++i) numbers.push_back(std::exp2(octave(random)));
    for (const float x : numbers) {
        const int power = fp8::e4m3_power(x);
        EXPECT_LE(std::ldexp(static_cast<double>(x), power), 448.0) << x;
        EXPECT_GT(std::ldexp(static_cast<double>(x), power + 1), 448.0) << x;
    }
    EXPECT_EQ(fp8::e4m3_power(1e-38F), 120);
    for (const float x : {0.F, kInfinity, kNaN}) EXPECT_EQ(fp8::e4m3_power(x), 0);
}

// Exponentials of a row add up to what their format has room for, whatever lse is, and the row's factor takes k back.
TEST(Fp8Codes, Exponents_ComeBackInTheRowFactor) {
    for (const float lse : {0.F, 11.93F, -40.F, 1e4F, 88.7F}) {
        for (const bool e4m3 : {false, true}) {
            const float k = fp8::exponent_of_sum(lse, e4m3);
            EXPECT_EQ(k, std::floor(k));
            const double sum = std::exp2(static_cast<double>(fp8::power_of_logit(lse, k)));
            EXPECT_GE(sum, e4m3 ? 127.9 : 16383.0) << lse;
            EXPECT_LT(sum, e4m3 ? 256.1 : 32770.0) << lse;
            EXPECT_NEAR(fp8::row_factor(3.F, k, lse) * sum, 3.0, 1e-6) << lse;
        }
    }
    EXPECT_TRUE(std::isnan(fp8::row_factor(1.F, fp8::exponent_of_sum(kNaN, false), kNaN)));
    EXPECT_EQ(fp8::exponent_of_reference(0.F, false), -4.F);
}

}  // namespace
}  // namespace flce
