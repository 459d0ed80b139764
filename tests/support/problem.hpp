// One concrete problem: a Spec, a number of tokens and every input of a forward and a backward call, deterministic in its options.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "flce/flce.hpp"
#include "tests/support/quantized.hpp"

namespace flce::test {

enum class Ignored : std::uint8_t { none, some, all };

/// moderate: logits of standard deviation 2, half of the tokens confident of their label to a random degree. saturated: ±1e4 besides
/// that. huge: ±1e6.
enum class Logits : std::uint8_t { moderate, saturated, huge };

struct ProblemOptions {
    std::int64_t num_tokens = 3;
    Ignored ignored = Ignored::some;
    Logits logits = Logits::moderate;
    int target_bits = 64;
    std::int64_t ignore_index = -100;
    Reduction reduction = Reduction::mean;
    std::optional<double> num_valid;  ///< handed in instead of counted
    ScalarType num_valid_type = ScalarType::fp32;
    bool invalid_labels = false;   ///< some labels outside [0, V), never ignore_index; with temperatures, some of them are none
    bool upstream = true;          ///< gradients of every output of the Spec; else grad_loss is left out and means 1
    bool entropy_upstream = true;  ///< the entropy's among them
    bool labels_known = true;      ///< false: labels independent of the hidden states
    std::uint64_t seed = 1;
};

[[nodiscard]] std::string to_string(const ProblemOptions& options);

/// Place of the rows of a shard's weight in the vocabulary.
struct Shard {
    std::int64_t start = 0;    ///< label of the first
    std::int64_t classes = 0;  ///< rows that are classes
    std::int64_t rows = 0;     ///< rows in memory
};

struct Problem {
    Spec spec;  ///< normalized
    ProblemOptions options;
    std::optional<Shard> shard;  ///< weight, bias, class weights and contents of gradients are then the shard's
    // Values as the dtype holds them, weight without padding and always [V, D].
    std::vector<float> hidden;
    std::vector<float> weight;
    std::vector<float> unrounded_weight;    ///< weight before it is rounded, where the Spec rounds the weight; else empty
    QuantizedRows codes;                    ///< weight in memory where the Spec's is quantised
    std::vector<float> bias;                ///< empty without spec.bias
    std::vector<float> class_weight;        ///< empty without spec.class_weight
    std::vector<float> class_offset;        ///< empty without spec.class_offset
    std::vector<std::int32_t> class_group;  ///< empty without spec.class_groups
    std::vector<std::int32_t> row_group;    ///< [N]; empty without spec.class_groups
    std::vector<float> temperature;         ///< [N]; empty without spec.temperature
    std::vector<float> token_weight;        ///< [N]; empty without spec.token_weight
    std::vector<std::int64_t> target;
    std::vector<std::int64_t> teacher_ids;  ///< [N, K]; empty without spec.teacher_top_k
    std::vector<float> teacher_probs;       ///< [N, K]; empty without spec.teacher_top_k
    // Upstream gradients; empty: not given.
    std::vector<float> grad_loss;  ///< [N] for none, else one
    std::vector<float> grad_lse;
    std::vector<float> grad_logprobs;
    std::vector<float> grad_entropy;
    // Contents of gradient buffers before an accumulating backward, as grad_weight_dtype holds them; [V, D] without padding. Empty when
    // writing.
    std::vector<float> old_grad_weight;
    std::vector<float> old_grad_bias;

    [[nodiscard]] std::int64_t num_tokens() const { return options.num_tokens; }
};

[[nodiscard]] Problem make_problem(const Spec& spec, const ProblemOptions& options);

/// Weight-shaped values [V, D] as the Spec lays them out in memory: padded, and transposed for hidden_major. `padding` fills what lies past
/// V.
[[nodiscard]] std::vector<float> laid_out(const Spec& spec, const std::vector<float>& values, float padding);
/// Element (vocabulary row, hidden column) of a weight-shaped buffer in the Spec's layout.
[[nodiscard]] std::int64_t weight_index(const Spec& spec, std::int64_t vocab, std::int64_t hidden);

/// Input of the oracle and of the reference arithmetic. T is float, or double for central differences.
template <class T>
struct Layer {
    Spec spec;
    std::int64_t num_tokens = 0;
    const T* hidden = nullptr;
    const T* weight = nullptr;  ///< [V, D]
    const T* bias = nullptr;
    const float* class_weight = nullptr;
    const float* class_offset = nullptr;
    const std::int32_t* class_group = nullptr;
    const std::int32_t* row_group = nullptr;
    const std::int64_t* target = nullptr;
    const float* temperature = nullptr;
    const float* token_weight = nullptr;
    const std::int64_t* teacher_ids = nullptr;
    const float* teacher_probs = nullptr;
    std::int64_t ignore_index = -100;
    Reduction reduction = Reduction::mean;
    std::optional<double> num_valid;
    const float* grad_loss = nullptr;
    const float* grad_lse = nullptr;
    const float* grad_logprobs = nullptr;
    const float* grad_entropy = nullptr;

    [[nodiscard]] bool valid(std::int64_t token) const {
        const std::int64_t label = target[token];
        const double t = temperature_of(token);
        return label != ignore_index && label >= 0 && label < whole_vocab_size(spec) && t >= kLeastTemperature && t <= kMostTemperature;
    }
    [[nodiscard]] double temperature_of(std::int64_t token) const { return temperature != nullptr ? double(temperature[token]) : 1.0; }
    [[nodiscard]] double token_weight_of(std::int64_t token) const { return token_weight != nullptr ? double(token_weight[token]) : 1.0; }
    /// The share of the target in the cross entropy.
    [[nodiscard]] double hard_weight() const { return teacher_ids != nullptr ? spec.hard_weight : 1.0; }
    /// Calls `visit` with every class that the token's teacher names, its number among them and its probability.
    template <class Visit>
    void for_each_named(std::int64_t token, const Visit& visit) const {
        if (teacher_ids == nullptr) return;
        for (std::int64_t k = 0; k < spec.teacher_top_k; ++k) {
            const std::int64_t at = token * spec.teacher_top_k + k;
            if (teacher_ids[at] >= 0 && teacher_ids[at] < spec.vocab_size) visit(teacher_ids[at], k, teacher_probs[at]);
        }
    }
    /// How often a class takes part in a token's softmax: once; with support as often as the token names it.
    [[nodiscard]] double times(std::int64_t token, std::int64_t vocab) const {
        if (!spec.support) return 1;
        double times = 0;
        for_each_named(token, [&](std::int64_t id, std::int64_t, double) { times += id == vocab ? 1 : 0; });
        return times;
    }
    /// Number that is added to the class's capped logit: −infinity where the token's group rules the class out.
    [[nodiscard]] double offset_of(std::int64_t token, std::int64_t vocab) const {
        if (is_ruled_out(token, vocab)) return -std::numeric_limits<double>::infinity();
        return class_offset != nullptr ? double(class_offset[vocab]) : 0.0;
    }
    [[nodiscard]] bool is_ruled_out(std::int64_t token, std::int64_t vocab) const {
        if (row_group == nullptr || target[token] == vocab) return false;
        return row_group[token] >= 0 && row_group[token] == class_group[vocab];
    }
    [[nodiscard]] double class_weight_of(std::int64_t vocab) const { return class_weight != nullptr ? double(class_weight[vocab]) : 1.0; }
};

[[nodiscard]] Layer<float> layer_of(const Problem& problem);
/// Hidden states with zeros for ignored tokens, whose own must not matter, NaN or not.
template <class T>
[[nodiscard]] std::vector<T> hidden_of_valid(const Layer<T>& layer) {
    const std::int64_t d = layer.spec.hidden_size;
    std::vector<T> hidden(static_cast<std::size_t>(layer.num_tokens * d));
    for (std::int64_t i = 0; i < layer.num_tokens; ++i) {
        if (layer.valid(i)) std::copy_n(layer.hidden + i * d, d, &hidden[static_cast<std::size_t>(i * d)]);
    }
    return hidden;
}

/// Rows of grad_hidden (and per-token outputs) and vocabulary rows of grad_weight that are computed, ascending.
struct Selection {
    std::vector<std::int64_t> tokens;
    std::vector<std::int64_t> vocab;
};
[[nodiscard]] Selection select_all(const Problem& problem);
/// At most max_tokens tokens and max_vocab vocabulary rows, always with the ends, and the labels of the chosen tokens among the vocabulary.
[[nodiscard]] Selection select_some(const Problem& problem, std::int64_t max_tokens, std::int64_t max_vocab);
/// select_all where that costs at most `work` multiplications, else a sample that costs about as much.
[[nodiscard]] Selection select_for_work(const Problem& problem, double work = 4e8);

}  // namespace flce::test
