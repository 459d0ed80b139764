#include <fmt/format.h>

#include <optional>

#include "tests/support/fp8.hpp"
#include "tests/support/kernel_run.hpp"

namespace flce::test {
namespace {

struct Keeping {
    RetainedPlace place = RetainedPlace::own;
    std::size_t bytes = 0;
};

/// Keeps nothing; on a GPU, where keeping changes the computation, also everything, a part, and as much as grad_weight's memory holds.
std::vector<Keeping> ways_of_keeping(const Kernel& kernel, std::int64_t num_tokens) {
    std::vector<Keeping> ways{{}};
    const std::size_t whole = kernel.retained_bytes(num_tokens);
    if (kernel.device_ref().kind != DeviceKind::cuda || whole == 0) return ways;
    ways.push_back({RetainedPlace::own, whole});
    ways.push_back({RetainedPlace::own, whole / 5 * 3 / 16 * 16});
    const std::size_t lent = kernel.retained_bytes(num_tokens, RetainedPlace::grad_weight);
    if (lent != 0) ways.push_back({RetainedPlace::grad_weight, lent});
    return ways;
}

/// Judges an FP8 head, whose truth has every token and class.
testing::AssertionResult run_and_judge_fp8(const std::shared_ptr<const Kernel>& kernel, const Problem& problem, const Wanted& wanted) {
    const Selection all = select_all(problem);
    const Fp8Tolerance tolerance = fp8_tolerance(kernel->device_ref().kind == DeviceKind::cuda);
    std::string text;
    for (const Keeping& keeping : ways_of_keeping(*kernel, problem.options.num_tokens)) {
        KernelRun run(kernel, problem);
        run.retain(keeping.place, keeping.bytes);
        run.forward();
        run.backward(wanted);
        const std::string wrong =
            fp8_failures(problem, run.outputs(all), run.token_floats("lse"), run.token_floats("logprobs"), tolerance) + run.violations();
        if (!wrong.empty()) text += fmt::format("\n  retained in {} bytes:{}", keeping.bytes, wrong);
    }
    if (text.empty()) return testing::AssertionSuccess();
    return testing::AssertionFailure() << fmt::format("\n  {}\n  {}\n  {}{}", problem.spec.text(), to_string(problem.options),
                                                      kernel->plan().text(), text);
}

}  // namespace

testing::AssertionResult run_and_judge(const std::shared_ptr<const Kernel>& kernel, const Problem& problem, double work,
                                       const Wanted& wanted) {
    if (is_fp8(problem.spec)) return run_and_judge_fp8(kernel, problem, wanted);
    const Selection selection = select_for_work(problem, work);
    std::optional<Result> truth;
    std::optional<Reference> yardstick;
    std::string text;
    for (const Keeping& keeping : ways_of_keeping(*kernel, problem.options.num_tokens)) {
        KernelRun run(kernel, problem);
        run.retain(keeping.place, keeping.bytes);
        run.forward();
        run.backward(wanted);
        if (!truth) {
            const std::vector<float> lse = run.token_floats("lse");
            const std::vector<float> entropy = run.token_floats("entropy");
            const std::vector<float> logprobs = run.token_floats("logprobs");
            const KnownTokens known{lse.data(), entropy.empty() ? nullptr : entropy.data(), logprobs.empty() ? nullptr : logprobs.data()};
            const bool on_gpu = kernel->device_ref().kind == DeviceKind::cuda;
            truth = oracle(layer_of(problem), selection, known);
            yardstick = reference(problem, selection, known, summation_of(problem.spec.dtype, on_gpu));
        }
        const std::string wrong =
            failures(judge(problem, selection, run.outputs(selection), *truth, *yardstick, keeping.bytes != 0)) + run.violations();
        if (wrong.empty()) continue;
        const char* place = keeping.place == RetainedPlace::own ? "of its own" : "of grad_weight";
        text += fmt::format("\n  retained in {} bytes {}:{}", keeping.bytes, place, wrong);
    }
    if (text.empty()) return testing::AssertionSuccess();
    return testing::AssertionFailure() << fmt::format("\n  {}\n  {}\n  {}{}", problem.spec.text(), to_string(problem.options),
                                                      kernel->plan().text(), text);
}

}  // namespace flce::test
