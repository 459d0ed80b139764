// A layer on a real GPU: its tensors, and a pass over them on any stream.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "flce/buffer.hpp"
#include "flce/flce.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/planner.hpp"
#include "runtime/cuda/cuda_kernel.hpp"
#include "runtime/cuda/driver.hpp"

namespace flce {

inline constexpr DeviceRef kFirstGpu{DeviceKind::cuda, 0};

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

/// A layer's tensors on the GPU.
class Layer {
public:
    /// `place`: where exponentials wait for backward.
    explicit Layer(const Kernel& kernel, std::int64_t tokens = 300, std::optional<RetainedPlace> place = std::nullopt)
        : kernel_(kernel),
          tokens_(tokens),
          hidden_(uploaded(random_bf16(tokens * hidden_size(), 1))),
          weight_(uploaded(random_bf16(vocab_size() * hidden_size(), 2))),
          target_(uploaded(targets())),
          loss_(kFirstGpu, 4),
          lse_(kFirstGpu, static_cast<std::size_t>(tokens) * 4),
          grad_hidden_(kFirstGpu, hidden_.bytes()),
          grad_weight_(kFirstGpu, weight_.bytes()) {
        if (place) {
            const std::size_t bytes = kernel.retained_bytes(tokens, *place);
            if (*place == RetainedPlace::own) own_ = Buffer(kFirstGpu, bytes);
            retained_ = {*place == RetainedPlace::own ? own_.data() : grad_weight_.data(), bytes, *place};
        }
        scratch_ = Buffer(kFirstGpu, kernel.workspace_bytes(tokens));
    }

    [[nodiscard]] bool retains() const { return retained_.bytes > 0; }

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
    Buffer own_;
    Retained retained_;
};

// Layers for some hundred tokens; on a GPU with cuda_sm90a all chunks of backward are one launch in the joined layers, and its tiles wait
// for each other.
inline constexpr const char* kLayer = "D=512,V=33001,dtype=bf16";
inline constexpr const char* kJoinedLayer = "D=512,V=7001,dtype=bf16";
inline constexpr const char* kJoinedLayerInParts = "D=512,V=9001,dtype=bf16";  // grad_hidden's sum
inline constexpr int kJoinedTokens = 600;

/// With the cost model's plan, or that of the path which FLCE_TEST_PATH names, where it has one.
inline std::shared_ptr<const Kernel> layer_kernel(const char* spec = "D=64,V=1000,dtype=bf16") {
    BuildRequest request;
    request.spec = parse_spec(spec);
    request.device = cuda_devices().at(0);
    request.plan = choose_plan(request.spec, request.device);
    const char* const wanted = std::getenv("FLCE_TEST_PATH");
    for (const CudaPath* path : cuda_paths()) {
        if (wanted == nullptr || path->name != wanted) continue;
        const std::vector<Plan> plans = path_plans(request.spec, request.device, path->id);
        if (!plans.empty()) request.plan = plans.front();
    }
    request.device_ref = kFirstGpu;
    ArtifactCache cache({});
    return make_cuda_kernel(request, cache);
}

}  // namespace flce
