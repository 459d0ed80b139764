// The oracle against hand-computed cases, numbers from torch, and central differences of its own losses.
#include "tests/support/oracle.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>

#include "tests/support/random.hpp"

namespace flce::test {
namespace {

// A layer whose inputs are doubles that a test may move.
struct DoubleLayer {
    Problem problem;
    std::vector<double> hidden, weight, bias;

    explicit DoubleLayer(Problem p)
        : problem(std::move(p)),
          hidden(problem.hidden.begin(), problem.hidden.end()),
          weight(problem.weight.begin(), problem.weight.end()),
          bias(problem.bias.begin(), problem.bias.end()) {}

    [[nodiscard]] Layer<double> layer() const {
        const Layer<float> f = layer_of(problem);
        Layer<double> layer;
        layer.spec = f.spec;
        layer.num_tokens = f.num_tokens;
        layer.hidden = hidden.data();
        layer.weight = weight.data();
        layer.bias = bias.empty() ? nullptr : bias.data();
        layer.class_weight = f.class_weight;
        layer.target = f.target;
        layer.temperature = f.temperature;
        layer.token_weight = f.token_weight;
        layer.teacher_ids = f.teacher_ids;
        layer.teacher_probs = f.teacher_probs;
        layer.ignore_index = f.ignore_index;
        layer.reduction = f.reduction;
        layer.num_valid = f.num_valid;
        layer.grad_loss = f.grad_loss;
        layer.grad_lse = f.grad_lse;
        layer.grad_logprobs = f.grad_logprobs;
        layer.grad_entropy = f.grad_entropy;
        return layer;
    }
    [[nodiscard]] Result run() const { return oracle(layer(), select_all(problem)); }

    // The number whose gradient backward computes: outputs times their upstream gradients, summed.
    [[nodiscard]] double objective() const {
        const Layer<double> l = layer();
        const Result r = run();
        const auto n = static_cast<std::size_t>(l.num_tokens);
        double sum = 0;
        for (std::size_t i = 0; i < n; ++i) {
            if (!l.valid(static_cast<std::int64_t>(i))) continue;
            if (l.reduction == Reduction::none)
                sum += (l.grad_loss != nullptr ? double(l.grad_loss[i]) : double(l.spec.outputs.loss)) * r.loss[i];
            if (l.grad_lse != nullptr) sum += double(l.grad_lse[i]) * r.lse[i];
            if (l.grad_logprobs != nullptr) sum += double(l.grad_logprobs[i]) * r.logprobs[i];
            if (l.grad_entropy != nullptr) sum += double(l.grad_entropy[i]) * r.entropy[i];
        }
        if (l.reduction != Reduction::none)
            sum += (l.grad_loss != nullptr ? double(l.grad_loss[0]) : double(l.spec.outputs.loss)) * r.reduced_loss;
        return sum;
    }
};

Spec with_everything() {
    Spec spec;
    spec.hidden_size = 8;
    spec.vocab_size = 7;
    spec.dtype = DType::fp32;
    spec.grad_weight_dtype = DType::fp32;
    spec.bias = true;
    spec.class_weight = true;
    spec.logit_scale = 0.75;
    spec.softcap = 3.0;
    spec.label_smoothing = 0.125;
    spec.z_loss = 0.0625;
    spec.outputs = {true, true, true, true};
    return spec;
}

// d objective / d value by a fourth-order central difference.
double slope(double& value, const std::function<double()>& objective) {
    const double at = value;
    const double h = 1e-3;
    const auto f = [&](double x) {
        value = x;
        return objective();
    };
    const double result = (8 * (f(at + h) - f(at - h)) - (f(at + 2 * h) - f(at - 2 * h))) / (12 * h);
    value = at;
    return result;
}

struct NamedSpec {
    const char* name;
    void (*change)(Spec&);
};

class OracleGradients : public testing::TestWithParam<std::tuple<NamedSpec, Reduction>> {};

TEST_P(OracleGradients, CentralDifferences_Agree) {
    Spec spec;
    spec.hidden_size = 8;
    spec.vocab_size = 7;
    spec.dtype = spec.grad_weight_dtype = DType::fp32;
    std::get<0>(GetParam()).change(spec);
    ProblemOptions options;
    options.num_tokens = 5;
    options.reduction = std::get<1>(GetParam());
    options.invalid_labels = true;
    DoubleLayer layer(make_problem(spec, options));
    const Result result = layer.run();
    double largest = 0;
    for (double g : result.grad_hidden) largest = std::max(largest, std::fabs(g));
    EXPECT_GT(largest, 1e-3);
    const auto expect_slopes = [&](std::vector<double>& values, const std::vector<double>& gradient, const char* what) {
        ASSERT_EQ(values.size(), gradient.size()) << what;
        for (std::size_t k = 0; k < values.size(); ++k) {
            EXPECT_NEAR(slope(values[k], [&] { return layer.objective(); }), gradient[k], 1e-8 * (1 + std::fabs(gradient[k])))
                << what << " " << k;
        }
    };
    expect_slopes(layer.hidden, result.grad_hidden, "hidden");
    expect_slopes(layer.weight, result.grad_weight, "weight");
    expect_slopes(layer.bias, result.grad_bias, "bias");
}

constexpr NamedSpec kSpecs[] = {
    {"plain", [](Spec&) {}},
    {"bias", [](Spec& s) { s.bias = true; }},
    {"logit_scale", [](Spec& s) { s.logit_scale = -0.6; }},
    {"softcap", [](Spec& s) { s.softcap = 2.0; }},
    {"label_smoothing", [](Spec& s) { s.label_smoothing = 0.2; }},
    {"all_smoothing", [](Spec& s) { s.label_smoothing = 1.0; }},
    {"z_loss", [](Spec& s) { s.z_loss = 0.1; }},
    {"class_weight", [](Spec& s) { s.class_weight = true; }},
    {"lse", [](Spec& s) { s.outputs = {false, true, false, false}; }},
    {"logprobs", [](Spec& s) { s.outputs = {false, false, true, false}; }},
    {"entropy", [](Spec& s) { s.outputs = {false, false, false, true}; }},
    {"temperature", [](Spec& s) { s.temperature = true; }},
    {"temperature_softcap", [](Spec& s) { s.temperature = true, s.softcap = 2.0, s.outputs = {true, true, true, true}; }},
    {"token_weight", [](Spec& s) { s.token_weight = true, s.z_loss = 0.1; }},
    {"teacher", [](Spec& s) { s.teacher_top_k = 4; }},
    {"teacher_hard", [](Spec& s) { s.teacher_top_k = 3, s.hard_weight = 0.4, s.label_smoothing = 0.2, s.softcap = 2.0; }},
    {"everything",
     [](Spec& s) {
         s = with_everything();
         s.temperature = s.token_weight = true;
     }},
};

std::string name_of(const testing::TestParamInfo<std::tuple<NamedSpec, Reduction>>& info) {
    static constexpr const char* kNames[] = {"none", "sum", "mean", "weighted_mean"};
    return std::string(std::get<0>(info.param).name) + "_" + kNames[static_cast<int>(std::get<1>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(Options, OracleGradients,
                         testing::Combine(testing::ValuesIn(kSpecs),
                                          testing::Values(Reduction::none, Reduction::sum, Reduction::mean, Reduction::weighted_mean)),
                         name_of);

// With dft the loss is that of tokens weighted by their labels' probabilities, which are constants to the gradient.
TEST(Oracle, Dft_WeighsTokensByTheirProbabilities) {
    Spec spec = with_everything();
    spec.temperature = spec.token_weight = spec.dft = true;
    ProblemOptions options;
    options.num_tokens = 9;
    options.reduction = Reduction::none;
    DoubleLayer with_dft(make_problem(spec, options));
    const Result result = with_dft.run();
    spec.dft = false;
    DoubleLayer weighted(make_problem(spec, options));
    for (std::size_t i = 0; i < result.logprobs.size(); ++i) {
        weighted.problem.token_weight[i] *= static_cast<float>(std::exp(result.logprobs[i]));
    }
    const Result expected = weighted.run();
    for (std::size_t i = 0; i < result.loss.size(); ++i) EXPECT_NEAR(result.loss[i], expected.loss[i], 1e-6);
    for (std::size_t k = 0; k < result.grad_hidden.size(); ++k) EXPECT_NEAR(result.grad_hidden[k], expected.grad_hidden[k], 1e-6);
    for (std::size_t k = 0; k < result.grad_weight.size(); ++k) EXPECT_NEAR(result.grad_weight[k], expected.grad_weight[k], 1e-6);
}

// hidden = (1, 0, …), weights 0 and ln 3 in the first column: p = (1/4, 3/4).
TEST(Oracle, TwoClasses_ByHand) {
    Spec spec;
    spec.hidden_size = 8;
    spec.vocab_size = 2;
    spec.dtype = spec.grad_weight_dtype = DType::fp32;
    spec.outputs = {true, true, true, true};
    ProblemOptions options;
    options.num_tokens = 1;
    options.upstream = false;
    options.reduction = Reduction::sum;
    DoubleLayer layer(make_problem(spec, options));
    layer.problem.target = {0};
    std::fill(layer.hidden.begin(), layer.hidden.end(), 0.0);
    std::fill(layer.weight.begin(), layer.weight.end(), 0.0);
    layer.hidden[0] = 1;
    layer.weight[8] = std::log(3.0);
    const Result r = layer.run();
    EXPECT_NEAR(r.lse[0], std::log(4.0), 1e-15);
    EXPECT_NEAR(r.reduced_loss, std::log(4.0), 1e-15);
    EXPECT_NEAR(r.logprobs[0], -std::log(4.0), 1e-15);
    EXPECT_NEAR(r.entropy[0], 0.25 * std::log(4.0) + 0.75 * std::log(4.0 / 3.0), 1e-15);
    EXPECT_NEAR(r.log_sum_sq_probs[0], std::log(10.0 / 16.0), 1e-15);
    EXPECT_EQ(r.top1[0], 1.0);
    EXPECT_NEAR(r.grad_hidden[0], 0.75 * std::log(3.0), 1e-15);  // Σ_j (p_j − [j=0])·w_j
    EXPECT_NEAR(r.grad_weight[0], -0.75, 1e-15);
    EXPECT_NEAR(r.grad_weight[8], 0.75, 1e-15);
    for (int k = 1; k < 8; ++k) EXPECT_EQ(r.grad_hidden[k], 0.0);
}

// Equal logits: p = 1/V, so smoothing changes nothing, entropy is log V and the softcap's slope at 0 is 1.
TEST(Oracle, UniformLogits_ByHand) {
    Spec spec = with_everything();
    spec.class_weight = false;
    ProblemOptions options;
    options.num_tokens = 3;
    options.ignored = Ignored::none;
    options.upstream = false;
    DoubleLayer layer(make_problem(spec, options));
    layer.problem.target = {6, 0, 2};
    std::fill(layer.hidden.begin(), layer.hidden.end(), 0.0);
    std::fill(layer.bias.begin(), layer.bias.end(), 0.0);
    const Result r = layer.run();
    const double lse = std::log(7.0);
    EXPECT_NEAR(r.reduced_loss, lse + 0.0625 * lse * lse, 1e-14);
    EXPECT_NEAR(r.reduced_z_loss, 0.0625 * lse * lse, 1e-14);
    EXPECT_NEAR(r.entropy[1], lse, 1e-14);
    // Class 3 is nobody's label: every token adds 0.75·[(1−ε)/7 + ε·(1/7 − 1/7) + 2ω·lse/7]/3 to its bias.
    EXPECT_NEAR(r.grad_bias[3], 0.75 * (0.875 / 7 + 2 * 0.0625 * lse / 7), 1e-14);
    EXPECT_NEAR(r.grad_bias[2], r.grad_bias[3] - 0.75 * 0.875 / 3, 1e-14);
}

// Numbers of torch 2.13 in float64: cross_entropy(softcapped logits, target, weight=c, label_smoothing=0.125) + 0.0625·logsumexp²
// averaged over the four valid tokens, times 1.5, plus the dot products of lse, log_softmax at the label and entropy with the upstream
// gradients below; then backward(). Inputs are the integer expressions below, in both languages.
class OracleTorch : public testing::Test {
protected:
    static DoubleLayer layer() {
        Spec spec = with_everything();
        spec.vocab_size = 6;
        spec.softcap = 2.0;
        ProblemOptions options;
        options.num_tokens = 5;
        DoubleLayer layer(make_problem(spec, options));
        for (int i = 0; i < 5; ++i) {
            for (int k = 0; k < 8; ++k) layer.hidden[i * 8 + k] = ((7 * i + 3 * k) % 11 - 5) / 4.0;
        }
        for (int j = 0; j < 6; ++j) {
            for (int k = 0; k < 8; ++k) layer.weight[j * 8 + k] = ((5 * j + 2 * k) % 13 - 6) / 8.0;
            layer.bias[j] = (j - 2) / 8.0;
            layer.problem.class_weight[j] = 0.5F + 0.25F * static_cast<float>(j);
        }
        layer.problem.target = {5, 0, -100, 3, 3};
        layer.problem.grad_loss = {1.5F};
        layer.problem.grad_lse = {0.5F, -0.25F, 9.0F, 1.0F, -0.5F};
        layer.problem.grad_logprobs = {0.25F, 0.5F, 9.0F, -0.75F, 1.0F};
        layer.problem.grad_entropy = {-0.5F, 1.0F, 9.0F, 0.25F, 0.75F};
        return layer;
    }
    static void expect_near(const std::vector<double>& got, const std::vector<double>& want) {
        for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-14) << i;
    }
    static double squares(const std::vector<double>& v) { return std::inner_product(v.begin(), v.end(), v.begin(), 0.0); }
};

TEST_F(OracleTorch, Outputs_Agree) {
    const Result r = layer().run();
    EXPECT_NEAR(r.reduced_loss, 2.680502159606813, 1e-14);
    EXPECT_NEAR(r.reduced_z_loss, 0.24587391636697192, 1e-14);
    expect_near(r.lse, {1.9142525351922721, 1.8292379944476238, 0.0, 2.052256750841824, 2.1245466498266294});
    expect_near(r.logprobs, {-2.8261543308161823, -3.113414443687242, 0.0, -3.1560349539150456, -1.1941793145795314});
    expect_near(r.entropy, {1.6102429124642406, 1.5578533066850861, 0.0, 1.5974877056759245, 1.5882862994346927});
}

TEST_F(OracleTorch, Gradients_Agree) {
    const Result r = layer().run();
    expect_near(r.grad_hidden, {-0.19278401943479584, 0.1264279509182153, 0.16503107419531116, 0.11276785150274031, -0.2254247961828176,
                                -0.12794093315135727, -0.10095514123802819, 0.07768601940248512});
    expect_near(r.grad_weight, {0.03736661650290658, 0.12159648660782077, -0.09056969629444836, 0.12892552893819315, -0.024733663547273535,
                                -0.2977283490249618, -0.017404621216901187, 0.2020906040157403});
    expect_near(r.grad_bias, {0.29266030031018864, 0.6439881252798156, -0.17770744999391302, -0.30974897250285094, 0.2892734961095038,
                              0.09904896544600006});
    EXPECT_NEAR(squares(r.grad_hidden), 2.4136764330741896, 1e-13);
    EXPECT_NEAR(squares(r.grad_weight), 7.161723638830399, 1e-13);
    for (int k = 16; k < 24; ++k) EXPECT_EQ(r.grad_hidden[k], 0.0) << "the ignored token";
}

TEST(Oracle, Selection_GivesTheSameNumbers) {
    Spec spec = with_everything();
    spec.vocab_size = 50;
    ProblemOptions options;
    options.num_tokens = 40;
    const Problem problem = make_problem(spec, options);
    const Result all = oracle(layer_of(problem), select_all(problem));
    const std::vector<float> lse(all.lse.begin(), all.lse.end());
    const std::vector<float> entropy(all.entropy.begin(), all.entropy.end());
    const Selection some = select_some(problem, 7, 9);
    ASSERT_EQ(some.tokens.size(), 7U);
    ASSERT_EQ(some.vocab.size(), 9U);
    const Result part = oracle(layer_of(problem), some, {lse.data(), entropy.data()});
    for (std::size_t s = 0; s < some.tokens.size(); ++s) {
        EXPECT_EQ(part.loss[s], all.loss[some.tokens[s]]);
        for (int k = 0; k < 8; ++k) EXPECT_NEAR(part.grad_hidden[s * 8 + k], all.grad_hidden[some.tokens[s] * 8 + k], 1e-15);
    }
    for (std::size_t s = 0; s < some.vocab.size(); ++s) {  // fp32 lse for the tokens left out
        for (int k = 0; k < 8; ++k) EXPECT_NEAR(part.grad_weight[s * 8 + k], all.grad_weight[some.vocab[s] * 8 + k], 1e-6);
    }
}

}  // namespace
}  // namespace flce::test
