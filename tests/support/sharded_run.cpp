#include "tests/support/sharded_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "tests/support/fp8.hpp"
#include "tests/support/number_formats.hpp"

namespace flce::test {
namespace {

/// Elements [first, first + count) of each of `width`.
template <class T>
std::vector<T> slice(const std::vector<T>& values, std::int64_t first, std::int64_t count, std::int64_t width = 1) {
    if (values.empty()) return {};
    return {values.begin() + first * width, values.begin() + (first + count) * width};
}

/// Outputs of merge, which are equal on every rank.
constexpr const char* kMerged[] = {"loss",
                                   "z_loss",
                                   "lse",
                                   "logprobs",
                                   "entropy",
                                   "top1",
                                   "log_sum_sq_probs",
                                   "teacher_logprobs",
                                   "target_class_weight",
                                   "class_weight_total",
                                   "invalid_label"};

std::vector<ShardedWay> sharded_ways(const Kernel& kernel, std::int64_t num_tokens) {
    std::vector<ShardedWay> ways{{}, {.in_stages = true}};
    if (kernel.retained_bytes(num_tokens) == 0) return ways;
    for (const bool in_stages : {false, true}) {
        for (const double part : {1.0, 0.6}) ways.push_back({true, RetainedPlace::own, part, in_stages});
        if (kernel.retained_bytes(num_tokens, RetainedPlace::grad_weight) != 0) {
            ways.push_back({true, RetainedPlace::grad_weight, 1.0, in_stages});
        }
    }
    ways.push_back({true, RetainedPlace::own, 1.0, true, true});
    return ways;
}

std::string text_of(const ShardedWay& way, const std::vector<Shard>& shards) {
    std::string text = "shards of";
    for (const Shard& shard : shards) text += fmt::format(" {}+{}/{}", shard.start, shard.classes, shard.rows);
    if (way.retains) text += way.place == RetainedPlace::own ? fmt::format(", {} retained", way.part) : ", retained in grad_weight";
    return text + (way.in_stages ? way.hidden_ready ? ", in stages with hidden ready" : ", in stages" : "");
}

}  // namespace

Spec shard_spec(const Spec& whole, std::int64_t classes, std::int64_t rows) {
    Spec spec = whole;
    spec.whole_vocab_size = whole.vocab_size;
    spec.vocab_size = classes;
    spec.padded_vocab_size = rows;
    return spec.normalized();
}

std::vector<Shard> shards_of(std::int64_t vocab_size, const std::vector<std::int64_t>& rows) {
    std::vector<Shard> shards;
    std::int64_t start = 0;
    for (const std::int64_t count : rows) {
        shards.push_back({start, std::clamp<std::int64_t>(vocab_size - start, 0, count), count});
        start += count;
    }
    return shards;
}

Problem shard_problem(const Problem& whole, const Spec& spec, const Shard& shard) {
    Problem part = whole;
    const std::int64_t d = whole.spec.hidden_size;
    const auto of_shard = [&](auto& values, std::int64_t width) { values = slice(values, shard.start, shard.classes, width); };
    part.spec = spec;
    part.shard = shard;
    of_shard(part.weight, d);
    of_shard(part.unrounded_weight, d);
    of_shard(part.codes.codes, weight_row_bytes(part.spec));
    of_shard(part.codes.scales, 1);
    of_shard(part.codes.groups, d / kNvfp4Group);
    of_shard(part.bias, 1);
    of_shard(part.class_weight, 1);
    of_shard(part.class_offset, 1);
    of_shard(part.class_group, 1);
    of_shard(part.old_grad_weight, d);
    of_shard(part.old_grad_bias, 1);
    return part;
}

ShardedRun::ShardedRun(std::shared_ptr<const Kernel> kernel, const Problem& whole, const std::vector<Shard>& shards)
    : whole_(whole), shards_(shards) {
    for (const Shard& shard : shards) {
        problems_.push_back(std::make_unique<Problem>(shard_problem(whole, kernel->spec(), shard)));
        runs_.push_back(std::make_unique<KernelRun>(kernel, *problems_.back()));
    }
}

void ShardedRun::retain(RetainedPlace place, double part) {
    for (std::size_t i = 0; i < runs_.size(); ++i) {
        const std::int64_t classes = shards_[i].classes;
        if (classes == 0) continue;
        const std::size_t whole = runs_[i]->kernel().retained_bytes(whole_.num_tokens(), place, classes);
        runs_[i]->retain(place, part < 1 ? static_cast<std::size_t>(static_cast<double>(whole) * part) / 16 * 16 : whole);
    }
}

void ShardedRun::forward() {
    std::vector<std::byte> gathered;
    for (const auto& run : runs_) {
        run->forward();
        const std::vector<std::byte> part = run->bytes_of("partial_sums");
        gathered.insert(gathered.end(), part.begin(), part.end());
    }
    for (const auto& run : runs_) run->merge(gathered);
}

void ShardedRun::backward(const Wanted& wanted) {
    for (const auto& run : runs_) run->backward(wanted);
}

void ShardedRun::backward_in_stages(const Wanted& wanted, bool hidden_ready) {
    for (const auto& run : runs_) run->backward_in_stages(wanted, hidden_ready);
}

KernelOutputs ShardedRun::outputs(const Selection& selection) const {
    KernelOutputs out = runs_.front()->outputs({selection.tokens, {}});
    std::size_t of_shard = 0;  // the first selected class that is not below the shard
    for (std::size_t i = 0; i < runs_.size(); ++i) {
        Selection part{selection.tokens, {}};
        for (; of_shard < selection.vocab.size() && selection.vocab[of_shard] < shards_[i].start + shards_[i].classes; ++of_shard) {
            part.vocab.push_back(selection.vocab[of_shard] - shards_[i].start);
        }
        const KernelOutputs one = runs_[i]->outputs(part);
        out.grad_weight.insert(out.grad_weight.end(), one.grad_weight.begin(), one.grad_weight.end());
        out.grad_bias.insert(out.grad_bias.end(), one.grad_bias.begin(), one.grad_bias.end());
        for (std::size_t k = 0; i > 0 && k < out.grad_hidden.size(); ++k) out.grad_hidden[k] += one.grad_hidden[k];
    }
    return out;
}

std::string ShardedRun::violations() const {
    std::string text;
    const auto first = runs_.front()->bytes();
    for (std::size_t i = 0; i < runs_.size(); ++i) {
        const std::string of_run = runs_[i]->violations();
        if (!of_run.empty()) text += fmt::format("\n shard {}:{}", i, of_run);
        const auto bytes = runs_[i]->bytes();
        for (const char* name : kMerged) {
            if (bytes.contains(name) && bytes.at(name) != first.at(name)) text += fmt::format("\n  {}: not the same on shard {}", name, i);
        }
    }
    return text;
}

testing::AssertionResult run_and_judge_shards(const std::shared_ptr<const Kernel>& kernel, const Problem& whole,
                                              const std::vector<Shard>& shards, const Wanted& wanted) {
    const Selection selection = select_all(whole);
    std::optional<Result> truth;
    std::optional<Reference> yardstick;
    std::string text;
    for (const ShardedWay& way : sharded_ways(*kernel, whole.num_tokens())) {
        ShardedRun run(kernel, whole, shards);
        if (way.retains) run.retain(way.place, way.part);
        run.forward();
        way.in_stages ? run.backward_in_stages(wanted, way.hidden_ready) : run.backward(wanted);
        if (is_fp8(whole.spec)) {
            const Fp8Tolerance tolerance = fp8_tolerance(kernel->device_ref().kind == DeviceKind::cuda);
            const std::string wrong = fp8_failures(whole, run.outputs(selection), run.token_floats("lse"), run.token_floats("logprobs"),
                                                   tolerance, {shards, grad_hidden_dtype(kernel->spec())}) +
                                      run.violations();
            if (!wrong.empty()) text += fmt::format("\n {}:{}", text_of(way, shards), wrong);
            continue;
        }
        if (!truth) {
            const std::vector<float> lse = run.token_floats("lse");
            const std::vector<float> entropy = run.token_floats("entropy");
            const std::vector<float> logprobs = run.token_floats("logprobs");
            const KnownTokens known{lse.data(), entropy.empty() ? nullptr : entropy.data(), logprobs.empty() ? nullptr : logprobs.data()};
            const bool on_gpu = kernel->device_ref().kind == DeviceKind::cuda;
            truth = oracle(layer_of(whole), selection, known);
            yardstick = reference(whole, selection, known, summation_of(whole.spec.dtype, on_gpu));
        }
        const bool exponentials = way.retains && kernel->device_ref().kind == DeviceKind::cuda;
        const bool rounded = kernel->spec().dtype != DType::fp32 && grad_hidden_dtype(kernel->spec()) != DType::fp32;
        const auto parts = rounded ? static_cast<std::int64_t>(shards.size()) : 1;
        const std::string wrong =
            failures(judge(whole, selection, run.outputs(selection), *truth, *yardstick, exponentials, parts)) + run.violations();
        if (!wrong.empty()) text += fmt::format("\n {}:{}", text_of(way, shards), wrong);
    }
    if (text.empty()) return testing::AssertionSuccess();
    return testing::AssertionFailure() << kernel->spec().text() << "\n"
                                       << kernel->plan().text() << "\n"
                                       << to_string(whole.options) << text;
}

}  // namespace flce::test
