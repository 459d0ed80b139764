// ParallelKernel on a GPU that ranks share, each a thread with streams of its own: work beside a call's stream waits for its operands, and
// is waited for.
#include <gtest/gtest.h>

#include <mutex>
#include <vector>

#include "flce/buffer.hpp"
#include "runtime/cuda/driver.hpp"
#include "tests/parallel/rank_call.hpp"
#include "tests/parallel/thread_group.hpp"
#include "tests/support/gpu.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

constexpr std::int64_t kTokens = 640;
const std::vector<std::int64_t> kShardRows{1500, 700, 1300};
constexpr std::int64_t kClasses = 3450;  // the last rows are padding

/// A stream that does not wait for the default stream.
class SideStream {
public:
    SideStream() : context_(CudaDriver::load()->context(0)) {
        const ContextScope scope(*context_);
        context_->driver().check(context_->functions().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    }
    ~SideStream() { context_->functions().cuStreamDestroy(stream_); }
    SideStream(const SideStream&) = delete;
    SideStream& operator=(const SideStream&) = delete;
    [[nodiscard]] Stream get() const { return {stream_}; }

private:
    std::shared_ptr<const CudaContext> context_;
    CUstream stream_ = nullptr;
};

/// Bytes on the GPU when the stream comes there.
std::vector<std::byte> downloaded(const void* data, std::size_t bytes, Stream stream) {
    const auto context = CudaDriver::load()->context(0);
    const ContextScope scope(*context);
    const CudaFunctions& cuda = context->functions();
    std::vector<std::byte> host(bytes);
    context->driver().check(cuda.cuStreamSynchronize(static_cast<CUstream>(stream.handle)), "cuStreamSynchronize");
    if (bytes > 0) context->driver().check(cuda.cuMemcpyDtoH(host.data(), reinterpret_cast<CUdeviceptr>(data), bytes), "cuMemcpyDtoH");
    return host;
}

void upload_to(void* data, const std::vector<std::byte>& host) {
    if (host.empty()) return;
    const auto context = CudaDriver::load()->context(0);
    const ContextScope scope(*context);
    context->driver().check(context->functions().cuMemcpyHtoD(reinterpret_cast<CUdeviceptr>(data), host.data(), host.size()),
                            "cuMemcpyHtoD");
    synchronize({DeviceKind::cuda, 0});  // it may have come no farther than the driver's own memory
}

/// The collectives of `host` over the GPU's memory.
Communicator on_gpu(const Communicator& host) {
    Communicator made{.rank = host.rank, .size = host.size};
    made.all_gather = [host](const void* part, void* all, std::size_t bytes, Stream stream) {
        const std::vector<std::byte> mine = downloaded(part, bytes, stream);
        std::vector<std::byte> whole(bytes * static_cast<std::size_t>(host.size));
        host.all_gather(mine.data(), whole.data(), bytes, {});
        upload_to(all, whole);
    };
    made.all_reduce = [host](void* data, std::int64_t count, DType dtype, Stream stream) {
        std::vector<std::byte> mine = downloaded(data, static_cast<std::size_t>(count) * element_bytes(dtype), stream);
        host.all_reduce(mine.data(), count, dtype, {});
        upload_to(data, mine);
    };
    made.reduce_scatter = [host](const void* data, void* part, std::int64_t count, DType dtype, Stream stream) {
        const std::size_t bytes = static_cast<std::size_t>(count) * element_bytes(dtype);
        const std::vector<std::byte> mine = downloaded(data, bytes * static_cast<std::size_t>(host.size), stream);
        std::vector<std::byte> sum(bytes);
        host.reduce_scatter(mine.data(), sum.data(), count, dtype, {});
        upload_to(part, sum);
    };
    return made;
}

struct Case {
    const char* options;
    double retained;  ///< part of what there is a use for
    bool sequence;
    const char* name;
    bool wide = false;  ///< grad_hidden is added up in fp32
};

class GpuParallel : public testing::TestWithParam<Case> {
protected:
    static constexpr std::int64_t kSize = 3;
};

TEST_P(GpuParallel, StepWithAStreamBeside_SameBitsAsByHand) {
    FLCE_REQUIRE_GPU();
    const Case& c = GetParam();
    Spec whole = parse_spec(std::string("D=256,V=3450,dtype=bf16") + c.options);
    Spec spec = shard_spec(whole, 1500);
    if (c.wide) spec.grad_hidden_dtype = DType::fp32;
    const auto kernel = kernel_on(Target::gpu, spec.normalized());
    ProblemOptions o;
    o.num_tokens = kTokens - kTokens % kSize;
    const Problem problem = make_problem(whole, o);
    const std::vector<Shard> shards = shards_of(kClasses, kShardRows);
    ShardedRun by_hand(kernel, problem, shards);
    if (c.retained > 0) by_hand.retain(RetainedPlace::own, c.retained);
    by_hand.forward();
    by_hand.backward();
    const std::vector<std::byte> grad_hidden = summed_grad_hidden(by_hand, kernel->spec(), o.num_tokens);

    ThreadGroup group(kSize);
    std::mutex mutex;
    group.run([&](const Communicator& host) {
        const Communicator ranks = on_gpu(host);
        const auto rank = static_cast<std::size_t>(ranks.rank);
        const Problem part = shard_problem(problem, kernel->spec(), shards[rank]);
        KernelRun run(kernel, part);
        if (c.retained > 0) {
            const std::size_t all = kernel->retained_bytes(o.num_tokens, RetainedPlace::own, shards[rank].classes);
            run.retain(RetainedPlace::own,
                       c.retained < 1 ? static_cast<std::size_t>(static_cast<double>(all) * c.retained) / 16 * 16 : all);
        }
        RankCall call = call_of(run);
        if (c.sequence) use_part_of_tokens(call, ranks);
        const SideStream stream, beside;
        const ParallelKernel parallel(kernel, ranks, {.sequence_parallel = c.sequence, .communication_stream = beside.get()});
        const std::size_t bytes = parallel.workspace_bytes(o.num_tokens);
        const GuardedBuffer workspace(kernel->device_ref(), bytes, 0, kGuard);
        for (int round = 0; round < 2; ++round) {
            parallel.forward(call.forward, {workspace.data(), bytes}, stream.get());
            parallel.backward(call.backward, {workspace.data(), bytes}, stream.get());
        }
        synchronize(kernel->device_ref());

        const std::scoped_lock lock(mutex);
        EXPECT_EQ(workspace.overrun(), "");
        expect_results_of(run, by_hand.run(rank), rank);
        expect_grad_hidden(run, grad_hidden, ranks, c.sequence);
    });
}

INSTANTIATE_TEST_SUITE_P(Ways, GpuParallel,
                         testing::Values(Case{"", 1, false, "AllRetained"}, Case{"", 1, true, "AllRetained_Sequence"},
                                         Case{",bias,softcap=20", 1, true, "SoftcapAndBias_Sequence"},
                                         Case{",label_smoothing=0.1", 1, true, "Smoothing_Sequence"}, Case{"", 0.5, true, "APart_Sequence"},
                                         Case{"", 0, true, "NothingRetained_Sequence"}, Case{"", 1, true, "Fp32Sum_Sequence", true},
                                         Case{",outputs=loss+entropy", 1, true, "Entropy_Sequence"}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace flce::test
