// An FP8 head whose classes lie on several shards, against its truth: shards of all kinds, options, and rows of which a shard has little,
// nothing, or more than its first classes tell.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "generator/planner.hpp"
#include "tests/support/level.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/sharded_run.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

using Rows = std::vector<std::int64_t>;

/// Parameters: the target, and what a spec says beside its sizes.
class ShardedFp8 : public testing::TestWithParam<std::tuple<Target, const char*>> {
protected:
    void SetUp() override {
        FLCE_REQUIRE_TARGET(target());
        if (!smallest_scratch_bytes(shard_spec(spec(64, 200), 200), device_of(target()))) {
            GTEST_SKIP() << "no path of this device has " << spec(64, 200).text();
        }
    }
    static Target target() { return std::get<0>(GetParam()); }
    /// Whether a test that takes seconds is for a higher level: quick has one spec.
    static bool is_left_out() { return level() == Level::quick && std::get<1>(GetParam()) != std::string(",fp8"); }
    static Spec spec(std::int64_t hidden_size, std::int64_t vocab_size) {
        return parse_spec("D=" + std::to_string(hidden_size) + ",V=" + std::to_string(vocab_size) + std::get<1>(GetParam()));
    }
    static ProblemOptions options(std::int64_t num_tokens, std::uint64_t seed) {
        const Reduction reduction = spec(64, 200).token_weight ? Reduction::weighted_mean : Reduction::mean;
        return {.num_tokens = num_tokens, .reduction = reduction, .seed = seed};
    }
    /// A kernel for the shard with the most rows; on a GPU, where compiling takes seconds, one for all small layers.
    static std::shared_ptr<const Kernel> kernel(const Spec& whole, const Rows& rows, bool sums_in_fp32 = false) {
        const bool any = target() == Target::gpu && whole.vocab_size == 200;
        const std::int64_t most = any ? whole.vocab_size : *std::ranges::max_element(rows);
        Spec shard = shard_spec(whole, std::min(most, whole.vocab_size), most);
        if (sums_in_fp32) shard.grad_hidden_dtype = DType::fp32;
        return kernel_on(target(), shard.normalized());
    }
    static void expect_right(const Problem& problem, const Rows& rows, const Wanted& wanted = {}) {
        EXPECT_TRUE(run_and_judge_shards(kernel(problem.spec, rows), problem, shards_of(problem.spec.vocab_size, rows), wanted));
    }
};

// Even, uneven, smaller than a tile, with nothing but padding, with nothing at all, and one alone.
TEST_P(ShardedFp8, OfEverySize_WithinBounds) {
    int turn = 0;
    for (const Rows& rows : {Rows{100, 100}, Rows{130, 1, 69}, Rows{50, 50, 50, 80}, Rows{200, 30}, Rows{0, 200}, Rows{200}}) {
        ProblemOptions o = options(std::array{70, 1, 129, 0}[turn % 4], static_cast<std::uint64_t>(500 + turn));
        o.target_bits = turn % 2 == 0 ? 64 : 32;
        o.ignored = turn == 4 ? Ignored::all : Ignored::some;
        ++turn;
        expect_right(make_problem(spec(64, 200), o), rows);
    }
}

TEST_P(ShardedFp8, OneGradientAlone_WithinBounds) {
    const Problem problem = make_problem(spec(64, 200), options(66, 510));
    expect_right(problem, {90, 110}, {.grad_hidden = true, .grad_weight = false, .grad_bias = false});
    expect_right(problem, {90, 110}, {.grad_hidden = false, .grad_weight = true, .grad_bias = true});
}

TEST_P(ShardedFp8, GradHiddenInFp32_WithinBounds) {
    const Spec whole = spec(64, 200);
    const Rows rows{90, 110, 0};
    EXPECT_TRUE(run_and_judge_shards(kernel(whole, rows, true), make_problem(whole, options(140, 511)), shards_of(200, rows)));
}

// More than one stretch and chunk, of which the smaller shard has fewer.
TEST_P(ShardedFp8, OfManyClasses_WithinBounds) {
    if (is_left_out()) GTEST_SKIP() << "from level full on";
    expect_right(make_problem(spec(40, 2571), options(140, 512)), {1701, 870});
}

// Columns of a hidden_major weight: as many on every shard, of which the last one has fewer classes.
TEST_P(ShardedFp8, OfAHiddenMajorWeight_WithinBounds) {
    Spec whole = spec(64, 200);
    whole.layout = WeightLayout::hidden_major;
    whole.tied = false;
    whole = whole.normalized();
    for (const Rows& rows : {Rows{104, 104}, Rows{72, 72, 72, 72}}) {
        const Problem problem = make_problem(whole, options(140, 516));
        const auto of_shards = kernel_on(target(), shard_spec(whole, rows.front(), rows.front()));
        EXPECT_TRUE(run_and_judge_shards(of_shards, problem, shards_of(200, rows)));
    }
}

TEST_P(ShardedFp8, LabelsAtFault_AreOneFaultOnEveryShard) {
    const Rows rows{90, 110};
    ProblemOptions o = options(60, 513);
    o.invalid_labels = true;
    const Problem problem = make_problem(spec(64, 200), o);
    expect_right(problem, rows);
    ShardedRun run(kernel(problem.spec, rows), problem, shards_of(200, rows));
    run.forward();
    const auto layer = layer_of(problem);
    std::int64_t first = 0;
    while (layer.valid(first) || problem.target[static_cast<std::size_t>(first)] == o.ignore_index) ++first;
    for (std::size_t shard = 0; shard < run.size(); ++shard) EXPECT_EQ(run.run(shard).invalid_label(), first);
}

TEST_P(ShardedFp8, RunTwice_SameBits) {
    const Rows rows{60, 80, 60};
    const Problem problem = make_problem(spec(64, 200), options(150, 514));
    const auto of_shards = kernel(problem.spec, rows);
    ShardedRun first(of_shards, problem, shards_of(200, rows));
    ShardedRun second(of_shards, problem, shards_of(200, rows));
    for (ShardedRun* run : {&first, &second}) {
        run->retain(RetainedPlace::own);
        run->forward();
        run->backward();
    }
    for (std::size_t shard = 0; shard < first.size(); ++shard) EXPECT_EQ(first.run(shard).bytes(), second.run(shard).bytes());
}

std::string name_of(const testing::TestParamInfo<std::tuple<Target, const char*>>& info) {
    std::string name;
    for (const char c : std::string(std::get<1>(info.param))) {
        if (std::isalnum(c) != 0 || c == '_') name += c;
    }
    return name;
}

constexpr const char* kSpecs[] = {",fp8",
                                  ",fp8=e4m3",
                                  ",fp8,fp8_dlogits=e4m3",
                                  ",fp8,bias,class_weight,temperature,z_loss=0.01,logit_scale=0.75,token_weight",
                                  ",fp8,softcap=5,outputs=loss+lse",
                                  ",fp8,class_offset,bias,outputs=loss+logprobs,dft",
                                  ",fp8,tied",
                                  ",fp8,bias,grad_weight_dtype=fp32,grad_weight_mode=accumulate",
                                  ",fp8,label_smoothing=0.1",
                                  ",fp8,label_smoothing=0.2,bias,class_weight,temperature,logit_scale=-0.5"};
constexpr const char* kOfTheCpu[] = {",fp8,dtype=fp32", ",fp8=e4m3,dtype=fp16,outputs=loss+top1+log_sum_sq_probs",
                                     ",fp8,softcap=5,class_offset,bias,offset_gradient"};
INSTANTIATE_TEST_SUITE_P(Cpu, ShardedFp8, testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kSpecs)), name_of);
INSTANTIATE_TEST_SUITE_P(CpuAlone, ShardedFp8, testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kOfTheCpu)), name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, ShardedFp8, testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kSpecs)), name_of);

/// Rows whose logits on a shard are far from those on others, by offsets of classes.
class FarShardsOfFp8 : public ShardedFp8 {
protected:
    // The first shard has more classes than tell a row's power on a GPU.
    static std::int64_t classes() { return target() == Target::gpu ? 2571 : 300; }
    static std::int64_t first() { return target() == Target::gpu ? 1701 : 200; }
    static std::int64_t telling() { return target() == Target::gpu ? 1600 : 150; }
    static Problem problem(std::uint64_t seed) {
        Problem p = make_problem(spec(40, classes()), options(70, seed));
        p.class_offset.assign(static_cast<std::size_t>(classes()), 0.F);
        return p;
    }
    static void judge(const Problem& p) { expect_right(p, {first(), classes() - first()}); }
    /// Classes [begin, end) have this offset.
    static void offset(Problem& p, std::int64_t begin, std::int64_t end, float offset) {
        for (std::int64_t j = begin; j < end; ++j) p.class_offset[static_cast<std::size_t>(j)] = offset;
    }
    /// Labels among [begin, end) become others, behind them.
    static void move_labels(Problem& p, std::int64_t begin, std::int64_t end) {
        for (std::int64_t& label : p.target) {
            if (label >= begin && label < end) label = end + (label - begin) % (classes() - end);
        }
    }
};

TEST_P(FarShardsOfFp8, AShardThatHasNextToNothing_WithinBounds) {
    for (const float nats : {-12.F, -40.F, -100.F, -2000.F}) {
        Problem p = problem(520);
        offset(p, first(), classes(), nats);
        judge(p);
        p = problem(521);
        offset(p, 0, first(), nats);
        judge(p);
    }
}

TEST_P(FarShardsOfFp8, LogitsFarAboveAShardsFirst_WithinBounds) {
    for (const float nats : {9.F, 30.F, 200.F}) {
        Problem p = problem(522);
        offset(p, telling(), telling() + 40, nats);
        judge(p);
    }
}

TEST_P(FarShardsOfFp8, ClassesThatAreRuledOut_HaveNoPart) {
    constexpr float kRuledOut = -std::numeric_limits<float>::infinity();
    for (const std::int64_t end : {telling(), first()}) {  // classes that tell a row's power, or a whole shard's
        for (const float nats : {0.F, -500.F}) {
            Problem p = problem(523);
            offset(p, 0, classes(), nats);
            move_labels(p, 0, end);
            offset(p, 0, end, kRuledOut);
            judge(p);
        }
    }
}

constexpr const char* kFar[] = {",fp8,class_offset", ",fp8=e4m3,class_offset,bias", ",fp8,class_offset,fp8_dlogits=e4m3"};
INSTANTIATE_TEST_SUITE_P(Cpu, FarShardsOfFp8, testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kFar)), name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, FarShardsOfFp8, testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kFar)), name_of);

}  // namespace
}  // namespace flce::test
