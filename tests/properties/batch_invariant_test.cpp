// A token's outputs and its row of grad_hidden have the same bits whatever other tokens a call has.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "tests/support/kernel_run.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/random.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

constexpr std::int64_t kPool = 4096;  // tokens that calls are made of
constexpr std::int64_t kHidden = 72;
constexpr std::int64_t kVocab = 5003;  // several segments of forward and several chunks of backward, none of them whole
constexpr std::int64_t kNobody = -1;   // a place of a call that is ignored

struct Case {
    const char* name;
    void (*apply)(Spec&);
};

constexpr Case kCases[] = {
    {"plain", [](Spec& s) { s.outputs.logprobs = s.outputs.entropy = true; }},
    {"logprobs", [](Spec& s) { s.outputs = {.loss = false, .logprobs = true}; }},
    {"hidden_major_bias",
     [](Spec& s) {
         s.layout = WeightLayout::hidden_major;
         s.padded_vocab_size = kVocab + 5;
         s.bias = true;
     }},
    {"weight_fp32", apply_weight_fp32},
    {"everything", apply_everything},
    {"everything_teacher", apply_everything_with_teacher},
};

using Parameters = std::tuple<Target, DType, Case>;

/// `order`: the pool's token at each place of the call, or kNobody.
Problem picked(const Problem& pool, const std::vector<std::int64_t>& order) {
    Problem p = pool;
    p.options.num_tokens = std::ssize(order);
    const auto pick = [&](auto& values, std::int64_t width) {
        if (values.empty()) return;
        const auto from = values;
        values.resize(order.size() * static_cast<std::size_t>(width));
        for (std::size_t i = 0; i < order.size(); ++i)
            std::copy_n(from.begin() + std::max<std::int64_t>(order[i], 0) * width, width,
                        values.begin() + static_cast<std::ptrdiff_t>(i) * width);
    };
    pick(p.hidden, kHidden);
    for (auto* values : {&p.temperature, &p.token_weight, &p.grad_loss, &p.grad_lse, &p.grad_logprobs, &p.grad_entropy}) pick(*values, 1);
    pick(p.target, 1);
    pick(p.teacher_ids, p.spec.teacher_top_k);
    pick(p.teacher_probs, p.spec.teacher_top_k);
    for (std::size_t i = 0; i < order.size(); ++i) {
        if (order[i] == kNobody) p.target[i] = p.options.ignore_index;
    }
    return p;
}

struct TokenOutputs {
    const char* name;
    std::vector<double> KernelOutputs::* values;
    std::int64_t width;
};

std::vector<TokenOutputs> token_outputs(const Spec& spec) {
    return {{"loss", &KernelOutputs::loss, 1},
            {"z_loss", &KernelOutputs::z_loss, 1},
            {"lse", &KernelOutputs::lse, 1},
            {"logprobs", &KernelOutputs::logprobs, 1},
            {"entropy", &KernelOutputs::entropy, 1},
            {"log_sum_sq_probs", &KernelOutputs::log_sum_sq_probs, 1},
            {"teacher_logprobs", &KernelOutputs::teacher_logprobs, spec.teacher_top_k},
            {"grad_hidden", &KernelOutputs::grad_hidden, kHidden}};
}

class BatchInvariant : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override {
        FLCE_REQUIRE_TARGET(std::get<0>(GetParam()));
        const Device& device = device_of(target());
        if (device.kind == DeviceKind::cuda && device.gpu.compute_capability != 90) GTEST_SKIP() << device.name << " is no Hopper GPU";
        Spec spec{.hidden_size = kHidden, .vocab_size = kVocab, .dtype = std::get<1>(GetParam()), .batch_invariant = true};
        spec.grad_weight_dtype = spec.dtype;
        std::get<2>(GetParam()).apply(spec);
        kernel_ = kernel_on(target(), spec);
        pool_ = make_problem(spec, {.num_tokens = kPool, .reduction = Reduction::none});
        whole_ = outputs_of(pool_);
    }
    static Target target() { return std::get<0>(GetParam()); }

    KernelOutputs outputs_of(const Problem& problem) const {
        KernelRun run(kernel_, problem);
        run.forward();
        run.backward({.grad_weight = false, .grad_bias = false});
        EXPECT_EQ(run.violations(), "");
        Selection all = select_all(problem);
        all.vocab.clear();
        return run.outputs(all);
    }

    void expect_the_same(const std::vector<std::int64_t>& order) const {
        const KernelOutputs got = outputs_of(picked(pool_, order));
        for (const auto& [name, values, width] : token_outputs(pool_.spec)) {
            const std::vector<double>& expected = whole_.*values;
            const std::vector<double>& of_call = got.*values;
            ASSERT_EQ(expected.empty(), of_call.empty()) << name;
            if (expected.empty()) continue;
            for (std::size_t i = 0; i < order.size(); ++i) {
                if (order[i] == kNobody) continue;
                for (std::int64_t k = 0; k < width; ++k) {
                    const double a = expected[static_cast<std::size_t>(order[i] * width + k)];
                    const double b = of_call[i * static_cast<std::size_t>(width) + static_cast<std::size_t>(k)];
                    ASSERT_EQ(std::bit_cast<std::uint64_t>(a), std::bit_cast<std::uint64_t>(b))
                        << name << " of token " << order[i] << " at place " << i << " of " << order.size() << ": " << a << ", " << b;
                }
            }
        }
    }

    std::shared_ptr<const Kernel> kernel_;
    Problem pool_;
    KernelOutputs whole_;
};

std::vector<std::int64_t> shuffled(std::int64_t count, std::uint64_t seed) {
    std::vector<std::int64_t> order(kPool);
    std::iota(order.begin(), order.end(), 0);
    const Stream random{seed};
    std::sort(order.begin(), order.end(), [&](auto a, auto b) { return random.bits(a) < random.bits(b); });
    order.resize(static_cast<std::size_t>(count));
    return order;
}

TEST_P(BatchInvariant, AnyNumberOfTokensAtAnyPlace) {
    for (const std::int64_t n : {1, 2, 7, 16, 63, 64, 128, 129, 192, 255, 256, 257, 300, 512, 513, 1000, 2048, 4095}) {
        expect_the_same(shuffled(n, static_cast<std::uint64_t>(n)));
        if (HasFatalFailure()) return;
    }
}

// Ignored tokens between the others, in whole stretches, and nearly everywhere.
TEST_P(BatchInvariant, WhateverIsIgnored) {
    for (const std::int64_t every : {2, 3, 97}) {
        std::vector<std::int64_t> order = shuffled(1111, 5);
        for (std::size_t i = 0; i < order.size(); ++i) {
            if (static_cast<std::int64_t>(i) % every != 0)
                order[i] = every == 97 || static_cast<std::int64_t>(i) % every == 1 ? kNobody : order[i];
        }
        expect_the_same(order);
        if (HasFatalFailure()) return;
    }
    std::vector<std::int64_t> padded = shuffled(900, 6);
    for (std::size_t i = 200; i < 700; ++i) padded[i] = kNobody;
    expect_the_same(padded);
}

// Less scratch: chunks of backward, and rows of a launch of forward, are others.
TEST_P(BatchInvariant, WhateverMemoryThereIs) {
    Plan plan = parse_plan(kernel_->plan().text());
    plan.scratch_bytes = target() == Target::cpu ? 24 << 20 : 12 << 20;
    const std::shared_ptr<const Kernel> whole_kernel = std::exchange(kernel_, kernel_on(target(), pool_.spec, plan.text()));
    ASSERT_EQ(kernel_->plan().scratch_bytes, plan.scratch_bytes);
    expect_the_same(shuffled(1500, 8));
    expect_the_same(shuffled(70, 9));
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    return std::string(to_string(std::get<1>(info.param))) + "_" + std::get<2>(info.param).name;
}

INSTANTIATE_TEST_SUITE_P(Cpu, BatchInvariant,
                         testing::Combine(testing::Values(Target::cpu), testing::Values(DType::bf16, DType::fp32),
                                          testing::ValuesIn(kCases)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, BatchInvariant,
                         testing::Combine(testing::Values(Target::gpu), testing::Values(DType::bf16), testing::ValuesIn(kCases)), name_of);

}  // namespace
}  // namespace flce::test
