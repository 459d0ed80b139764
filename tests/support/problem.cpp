#include "tests/support/problem.hpp"

#include <fmt/format.h>
#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "tests/support/number_formats.hpp"
#include "tests/support/random.hpp"

namespace flce::test {
namespace {

template <class F>
std::vector<float> filled(std::int64_t count, const F& value) {
    std::vector<float> values(static_cast<std::size_t>(count));
    tbb::parallel_for(tbb::blocked_range<std::int64_t>(0, count, 1 << 14), [&](const auto& range) {
        for (std::int64_t i = range.begin(); i < range.end(); ++i) values[i] = value(i);
    });
    return values;
}

std::int64_t invalid_label(const ProblemOptions& o, std::int64_t vocab_size, std::int64_t token) {
    // Beyond either end, and where 64 bits allow it a label that looks valid in its lower half.
    const std::int64_t choices[] = {vocab_size, -1, o.target_bits == 64 ? (1LL << 32) + 1 : vocab_size + 7, -(1LL << 31)};
    const std::int64_t label = choices[token % 4];
    return label == o.ignore_index ? vocab_size + 1 : label;
}

std::vector<std::int64_t> make_targets(const Spec& spec, const ProblemOptions& o) {
    const Stream random{o.seed * 16 + 1};
    std::vector<std::int64_t> target(static_cast<std::size_t>(o.num_tokens));
    for (std::int64_t i = 0; i < o.num_tokens; ++i) {
        std::int64_t label = random.below(2 * i, spec.vocab_size);
        if (i == 0) label = spec.vocab_size - 1;
        if (i == 1) label = 0;
        if (label == o.ignore_index) label = (label + 1) % spec.vocab_size;  // ignore_index may be a real class
        const double draw = random.uniform(2 * i + 1);
        if (o.ignored == Ignored::all || (o.ignored == Ignored::some && i > 0 && draw < 0.4)) label = o.ignore_index;
        if (o.invalid_labels && i % 5 == 2) label = invalid_label(o, spec.vocab_size, i);
        target[i] = label;
    }
    return target;
}

/// Root of the size of logits that are not moderate.
float root(Logits logits) { return logits == Logits::huge ? 1000.0F : 100.0F; }

std::vector<float> make_weight(const Spec& spec, const ProblemOptions& o) {
    const Stream random{o.seed * 16 + 2};
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.hidden_size)));
    return filled(spec.vocab_size * spec.hidden_size, [&](std::int64_t i) {
        if (o.logits != Logits::moderate && i % spec.hidden_size == 0) return (random.bits(i) & 1U) != 0 ? root(o.logits) : -root(o.logits);
        return rounded(random.normal(i) * scale, weight_dtype(spec));
    });
}

/// The weight as kernels have to round it.
std::vector<float> rounded_weight(const Spec& spec, const std::vector<float>& weight) {
    return filled(std::ssize(weight), [&](std::int64_t i) { return rounded(weight[i], spec.dtype); });
}

std::vector<float> make_hidden(const Problem& problem) {
    const auto& [spec, o] = std::tie(problem.spec, problem.options);
    const Stream random{o.seed * 16 + 3};
    const Stream confidence{o.seed * 16 + 4};
    const std::int64_t d = spec.hidden_size;
    std::vector<float> hidden = filled(o.num_tokens * d, [&](std::int64_t i) { return 2.0F * random.normal(i); });
    for (std::int64_t i = 0; i < o.num_tokens; ++i) {
        const std::int64_t label = problem.target[i];
        const bool known = o.labels_known && label >= 0 && label < spec.vocab_size && confidence.uniform(2 * i) < 0.5;
        // Raises the label's logit by up to twice what makes it certain.
        const double lift = known ? confidence.uniform(2 * i + 1) * 2 * (std::log(static_cast<double>(spec.vocab_size)) + 2) : 0;
        double norm = 1e-30;
        for (std::int64_t k = 1; known && k < d; ++k) norm += std::pow(problem.weight[label * d + k], 2);
        for (std::int64_t k = 0; k < d; ++k) {
            float& h = hidden[i * d + k];
            if (known && k > 0) h += static_cast<float>(lift / norm * problem.weight[label * d + k]);
            if (o.logits != Logits::moderate && k == 0) h = root(o.logits);
            h = rounded(h, spec.dtype);
        }
    }
    return hidden;
}

/// Half of the tokens have sharper softmaxes than the logits', half flatter ones.
std::vector<float> make_temperatures(const ProblemOptions& o) {
    static constexpr float kInfinity = std::numeric_limits<float>::infinity();
    static constexpr float kNone[] = {0.0F, -1.0F, kInfinity, std::numeric_limits<float>::quiet_NaN(), 0x0.FFFFFFp-100F, 0x1.000002p100F};
    const Stream random{o.seed * 16 + 9};
    std::vector<float> values(static_cast<std::size_t>(o.num_tokens));
    for (std::int64_t i = 0; i < o.num_tokens; ++i) {
        values[i] = static_cast<float>(std::exp2(2 * random.uniform(i) - 1));
        if (o.invalid_labels && i % 7 == 3) values[i] = kNone[i / 7 % std::ssize(kNone)];
    }
    return values;
}

/// From 0 to 2; some of the other sign, and exactly 0.
std::vector<float> make_token_weights(const ProblemOptions& o) {
    const Stream random{o.seed * 16 + 10};
    std::vector<float> values(static_cast<std::size_t>(o.num_tokens));
    for (std::int64_t i = 0; i < o.num_tokens; ++i) {
        values[i] = 2.0F * static_cast<float>(random.uniform(i));
        if (i % 11 == 4) values[i] *= -0.25F;
        if (i % 13 == 5) values[i] = 0;
    }
    return values;
}

/// Classes anywhere and the label, some twice, some places without one, every ninth token without any; with invalid labels some that are
/// none. Probabilities add up to less than 1, some are 0.
void make_teacher(Problem& p) {
    const ProblemOptions& o = p.options;
    const Stream random{o.seed * 16 + 11};
    const auto k_count = static_cast<std::int64_t>(p.spec.teacher_top_k);
    p.teacher_ids.resize(static_cast<std::size_t>(o.num_tokens * k_count));
    p.teacher_probs.resize(p.teacher_ids.size());
    for (std::int64_t i = 0; i < o.num_tokens; ++i) {
        double sum = 0;
        for (std::int64_t k = 0; k < k_count; ++k) {
            const std::int64_t at = i * k_count + k;
            const double draw = random.uniform(4 * at);
            std::int64_t& id = p.teacher_ids[at];
            id = random.below(4 * at + 1, p.spec.vocab_size);
            if (k == 0 && draw < 0.5) id = std::clamp<std::int64_t>(p.target[i], 0, p.spec.vocab_size - 1);
            if (k > 0 && draw < 0.2) id = p.teacher_ids[at - 1];
            if (draw > 0.85 || i % 9 == 7) id = -1;
            if (o.invalid_labels && i % 5 == 3 && k == k_count / 2) id = i % 2 == 0 ? p.spec.vocab_size : -2;
            p.teacher_probs[at] = draw > 0.6 && draw < 0.65 ? 0.0F : static_cast<float>(std::exp(2 * random.normal(4 * at + 2)));
            sum += p.teacher_probs[at];
        }
        for (std::int64_t k = 0; k < k_count; ++k) p.teacher_probs[i * k_count + k] *= static_cast<float>(0.95 / std::max(sum, 1e-6));
    }
}

void make_upstream(Problem& p) {
    const ProblemOptions& o = p.options;
    if (!o.upstream) return;
    const Stream random{o.seed * 16 + 5};
    const std::int64_t n = o.num_tokens;
    const auto vector = [&](std::uint64_t which) {
        return filled(n, [&](std::int64_t i) { return random.normal(4 * static_cast<std::uint64_t>(i) + which); });
    };
    if (p.spec.outputs.loss) p.grad_loss = o.reduction == Reduction::none ? vector(0) : std::vector<float>{1.625F};
    // Reduced losses have gradients of size 1/N; the others' are as large, so that none hides the rest.
    const float size =
        (o.reduction == Reduction::mean || o.reduction == Reduction::weighted_mean) && n > 0 ? 1.0F / static_cast<float>(n) : 1.0F;
    const auto scaled = [&](std::uint64_t which) {
        std::vector<float> values = vector(which);
        for (float& v : values) v *= size;
        return values;
    };
    if (p.spec.outputs.lse) p.grad_lse = scaled(1);
    if (p.spec.outputs.logprobs) p.grad_logprobs = scaled(2);
    if (p.spec.outputs.entropy && o.entropy_upstream) p.grad_entropy = scaled(3);
}

// Offsets of about 1. Some classes that no token asks for are ruled out, where a loss of them all would not be infinite.
void make_offsets(Problem& p) {
    const Stream random{p.options.seed * 16 + 12};
    p.class_offset = filled(p.spec.vocab_size, [&](std::int64_t i) { return random.normal(i); });
    if (p.spec.label_smoothing > 0) return;
    std::vector<bool> asked(static_cast<std::size_t>(p.spec.vocab_size));
    for (const auto* ids : {&p.target, &p.teacher_ids}) {
        for (const std::int64_t id : *ids) {
            if (id >= 0 && id < p.spec.vocab_size) asked[static_cast<std::size_t>(id)] = true;
        }
    }
    for (std::int64_t i = 3; i < p.spec.vocab_size; i += 7) {
        if (!asked[static_cast<std::size_t>(i)]) p.class_offset[static_cast<std::size_t>(i)] = -std::numeric_limits<float>::infinity();
    }
}

// A few groups, or one for every few classes; some numbers are below 0. A token often belongs where its target does.
void make_groups(Problem& p) {
    const Stream random{p.options.seed * 16 + 13};
    const std::int64_t v = p.spec.vocab_size;
    const auto all = static_cast<std::uint64_t>(p.options.seed % 2 == 0 ? 3 : std::max<std::int64_t>(v / 4, 2));
    const auto group = [&](std::int64_t i) {
        const std::uint64_t bits = random.bits(i);
        return bits % 8 == 0 ? -1 - static_cast<std::int32_t>(bits / 8 % 2) : static_cast<std::int32_t>(bits / 8 % all);
    };
    for (std::int64_t i = 0; i < v; ++i) p.class_group.push_back(group(i));
    for (std::int64_t i = 0; i < p.num_tokens(); ++i) {
        const std::int64_t target = p.target[static_cast<std::size_t>(i)];
        const bool own = target >= 0 && target < v && i % 2 == 0;
        p.row_group.push_back(own ? p.class_group[static_cast<std::size_t>(target)] : group(-1 - i));
    }
}

}  // namespace

std::string to_string(const ProblemOptions& o) {
    static constexpr const char* kIgnored[] = {"none", "some", "all"};
    static constexpr const char* kReduction[] = {"none", "sum", "mean", "weighted_mean"};
    static constexpr const char* kLogits[] = {"moderate", "saturated", "huge"};
    return fmt::format("N={} ignored={} logits={} target=int{} ignore_index={} reduction={}{}{}{} seed={}", o.num_tokens,
                       kIgnored[static_cast<int>(o.ignored)], kLogits[static_cast<int>(o.logits)], o.target_bits, o.ignore_index,
                       kReduction[static_cast<int>(o.reduction)], o.num_valid ? fmt::format(" num_valid={}", *o.num_valid) : std::string(),
                       o.invalid_labels ? " invalid_labels" : "",
                       !o.upstream          ? " no_upstream"
                       : o.entropy_upstream ? ""
                                            : " no_grad_entropy",
                       o.seed);
}

Problem make_problem(const Spec& spec, const ProblemOptions& options) {
    Problem p;
    p.spec = spec.normalized();
    p.options = options;
    p.target = make_targets(p.spec, options);
    p.weight = make_weight(p.spec, options);
    if (rounds_weight(p.spec) || is_quantized(p.spec)) {
        p.unrounded_weight = std::move(p.weight);
        if (is_quantized(p.spec)) {
            p.codes = quantized(p.spec, p.unrounded_weight);
            p.unrounded_weight = dequantized(p.spec, p.codes);
        }
        p.weight = rounded_weight(p.spec, p.unrounded_weight);
    }
    p.hidden = make_hidden(p);
    const std::int64_t v = p.spec.vocab_size;
    const Stream random{options.seed * 16 + 6};
    if (p.spec.bias) p.bias = filled(v, [&](std::int64_t i) { return rounded(0.5F * random.normal(i), p.spec.dtype); });
    if (p.spec.class_weight) p.class_weight = filled(v, [&](std::int64_t i) { return 0.25F + 1.5F * float(random.uniform(v + i)); });
    if (p.spec.temperature) p.temperature = make_temperatures(options);
    if (p.spec.token_weight) p.token_weight = make_token_weights(options);
    if (p.spec.teacher_top_k > 0) make_teacher(p);
    if (p.spec.class_offset) make_offsets(p);
    if (p.spec.class_groups) make_groups(p);
    make_upstream(p);
    if (p.spec.grad_weight_mode == GradMode::accumulate) {
        const DType dtype = p.spec.grad_weight_dtype;
        const Stream old{options.seed * 16 + 7};
        p.old_grad_weight = filled(v * p.spec.hidden_size, [&](std::int64_t i) { return rounded(0.01F * old.normal(i), dtype); });
        if (p.spec.bias) p.old_grad_bias = filled(v, [&](std::int64_t i) { return rounded(0.01F * old.normal(-1 - i), dtype); });
    }
    return p;
}

std::int64_t weight_index(const Spec& spec, std::int64_t vocab, std::int64_t hidden) {
    return spec.layout == WeightLayout::vocab_major ? vocab * spec.hidden_size + hidden : hidden * spec.padded_vocab_size + vocab;
}

std::vector<float> laid_out(const Spec& spec, const std::vector<float>& values, float padding) {
    std::vector<float> out(static_cast<std::size_t>(spec.padded_vocab_size * spec.hidden_size), padding);
    if (spec.layout == WeightLayout::vocab_major) {
        std::ranges::copy(values, out.begin());
        return out;
    }
    // A line of memory's worth of vocabulary rows at a time: this transposes gigabytes.
    constexpr std::int64_t kRows = 16;
    tbb::parallel_for(tbb::blocked_range<std::int64_t>(0, (spec.vocab_size + kRows - 1) / kRows), [&](const auto& range) {
        for (std::int64_t block = range.begin(); block < range.end(); ++block) {
            const std::int64_t last = std::min((block + 1) * kRows, spec.vocab_size);
            for (std::int64_t k = 0; k < spec.hidden_size; ++k) {
                for (std::int64_t j = block * kRows; j < last; ++j) out[weight_index(spec, j, k)] = values[j * spec.hidden_size + k];
            }
        }
    });
    return out;
}

Layer<float> layer_of(const Problem& p) {
    const auto pointer = [](const std::vector<float>& values) { return values.empty() ? nullptr : values.data(); };
    Layer<float> layer;
    layer.spec = p.spec;
    layer.num_tokens = p.num_tokens();
    layer.hidden = p.hidden.data();
    layer.weight = p.weight.data();
    layer.bias = pointer(p.bias);
    layer.class_weight = pointer(p.class_weight);
    layer.class_offset = pointer(p.class_offset);
    if (p.spec.class_groups) layer.class_group = p.class_group.data(), layer.row_group = p.row_group.data();
    layer.target = p.target.data();
    layer.temperature = pointer(p.temperature);
    layer.token_weight = pointer(p.token_weight);
    // Present with no token, too: the target's part is its share then as well.
    static constexpr std::int64_t kNoId = -1;
    if (p.spec.teacher_top_k > 0) layer.teacher_ids = p.teacher_ids.empty() ? &kNoId : p.teacher_ids.data();
    layer.teacher_probs = pointer(p.teacher_probs);
    layer.ignore_index = p.options.ignore_index;
    layer.reduction = p.options.reduction;
    layer.num_valid = p.options.num_valid;
    layer.grad_loss = pointer(p.grad_loss);
    layer.grad_lse = pointer(p.grad_lse);
    layer.grad_logprobs = pointer(p.grad_logprobs);
    layer.grad_entropy = pointer(p.grad_entropy);
    return layer;
}

Selection select_some(const Problem& p, std::int64_t max_tokens, std::int64_t max_vocab) {
    const Stream random{p.options.seed * 16 + 8};
    std::set<std::int64_t> tokens;
    std::set<std::int64_t> vocab{0, p.spec.vocab_size - 1};
    const std::int64_t n = p.num_tokens();
    if (max_tokens >= n) {
        for (std::int64_t i = 0; i < n; ++i) tokens.insert(i);
    } else {
        tokens = {0, n - 1};
        for (std::uint64_t k = 0; std::ssize(tokens) < max_tokens; ++k) tokens.insert(random.below(k, n));
    }
    if (max_vocab >= p.spec.vocab_size) {
        for (std::int64_t j = 0; j < p.spec.vocab_size; ++j) vocab.insert(j);
    } else {
        for (std::int64_t token : tokens) {
            const std::int64_t label = p.target[token];
            if (label >= 0 && label < p.spec.vocab_size && std::ssize(vocab) < max_vocab / 2) vocab.insert(label);
        }
        for (std::int64_t token : tokens) {
            layer_of(p).for_each_named(token, [&](std::int64_t id, std::int64_t, float) {
                if (std::ssize(vocab) < max_vocab * 3 / 4) vocab.insert(id);
            });
        }
        for (std::uint64_t k = 1 << 20; std::ssize(vocab) < max_vocab; ++k) vocab.insert(random.below(k, p.spec.vocab_size));
    }
    return {{tokens.begin(), tokens.end()}, {vocab.begin(), vocab.end()}};
}

Selection select_all(const Problem& p) { return select_some(p, p.num_tokens(), p.spec.vocab_size); }

Selection select_for_work(const Problem& p, double work) {
    const auto n = static_cast<double>(std::max<std::int64_t>(p.num_tokens(), 32));  // reading a gradient back costs something, too
    const auto v = static_cast<double>(p.spec.vocab_size);
    const double each = static_cast<double>(p.spec.hidden_size) + 300;  // a logit costs its product and about 300 more for exp and budgets
    if (n * v * each <= work) return select_all(p);
    return select_some(p, std::max<std::int64_t>(8, std::int64_t(work / (v * each))),
                       std::max<std::int64_t>(16, std::int64_t(work / (n * each))));
}

}  // namespace flce::test
