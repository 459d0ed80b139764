// On a real GPU, beside a kernel of somebody else's that holds SMs: backward has to get through with the others.
#include <gtest/gtest.h>

#include "generator/planner.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "tests/cudart/gpu_layer.hpp"
#include "tests/support/gpu.hpp"

namespace flce {
namespace {

/// Blocks that stay until somebody says that they may go, as those of a collective do until its peers are there. After `limit_ns` they give
/// up.
constexpr const char* kHoldSource = R"(
struct Params { volatile unsigned* may_go; unsigned* gave_up; unsigned long long limit_ns; };
__device__ unsigned long long now() { unsigned long long ns; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)); return ns; }
extern "C" __global__ void hold(const __grid_constant__ Params p) {
    const unsigned long long begin = now();
    while (*p.may_go == 0) {
        if (now() - begin > p.limit_ns) { atomicAdd(p.gave_up, 1u); return; }
    }
}
)";
struct HoldParams {
    void* may_go;
    void* gave_up;
    std::uint64_t limit_ns;
};

struct Flags {
    unsigned may_go = 0;
    unsigned gave_up = 0;
};

class ForeignKernel {
public:
    ForeignKernel()
        : context_(CudaDriver::load()->context(0)), module_(context_, compiled()), stream_(context_), flags_(kFirstGpu, sizeof(Flags)) {}

    void start(unsigned blocks) {
        const Flags none;
        flags_.upload(&none, sizeof(none));
        const HoldParams params{flags_.data(), static_cast<std::byte*>(flags_.data()) + offsetof(Flags, gave_up), 10'000'000'000};
        launch(*context_, module_.function("hold", 0), {{blocks, 1, 1}, 32, 0}, std::as_bytes(std::span(&params, 1)), stream_.get());
    }
    /// Lets the blocks go when all earlier work on `stream` has been done.
    void let_go(const TestStream& stream) const {
        const auto address = reinterpret_cast<CUdeviceptr>(flags_.data());
        const ContextScope scope(*context_);
        context_->driver().check(context_->functions().cuMemsetD8Async(address, 1, 1, stream.get()), "cuMemsetD8Async");
    }
    /// Blocks that waited in vain.
    [[nodiscard]] unsigned gave_up() const {
        stream_.wait();
        Flags flags;
        flags_.download(&flags, sizeof(flags));
        return flags.gave_up;
    }

private:
    static std::vector<std::byte> compiled() {
        const std::vector<KernelEntry> kernels = {{"hold", 32, 0}};
        const std::string arch = CudaDriver::load()->device(0).gpu.arch;
        return Nvrtc::load()->compile(kHoldSource, {}, {"--gpu-architecture=" + arch, "--std=c++17"}, kernels).cubin;
    }

    std::shared_ptr<const CudaContext> context_;
    CudaModule module_;
    TestStream stream_;
    Buffer flags_;
};

constexpr const char* kInvariantLayer = "D=512,V=33001,dtype=bf16,batch_invariant";

struct Case {
    const char* spec;
    std::int64_t tokens;
    std::optional<RetainedPlace> place;
    const char* name;
};

class GpuBesideForeignKernel : public testing::TestWithParam<Case> {};

TEST_P(GpuBesideForeignKernel, KernelThatWaitsForBackward_BothEndAndBitsAreTheSame) {
    FLCE_REQUIRE_GPU();
    const Case& c = GetParam();
    const auto kernel = layer_kernel(c.spec);
    Layer layer(*kernel, c.tokens, c.place);
    if (c.place && !layer.retains()) GTEST_SKIP() << "this GPU's path retains nothing";
    layer.spoil();
    layer.run({});
    synchronize(kFirstGpu);
    const auto expected = layer.results();
    ForeignKernel foreign;
    const TestStream stream(CudaDriver::load()->context(0));
    for (const unsigned blocks : {1U, 8U, 24U, 60U}) {
        for (int round = 0; round < 3; ++round) {
            layer.spoil();
            synchronize(kFirstGpu);
            foreign.start(blocks);
            layer.run({stream.get()});
            foreign.let_go(stream);
            stream.wait();
            ASSERT_EQ(foreign.gave_up(), 0U) << blocks << " blocks: backward waited for them";
            ASSERT_EQ(layer.results() == expected, true) << blocks << " blocks";
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Plans, GpuBesideForeignKernel,
                         testing::Values(Case{kLayer, 5000, std::nullopt, "Recomputed"},
                                         Case{kJoinedLayer, kJoinedTokens, std::nullopt, "Joined"},
                                         Case{kJoinedLayerInParts, kJoinedTokens, std::nullopt, "JoinedInParts"},
                                         Case{kJoinedLayer, 300, std::nullopt, "ChunkByChunk"},
                                         Case{kJoinedLayer, 64, std::nullopt, "FewTokens"},
                                         Case{kInvariantLayer, 5000, std::nullopt, "BatchInvariant"},
                                         Case{kLayer, 5000, RetainedPlace::grad_weight, "ExponentialsInGradWeight"},
                                         Case{kLayer, 5000, RetainedPlace::own, "ExponentialsApart"}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace flce
