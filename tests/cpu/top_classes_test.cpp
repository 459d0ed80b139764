// The classes of a token's largest logits on the CPU, whole and over shards, and the order of classes.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "runtime/layer/layer.hpp"
#include "templates/common/top_search.cuh"
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

constexpr std::size_t kLanes = 32;

/// Logits that reach a bound.
int reaching(const std::vector<float>& logits, unsigned order) {
    const float bound = flce::logit_of_order(order);
    return static_cast<int>(std::ranges::count_if(logits, [&](float logit) { return logit >= bound; }));
}

/// Bounds that a search tries until `wanted` reach one; the search ends without one where too many are equal.
struct Searched {
    int tried = 0;
    int count = 0;
    bool found = false;
    unsigned equal = 0;
};
Searched search(const std::vector<float>& logits, const TopWanted& wanted) {
    std::vector<unsigned> largest(kLanes, 0U);
    for (std::size_t i = 0; i < logits.size(); ++i) largest[i % kLanes] = std::max(largest[i % kLanes], flce::order_of(logits[i]));
    TopBoundSearch search(std::ranges::max(largest), std::ranges::min(largest));
    Searched found;
    while (!search.ended()) {
        const unsigned order = search.next(wanted.target());
        EXPECT_GT(order, search.low);
        EXPECT_LT(order, search.high);
        found.count = reaching(logits, order);
        ++found.tried;
        found.found = found.count >= wanted.least && found.count <= wanted.most;
        if (found.found) break;
        search.tell(order, found.count, wanted.most, wanted.target());
    }
    found.equal = search.low;
    return found;
}

std::vector<float> drawn(std::size_t count, const std::function<float(std::size_t, double)>& of) {
    std::mt19937 random(3);
    std::normal_distribution<double> normal;
    std::vector<float> logits;
    for (std::size_t i = 0; i < count; ++i) logits.push_back(of(i, normal(random)));
    return logits;
}

TEST(TopBoundSearch, OfLogitsInAnyOrder_EndsSoon) {
    for (const int top_k : {1, 8, 32, 64, 128, 256}) {
        const TopWanted wanted{top_k, most_kept_classes(top_k)};
        for (const std::size_t count : {704U, 1536U}) {
            const auto normal = drawn(count, [](std::size_t, double x) { return static_cast<float>(x); });
            const auto tail = drawn(count, [](std::size_t, double x) { return static_cast<float>(5 - std::log(std::erfc(x) / 2)); });
            for (const auto& logits : {normal, tail}) {
                const Searched found = search(logits, wanted);
                EXPECT_TRUE(found.found);
                EXPECT_LE(found.tried, 6) << top_k << " of " << count;
            }
        }
    }
}

TEST(TopBoundSearch, OfAnyLogits_Ends) {
    const std::vector<std::vector<float>> rows = {
        drawn(1536, [](std::size_t i, double x) { return i == 33 ? 1e30F : static_cast<float>(x); }),
        drawn(1536, [](std::size_t i, double x) { return i == 33 ? -1e30F : static_cast<float>(x); }),
        drawn(1536, [](std::size_t i, double x) { return i % 3 == 0    ? -kLargest
                                                         : i % 50 == 1 ? kLargest
                                                                       : static_cast<float>(x); }),
        drawn(1536, [](std::size_t i, double x) { return i % 20 == 0 ? static_cast<float>(x) : -kLargest; }),
        drawn(1536, [](std::size_t, double x) { return static_cast<float>(std::exp(30 * x)); }),
        drawn(1536, [](std::size_t, double x) { return static_cast<float>(x * 1e-43); }),
        drawn(1536, [](std::size_t, double x) { return static_cast<float>(x * 1e38); }),
        drawn(1536, [](std::size_t i, double) { return static_cast<float>(i); }),
        drawn(1536, [](std::size_t i, double) { return -static_cast<float>(i); }),
        drawn(1536, [](std::size_t i, double) { return static_cast<float>(i / 16); }),
    };
    for (std::size_t row = 0; row < rows.size(); ++row) {
        for (const int top_k : {1, 7, 64, 256}) {
            const TopWanted wanted{top_k, most_kept_classes(top_k)};
            const Searched found = search(rows[row], wanted);
            EXPECT_LE(found.tried, TopBoundSearch::kLineRounds + 32) << row;
            if (found.found) continue;
            EXPECT_GT(reaching(rows[row], found.equal), wanted.most) << row;
            EXPECT_LT(reaching(rows[row], found.equal + 1), wanted.least) << row;
        }
    }
}

TEST(TopBoundSearch, OfEqualLogits_EndsAtThem) {
    for (const float logit : {1.5F, 0.F, -0.F, -kLargest, kLargest, 1e-45F, -1e-45F, -3.4e38F}) {
        std::vector<float> logits(1536, logit);
        const TopWanted wanted{64, 80};
        const Searched equal = search(logits, wanted);
        EXPECT_FALSE(equal.found);
        EXPECT_EQ(flce::logit_of_order(equal.equal), logit);
        if (logit == kLargest || logit == -kLargest) continue;
        for (int i = 0; i < 50; ++i) logits[static_cast<std::size_t>(i) * 7] = i % 2 == 0 ? logit + 1 : -3.402823466e38F;
        const Searched mixed = search(logits, wanted);
        EXPECT_FALSE(mixed.found);
        EXPECT_EQ(flce::logit_of_order(mixed.equal), logit);
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
