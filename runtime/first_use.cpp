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
#include "records/kernel_version.hpp"
#include "records/record.hpp"
#include "records/shipped_records.hpp"
#include "runtime/cache_options.hpp"
#include "runtime/layer/out_of_memory.hpp"

namespace flce {
namespace {

constexpr std::string_view kAgreed = "agreed";
constexpr std::chrono::milliseconds kLongestCheck{180'000};

CacheKey key_of(const Kernel& kernel, const Backends& backends) {
    return KeyBuilder("first use")
        .add("arch", kernel.device().gpu.arch)
        .add("device", kernel.device().name)
        .add("driver", std::to_string(backends.cuda_driver_version()))
        .add("path", to_string(kernel.plan().path))
        .add("dtype", to_string(kernel.spec().dtype))
        .add("kernel_version", kernel_version(DeviceKind::cuda))
        .finish();
}

Artifact outcome_artifact(const Kernel& kernel, const std::string& fault) {
    const nlohmann::json metadata{{"kind", "check"},
                                  {"arch", kernel.device().gpu.arch},
                                  {"spec", nlohmann::json::parse(kernel.spec().json())},
                                  {"plan", nlohmann::json::parse(kernel.plan().json())},
                                  {"created_by", fmt::format("flce {}", version())}};
    const std::string_view outcome = fault.empty() ? kAgreed : std::string_view(fault);
    const auto bytes = std::as_bytes(std::span(outcome));
    return {metadata.dump(), {bytes.begin(), bytes.end()}};
}

/// The text of an outcome that says what differs; empty: the results agreed.
std::string fault_in(const Artifact& outcome) {
    const std::string text(reinterpret_cast<const char*>(outcome.payload.data()), outcome.payload.size());
    return text == kAgreed ? "" : text;
}

std::vector<Difference> compare_with_cpu(const Kernel& kernel, const Backends& backends, int threads, ArtifactCache& cache) {
    const Device cpu = backends.native_cpu();
    const auto reference = backends.make_cpu({kernel.spec(), cpu, choose_plan(kernel.spec(), cpu), {}, threads, {}}, cache);
    return backends.compare(kernel, *reference);
}

/// Names of paths beside the kernel's own that have a plan for its layer on its device.
std::vector<std::string> other_paths(const Kernel& kernel) {
    std::vector<std::string> names;
    for (const CudaPath* path : cuda_paths()) {
        if (path->id == kernel.plan().path) continue;
        for (const Strategy strategy : path->strategies) {
            if (path->problem(kernel.spec(), kernel.device(), strategy)) continue;
            names.push_back(fmt::format("FLCE_PATH={}", path->name));
            break;
        }
    }
    names.emplace_back("device=\"cpu\"");
    return names;
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
    for (const ShippedRecord& shipped : shipped_records()) {
        std::string why;
        const auto record = parse_record(shipped.text, why);
        if (record && record->key.device.kind == "cuda" && describe_device(record->key.device.name).gpu.arch == arch) return true;
    }
    return false;
}

FirstUse::FirstUse(const ArtifactCache::Options& options) : cache_(local_alone(options)), compiles_(options.creates) {}

std::shared_ptr<const Artifact> FirstUse::outcome_of(const Kernel& kernel, const Backends& backends, int threads) {
    const CacheKey key = key_of(kernel, backends);
    {
        const std::lock_guard lock(mutex_);
        if (const auto known = known_.find(key); known != known_.end()) return known->second;
    }
    auto outcome = cache_.get_or_create(key, [&] {
        logger().info("{} on {}: the first use is compared with the CPU backend", to_string(kernel.plan().path), kernel.device().name);
        return outcome_artifact(kernel, fault_of(compare_with_cpu(kernel, backends, threads, cache_)));
    });
    const std::lock_guard lock(mutex_);
    known_.emplace(key, outcome);
    return outcome;
}

void FirstUse::require(const Kernel& kernel, const Backends& backends, int threads) {
    if (kernel.device().kind != DeviceKind::cuda || ships_records_for(kernel.device().gpu.arch)) return;
    const auto unchecked = [&](const std::string& why) {
        warn_once_in_process(fmt::format("{} on {} ({}) was not compared with the CPU backend: {}; \"flce info --check\" compares it",
                                         to_string(kernel.plan().path), kernel.device().name, kernel.device().gpu.arch, why));
    };
    std::shared_ptr<const Artifact> outcome;
    try {
        outcome = outcome_of(kernel, backends, threads);
    } catch (const OutOfMemory& none) {
        return unchecked(none.what());
    } catch (const CacheMissError&) {
        return unchecked("strict mode compiles no kernel of the CPU");
    } catch (const SpecError& padded_shard) {
        return unchecked(padded_shard.what());
    }
    const std::string fault = fault_in(*outcome);
    if (fault.empty()) return;
    throw DeviceError(
        fmt::format("kernels of {} are wrong on {} ({}), on which flce has not run before: over {} random tokens {}. Take another way ({}) "
                    "and report it; \"flce info --check\" compares again, after a new driver for example",
                    to_string(kernel.plan().path), kernel.device().name, kernel.device().gpu.arch, kComparedTokens, fault,
                    fmt::join(other_paths(kernel), " or ")),
        "first use", 0);
}

std::vector<Difference> FirstUse::compare(const Kernel& kernel, const Backends& backends, int threads) {
    std::vector<Difference> differences = compare_with_cpu(kernel, backends, threads, cache_);
    const CacheKey key = key_of(kernel, backends);
    const auto outcome = std::make_shared<const Artifact>(outcome_artifact(kernel, fault_of(differences)));
    cache_.keep(key, *outcome, ArtifactCache::Replace::always);
    const std::lock_guard lock(mutex_);
    known_[key] = outcome;
    return differences;
}

std::vector<PathCheck> check_paths(const Spec& spec, const Environment& environment, const Backends& backends) {
    std::vector<PathCheck> checks;
    std::string why;
    const std::vector<Device> gpus = backends.cuda_devices(&why);
    FirstUse first_use(cache_options({}, environment));
    for (std::size_t i = 0; i < gpus.size(); ++i) {
        const DeviceRef ref{DeviceKind::cuda, static_cast<int>(i)};
        for (const CudaPath* path : cuda_paths()) {
            PathCheck& check = checks.emplace_back(PathCheck{ref, gpus[i].name, std::string(path->name), ""});
            const auto begin = std::chrono::steady_clock::now();
            try {
                Environment only = environment;
                only.path = path->name;
                Session session = SessionAccess::make({.device = fmt::format("cuda:{}", i)}, only, backends);
                // A plan that is named is not checked unasked.
                const KernelOptions options{.plan = session.choose_plan(spec, session.device()).plan.text()};
                check.differences = first_use.compare(*session.get_kernel(spec, options), backends, environment.num_threads);
            } catch (const PlanError& none) {
                check.skipped = none.what();
            } catch (const EnvironmentError& missing) {
                check.skipped = missing.what();
            }
            check.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        }
    }
    return checks;
}

}  // namespace flce
