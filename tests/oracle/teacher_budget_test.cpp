// The budget of a teacher's classes, whose logits are added up in another way than the logits in lse: enough for the cost of that, and not
// for four times as much.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
#include <vector>

#include "tests/support/compare.hpp"
#include "tests/support/dense.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/reference.hpp"

namespace flce::test {
namespace {

/// hidden · weight as the warp of a kernel adds it up: a lane has 8 neighbours of every 256, and a tree joins the lanes.
float product_of_warp(const float* h, const float* w, std::int64_t depth) {
    float lanes[32] = {};
    for (std::int64_t d = 0; d < depth; ++d) lanes[d / 8 % 32] = std::fmaf(h[d], w[d], lanes[d / 8 % 32]);
    for (int step = 16; step > 0; step /= 2) {
        for (int lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
    }
    return lanes[0];
}

/// A kernel of a plain layer beside a teacher without hard targets, written down.
class TaughtLayer {
public:
    using NamedLogit = std::function<float(std::int64_t token, std::int64_t id, float logit)>;

    TaughtLayer(const Problem& problem, Summation summation) : p_(problem), summation_(summation) {
        logits_.resize(static_cast<std::size_t>(p_.num_tokens() * vocab_));
        multiply_transposed(summation, p_.hidden.data(), p_.weight.data(), logits_.data(), p_.num_tokens(), vocab_, depth_);
    }

    [[nodiscard]] KernelOutputs outputs(const NamedLogit& named_logit) const {
        KernelOutputs out;
        std::vector<float> dz(logits_.size());
        for (std::int64_t i = 0; i < p_.num_tokens(); ++i) row(i, named_logit, &dz[static_cast<std::size_t>(i * vocab_)], out);
        std::vector<float> grad_hidden(p_.hidden.size()), grad_weight(p_.weight.size());
        multiply_add(summation_, dz.data(), p_.weight.data(), grad_hidden.data(), p_.num_tokens(), depth_, vocab_);
        std::vector<float> turned(dz.size());
        for (std::int64_t i = 0; i < p_.num_tokens(); ++i) {
            for (std::int64_t j = 0; j < vocab_; ++j) turned[j * p_.num_tokens() + i] = dz[i * vocab_ + j];
        }
        multiply_add(summation_, turned.data(), p_.hidden.data(), grad_weight.data(), vocab_, depth_, p_.num_tokens());
        for (const float value : grad_hidden) out.grad_hidden.push_back(rounded(value, p_.spec.dtype));
        for (const float value : grad_weight) out.grad_weight.push_back(rounded(value, p_.spec.dtype));
        return out;
    }

private:
    void row(std::int64_t i, const NamedLogit& named_logit, float* dz, KernelOutputs& out) const {
        const Layer<float> layer = layer_of(p_);
        const std::int64_t top_k = p_.spec.teacher_top_k;
        out.teacher_logprobs.resize(out.teacher_logprobs.size() + static_cast<std::size_t>(top_k));
        const float* z = &logits_[static_cast<std::size_t>(i * vocab_)];
        float loss = 0;
        float lse = 0;
        if (layer.valid(i)) {
            const float top = *std::max_element(z, z + vocab_);
            float sum = 0;
            float probabilities = 0;
            for (std::int64_t j = 0; j < vocab_; ++j) sum += std::exp(z[j] - top);
            const float log_sum = std::log(sum);
            lse = top + log_sum;
            layer.for_each_named(i, [&](std::int64_t, std::int64_t, double q) { probabilities += static_cast<float>(q); });
            std::vector<float> p(static_cast<std::size_t>(vocab_));
            for (std::int64_t j = 0; j < vocab_; ++j) p[j] = std::exp(z[j] - lse);
            std::vector<float> taken(p.size());
            layer.for_each_named(i, [&](std::int64_t id, std::int64_t k, double q) {
                const float logit = id == p_.target[i] ? z[id] : std::min(named_logit(i, id, z[id]), top);
                const float logprob = (logit - top) - log_sum;
                out.teacher_logprobs[static_cast<std::size_t>(i * top_k + k)] = logprob;
                loss -= static_cast<float>(q) * logprob;
                p[id] = std::exp(logprob);
                taken[id] += static_cast<float>(q);
            });
            for (std::int64_t j = 0; j < vocab_; ++j) dz[j] = rounded(p[j] * probabilities - taken[j], p_.spec.dtype);
        }
        out.loss.push_back(loss);
        out.lse.push_back(lse);
    }

    const Problem& p_;
    Summation summation_;
    std::int64_t vocab_ = p_.spec.vocab_size;
    std::int64_t depth_ = p_.spec.hidden_size;
    std::vector<float> logits_;
};

using Parameters = std::tuple<DType, std::int64_t, std::int64_t>;  // hidden_size, vocab_size

class TeacherBudget : public testing::TestWithParam<Parameters> {
protected:
    static Problem problem(Logits logits) {
        Spec s;
        std::tie(s.dtype, s.hidden_size, s.vocab_size) = GetParam();
        s.grad_weight_dtype = s.dtype;
        s.teacher_top_k = 3;
        return make_problem(s, {.num_tokens = 90, .logits = logits, .reduction = Reduction::none, .upstream = false});
    }
    static Summation summation() { return summation_of(std::get<DType>(GetParam()), true); }

    /// Faults where named logits are off by `times` their error on a GPU. Sums are nearer to 0 in tensor cores, so that where times is
    /// above 0 the largest logit bounds the others.
    static std::string wrong(Logits logits, float times) {
        const Problem p = problem(logits);
        const Selection all = select_all(p);
        const Result truth = oracle(layer_of(p), all);
        const Reference yardstick = reference(p, all, {}, summation());
        const TaughtLayer layer(p, summation());
        const std::int64_t depth = p.spec.hidden_size;
        const auto named = [&](std::int64_t token, std::int64_t id, float logit) {
            if (summation() == Summation::truncating) {
                return logit + times * (product_of_warp(&p.hidden[token * depth], &p.weight[id * depth], depth) - logit);
            }
            return logit * (1 + 2 * times * static_cast<float>(kU32));  // loss of TF32's parts
        };
        return failures(judge(p, all, layer.outputs(named), truth, yardstick));
    }
};

TEST_P(TeacherBudget, AnotherOrderOfTheProducts_Passes) {
    for (const Logits logits : {Logits::moderate, Logits::saturated, Logits::huge}) EXPECT_EQ(wrong(logits, 1), "");
    EXPECT_EQ(wrong(Logits::saturated, -1), "") << "as where all logits are below 0";
}

TEST_P(TeacherBudget, NamedLogitsFourTimesAsFarOff_Fail) {
    const auto& [dtype, depth, vocab] = GetParam();
    if (dtype == DType::bf16 && vocab > 3) GTEST_SKIP() << "the rounding of many small probabilities is as large";
    if (dtype == DType::fp32) GTEST_SKIP() << "what lse is off by is as large";
    EXPECT_NE(wrong(Logits::saturated, -4), "");
}

std::string taught_name(const testing::TestParamInfo<Parameters>& info) {
    return std::string(to_string(std::get<0>(info.param))) + "_" + std::to_string(std::get<1>(info.param)) + "_" +
           std::to_string(std::get<2>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Every, TeacherBudget,
                         testing::Combine(testing::Values(DType::bf16, DType::fp16, DType::fp32), testing::Values(32, 96, 160, 520),
                                          testing::Values(3, 9, 60)),
                         taught_name);

}  // namespace
}  // namespace flce::test
