#include "runtime/retained_choice.hpp"

#include <gtest/gtest.h>

#include "tests/session/fake_backend.hpp"

namespace flce {
namespace {

constexpr std::int64_t kStepTokens = 4096;
constexpr std::size_t kMost = 1000 << 20;
constexpr std::size_t kWorkspace = 100 << 20;

/// Choice for a layer that is worth it.
Retained chosen(std::size_t lendable, std::size_t left_by_limit, RetainOptions options = {}) {
    const Spec spec = parse_spec("D=4096,V=128256,dtype=bf16");
    options.workspace_limit_bytes = left_by_limit == 0 ? 0 : static_cast<std::int64_t>(kWorkspace + left_by_limit);
    return choose_retained(spec, {.path = PlanPath::cuda_sm90a}, kStepTokens, {kMost, lendable, kWorkspace}, options);
}

void expect(const Retained& retained, RetainedPlace place, std::size_t bytes) {
    EXPECT_EQ(retained.data, nullptr);
    EXPECT_EQ(retained.bytes, bytes);
    if (bytes != 0) {
        EXPECT_EQ(retained.place, place);
    }
}

TEST(RetainedChoice, WithoutALimit_GradWeightsMemoryOrNothing) {
    expect(chosen(500 << 20, 0), RetainedPlace::grad_weight, 500 << 20);
    expect(chosen(0, 0), RetainedPlace::own, 0);
    expect(chosen(500 << 20, 0, {.retain_in_grad_weight = false}), RetainedPlace::own, 0);
}

TEST(RetainedChoice, LimitThatLeavesMore_MemoryOfItsOwn) {
    expect(chosen(500 << 20, 600 << 20), RetainedPlace::own, 600 << 20);
    expect(chosen(500 << 20, 510 << 20), RetainedPlace::grad_weight, 500 << 20);  // hardly more is not worth it
    expect(chosen(500 << 20, 510 << 20, {.retain_in_grad_weight = false}), RetainedPlace::own, 510 << 20);
    expect(chosen(2000 << 20, 3000LL << 20), RetainedPlace::grad_weight, 2000 << 20);  // holds all of it
    expect(chosen(0, 3000LL << 20), RetainedPlace::own, kMost);
    expect(chosen(0, (600 << 20) + 9), RetainedPlace::own, 600 << 20);
}

TEST(RetainedChoice, ShardWhoseLimitHoldsEverything_MemoryOfItsOwn) {
    const auto of_shard = [](PlanPath path, std::size_t left_by_limit) {
        const std::int64_t limit = static_cast<std::int64_t>(kWorkspace + left_by_limit);
        const Spec spec = parse_spec("D=4096,V=64128,whole_vocab_size=128256,dtype=bf16");
        return choose_retained(spec, {.path = path}, kStepTokens, {kMost, 2 * kMost, kWorkspace}, {.workspace_limit_bytes = limit});
    };
    expect(of_shard(PlanPath::cuda_sm90a, kMost), RetainedPlace::own, kMost);
    expect(of_shard(PlanPath::cuda_sm90a, kMost - 16), RetainedPlace::grad_weight, 2 * kMost);
    expect(of_shard(PlanPath::cpu, kMost), RetainedPlace::grad_weight, 2 * kMost);
}

TEST(RetainedChoice, LimitThatLeavesHardlyAnything_Nothing) {
    expect(chosen(0, 19 << 20), RetainedPlace::own, 0);
    expect(chosen(0, 21 << 20), RetainedPlace::own, 21 << 20);
    RetainOptions below{.workspace_limit_bytes = static_cast<std::int64_t>(kWorkspace) - 1};
    expect(choose_retained(parse_spec("D=4096,V=128256,dtype=bf16"), {.path = PlanPath::cuda_sm90a}, kStepTokens, {kMost, 0, kWorkspace},
                           below),
           RetainedPlace::own, 0);
}

TEST(RetainedChoice, SmallLayer_NothingUnlessAskedFor) {
    const Spec spec = parse_spec("D=64,V=4096,dtype=fp32");
    const auto on = [&](PlanPath path, std::int64_t num_tokens, std::int64_t least_work) {
        return choose_retained(spec, {.path = path}, num_tokens, {kMost, kMost, kWorkspace}, {.least_work = least_work}).bytes;
    };
    EXPECT_EQ(on(PlanPath::cpu, 63, 0), 0u);
    EXPECT_EQ(on(PlanPath::cpu, 64, 0), kMost);
    EXPECT_EQ(on(PlanPath::cuda_sm90a, 64, 0), 0u) << "launches cost more there";
    EXPECT_EQ(on(PlanPath::cuda_sm90a, 64, 1), kMost);
    EXPECT_EQ(on(PlanPath::cpu, 64, std::int64_t{1} << 40), 0u);
}

TEST(RetainedChoice, KernelThatRetainsNothing_Nothing) {
    const test::RecordingKernel kernel(test::small_spec().normalized());
    EXPECT_EQ(kernel.choose_retained(100, {.workspace_limit_bytes = 1 << 30, .least_work = 1}).bytes, 0u);
    EXPECT_THROW((void)kernel.choose_retained(-1), ArgumentError);
    EXPECT_THROW((void)kernel.choose_retained(1, {.workspace_limit_bytes = -1}), ArgumentError);
    EXPECT_THROW((void)kernel.choose_retained(1, {.least_work = -1}), ArgumentError);
}

/// Two bytes a token and class, of which grad_hidden can be made without hidden.
class LateKernel final : public Kernel {
public:
    explicit LateKernel(const std::string& spec) : Kernel(parse_spec(spec).normalized(), {}, {}, {}) {}

private:
    void run(Pass /*pass*/, const std::int64_t* /*slots*/, Stream /*stream*/) const override {}
    [[nodiscard]] std::int64_t workspace_bytes_of(Pass /*pass*/, std::int64_t /*num_tokens*/) const override { return 0; }
    [[nodiscard]] std::int64_t retained_bytes_of(std::int64_t num_tokens, RetainedPlace /*place*/, std::int64_t columns) const override {
        return num_tokens * columns * 2;
    }
    [[nodiscard]] bool defers_hidden() const noexcept override { return true; }
};

TEST(ReadsHiddenLate, WhereEverythingIsRetainedInMemoryOfItsOwn) {
    const LateKernel kernel("D=64,V=600,whole_vocab_size=1000,dtype=bf16");
    const auto late = [&](std::size_t bytes, std::int64_t columns = 0, RetainedPlace place = RetainedPlace::own) {
        return kernel.reads_hidden_late(40, {.bytes = bytes, .place = place}, columns);
    };
    EXPECT_TRUE(late(40 * 600 * 2));
    EXPECT_TRUE(late(40 * 400 * 2, 400)) << "all of a rank with fewer classes";
    EXPECT_FALSE(late(40 * 400 * 2));
    EXPECT_FALSE(late(0));
    EXPECT_FALSE(late(40 * 600 * 2, 0, RetainedPlace::grad_weight)) << "a part of it may be nowhere";
    EXPECT_THROW((void)late(1, 601), ArgumentError);
    EXPECT_THROW((void)kernel.reads_hidden_late(-1, {}), ArgumentError);
    const LateKernel with_entropy("D=64,V=600,whole_vocab_size=1000,dtype=bf16,outputs=loss+entropy");
    EXPECT_FALSE(with_entropy.reads_hidden_late(40, {.bytes = 40 * 600 * 2})) << "its gradient computes logits again";
    const test::RecordingKernel another(parse_spec("D=64,V=600,whole_vocab_size=1000,dtype=bf16").normalized());
    EXPECT_FALSE(another.reads_hidden_late(40, {.bytes = 40 * 600 * 2}));
}

}  // namespace
}  // namespace flce
