#include <nlohmann/json.hpp>

#include "generator/logit_transforms.hpp"
#include "generator/planner.hpp"
#include "runtime/cpu/passes.hpp"
#include "runtime/cpu/support.hpp"
#include "runtime/host/object_file.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce {
namespace {

/// The object for the request's structure: from the cache, where `fault` has nothing against it, or compiled.
std::shared_ptr<const Artifact> object_of(const BuildRequest& request, ArtifactCache& cache, const ArtifactCache::PayloadFault& fault) {
    const CpuProperties& cpu = request.device.cpu;
    const CpuPlan& plan = request.plan.cpu;
    KeyBuilder key("object");
    key.add("code", cpu_code_identity(request.spec, cpu, plan))
        .add("llvm", llvm_version())
        .add("triple", cpu.triple)
        .add("cpu", cpu.cpu)
        .add("features", cpu.features);
    const auto compile = [&] {
        Artifact artifact;
        artifact.payload =
            compile_host_object(cpu, "flce_cpu", [&](llvm::Module& module) { emit_cpu_code(module, request.spec, cpu, plan); });
        artifact.metadata = nlohmann::ordered_json{{"kind", "object"},
                                                   {"spec", request.spec.text()},
                                                   {"plan", request.plan.text()},
                                                   {"triple", cpu.triple},
                                                   {"cpu", cpu.cpu},
                                                   {"features", cpu.features},
                                                   {"compiler", "LLVM " + llvm_version()},
                                                   {"created_by", "flce " FLCE_VERSION}}
                                .dump();
        return artifact;
    };
    return cache.get_or_create(key.finish(), compile, nullptr, fault);
}

/// A loaded object, and the artifact, held so that the cache answers the next kernel of this structure from memory.
struct LoadedCpuCode {
    std::shared_ptr<const Artifact> object;
    std::shared_ptr<const HostCode> code;
    CpuFunctions functions{};

    void load(const Artifact& artifact) {
        code = HostCode::load(artifact.payload, "flce_cpu");
        functions = CpuFunctions::find(*code);
    }

    /// Loads code from the cache, and compiles it again where the cache's cannot be loaded.
    [[nodiscard]] static LoadedCpuCode of(const BuildRequest& request, ArtifactCache& cache) {
        LoadedCpuCode loaded;
        loaded.object = object_of(request, cache, [&loaded](const Artifact& artifact) -> std::string {
            try {
                loaded.load(artifact);
                return {};
            } catch (const Error& error) {
                loaded.code = nullptr;
                return error.what();
            }
        });
        if (loaded.code == nullptr) loaded.load(*loaded.object);
        return loaded;
    }
};

class CpuKernel final : public Kernel {
public:
    CpuKernel(const BuildRequest& request, LoadedCpuCode loaded)
        : Kernel(request.spec, request.device, request.plan, request.device_ref, request.reasons),
          loaded_(std::move(loaded)),
          workers_(thread_count(request)),
          context_{.plan = request.plan, .threads = thread_count(request), .code = loaded_.functions, .workers = &workers_} {
        for (const double parameter : transform_parameters(request.spec)) {
            context_.transform_parameters.push_back(static_cast<float>(parameter));
        }
        // Refuses a plan whose blocks do not fit its scratch now rather than at the first call.
        (void)workspace_bytes_of(Pass::backward, 1);
        (void)workspace_bytes_of(Pass::forward, 1);
    }

private:
    static int thread_count(const BuildRequest& request) { return request.threads > 0 ? request.threads : request.device.cpu.cores; }

    void run(Pass pass, const std::int64_t* slots, Stream) const override {
        const CpuCall call(spec(), slots);
        if (spec().support && pass != Pass::merge) {
            return (pass == Pass::forward ? run_cpu_support_forward : run_cpu_support_backward)(context_, call);
        }
        switch (pass) {
            case Pass::forward: return (has_teacher_head(spec()) ? run_cpu_divergence : run_cpu_forward)(context_, call);
            case Pass::merge: return (has_teacher_head(spec()) ? run_cpu_divergence_merge : run_cpu_merge)(call);
            default: return run_cpu_backward(context_, call);
        }
    }

    std::int64_t workspace_bytes_of(Pass pass, std::int64_t num_tokens) const override {
        if (pass == Pass::merge) return 0;
        if (spec().support) return cpu_support_layout(spec(), plan(), context_.threads, num_tokens).bytes;
        return pass == Pass::backward ? cpu_backward_layout(spec(), plan(), context_.threads, num_tokens, spec().vocab_size).bytes
                                      : cpu_forward_layout(spec(), plan(), context_.threads, num_tokens, spec().vocab_size).bytes;
    }

    std::int64_t retained_bytes_of(std::int64_t num_tokens, RetainedPlace place, std::int64_t vocab_columns) const override {
        if (spec().support) return 0;
        if (place == RetainedPlace::own) return num_tokens * vocab_columns * retained_logit_bytes(spec(), plan());
        if (has_teacher_head(spec())) return 0;
        // Vocabulary by vocabulary: a strip's logits must lie where only later strips' gradients do.
        if (num_tokens == 0 || !may_lend_grad_weight(spec())) return 0;
        return vocab_columns * spec().hidden_size * static_cast<std::int64_t>(element_bytes(spec().grad_weight_dtype));
    }

    LoadedCpuCode loaded_;
    Workers workers_;
    CpuContext context_;
};

}  // namespace

std::shared_ptr<const Kernel> make_cpu_kernel(const BuildRequest& request, ArtifactCache& cache) {
    return std::make_shared<CpuKernel>(request, LoadedCpuCode::of(request, cache));
}

void compile_cpu_kernel(const BuildRequest& request, ArtifactCache& cache) {
    (void)object_of(request, cache,
                    [&](const Artifact& artifact) { return host_object_fault(artifact.payload, request.device.cpu.triple, kCpuSymbols); });
}

}  // namespace flce
