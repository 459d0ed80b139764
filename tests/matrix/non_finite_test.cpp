// Infinities and NaN among the inputs: classes that a bias of −∞ takes out, and torch's results for inputs that are not finite. None of it
// matters in ignored tokens.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>
#include <tuple>

#include "tests/support/kernel_run.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kVocab = 1537;  // whole strips and tiles, and one class more

/// Classes that do not take part.
struct Mask {
    const char* name;
    bool (*holds)(std::int64_t);
};
constexpr Mask kMasks[] = {
    {"last class", [](std::int64_t j) { return j == kVocab - 1; }},       {"last 500", [](std::int64_t j) { return j >= kVocab - 500; }},
    {"whole tiles", [](std::int64_t j) { return j >= 512 && j < 1024; }}, {"first tiles", [](std::int64_t j) { return j < 768; }},
    {"every other class", [](std::int64_t j) { return j % 2 == 0; }},     {"all but one", [](std::int64_t j) { return j != 1100; }},
};

using Parameters = std::tuple<Target, DType, WeightLayout, std::int64_t>;

class NonFinite : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(target()); }
    static Target target() { return std::get<0>(GetParam()); }
    static DType dtype() { return std::get<1>(GetParam()); }

    /// A kernel of a layer with a bias and `options`.
    static std::shared_ptr<const Kernel> kernel(void (*options)(Spec&)) {
        Spec spec = make_spec(std::get<3>(GetParam()), kVocab, dtype(), std::get<2>(GetParam()), {"", [](Spec&) {}});
        options(spec);
        return kernel_on(target(), spec.normalized());
    }
    static void with_bias(Spec& s) { s.bias = true; }
    static void with_outputs(Spec& s) {
        s.bias = true;
        s.class_weight = true;
        s.logit_scale = 0.75;
        s.z_loss = 1e-2;
        s.outputs = {true, true, true, true};
    }
    static void with_smoothing(Spec& s) {
        s.bias = true;
        s.label_smoothing = 0.1;
    }
    static void with_everything(Spec& s) { apply_everything(s); }

    /// Numbers of tokens for which kernels differ.
    static std::vector<std::int64_t> token_counts() {
        return target() == Target::gpu ? std::vector<std::int64_t>{33, 200, 600} : std::vector<std::int64_t>{70};
    }
    /// Classes of `mask` have a bias of `value`; labels are none of them.
    static void apply(const Mask& mask, float value, Problem& p) {
        for (std::int64_t j = 0; j < kVocab; ++j) {
            if (mask.holds(j)) p.bias[static_cast<std::size_t>(j)] = value;
        }
        for (std::int64_t& label : p.target) {
            while (label >= 0 && mask.holds(label)) label = (label + 1) % kVocab;
        }
    }
    static void fill_row(Problem& p, std::int64_t token, float value) {
        const auto d = static_cast<std::size_t>(p.spec.hidden_size);
        std::fill_n(p.hidden.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(token) * d), d, value);
    }
};

TEST_P(NonFinite, MaskedClasses_WithinBounds) {
    for (void (*options)(Spec&) : {with_bias, with_outputs}) {
        const auto k = kernel(options);
        for (const Mask& mask : kMasks) {
            for (const std::int64_t n : token_counts()) {
                Problem p = make_problem(k->spec(), {.num_tokens = n});
                apply(mask, -kInfinity, p);
                EXPECT_TRUE(run_and_judge(k, p)) << mask.name;
            }
        }
    }
}

// Masks are also made of −3.4e38: then logits are sums of that and something.
TEST_P(NonFinite, LowestNumberAsBias_WithinBounds) {
    const auto k = kernel(with_outputs);
    for (const Mask& mask : kMasks) {
        Problem p = make_problem(k->spec(), {.num_tokens = token_counts().back()});
        apply(mask, dtype() == DType::fp16 ? -65504.F : dtype() == DType::bf16 ? -0x1.fep127F : std::numeric_limits<float>::lowest(), p);
        EXPECT_TRUE(run_and_judge(k, p)) << mask.name;
    }
}

TEST_P(NonFinite, MaskedLabel_InfiniteLossOfThatTokenAndFiniteGradients) {
    const auto k = kernel(with_outputs);
    for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
        for (const std::int64_t n : token_counts()) {
            Problem p = make_problem(k->spec(), {.num_tokens = n, .ignored = Ignored::none, .reduction = reduction});
            apply(kMasks[1], -kInfinity, p);
            p.target[7] = kVocab - 2;
            EXPECT_TRUE(run_and_judge(k, p));
            KernelRun run(k, p);
            run.forward();
            EXPECT_EQ(run.token_floats("logprobs")[7], -kInfinity);
            if (reduction == Reduction::none) {
                EXPECT_EQ(run.token_floats("loss")[7], kInfinity);
            }
        }
    }
}

// A class that does not take part has a log-probability of −∞, of which the smoothed loss has a share. Its gradients are finite.
TEST_P(NonFinite, MaskedClassesWithLabelSmoothing_InfiniteLossAndFiniteGradients) {
    const auto k = kernel(with_smoothing);
    Problem p = make_problem(k->spec(), {.num_tokens = token_counts().back(), .reduction = Reduction::sum});
    apply(kMasks[2], -kInfinity, p);
    EXPECT_TRUE(run_and_judge(k, p));
}

// tanh makes finite numbers of them.
TEST_P(NonFinite, MaskedClassesWithSoftcap_WithinBounds) {
    const auto k = kernel(with_everything);
    Problem p = make_problem(k->spec(), {.num_tokens = token_counts().back()});
    apply(kMasks[2], -kInfinity, p);
    EXPECT_TRUE(run_and_judge(k, p));
}

TEST_P(NonFinite, EveryClassMasked_NoLossAndNoGradients) {
    const auto k = kernel(with_outputs);
    Problem p = make_problem(k->spec(), {.num_tokens = token_counts().back(), .reduction = Reduction::none});
    std::fill(p.bias.begin(), p.bias.end(), -kInfinity);
    EXPECT_TRUE(run_and_judge(k, p));  // NaN, and lse −∞
}

// A softmax over a token's own classes, all of them masked: as over a vocabulary that is. Other tokens know nothing of it.
TEST_P(NonFinite, EveryClassOfASupportMasked_NoLossAndNoGradients) {
    const auto k = kernel([](Spec& s) {
        s.class_offset = s.support = true;
        s.teacher_top_k = 3;
        s.outputs = {.loss = true, .lse = true, .entropy = true};
    });
    Problem p = make_problem(k->spec(), {.num_tokens = 33, .ignored = Ignored::none, .reduction = Reduction::none});
    for (std::int64_t& id : p.teacher_ids) id = id >= 0 ? id % 700 : id;
    std::fill(p.class_offset.begin(), p.class_offset.end(), 0.5F);
    for (std::size_t at = 15; at < 18; ++at) {
        p.teacher_ids[at] = 900 + static_cast<std::int64_t>(at);
        p.class_offset[900 + at] = -kInfinity;
    }
    for (std::size_t at = 18; at < 21; ++at) p.teacher_ids[at] = -1;
    EXPECT_TRUE(run_and_judge(k, p));
    KernelRun run(k, p);
    run.forward();
    EXPECT_EQ(run.token_floats("lse")[5], -kInfinity);
    EXPECT_EQ(run.token_floats("lse")[6], 0);
}

// Only that token's outputs are NaN, and sums over tokens.
TEST_P(NonFinite, OneTokensHidden_SpoilsThatToken) {
    for (void (*options)(Spec&) : {+[](Spec&) {}, +[](Spec& s) { with_outputs(s); }}) {
        const auto k = kernel(options);
        for (const float value : {kNan, kInfinity}) {
            for (const std::int64_t n : token_counts()) {
                Problem p = make_problem(k->spec(), {.num_tokens = n, .ignored = Ignored::none, .reduction = Reduction::none});
                fill_row(p, 5, value);
                EXPECT_TRUE(run_and_judge(k, p)) << value;
            }
        }
    }
}

TEST_P(NonFinite, OneClass_SpoilsEverything) {
    const auto k = kernel(with_outputs);
    for (const float value : {kNan, kInfinity}) {
        for (const std::int64_t n : token_counts()) {
            // GPUs make ignored rows of grad_hidden of zeros times the weight, which NaN takes part in.
            const Ignored ignored = target() == Target::gpu ? Ignored::none : Ignored::some;
            Problem p = make_problem(k->spec(), {.num_tokens = n, .ignored = ignored});
            p.bias[900] = value;
            EXPECT_TRUE(run_and_judge(k, p)) << value;
        }
    }
}

// Logits of −∞ without a bias: also where exponentials are retained. A weight of −∞ times no probability is NaN in grad_hidden,
// with torch as well.
TEST_P(NonFinite, ClassesMaskedByTheWeight_LossAndWeightGradientWithinBounds) {
    if (target() == Target::gpu) GTEST_SKIP() << "an infinite weight may be NaN there (docs/numerics.md)";
    const auto k = kernel([](Spec&) {});
    for (const Mask& mask : kMasks) {
        Problem p = make_problem(k->spec(), {.num_tokens = token_counts().back(), .reduction = Reduction::none});
        p.bias.assign(kVocab, 0.F);
        apply(mask, 0.F, p);
        p.bias.clear();
        const std::int64_t d = p.spec.hidden_size;
        for (std::int64_t i = 0; i < p.num_tokens(); ++i) p.hidden[i * d] = 1.F;
        for (std::int64_t j = 0; j < kVocab; ++j) {
            if (mask.holds(j)) p.weight[j * d] = -kInfinity;
        }
        const Selection all = select_all(p);
        const Result truth = oracle(layer_of(p), all, {});
        const Reference yardstick = reference(p, all, {}, summation_of(dtype(), target() == Target::gpu));
        const std::size_t whole = k->retained_bytes(p.num_tokens());
        for (const std::size_t bytes : {std::size_t{0}, whole}) {
            KernelRun run(k, p);
            if (bytes != 0) run.retain(RetainedPlace::own, bytes);
            run.forward();
            run.backward({.grad_hidden = false});
            EXPECT_EQ(failures(judge(p, all, run.outputs(all), truth, yardstick, target() == Target::gpu && bytes != 0)), "")
                << mask.name << ", " << bytes << " bytes retained";
        }
    }
}

// NaN, infinities and what overflows; the bits are those with zeros in their place.
TEST_P(NonFinite, IgnoredTokensHidden_ChangesNoBit) {
    for (void (*options)(Spec&) : {+[](Spec&) {}, +[](Spec& s) { with_everything(s); }}) {
        const auto k = kernel(options);
        for (const std::int64_t n : token_counts()) {
            Problem p = make_problem(k->spec(), {.num_tokens = n});
            p.hidden = hidden_of_valid(layer_of(p));
            KernelRun expected(k, p);
            expected.forward();
            expected.backward();
            const auto bits = expected.bytes();
            for (const float value : {kNan, kInfinity, rounded(3e38F, dtype())}) {
                Problem q = p;
                for (std::int64_t i = 0; i < n; ++i) {
                    if (!layer_of(p).valid(i)) fill_row(q, i, value);
                }
                KernelRun run(k, q);
                run.forward();
                run.backward();
                EXPECT_EQ(run.violations(), "") << value;
                for (const auto& [name, content] : run.bytes()) EXPECT_EQ(content == bits.at(name), true) << name << " with " << value;
            }
        }
    }
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    const auto& [target, dtype, layout, hidden_size] = info.param;
    return fmt::format("{}_{}_{}", to_string(dtype), to_string(layout), hidden_size);
}

// A shallow layer, and one so deep that exponentials are powers of two from one multiply-add.
INSTANTIATE_TEST_SUITE_P(Cpu, NonFinite,
                         testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts),
                                          testing::Values(std::int64_t{72})),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, NonFinite,
                         testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts),
                                          testing::Values(std::int64_t{72}, std::int64_t{520})),
                         name_of);

}  // namespace
}  // namespace flce::test
