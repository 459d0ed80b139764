// CUDA kernels end to end on the host side: generated, compiled, cached, loaded and launched, with a driver that records.
#include "runtime/cuda/cuda_kernel.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <span>
#include <thread>

#include "cache/disk_store.hpp"
#include "flce/error.hpp"
#include "generator/cuda_program.hpp"
#include "runtime/host/host_code.hpp"
#include "tests/cudart/fake_driver.hpp"
#include "tests/support/gpu.hpp"
#include "tests/support/interpreter.hpp"
#include "tests/support/level.hpp"

namespace flce {
namespace {

using test::interpret;
using test::InterpretedLaunch;
using test::InterpretedMap;

namespace fs = std::filesystem;
using test::FakeGpu;
using testing::HasSubstr;

constexpr std::int64_t kHidden = 64;
constexpr std::int64_t kVocab = 1000;
constexpr std::int64_t kSmallSetUnits = 8;                       // seven GEMM kernels, and the small ones together
constexpr std::int64_t kSmallSetArtifacts = kSmallSetUnits + 1;  // and this machine's launchers
constexpr DeviceRef kGpu{DeviceKind::cuda, 0};

BuildRequest request_for(const std::string& spec_text, const Device& device) {
    BuildRequest request;
    request.spec = parse_spec(spec_text);
    request.device = device;
    request.plan = choose_plan(request.spec, device);
    request.device_ref = kGpu;
    request.reasons = [] { return std::vector<std::string>{"because"}; };
    return request;
}

class CacheFolder {
public:
    CacheFolder() {
        std::string name = (fs::temp_directory_path() / "flce-test-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temp folder");
        path_ = name;
    }
    ~CacheFolder() { fs::remove_all(path_); }
    [[nodiscard]] const fs::path& path() const { return path_; }

private:
    fs::path path_;
};

/// One compile for all tests of a process, and where FLCE_TEST_CACHE names a folder for those of all processes.
ArtifactCache& shared_cache() {
    static const CacheFolder own;
    const char* folder = std::getenv("FLCE_TEST_CACHE");
    static ArtifactCache cache({.directory = folder != nullptr && *folder != '\0' ? fs::path(folder) : own.path()});
    return cache;
}

BuildRequest small_request() { return request_for("D=64,V=1000,dtype=bf16,outputs=loss+lse", describe_device("NVIDIA H200")); }

/// Addresses that nothing dereferences: the fake GPU has no memory.
struct Addresses {
    static void* at(std::int64_t region) { return reinterpret_cast<void*>((region + 1) << 42); }

    std::int64_t num_tokens;
    std::int64_t vocab_size = kVocab;
    TensorView hidden = TensorView::matrix(at(0), ScalarType::bf16, num_tokens, kHidden, kGpu);
    TensorView weight = TensorView::matrix(at(1), ScalarType::bf16, vocab_size, kHidden, kGpu);
    TensorView target = TensorView::vector(at(2), ScalarType::int64, num_tokens, kGpu);
    TensorView loss = TensorView::scalar(at(3), ScalarType::fp32, kGpu);
    TensorView lse = TensorView::vector(at(4), ScalarType::fp32, num_tokens, kGpu);
    TensorView grad_hidden = TensorView::matrix(at(5), ScalarType::bf16, num_tokens, kHidden, kGpu);
    TensorView grad_weight = TensorView::matrix(at(6), ScalarType::bf16, vocab_size, kHidden, kGpu);
    Workspace workspace{at(16), std::size_t{1} << 40};

    [[nodiscard]] ForwardArgs forward() const { return {.hidden = hidden, .weight = weight, .target = target, .loss = loss, .lse = lse}; }
    [[nodiscard]] BackwardArgs backward() const {
        return {.hidden = hidden, .weight = weight, .target = target, .lse = lse, .grad_hidden = grad_hidden, .grad_weight = grad_weight};
    }
    [[nodiscard]] CallSlots slots(bool backward) const {
        CallSlots slots{};
        const auto set = [&](Slot slot, const void* value) {
            slots[static_cast<std::size_t>(slot)] = reinterpret_cast<std::int64_t>(value);
        };
        slots[static_cast<std::size_t>(Slot::num_tokens)] = num_tokens;
        slots[static_cast<std::size_t>(Slot::target_bits)] = 64;
        slots[static_cast<std::size_t>(Slot::ignore_index)] = -100;
        slots[static_cast<std::size_t>(Slot::reduction)] = static_cast<std::int64_t>(ReductionCode::mean);
        set(Slot::hidden, hidden.data);
        set(Slot::weight, weight.data);
        set(Slot::target, target.data);
        set(Slot::lse, lse.data);
        set(Slot::workspace, workspace.data);
        slots[static_cast<std::size_t>(Slot::workspace_bytes)] = static_cast<std::int64_t>(workspace.bytes);
        if (!backward) set(Slot::loss, loss.data);
        if (backward) set(Slot::grad_hidden, grad_hidden.data);
        if (backward) set(Slot::grad_weight, grad_weight.data);
        return slots;
    }
};

/// The launches and memsets of the fake GPU must be those of the program, in number, order and every byte.
void expect_as_interpreted(const FakeGpu& gpu, const CudaProgram& program, bool backward, const CallSlots& slots, CUstream stream) {
    std::size_t launches = 0;
    std::size_t memsets = 0;
    interpret(
        backward ? program.backward : program.forward, slots,
        [&](const InterpretedLaunch& expected) {
            ASSERT_LT(launches, gpu.launches.size());
            const FakeGpu::Launch& launch = gpu.launches[launches++];
            const KernelEntry& kernel = program.kernels.at(static_cast<std::size_t>(expected.kernel));
            EXPECT_EQ(launch.kernel, kernel.name);
            for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(launch.grid[i], expected.grid[i]);
            EXPECT_EQ(launch.block_threads, kernel.block_threads);
            EXPECT_EQ(launch.dynamic_smem_bytes, kernel.dynamic_smem_bytes);
            EXPECT_EQ(launch.stream, stream);
            std::vector<std::byte> params = expected.params;
            for (const InterpretedMap& map : expected.maps) {
                const cuuint64_t extents[] = {static_cast<cuuint64_t>(map.columns), static_cast<cuuint64_t>(map.rows),
                                              static_cast<cuuint64_t>(map.blocks)};
                const cuuint64_t strides[] = {static_cast<cuuint64_t>(map.row_bytes), static_cast<cuuint64_t>(map.block_bytes)};
                const cuuint32_t box[] = {TensorMapField::kBoxBytes / map.element_bytes, map.box_rows};
                test::fake::write_map(params.data() + map.offset, map.blocks == 0 ? 2 : 3, map.address, extents, strides, box);
            }
            EXPECT_EQ(launch.params, params);
            EXPECT_EQ(launch.current, FakeGpu::primary());
        },
        [&](std::int64_t address, std::int64_t bytes) {
            ASSERT_LT(memsets, gpu.memsets.size());
            EXPECT_EQ(gpu.memsets[memsets].address, static_cast<CUdeviceptr>(address));
            EXPECT_EQ(gpu.memsets[memsets].bytes, static_cast<std::size_t>(bytes));
            EXPECT_EQ(gpu.memsets[memsets++].stream, stream);
        });
    EXPECT_EQ(launches, gpu.launches.size());
    EXPECT_EQ(memsets, gpu.memsets.size());
}

/// Tells the fake GPU what a real one reads from the cubin.
void learn_param_bytes(FakeGpu& gpu, const CudaProgram& program, const LaunchProgram& pass, const CallSlots& slots) {
    interpret(
        pass, slots,
        [&](const InterpretedLaunch& launch) {
            gpu.param_bytes[program.kernels.at(static_cast<std::size_t>(launch.kernel)).name] = launch.params.size();
        },
        [](std::int64_t, std::int64_t) {});
}

TEST(CudaKernel, Passes_LaunchWhatTheProgramSays) {
    FLCE_REQUIRE_NVRTC();
    FakeGpu gpu;
    const BuildRequest request = small_request();
    const auto kernel = make_cuda_kernel(request, shared_cache(), *FakeGpu::driver());
    const CudaProgram program = generate_cuda(request.spec, request.device, request.plan);
    for (const KernelEntry& entry : program.kernels) EXPECT_EQ(gpu.dynamic_smem.at(entry.name), static_cast<int>(entry.dynamic_smem_bytes));
    const auto stream = reinterpret_cast<CUstream>(0x77);
    for (const std::int64_t num_tokens : {0, 1, 127, 5000, 1 << 20}) {
        const Addresses call{num_tokens};
        learn_param_bytes(gpu, program, program.forward, call.slots(false));
        learn_param_bytes(gpu, program, program.backward, call.slots(true));
        gpu.launches.clear();
        gpu.memsets.clear();
        kernel->forward(call.forward(), call.workspace, {stream});
        expect_as_interpreted(gpu, program, false, call.slots(false), stream);
        gpu.launches.clear();
        gpu.memsets.clear();
        kernel->backward(call.backward(), call.workspace, {stream});
        expect_as_interpreted(gpu, program, true, call.slots(true), stream);
        EXPECT_GT(gpu.launches.size(), 0U);
    }
    EXPECT_EQ(gpu.last_module, (std::vector<std::byte>{std::byte{0x7f}, std::byte{'E'}, std::byte{'L'}, std::byte{'F'}}));
    EXPECT_TRUE(gpu.context_stack.empty());
    EXPECT_EQ(gpu.forbidden_calls, 0);
    EXPECT_EQ(kernel->explain().reasons, std::vector<std::string>{"because"});
}

TEST(CudaKernel, Workspace_IsWhatThePlanMayUse) {
    FLCE_REQUIRE_NVRTC();
    FakeGpu gpu;
    const BuildRequest request = small_request();
    const auto kernel = make_cuda_kernel(request, shared_cache(), *FakeGpu::driver());
    for (const std::int64_t num_tokens : {1, 128, 4096, 100000}) {
        const auto bytes = static_cast<std::int64_t>(kernel->workspace_bytes(num_tokens));
        EXPECT_GT(bytes, 0);
        EXPECT_LE(bytes, request.plan.scratch_bytes + 4 * num_tokens * kHidden);
    }
    EXPECT_THROW((void)kernel->workspace_bytes(-1), ArgumentError);
}

TEST(CudaKernel, RetainedMemory_LaunchesWhatTheProgramSays) {
    FLCE_REQUIRE_NVRTC();
    FakeGpu gpu;
    const BuildRequest request = small_request();
    const auto kernel = make_cuda_kernel(request, shared_cache(), *FakeGpu::driver());
    const CudaProgram program = generate_cuda(request.spec, request.device, request.plan);
    const auto stream = reinterpret_cast<CUstream>(0x77);
    for (const std::int64_t num_tokens : {16, 50, 127, 5000}) {
        const std::size_t whole = kernel->retained_bytes(num_tokens);
        const std::size_t lent = kernel->retained_bytes(num_tokens, RetainedPlace::grad_weight);
        EXPECT_GE(whole, static_cast<std::size_t>(2 * num_tokens * kVocab));
        EXPECT_EQ(lent, static_cast<std::size_t>(2 * kVocab * kHidden));
        const Addresses call{num_tokens};
        for (const Retained& retained :
             {Retained{Addresses::at(20), whole}, Retained{Addresses::at(20), whole / 2}, Retained{Addresses::at(20), lent},
              Retained{call.grad_weight.data, lent, RetainedPlace::grad_weight}}) {
            CallSlots slots[2] = {call.slots(false), call.slots(true)};
            for (CallSlots& s : slots) {
                s[static_cast<std::size_t>(Slot::retained)] = reinterpret_cast<std::int64_t>(retained.data);
                s[static_cast<std::size_t>(Slot::retained_bytes)] = static_cast<std::int64_t>(retained.bytes);
                s[static_cast<std::size_t>(Slot::retained_in_grad_weight)] = retained.place == RetainedPlace::grad_weight;
            }
            learn_param_bytes(gpu, program, program.forward, slots[0]);
            learn_param_bytes(gpu, program, program.backward, slots[1]);
            ForwardArgs forward = call.forward();
            BackwardArgs backward = call.backward();
            forward.retained = backward.retained = retained;
            gpu.launches.clear();
            gpu.memsets.clear();
            kernel->forward(forward, call.workspace, {stream});
            expect_as_interpreted(gpu, program, false, slots[0], stream);
            gpu.launches.clear();
            gpu.memsets.clear();
            kernel->backward(backward, call.workspace, {stream});
            expect_as_interpreted(gpu, program, true, slots[1], stream);
        }
    }
}

TEST(CudaKernel, FailedLaunch_NamesTheKernelAndTheResult) {
    FLCE_REQUIRE_NVRTC();
    FakeGpu gpu;
    const auto kernel = make_cuda_kernel(small_request(), shared_cache(), *FakeGpu::driver());
    const Addresses call{100};
    gpu.fail_launch = 0;
    try {
        kernel->forward(call.forward(), call.workspace);
        FAIL() << "no error";
    } catch (const DeviceError& error) {
        EXPECT_THAT(error.what(),
                    HasSubstr("cuLaunchKernel failed: CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure) in the forward pass"));
        EXPECT_THAT(error.what(), HasSubstr("launch " + gpu.launches.at(0).kernel));
        EXPECT_EQ(error.call(), "cuLaunchKernel");
        EXPECT_EQ(error.result(), CUDA_ERROR_LAUNCH_FAILED);
    }
    EXPECT_EQ(gpu.launches.size(), 1U);
    EXPECT_TRUE(gpu.context_stack.empty());
}

TEST(CudaKernel, LastOwner_UnloadsModulesAndReleasesContext) {
    FLCE_REQUIRE_NVRTC();
    FakeGpu gpu;
    std::shared_ptr<const Kernel> kernel;
    {
        ArtifactCache cache({.directory = shared_cache().directory()});
        kernel = make_cuda_kernel(small_request(), cache, *FakeGpu::driver());
    }
    EXPECT_EQ(gpu.modules, kSmallSetUnits);
    EXPECT_EQ(gpu.retained, 1);
    const Addresses call{10};
    kernel->forward(call.forward(), call.workspace);
    kernel.reset();
    EXPECT_EQ(gpu.modules, 0);
    EXPECT_EQ(gpu.retained, 0);
}

TEST(CudaKernel, KernelThatDoesNotFitTheDevice_IsRefusedWhenLoaded) {
    FLCE_REQUIRE_NVRTC();
    FakeGpu gpu;
    gpu.blocks_per_sm = 0;
    EXPECT_THROW((void)make_cuda_kernel(small_request(), shared_cache(), *FakeGpu::driver()), InternalError);
    EXPECT_EQ(gpu.modules, 0);
}

/// Modules are loaded while the rest is looked for: loaded modules are unloaded again when something turns out to be missing.
TEST(CudaKernel, LaunchersThatAreMissing_LeaveNoModuleLoaded) {
    FLCE_REQUIRE_NVRTC();
    const BuildRequest request = small_request();
    const CacheFolder folder;
    {
        DiskStore here(folder.path());
        std::mutex mutex;
        const auto keep = [&](const CacheKey& key, std::span<const std::byte> entry) {
            const std::scoped_lock lock(mutex);
            EXPECT_EQ(here.put(key, entry, Durability::whenever), Kept::yes);
        };
        ArtifactCache cubins({.directory = shared_cache().directory(), .on_use = keep});
        (void)cuda_cubins(request, generate_cuda(request.spec, request.device, request.plan), cubins);
    }
    FakeGpu gpu;
    ArtifactCache cache({.directory = folder.path(), .creates = false});
    EXPECT_THROW((void)make_cuda_kernel(request, cache, *FakeGpu::driver()), CacheMissError);
    EXPECT_EQ(gpu.last_module.size(), 4U) << "none was loaded before";
    EXPECT_EQ(gpu.modules, 0);
    EXPECT_EQ(gpu.retained, 0);
}

TEST(CudaKernel, Prewarmed_IsTakenFromTheCache) {
    FLCE_REQUIRE_NVRTC();
    const CacheFolder folder;
    {
        // No driver: a build machine.
        ArtifactCache cache({.directory = folder.path()});
        compile_cuda_kernel(small_request(), cache);
        EXPECT_EQ(cache.statistics().created, kSmallSetUnits + std::ssize(host_archs()));
    }
    FakeGpu gpu;
    const auto driver = FakeGpu::driver();
    ArtifactCache cache({.directory = folder.path()});
    BuildRequest request = small_request();
    request.device = driver->device(0);
    request.plan = choose_plan(request.spec, request.device);
    const auto kernel = make_cuda_kernel(request, cache, *driver);
    EXPECT_EQ(cache.statistics().created, 0);
    EXPECT_EQ(cache.statistics().disk_hits, kSmallSetArtifacts);
}

TEST(CudaKernel, OptionValues_ShareACubin) {
    FLCE_REQUIRE_NVRTC();
    const CacheFolder folder;
    ArtifactCache cache({.directory = folder.path()});
    const Device device = describe_device("sm_80");
    compile_cuda_kernel(request_for("D=64,V=1000,dtype=bf16,softcap=30", device), cache);
    const std::int64_t created = cache.statistics().created;
    EXPECT_GT(created, 1);
    compile_cuda_kernel(request_for("D=64,V=1000,dtype=bf16,softcap=50", device), cache);
    EXPECT_EQ(cache.statistics().created, created + std::ssize(host_archs()));  // launchers alone: the value is a parameter
}

TEST(CudaKernel, WithoutADevice_IsAnEnvironmentErrorBeforeAnyCompile) {
    FakeGpu gpu;
    gpu.device_count = 0;
    ArtifactCache cache({});
    EXPECT_THROW((void)make_cuda_kernel(small_request(), cache, *FakeGpu::driver()), EnvironmentError);
    EXPECT_EQ(cache.statistics().created, 0);
}

TEST(CudaCubins, CompiledAgain_GiveTheSameBytes) {
    // Kernels of few instructions before nightly.
    const bool small = test::level() != test::Level::nightly;
    const char* arch = small ? "sm_80" : "sm_90a";
    FLCE_REQUIRE_NVRTC_FOR(arch);
    const BuildRequest request = request_for(small ? "D=64,V=1000" : "D=2048,V=151936", describe_device(arch));
    const CudaProgram program = generate_cuda(request.spec, request.device, request.plan);
    // Side by side, so that whatever NVRTC's compiles share is used in another order.
    std::array<std::vector<std::shared_ptr<const Artifact>>, 2> cubins;
    {
        std::vector<std::jthread> threads;
        for (auto& set : cubins) {
            threads.emplace_back([&] {
                ArtifactCache cache({});
                set = cuda_cubins(request, program, cache);
            });
        }
    }
    ASSERT_EQ(cubins[0].size(), program.units.size());
    ASSERT_EQ(cubins[1].size(), program.units.size());
    for (std::size_t i = 0; i < program.units.size(); ++i) {
        EXPECT_EQ(cubins[0][i]->payload, cubins[1][i]->payload);
        EXPECT_EQ(cubins[0][i]->metadata, cubins[1][i]->metadata);
    }
}

TEST(CudaCubins, UnitThatDoesNotCompile_IsTheErrorOfTheSet) {
    FLCE_REQUIRE_NVRTC_FOR("sm_80");
    const BuildRequest request = request_for("D=64,V=1000", describe_device("sm_80"));
    CudaProgram program = generate_cuda(request.spec, request.device, request.plan);
    program.units.back().source += "int broken = no_such_name;\n";
    ArtifactCache cache({});
    try {
        (void)cuda_cubins(request, program, cache);
        FAIL() << "compiled";
    } catch (const CompileError& error) {
        EXPECT_THAT(error.log(), HasSubstr("no_such_name"));
        fs::remove_all(error.source_path().parent_path());
    }
    // The others are there for the next attempt.
    EXPECT_EQ(cache.statistics().created, static_cast<std::int64_t>(program.units.size()) - 1);
}

TEST(CudaCubins, Metadata_SaysWhatItIsAndWhatItUses) {
    FLCE_REQUIRE_NVRTC_FOR("sm_90a");
    const BuildRequest request = small_request();
    const CudaProgram program = generate_cuda(request.spec, request.device, request.plan);
    std::vector<nlohmann::json> kernels;
    for (const auto& cubin : cuda_cubins(request, program, shared_cache())) {
        const auto metadata = nlohmann::json::parse(cubin->metadata);
        EXPECT_EQ(metadata.at("arch"), "sm_90a");
        EXPECT_EQ(parse_spec_json(metadata.at("spec").dump()), request.spec);
        EXPECT_THAT(metadata.at("compiler").get<std::string>(), HasSubstr("NVRTC"));
        for (const auto& kernel : metadata.at("kernels")) kernels.push_back(kernel);
    }
    ASSERT_EQ(kernels.size(), program.kernels.size());
    for (const nlohmann::json& kernel : kernels) {
        const std::string name = kernel.at("name");
        EXPECT_GT(kernel.at("registers"), 0) << name;
        EXPECT_LE(kernel.at("spill_store_bytes").get<int>() + kernel.at("spill_load_bytes").get<int>(), 64) << name;
        EXPECT_GT(kernel.at("block_threads"), 0) << name;
    }
}

/// A constexpr variable of the templates would have some in every module, and the driver would take longer to set that up than to load the
/// code.
TEST(CudaCubins, ConstantsOfKernels_HaveNoMemory) {
    for (const auto& [spec, arch] : {std::pair{"D=64,V=1000,dtype=bf16,outputs=loss+lse", "sm_90a"},
                                     {"D=64,V=1000,dtype=bf16,layout=hidden_major", "sm_80"},
                                     {"D=64,V=1000,dtype=fp32,bias,outputs=loss+lse+logprobs+entropy", "sm_80"},
                                     {"D=1024,V=1000,dtype=fp16,softcap=20,label_smoothing=0.1,grad_weight_mode=accumulate", "sm_90a"}}) {
        FLCE_REQUIRE_NVRTC_FOR(arch);
        const BuildRequest request = request_for(spec, describe_device(arch));
        const CudaProgram program = generate_cuda(request.spec, request.device, request.plan);
        for (const auto& cubin : cuda_cubins(request, program, shared_cache())) {
            const std::string_view bytes(reinterpret_cast<const char*>(cubin->payload.data()), cubin->payload.size());
            EXPECT_THAT(bytes, testing::Not(HasSubstr(".nv.global"))) << cubin->metadata;
        }
    }
}

}  // namespace
}  // namespace flce
