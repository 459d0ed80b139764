// Launches of a CUDA program, read from its launch programs: every token and every column exactly once, only wanted outputs.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "flce/error.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/common/transform_source.hpp"
#include "generator/cuda/sm90/path.hpp"
#include "generator/cuda_program.hpp"
#include "generator/logit_transforms.hpp"
#include "templates/common/output_params.cuh"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"
#include "tests/support/interpreter.hpp"

namespace flce {
namespace {

using test::interpret;
using test::InterpretedLaunch;
using test::InterpretedMap;
using test::Launched;
using test::Recorded;
using test::run;

// Made-up addresses, far apart.
constexpr std::int64_t kStep = std::int64_t{1} << 44;
constexpr std::int64_t address(Slot slot) { return (static_cast<std::int64_t>(slot) + 1) * kStep; }

CallSlots call(std::int64_t num_tokens) {
    CallSlots slots{};
    const auto set = [&](Slot slot, std::int64_t value) { slots[static_cast<std::size_t>(slot)] = value; };
    for (const Slot slot : {Slot::hidden, Slot::weight, Slot::bias, Slot::target, Slot::loss, Slot::lse, Slot::grad_hidden,
                            Slot::grad_weight, Slot::grad_bias, Slot::workspace}) {
        set(slot, address(slot));
    }
    set(Slot::num_tokens, num_tokens);
    set(Slot::target_bits, 64);
    set(Slot::reduction, static_cast<std::int64_t>(ReductionCode::mean));
    return slots;
}

CudaProgram program_of(const char* spec_text, std::int64_t scratch = kDefaultScratchBytes) {
    const Spec spec = parse_spec(spec_text);
    const Device device = describe_device("h100");
    return generate_cuda(spec, device, choose_plan(spec, device, {.scratch_bytes = scratch}));
}

std::int64_t as_address(const void* pointer) { return reinterpret_cast<std::int64_t>(pointer); }

class BackwardCover : public testing::TestWithParam<std::int64_t> {};

TEST_P(BackwardCover, AnyTokens_EveryLogitIsComputedOnce) {
    constexpr std::int64_t kHidden = 2048;
    constexpr std::int64_t kVocab = 50257;
    const std::int64_t n = GetParam();
    const CudaProgram program = program_of("D=2048,V=50257,bias");
    const Launched backward = run(program, program.backward, call(n));
    std::map<std::int64_t, std::int64_t> rows_at_column;  // first column -> rows seen
    std::map<std::int64_t, std::int64_t> width;
    std::map<std::int64_t, std::int64_t> columns_of_gradient;
    for (const Recorded& r : backward.launches) {
        if (r.kernel == "flce_dlogits") {
            const auto p = r.params<DlogitsParams>();
            EXPECT_EQ(as_address(p.hidden), address(Slot::hidden) + rows_at_column[p.first_column] * kHidden * 2);
            EXPECT_EQ(as_address(p.weight), address(Slot::weight) + p.first_column * kHidden * 2);
            EXPECT_LE(p.columns, p.ld);
            rows_at_column[p.first_column] += p.rows;
            width[p.first_column] = p.columns;
        }
        if (r.kernel == "flce_backward_chunks") {  // every row of many chunks
            const auto p = r.params<BackwardChunksSm90Params>();
            rows_at_column[p.first_column] += p.rows;
            width[p.first_column] = columns_of_gradient[p.first_column] = p.columns;
        }
        if (r.kernel == "flce_grad_weight") {
            const auto p = r.params<GradWeightParams>();
            const std::int64_t column = (as_address(p.grad_weight) - address(Slot::grad_weight)) / (kHidden * 2);
            if (p.last != 0) columns_of_gradient[column] += p.columns;
            EXPECT_EQ(p.accumulator == nullptr, p.rows == n);
        }
    }
    std::int64_t next = 0;
    for (const auto& [column, rows] : rows_at_column) {
        EXPECT_EQ(column, next);
        EXPECT_EQ(rows, n);
        EXPECT_EQ(columns_of_gradient[column], width[column]);
        next += width[column];
    }
    EXPECT_EQ(next, kVocab);
}

INSTANTIATE_TEST_SUITE_P(Tokens, BackwardCover, testing::Values(1, 127, 4096, 16384, 40000, 300000));

TEST(ForwardProgram, ManyTokens_EveryTokenIsReducedOnceInLittleWorkspace) {
    const CudaProgram program = program_of("D=64,V=50257,outputs=loss+entropy,label_smoothing=0.1");
    const std::int64_t n = 1'000'001;
    const CallSlots slots = call(n);
    const Launched forward = run(program, program.forward, slots);
    std::int64_t rows = 0;
    for (const Recorded& r : forward.launches) {
        if (r.kernel != "flce_forward") continue;
        const auto p = r.params<ForwardSm90Params>();
        EXPECT_EQ(p.list.first, rows);
        EXPECT_EQ(as_address(p.hidden), address(Slot::hidden));
        EXPECT_EQ(as_address(p.targets.target), address(Slot::target));
        rows += p.rows;
    }
    EXPECT_EQ(rows, n);
    EXPECT_LT(evaluate(program.forward_workspace_bytes, slots), (std::int64_t{5} << 18) + 8 * n) << "8 bytes a token are the list";
}

TEST(BackwardProgram, AbsentGradients_AreNotComputed) {
    const CudaProgram program = program_of("D=64,V=1000,bias");
    const auto without = [&](std::vector<Slot> absent) {
        CallSlots slots = call(100);
        for (const Slot slot : absent) slots[static_cast<std::size_t>(slot)] = 0;
        return run(program, program.backward, slots);
    };
    const Launched all = without({});
    EXPECT_EQ(all.count("grad_hidden"), 1);
    EXPECT_EQ(all.count("grad_weight"), 1);
    EXPECT_EQ(all.count("grad_bias"), 1);
    const Launched no_hidden = without({Slot::grad_hidden});
    EXPECT_EQ(no_hidden.count("grad_hidden"), 0);
    EXPECT_EQ(no_hidden.count("grad_weight"), 1);
    const Launched only_hidden = without({Slot::grad_weight, Slot::grad_bias});
    EXPECT_EQ(only_hidden.count("grad_weight"), 0);
    EXPECT_EQ(only_hidden.count("grad_bias"), 0);
    EXPECT_EQ(only_hidden.count("dlogits"), 1);
    EXPECT_EQ(without({Slot::grad_hidden, Slot::grad_weight, Slot::grad_bias}).count("dlogits"), 0);
}

TEST(BackwardProgram, NoTokens_OverwrittenGradientsAreZeroed) {
    const CudaProgram program = program_of("D=64,V=1000,bias");
    const Launched backward = run(program, program.backward, call(0));
    EXPECT_EQ(backward.count("dlogits"), 0);
    EXPECT_EQ(backward.memsets.at(address(Slot::grad_weight)), 64 * 1000 * 2);
    EXPECT_EQ(backward.memsets.at(address(Slot::grad_bias)), 1000 * 2);
    const CudaProgram adding = program_of("D=64,V=1000,bias,grad_weight_mode=accumulate");
    EXPECT_TRUE(run(adding, adding.backward, call(0)).memsets.empty());
}

TEST(BackwardProgram, PaddedVocabulary_PaddingIsZeroedInWriteModeOnly) {
    const CudaProgram written = program_of("D=64,V=1000,padded_vocab_size=1024");
    const Launched backward = run(written, written.backward, call(10));
    EXPECT_EQ(backward.memsets.at(address(Slot::grad_weight) + 1000 * 64 * 2), 24 * 64 * 2);
    const CudaProgram columns = program_of("D=64,V=1000,padded_vocab_size=1024,layout=hidden_major");
    EXPECT_EQ(run(columns, columns.backward, call(10)).count("zero_columns"), 1);
    const CudaProgram added = program_of("D=64,V=1000,padded_vocab_size=1024,grad_weight_mode=accumulate");
    EXPECT_TRUE(run(added, added.backward, call(10)).memsets.empty());
}

TEST(ForwardProgram, ScalarLoss_IsWrittenOnce) {
    const CudaProgram program = program_of("D=64,V=1000");
    const auto run_with = [&](std::int64_t n, ReductionCode reduction) {
        CallSlots slots = call(n);
        slots[static_cast<std::size_t>(Slot::reduction)] = static_cast<std::int64_t>(reduction);
        return run(program, program.forward, slots);
    };
    for (const std::int64_t n : std::initializer_list<std::int64_t>{0, 1, kOutputRows, kOutputRows + 1, kRowThreads + 1, 100000}) {
        for (const ReductionCode reduction : {ReductionCode::none, ReductionCode::sum, ReductionCode::mean}) {
            const Launched forward = run_with(n, reduction);
            int writers = forward.count("reduce_loss");
            for (const Recorded& r : forward.launches) {
                if (r.kernel != "flce_row_outputs") continue;
                const auto p = r.params<RowOutputsParams>();
                EXPECT_EQ(p.loss != nullptr, reduction == ReductionCode::none);
                EXPECT_EQ(p.count.reduction, static_cast<int>(reduction));
                if (p.scalar_loss == nullptr) continue;
                ++writers;
                EXPECT_EQ(as_address(p.scalar_loss), address(Slot::loss));
                EXPECT_EQ(p.loss_partials, nullptr);
                EXPECT_EQ(p.rows, n);
            }
            EXPECT_EQ(writers, reduction == ReductionCode::none ? 0 : 1) << n;
        }
    }
    EXPECT_EQ(run_with(kOutputRows, ReductionCode::mean).launches.size(), 2U);
    EXPECT_EQ(run_with(kRowThreads, ReductionCode::mean).launches.size(), 3U);
    EXPECT_EQ(run_with(kRowThreads + 1, ReductionCode::mean).launches.size(), 4U);  // and prepare, for the list of rows
}

TEST(ForwardProgram, FewTokens_HaveAKernelOfTheirOwn) {
    const CudaProgram program = program_of("D=64,V=200000");
    for (const std::int64_t n : {1, 128, 129, 5000}) {
        const Launched forward = run(program, program.forward, call(n));
        EXPECT_EQ(forward.count("forward_few"), n <= 128 ? 1 : 0) << n;
        EXPECT_EQ(forward.count("forward") > 0, n > 128) << n;
    }
}

TEST(ForwardProgram, MoreTokens_NeedNoSmallerWorkspace) {
    for (const char* spec : {"D=64,V=200000", "D=64,V=200000,outputs=loss+entropy,label_smoothing=0.1", "D=64,V=50"}) {
        const CudaProgram program = program_of(spec);
        std::int64_t before = 0;
        for (std::int64_t n = 1; n <= 600; ++n) {
            const std::int64_t bytes = evaluate(program.forward_workspace_bytes, call(n));
            EXPECT_GE(bytes, before) << spec << ", " << n << " tokens";
            before = bytes;
        }
    }
}

// The copy engine is slow at filling in rows that do not exist, and all blocks' partial sums have a place.
TEST(ForwardProgram, FewTokens_AreCopiedAndReducedAsTheyAre) {
    struct Case {
        const char* spec;
        std::int64_t fields;  ///< fields of a partial sum
    };
    for (const auto& [spec, fields] : {Case{"D=64,V=200000", 2},
                                       {"D=64,V=200000,outputs=loss+entropy,label_smoothing=0.1", 4},
                                       {"D=64,V=200000,outputs=loss+entropy+top1+log_sum_sq_probs,label_smoothing=0.1", 6},
                                       {"D=64,V=50,bias", 2}}) {
        const CudaProgram program = program_of(spec);
        for (const std::int64_t n : {1, 31, 33, 64, 127, 128}) {
            const CallSlots slots = call(n);
            const Launched forward = run(program, program.forward, slots);
            ASSERT_EQ(forward.launches.front().kernel, "flce_forward_few");
            const auto p = forward.launches.front().params<ForwardSm90Params>();
            const std::vector<InterpretedMap>& maps = forward.launches.front().launch.maps;
            const auto hidden = std::ranges::find(maps, as_address(&p.hidden_map) - as_address(&p), &InterpretedMap::offset);
            ASSERT_NE(hidden, maps.end());
            EXPECT_EQ(hidden->box_rows, n);
            // Every block's two, and two that are empty.
            const std::int64_t sums = (forward.launches.front().launch.grid[0] + 1) * 2 * ((n + 31) / 32 * 32);
            EXPECT_LE(as_address(p.partials) + sums * fields * 4,
                      address(Slot::workspace) + evaluate(program.forward_workspace_bytes, slots));
        }
    }
}

// Ignored tokens are left out where every kernel over rows is told the list, and prepare makes it.
TEST(Programs, ManyTokens_AreListed) {
    const CudaProgram program = program_of("D=64,V=1000");
    for (const std::int64_t n : std::initializer_list<std::int64_t>{kRowThreads, kRowThreads + 1, 1 << 18, (1 << 18) + 1, 5 << 20}) {
        const bool listed = n > kRowThreads;
        for (const LaunchProgram* pass : {&program.forward, &program.backward}) {
            const Launched launched = run(program, *pass, call(n));
            int lists = 0;
            std::vector<bool> told;
            for (const Recorded& r : launched.launches) {
                if (r.kernel == "flce_prepare") lists += r.params<PrepareParams>().list != nullptr ? 1 : 0;
                if (r.kernel == "flce_forward") told.push_back(r.params<ForwardSm90Params>().list.rows != nullptr);
                if (r.kernel == "flce_row_outputs") told.push_back(r.params<RowOutputsParams>().list.rows != nullptr);
                if (r.kernel == "flce_dlogits") told.push_back(r.params<DlogitsSm90Params>().list.rows != nullptr);
                if (r.kernel == "flce_grad_hidden") told.push_back(r.params<GradHiddenSm90Params>().list.rows != nullptr);
                if (r.kernel == "flce_grad_weight") told.push_back(r.params<GradWeightSm90Params>().list.rows != nullptr);
            }
            EXPECT_EQ(lists, listed ? 1 : 0) << n;
            EXPECT_GE(told.size(), 2U) << n;
            EXPECT_EQ(std::ranges::count(told, listed), std::ssize(told)) << n;
        }
    }
}

// The whole list lies in the workspace, and dlogits behind it; indices of rows are ints.
TEST(Programs, MillionsOfTokens_TheirListHasAPlace) {
    const CudaProgram program = program_of("D=64,V=1000");
    for (const std::int64_t n : {std::int64_t{INT32_MAX}, std::int64_t{INT32_MAX} + 1}) {
        EXPECT_EQ(evaluate(program.forward_workspace_bytes, call(n)) > 8 * n, n <= INT32_MAX);
    }
    for (const std::int64_t n : {std::int64_t{1} << 20, std::int64_t{5} << 20}) {
        for (const LaunchProgram* pass : {&program.forward, &program.backward}) {
            const CallSlots slots = call(n);
            const Launched launched = run(program, *pass, slots);
            const bool backward = pass == &program.backward;
            const std::int64_t bytes = evaluate(backward ? program.backward_workspace_bytes : program.forward_workspace_bytes, slots);
            for (const Recorded& r : launched.launches) {
                const std::int64_t end = address(Slot::workspace) + bytes;
                if (r.kernel == "flce_prepare") {
                    EXPECT_LE(as_address(r.params<PrepareParams>().list) + n * std::int64_t{sizeof(ListedRow)}, end);
                }
                if (r.kernel != "flce_dlogits") continue;
                const auto p = r.params<DlogitsSm90Params>();
                ASSERT_NE(p.list.rows, nullptr);
                EXPECT_GE(as_address(p.dlogits), as_address(p.list.rows) + n * std::int64_t{sizeof(ListedRow)});
                EXPECT_LE(std::int64_t{p.list.first} + p.rows, n);
            }
        }
    }
}

TEST(ForwardProgram, RoomInTheWorkspace_BringsListedRowsTogether) {
    const CudaProgram program = program_of("D=64,V=1000");
    for (const std::int64_t n : std::initializer_list<std::int64_t>{kRowThreads, kRowThreads + 1, 5000}) {
        CallSlots slots = call(n);
        const std::int64_t least = evaluate(program.forward_workspace_bytes, slots);
        for (const bool room : {false, true}) {
            slots[static_cast<std::size_t>(Slot::workspace_bytes)] = least + (room ? n * 64 * 2 + 256 : 0);
            const bool together = room && n > kRowThreads;
            const Launched forward = run(program, program.forward, slots);
            EXPECT_EQ(forward.count("gather_rows"), together ? 1 : 0) << n;
            for (const Recorded& r : forward.launches) {
                if (r.kernel == "flce_forward") {
                    EXPECT_EQ(r.params<ForwardSm90Params>().compact_rows, together ? n : 0);
                }
                if (r.kernel != "flce_gather_rows") continue;
                const std::int64_t compact = as_address(r.params<GatherRowsParams>().compact);
                EXPECT_GE(compact, address(Slot::workspace) + least);
                EXPECT_LE(compact + n * 64 * 2, address(Slot::workspace) + slots[static_cast<std::size_t>(Slot::workspace_bytes)]);
            }
        }
    }
}

// Where rows are listed and where they are not: what the GEMMs see of ignored tokens' hidden states are zeros.
TEST(BackwardProgram, HiddenOfIgnoredTokens_IsLeftOutOfEveryCall) {
    for (const std::int64_t scratch : {kDefaultScratchBytes, std::int64_t{1} << 20}) {
        const CudaProgram program = program_of("D=64,V=1000", scratch);
        for (const std::int64_t n : std::initializer_list<std::int64_t>{1, kRowThreads, kRowThreads + 1, (1 << 18) + 1}) {
            const Launched backward = run(program, program.backward, call(n));
            EXPECT_EQ(backward.count("gather_rows"), 1) << n;
            for (const Recorded& r : backward.launches) {
                if (r.kernel == "flce_dlogits") break;
                if (r.kernel != "flce_gather_rows") continue;
                const auto p = r.params<GatherRowsParams>();
                EXPECT_EQ(p.rows, n);
                EXPECT_EQ(as_address(p.targets.target), address(Slot::target));
                EXPECT_EQ(p.list.rows != nullptr, scratch == kDefaultScratchBytes && n > kRowThreads);
            }
        }
    }
}

TEST(BackwardProgram, Scalars_AreSetOnceBeforeAnyRow) {
    for (const char* spec : {"D=64,V=1000", "D=64,V=1000,class_weight,label_smoothing=0.1"}) {
        const CudaProgram program = program_of(spec, std::int64_t{1} << 20);
        for (const std::int64_t n : std::initializer_list<std::int64_t>{1, kRowThreads, kRowThreads + 1, 100000}) {
            const Launched backward = run(program, program.backward, call(n));
            int set = 0;
            for (const Recorded& r : backward.launches) {
                if (r.kernel == "flce_prepare") set += r.params<PrepareParams>().want_count != 0 ? 1 : 0;
                if (r.kernel != "flce_row_coefficients") continue;
                const auto p = r.params<RowCoefficientsParams>();
                if (p.prepares != 0) {
                    ++set;
                    EXPECT_EQ(p.want_count, 1);
                    EXPECT_EQ(p.rows, n);
                    EXPECT_LE(n, kRowThreads);
                }
                EXPECT_EQ(set, 1) << spec << ", " << n;
            }
        }
    }
    const CudaProgram program = program_of("D=64,V=1000");
    // Coefficients, hidden states of valid tokens, and the three GEMMs.
    EXPECT_EQ(run(program, program.backward, call(kRowThreads)).launches.size(), 5U);
    EXPECT_EQ(run(program, program.backward, call(kRowThreads + 1)).launches.size(), 7U);  // rows are gathered and scattered
}

std::string source_of(const char* spec) {
    std::string text;
    for (const CudaUnit& unit : program_of(spec).units) text += unit.source;
    return text;
}

TEST(CudaSource, Units_HoldEveryKernelOnceAndGemmsAlone) {
    for (const char* spec : {"D=64,V=1000", "D=64,V=1000,bias,layout=hidden_major,padded_vocab_size=1008"}) {
        const CudaProgram program = program_of(spec);
        std::vector<std::string> names;
        for (const CudaUnit& unit : program.units) {
            for (const KernelEntry& kernel : unit.kernels) {
                names.push_back(kernel.name);
                EXPECT_NE(unit.source.find(" " + kernel.name + "("), std::string::npos);
                const bool small = kernel.dynamic_smem_bytes == 0;
                EXPECT_EQ(small, &unit == program.units.data()) << kernel.name;
                EXPECT_TRUE(small || unit.kernels.size() == 1) << kernel.name;
            }
        }
        std::vector<std::string> expected;
        for (const KernelEntry& kernel : program.kernels) expected.push_back(kernel.name);
        std::sort(names.begin(), names.end());
        std::sort(expected.begin(), expected.end());
        EXPECT_EQ(names, expected);
    }
}

TEST(CudaSource, Kernel_IsFoundByItsRole) {
    const Device device = describe_device("h100");
    const Spec spec = parse_spec("D=64,V=1000").normalized();
    const Plan plan = choose_plan(spec, device);
    const CudaSource source = sm90::source(spec, device, plan);
    std::vector<std::string> named;
    for (std::size_t i = 0; i < kKernelRoleCount; ++i) {
        const auto role = static_cast<KernelRole>(i);
        const std::string symbol = fmt::format("flce_{}", to_string(role));
        if (std::ranges::find(source.kernels, symbol, &KernelEntry::name) == source.kernels.end()) {
            EXPECT_THROW((void)source.kernel(role), InternalError) << symbol;
        } else {
            EXPECT_EQ(source.kernels.at(static_cast<std::size_t>(source.kernel(role))).name, symbol);
            named.push_back(symbol);
        }
    }
    EXPECT_EQ(named.size(), source.kernels.size()) << "every kernel has a role";
}

TEST(CudaSource, OptionValues_DoNotChangeTheSource) {
    const char* a = "D=64,V=1000,softcap=30,logit_scale=0.5,label_smoothing=0.1,z_loss=0.001";
    const char* b = "D=64,V=1000,softcap=50,logit_scale=0.25,label_smoothing=0.2,z_loss=0.1";
    EXPECT_EQ(source_of(a), source_of(b));
    EXPECT_NE(source_of(a), source_of("D=64,V=1000,softcap=30"));
    const CudaProgram program = program_of(b);
    const Launched forward = run(program, program.forward, call(10));
    for (const Recorded& r : forward.launches) {
        if (r.kernel != "flce_forward") continue;
        const auto p = r.params<ForwardParams>();
        EXPECT_FLOAT_EQ(p.transform[0], 0.25F);
        EXPECT_FLOAT_EQ(p.transform[1], 50.F);
        EXPECT_FLOAT_EQ(p.transform[2], 0.02F);
        // The reciprocal's rest, which a float cannot hold together with its beginning.
        EXPECT_NEAR(static_cast<double>(p.transform[2]) + static_cast<double>(p.transform[3]), 1.0 / 50, 1e-16);
    }
}

TEST(TransformParameters, SoftcapTimesItsReciprocal_IsOneInEveryLogit) {
    for (const double softcap : {0.1, 3.0, 26.9, 29.99, 30.0, 50.0, 1e4}) {
        const std::vector<double> p = SoftcapTransform::parameters(parse_spec(fmt::format("D=64,V=1000,softcap={}", softcap)));
        const double cap = static_cast<float>(p[0]);
        EXPECT_NEAR(cap * (static_cast<double>(static_cast<float>(p[1])) + static_cast<double>(static_cast<float>(p[2]))), 1.0, 1e-13)
            << softcap;
        const double infinity = std::numeric_limits<double>::infinity();
        EXPECT_EQ(SoftcapTransform::evaluate<double>(-infinity, p).logit, -softcap);
    }
}

TEST(TransformSource, ScaleAndSoftcap_AreOneStatementEach) {
    EXPECT_EQ(transform_source(parse_spec("D=64,V=1000"), "M", ""), "return {x, 1.0f};\n");
    EXPECT_EQ(transform_source(parse_spec("D=64,V=1000,softcap=30,logit_scale=2"), "M", ""),
              "const float t0 = x * p[0];\n"
              "const float t1 = t0 * p[2];\n"
              "const float t2 = t0 * p[3];\n"
              "const float t3 = t1 + t2;\n"
              "const float t4 = M::tanh(t3);\n"
              "const float t5 = p[1] * t4;\n"
              "const float t6 = t4 * t4;\n"
              "const float t7 = 1.0f - t6;\n"
              "const float t8 = p[0] * t7;\n"
              "return {t5, t8};\n");
}

}  // namespace
}  // namespace flce
