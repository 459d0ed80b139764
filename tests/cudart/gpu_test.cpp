// On a real GPU: modules, launches, streams, graphs.
#include "tests/support/gpu.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "flce/buffer.hpp"
#include "flce/recording.hpp"
#include "runtime/cuda/driver.hpp"

namespace flce {
namespace {

using testing::HasSubstr;

constexpr DeviceRef kFirstGpu{DeviceKind::cuda, 0};
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

/// A stream that does not wait for the default stream.
class TestStream {
public:
    explicit TestStream(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {
        const ContextScope scope(*context_);
        context_->driver().check(context_->functions().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    }
    ~TestStream() { context_->functions().cuStreamDestroy(stream_); }
    TestStream(const TestStream&) = delete;
    TestStream& operator=(const TestStream&) = delete;
    [[nodiscard]] CUstream get() const { return stream_; }
    void wait() const { context_->driver().check(context_->functions().cuStreamSynchronize(stream_), "cuStreamSynchronize"); }

private:
    std::shared_ptr<const CudaContext> context_;
    CUstream stream_ = nullptr;
};

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

/// A layer's tensors on the GPU.
class Layer {
public:
    /// `lends`: exponentials wait for backward in grad_weight's memory.
    explicit Layer(const Kernel& kernel, std::int64_t tokens = 300, bool lends = false)
        : kernel_(kernel),
          tokens_(tokens),
          hidden_(uploaded(random_bf16(tokens * hidden_size(), 1))),
          weight_(uploaded(random_bf16(vocab_size() * hidden_size(), 2))),
          target_(uploaded(targets())),
          loss_(kFirstGpu, 4),
          lse_(kFirstGpu, static_cast<std::size_t>(tokens) * 4),
          grad_hidden_(kFirstGpu, hidden_.bytes()),
          grad_weight_(kFirstGpu, weight_.bytes()) {
        if (lends) retained_ = {grad_weight_.data(), kernel.retained_bytes(tokens, RetainedPlace::grad_weight)};
        scratch_ = Buffer(kFirstGpu, kernel.workspace_bytes(tokens));
    }

    [[nodiscard]] bool lends() const { return retained_.bytes > 0; }

    void run(Stream stream) const {
        const auto hidden = matrix(hidden_, tokens_);
        const auto weight = matrix(weight_, vocab_size());
        const auto target = TensorView::vector(target_.data(), ScalarType::int64, tokens_, kFirstGpu);
        const auto lse = TensorView::vector(lse_.data(), ScalarType::fp32, tokens_, kFirstGpu);
        const auto loss = TensorView::scalar(loss_.data(), ScalarType::fp32, kFirstGpu);
        const Workspace workspace{scratch_.data(), scratch_.bytes()};
        kernel_.forward({.hidden = hidden, .weight = weight, .target = target, .loss = loss, .lse = lse, .retained = retained_}, workspace,
                        stream);
        kernel_.backward({.hidden = hidden,
                          .weight = weight,
                          .target = target,
                          .lse = lse,
                          .grad_hidden = matrix(grad_hidden_, tokens_),
                          .grad_weight = matrix(grad_weight_, vocab_size()),
                          .retained = retained_},
                         workspace, stream);
    }

    void spoil() {
        for (Buffer* buffer : {&loss_, &lse_, &grad_hidden_, &grad_weight_, &scratch_}) buffer->fill(std::byte{0xff});
    }

    [[nodiscard]] float loss() const {
        float value = 0;
        loss_.download(&value, sizeof(value));
        return value;
    }
    [[nodiscard]] std::vector<std::byte> results() const {
        std::vector<std::byte> all;
        for (const Buffer* buffer : {&loss_, &lse_, &grad_hidden_, &grad_weight_}) {
            std::vector<std::byte> bytes(buffer->bytes());
            buffer->download(bytes.data(), bytes.size());
            all.insert(all.end(), bytes.begin(), bytes.end());
        }
        return all;
    }

private:
    [[nodiscard]] std::int64_t hidden_size() const { return kernel_.spec().hidden_size; }
    [[nodiscard]] std::int64_t vocab_size() const { return kernel_.spec().vocab_size; }
    [[nodiscard]] TensorView matrix(const Buffer& buffer, std::int64_t rows) const {
        return TensorView::matrix(buffer.data(), ScalarType::bf16, rows, hidden_size(), kFirstGpu);
    }
    static std::vector<std::uint16_t> random_bf16(std::int64_t count, unsigned seed) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
        for (std::uint16_t& value : values) {
            const float number = normal(random) * 0.3F;
            std::uint32_t bits = 0;
            std::memcpy(&bits, &number, sizeof(bits));
            value = static_cast<std::uint16_t>(bits >> 16);
        }
        return values;
    }
    template <typename T>
    static Buffer uploaded(const std::vector<T>& values) {
        Buffer buffer(kFirstGpu, values.size() * sizeof(T));
        buffer.upload(values.data(), buffer.bytes());
        return buffer;
    }
    [[nodiscard]] std::vector<std::int64_t> targets() const {
        std::vector<std::int64_t> values(static_cast<std::size_t>(tokens_));
        for (std::int64_t i = 0; i < tokens_; ++i) values[static_cast<std::size_t>(i)] = i % 7 == 0 ? -100 : (i * 37) % vocab_size();
        return values;
    }

    const Kernel& kernel_;
    std::int64_t tokens_;
    Buffer hidden_;
    Buffer weight_;
    Buffer target_;
    Buffer loss_;
    Buffer lse_;
    Buffer grad_hidden_;
    Buffer grad_weight_;
    Buffer scratch_;
    Retained retained_;
};

// Of some hundred tokens; on a GPU with cuda_sm90a all chunks of the others' backward are one launch, whose blocks wait for each other.
constexpr const char* kLayer = "D=512,V=33001,dtype=bf16";
constexpr const char* kJoinedLayer = "D=512,V=7001,dtype=bf16";
constexpr const char* kJoinedLayerInParts = "D=512,V=9001,dtype=bf16";  // grad_hidden's sum
constexpr int kJoinedTokens = 600;

std::shared_ptr<const Kernel> layer_kernel(const char* spec = "D=64,V=1000,dtype=bf16") {
    BuildRequest request;
    request.spec = parse_spec(spec);
    request.device = cuda_devices().at(0);
    request.plan = choose_plan(request.spec, request.device);
    request.device_ref = kFirstGpu;
    ArtifactCache cache({});
    return make_cuda_kernel(request, cache);
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
    Layer layer(*kernel, 500, /*lends=*/true);
    if (!layer.lends()) GTEST_SKIP() << "this GPU's path retains nothing";
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
        Layer layer(*kernel, kJoinedTokens, lends);
        Layer other(*other_kernel, 700);
        if (lends && !layer.lends()) continue;
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

void expect_that_two_streams_end(const char* spec, bool lends) {
    const auto kernel = layer_kernel(spec);
    Layer one(*kernel, kJoinedTokens, lends);
    Layer two(*kernel, kJoinedTokens, lends);
    if (lends && !one.lends()) GTEST_SKIP() << "this GPU's path retains nothing";
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
    expect_that_two_streams_end(kLayer, true);
}

TEST(GpuKernel, JoinedChunksOnTwoStreams_NeitherWaitsForEver) {
    FLCE_REQUIRE_GPU();
    expect_that_two_streams_end(kJoinedLayer, false);
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
