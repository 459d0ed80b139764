// ParallelKernel with ranks on threads: the same bits as its passes and collectives by hand, which tests/matrix judges.
#include <gmock/gmock.h>

#include <array>
#include <mutex>

#include "flce/parallel.hpp"
#include "tests/parallel/rank_call.hpp"
#include "tests/parallel/thread_group.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

using testing::HasSubstr;

constexpr std::int64_t kHidden = 64;
constexpr std::int64_t kVocab = 200;
const std::vector<std::int64_t> kRows{90, 30, 80, 20};  // the last are padding

using Parameters = std::tuple<DType, OptionSet, bool>;

class Parallel : public testing::TestWithParam<Parameters> {};

TEST_P(Parallel, Step_SameBitsAsByHand) {
    const auto& [dtype, options, sequence] = GetParam();
    Spec whole = make_spec(kHidden, kVocab, dtype, WeightLayout::vocab_major, options);
    whole.padded_vocab_size = kVocab;
    Spec spec = shard_spec(whole, 90);
    if (sequence && dtype != DType::fp32) spec.grad_hidden_dtype = DType::fp32;
    const auto kernel = kernel_on(Target::cpu, spec.normalized());
    ProblemOptions o;
    o.num_tokens = 64;
    const Problem problem = make_problem(whole, o);
    const std::vector<Shard> shards = shards_of(kVocab, kRows);
    ShardedRun by_hand(kernel, problem, shards);
    by_hand.forward();
    by_hand.backward();
    const std::vector<std::byte> grad_hidden = summed_grad_hidden(by_hand, kernel->spec(), o.num_tokens);

    ThreadGroup group(static_cast<int>(shards.size()));
    std::mutex mutex;
    group.run([&, sequence = sequence](const Communicator& ranks) {
        const auto rank = static_cast<std::size_t>(ranks.rank);
        const Problem part = shard_problem(problem, kernel->spec(), shards[rank]);
        const KernelRun run(kernel, part);
        RankCall call = call_of(run);
        if (sequence) use_part_of_tokens(call, ranks);
        const ParallelKernel parallel(kernel, ranks, {.sequence_parallel = sequence});
        const std::size_t bytes = parallel.workspace_bytes(o.num_tokens);
        const GuardedBuffer workspace(kernel->device_ref(), bytes, 0, kGuard);
        parallel.forward(call.forward, {workspace.data(), bytes});
        parallel.backward(call.backward, {workspace.data(), bytes});

        const std::scoped_lock lock(mutex);
        EXPECT_EQ(workspace.overrun(), "");
        expect_results_of(run, by_hand.run(rank), rank);
        expect_grad_hidden(run, grad_hidden, ranks, sequence);
    });
    EXPECT_EQ(group.collectives, sequence ? 4 : 2);
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    const auto& [dtype, options, sequence] = info.param;
    return std::string(to_string(dtype)) + "_" + options.name + (sequence ? "_sequence" : "");
}

std::vector<OptionSet> some_options() {
    std::vector<OptionSet> some;
    for (const OptionSet& set : all_options()) {
        const std::string name = set.name;
        if (name == "plain" || name.starts_with("everything") || name == "accumulate" || name == "weight_fp32") some.push_back(set);
    }
    some.push_back({"fp8", [](Spec& s) {
                        s.fp8 = Fp8Operands::int8;
                        s.bias = s.class_weight = true;
                    }});
    return some;
}

INSTANTIATE_TEST_SUITE_P(Cpu, Parallel,
                         testing::Combine(testing::Values(DType::bf16, DType::fp32), testing::ValuesIn(some_options()), testing::Bool()),
                         name_of);

// ── Bad input and faults ──

std::shared_ptr<const Kernel> shard_kernel() { return kernel_on(Target::cpu, parse_spec("D=64,V=100,whole_vocab_size=200,dtype=fp32")); }

Communicator lone_rank() {
    Communicator made{.rank = 0, .size = 1};
    made.all_gather = [](const void* part, void* all, std::size_t bytes, Stream) { std::memcpy(all, part, bytes); };
    made.all_reduce = [](void*, std::int64_t, DType, Stream) {};
    return made;
}

template <class Body>
std::string refusal(const Body& body) {
    try {
        body();
    } catch (const ArgumentError& error) {
        return error.what();
    }
    return "(no error)";
}

TEST(ParallelKernel, BadInput_Refused) {
    const auto kernel = shard_kernel();
    const auto refuses = [&](Communicator ranks, ParallelOptions options = {}) {
        return refusal([&] { const ParallelKernel parallel(kernel, std::move(ranks), options); });
    };
    EXPECT_EQ(refuses(lone_rank()), "(no error)");
    EXPECT_THAT(refusal([] { const ParallelKernel parallel(nullptr, lone_rank()); }), HasSubstr("kernel is null"));
    EXPECT_THAT(refusal([] { const ParallelKernel parallel(kernel_on(Target::cpu, parse_spec("D=64,V=100,dtype=fp32")), lone_rank()); }),
                HasSubstr("whole_vocab_size"));
    Communicator ranks = lone_rank();
    ranks.rank = 1;
    EXPECT_THAT(refuses(ranks), HasSubstr("communicator.rank is 1 of 1"));
    ranks = lone_rank();
    ranks.all_gather = {};
    EXPECT_THAT(refuses(ranks), HasSubstr("all_gather is empty"));
    EXPECT_THAT(refuses(lone_rank(), {.sequence_parallel = true}), HasSubstr("reduce_scatter is empty"));
    const ParallelKernel parallel(kernel, lone_rank());
    EXPECT_THAT(refusal([&] { (void)parallel.workspace_bytes(-1); }), HasSubstr("num_tokens is -1"));
    EXPECT_THAT(refusal([&] { parallel.forward({}, {}); }), HasSubstr("workspace has 0 bytes"));
}

// A collective that fails ends the call with its error; the kernel serves the next one.
TEST(ParallelKernel, CollectiveThatFails_ThrowsAndLeavesNothingBehind) {
    const Spec whole = parse_spec("D=64,V=200,dtype=fp32");
    const auto kernel = kernel_on(Target::cpu, shard_spec(whole, 200));
    ProblemOptions o;
    o.num_tokens = 20;
    const Problem problem = make_problem(whole, o);
    const Problem part = shard_problem(problem, kernel->spec(), {0, 200, 200});
    const KernelRun run(kernel, part);
    const RankCall call = call_of(run);
    bool fails = true;
    Communicator ranks = lone_rank();
    ranks.all_gather = [&](const void* from, void* all, std::size_t bytes, Stream) {
        if (fails) throw DeviceError("the network is gone", "all_gather", 5);
        std::memcpy(all, from, bytes);
    };
    const ParallelKernel parallel(kernel, ranks);
    const std::size_t bytes = parallel.workspace_bytes(o.num_tokens);
    const GuardedBuffer workspace(kernel->device_ref(), bytes, 0, kGuard);
    EXPECT_THROW(parallel.forward(call.forward, {workspace.data(), bytes}), DeviceError);
    fails = false;
    parallel.forward(call.forward, {workspace.data(), bytes});
    ShardedRun right(kernel, problem, {{0, 200, 200}});
    right.forward();
    EXPECT_EQ(run.bytes_of("loss"), right.run(0).bytes_of("loss"));
}

}  // namespace
}  // namespace flce::test
