// A shard's kernel set with a driver that records: three passes, each of which launches what its program says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "flce/error.hpp"
#include "generator/cuda_program.hpp"
#include "generator/shard_layout.hpp"
#include "runtime/cuda/cuda_kernel.hpp"
#include "tests/cudart/fake_driver.hpp"
#include "tests/support/gpu.hpp"
#include "tests/support/interpreter.hpp"

namespace flce::shard_kernel {
namespace {

using test::FakeGpu;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr DeviceRef kGpu{DeviceKind::cuda, 0};
constexpr std::int64_t kTokens = 40;
constexpr std::int64_t kShards = 3;

/// Addresses that nothing dereferences.
void* at(std::int64_t region) { return reinterpret_cast<void*>((region + 1) << 42); }

BuildRequest request() {
    BuildRequest request;
    request.spec = parse_spec("D=64,V=600,whole_vocab_size=1000,dtype=bf16");
    request.device = describe_device("a100");
    request.plan = choose_plan(request.spec, request.device);
    request.device_ref = kGpu;
    return request;
}

struct Call {
    std::int64_t classes;
    std::int64_t fields;
    Workspace workspace{at(16), std::size_t{1} << 40};
    TensorView hidden = TensorView::matrix(at(0), ScalarType::bf16, kTokens, 64, kGpu);
    TensorView weight = TensorView::matrix(at(1), ScalarType::bf16, classes, 64, kGpu);
    TensorView target = TensorView::vector(at(2), ScalarType::int64, kTokens, kGpu);
    TensorView lse = TensorView::vector(at(4), ScalarType::fp32, kTokens, kGpu);

    [[nodiscard]] ForwardArgs forward() const {
        return {.hidden = hidden,
                .weight = weight,
                .target = target,
                .vocab_start = 400,
                .partial_sums = TensorView::matrix(at(3), ScalarType::fp32, fields, kTokens, kGpu)};
    }
    [[nodiscard]] MergeArgs merge() const {
        return {.all_partial_sums = TensorView::matrix(at(5), ScalarType::fp32, kShards * fields, kTokens, kGpu),
                .target = target,
                .loss = TensorView::scalar(at(6), ScalarType::fp32, kGpu),
                .lse = lse};
    }
    [[nodiscard]] BackwardArgs backward(BackwardStage stage) const {
        return {.hidden = hidden,
                .weight = weight,
                .target = target,
                .lse = lse,
                .grad_hidden = TensorView::matrix(at(7), ScalarType::bf16, kTokens, 64, kGpu),
                .grad_weight = TensorView::matrix(at(8), ScalarType::bf16, classes, 64, kGpu),
                .vocab_start = 400,
                .stage = stage};
    }
};

/// The kernels that `pass` launches.
template <class Run>
std::vector<std::string> launched(FakeGpu& gpu, const Run& pass) {
    gpu.launches.clear();
    gpu.memsets.clear();
    pass();
    std::vector<std::string> names;
    for (const FakeGpu::Launch& launch : gpu.launches) names.push_back(launch.kernel);
    return names;
}

/// Tells the fake GPU what a real one reads from the cubin.
void learn_param_bytes(FakeGpu& gpu, const std::vector<Statement>& body, const CudaProgram& program) {
    for (const Statement& statement : body) {
        if (const auto* launch = std::get_if<Launch>(&statement.value)) {
            gpu.param_bytes[program.kernels.at(static_cast<std::size_t>(launch->kernel)).name] = launch->param_bytes;
        } else if (const auto* loop = std::get_if<Loop>(&statement.value)) {
            learn_param_bytes(gpu, loop->body, program);
        } else if (const auto* branch = std::get_if<If>(&statement.value)) {
            learn_param_bytes(gpu, branch->then, program);
        }
    }
}

TEST(ShardKernel, ThreePasses_LaunchTheirKernels) {
    FLCE_REQUIRE_NVRTC();
    FakeGpu gpu;
    ArtifactCache cache({});
    const BuildRequest asked = request();
    const auto kernel = make_cuda_kernel(asked, cache, *FakeGpu::driver());
    const CudaProgram program = generate_cuda(asked.spec, asked.device, asked.plan);
    for (const LaunchProgram* pass : {&program.forward, &program.merge, &program.backward}) learn_param_bytes(gpu, pass->body, program);
    ASSERT_EQ(kernel->partial_sum_fields(), shard_fields(asked.spec).count);
    const Call call{600, kernel->partial_sum_fields()};
    EXPECT_THAT(launched(gpu, [&] { kernel->forward(call.forward(), call.workspace); }), ElementsAre("flce_forward", "flce_shard_sums"));
    EXPECT_THAT(launched(gpu, [&] { kernel->merge(call.merge(), call.workspace); }), ElementsAre("flce_merge_shards"));
    const auto backward = [&](BackwardStage stage) { return [&, stage] { kernel->backward(call.backward(stage), call.workspace); }; };
    EXPECT_THAT(launched(gpu, backward(BackwardStage::whole)),
                ElementsAre("flce_row_coefficients", "flce_dlogits", "flce_grad_weight", "flce_grad_hidden"));
    EXPECT_EQ(launched(gpu, backward(BackwardStage::until_grad_hidden)).size(), 4U);
    EXPECT_TRUE(launched(gpu, backward(BackwardStage::rest)).empty());
    // A rank that has no class.
    const Call none{0, call.fields};
    EXPECT_THAT(launched(gpu, [&] { kernel->forward(none.forward(), none.workspace); }), ElementsAre("flce_shard_sums"));
    EXPECT_THAT(launched(gpu, [&] { kernel->backward(none.backward(BackwardStage::whole), none.workspace); }),
                ElementsAre("flce_row_coefficients"));
    ASSERT_EQ(gpu.memsets.size(), 1U);
    EXPECT_EQ(gpu.memsets[0].bytes, std::size_t{kTokens * 64 * 2}) << "its grad_hidden is 0";

    gpu.launches.clear();
    gpu.fail_launch = 0;
    try {
        kernel->merge(call.merge(), call.workspace);
        FAIL() << "no error";
    } catch (const DeviceError& error) {
        EXPECT_THAT(error.what(), HasSubstr("in the merge pass"));
    }
}

}  // namespace
}  // namespace flce::shard_kernel
