// Logits that forward leaves to backward: whatever number fits, wherever they lie, the gradients are those of a backward pass that computes
// every logit again.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <tuple>
#include <vector>

#include "flce/buffer.hpp"
#include "tests/support/kernel_run.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

using Parameters = std::tuple<DType, WeightLayout, OptionSet>;
using Bytes = std::map<std::string, std::vector<std::byte>>;

constexpr std::int64_t kHidden = 72;
constexpr std::int64_t kVocab = 1031;

// A CPU's kernels retain logits as they are: bits are equal.
class Retained : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(Target::cpu); }

    static Spec spec() {
        const auto& [dtype, layout, options] = GetParam();
        return make_spec(kHidden, kVocab, dtype, layout, options);
    }
    static void expect_same(const Bytes& expected, const KernelRun& run, const std::string& what) {
        for (const auto& [name, content] : run.bytes()) EXPECT_EQ(content == expected.at(name), true) << name << ": " << what;
        EXPECT_EQ(run.violations(), "") << what;
    }
    static Bytes recomputed(const std::shared_ptr<const Kernel>& kernel, const Problem& problem) {
        KernelRun run(kernel, problem);
        run.forward();
        run.backward();
        return run.bytes();
    }
};

TEST_P(Retained, AnyNumberOfBytes_SameBits) {
    const auto kernel = kernel_on(Target::cpu, spec());
    for (const std::int64_t n : {0, 1, 3, 139, 700}) {
        if (kSanitized && n != 3 && n != 139) continue;
        const Problem problem = make_problem(kernel->spec(), {.num_tokens = n, .seed = 5});
        const Bytes expected = recomputed(kernel, problem);
        const std::size_t whole = kernel->retained_bytes(n);
        EXPECT_EQ(whole, static_cast<std::size_t>(4 * n * kVocab));
        std::vector<std::size_t> sizes{whole, whole - whole / 4, std::size_t{16}};
        if (n < 700) sizes.insert(sizes.end(), {whole + 1000, whole / 2, std::size_t{1}, std::size_t{0}});
        for (const std::size_t bytes : sizes) {
            KernelRun run(kernel, problem);
            run.retain(RetainedPlace::own, bytes);
            run.forward();
            for (int pass = 0; pass < 2; ++pass) run.backward();  // it is still there for the second
            expect_same(expected, run, std::to_string(n) + " tokens, bytes " + std::to_string(bytes));
        }
    }
}

// Without retained logits backward would compute them from the weight: a wrong weight shows that backward really reads retained logits.
TEST_P(Retained, Whole_BackwardComputesNoLogit) {
    const auto kernel = kernel_on(Target::cpu, spec());
    const Problem problem = make_problem(kernel->spec(), {.num_tokens = 139, .seed = 5});
    const Bytes expected = recomputed(kernel, problem);
    KernelRun run(kernel, problem);
    run.retain(RetainedPlace::own, kernel->retained_bytes(139));
    run.forward();
    BackwardArgs args = run.backward_args({.grad_hidden = false});
    const std::size_t bytes = static_cast<std::size_t>(kernel->spec().padded_vocab_size * kHidden) * element_bytes(kernel->spec().dtype);
    const Buffer zeros(kernel->device_ref(), bytes);
    std::memset(zeros.data(), 0, bytes);
    args.weight.data = zeros.data();
    kernel->backward(args, run.backward_workspace());
    EXPECT_EQ(run.all_bytes().at("grad_weight") == expected.at("grad_weight"), true);
}

TEST_P(Retained, InGradWeight_SameBits) {
    const auto kernel = kernel_on(Target::cpu, spec());
    const bool accumulates = kernel->spec().grad_weight_mode == GradMode::accumulate;
    for (const std::int64_t n : {0, 1, 3, 36, 72, 73, 139, 700}) {  // up to hidden_size tokens and beyond, in either size of element
        if (kSanitized && n != 72 && n != 139) continue;
        const std::size_t bytes = kernel->retained_bytes(n, RetainedPlace::grad_weight);
        EXPECT_EQ(bytes == 0, n == 0 || accumulates || kernel->spec().layout != WeightLayout::vocab_major);
        if (bytes == 0) continue;
        const Problem problem = make_problem(kernel->spec(), {.num_tokens = n, .seed = 6});
        const Bytes expected = recomputed(kernel, problem);
        KernelRun run(kernel, problem);
        run.retain(RetainedPlace::grad_weight, bytes);
        run.forward();
        run.backward();
        expect_same(expected, run, std::to_string(n) + " tokens");
        run.backward();  // grad_weight has taken its memory: from now on without
        expect_same(expected, run, std::to_string(n) + " tokens, once more");

        KernelRun apart(kernel, problem);
        apart.retain(RetainedPlace::grad_weight, bytes);
        apart.forward();
        apart.backward({.grad_weight = false});
        apart.backward({.grad_hidden = false, .grad_bias = false});
        expect_same(expected, apart, std::to_string(n) + " tokens, one gradient after the other");
    }
}

// Many vocabulary chunks, and tokens walked in blocks.
TEST_P(Retained, LittleScratch_SameBits) {
    Plan plan = kernel_on(Target::cpu, spec())->plan();
    while (plan.scratch_bytes > 4096) {
        Plan less = plan;
        less.scratch_bytes /= 2;
        if (illegal_reason(spec(), device_of(Target::cpu), less)) break;
        plan = less;
    }
    const auto kernel = kernel_on(Target::cpu, spec(), plan.text());
    const std::int64_t n = kSanitized ? 700 : 1500;
    const Problem problem = make_problem(kernel->spec(), {.num_tokens = n, .seed = 7});
    const Bytes expected = recomputed(kernel, problem);
    for (const RetainedPlace place : {RetainedPlace::own, RetainedPlace::grad_weight}) {
        KernelRun run(kernel, problem);
        run.retain(place, kernel->retained_bytes(n, place));
        run.forward();
        run.backward();
        expect_same(expected, run, plan.text());
    }
}

TEST_P(Retained, MemoryThatWillNotDo_IsRefused) {
    const auto kernel = kernel_on(Target::cpu, spec());
    const Problem problem = make_problem(kernel->spec(), {.num_tokens = 139});
    KernelRun run(kernel, problem);
    run.forward();
    const auto refuses = [&](auto&& change) {
        ForwardArgs forward = run.forward_args();
        BackwardArgs backward = run.backward_args();
        change(forward.retained, backward);
        backward.retained = forward.retained;
        const auto before = run.all_bytes();
        EXPECT_THROW(kernel->backward(backward, run.backward_workspace()), ArgumentError);
        EXPECT_EQ(run.all_bytes() == before, true);
    };
    refuses([](flce::Retained& r, const BackwardArgs&) { r = {nullptr, 64}; });
    refuses([](flce::Retained& r, const BackwardArgs& b) { r = {b.hidden.data, 0}; });
    refuses([](flce::Retained& r, const BackwardArgs& b) { r = {static_cast<std::byte*>(b.hidden.data) + 4, 64}; });
    refuses([](flce::Retained& r, const BackwardArgs& b) { r = {b.grad_hidden.data, 64}; });
    refuses([](flce::Retained& r, const BackwardArgs& b) { r = {b.grad_weight.data, 64}; });
    const std::size_t lendable = kernel->retained_bytes(139, RetainedPlace::grad_weight);
    refuses([&](flce::Retained& r, const BackwardArgs& b) { r = {b.grad_weight.data, lendable}; });  // not said to be grad_weight's
    refuses([](flce::Retained& r, const BackwardArgs& b) { r = {b.grad_weight.data, 64, RetainedPlace::grad_weight}; });
    refuses([](flce::Retained& r, const BackwardArgs& b) { r = {b.grad_weight.data, 64, static_cast<RetainedPlace>(7)}; });
    refuses([](flce::Retained& r, const BackwardArgs& b) { r = {static_cast<std::byte*>(b.grad_weight.data) + 16, 64}; });
    refuses([](flce::Retained& r, const BackwardArgs& b) { r = {b.hidden.data, std::size_t{1} << 63}; });
    ForwardArgs forward = run.forward_args();
    forward.retained = {forward.lse.data, 64};
    EXPECT_THROW(kernel->forward(forward, run.forward_workspace()), ArgumentError);
    EXPECT_THROW((void)kernel->retained_bytes(-1), ArgumentError);
    EXPECT_THROW((void)kernel->retained_bytes(3, static_cast<RetainedPlace>(7)), ArgumentError);
}

std::vector<OptionSet> options() {
    std::vector<OptionSet> sets;
    for (const OptionSet& set : all_options()) {
        for (const char* name : {"plain", "bias", "everything", "padded", "grad_fp32", "everything_padded_accumulate"}) {
            if (std::string_view(set.name) == name) sets.push_back(set);
        }
    }
    return sets;
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    const auto& [dtype, layout, option_set] = info.param;
    return std::string(to_string(dtype)) + "_" + std::string(to_string(layout)) + "_" + option_set.name;
}

INSTANTIATE_TEST_SUITE_P(Cpu, Retained,
                         testing::Combine(testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts), testing::ValuesIn(options())), name_of);

}  // namespace
}  // namespace flce::test
