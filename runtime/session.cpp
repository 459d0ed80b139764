#include "runtime/session.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "cache/single_flight.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/planner.hpp"
#include "runtime/cache_options.hpp"
#include "runtime/call_requests.hpp"
#include "runtime/first_use.hpp"
#include "runtime/plan_choice.hpp"
#include "runtime/prewarm_command.hpp"
#include "runtime/retained_choice.hpp"
#include "runtime/scratch_steps.hpp"

namespace flce {
namespace {

// A kernel as it is asked for. Specs that differ only in implied fields have the same kernel under several of these.
struct AskedKernel {
    Spec spec;
    std::string plan;
    CallRequests requests;
};

// AskedKernel without copies, for the hot lookup.
struct AskedKernelView {
    const Spec& spec;
    std::string_view plan;
    CallRequests requests;
};

struct AskedKernelHash {
    using is_transparent = void;
    template <class C>
    std::size_t operator()(const C& call) const noexcept {
        // Independent products, which do not wait for one another.
        std::size_t hash = SpecHash{}(call.spec) + static_cast<std::size_t>(call.requests.first.scratch_bytes) * 0x9E3779B97F4A7C15ULL +
                           static_cast<std::size_t>(call.requests.first.workspace_limit_bytes) * 0xC2B2AE3D27D4EB4FULL +
                           static_cast<std::size_t>(call.requests.first.num_tokens) * 0x165667B19E3779F9ULL +
                           static_cast<std::size_t>(call.requests.wide.scratch_bytes) * 0x27D4EB2F165667C5ULL;
        if (!call.plan.empty()) hash ^= std::hash<std::string_view>{}(call.plan);
        return hash;
    }
};

struct AskedKernelEqual {
    using is_transparent = void;
    template <class A, class B>
    bool operator()(const A& a, const B& b) const noexcept {
        return a.requests == b.requests && std::string_view(a.plan) == std::string_view(b.plan) && a.spec == b.spec;
    }
};

// A kernel as it is built. Calls with different limits or numbers of tokens may share a kernel.
struct KernelKey {
    Spec spec;  // normalized
    std::string given_plan;
    Plan plan;
    friend bool operator==(const KernelKey&, const KernelKey&) = default;
};

struct KernelKeyHash {
    std::size_t operator()(const KernelKey& key) const noexcept { return SpecHash{}(key.spec) ^ std::hash<std::string>{}(key.plan.text()); }
};

// Request of a call that its plan answers, and the answer.
/// Share of another plan's expected time that is worth its memory, by a cost model that is a few per cent off.
constexpr double kClearlyLess = 0.9;

struct ChosenPlan {
    PlanRequest request;
    PlanAnswer answer;
};

using KernelPointer = std::shared_ptr<const Kernel>;

SessionStatistics session_statistics(const CacheStatistics& cache) {
    return {.memory_hits = cache.memory_hits,
            .disk_hits = cache.disk_hits,
            .compiled = cache.created,
            .disk_faults = cache.disk_faults,
            .pack_hits = cache.pack_hits,
            .pack_faults = cache.pack_faults,
            .remote_hits = cache.remote_hits,
            .remote_faults = cache.remote_faults};
}

SessionStatistics sum(const SessionStatistics& a, const SessionStatistics& b) {
    return {.memory_hits = a.memory_hits + b.memory_hits,
            .disk_hits = a.disk_hits + b.disk_hits,
            .compiled = a.compiled + b.compiled,
            .disk_faults = a.disk_faults + b.disk_faults,
            .pack_hits = a.pack_hits + b.pack_hits,
            .pack_faults = a.pack_faults + b.pack_faults,
            .remote_hits = a.remote_hits + b.remote_hits,
            .remote_faults = a.remote_faults + b.remote_faults};
}

}  // namespace

struct Session::State {
    State(SessionOptions session_options, const Environment& environment, Backends session_backends)
        : options(std::move(session_options)),
          backends(std::move(session_backends)),
          local(resolve_local_device(options.device.empty() ? environment.device : options.device, backends,
                                     holds_kernels_of_others(options, environment))),
          cache(cache_options(options, environment)),
          first_use(cache.options()),
          records(record_places(options, environment)) {
        if (options.scratch_bytes <= 0) {
            throw PlanError(fmt::format("scratch_bytes is {}; it must be positive", options.scratch_bytes));
        }
        if (options.workspace_limit_bytes < 0) {
            throw PlanError(fmt::format("workspace_limit_bytes is {}; it must be positive, or 0 for none", options.workspace_limit_bytes));
        }
        if (options.threads < 0) throw ArgumentError(fmt::format("threads is {}; allowed are 0 (every core) and more", options.threads));
        if (options.threads == 0) options.threads = environment.num_threads;
        for (const CudaPath* known : cuda_paths()) {
            if (environment.path == known->name) path = known->id;
        }
    }

    SessionOptions options;
    Backends backends;
    std::optional<PlanPath> path;  ///< FLCE_PATH
    LocalDevice local;
    ArtifactCache cache;
    FirstUse first_use;
    RecordStore records;

    std::shared_mutex mutex;
    std::unordered_map<AskedKernel, KernelPointer, AskedKernelHash, AskedKernelEqual> asked;
    std::unordered_map<KernelKey, KernelPointer, KernelKeyHash> kernels;
    SingleFlight<KernelKey, KernelPointer, KernelKeyHash> builds;

    std::atomic<std::int64_t> memory_hits{0};
    // Counts of prewarm in caches of its own.
    std::mutex prewarm_mutex;
    SessionStatistics prewarmed;

    /// The session's scratch and limit, for calls that give none of their own.
    [[nodiscard]] PlanRequest defaults() const {
        return {.scratch_bytes = options.scratch_bytes, .workspace_limit_bytes = options.workspace_limit_bytes};
    }

    /// Throws an error that says how much is enough, in the place of another one, where the call's limit is too small.
    void refuse_small_limit(const Spec& spec, const Device& device, const KernelOptions& given) const {
        const PlanRequest call = completed(given, defaults());
        if (call.workspace_limit_bytes <= 0 || !given.plan.empty()) return;
        const auto smallest = smallest_limit_bytes(spec, device, call.num_tokens);
        if (!smallest || call.workspace_limit_bytes >= *smallest) return;
        const std::string tokens = call.num_tokens > 0 ? fmt::format(" with {} tokens", call.num_tokens) : "";
        throw PlanError(
            limit_too_small(call.workspace_limit_bytes, *smallest, fmt::format("{}{} on {}", spec.text(), tokens, device.name)));
    }

    /// The result of `plan_it`, which asks for such a call's plan or kernel.
    template <class PlanIt>
    auto within_limit(const Spec& spec, const Device& device, const KernelOptions& given, const PlanIt& plan_it) const {
        try {
            return plan_it();
        } catch (const PlanError&) {
            refuse_small_limit(spec.normalized(), device, given);
            throw;
        }
    }

    /// Refers to `spec` (normalized), `device` and `plan`.
    [[nodiscard]] PlanQuery query(const Spec& spec, const Device& device, std::string_view plan, const PlanRequest& request) const {
        return {.spec = spec, .device = device, .plan = plan, .request = request, .threads = options.threads, .path = path};
    }

    /// Whether kernels of the plan, on this machine's device, need a cuBLASLt that is not here.
    [[nodiscard]] bool needs_absent_library(const Plan& plan, const Device& device, std::string* why) const {
        if (plan.path == PlanPath::cpu || !cuda_path(plan.path).calls_library || device != local.device) return false;
        return !backends.has_cublaslt(why);
    }

    /// Seconds of forward and backward with the part that is retained by default, by the cost model.
    [[nodiscard]] static double modelled_seconds(const Spec& normalized, const Device& device, const ChosenPlan& chosen) {
        const Plan& plan = chosen.answer.plan;
        const std::int64_t tokens = token_bucket(chosen.request.num_tokens);
        const std::int64_t workspace = plan.scratch_bytes + workspace_of_tokens(normalized, tokens).value_or(0);
        const double part = kept_by_default(normalized, plan, tokens, workspace, chosen.request.workspace_limit_bytes).part;
        return estimate_forward(normalized, device, plan, tokens, part).seconds +
               estimate_backward(normalized, device, plan, tokens, part).seconds;
    }

    /// The plan of a call, for get_kernel, prewarm and its check, and explanations alike. Where the first request's plan retains nothing,
    /// what the limit leaves is scratch.
    [[nodiscard]] ChosenPlan choose(const Spec& normalized, const Device& device, std::string_view plan, const CallRequests& requests) {
        const auto answer = [&](const PlanRequest& request) {
            PlanQuery asked = query(normalized, device, plan, request);
            ChosenPlan chosen{request, plan_for(asked, records)};
            std::string why;
            if (plan.empty() && needs_absent_library(chosen.answer.plan, device, &why)) {
                asked.without_library = true;
                chosen.answer = plan_for(asked, records);
                chosen.answer.passed_over.push_back("plans that call cuBLASLt are passed over: " + why);
            }
            return chosen;
        };
        ChosenPlan first = answer(requests.first);
        if (requests.wide == requests.first) return first;
        // A divergence gains more from scratch than from as many bytes of retained logits.
        if (!retains(first.answer.plan) || has_teacher_head(normalized)) return answer(requests.wide);
        if (device.kind != DeviceKind::cuda) return first;
        ChosenPlan wide = answer(requests.wide);
        return modelled_seconds(normalized, device, wide) < kClearlyLess * modelled_seconds(normalized, device, first) ? wide : first;
    }

    [[nodiscard]] BuildRequest build_request(const Spec& normalized, const Device& device, DeviceRef ref, const std::string& plan,
                                             const CallRequests& requests) {
        const ChosenPlan chosen = choose(normalized, device, plan, requests);
        // Explains with copies: kernels outlive sessions.
        const auto reasons = [normalized, device, plan, chosen, threads = options.threads] {
            const PlanQuery query{.spec = normalized, .device = device, .plan = plan, .request = chosen.request, .threads = threads};
            std::vector<std::string> reasons = answer_reasons(query, chosen.answer);
            reasons.push_back(time_reason(query, chosen.answer));
            return reasons;
        };
        return {normalized, device, chosen.answer.plan, ref, options.threads, reasons};
    }

    /// Request of the kernel that get_kernel would build on `device`.
    [[nodiscard]] BuildRequest build_request(const Spec& spec, const Device& device, const KernelOptions& given) {
        return within_limit(spec, device, given, [&] {
            const Spec normalized = spec.normalized();
            return build_request(normalized, device, {device.kind, 0}, given.plan, call_requests(normalized, device, given, defaults()));
        });
    }

    void compile(const BuildRequest& request, ArtifactCache& into) const {
        (request.device.kind == DeviceKind::cuda ? backends.compile_cuda : backends.compile_cpu)(request, into);
    }

    KernelPointer get(const Spec& spec, const KernelOptions& given) {
        const CallRequests requests = call_requests(spec, local.device, given, defaults());
        if (auto kernel = found(asked, AskedKernelView{spec, given.plan, requests})) return counted(std::move(kernel));
        KernelPointer kernel = built(build_request(spec.normalized(), local.device, local.ref, given.plan, requests), given.plan);
        const std::unique_lock lock(mutex);
        asked.emplace(AskedKernel{spec, given.plan, requests}, kernel);
        return kernel;
    }

    /// One build for all who want the kernel while it runs.
    KernelPointer built(const BuildRequest& wanted, const std::string& given_plan) {
        const KernelKey key{wanted.spec, given_plan, wanted.plan};
        bool is_new = false;
        KernelPointer kernel = builds.run(key, [&] {
            if (auto known = found(kernels, key)) return known;
            const Backends::Make& make = wanted.device.kind == DeviceKind::cuda ? backends.make_cuda : backends.make_cpu;
            KernelPointer made = make(wanted, cache);
            if (given_plan.empty()) first_use.require(*made, backends, options.threads);
            is_new = true;
            const std::unique_lock lock(mutex);
            kernels.emplace(key, made);
            return made;
        });
        return is_new ? kernel : counted(std::move(kernel));
    }

    template <class Map, class Key>
    KernelPointer found(const Map& map, const Key& key) {
        const std::shared_lock lock(mutex);
        const auto place = map.find(key);
        return place == map.end() ? nullptr : place->second;
    }

    KernelPointer counted(KernelPointer from_memory) {
        memory_hits.fetch_add(1, std::memory_order_relaxed);
        return from_memory;
    }
};

Session::Session(SessionOptions options) : state_(std::make_unique<State>(std::move(options), environment(), real_backends())) {}
Session::Session(std::unique_ptr<State> state) : state_(std::move(state)) {}
Session::~Session() = default;
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;

Session SessionAccess::make(SessionOptions options, const Environment& environment, Backends backends) {
    return Session(std::make_unique<Session::State>(std::move(options), environment, std::move(backends)));
}

DeviceRef SessionAccess::device_ref(const Session& session) { return session.state_->local.ref; }

std::shared_ptr<const Kernel> Session::get_kernel(const Spec& spec, const KernelOptions& options) {
    State& state = *state_;
    try {
        return state.within_limit(spec, state.local.device, options, [&] { return state.get(spec, options); });
    } catch (const CacheMissError& miss) {
        throw CacheMissError(fmt::format(
            "strict mode compiles nothing, and {}; compile with: {}", miss.what(),
            prewarm_command(spec, state.local.device, options.plan, completed(options, state.defaults()), state.options.threads)));
    }
}

PlanChoice Session::choose_plan(const Spec& spec, const Device& device, const KernelOptions& options) {
    State& state = *state_;
    const Spec normalized = spec.normalized();
    return state.within_limit(normalized, device, options, [&] {
        ChosenPlan chosen = state.choose(normalized, device, options.plan, call_requests(normalized, device, options, state.defaults()));
        std::vector<std::string> reasons = answer_reasons(state.query(normalized, device, options.plan, chosen.request), chosen.answer);
        return PlanChoice{std::move(chosen.answer.plan), std::move(chosen.answer.source), std::move(reasons)};
    });
}

std::optional<MeasuredTime> SessionAccess::measured_time(Session& session, const Spec& spec, const Device& device, const Plan& plan,
                                                         const PlanRequest& request, std::string_view retained) {
    Session::State& state = *session.state_;
    const Spec normalized = spec.normalized();
    return flce::measured_time(state.query(normalized, device, "", request), plan, retained, state.records);
}

std::vector<TierStatistics> SessionAccess::tiers(const Session& session) {
    std::vector<TierStatistics> tiers = session.state_->cache.statistics().tiers;
    for (TierStatistics& tier : tiers) {
        if (tier.name == "memory") tier.hits += session.state_->memory_hits;
    }
    return tiers;
}

Plan SessionAccess::plan(Session& session, const Spec& spec, const Device& device, const KernelOptions& options) {
    return session.state_->build_request(spec, device, options).plan;
}

std::vector<Plan> SessionAccess::plans_for_any_tokens(Session& session, const Spec& spec, const Device& device, KernelOptions options) {
    Session::State& state = *session.state_;
    std::vector<Plan> plans;
    std::vector<CallRequests> seen;
    const PlanRequest given = completed(options, state.defaults());
    // The limit may be too small for some of the numbers: no session will have them.
    const bool limited = given.workspace_limit_bytes > 0 && options.plan.empty();
    const std::int64_t least = limited ? smallest_scratch_bytes(spec, device).value_or(0) : 0;
    for (const std::int64_t num_tokens : representative_tokens(spec, given.workspace_limit_bytes, given.scratch_bytes)) {
        options.num_tokens = num_tokens;
        try {
            const CallRequests requests = call_requests(spec, device, options, state.defaults());
            if (limited && requests.first.scratch_bytes < least) continue;
            if (std::ranges::find(seen, requests) != seen.end()) continue;
            seen.push_back(requests);
        } catch (const PlanError&) {
            if (!limited) throw;
            continue;
        }
        const Plan plan = SessionAccess::plan(session, spec, device, options);
        if (std::ranges::find(plans, plan) == plans.end()) plans.push_back(plan);
    }
    options.num_tokens = 0;
    if (plans.empty()) return {SessionAccess::plan(session, spec, device, options)};  // throws, saying why
    return plans;
}

PrewarmResult SessionAccess::prewarm(Session& session, const Spec& spec, const Device& device, const KernelOptions& options,
                                     const OnUse& on_use) {
    Session::State& state = *session.state_;
    // A cache of its own over the same tiers, so that the counts are this call's alone.
    ArtifactCache::Options cache_options = state.cache.options();
    cache_options.creates = true;
    cache_options.strict = false;
    cache_options.on_use = on_use;
    ArtifactCache cache(std::move(cache_options));
    const auto count = [&] {
        const SessionStatistics done = session_statistics(cache.statistics());
        const std::lock_guard lock(state.prewarm_mutex);
        state.prewarmed = sum(state.prewarmed, done);
        return PrewarmResult{done.compiled, done.memory_hits + done.disk_hits + done.pack_hits + done.remote_hits};
    };
    try {
        state.compile(state.build_request(spec, device, options), cache);
    } catch (...) {
        (void)count();
        throw;
    }
    return count();
}

PrewarmResult Session::prewarm(const Spec& spec, const Device& device, const KernelOptions& options) {
    return SessionAccess::prewarm(*this, spec, device, options, {});
}

std::vector<std::string> Session::missing(const Spec& spec, const Device& device, const KernelOptions& options) {
    const BuildRequest request = state_->build_request(spec, device, options);
    ArtifactCache::Options looked_in = state_->cache.options();
    looked_in.creates = false;
    ArtifactCache cache(looked_in);
    try {
        state_->compile(request, cache);
        return {};
    } catch (const CacheMissError&) {
        return {request.plan.text()};
    }
}

const Device& Session::device() const noexcept { return state_->local.device; }

SessionStatistics Session::statistics() const {
    SessionStatistics statistics = session_statistics(state_->cache.statistics());
    statistics.memory_hits += state_->memory_hits;
    const std::lock_guard lock(state_->prewarm_mutex);
    const std::int64_t memory_hits = statistics.memory_hits;  // hits of get_kernel alone
    statistics = sum(statistics, state_->prewarmed);
    statistics.memory_hits = memory_hits;
    return statistics;
}

const std::filesystem::path& Session::cache_dir() const noexcept { return state_->cache.directory(); }
const std::filesystem::path& Session::records_dir() const noexcept { return state_->records.places().directory; }

Session& default_session() {
    static Session* const session = new Session();
    return *session;
}

std::shared_ptr<const Kernel> get_kernel(const Spec& spec) { return default_session().get_kernel(spec); }

std::string_view version() noexcept { return FLCE_VERSION; }

}  // namespace flce
