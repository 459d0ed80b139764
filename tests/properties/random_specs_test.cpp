// Random Specs, small, with fixed seeds: text there and back, a kernel, and every output within bounds.
#include <gtest/gtest.h>

#include "generator/planner.hpp"
#include "tests/support/kernel_run.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/random.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

// One draw after the other.
class Draw {
public:
    explicit Draw(std::uint64_t seed) : stream_{seed} {}
    bool coin(double probability = 0.5) { return stream_.uniform(next_++) < probability; }
    std::int64_t below(std::int64_t count) { return stream_.below(next_++, count); }
    double uniform(double low, double high) { return low + (high - low) * stream_.uniform(next_++); }

private:
    Stream stream_;
    std::uint64_t next_ = 0;
};

Spec random_spec(Draw& draw) {
    Spec s;
    s.hidden_size = 8 * (1 + draw.below(20));
    s.vocab_size = 2 + (draw.coin(0.3) ? draw.below(8) : draw.below(300));
    if (draw.coin(0.4)) s.padded_vocab_size = s.vocab_size + draw.below(70);
    s.dtype = kDtypes[draw.below(3)];
    s.grad_weight_dtype = draw.coin() ? s.dtype : DType::fp32;
    if (s.dtype != DType::fp32 && draw.coin()) s.weight_dtype = DType::fp32;
    s.grad_weight_mode = draw.coin(0.3) ? GradMode::accumulate : GradMode::write;
    s.layout = kLayouts[draw.below(2)];
    s.tied = s.layout == WeightLayout::vocab_major && draw.coin(0.2);
    s.bias = draw.coin();
    s.class_weight = draw.coin(0.4);
    if (draw.coin()) s.logit_scale = draw.uniform(-1.5, 1.5);
    if (draw.coin(0.4)) s.softcap = draw.uniform(1, 40);
    if (draw.coin(0.4)) s.label_smoothing = draw.coin(0.1) ? 1.0 : draw.uniform(0, 0.4);
    if (draw.coin(0.4)) s.z_loss = draw.uniform(0, 0.02);
    s.temperature = draw.coin(0.3);
    s.token_weight = draw.coin(0.3);
    s.outputs = {draw.coin(0.85), draw.coin(0.4), draw.coin(0.4), draw.coin(0.4), draw.coin(0.3), draw.coin(0.3)};
    if (s.outputs == Outputs{.loss = false}) s.outputs.loss = true;
    s.dft = s.outputs.logprob && draw.coin(0.4);
    if (s.outputs.loss && draw.coin(0.3)) {
        s.teacher_top_k = 1 + static_cast<int>(draw.below(draw.coin(0.2) ? 256 : 12));
        s.hard_weight = draw.coin() ? 0 : draw.uniform(0, 1);
        s.class_weight = s.dft = false;
    }
    return s.normalized();
}

ProblemOptions random_options(Draw& draw, bool weighted, std::uint64_t seed) {
    ProblemOptions o;
    o.num_tokens = draw.coin(0.1) ? draw.below(3) : 1 + draw.below(260);
    o.ignored = static_cast<Ignored>(draw.below(3) == 0 ? 0 : draw.coin(0.1) ? 2 : 1);
    o.logits = draw.coin(0.1) ? Logits::saturated : Logits::moderate;
    o.target_bits = draw.coin() ? 64 : 32;
    o.ignore_index = draw.coin(0.2) ? draw.below(4) : -100;
    o.reduction = static_cast<Reduction>(draw.below(weighted ? 4 : 3));
    if (o.reduction == Reduction::mean && draw.coin(0.3)) {
        o.num_valid = static_cast<double>(1 + draw.below(5000));
        o.num_valid_type = std::array{ScalarType::fp32, ScalarType::int32, ScalarType::int64}[draw.below(3)];
    }
    o.invalid_labels = draw.coin(0.2);
    o.upstream = draw.coin(0.8);
    o.seed = seed;
    return o;
}

constexpr std::uint64_t kSpecsOfOneTest = 25;
constexpr std::uint64_t kTests = 16;

class RandomSpecs : public testing::TestWithParam<std::tuple<Target, std::uint64_t>> {};

TEST_P(RandomSpecs, CompileAndStayWithinBounds) {
    const auto [target, part] = GetParam();
    FLCE_REQUIRE_TARGET(target);
    for (std::uint64_t i = 0; i < (kSanitized ? 6 : kSpecsOfOneTest); ++i) {
        const std::uint64_t seed = 1000 + part * kSpecsOfOneTest + i;
        Draw draw(seed);
        Spec spec = random_spec(draw);
        spec.batch_invariant = seed % 5 == 0;
        if (!smallest_scratch_bytes(spec, device_of(target))) spec.batch_invariant = false;  // which not every device and dtype has
        const Spec read = parse_spec(spec.text());
        ASSERT_EQ(read == spec, true) << "seed " << seed << ": " << spec.text() << " came back as " << read.text();
        ASSERT_EQ(parse_spec_json(spec.json()) == spec, true) << "seed " << seed << ": " << spec.json();
        const auto kernel = kernel_on(target, read);
        EXPECT_EQ(parse_plan(kernel->plan().text()) == kernel->plan(), true) << kernel->plan().text();
        EXPECT_TRUE(run_and_judge(kernel, make_problem(spec, random_options(draw, spec.token_weight, seed)))) << "seed " << seed;
    }
}

std::string name_of(const testing::TestParamInfo<std::tuple<Target, std::uint64_t>>& info) {
    return "part" + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Cpu, RandomSpecs, testing::Combine(testing::Values(Target::cpu), testing::Range<std::uint64_t>(0, kTests)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, RandomSpecs, testing::Combine(testing::Values(Target::gpu), testing::Range<std::uint64_t>(0, kTests)),
                         name_of);

}  // namespace
}  // namespace flce::test
