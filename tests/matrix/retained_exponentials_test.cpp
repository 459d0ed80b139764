// GPU kernels that keep exponentials between the passes: whatever part of them, wherever they lie, and however far a row's logits are from
// what they are relative to.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "flce/buffer.hpp"
#include "tests/support/kernel_run.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

using Bytes = std::map<std::string, std::vector<std::byte>>;
using Parameters = std::tuple<WeightLayout, OptionSet, std::int64_t, PlanPath>;  // the third is hidden_size

// depths: in a deep layer stored exponentials are also the summed ones
constexpr std::int64_t kDepths[] = {136, 520};
constexpr std::int64_t kVocab = 2571;  // five blocks of exponentials and a little

class RetainedExponentials : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override {
        FLCE_REQUIRE_TARGET(Target::gpu);
        if (plan_on_path(spec(), path()).empty()) GTEST_SKIP() << "this GPU has no plan of " << to_string(path());
        if (kernel()->plan().strategy != Strategy::retain) GTEST_SKIP() << "these kernels retain nothing: " << kernel()->plan().text();
    }
    static PlanPath path() { return std::get<3>(GetParam()); }
    static Spec spec() {
        const auto& [layout, options, depth, path] = GetParam();
        Spec spec = make_spec(depth, kVocab, DType::bf16, layout, options);
        if (layout == WeightLayout::hidden_major) spec.padded_vocab_size = (kVocab + 15) / 8 * 8;  // rows of whole 16 bytes
        return spec;
    }
    static std::shared_ptr<const Kernel> kernel() { return kernel_on(Target::gpu, spec(), plan_on_path(spec(), path())); }
    /// An entropy's gradient needs the logits again, so that no problem has one but where a test is about it.
    static Problem problem_of(ProblemOptions options) {
        options.entropy_upstream = false;
        return make_problem(kernel()->spec(), options);
    }
    static std::int64_t hidden_size() { return std::get<2>(GetParam()); }
    static Bytes gradients(const KernelRun& run) {
        Bytes all = run.bytes();
        Bytes kept;
        for (const char* name : {"grad_hidden", "grad_weight"}) kept[name] = all.at(name);
        return kept;
    }
    /// `row` of the weight becomes `factor` times hidden state `token`: that token's logit there is factor · |hidden|².
    static void point_at(Problem& p, std::int64_t row, std::int64_t token, float factor) {
        const std::int64_t depth = hidden_size();
        for (std::int64_t k = 0; k < depth; ++k) {
            p.weight[static_cast<std::size_t>(row * depth + k)] =
                rounded(factor * p.hidden[static_cast<std::size_t>(token * depth + k)], DType::bf16);
        }
    }
};

TEST_P(RetainedExponentials, AnyNumberOfBytes_WithinBounds) {
    const auto k = kernel();
    for (const std::int64_t n : {0, 1, 15, 16, 127, 300, 700}) {
        const Problem problem = problem_of({.num_tokens = n, .seed = 5});
        EXPECT_TRUE(run_and_judge(k, problem)) << n;
        const std::size_t whole = k->retained_bytes(n);
        EXPECT_EQ(whole == 0, n < 16);
        Bytes all;
        for (const std::size_t bytes : {whole, whole + 1000, whole / 2, std::size_t{4096}, std::size_t{16}, std::size_t{1}}) {
            KernelRun run(k, problem);
            run.retain(RetainedPlace::own, bytes);
            run.forward();
            run.backward();
            const Bytes first = gradients(run);
            run.backward();  // it is still there for the second
            EXPECT_EQ(gradients(run) == first, true) << n << " tokens, " << bytes << " bytes";
            EXPECT_EQ(run.violations(), "") << n << " tokens, " << bytes << " bytes";
            if (bytes == whole) all = first;
            if (bytes > whole) {
                EXPECT_EQ(first == all, true) << "more than there is a use for";
            }
        }
    }
}

// Without exponentials backward would need the weight for grad_weight: a wrong weight shows that backward really reads exponentials.
TEST_P(RetainedExponentials, Whole_BackwardComputesNoLogit) {
    const auto k = kernel();
    if (k->spec().grad_weight_mode == GradMode::accumulate) GTEST_SKIP() << "another call would add";
    const Problem problem = problem_of({.num_tokens = 300, .seed = 6});
    KernelRun run(k, problem);
    run.retain(RetainedPlace::own, k->retained_bytes(300));
    run.forward();
    run.backward();
    const Bytes expected = gradients(run);
    Buffer zeros(k->device_ref(), run.all_bytes().at("weight").size());
    zeros.fill(std::byte{0});
    BackwardArgs args = run.backward_args({.grad_hidden = false});
    args.weight.data = zeros.data();
    k->backward(args, run.backward_workspace());
    synchronize(k->device_ref());
    EXPECT_EQ(run.all_bytes().at("grad_weight") == expected.at("grad_weight"), true);
}

TEST_P(RetainedExponentials, OneGradientAtATime_SameBitsAsTogether) {
    const auto k = kernel();
    for (const std::int64_t n : {60, 136, 300, 700}) {  // up to hidden_size tokens and beyond
        const Problem problem = problem_of({.num_tokens = n, .seed = 7});
        for (const RetainedPlace place : {RetainedPlace::own, RetainedPlace::grad_weight}) {
            const std::size_t bytes = k->retained_bytes(n, place);
            if (bytes == 0) continue;
            KernelRun together(k, problem);
            together.retain(place, bytes);
            together.forward();
            together.backward();
            const Bytes expected = gradients(together);
            KernelRun apart(k, problem);
            apart.retain(place, bytes);
            apart.forward();
            apart.backward({.grad_weight = false});
            apart.backward({.grad_hidden = false});
            EXPECT_EQ(gradients(apart) == expected, true) << n << " tokens";
            EXPECT_EQ(apart.violations(), "");
        }
    }
}

TEST_P(RetainedExponentials, HundredTimes_SameBits) {
    const auto k = kernel();
    const Problem problem = problem_of({.num_tokens = 300, .seed = 8});
    const Problem other = problem_of({.num_tokens = 700, .seed = 9});
    KernelRun beside(k, other);
    for (const RetainedPlace place : {RetainedPlace::own, RetainedPlace::grad_weight}) {
        const std::size_t bytes = k->retained_bytes(300, place);
        if (bytes == 0) continue;
        KernelRun run(k, problem);
        run.retain(place, bytes);
        Bytes expected;
        for (int i = 0; i < 100; ++i) {
            beside.forward();
            run.forward();
            run.backward();
            if (i == 0) expected = gradients(run);
            ASSERT_EQ(gradients(run) == expected, true) << i;
            run.retain(place, 0);
            run.retain(place, bytes);
        }
    }
}

TEST_P(RetainedExponentials, OneHugeColumnLast_WithinBounds) {
    const auto k = kernel();
    for (const float factor : {2.F, 20.F, 300.F}) {
        Problem problem = problem_of({.num_tokens = 300, .seed = 10});
        point_at(problem, kVocab - 1, 17, factor);
        point_at(problem, kVocab - 2, 290, factor);
        EXPECT_TRUE(run_and_judge(k, problem)) << factor;
    }
}

// The classes at both sides of every border between blocks, of which a part may be retained, and the target among them twice.
TEST_P(RetainedExponentials, TeachersClassesAtTheBordersOfBlocks_WithinBounds) {
    const auto k = kernel();
    const std::int64_t top_k = k->spec().teacher_top_k;
    if (top_k == 0) GTEST_SKIP() << "there is no teacher";
    constexpr std::int64_t kBorders[] = {0, 511, 512, 1023, 1024, 1535, 1536, 2047, 2048, 2559, 2560, kVocab - 1};
    for (const int bits : {32, 64}) {
        Problem problem = problem_of({.num_tokens = 300, .target_bits = bits, .seed = 17});
        for (std::int64_t i = 0; i < 300; ++i) {
            for (std::int64_t at = 0; at < top_k; ++at) {
                problem.teacher_ids[static_cast<std::size_t>(i * top_k + at)] = kBorders[(i + 5 * at) % std::ssize(kBorders)];
            }
            const std::int64_t target = problem.target[static_cast<std::size_t>(i)];
            if (i % 3 != 0 || target < 0 || top_k < 3) continue;
            problem.teacher_ids[static_cast<std::size_t>(i * top_k)] = problem.teacher_ids[static_cast<std::size_t>(i * top_k + 2)] =
                target;
        }
        EXPECT_TRUE(run_and_judge(k, problem)) << bits;
    }
}

// The factor of other classes' gradients vanishes then, or nearly; gradients of the named classes do not. In a few rows a logit far above
// all others makes the quotients as large as they get.
TEST_P(RetainedExponentials, TeachersProbabilitiesThatComeToNothing_WithinBounds) {
    const auto k = kernel();
    const std::int64_t top_k = k->spec().teacher_top_k;
    if (top_k < 4) GTEST_SKIP() << "there is no teacher, or one of few classes";
    for (const float rest : {0.F, 0x1p-30F, -0.5F}) {
        for (const float above : {0.F, 27.F, 45.F}) {
            Problem problem = problem_of({.num_tokens = 300, .ignored = Ignored::none, .seed = 18});
            std::ranges::fill(problem.teacher_probs, 0.F);
            for (std::int64_t i = 0; i < 300; ++i) {
                const auto first = static_cast<std::size_t>(i * top_k);
                for (std::int64_t at = 0; at < 3; ++at) {
                    const std::int64_t id = at < 2 ? (7 * i + 511 * at) % kVocab : problem.teacher_ids[first];
                    problem.teacher_ids[first + static_cast<std::size_t>(at)] = id;
                }
                problem.teacher_probs[first] = 0.25F;
                problem.teacher_probs[first + 1] = -0.75F;
                problem.teacher_probs[first + 2] = 0.5F + rest;
            }
            for (const std::int64_t token : {17, 290}) {
                const float squares = 4 * static_cast<float>(hidden_size());  // squared norm of a hidden state, about
                if (above != 0) point_at(problem, kVocab - 1 - token % 2, token, above / squares);
            }
            EXPECT_TRUE(run_and_judge(k, problem)) << rest << " " << above;
        }
    }
}

TEST_P(RetainedExponentials, LogitsAllEqual_WithinBounds) {
    const auto k = kernel();
    const std::int64_t depth = hidden_size();
    // Every token's exponentials are then rounded alike, which the bounds of gradients stored in fp32 do not foresee.
    if (k->spec().grad_weight_dtype == DType::fp32) GTEST_SKIP() << "gradients in fp32";
    Problem problem = problem_of({.num_tokens = 300, .seed = 11});
    // Rows of the weight differ only where hidden states are 0.
    const std::int64_t zeros = depth / 2;
    for (std::int64_t token = 0; token < 300; ++token) std::fill_n(problem.hidden.begin() + token * depth, zeros, 0.F);
    for (std::int64_t row = 1; row < kVocab; ++row) {
        std::copy(problem.weight.begin() + zeros, problem.weight.begin() + depth, problem.weight.begin() + row * depth + zeros);
    }
    EXPECT_TRUE(run_and_judge(k, problem));
}

TEST_P(RetainedExponentials, HugeLogits_WithinBounds) {
    const auto k = kernel();
    for (const Logits logits : {Logits::saturated, Logits::huge}) {
        EXPECT_TRUE(run_and_judge(k, problem_of({.num_tokens = 300, .logits = logits, .seed = 14})));
    }
}

TEST_P(RetainedExponentials, OneTokenCertain_WithinBounds) {
    const auto k = kernel();
    Problem problem = problem_of({.num_tokens = 300, .ignored = Ignored::none, .seed = 12});
    for (const std::int64_t token : {0, 127, 128, 299}) point_at(problem, problem.target[static_cast<std::size_t>(token)], token, 30.F);
    EXPECT_TRUE(run_and_judge(k, problem));
}

TEST_P(RetainedExponentials, IgnoredTokensWithEndlessLogits_ContributeNothing) {
    const auto k = kernel();
    Problem problem = problem_of({.num_tokens = 300, .seed = 13});
    for (std::int64_t token = 0; token < 300; ++token) {
        if (problem.target[static_cast<std::size_t>(token)] != problem.options.ignore_index) continue;
        for (std::int64_t h = 0; h < hidden_size(); ++h)
            problem.hidden[static_cast<std::size_t>(token * hidden_size() + h)] = rounded(3e18F, DType::bf16);
    }
    EXPECT_TRUE(run_and_judge(k, problem));
}

TEST_P(RetainedExponentials, MemoryOfGradWeight_OnlyWhereItWillDo) {
    const auto k = kernel();
    const bool will_do = k->spec().grad_weight_mode == GradMode::write && k->spec().layout == WeightLayout::vocab_major;
    EXPECT_EQ(k->retained_bytes(300, RetainedPlace::grad_weight) != 0, will_do);
    for (const std::int64_t few : {0, 1, 15}) {
        EXPECT_EQ(k->retained_bytes(few, RetainedPlace::grad_weight), 0U);
        EXPECT_EQ(k->retained_bytes(few), 0U);
    }
    EXPECT_GE(k->retained_bytes(300), static_cast<std::size_t>(2 * 300 * kVocab));
    EXPECT_LE(k->retained_bytes(300), static_cast<std::size_t>(2 * 300 * (kVocab + 512) + 16 * 300 + 4096));
}

// Exponentials are no use to it: whatever is retained, the bits are those of nothing retained.
TEST_P(RetainedExponentials, EntropysGradient_ComputesLogitsAgain) {
    const auto k = kernel();
    if (!k->spec().outputs.entropy) GTEST_SKIP() << "no entropy among the outputs";
    const Problem problem = make_problem(k->spec(), {.num_tokens = 300, .seed = 16});
    EXPECT_TRUE(run_and_judge(k, problem));
    KernelRun again(k, problem);
    again.forward();
    again.backward();
    for (const RetainedPlace place : {RetainedPlace::own, RetainedPlace::grad_weight}) {
        const std::size_t bytes = k->retained_bytes(300, place);
        if (bytes == 0) continue;
        KernelRun run(k, problem);
        run.retain(place, bytes);
        run.forward();
        run.backward();
        EXPECT_EQ(gradients(run) == gradients(again), true);
        EXPECT_EQ(run.violations(), "");
    }
}

// Where there is memory for all of them, grad_weight's tiles may be such as its own memory cannot be lent with.
TEST_P(RetainedExponentials, TilesThatLendNothing_WithinBounds) {
    if (path() != PlanPath::cuda_sm90a) GTEST_SKIP() << "every tile of this path divides a block of exponentials";
    Plan plan = kernel()->plan();
    plan.cuda.grad_weight = {.block_m = 192, .block_n = 128, .block_k = 64, .stages = 4, .schedule = TileSchedule::by_turns};
    plan.vocab_chunk = (plan.vocab_chunk + 767) / 768 * 768;  // a multiple of the rows of tiles of 64 to 256 rows of the vocabulary, and of
                                                              // these tiles' 192
    const auto k = kernel_on(Target::gpu, kernel()->spec(), plan.text());
    EXPECT_EQ(k->retained_bytes(300, RetainedPlace::grad_weight), 0U);
    for (const std::int64_t n : {3, 300, 700}) EXPECT_TRUE(run_and_judge(k, problem_of({.num_tokens = n, .seed = 15}))) << n;
}

// Tiles of exponentials' operands in every shape that the path has: blocks of exponentials are a whole number of any of them.
TEST_P(RetainedExponentials, EveryTileOfThePath_WithinBounds) {
    if (path() != PlanPath::cuda_sm80 || std::string_view(std::get<1>(GetParam()).name) != "plain") GTEST_SKIP() << "for plain layers";
    int tried = 0;
    for (const Plan& plan : candidate_plans(spec(), device_of(Target::gpu))) {
        if (plan.path != path() || plan.strategy != Strategy::retain || plan.cuda.raster != 8) continue;
        ++tried;
        const auto k = kernel_on(Target::gpu, spec(), plan.text());
        EXPECT_TRUE(run_and_judge(k, problem_of({.num_tokens = 300, .seed = 19}))) << plan.text();
    }
    EXPECT_GT(tried, 30);
}

std::vector<OptionSet> options() {
    std::vector<OptionSet> sets;
    for (const OptionSet& set : all_options()) {
        for (const char* name :
             {"plain", "bias", "logit_scale", "softcap", "label_smoothing", "z_loss", "class_weight", "lse", "entropy", "temperature",
              "token_weight", "dft", "top1", "log_sum_sq_probs", "padded", "grad_fp32", "tied", "teacher"}) {
            if (std::string_view(set.name) == name) sets.push_back(set);
        }
    }
    sets.push_back({"smoothed_classes", [](Spec& s) {
                        s.bias = s.class_weight = true;
                        s.label_smoothing = 0.2;
                        s.grad_weight_mode = GradMode::accumulate;
                    }});
    sets.push_back({"all_but_smoothing", [](Spec& s) {
                        apply_everything(s);
                        s.label_smoothing = 0;
                    }});
    sets.push_back({"all_but_softcap", [](Spec& s) {
                        apply_everything(s);
                        s.softcap = 0;
                    }});
    sets.push_back({"teacher_all_but_smoothing", [](Spec& s) {
                        apply_everything_with_teacher(s);
                        s.label_smoothing = 0;
                    }});
    sets.push_back({"teacher_all_but_softcap", [](Spec& s) {
                        apply_everything_with_teacher(s);
                        s.softcap = 0;
                    }});
    sets.push_back({"teacher_of_256_added_to", [](Spec& s) {
                        s.teacher_top_k = 256;
                        s.bias = true;
                        s.grad_weight_mode = GradMode::accumulate;
                    }});
    return sets;
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    return std::string(to_string(std::get<0>(info.param))) + "_" + std::get<1>(info.param).name + "_" +
           std::to_string(std::get<2>(info.param)) + "_" + std::string(to_string(std::get<3>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(Gpu, RetainedExponentials,
                         testing::Combine(testing::ValuesIn(kLayouts), testing::ValuesIn(options()), testing::ValuesIn(kDepths),
                                          testing::Values(PlanPath::cuda_sm90a, PlanPath::cuda_sm80)),
                         name_of);

}  // namespace
}  // namespace flce::test
