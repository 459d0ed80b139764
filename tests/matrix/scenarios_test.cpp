// Cases that users of output layers run into, each as a test: extreme logits, labels of every kind, accumulation, repeated and partial
// backward passes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "tests/support/kernel_run.hpp"
#include "tests/support/level.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

using Parameters = std::tuple<Target, DType, WeightLayout>;

constexpr std::int64_t kHidden = 72;
constexpr std::int64_t kVocab = 517;

class Scenarios : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(target()); }

    static Target target() { return std::get<0>(GetParam()); }
    static DType dtype() { return std::get<1>(GetParam()); }
    static WeightLayout layout() { return std::get<2>(GetParam()); }
    static std::size_t combination() { return 2 * static_cast<std::size_t>(dtype()) + static_cast<std::size_t>(layout()); }
    static OptionSet option(const char* name) {
        for (const OptionSet& set : all_options()) {
            if (std::string_view(set.name) == name) return set;
        }
        throw std::logic_error(name);
    }
    static std::shared_ptr<const Kernel> kernel(const char* options = "plain") {
        return kernel_on(target(), make_spec(kHidden, kVocab, dtype(), layout(), option(options)));
    }
    static void expect_good(const char* options, const ProblemOptions& o) {
        const auto k = kernel(options);
        EXPECT_TRUE(run_and_judge(k, make_problem(k->spec(), o)));
    }
};

TEST_P(Scenarios, SaturatedLogits_WithinBounds) {
    for (const char* options : {"plain", "bias", "label_smoothing", "z_loss", "lse", "logprobs", "entropy"}) {
        expect_good(options, {.num_tokens = 65, .logits = Logits::saturated, .reduction = Reduction::none});
        expect_good(options, {.num_tokens = 65, .logits = Logits::saturated, .reduction = Reduction::mean});
    }
}

TEST_P(Scenarios, SoftcapWithLargeLogits_WithinBounds) {
    expect_good("softcap", {.num_tokens = 65, .logits = Logits::saturated});
    expect_good("everything", {.num_tokens = 65, .logits = Logits::saturated});
    expect_good("everything_teacher", {.num_tokens = 65, .logits = Logits::saturated});
    expect_good("teacher", {.num_tokens = 65, .logits = Logits::saturated, .reduction = Reduction::none});
    expect_good("everything_padded_accumulate", {.num_tokens = 65, .logits = Logits::saturated, .reduction = Reduction::sum});
}

// A deep layer has exponentials that are powers of two from one multiply-add, and here logits for which that fails; the last tile of
// columns has few.
TEST_P(Scenarios, DeepLayerWithHugeLogits_WithinBounds) {
    std::size_t turn = 0;
    for (const char* options : {"plain", "label_smoothing", "entropy"}) {
        if (!has_turn(combination(), 3, turn++)) continue;
        const auto k = kernel_on(target(), make_spec(520, kVocab, dtype(), layout(), option(options)));
        for (const Logits logits : {Logits::moderate, Logits::saturated, Logits::huge}) {
            EXPECT_TRUE(run_and_judge(k, make_problem(k->spec(), {.num_tokens = 300, .logits = logits})));
        }
    }
}

TEST_P(Scenarios, IgnoreIndexIsAClass_ThatClassIsIgnored) {
    for (std::int64_t index : {std::int64_t{0}, kVocab - 1, std::int64_t{13}}) {
        expect_good("plain", {.num_tokens = 129, .ignore_index = index});
        expect_good("everything", {.num_tokens = 129, .target_bits = 32, .ignore_index = index, .reduction = Reduction::sum});
    }
}

TEST_P(Scenarios, IgnoreIndexBeyond32Bits_WithinBounds) {
    // Its lower half is class 5, which must stay a class.
    expect_good("plain", {.num_tokens = 129, .ignore_index = (std::int64_t{1} << 40) + 5});
}

TEST_P(Scenarios, InvalidLabels_FlaggedAndIgnored) {
    for (int bits : {32, 64}) {
        const auto k = kernel("everything");
        const Problem p = make_problem(k->spec(), {.num_tokens = 131, .target_bits = bits, .invalid_labels = true});
        EXPECT_TRUE(run_and_judge(k, p));
        KernelRun run(k, p);
        run.forward();
        EXPECT_EQ(run.invalid_label(), 2U) << "the first of them";
        ForwardArgs args = run.forward_args();
        args.invalid_label = {};
        run.kernel().forward(args, run.forward_workspace());  // nobody has to ask
        synchronize(run.kernel().device_ref());
    }
}

TEST_P(Scenarios, NoTemperature_FlaggedAndIgnored) {
    const auto k = kernel("temperature");
    for (const float none : {0.0F, -1.0F, INFINITY, NAN, 0x0.FFFFFFp-100F, 1e-45F, 0x1.000002p100F, 3e38F}) {
        Problem p = make_problem(k->spec(), {.num_tokens = 131, .ignored = Ignored::none});
        p.temperature[7] = p.temperature[130] = none;
        EXPECT_TRUE(run_and_judge(k, p)) << none;
        KernelRun run(k, p);
        run.forward();
        EXPECT_EQ(run.invalid_label(), 7U) << none;
    }
}

TEST_P(Scenarios, TemperaturesAtTheEndsOfTheirRange_AreNoFault) {
    const auto k = kernel("temperature");
    Problem p = make_problem(k->spec(), {.num_tokens = 131, .ignored = Ignored::none});
    p.temperature[7] = 0x1p-100F;
    p.temperature[130] = 0x1p100F;
    KernelRun run(k, p);
    run.forward();
    EXPECT_EQ(run.invalid_label(), ~std::uint64_t{0});
    for (const double lse : run.outputs(select_all(p)).lse) EXPECT_TRUE(std::isfinite(lse));
}

TEST_P(Scenarios, TeachersIdsOutOfRange_FlaggedAndCountAsNone) {
    const auto k = kernel("everything_teacher");
    const std::int64_t top_k = k->spec().teacher_top_k;
    for (const int bits : {32, 64}) {
        for (const std::int64_t wrong : {kVocab, std::int64_t{-2}, std::int64_t{1} << 30}) {
            Problem p = make_problem(k->spec(), {.num_tokens = 131, .ignored = Ignored::none, .target_bits = bits});
            p.teacher_ids[40 * top_k + 2] = p.teacher_ids[130 * top_k] = wrong;
            p.target[3] = p.options.ignore_index;
            p.teacher_ids[3 * top_k] = wrong;  // a row that does not count is not looked at
            EXPECT_TRUE(run_and_judge(k, p)) << wrong;
            KernelRun run(k, p);
            run.forward();
            EXPECT_EQ(run.invalid_label(), 40U) << wrong;
        }
    }
}

TEST_P(Scenarios, AnyNumberOfATeachersClasses_WithinBounds) {
    std::size_t turn = 0;
    for (const int top_k : {1, 31, 33, 256, 1000}) {
        if (!has_turn(combination(), 3, turn++)) continue;
        for (const double hard_weight : {0.0, 0.5, 1.0}) {
            Spec spec = make_spec(kHidden, kVocab, dtype(), layout(), option("teacher"));
            spec.teacher_top_k = top_k;
            spec.hard_weight = hard_weight;
            const auto k = kernel_on(target(), spec);
            EXPECT_TRUE(run_and_judge(k, make_problem(k->spec(), {.num_tokens = 300})));
        }
    }
}

// Every logit is at its softcap, where it has no slope; a teacher's classes find that out from log-probabilities.
TEST_P(Scenarios, SaturatedLogitsOfATeachersClasses_HaveNoGradient) {
    for (const double softcap : {3.7, 30.0}) {
        for (const bool temperature : {false, true}) {
            Spec spec = make_spec(kHidden, kVocab, dtype(), layout(), option("teacher"));
            spec.softcap = softcap;
            spec.logit_scale = 1.25;
            spec.temperature = temperature;
            spec.bias = true;
            const auto k = kernel_on(target(), spec);
            const Problem p = make_problem(k->spec(), {.num_tokens = 131, .logits = Logits::saturated, .reduction = Reduction::none});
            KernelRun run(k, p);
            run.forward();
            run.backward();
            const KernelOutputs got = run.outputs(select_all(p));
            for (const auto* gradient : {&got.grad_hidden, &got.grad_weight, &got.grad_bias}) {
                EXPECT_EQ(std::ranges::count_if(*gradient, [](double g) { return g != 0; }), 0) << spec.text();
            }
            EXPECT_TRUE(run_and_judge(k, p));
        }
    }
}

TEST_P(Scenarios, TeachersProbabilitiesOfAnyKind_StayInTheirRow) {
    const auto k = kernel("teacher");
    const std::int64_t top_k = k->spec().teacher_top_k;
    Problem p = make_problem(k->spec(), {.num_tokens = 131, .ignored = Ignored::none, .reduction = Reduction::none});
    for (std::int64_t i = 0; i < top_k; ++i) p.teacher_probs[5 * top_k + i] *= -1;
    for (std::int64_t i = 0; i < top_k; ++i) {  // a probability at no class is not read
        if (p.teacher_ids[7 * top_k + i] < 0) p.teacher_probs[7 * top_k + i] = NAN;
    }
    EXPECT_TRUE(run_and_judge(k, p));
    const Selection all = select_all(p);
    KernelRun right(k, p);
    right.forward();
    right.backward();
    const KernelOutputs before = right.outputs(all);
    for (const float odd : {NAN, INFINITY}) {
        p.teacher_ids[9 * top_k] = 1;
        p.teacher_probs[9 * top_k] = odd;
        KernelRun run(k, p);
        run.forward();
        run.backward();
        const KernelOutputs got = run.outputs(all);
        for (std::size_t i = 0; i < got.loss.size(); ++i) {
            if (i == 9) {
                EXPECT_FALSE(std::isfinite(got.loss[i]));
            } else {
                EXPECT_EQ(got.loss[i], before.loss[i]);
            }
        }
        EXPECT_EQ(run.invalid_label(), ~std::uint64_t{0});
        for (std::int64_t d = 0; d < kHidden; ++d) EXPECT_FALSE(std::isfinite(got.grad_hidden[9 * kHidden + d]));
        EXPECT_EQ(run.violations(), "");
    }
}

TEST_P(Scenarios, WeightedMean_DividesByTheWeights) {
    for (const char* options : {"token_weight", "everything"}) {
        expect_good(options, {.num_tokens = 131, .reduction = Reduction::weighted_mean});
        expect_good(options, {.num_tokens = 131, .ignored = Ignored::all, .reduction = Reduction::weighted_mean});
    }
}

TEST_P(Scenarios, EqualLogits_TheFirstClassIsTop1) {
    const auto k = kernel("top1");
    Problem p = make_problem(k->spec(), {.num_tokens = 131, .ignored = Ignored::none});
    // Every row of the weight once more, in the order of a permutation that has neighbours and rows far from each other.
    const std::int64_t d = p.spec.hidden_size;
    const auto half = static_cast<std::int64_t>(p.spec.vocab_size / 2);
    for (std::int64_t j = 0; j < half; ++j) std::copy_n(&p.weight[j * 7 % half * d], d, &p.weight[(half + j) * d]);
    KernelRun run(k, p);
    run.forward();
    const KernelOutputs got = run.outputs(select_all(p));
    for (const double top : got.top1) EXPECT_LT(top, half + p.spec.vocab_size % 2) << "its double lies behind it";
    for (float& h : p.hidden) h = 0;  // every logit is 0
    KernelRun zeros(k, p);
    zeros.forward();
    for (const double top : zeros.outputs(select_all(p)).top1) EXPECT_EQ(top, 0);
}

TEST_P(Scenarios, ValidLabels_FlagUntouched) {
    const auto k = kernel();
    const Problem p = make_problem(k->spec(), {.num_tokens = 131});
    KernelRun run(k, p);
    run.forward();
    EXPECT_EQ(run.invalid_label(), ~std::uint64_t{0});
}

TEST_P(Scenarios, AllIgnored_EverythingIsZero) {
    for (const char* options : {"plain", "everything", "everything_padded_accumulate"}) {
        for (Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
            expect_good(options, {.num_tokens = 130, .ignored = Ignored::all, .reduction = reduction});
        }
        ProblemOptions o{.num_tokens = 130, .ignored = Ignored::all};
        o.num_valid = 0.0;  // count of a microbatch without labels
        expect_good(options, o);
    }
}

TEST_P(Scenarios, NumValidGiven_MeanDividesByIt) {
    for (ScalarType type : {ScalarType::fp32, ScalarType::int32, ScalarType::int64}) {
        for (const char* options : {"plain", "everything"}) {
            ProblemOptions o{.num_tokens = 66};
            o.num_valid = 1000.0;
            o.num_valid_type = type;
            expect_good(options, o);
        }
    }
}

TEST_P(Scenarios, NoUpstreamGradient_MeansOne) {
    for (Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
        expect_good("plain", {.num_tokens = 66, .reduction = reduction, .upstream = false});
        expect_good("everything", {.num_tokens = 66, .reduction = reduction, .upstream = false});
    }
}

TEST_P(Scenarios, UnknownLabels_WithinBounds) {
    expect_good("plain", {.num_tokens = 300, .ignored = Ignored::none, .labels_known = false});
    expect_good("everything", {.num_tokens = 300, .ignored = Ignored::none, .labels_known = false});
}

TEST_P(Scenarios, OneGradientAtATime_SameBitsAsTogether) {
    for (const char* options : {"bias", "everything_teacher", "everything_padded_accumulate"}) {
        const auto k = kernel(options);
        const Problem p = make_problem(k->spec(), {.num_tokens = 131});
        KernelRun run(k, p);
        run.forward();
        run.backward();
        const auto together = run.bytes();
        for (int one = 0; one < 3; ++one) {
            KernelRun alone(k, p);
            alone.forward();
            alone.backward({.grad_hidden = one == 0, .grad_weight = one == 1, .grad_bias = one == 2});
            const auto bytes = alone.bytes();
            for (const auto& [name, content] : bytes) EXPECT_EQ(content == together.at(name), true) << name << " " << k->spec().text();
            EXPECT_EQ(alone.violations(), "");
            EXPECT_EQ(bytes.contains("grad_hidden"), one == 0);
            EXPECT_EQ(bytes.contains("grad_weight"), one == 1);
        }
    }
}

TEST_P(Scenarios, RepeatedCalls_SameBits) {
    const int times = target() == Target::gpu ? 20 : 3;
    for (const char* options : {"plain", "everything", "everything_teacher", "accumulate"}) {
        const auto k = kernel(options);
        const Problem p = make_problem(k->spec(), {.num_tokens = 500});
        KernelRun run(k, p);
        run.forward();
        run.backward();
        const auto first = run.bytes();
        for (int i = 0; i < times; ++i) {
            if (i % 2 == 0) run.forward();
            run.backward();
            EXPECT_EQ(run.bytes() == first, true) << options << ", call " << i;
        }
    }
}

TEST_P(Scenarios, AnotherKernelObject_SameBits) {
    const Problem p = make_problem(make_spec(kHidden, kVocab, dtype(), layout(), option("everything")), {.num_tokens = 131});
    std::map<std::string, std::vector<std::byte>> first;
    for (int i = 0; i < 2; ++i) {
        SessionOptions options;
        options.device = target() == Target::cpu ? "cpu" : "cuda";
        options.disk_cache = false;
        options.threads = 1 + i;  // the number of threads changes no sum
        Session session(options);
        KernelRun run(session.get_kernel(p.spec), p);
        run.forward();
        run.backward();
        if (i == 0) first = run.bytes();
        EXPECT_EQ(run.bytes() == first, true);
    }
}

TEST_P(Scenarios, AccumulatingTwice_AddsTwice) {
    const auto k = kernel("accumulate_fp32");
    const Problem p = make_problem(k->spec(), {.num_tokens = 131});
    const Selection all = select_all(p);
    KernelRun run(k, p);
    run.forward();
    run.backward();
    const KernelOutputs once = run.outputs(all);
    run.backward({}, /*keep=*/true);
    const KernelOutputs twice = run.outputs(all);
    for (std::size_t i = 0; i < once.grad_weight.size(); ++i) {
        const double old = p.old_grad_weight[i];
        const double gradient = once.grad_weight[i] - old;
        ASSERT_NEAR(twice.grad_weight[i], old + 2 * gradient, 4 * kU32 * (std::fabs(old) + 2 * std::fabs(gradient))) << i;
    }
    EXPECT_EQ(run.violations(), "");
}

TEST_P(Scenarios, NoTokens_GradientsAreZeroOrKept) {
    for (const char* options : {"plain", "everything", "everything_teacher", "everything_padded_accumulate"}) {
        for (Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
            expect_good(options, {.num_tokens = 0, .reduction = reduction});
        }
    }
}

TEST_P(Scenarios, NoTokensNullPointers_Accepted) {
    const auto k = kernel();
    const Problem p = make_problem(k->spec(), {.num_tokens = 0, .reduction = Reduction::sum});
    KernelRun run(k, p);
    ForwardArgs forward = run.forward_args();
    BackwardArgs backward = run.backward_args();
    for (TensorView* view :
         {&forward.hidden, &forward.target, &forward.lse, &backward.hidden, &backward.target, &backward.lse, &backward.grad_hidden}) {
        view->data = nullptr;
    }
    run.kernel().forward(forward, run.forward_workspace());
    run.kernel().backward(backward, run.backward_workspace());
    synchronize(run.kernel().device_ref());
    EXPECT_EQ(run.violations(), "");
}

TEST_P(Scenarios, WorkspaceHoldsAnything_SameBits) {
    const auto k = kernel("everything");
    const Problem p = make_problem(k->spec(), {.num_tokens = 131});
    std::map<std::string, std::vector<std::byte>> first;
    for (int value : {0x00, 0xff, 0x3f}) {
        KernelRun run(k, p);
        run.forward();
        run.backward();
        GuardedBuffer scratch(run.kernel().device_ref(), k->workspace_bytes(p.num_tokens()), 0, kGuard);
        scratch.fill(std::byte(value));
        const Workspace workspace{scratch.data(), scratch.bytes()};
        run.kernel().forward(run.forward_args(), workspace);
        scratch.fill(std::byte(value));
        run.kernel().backward(run.backward_args(), workspace);
        synchronize(run.kernel().device_ref());
        EXPECT_EQ(scratch.overrun(), "");
        if (first.empty()) first = run.bytes();
        EXPECT_EQ(run.bytes() == first, true) << value;
    }
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    const auto& [target, dtype, layout] = info.param;
    return std::string(to_string(dtype)) + "_" + std::string(to_string(layout));
}

INSTANTIATE_TEST_SUITE_P(Cpu, Scenarios,
                         testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts)), name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, Scenarios,
                         testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts)), name_of);

}  // namespace
}  // namespace flce::test
