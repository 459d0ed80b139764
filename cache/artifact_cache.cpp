#include "cache/artifact_cache.hpp"

#include <fmt/format.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "cache/artifact_format.hpp"
#include "cache/disk_store.hpp"
#include "cache/key_lock.hpp"
#include "cache/log.hpp"
#include "cache/single_flight.hpp"
#include "cache/statistics_file.hpp"
#include "flce/error.hpp"

namespace flce {
namespace {

// A SHA-256 is its own hash.
struct KeyHash {
    std::size_t operator()(const CacheKey& key) const noexcept {
        std::size_t value = 0;
        std::memcpy(&value, key.digest.data(), sizeof value);
        return value;
    }
};

struct Result {
    std::shared_ptr<const Artifact> artifact;
    bool created = false;
};

// A tier, with its answers counted by the threads that asked it.
struct Tier {
    explicit Tier(std::shared_ptr<Store> asked) : store(std::move(asked)) {}

    std::shared_ptr<Store> store;
    std::atomic<std::int64_t> hits{0};
    std::atomic<std::int64_t> misses{0};
    std::atomic<std::int64_t> faults{0};
    std::atomic<std::int64_t> stored{0};

    [[nodiscard]] Lookup get(const CacheKey& key) {
        Lookup found = store->get(key);
        if (found.fault) faults.fetch_add(1, std::memory_order_relaxed);
        return found;
    }
    void put(const CacheKey& key, std::span<const std::byte> entry, Durability durability) {
        const Kept kept = store->put(key, entry, durability);
        if (kept == Kept::yes) stored.fetch_add(1, std::memory_order_relaxed);
        if (kept == Kept::fault) faults.fetch_add(1, std::memory_order_relaxed);
    }
    /// Whether the tier may have another.
    [[nodiscard]] bool reject(const CacheKey& key, std::span<const std::byte> entry, const std::string& why) {
        faults.fetch_add(1, std::memory_order_relaxed);
        return store->reject(key, entry, why);
    }
    [[nodiscard]] TierStatistics statistics() const {
        return {std::string(store->name()), hits.load(std::memory_order_relaxed), misses.load(std::memory_order_relaxed),
                faults.load(std::memory_order_relaxed), stored.load(std::memory_order_relaxed)};
    }
};

// A caller's two conditions for artifacts of tiers, and the last reason for a rejection.
struct Judge {
    const std::function<bool(const Artifact&)>& accept;
    const ArtifactCache::PayloadFault& fault;
    std::string rejected = {};  // reason for the last rejection

    [[nodiscard]] bool rejects(const Artifact& artifact) {
        std::string why = fault ? fault(artifact) : "";
        if (why.empty()) return false;
        rejected = std::move(why);
        return true;
    }
};

const std::function<bool(const Artifact&)> kAcceptAll;

}  // namespace

struct ArtifactCache::State {
    Options options;
    std::shared_ptr<DiskStore> disk;
    std::vector<std::unique_ptr<Tier>> tiers;  // the directory, if there is one, is the first

    std::mutex mutex;
    std::unordered_map<CacheKey, std::weak_ptr<const Artifact>, KeyHash> memory;
    std::size_t sweep_at = 64;
    SingleFlight<CacheKey, Result, KeyHash> lookups;

    std::atomic<std::int64_t> memory_hits{0};
    std::atomic<std::int64_t> memory_misses{0};
    std::atomic<std::int64_t> created{0};

    std::mutex telling;
    CacheStatistics told;  // under `telling`

    enum class Ask { first, again };  // again: the same lookup, whose miss is counted

    // Finds an artifact of use in a tier.
    static Lookup find_in(Tier& tier, const CacheKey& key, Judge& judge) {
        for (;;) {
            Lookup found = tier.get(key);
            if (!found.artifact || !judge.rejects(*found.artifact)) return found;
            if (!tier.reject(key, found.entry, judge.rejected)) return {.fault = true};
        }
    }

    // Asks tiers [first, last). Nearer tiers are given the entry that a farther one has.
    std::shared_ptr<const Artifact> find(const CacheKey& key, std::size_t first, std::size_t last, Judge& judge, Ask ask = Ask::first) {
        for (std::size_t i = first; i < last; ++i) {
            Lookup found = find_in(*tiers[i], key, judge);
            if (!found.artifact || (judge.accept && !judge.accept(*found.artifact))) {
                if (ask == Ask::first) tiers[i]->misses.fetch_add(1, std::memory_order_relaxed);
                continue;
            }
            tiers[i]->hits.fetch_add(1, std::memory_order_relaxed);
            for (std::size_t nearer = 0; nearer < i; ++nearer) tiers[nearer]->put(key, found.entry, Durability::whenever);
            if (options.on_use) options.on_use(key, found.entry);
            return std::make_shared<const Artifact>(std::move(*found.artifact));
        }
        return nullptr;
    }

    // Gives an entry to every tier (unless the tiers have it), and to the collecting caller.
    void publish(const CacheKey& key, const Artifact& artifact, bool present = false) try {
        if (tiers.empty() && !options.on_use) return;
        const std::vector<std::byte> entry = encode_artifact(key, artifact, options.signer.get());
        if (!present) {
            for (const auto& tier : tiers) tier->put(key, entry, Durability::now);
        }
        if (options.on_use) options.on_use(key, entry);
    } catch (const std::exception& error) {
        logger().warn("cache: {} is not kept: {}", key.hex(), error.what());
    }

    // Forgets artifacts that nobody holds any more, at a cost spread over the insertions.
    void remember(const CacheKey& key, const std::shared_ptr<const Artifact>& artifact) {
        const std::lock_guard lock(mutex);
        memory[key] = artifact;
        if (memory.size() < sweep_at) return;
        std::erase_if(memory, [](const auto& entry) { return entry.second.expired(); });
        sweep_at = 2 * memory.size() + 64;
    }

    std::shared_ptr<const Artifact> in_memory(const CacheKey& key) {
        const std::lock_guard lock(mutex);
        const auto known = memory.find(key);
        return known == memory.end() ? nullptr : known->second.lock();
    }

    // Does in_memory, counted.
    std::shared_ptr<const Artifact> remembered(const CacheKey& key) {
        auto artifact = in_memory(key);
        (artifact ? memory_hits : memory_misses).fetch_add(1, std::memory_order_relaxed);
        return artifact;
    }

    // Removes an artifact that nobody is to find any more, unless somebody has put another in its place.
    void forget(const CacheKey& key, const std::shared_ptr<const Artifact>& artifact) {
        const std::lock_guard lock(mutex);
        const auto known = memory.find(key);
        if (known != memory.end() && known->second.lock() == artifact) memory.erase(known);
    }

    // Refuses tiers that help nobody: where nobody reads warnings, such a tier is found out only by its cost.
    void refuse_idle_tiers() const {
        if (!options.strict) return;
        for (const auto& tier : tiers) {
            const std::string why = tier->store->out_of_use();
            if (why.empty()) continue;
            throw EnvironmentError(
                fmt::format("strict mode: the {} tier of the kernel cache cannot be used: {}", tier->store->name(), why));
        }
    }

    // Gets an artifact from the tiers, or creates it. `lock` is taken where the artifact may have to be created, and held until the
    // artifact is published.
    Result look_up(const CacheKey& key, const std::function<Artifact()>& create, Judge& judge, std::optional<KeyLock>& lock) {
        // The directory first, then the lock, then the rest: one process of a machine asks a remote store for an entry that all processes
        // want.
        const std::size_t local = disk ? 1 : 0;
        Result result{find(key, 0, local, judge), false};
        const bool worth_a_lock = options.creates || !options.further.empty();
        if (!result.artifact && disk && worth_a_lock && options.lock_wait.count() > 0 && disk->usable(true)) {
            lock.emplace(options.directory, key, options.lock_wait);
            // The process that held the lock may have published and gone since this process looked, even if nobody had to be waited for.
            if (lock->held() || lock->waited()) result.artifact = find(key, 0, local, judge, Ask::again);
        }
        if (!result.artifact) result.artifact = find(key, local, tiers.size(), judge);
        refuse_idle_tiers();
        if (!result.artifact && !options.creates) {
            throw CacheMissError(judge.rejected.empty()
                                     ? fmt::format("no cache has the artifact {}", key.hex())
                                     : fmt::format("no cache has the artifact {} as it should be: {}", key.hex(), judge.rejected));
        }
        if (!result.artifact) {
            result = {std::make_shared<const Artifact>(create()), true};
            created.fetch_add(1, std::memory_order_relaxed);
        }
        remember(key, result.artifact);
        return result;
    }

    // Gets an artifact from memory, from another caller who is at it, or by this one. `rejected`: the others' artifacts are of no use to
    // this caller.
    Result share_or_look_up(const CacheKey& key, const std::function<Artifact()>& create, Judge& judge, bool& rejected) {
        Result result{remembered(key), false};
        if (!result.artifact) {
            std::optional<KeyLock> lock;
            bool looked_up = false;
            result = lookups.run(key, [&]() -> Result {
                if (auto known = in_memory(key)) return {std::move(known), false};
                looked_up = true;
                return look_up(key, create, judge, lock);
            });
            if (looked_up) {
                // Callers that wait have the bytes before the tiers do.
                if (result.created) publish(key, *result.artifact);
                tell_statistics();
                return result;
            }
            memory_hits.fetch_add(1, std::memory_order_relaxed);
        }
        rejected = !result.created && judge.rejects(*result.artifact);
        return result;
    }

    [[nodiscard]] CacheStatistics statistics() const {
        CacheStatistics now;
        now.memory_hits = memory_hits.load(std::memory_order_relaxed);
        now.created = created.load(std::memory_order_relaxed);
        now.tiers.push_back({"memory", now.memory_hits, memory_misses.load(std::memory_order_relaxed), 0, 0});
        for (const auto& tier : tiers) now.tiers.push_back(tier->statistics());
        return now;
    }

    // Adds counts to the file that all processes share. Counts that cannot be added now are added with the next ones; no fault of the file
    // is the caller's.
    void tell_statistics() noexcept try {
        const std::unique_lock lock(telling, std::try_to_lock);
        if (!lock) return;
        const CacheStatistics now = statistics();
        CacheStatistics news = now;
        news.created -= told.created;
        bool anything = news.created != 0;
        for (std::size_t i = 0; i < now.tiers.size(); ++i) {
            TierStatistics& tier = news.tiers[i];
            if (i < told.tiers.size()) {
                tier.hits -= told.tiers[i].hits;
                tier.misses -= told.tiers[i].misses;
                tier.faults -= told.tiers[i].faults;
                tier.stored -= told.tiers[i].stored;
            }
            anything = anything || tier.hits != 0 || tier.misses != 0 || tier.faults != 0 || tier.stored != 0;
        }
        if (!anything) return;
        Counted counted = disk && disk->usable(false) ? add_statistics(options.directory, news) : Counted::no;
        if (counted == Counted::no && options.counts_on_machine) counted = add_machine_statistics(news);
        if (counted == Counted::yes) told = now;
    } catch (const std::exception& error) {
        logger().debug("cache: nothing is counted: {}", error.what());
    }
};

ArtifactCache::ArtifactCache(Options options) : state_(std::make_unique<State>()) {
    state_->options = std::move(options);
    if (!state_->options.directory.empty()) {
        state_->disk = std::make_shared<DiskStore>(state_->options.directory, state_->options.max_bytes);
        state_->tiers.push_back(std::make_unique<Tier>(state_->disk));
    }
    for (const auto& store : state_->options.further) state_->tiers.push_back(std::make_unique<Tier>(store));
    state_->refuse_idle_tiers();
}

ArtifactCache::~ArtifactCache() { state_->tell_statistics(); }

std::shared_ptr<const Artifact> ArtifactCache::get_or_create(const CacheKey& key, const std::function<Artifact()>& create, bool* created,
                                                             const PayloadFault& fault) {
    Judge judge{kAcceptAll, fault};
    for (;;) {
        bool rejected = false;
        const Result result = state_->share_or_look_up(key, create, judge, rejected);
        if (rejected) {
            state_->forget(key, result.artifact);
            continue;
        }
        if (created != nullptr) *created = result.created;
        return result.artifact;
    }
}

std::shared_ptr<const Artifact> ArtifactCache::find(const CacheKey& key, const std::function<bool(const Artifact&)>& accept,
                                                    const PayloadFault& fault) {
    Judge judge{accept, fault};
    if (!accept) {
        const std::shared_ptr<const Artifact> known = state_->remembered(key);
        if (known && !judge.rejects(*known)) return known;
        if (known) state_->forget(key, known);
    }
    auto artifact = state_->find(key, 0, state_->tiers.size(), judge);
    state_->refuse_idle_tiers();
    if (artifact) state_->remember(key, artifact);
    return artifact;
}

void ArtifactCache::keep(const CacheKey& key, const Artifact& artifact, Replace replace) {
    const bool present = replace == Replace::if_absent && (!state_->disk || state_->disk->contains(key));
    if (!present || state_->options.on_use) state_->publish(key, artifact, present);
}

CacheStatistics ArtifactCache::statistics() const {
    CacheStatistics statistics = state_->statistics();
    for (const TierStatistics& did : statistics.tiers) {
        if (did.name == "local") statistics.disk_hits += did.hits, statistics.disk_faults += did.faults;
        if (did.name == "packs") statistics.pack_hits += did.hits, statistics.pack_faults += did.faults;
        if (did.name == "remote") statistics.remote_hits += did.hits, statistics.remote_faults += did.faults;
    }
    return statistics;
}

const std::filesystem::path& ArtifactCache::directory() const noexcept { return state_->options.directory; }

const ArtifactCache::Options& ArtifactCache::options() const noexcept { return state_->options; }

}  // namespace flce
