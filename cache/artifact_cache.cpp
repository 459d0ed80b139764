#include "cache/artifact_cache.hpp"

#include <atomic>
#include <cstring>
#include <exception>
#include <future>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "cache/disk_store.hpp"
#include "cache/key_lock.hpp"

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

}  // namespace

struct ArtifactCache::State {
    Options options;
    std::shared_ptr<DiskStore> disk;
    std::vector<std::shared_ptr<Store>> tiers;

    std::mutex mutex;
    std::unordered_map<CacheKey, std::weak_ptr<const Artifact>, KeyHash> memory;
    std::unordered_map<CacheKey, std::shared_future<Result>, KeyHash> in_flight;
    std::size_t sweep_at = 64;

    std::atomic<std::int64_t> memory_hits{0};
    std::atomic<std::int64_t> disk_hits{0};
    std::atomic<std::int64_t> created{0};

    std::shared_ptr<const Artifact> find(const CacheKey& key) {
        for (std::size_t i = 0; i < tiers.size(); ++i) {
            std::optional<Artifact> found = tiers[i]->get(key);
            if (!found) continue;
            disk_hits.fetch_add(1, std::memory_order_relaxed);
            for (std::size_t nearer = 0; nearer < i; ++nearer) tiers[nearer]->put(key, *found);
            return std::make_shared<const Artifact>(std::move(*found));
        }
        return nullptr;
    }

    // Under the mutex. Forgets artifacts that nobody holds any more, at a cost spread over the insertions.
    void remember(const CacheKey& key, const std::shared_ptr<const Artifact>& artifact) {
        memory[key] = artifact;
        if (memory.size() < sweep_at) return;
        std::erase_if(memory, [](const auto& entry) { return entry.second.expired(); });
        sweep_at = 2 * memory.size() + 64;
    }

    void finish(const CacheKey& key, std::promise<Result>& promise, Result result) {
        {
            const std::lock_guard lock(mutex);
            remember(key, result.artifact);
            in_flight.erase(key);
        }
        promise.set_value(std::move(result));
    }

    Result lead(const CacheKey& key, const std::function<Artifact()>& create, std::promise<Result>& promise) {
        Result result{find(key), false};
        if (result.artifact) {
            finish(key, promise, result);
            return result;
        }
        std::optional<KeyLock> lock;
        if (disk && options.lock_wait.count() > 0 && disk->usable(true)) lock.emplace(options.directory, key, options.lock_wait);
        if (lock && lock->waited()) result.artifact = find(key);
        if (!result.artifact) {
            result = {std::make_shared<const Artifact>(create()), true};
            created.fetch_add(1, std::memory_order_relaxed);
        }
        // Those who wait get the bytes before the disk does.
        finish(key, promise, result);
        if (result.created) {
            for (const auto& tier : tiers) tier->put(key, *result.artifact);
        }
        return result;
    }
};

ArtifactCache::ArtifactCache(Options options) : state_(std::make_unique<State>()) {
    state_->options = std::move(options);
    if (!state_->options.directory.empty()) {
        state_->disk = std::make_shared<DiskStore>(state_->options.directory);
        state_->tiers.push_back(state_->disk);
    }
    for (const auto& store : state_->options.further) state_->tiers.push_back(store);
}

ArtifactCache::~ArtifactCache() = default;

std::shared_ptr<const Artifact> ArtifactCache::get_or_create(const CacheKey& key, const std::function<Artifact()>& create, bool* created) {
    std::promise<Result> promise;
    std::shared_future<Result> other;
    {
        const std::lock_guard lock(state_->mutex);
        if (const auto known = state_->memory.find(key); known != state_->memory.end()) {
            if (auto artifact = known->second.lock()) {
                state_->memory_hits.fetch_add(1, std::memory_order_relaxed);
                if (created != nullptr) *created = false;
                return artifact;
            }
        }
        if (const auto leader = state_->in_flight.find(key); leader != state_->in_flight.end()) {
            other = leader->second;
        } else {
            state_->in_flight.emplace(key, promise.get_future().share());
        }
    }
    Result result;
    if (other.valid()) {
        result = other.get();
        state_->memory_hits.fetch_add(1, std::memory_order_relaxed);
    } else {
        try {
            result = state_->lead(key, create, promise);
        } catch (...) {
            {
                const std::lock_guard lock(state_->mutex);
                state_->in_flight.erase(key);
            }
            promise.set_exception(std::current_exception());
            throw;
        }
    }
    if (created != nullptr) *created = result.created;
    return result.artifact;
}

CacheStatistics ArtifactCache::statistics() const {
    CacheStatistics statistics;
    statistics.memory_hits = state_->memory_hits.load(std::memory_order_relaxed);
    statistics.disk_hits = state_->disk_hits.load(std::memory_order_relaxed);
    statistics.created = state_->created.load(std::memory_order_relaxed);
    for (const auto& tier : state_->tiers) statistics.disk_faults += tier->faults();
    return statistics;
}

const std::filesystem::path& ArtifactCache::directory() const noexcept { return state_->options.directory; }

}  // namespace flce
