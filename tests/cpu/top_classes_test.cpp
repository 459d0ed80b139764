// The classes of a token's largest logits on the CPU, whole and over shards, and the order of classes.
#include "templates/common/top_classes.cuh"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "runtime/layer/layer.hpp"
#include "tests/cpu/cpu_test_support.hpp"

namespace flce::test {
namespace {

constexpr std::int64_t kTopTokens = 29;
constexpr float kLargest = std::numeric_limits<float>::infinity();

TEST(ClassKeys, OfLogits_InTheirOrder) {
    const std::vector<float> logits = {-kLargest, -3.4e38F, -1.5F, -1e-44F, 0.F, 1e-44F, 2.F, 3.4e38F, kLargest};
    for (std::size_t i = 0; i + 1 < logits.size(); ++i) {
        EXPECT_LT(flce::class_key(logits[i], 0), flce::class_key(logits[i + 1], 999)) << i;
        EXPECT_GT(flce::class_key(logits[i], 4), flce::class_key(logits[i], 5)) << i;
        EXPECT_EQ(flce::logit_of(flce::class_key(logits[i], 7)), logits[i]);
        EXPECT_EQ(flce::id_of(flce::class_key(logits[i], 1 << 29)), 1 << 29);
    }
    EXPECT_GT(flce::class_key(-0.F, 4), flce::class_key(0.F, 5));
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const float any : {nan, -nan}) {
        EXPECT_LT(flce::class_key(any, 0), flce::class_key(-kLargest, 1 << 29));
        EXPECT_GT(flce::class_key(any, 1 << 29), no_class_key());
        EXPECT_TRUE(std::isnan(flce::logit_of(flce::class_key(any, 3))));
    }
}

/// Ids and log-probabilities that a forward with outputs of `spec` writes.
struct Top {
    std::vector<std::int64_t> ids;
    std::vector<float> logprobs;
};

Top top_of(const Kernel& kernel, const LayerInputs& inputs, std::int64_t tokens = kTopTokens) {
    const LayerOutputs outputs = make_outputs(kernel.spec(), kernel.device_ref(), tokens, Reduction::mean);
    const Scratch workspace("workspace", kernel.device_ref(), step_workspace_bytes(kernel, tokens));
    kernel.forward(forward_args(inputs, outputs, {}), workspace.workspace());
    return {outputs.top_ids.to_host<std::int64_t>(), outputs.top_logprobs.to_host<float>()};
}

// The k-th of a call with one k is the k-th of a call with another, and top1 the first; ignored tokens have none.
TEST(TopClasses, OfEveryK_AreTheFirstOfMore) {
    const std::string plain = "D=72,V=403,dtype=bf16,temperature,bias,softcap=9,outputs=loss+lse+top1,top_k=";
    Top more;
    for (const int k : {256, 40, 7, 1}) {
        const Spec spec = parse_spec(plain + std::to_string(k));
        const auto kernel = kernel_of(isa_levels().back(), spec, tiny_plan(isa_levels().back()));
        const RandomLayer layer = make_random_layer(spec, kTopTokens, {.ignored = 0.3});
        const LayerInputs inputs = upload(spec, layer, kernel->device_ref());
        const Top top = top_of(*kernel, inputs);
        const LayerOutputs outputs = make_outputs(spec, kernel->device_ref(), kTopTokens, Reduction::mean);
        const Scratch workspace("workspace", kernel->device_ref(), step_workspace_bytes(*kernel, kTopTokens));
        kernel->forward(forward_args(inputs, outputs, {}), workspace.workspace());
        const std::vector<std::int64_t> top1 = outputs.top1.to_host<std::int64_t>();
        if (k == 256) more = top;
        for (std::int64_t token = 0; token < kTopTokens; ++token) {
            const auto at = static_cast<std::size_t>(token);
            const bool ignored = layer.target[at] < 0;
            for (std::size_t rank = 0; rank < static_cast<std::size_t>(k); ++rank) {
                const std::int64_t id = top.ids[at * static_cast<std::size_t>(k) + rank];
                const float logprob = top.logprobs[at * static_cast<std::size_t>(k) + rank];
                if (ignored) {
                    EXPECT_EQ(id, -1);
                    EXPECT_EQ(logprob, 0);
                    continue;
                }
                EXPECT_EQ(id, more.ids[at * 256 + rank]) << token << " " << rank;
                EXPECT_EQ(logprob, more.logprobs[at * 256 + rank]);
                EXPECT_TRUE(rank > 0 || id == top1[at]);
            }
        }
    }
}

TEST(TopClasses, InAnyNumberOfThreadsAndBlocks_HaveTheSameBits) {
    const Spec spec = parse_spec("D=72,V=1403,dtype=bf16,top_k=33");
    const LayerInputs inputs = upload(spec, make_random_layer(spec, kTopTokens, {}), DeviceRef{});
    const Top one = top_of(*kernel_of(isa_levels().back(), spec, tiny_plan(isa_levels().back()), 1), inputs);
    for (const int threads : {2, 5}) {
        const Top many = top_of(*kernel_of(isa_levels().back(), spec, tiny_plan(isa_levels().back()), threads), inputs);
        EXPECT_EQ(many.ids, one.ids);
        EXPECT_EQ(many.logprobs, one.logprobs);
    }
}

TEST(DivergenceWalk, MixtureWithoutShards_Refused) {
    const Spec spec = parse_spec("D=72,V=403,dtype=fp32,teacher_hidden_size=40,divergence_beta=0.5");
    const auto kernel = kernel_of(isa_levels().back(), spec, tiny_plan(isa_levels().back()));
    const LayerInputs inputs = upload(spec, make_random_layer(spec, kTopTokens, {}), kernel->device_ref());
    const LayerOutputs outputs = make_outputs(spec, kernel->device_ref(), kTopTokens, Reduction::mean);
    const Scratch workspace("workspace", kernel->device_ref(), step_workspace_bytes(*kernel, kTopTokens));
    ForwardArgs args = forward_args(inputs, outputs, {});
    args.walk = DivergenceWalk::mixture;
    EXPECT_THAT([&] { kernel->forward(args, workspace.workspace()); },
                testing::ThrowsMessage<ArgumentError>(testing::HasSubstr("walk is mixture; only a shard")));
}

}  // namespace
}  // namespace flce::test
