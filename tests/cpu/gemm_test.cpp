// Micro-kernels and pack routines against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "flce/device.hpp"
#include "generator/planner.hpp"
#include "tests/cpu/cpu_test_support.hpp"
#include "tests/support/number_formats.hpp"

namespace flce::test {
namespace {

/// Small integers and halves: exact in every format, and so are sums of their products.
float exact_value(std::int64_t i) { return static_cast<float>((i * 7919 + 13) % 17 - 8) * 0.5F; }

class Gemm : public testing::TestWithParam<IsaLevel> {};

TEST_P(Gemm, MicroKernel_EqualsPlainLoops) {
    const IsaLevel& isa = GetParam();
    const auto kernel = emitted<MicroKernel>(
        isa, "micro", [&](llvm::Module& m) { emit_micro_kernel(m, isa.target(), "micro", isa.micro_m, isa.micro_n, false); });
    const int ldc = isa.micro_n + 3;
    for (const int depth : {1, 2, 3, 4, 5, 8, 31, 64}) {
        std::vector<float> a(static_cast<std::size_t>(depth * isa.micro_m));
        std::vector<float> b(static_cast<std::size_t>(depth * isa.micro_n));
        for (std::size_t i = 0; i < a.size(); ++i) a[i] = exact_value(static_cast<std::int64_t>(i));
        for (std::size_t i = 0; i < b.size(); ++i) b[i] = exact_value(static_cast<std::int64_t>(i) + 5);
        for (const bool accumulate : {false, true}) {
            std::vector<float> c(static_cast<std::size_t>(isa.micro_m * ldc), 3.F);
            kernel.call(depth, a.data(), b.data(), c.data(), ldc, accumulate, a.data());
            for (int i = 0; i < isa.micro_m; ++i) {
                for (int j = 0; j < ldc; ++j) {
                    float expected = accumulate || j >= isa.micro_n ? 3.F : 0.F;
                    for (int k = 0; k < depth && j < isa.micro_n; ++k) {
                        expected += a[static_cast<std::size_t>(k * isa.micro_m + i)] * b[static_cast<std::size_t>(k * isa.micro_n + j)];
                    }
                    ASSERT_EQ(c[static_cast<std::size_t>(i * ldc + j)], expected) << depth << " " << i << " " << j;
                }
            }
        }
    }
}

TEST_P(Gemm, Bf16Pairs_MultiplyBothHalves) {
    const IsaLevel& isa = GetParam();
    const auto kernel = emitted<MicroKernel>(
        isa, "micro", [&](llvm::Module& m) { emit_micro_kernel(m, isa.target(), "micro", isa.micro_m, isa.micro_n, true); });
    constexpr int kUnits = 9;
    std::vector<std::uint16_t> a(static_cast<std::size_t>(2 * kUnits * isa.micro_m));
    std::vector<std::uint16_t> b(static_cast<std::size_t>(2 * kUnits * isa.micro_n));
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = to_bf16(exact_value(static_cast<std::int64_t>(i)));
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = to_bf16(exact_value(static_cast<std::int64_t>(i) + 3));
    std::vector<float> c(static_cast<std::size_t>(isa.micro_m * isa.micro_n), 0.F);
    kernel.call(kUnits, a.data(), b.data(), c.data(), isa.micro_n, 0, a.data());
    for (int i = 0; i < isa.micro_m; ++i) {
        for (int j = 0; j < isa.micro_n; ++j) {
            float expected = 0;
            for (int k = 0; k < 2 * kUnits; ++k) {
                expected += from_bf16(a[static_cast<std::size_t>((k / 2 * isa.micro_m + i) * 2 + k % 2)]) *
                            from_bf16(b[static_cast<std::size_t>((k / 2 * isa.micro_n + j) * 2 + k % 2)]);
            }
            ASSERT_EQ(c[static_cast<std::size_t>(i * isa.micro_n + j)], expected) << i << " " << j;
        }
    }
}

/// Bytes that a pack routine has to write: [units, width] of fp32 or of bf16 pairs.
std::vector<std::byte> packed(const std::vector<float>& source, std::int64_t ld, const PackOptions& o, std::int64_t valid,
                              std::int64_t depth) {
    const int per_unit = o.bf16_pairs ? 2 : 1;
    const std::int64_t units = (depth + per_unit - 1) / per_unit;
    std::vector<float> values;
    for (std::int64_t u = 0; u < units; ++u) {
        for (std::int64_t line = 0; line < o.width; ++line) {
            for (int half = 0; half < per_unit; ++half) {
                const std::int64_t k = u * per_unit + half;
                const bool there = line < valid && k < depth;
                values.push_back(there ? source[static_cast<std::size_t>(o.depth_contiguous ? line * ld + k : k * ld + line)] : 0.F);
            }
        }
    }
    return encode(values, o.bf16_pairs ? DType::bf16 : DType::fp32);
}

class Pack : public testing::TestWithParam<IsaLevel> {
protected:
    static void check(const PackOptions& options) {
        const IsaLevel& isa = GetParam();
        const auto pack = emitted<PackPanel>(isa, "pack", [&](llvm::Module& m) { emit_pack(m, isa.target(), "pack", options); });
        for (const std::int64_t depth : {1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 64, 71}) {
            for (const std::int64_t valid : {1, options.width / 2, options.width - 1, options.width}) {
                const std::int64_t ld = options.depth_contiguous ? depth + 3 : options.width + 5;
                // Exactly as many elements as the routine may read: a sanitizer or the guard page of the allocator sees one too many.
                const std::int64_t elements = options.depth_contiguous ? (valid - 1) * ld + depth : (depth - 1) * ld + valid;
                std::vector<float> source(static_cast<std::size_t>(elements));
                for (std::size_t i = 0; i < source.size(); ++i) source[i] = exact_value(static_cast<std::int64_t>(i));
                const auto bytes = encode(source, options.source);
                const auto expected = packed(source, ld, options, valid, depth);
                std::vector<std::byte> panel(expected.size() + 64, std::byte{0x5a});
                pack.call(bytes.data(), ld, panel.data(), valid, depth);
                for (std::size_t i = expected.size(); i < panel.size(); ++i) ASSERT_EQ(panel[i], std::byte{0x5a}) << "wrote past the panel";
                panel.resize(expected.size());
                ASSERT_TRUE(panel == expected) << to_string(options.source) << (options.depth_contiguous ? " along depth" : " across")
                                               << (options.bf16_pairs ? " pairs" : "") << " width " << options.width << " valid " << valid
                                               << " depth " << depth;
            }
        }
    }
};

TEST_P(Pack, EverySourceDirectionAndWidth_EqualsPlainLoops) {
    for (const DType source : {DType::fp32, DType::fp16, DType::bf16}) {
        for (const bool along : {false, true}) {
            for (const int width : {GetParam().micro_m, GetParam().micro_n, 14})
                check({.source = source, .depth_contiguous = along, .width = width});
        }
    }
}

TEST_P(Pack, Bf16Pairs_EqualPlainLoops) {
    for (const DType source : {DType::fp32, DType::bf16}) {
        for (const bool along : {false, true}) {
            for (const int width : {GetParam().micro_m, GetParam().micro_n}) {
                check({.source = source, .depth_contiguous = along, .width = width, .bf16_pairs = true});
            }
        }
    }
}

class Store : public testing::TestWithParam<IsaLevel> {};

TEST_P(Store, EveryDtypeModeAndDirection_EqualsPlainLoops) {
    const IsaLevel& isa = GetParam();
    for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16}) {
        for (const GradMode mode : {GradMode::write, GradMode::accumulate}) {
            for (const bool transposed : {false, true}) {
                const StoreOptions options{dtype, mode, transposed};
                const auto store =
                    emitted<StoreTile>(isa, "store", [&](llvm::Module& m) { emit_store(m, isa.target(), "store", options); });
                for (const std::int64_t rows : {1, 3, 16, 21}) {
                    for (const std::int64_t cols : {1, 8, 16, 37}) {
                        const std::int64_t ld = cols + 2;
                        const std::int64_t ldd = (transposed ? rows : cols) + 1;
                        std::vector<float> x(static_cast<std::size_t>(rows * ld));
                        for (std::size_t i = 0; i < x.size(); ++i) x[i] = exact_value(static_cast<std::int64_t>(i));
                        std::vector<float> before(static_cast<std::size_t>((transposed ? cols : rows) * ldd), 2.5F);
                        auto bytes = encode(before, dtype);
                        store.call(x.data(), ld, bytes.data(), ldd, rows, cols);
                        for (std::int64_t r = 0; r < rows; ++r) {
                            for (std::int64_t c = 0; c < cols; ++c) {
                                float& expected = before[static_cast<std::size_t>(transposed ? c * ldd + r : r * ldd + c)];
                                expected = (mode == GradMode::accumulate ? expected : 0.F) + x[static_cast<std::size_t>(r * ld + c)];
                            }
                        }
                        ASSERT_EQ(decode(bytes.data(), std::ssize(before), dtype), before) << to_string(dtype) << rows << "x" << cols;
                    }
                }
            }
        }
    }
}

TEST(Bf16Dot, EmittedForACpuThatHasIt_CompilesToTheInstruction) {
    const CpuProperties cpu{
        .triple = "x86_64-unknown-linux-gnu", .cpu = "sapphirerapids", .vector_bits = 512, .fma = true, .bf16_dot = true};
    const auto with = compile_host_object(cpu, "micro", [](llvm::Module& m) {
        emit_micro_kernel(m, {.vector_bits = 512, .fma = true, .bf16_dot = true}, "micro", 12, 32, true);
    });
    // EVEX.512.F3.0F38.W0 52 /r: VDPBF16PS zmm, zmm, zmm
    int found = 0;
    for (std::size_t i = 0; i + 5 < with.size(); ++i) {
        found += with[i] == std::byte{0x62} && (with[i + 1] & std::byte{7}) == std::byte{2} &&
                 (with[i + 2] & std::byte{3}) == std::byte{2} && with[i + 4] == std::byte{0x52};
    }
    EXPECT_GE(found, 12 * 2);
}

// Kernels for a CPU of another architecture than this machine's are compiled, to its fused multiplications.
TEST(Neon, CodeForAnArmServer_MultipliesAndAddsAtOnce) {
    const Device device = describe_device("neoverse-v2");
    const Spec spec = parse_spec("D=64,V=500,dtype=fp16,bias,softcap=30,label_smoothing=0.1").normalized();
    const Plan plan = candidate_plans(spec, device).front();
    EXPECT_EQ(plan.cpu.micro_m * plan.cpu.micro_n, 8 * 12) << "24 of 32 registers are sums";
    const auto object = compile_host_object(device.cpu, "neon", [&](llvm::Module& m) { emit_cpu_code(m, spec, device.cpu, plan.cpu); });
    // FMLA, by vector and by element, of four floats.
    int found = 0;
    for (std::size_t i = 0; i + 4 <= object.size(); i += 4) {
        std::uint32_t word = 0;
        std::memcpy(&word, &object[i], 4);
        found += (word & 0xffe0fc00U) == 0x4e20cc00U || (word & 0xffc0f400U) == 0x4f801000U;
    }
    EXPECT_GE(found, 5 * 24) << "the step is unrolled four times, and stands once more for the rest";
}

INSTANTIATE_TEST_SUITE_P(Isa, Gemm, testing::ValuesIn(isa_levels()), isa_name);
INSTANTIATE_TEST_SUITE_P(Isa, Pack, testing::ValuesIn(isa_levels()), isa_name);
INSTANTIATE_TEST_SUITE_P(Isa, Store, testing::ValuesIn(isa_levels()), isa_name);

}  // namespace
}  // namespace flce::test
