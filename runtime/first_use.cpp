#include "runtime/first_use.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "cache/log.hpp"
#include "flce/plan.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/planner.hpp"
#include "records/kernel_version.hpp"
#include "records/record.hpp"
#include "records/shipped_records.hpp"
#include "runtime/cache_options.hpp"
#include "runtime/layer/out_of_memory.hpp"

namespace flce {
namespace {

constexpr std::string_view kAgreed = "agreed";
constexpr std::chrono::milliseconds kLongestCheck{180'000};
/// Weights with fewer elements keep few blocks busy and retain next to nothing: they say nothing of others.
constexpr std::int64_t kTinyWeight = 1 << 20;

CacheKey key_of(const Kernel& kernel, const Backends& backends) {
    const Spec& spec = kernel.spec();
    const Plan& plan = kernel.plan();
    const bool tiny = spec.vocab_size < kTinyWeight / spec.hidden_size;
    KeyBuilder key("first use");
    key.add("arch", kernel.device().gpu.arch)
        .add("device", kernel.device().name)
        .add("driver", std::to_string(backends.cuda_driver_version()))
        .add("compilers", backends.cuda_compilers(cuda_path(plan.path).calls_library))
        .add("kernel_version", kernel_version(DeviceKind::cuda))
        .add("path", to_string(plan.path))
        .add("strategy", to_string(plan.strategy))
        .add("dtype", to_string(spec.dtype))
        .add("layout", to_string(spec.layout))
        .add("grad_weight_mode", spec.grad_weight_mode == GradMode::accumulate ? "accumulate" : "write")
        .add("shard", spec.whole_vocab_size != 0 ? "1" : "0")
        .add("tiny", tiny ? "1" : "0");
    // Each format has an instruction of its own.
    if (is_fp8(spec)) key.add("fp8", to_string(spec.fp8)).add("fp8_dlogits", to_string(spec.fp8_dlogits));
    return key.finish();
}

Artifact outcome_artifact(const Kernel& kernel, const std::string& fault) {
    const nlohmann::json metadata{{"kind", "check"},
                                  {"arch", kernel.device().gpu.arch},
                                  {"spec", nlohmann::json::parse(kernel.spec().json())},
                                  {"plan", nlohmann::json::parse(kernel.plan().json())},
                                  {"layer", kernel.spec().text()},
                                  {"created_by", fmt::format("flce {}", version())}};
    const std::string_view outcome = fault.empty() ? kAgreed : std::string_view(fault);
    const auto bytes = std::as_bytes(std::span(outcome));
    return {metadata.dump(), {bytes.begin(), bytes.end()}};
}

std::string text_of(const Artifact& outcome) { return {reinterpret_cast<const char*>(outcome.payload.data()), outcome.payload.size()}; }

/// The text of an outcome that says what differs; empty: the results agreed.
std::string fault_in(const Artifact& outcome) {
    std::string text = text_of(outcome);
    return text == kAgreed ? "" : text;
}

std::string layer_in(const Artifact& outcome) {
    const auto metadata = nlohmann::json::parse(outcome.metadata, nullptr, /*allow_exceptions=*/false);
    return metadata.is_object() ? metadata.value("layer", "") : "";
}

std::string entry_fault(const Artifact& outcome) { return outcome.payload.empty() ? "it says nothing" : ""; }

std::vector<Difference> compare_with_cpu(const Kernel& kernel, const Backends& backends, int threads, ArtifactCache& cache) {
    const Device cpu = backends.native_cpu();
    const auto reference = backends.make_cpu({kernel.spec(), cpu, choose_plan(kernel.spec(), cpu), {}, threads, {}}, cache);
    return backends.compare(kernel, *reference);
}

ArtifactCache::Options local_alone(ArtifactCache::Options options) {
    options.further.clear();
    options.lock_wait = kLongestCheck;
    options.strict = false;
    options.on_use = {};
    return options;
}

}  // namespace

bool ships_records_for(std::string_view arch) {
    static const auto& known = *new std::set<std::string, std::less<>>([] {
        std::set<std::string, std::less<>> found;
        for (const ShippedRecord& shipped : shipped_records()) {
            std::string why;
            const auto record = parse_record(shipped.text, why);
            if (record && record->key.device.kind == "cuda") found.insert(describe_device(record->key.device.name).gpu.arch);
        }
        return found;
    }());
    return known.contains(arch);
}

FirstUse::FirstUse(const ArtifactCache::Options& options) : cache_(local_alone(options)) {}

std::shared_ptr<const Artifact> FirstUse::outcome_of(const Kernel& kernel, const Backends& backends, int threads) {
    const CacheKey key = key_of(kernel, backends);
    {
        const std::lock_guard lock(mutex_);
        if (const auto known = known_.find(key); known != known_.end()) return known->second;
    }
    const auto check = [&] {
        logger().info("{} on {}: the first use is compared with the CPU backend", to_string(kernel.plan().path), kernel.device().name);
        return outcome_artifact(kernel, fault_of(compare_with_cpu(kernel, backends, threads, cache_)));
    };
    auto outcome = cache_.get_or_create(key, check, nullptr, entry_fault);
    const std::lock_guard lock(mutex_);
    known_.emplace(key, outcome);
    return outcome;
}

/// "Take another way (FLCE_PATH=cuda_lt or device="cpu") …".
std::string FirstUse::ways_round(const Kernel& kernel, const Backends& backends) const {
    std::vector<std::string> ways;
    for (const CudaPath* path : cuda_paths()) {
        std::string why;
        if (path->id == kernel.plan().path || (path->calls_library && !backends.has_cublaslt(&why))) continue;
        if (!path_plans(kernel.spec(), kernel.device(), path->id).empty()) ways.push_back(fmt::format("FLCE_PATH={}", path->name));
    }
    ways.emplace_back("device=\"cpu\"");
    const std::string directory = cache_.directory().empty() ? "" : fmt::format("FLCE_CACHE_DIR={} ", cache_.directory().string());
    return fmt::format("Take another way ({}) and report it; \"{}flce info --check --spec {}\" compares again", fmt::join(ways, " or "),
                       directory, kernel.spec().text());
}

void FirstUse::require(const Kernel& kernel, const Backends& backends, int threads) {
    if (kernel.device().kind != DeviceKind::cuda || ships_records_for(kernel.device().gpu.arch)) return;
    const std::string kernels = fmt::format("{} on {} ({})", to_string(kernel.plan().path), kernel.device().name, kernel.device().gpu.arch);
    const auto unchecked = [&](const std::string& why) {
        warn_once_in_process(
            fmt::format("{} was not compared with the CPU backend: {}; \"flce info --check\" compares a layer", kernels, why));
    };
    std::string fault;
    try {
        fault = fault_in(*outcome_of(kernel, backends, threads));
    } catch (const OutOfMemory& none) {
        return unchecked(none.what());
    } catch (const CacheMissError&) {
        return unchecked("strict mode compiles no kernel of the CPU");
    } catch (const SpecError& incomparable) {
        return unchecked(incomparable.what());
    } catch (const DeviceError& refused) {
        throw DeviceError(fmt::format("kernels of {}, on which flce has not run before, fail over {} random tokens: {}. {}", kernels,
                                      kComparedTokens, refused.what(), ways_round(kernel, backends)),
                          refused.call(), refused.result());
    }
    if (fault.empty()) return;
    throw DeviceError(fmt::format("kernels of {}, on which flce has not run before, are wrong over {} random tokens: {}. {}", kernels,
                                  kComparedTokens, fault, ways_round(kernel, backends)),
                      "first use", 0);
}

std::vector<Difference> FirstUse::compare(const Kernel& kernel, const Backends& backends, int threads) {
    std::vector<Difference> differences = compare_with_cpu(kernel, backends, threads, cache_);
    const CacheKey key = key_of(kernel, backends);
    const std::string fault = fault_of(differences);
    const auto before = cache_.find(key, {}, entry_fault);
    const std::lock_guard lock(mutex_);
    if (!fault.empty()) faults_now_.insert(key);
    const bool fault_of_another = before != nullptr && !fault_in(*before).empty() && layer_in(*before) != kernel.spec().text();
    if (fault.empty() && (fault_of_another || faults_now_.contains(key))) return differences;
    const auto outcome = std::make_shared<const Artifact>(outcome_artifact(kernel, fault));
    cache_.keep(key, *outcome, ArtifactCache::Replace::always);
    known_[key] = outcome;
    return differences;
}

std::string FirstUse::faulty_layer(const Kernel& kernel, const Backends& backends) {
    const auto outcome = cache_.find(key_of(kernel, backends), {}, entry_fault);
    return outcome == nullptr || fault_in(*outcome).empty() ? "" : layer_in(*outcome);
}

namespace {

void check_path(const Spec& spec, const Environment& environment, const Backends& backends, FirstUse& first_use, PathCheck& check) {
    Environment only = environment;
    only.path = check.path;
    only.strict = false;
    try {
        Session session = SessionAccess::make({.device = fmt::format("cuda:{}", check.device.index)}, only, backends);
        // A plan that is named is not checked unasked.
        const KernelOptions options{.plan = session.choose_plan(spec, session.device()).plan.text()};
        const auto kernel = session.get_kernel(spec, options);
        check.differences = first_use.compare(*kernel, backends, environment.num_threads);
        check.fault = fault_of(check.differences);
        if (check.fault.empty()) check.other_fault = first_use.faulty_layer(*kernel, backends);
    } catch (const DeviceError& refused) {
        check.fault = refused.what();
    } catch (const CompileError& refused) {
        check.fault = refused.what();
    } catch (const Error& none) {
        check.skipped = none.what();
    }
}

}  // namespace

std::vector<PathCheck> check_paths(const Spec& spec, const Environment& environment, const Backends& backends, std::string* why) {
    std::vector<PathCheck> checks;
    const std::vector<Device> gpus = backends.cuda_devices(why);
    ArtifactCache::Options cache = cache_options({}, environment);
    cache.creates = true;
    FirstUse first_use(cache);
    for (std::size_t i = 0; i < gpus.size(); ++i) {
        for (const CudaPath* path : cuda_paths()) {
            PathCheck& check =
                checks.emplace_back(PathCheck{{DeviceKind::cuda, static_cast<int>(i)}, gpus[i].name, std::string(path->name), "", ""});
            const auto begin = std::chrono::steady_clock::now();
            check_path(spec, environment, backends, first_use, check);
            check.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        }
    }
    return checks;
}

}  // namespace flce
