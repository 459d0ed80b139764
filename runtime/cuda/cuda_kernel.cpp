// A kernel set on a GPU: cubin and launchers from the cache or compiled, loaded, launched.
#include "runtime/cuda/cuda_kernel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <future>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "flce/error.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/device_tables.hpp"
#include "generator/launch_text.hpp"
#include "runtime/cuda/cubin.hpp"
#include "runtime/cuda/cubin_cache.hpp"
#include "runtime/cuda/cubin_loader.hpp"
#include "runtime/cuda/cublaslt.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/launcher.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "runtime/host/host_code.hpp"
#include "runtime/host/object_file.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce {
namespace {

using Json = nlohmann::ordered_json;

// Option for the report of registers and spills in the metadata; it changes no code.
constexpr const char* kReportOption = "--ptxas-options=-v";

using ArtifactPointer = std::shared_ptr<const Artifact>;

Json describe_request(const BuildRequest& request, const char* kind) {
    return {{"kind", kind},
            {"spec", Json::parse(request.spec.json())},
            {"plan", Json::parse(request.plan.json())},
            {"arch", request.device.gpu.arch},
            {"created_by", "flce " FLCE_VERSION}};
}

Json resources_json(const CudaUnit& unit, const std::string& log) {
    Json kernels = Json::array();
    for (const KernelResources& used : parse_ptxas_report(log)) {
        Json entry = {{"name", used.name},
                      {"registers", used.registers},
                      {"static_smem_bytes", used.static_smem_bytes},
                      {"stack_bytes", used.stack_bytes},
                      {"spill_store_bytes", used.spill_store_bytes},
                      {"spill_load_bytes", used.spill_load_bytes}};
        for (const KernelEntry& kernel : unit.kernels) {
            if (kernel.name != used.name) continue;
            entry["block_threads"] = kernel.block_threads;
            entry["dynamic_smem_bytes"] = kernel.dynamic_smem_bytes;
        }
        kernels.push_back(std::move(entry));
    }
    return kernels;
}

Artifact compile_cubin(const BuildRequest& request, const CudaProgram& program, const CudaUnit& unit, const Nvrtc& nvrtc,
                       const std::vector<std::string>& options) {
    Nvrtc::Result result = nvrtc.compile(unit.source, embedded_templates(), options, unit.kernels);
    if (const std::string fault = param_block_fault(program, result.cubin); !fault.empty()) throw InternalError(fault);
    const auto [major, minor] = nvrtc.version();
    Json metadata = describe_request(request, "cubin");
    metadata["compiler"] = fmt::format("NVRTC {}.{}", major, minor);
    metadata["compiler_build_id"] = nvrtc.build_id();
    metadata["options"] = options;
    metadata["kernels"] = resources_json(unit, result.log);
    return {metadata.dump(), std::move(result.cubin)};
}

/// `nvrtc` is null on a machine without one, and `why_none` says why.
ArtifactPointer cuda_cubin(const BuildRequest& request, const CudaProgram& program, std::size_t unit_index, const Nvrtc* nvrtc,
                           const std::string& why_none, ArtifactCache& cache, CubinLoader& loader) {
    const CudaUnit& unit = program.units[unit_index];
    std::string rejected;
    const auto fault = [&](const Artifact& cubin) {
        std::string why = loader.fault_of(unit_index, cubin);
        if (!why.empty()) rejected = fmt::format(" (what was found cannot be used: {})", why);
        return why;
    };
    std::vector<std::string> options = program.options;
    options.emplace_back(kReportOption);
    const CacheKey recipe = recipe_key({request.device.gpu.arch, unit.source, embedded_templates(), options, unit.kernels});
    if (nvrtc != nullptr) {
        auto cubin = cubin_by(
            nvrtc->build_id(), recipe, request.device.gpu.arch, cache,
            [&] { return compile_cubin(request, program, unit, *nvrtc, options); }, fault);
        if (cubin != nullptr) return cubin;
    }
    auto cubin = nvrtc == nullptr ? cubin_by_any_compiler(recipe, cache, fault) : nullptr;
    if (cubin == nullptr && !cache.options().creates) {
        throw CacheMissError(
            fmt::format("no cache has the cubin of {} for {}{}", unit.kernels.front().name, request.device.gpu.arch, rejected));
    }
    if (cubin == nullptr) {
        throw EnvironmentError(fmt::format("no cache or pack holds the kernels of {} for {}{}, and they cannot be compiled here: {}",
                                           request.spec.text(), request.device.gpu.arch, rejected, why_none));
    }
    return cubin;
}

/// Begins cubins in the order of the program's units. Refers to all four arguments.
std::vector<std::future<ArtifactPointer>> begin_cubins(const BuildRequest& request, const CudaProgram& program, ArtifactCache& cache,
                                                       CubinLoader& loader) {
    std::shared_ptr<const Nvrtc> nvrtc;
    std::string why_none;
    try {
        nvrtc = Nvrtc::load();
    } catch (const EnvironmentError& error) {
        why_none = error.what();
    }
    std::vector<std::future<ArtifactPointer>> cubins;
    cubins.reserve(program.units.size());
    for (std::size_t unit = 0; unit < program.units.size(); ++unit) {
        cubins.push_back(std::async(std::launch::async, [&request, &program, unit, &cache, nvrtc, why_none, &loader] {
            return cuda_cubin(request, program, unit, nvrtc.get(), why_none, cache, loader);
        }));
    }
    return cubins;
}

ArtifactPointer launchers_of(const BuildRequest& request, const CudaProgram& program, const std::string& triple, ArtifactCache& cache,
                             const ArtifactCache::PayloadFault& fault) {
    const CpuProperties target = launcher_target(triple);
    const auto compile = [&] {
        Json metadata = describe_request(request, "object");
        metadata["holds"] = "CUDA launchers";
        metadata["compiler"] = "LLVM " + llvm_version();
        metadata["target"] = {{"triple", target.triple}, {"cpu", target.cpu}, {"features", target.features}};
        return Artifact{metadata.dump(), compile_launchers(program, target)};
    };
    return cache.get_or_create(launchers_key(program, target, launcher_generator()), compile, nullptr, fault);
}

std::shared_ptr<const HostCode> load_launchers(const BuildRequest& request, const CudaProgram& program, ArtifactCache& cache) {
    std::shared_ptr<const HostCode> loaded;
    const auto load = [&loaded](const Artifact& artifact) {
        loaded = nullptr;
        auto code = HostCode::load(artifact.payload, "flce launchers");
        for (const char* symbol : kLauncherSymbols) (void)code->symbol(symbol);
        loaded = std::move(code);
    };
    const auto fault = [&load](const Artifact& artifact) -> std::string {
        try {
            return load(artifact), std::string();
        } catch (const Error& error) {
            return error.what();
        }
    };
    const ArtifactPointer launchers = launchers_of(request, program, native_triple(), cache, fault);
    if (loaded == nullptr) load(*launchers);
    return loaded;
}

/// A kernel set on its way from the cache or the compilers, each artifact on a thread of its own: artifacts that have come are loaded while
/// the rest is coming. A failure is thrown when all have ended, since a future's destructor waits.
struct KernelSet {
    /// Loads, too, where there is a context.
    KernelSet(const BuildRequest& request, ArtifactCache& cache, const std::shared_ptr<const CudaContext>& context = nullptr)
        : program(generate_cuda(request.spec, request.device, request.plan)),
          loader(program, request.device.gpu.arch, context),
          cubins(begin_cubins(request, program, cache, loader)) {
        launchers =
            std::async(std::launch::async, [&request, &cache, this, loads = context != nullptr]() -> std::shared_ptr<const HostCode> {
                if (loads) return load_launchers(request, program, cache);
                return cuda_launchers(request, program, cache), nullptr;
            });
    }
    KernelSet(const KernelSet&) = delete;
    KernelSet& operator=(const KernelSet&) = delete;
    ~KernelSet() = default;

    CudaProgram program;  // before the members that read it
    CubinLoader loader;
    std::vector<std::future<ArtifactPointer>> cubins;
    std::future<std::shared_ptr<const HostCode>> launchers;  // null where nothing is loaded
};

/// An expression over the numbers of tokens and classes, with its last value kept: evaluating it takes longer than all else that the host
/// does for a small call, and calls of one size follow each other. Thread-safe.
class WorkspaceSize {
public:
    explicit WorkspaceSize(Expr bytes) : bytes_(std::move(bytes)) {}

    [[nodiscard]] std::int64_t of(std::int64_t num_tokens, std::int64_t vocab_columns) const {
        const std::scoped_lock lock(mutex_);
        if (num_tokens != last_num_tokens_ || vocab_columns != last_vocab_columns_) {
            CallSlots slots{};
            slots[static_cast<std::size_t>(Slot::num_tokens)] = num_tokens;
            slots[static_cast<std::size_t>(Slot::vocab_columns)] = vocab_columns;
            last_bytes_ = evaluate(bytes_, slots);
            last_num_tokens_ = num_tokens;
            last_vocab_columns_ = vocab_columns;
        }
        return last_bytes_;
    }

private:
    Expr bytes_;
    mutable std::mutex mutex_;
    mutable std::int64_t last_num_tokens_ = -1;
    mutable std::int64_t last_vocab_columns_ = -1;
    mutable std::int64_t last_bytes_ = 0;
};

/// A pass of a kernel set.
struct CudaPass {
    CudaPass(const char* name, LaunchProgram program, Expr workspace_bytes)
        : name(name), program(std::move(program)), workspace(std::move(workspace_bytes)) {}

    const char* name;
    LauncherFunction launch = nullptr;
    LaunchProgram program;  // program by which errors name statements
    WorkspaceSize workspace;
};

class CudaKernel final : public Kernel {
public:
    CudaKernel(const BuildRequest& request, KernelSet& set, std::shared_ptr<const CudaContext> context)
        : Kernel(request.spec, request.device, request.plan, request.device_ref, request.reasons),
          context_(std::move(context)),
          forward_("forward", set.program.forward, set.program.forward_workspace_bytes),
          merge_("merge", set.program.merge, set.program.merge_workspace_bytes),
          backward_("backward", set.program.backward, set.program.backward_workspace_bytes),
          retained_bytes_(set.program.retained_bytes),
          lendable_bytes_(set.program.lendable_bytes),
          defers_hidden_(set.program.defers_hidden),
          kernels_(set.program.kernels) {
        if (cuda_path(request.plan.path).calls_library) gemms_ = &LibraryGemms::of(context_);
        std::map<std::string, CUfunction> functions;
        for (std::size_t i = 0; i < set.cubins.size(); ++i) {
            modules_.push_back(set.loader.take(i, *set.cubins[i].get()));
            for (const KernelEntry& kernel : set.program.units[i].kernels) functions[kernel.name] = load(*modules_.back(), kernel);
        }
        for (const KernelEntry& kernel : kernels_) functions_.push_back(functions.at(kernel.name));
        launchers_ = set.launchers.get();
        forward_.launch = reinterpret_cast<LauncherFunction>(launchers_->symbol(kForwardLauncherSymbol));
        merge_.launch = reinterpret_cast<LauncherFunction>(launchers_->symbol(kMergeLauncherSymbol));
        backward_.launch = reinterpret_cast<LauncherFunction>(launchers_->symbol(kBackwardLauncherSymbol));
        launcher_context_.launch_kernel = reinterpret_cast<void*>(context_->functions().cuLaunchKernel);
        launcher_context_.memset_async = reinterpret_cast<void*>(context_->functions().cuMemsetD8Async);
        launcher_context_.launch_overlapping = reinterpret_cast<void*>(&launch_overlapping);
        launcher_context_.launch_kernel_ex = reinterpret_cast<void*>(context_->functions().cuLaunchKernelEx);
        launcher_context_.encode_map = reinterpret_cast<void*>(&encode_map);
        launcher_context_.tensor_map_encode = reinterpret_cast<void*>(context_->functions().cuTensorMapEncodeTiled);
        launcher_context_.functions = reinterpret_cast<void* const*>(functions_.data());
        if (gemms_ != nullptr) {
            const int version = request.plan.cuda.library.version;
            const bool knows_algorithms = version == 0 || version == gemms_->library().version();
            launcher_context_.gemm = reinterpret_cast<void*>(knows_algorithms ? &run_gemm : &run_favourite_gemm);
            launcher_context_.gemm_library = gemms_;
        }
    }

private:
    [[nodiscard]] CUfunction load(const CudaModule& module, const KernelEntry& kernel) const {
        CUfunction function = module.function(kernel.name, kernel.dynamic_smem_bytes);
        const FunctionUse use = module.use(function, kernel.block_threads, kernel.dynamic_smem_bytes);
        if (use.blocks_per_sm < 1) {
            throw InternalError(
                fmt::format("kernel {} cannot run on {}: {} threads with {} registers each and {} + {} bytes of shared memory", kernel.name,
                            device().name, kernel.block_threads, use.registers, use.static_smem_bytes, kernel.dynamic_smem_bytes));
        }
        return function;
    }

    [[nodiscard]] const CudaPass& pass_of(Pass pass) const {
        return pass == Pass::backward ? backward_ : pass == Pass::merge ? merge_ : forward_;
    }

    void run(Pass pass, const std::int64_t* call, Stream stream) const override {
        const ContextScope scope(*context_);
        CallSlots slots{};
        std::copy_n(call, slots.size(), slots.begin());
        const std::int64_t returned = pass_of(pass).launch(&launcher_context_, slots.data(), stream.handle);
        if (const auto failure = launcher_failure(returned)) fail(pass_of(pass), *failure);
    }

    /// Workspace of a pass; in a shard for any number of classes.
    std::int64_t workspace_bytes_of(Pass pass, std::int64_t num_tokens) const override {
        return pass_of(pass).workspace.of(num_tokens, spec().vocab_size);
    }

    std::int64_t retained_bytes_of(std::int64_t num_tokens, RetainedPlace place, std::int64_t vocab_columns) const override {
        return (place == RetainedPlace::own ? retained_bytes_ : lendable_bytes_).of(num_tokens, vocab_columns);
    }

    bool defers_hidden() const noexcept override { return defers_hidden_; }

    [[noreturn]] void fail(const CudaPass& pass, const LauncherFailure& failure) const {
        const char* call = failed_call(pass.program, kernels_, failure);
        const bool of_library = std::holds_alternative<Gemm>(numbered_statement(pass.program, failure.statement).value);
        const std::string status =
            of_library ? gemms_->library().describe(failure.result) : context_->driver().describe(static_cast<CUresult>(failure.result));
        throw DeviceError(fmt::format("{} failed: {} in the {} pass at `{}`", call, status, pass.name,
                                      statement_text(pass.program, kernels_, failure.statement)),
                          call, failure.result);
    }

    std::shared_ptr<const CudaContext> context_;
    std::vector<std::unique_ptr<CudaModule>> modules_;
    std::vector<CUfunction> functions_;
    std::shared_ptr<const HostCode> launchers_;
    LauncherContext launcher_context_;
    const LibraryGemms* gemms_ = nullptr;  ///< null where the plan calls no library
    CudaPass forward_;
    CudaPass merge_;
    CudaPass backward_;
    WorkspaceSize retained_bytes_;
    WorkspaceSize lendable_bytes_;
    bool defers_hidden_;
    std::vector<KernelEntry> kernels_;
};

}  // namespace

std::vector<ArtifactPointer> cuda_cubins(const BuildRequest& request, const CudaProgram& program, ArtifactCache& cache) {
    CubinLoader reader(program, request.device.gpu.arch, nullptr);
    auto pending = begin_cubins(request, program, cache, reader);
    std::vector<ArtifactPointer> cubins;
    cubins.reserve(pending.size());
    for (auto& cubin : pending) cubins.push_back(cubin.get());
    return cubins;
}

void cuda_launchers(const BuildRequest& request, const CudaProgram& program, ArtifactCache& cache) {
    for (const std::string_view arch : host_archs()) {
        const std::string triple = linux_triple(arch);
        if (triple != native_triple() && !cache.options().creates) continue;  // this machine has no use for them
        (void)launchers_of(request, program, triple, cache,
                           [&triple](const Artifact& artifact) { return host_object_fault(artifact.payload, triple, kLauncherSymbols); });
    }
}

std::shared_ptr<const Kernel> make_cuda_kernel(const BuildRequest& request, ArtifactCache& cache) {
    return make_cuda_kernel(request, cache, *CudaDriver::load());
}

std::shared_ptr<const Kernel> make_cuda_kernel(const BuildRequest& request, ArtifactCache& cache, const CudaDriver& driver) {
    // The device first: without one there is no point in compiling.
    auto context = driver.context(request.device_ref.index);
    KernelSet set(request, cache, context);
    return std::make_shared<CudaKernel>(request, set, std::move(context));
}

void compile_cuda_kernel(const BuildRequest& request, ArtifactCache& cache) {
    KernelSet set(request, cache);
    for (auto& cubin : set.cubins) (void)cubin.get();
    (void)set.launchers.get();
}

}  // namespace flce
