// One caller makes what several want at the same time; the others wait for it.
#pragma once

#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace flce {

/// Thread-safe. Nothing is remembered: results belong to the caller's own map, where `make` puts them.
template <class Key, class Value, class Hash = std::hash<Key>>
class SingleFlight {
public:
    /// The result of `make`, which runs once at a time for each key: callers that come while another's runs get its value, or its
    /// exception. Another caller may have finished between this one's look into its map and this call, so `make` looks there again before
    /// it works. `make` may run others, but not one of its own key.
    template <class Make>
    Value run(const Key& key, Make&& make) {
        std::promise<Value> promise;
        std::shared_future<Value> other;
        {
            const std::lock_guard lock(mutex_);
            const auto [place, leads] = in_flight_.try_emplace(key);
            if (leads) {
                place->second = promise.get_future().share();
            } else {
                other = place->second;
            }
        }
        if (other.valid()) return other.get();
        std::optional<Value> value;
        try {
            value.emplace(std::forward<Make>(make)());
        } catch (...) {
            // Forgotten before the others hear of it, so that a caller that tries again after an error makes another attempt.
            forget(key);
            promise.set_exception(std::current_exception());
            throw;
        }
        forget(key);
        promise.set_value(*value);
        return std::move(*value);
    }

private:
    void forget(const Key& key) {
        const std::lock_guard lock(mutex_);
        in_flight_.erase(key);
    }

    std::mutex mutex_;
    std::unordered_map<Key, std::shared_future<Value>, Hash> in_flight_;
};

}  // namespace flce
