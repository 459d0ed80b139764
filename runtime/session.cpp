#include "runtime/session.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <future>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "runtime/cache_options.hpp"
#include "runtime/plan_choice.hpp"
#include "runtime/prewarm_command.hpp"
#include "runtime/scratch_steps.hpp"

namespace flce {
namespace {

// What of a call's memory and size its plan depends on.
struct Situation {
    std::int64_t scratch_bytes = 0;
    std::int64_t limit_bytes = 0;  // 0: none
    std::int64_t num_tokens = 0;   // a token bucket
    friend bool operator==(const Situation&, const Situation&) = default;
};

// A kernel as it is asked for. Specs that differ only in implied fields are one kernel under several of these.
struct Request {
    Spec spec;
    std::string plan;
    Situation at;
};

// The same without copies, for the hot lookup.
struct RequestView {
    const Spec& spec;
    std::string_view plan;
    Situation at;
};

struct RequestHash {
    using is_transparent = void;
    template <class R>
    std::size_t operator()(const R& request) const noexcept {
        const Situation& at = request.at;
        std::size_t hash =
            SpecHash{}(request.spec) +
            (static_cast<std::size_t>(at.scratch_bytes) + 31 * static_cast<std::size_t>(at.limit_bytes)) * 0x9E3779B97F4A7C15ULL;
        hash += static_cast<std::size_t>(at.num_tokens) * 0xC2B2AE3D27D4EB4FULL;
        if (!request.plan.empty()) hash ^= std::hash<std::string_view>{}(request.plan);
        return hash;
    }
};

struct RequestEqual {
    using is_transparent = void;
    template <class A, class B>
    bool operator()(const A& a, const B& b) const noexcept {
        return a.at == b.at && std::string_view(a.plan) == std::string_view(b.plan) && a.spec == b.spec;
    }
};

/// Refers to both.
PlanQuery plan_query(const Request& request, const Device& device, int threads) {
    return {.spec = request.spec,
            .device = device,
            .plan = request.plan,
            .scratch_bytes = request.at.scratch_bytes,
            .limit_bytes = request.at.limit_bytes,
            .num_tokens = request.at.num_tokens,
            .threads = threads};
}

using KernelPointer = std::shared_ptr<const Kernel>;
template <class Value>
using RequestMap = std::unordered_map<Request, Value, RequestHash, RequestEqual>;

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
          records(record_places(options, environment)) {
        if (options.scratch_bytes <= 0) {
            throw PlanError(fmt::format("scratch_bytes is {}; it must be positive", options.scratch_bytes));
        }
        if (options.workspace_limit_bytes < 0) {
            throw PlanError(fmt::format("workspace_limit_bytes is {}; it must be positive, or 0 for none", options.workspace_limit_bytes));
        }
        if (options.threads < 0) throw ArgumentError(fmt::format("threads is {}; allowed are 0 (every core) and more", options.threads));
        if (options.threads == 0) options.threads = environment.num_threads;
    }

    SessionOptions options;
    Backends backends;
    LocalDevice local;
    ArtifactCache cache;
    RecordStore records;

    mutable std::shared_mutex mutex;
    RequestMap<KernelPointer> kernels;
    RequestMap<std::shared_future<KernelPointer>> in_flight;

    std::atomic<std::int64_t> memory_hits{0};
    // What prewarm did in caches of its own.
    std::mutex prewarm_mutex;
    SessionStatistics prewarmed;

    [[nodiscard]] std::int64_t limit_of(const KernelOptions& given) const {
        return given.workspace_limit_bytes == 0 ? options.workspace_limit_bytes : given.workspace_limit_bytes;
    }

    /// A call's options with what the session has for those that it does not give.
    [[nodiscard]] KernelOptions effective(KernelOptions given) const {
        if (given.scratch_bytes == 0) given.scratch_bytes = options.scratch_bytes;
        given.workspace_limit_bytes = limit_of(given);
        return given;
    }

    /// Scratch of a call's kernel, within its limit.
    [[nodiscard]] std::int64_t scratch_of(const Spec& spec, const KernelOptions& given) const {
        const std::int64_t scratch = given.scratch_bytes == 0 ? options.scratch_bytes : given.scratch_bytes;
        if (limit_of(given) == 0 || !given.plan.empty()) return scratch;
        const std::int64_t room = scratch_room(spec, limit_of(given), given.num_tokens);
        return room >= scratch ? scratch : round_down_to_step(room);
    }

    /// The same for a kernel that can use what the limit leaves for scratch alone.
    [[nodiscard]] std::int64_t wide_scratch_of(const Spec& spec, const KernelOptions& given) const {
        const std::int64_t scratch = scratch_of(spec, given);
        if (limit_of(given) == 0 || !given.plan.empty() || given.scratch_bytes != 0) return scratch;
        return std::max(scratch, std::min(round_down_to_step(scratch_room(spec, limit_of(given), given.num_tokens)), kMostUsefulScratch));
    }

    KernelPointer find(const RequestView& request) {
        const std::shared_lock lock(mutex);
        const auto found = kernels.find(request);
        if (found == kernels.end()) return nullptr;
        memory_hits.fetch_add(1, std::memory_order_relaxed);
        return found->second;
    }

    /// Limits in steps and tokens in buckets: what differs a little is one request. Limits with room for everything are one, too.
    [[nodiscard]] Situation situation(const Spec& spec, const Device& device, std::int64_t scratch_bytes,
                                      const KernelOptions& given) const {
        constexpr std::int64_t kRoomForAll = std::int64_t{1} << 60;
        std::int64_t limit = limit_of(given);
        if (limit > 0) {
            const PlanRequest request{.scratch_bytes = scratch_bytes, .limit_bytes = limit, .num_tokens = given.num_tokens};
            limit = retains_apart(spec.normalized(), device, request) ? kRoomForAll : round_down_to_step(limit);
        }
        return {scratch_bytes, limit, token_bucket(given.num_tokens)};
    }

    /// In the place of an error: that the call's limit is too small, and how much is enough, where that is the reason.
    void refuse_small_limit(const Spec& spec, const Device& device, const KernelOptions& given) const {
        const std::int64_t limit = limit_of(given);
        if (limit <= 0 || !given.plan.empty()) return;
        const auto smallest = smallest_limit_bytes(spec, device, given.num_tokens);
        if (!smallest || limit >= *smallest) return;
        const std::string tokens = given.num_tokens > 0 ? fmt::format(" with {} tokens", given.num_tokens) : "";
        throw PlanError(limit_too_small(limit, *smallest, fmt::format("{}{} on {}", spec.text(), tokens, device.name)));
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

    [[nodiscard]] BuildRequest build_request(const Request& request, const Device& device, DeviceRef ref) {
        const PlanAnswer answer = plan_for(plan_query(request, device, options.threads), records);
        // With copies: kernels outlive sessions.
        const auto reasons = [request, device, answer, threads = options.threads] {
            const PlanQuery query = plan_query(request, device, threads);
            std::vector<std::string> reasons = answer_reasons(query, answer);
            reasons.push_back(time_reason(query, answer));
            return reasons;
        };
        return {request.spec, device, answer.plan, ref, options.threads, reasons};
    }

    /// A kernel that is there already, of a request for another number of tokens or limit which came to the same plan.
    KernelPointer of_same_plan(const Request& request, const Plan& plan) const {
        const std::shared_lock lock(mutex);
        for (const auto& [other, kernel] : kernels) {
            if (other.plan == request.plan && other.spec == request.spec && kernel->plan() == plan) return kernel;
        }
        return nullptr;
    }

    KernelPointer build(const Request& request) {
        const BuildRequest wanted = build_request(request, local.device, local.ref);
        if (auto kernel = of_same_plan(request, wanted.plan)) return kernel;
        const Backends::Make& make = local.device.kind == DeviceKind::cuda ? backends.make_cuda : backends.make_cpu;
        return make(wanted, cache);
    }

    void compile(const BuildRequest& request, ArtifactCache& into) const {
        (request.device.kind == DeviceKind::cuda ? backends.compile_cuda : backends.compile_cpu)(request, into);
    }

    /// All that get_kernel would build on `device`, in its order.
    [[nodiscard]] std::vector<BuildRequest> requests(const Spec& spec, const Device& device, const KernelOptions& given) {
        return within_limit(spec, device, given, [&] { return requests_of(spec.normalized(), device, given); });
    }

    [[nodiscard]] std::vector<BuildRequest> requests_of(const Spec& normalized, const Device& device, const KernelOptions& given) {
        const auto request = [&](std::int64_t scratch) {
            return build_request({normalized, given.plan, situation(normalized, device, scratch, given)}, device, {device.kind, 0});
        };
        std::vector<BuildRequest> all{request(scratch_of(normalized, given))};
        const std::int64_t wide = wide_scratch_of(normalized, given);
        if (wide > all[0].plan.scratch_bytes && backends.retained_bytes(all[0], tokens_of(given)) == 0) all.push_back(request(wide));
        return all;
    }

    [[nodiscard]] static std::int64_t tokens_of(const KernelOptions& given) { return std::max<std::int64_t>(given.num_tokens, 1); }

    KernelPointer get(const Spec& spec, const std::string& plan, const Situation& at) {
        if (auto kernel = find({spec, plan, at})) return kernel;
        Request request{spec.normalized(), plan, at};
        auto kernel = get_or_build(request);
        if (!(request.spec == spec)) {
            request.spec = spec;
            const std::unique_lock lock(mutex);
            kernels.emplace(std::move(request), kernel);
        }
        return kernel;
    }

    // One build for all who ask while it runs. `request` is normalized.
    KernelPointer get_or_build(const Request& request) {
        std::promise<KernelPointer> promise;
        std::shared_future<KernelPointer> other;
        {
            const std::unique_lock lock(mutex);
            if (const auto known = kernels.find(request); known != kernels.end()) {
                memory_hits.fetch_add(1, std::memory_order_relaxed);
                return known->second;
            }
            if (const auto leader = in_flight.find(request); leader != in_flight.end()) {
                other = leader->second;
            } else {
                in_flight.emplace(request, promise.get_future().share());
            }
        }
        if (other.valid()) {
            KernelPointer kernel = other.get();
            memory_hits.fetch_add(1, std::memory_order_relaxed);
            return kernel;
        }
        try {
            KernelPointer kernel = build(request);
            const std::unique_lock lock(mutex);
            kernels.insert_or_assign(request, kernel);
            in_flight.erase(request);
            promise.set_value(kernel);
            return kernel;
        } catch (...) {
            // Forgotten before the waiters hear of it, so that whoever tries again after an error really does.
            const std::unique_lock lock(mutex);
            in_flight.erase(request);
            promise.set_exception(std::current_exception());
            throw;
        }
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
        return state.within_limit(spec, state.local.device, options, [&] {
            auto kernel =
                state.get(spec, options.plan, state.situation(spec, state.local.device, state.scratch_of(spec, options), options));
            const std::int64_t wide = state.wide_scratch_of(spec, options);
            if (wide <= kernel->plan().scratch_bytes || kernel->retained_bytes(State::tokens_of(options)) > 0) return kernel;
            return state.get(spec, options.plan, state.situation(spec, state.local.device, wide, options));
        });
    } catch (const CacheMissError& miss) {
        throw CacheMissError(fmt::format("strict mode compiles nothing, and {}; compile with: {}", miss.what(),
                                         prewarm_command(spec, state.local.device, state.effective(options), state.options.threads)));
    }
}

PlanChoice Session::choose_plan(const Spec& spec, const Device& device, const KernelOptions& options) {
    State& state = *state_;
    const Spec normalized = spec.normalized();
    const auto choose = [&](std::int64_t scratch) {
        const Request request{normalized, options.plan, state.situation(normalized, device, scratch, options)};
        const PlanQuery query = plan_query(request, device, state.options.threads);
        PlanAnswer answer = plan_for(query, state.records);
        std::vector<std::string> reasons = answer_reasons(query, answer);
        return PlanChoice{std::move(answer.plan), std::move(answer.source), std::move(reasons)};
    };
    return state.within_limit(normalized, device, options, [&] {
        PlanChoice choice = choose(state.scratch_of(normalized, options));
        const std::int64_t wide = state.wide_scratch_of(normalized, options);
        if (wide <= choice.plan.scratch_bytes) return choice;
        const bool retains = choice.plan.path == PlanPath::cpu || choice.plan.strategy == Strategy::retain;
        return retains ? choice : choose(wide);
    });
}

std::optional<MeasuredTime> SessionAccess::measured_time(Session& session, const Spec& spec, const Device& device, const Plan& plan,
                                                         std::int64_t num_tokens, const TunedMemory& memory) {
    Session::State& state = *session.state_;
    const Spec normalized = spec.normalized();
    const PlanQuery query{.spec = normalized, .device = device, .num_tokens = num_tokens, .threads = state.options.threads};
    return flce::measured_time(query, plan, memory, state.records);
}

std::vector<TierStatistics> SessionAccess::tiers(const Session& session) {
    std::vector<TierStatistics> tiers = session.state_->cache.statistics().tiers;
    for (TierStatistics& tier : tiers) {
        if (tier.name == "memory") tier.hits += session.state_->memory_hits;
    }
    return tiers;
}

std::vector<Plan> SessionAccess::plans(Session& session, const Spec& spec, const Device& device, const KernelOptions& options) {
    std::vector<Plan> plans;
    for (BuildRequest& request : session.state_->requests(spec, device, options)) plans.push_back(std::move(request.plan));
    return plans;
}

std::vector<Plan> SessionAccess::plans_for_any_tokens(Session& session, const Spec& spec, const Device& device, KernelOptions options) {
    Session::State& state = *session.state_;
    std::vector<Plan> plans;
    std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> seen;
    const KernelOptions given = state.effective(options);
    // So many tokens may not fit the limit: no session will have them.
    const bool limited = given.workspace_limit_bytes > 0 && given.plan.empty();
    const std::int64_t least = limited ? smallest_scratch_bytes(spec, device).value_or(0) : 0;
    const auto fits = [&] {
        try {
            return state.scratch_of(spec, options) >= least;
        } catch (const PlanError&) {
            return false;
        }
    };
    for (const std::int64_t num_tokens : representative_tokens(spec, given.workspace_limit_bytes, given.scratch_bytes)) {
        options.num_tokens = num_tokens;
        if (limited && !fits()) continue;
        if (!seen.emplace(state.scratch_of(spec, options), state.wide_scratch_of(spec, options), token_bucket(num_tokens)).second) continue;
        for (Plan& plan : SessionAccess::plans(session, spec, device, options)) {
            if (std::ranges::find(plans, plan) == plans.end()) plans.push_back(std::move(plan));
        }
    }
    options.num_tokens = 0;
    if (plans.empty()) return SessionAccess::plans(session, spec, device, options);  // throws, saying why
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
        for (const BuildRequest& request : state.requests(spec, device, options)) state.compile(request, cache);
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
    ArtifactCache::Options looked_in = state_->cache.options();
    looked_in.creates = false;
    std::vector<std::string> missing;
    for (const BuildRequest& request : state_->requests(spec, device, options)) {
        ArtifactCache cache(looked_in);
        try {
            state_->compile(request, cache);
        } catch (const CacheMissError&) {
            missing.push_back(request.plan.text());
        }
    }
    return missing;
}

const Device& Session::device() const noexcept { return state_->local.device; }

SessionStatistics Session::statistics() const {
    SessionStatistics statistics = session_statistics(state_->cache.statistics());
    statistics.memory_hits += state_->memory_hits;
    const std::lock_guard lock(state_->prewarm_mutex);
    const std::int64_t memory_hits = statistics.memory_hits;  // of get_kernel alone
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
