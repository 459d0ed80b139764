// A backend without compilers: kernels that record the slots they are given.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "generator/call_slots.hpp"
#include "runtime/session.hpp"

namespace flce::test {

class RecordingKernel final : public Kernel {
public:
    RecordingKernel(Spec spec, Device device = {}, Plan plan = {}, DeviceRef ref = {}, Reasons reasons = {})
        : Kernel(std::move(spec), std::move(device), std::move(plan), ref, std::move(reasons)) {}

    /// Slots of the last call that passed the checks.
    mutable CallSlots slots{};
    mutable int runs = 0;
    mutable bool ran_backward = false;
    mutable void* stream = nullptr;
    std::int64_t retained_bytes_per_token = 0;
    static constexpr std::int64_t kForwardBytesPerToken = 256;
    static constexpr std::int64_t kBackwardBytesPerToken = 512;

    [[nodiscard]] std::int64_t slot(Slot which) const { return slots[static_cast<std::size_t>(which)]; }

private:
    void run(Pass pass, const std::int64_t* values, Stream on) const override {
        std::copy_n(values, kSlotCount, slots.begin());
        ++runs;
        ran_backward = pass == Pass::backward;
        stream = on.handle;
    }
    [[nodiscard]] std::int64_t workspace_bytes_of(Pass pass, std::int64_t num_tokens) const override {
        return num_tokens * (pass == Pass::backward ? kBackwardBytesPerToken : kForwardBytesPerToken);
    }
    [[nodiscard]] std::int64_t retained_bytes_of(std::int64_t num_tokens, RetainedPlace, std::int64_t) const override {
        return num_tokens * retained_bytes_per_token;
    }
};

struct FakeMachine {
    std::atomic<int> made{0};
    std::atomic<int> compiled{0};
    std::atomic<int> failures_left{0};
    int build_ms = 0;
    std::vector<Device> gpus;
    bool nvrtc = true;
    bool cublaslt = true;
    std::string cpu = "x86-64-v3";
    int driver_version = 13000;
    std::string compilers = "NVRTC 13.0";
    std::atomic<int> compared{0};
    std::function<std::vector<Difference>()> compare;  // differences of a GPU's first kernels; none: they agree
    std::vector<BuildRequest> requests;                // requests of prewarm; single-threaded

    [[nodiscard]] Backends backends() {
        const Backends::Make make = [this](const BuildRequest& request, ArtifactCache& cache) {
            (void)cache.get_or_create(key(request), [&] {
                ++made;
                std::this_thread::sleep_for(std::chrono::milliseconds(build_ms));
                if (failures_left.fetch_sub(1) > 0) throw CompileError("the compiler is ill", "line 1: ill", "");
                return Artifact{"{}", std::vector<std::byte>(16)};
            });
            return std::make_shared<RecordingKernel>(request.spec, request.device, request.plan, request.device_ref, request.reasons);
        };
        const Backends::Compile compile = [this](const BuildRequest& request, ArtifactCache& cache) {
            (void)cache.get_or_create(key(request), [&] { return ++compiled, Artifact{"{}", std::vector<std::byte>(16)}; });
            requests.push_back(request);
        };
        return {.make_cpu = make,
                .make_cuda = make,
                .compile_cpu = compile,
                .compile_cuda = compile,
                .native_cpu = [this] { return describe_device(cpu); },
                .cuda_devices =
                    [this](std::string* why) {
                        if (gpus.empty()) *why = "there is no driver";
                        return gpus;
                    },
                .has_nvrtc =
                    [this](std::string* why) {
                        if (!nvrtc) *why = "NVRTC was not found";
                        return nvrtc;
                    },
                .has_cublaslt =
                    [this](std::string* why) {
                        if (!cublaslt) *why = "cuBLASLt was not found";
                        return cublaslt;
                    },
                .cuda_driver_version = [this] { return driver_version; },
                .cuda_compilers = [this](bool library) { return compilers + (library ? " library" : ""); },
                .compare =
                    [this](const Kernel&, const Kernel&) {
                        ++compared;
                        return compare ? compare() : std::vector<Difference>{};
                    }};
    }

    static CacheKey key(const BuildRequest& request) {
        return KeyBuilder("fake").add("spec", request.spec.text()).add("plan", request.plan.text()).finish();
    }
};

inline Spec small_spec() { return parse_spec("D=8,V=50,dtype=fp32"); }

}  // namespace flce::test
