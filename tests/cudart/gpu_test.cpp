// On a real GPU: modules, launches, streams, graphs.
#include "tests/support/gpu.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "flce/recording.hpp"
#include "generator/planner.hpp"
#include "tests/cudart/gpu_layer.hpp"

namespace flce {
namespace {

using testing::HasSubstr;

constexpr const char* kScaleSource = R"(
struct Params { float* data; long long count; float factor; };
extern "C" __global__ void scale(const __grid_constant__ Params p) {
    extern __shared__ float staged[];
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < p.count) {
        staged[threadIdx.x] = p.data[i] * p.factor;
        p.data[i] = staged[threadIdx.x];
    }
}
)";
struct ScaleParams {
    void* data;
    long long count;
    float factor;
};

std::vector<std::byte> compile_scale(const std::string& arch) {
    const std::vector<KernelEntry> kernels = {{"scale", 128, 0}};
    return Nvrtc::load()->compile(kScaleSource, {}, {"--gpu-architecture=" + arch, "--std=c++17"}, kernels).cubin;
}

TEST(GpuModule, Kernel_RunsOnItsStreamWithItsAttributes) {
    FLCE_REQUIRE_GPU();
    const auto driver = CudaDriver::load();
    const Device device = driver->device(0);
    const auto context = driver->context(0);
    const CudaModule module(context, compile_scale(device.gpu.arch));
    const CUfunction function = module.function("scale", 65536);
    const FunctionUse use = module.use(function, 128, 65536);
    EXPECT_GT(use.registers, 0);
    EXPECT_GE(use.blocks_per_sm, 1);
    const TestStream stream(context);
    std::vector<float> numbers(1000, 1.5F);
    Buffer buffer(kFirstGpu, numbers.size() * sizeof(float));
    buffer.upload(numbers.data(), buffer.bytes());
    const ScaleParams params{buffer.data(), 1000, 2.0F};
    const auto bytes = std::as_bytes(std::span(&params, 1));
    launch(*context, function, {{8, 1, 1}, 128, 65536}, bytes, stream.get());
    launch(*context, function, {{8, 1, 1}, 128, 512, 1, device.gpu.compute_capability >= 90}, bytes, stream.get());
    int doublings = 2;
    if (device.gpu.compute_capability >= 90) {
        launch(*context, function, {{8, 1, 1}, 128, 512, 2}, bytes, stream.get());
        ++doublings;
    }
    stream.wait();
    buffer.download(numbers.data(), buffer.bytes());
    for (const float number : numbers) ASSERT_EQ(number, std::ldexp(1.5F, doublings));
}

TEST(GpuModule, CubinOfAnotherArchitecture_IsADeviceError) {
    FLCE_REQUIRE_GPU();
    const auto driver = CudaDriver::load();
    const auto other = compile_scale(driver->device(0).gpu.compute_capability >= 90 ? "sm_80" : "sm_90a");
    try {
        const CudaModule module(driver->context(0), other);
        FAIL() << "loaded";
    } catch (const DeviceError& error) {
        EXPECT_THAT(error.what(), HasSubstr("cuModuleLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU"));
    }
}

TEST(GpuModule, TooMuchSharedMemory_IsADeviceErrorWithTheNumber) {
    FLCE_REQUIRE_GPU();
    const auto driver = CudaDriver::load();
    const CudaModule module(driver->context(0), compile_scale(driver->device(0).gpu.arch));
    try {
        (void)module.function("scale", 1 << 20);
        FAIL() << "accepted";
    } catch (const DeviceError& error) {
        EXPECT_THAT(error.what(), HasSubstr("1048576 bytes of dynamic shared memory"));
    }
}

TEST(GpuKernel, AnyStreamAndGraph_GiveTheSameBits) {
    FLCE_REQUIRE_GPU();
    const auto kernel = layer_kernel();
    const auto context = CudaDriver::load()->context(0);
    Layer layer(*kernel);

    layer.spoil();
    layer.run({});
    synchronize(kFirstGpu);
    const auto expected = layer.results();
    EXPECT_GT(layer.loss(), 5.0F);  // about ln 1000 plus half the variance of a logit
    EXPECT_LT(layer.loss(), 9.0F);

    const TestStream stream(context);
    layer.spoil();
    layer.run({stream.get()});
    stream.wait();
    EXPECT_EQ(layer.results(), expected);

    layer.spoil();
    const Recording graph(kFirstGpu, [&](Stream captured) { layer.run(captured); });
    EXPECT_NE(layer.results(), expected);  // captured, not run
    for (int replay = 0; replay < 2; ++replay) {
        layer.spoil();
        graph.submit();
        synchronize(kFirstGpu);
        EXPECT_EQ(layer.results(), expected);
    }
}

TEST(GpuKernel, ExponentialsInGradWeight_AGraphGivesTheSameBits) {
    FLCE_REQUIRE_GPU();
    const auto kernel = layer_kernel(kLayer);
    Layer layer(*kernel, 500, RetainedPlace::grad_weight);
    if (!layer.retains()) GTEST_SKIP() << "this GPU's path retains nothing";
    layer.run({});
    synchronize(kFirstGpu);
    const auto expected = layer.results();
    const Recording graph(kFirstGpu, [&](Stream captured) {
        for (int i = 0; i < 3; ++i) layer.run(captured);
    });
    layer.spoil();
    Timer timer(kFirstGpu);
    timer.start(graph.stream());
    graph.submit();
    EXPECT_GT(timer.stop_ms(graph.stream()), 0.0);
    EXPECT_EQ(layer.results() == expected, true);
}

TEST(GpuRecording, WorkThatFails_LeavesNothingBehind) {
    FLCE_REQUIRE_GPU();
    const auto context = CudaDriver::load()->context(0);
    EXPECT_THROW(Recording(kFirstGpu, [](Stream) { throw ArgumentError("of the work"); }), ArgumentError);
    const auto forbidden = [&](Stream stream) {
        const auto handle = static_cast<CUstream>(stream.handle);
        context->driver().check(context->functions().cuStreamSynchronize(handle), "cuStreamSynchronize");
    };
    EXPECT_THROW(Recording(kFirstGpu, forbidden), DeviceError);
    const auto kernel = layer_kernel();
    Layer layer(*kernel);
    layer.spoil();
    const Recording graph(kFirstGpu, [&](Stream captured) { layer.run(captured); });
    graph.submit();
    synchronize(kFirstGpu);
    EXPECT_GT(layer.loss(), 5.0F);
}

TEST(GpuKernel, HundredRunsBesideOtherWork_GiveTheSameBits) {
    FLCE_REQUIRE_GPU();
    const auto other_kernel = layer_kernel("D=264,V=9001,dtype=bf16");
    const auto context = CudaDriver::load()->context(0);
    for (const auto& [spec, lends] : {std::pair{kLayer, false}, {kLayer, true}, {kJoinedLayer, false}, {kJoinedLayerInParts, false}}) {
        const auto kernel = layer_kernel(spec);
        Layer layer(*kernel, kJoinedTokens, lends ? std::optional(RetainedPlace::grad_weight) : std::nullopt);
        Layer other(*other_kernel, 700);
        if (lends && !layer.retains()) continue;
        layer.spoil();
        layer.run({});
        synchronize(kFirstGpu);
        const auto expected = layer.results();
        const TestStream stream(context);
        const TestStream beside(context);
        for (int i = 0; i < 100; ++i) {
            for (int more = 0; more < 2 + i % 3; ++more) other.run({beside.get()});
            layer.spoil();
            layer.run({stream.get()});
            other.run({beside.get()});
            stream.wait();
            ASSERT_EQ(layer.results() == expected, true) << spec << ", run " << i << (lends ? ", exponentials in grad_weight" : "");
        }
        beside.wait();
    }
}

void expect_that_two_streams_end(const char* spec, std::optional<RetainedPlace> place) {
    const auto kernel = layer_kernel(spec);
    Layer one(*kernel, kJoinedTokens, place);
    Layer two(*kernel, kJoinedTokens, place);
    if (place && !one.retains()) GTEST_SKIP() << "this GPU's path retains nothing";
    one.run({});
    synchronize(kFirstGpu);
    const auto expected = one.results();
    const auto context = CudaDriver::load()->context(0);
    const TestStream first(context);
    const TestStream second(context);
    for (int round = 0; round < 20; ++round) {
        for (int i = 0; i < 10; ++i) {
            one.run({first.get()});
            two.run({second.get()});
        }
        first.wait();
        second.wait();
        ASSERT_EQ(one.results() == expected, true) << round;
        ASSERT_EQ(two.results() == expected, true) << round;
    }
}

TEST(GpuKernel, ExponentialsInTwoGradientsOnTwoStreams_NeitherWaitsForEver) {
    FLCE_REQUIRE_GPU();
    expect_that_two_streams_end(kLayer, RetainedPlace::grad_weight);
}

TEST(GpuKernel, JoinedChunksOnTwoStreams_NeitherWaitsForEver) {
    FLCE_REQUIRE_GPU();
    expect_that_two_streams_end(kJoinedLayer, std::nullopt);
}

TEST(GpuKernel, JoinedChunks_AGraphGivesTheSameBits) {
    FLCE_REQUIRE_GPU();
    const auto kernel = layer_kernel(kJoinedLayer);
    Layer layer(*kernel, kJoinedTokens);
    layer.run({});
    synchronize(kFirstGpu);
    const auto expected = layer.results();
    const Recording graph(kFirstGpu, [&](Stream captured) { layer.run(captured); });
    for (int replay = 0; replay < 3; ++replay) {
        layer.spoil();
        graph.submit();
        synchronize(kFirstGpu);
        EXPECT_EQ(layer.results() == expected, true);
    }
}

TEST(GpuKernel, FirstLaunchInACapture_IsAllowed) {
    FLCE_REQUIRE_GPU();
    // Nothing has run yet, so anything that the driver puts off until a first launch would happen inside the capture.
    const auto kernel = layer_kernel();
    Layer layer(*kernel);
    layer.spoil();
    const Recording graph(kFirstGpu, [&](Stream captured) { layer.run(captured); });
    graph.submit();
    synchronize(kFirstGpu);
    EXPECT_GT(layer.loss(), 5.0F);
    EXPECT_LT(layer.loss(), 9.0F);
}

TEST(GpuKernel, AnotherContextCurrent_IsLeftAsItWas) {
    FLCE_REQUIRE_GPU();
    const auto kernel = layer_kernel();
    const auto context = CudaDriver::load()->context(0);
    Layer layer(*kernel);
    CUcontext before = nullptr;
    context->functions().cuCtxGetCurrent(&before);
    layer.run({});
    synchronize(kFirstGpu);
    CUcontext after = nullptr;
    context->functions().cuCtxGetCurrent(&after);
    EXPECT_EQ(before, after);
}

}  // namespace
}  // namespace flce
