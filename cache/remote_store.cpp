#include "cache/remote_store.hpp"

#include <fmt/format.h>

#include <exception>
#include <utility>

#include "cache/artifact_format.hpp"
#include "cache/log.hpp"
#include "flce/error.hpp"

namespace flce {
namespace {

std::unique_ptr<RemoteTransport> make_transport(const RemoteOptions& options) {
    const std::string scheme = options.url.substr(0, std::min(options.url.find("://"), options.url.size()));
    if (scheme == "http" || scheme == "https" || scheme == "s3") return make_http_transport(options);
    if (scheme == "redis") return make_redis_transport(options);
    throw EnvironmentError(fmt::format("the remote cache is \"{}\"; allowed are http://, https://, s3:// and redis:// URLs",
                                       without_credentials(options.url)));
}

std::int64_t steady_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::string without_credentials(const std::string& url) {
    const std::size_t start = url.find("://");
    if (start == std::string::npos) return url;
    const std::size_t end = std::min(url.find_first_of("/?#", start + 3), url.size());
    const std::size_t at = url.rfind('@', end);
    if (at == std::string::npos || at < start) return url;
    return url.substr(0, start + 3) + url.substr(at + 1);
}

RemoteStore::RemoteStore(const RemoteOptions& options) : RemoteStore(make_transport(options), options) {}

RemoteStore::RemoteStore(std::unique_ptr<RemoteTransport> transport, const RemoteOptions& options)
    : shown_url_(without_credentials(options.url)),
      transport_(std::move(transport)),
      trusted_(options.trusted),
      writes_(!options.read_only && (options.trusted.empty() || options.signs)) {}

bool RemoteStore::resting() const { return steady_ns() < rests_until_ns_.load(std::memory_order_relaxed); }

void RemoteStore::fail(const std::string& what, const std::string& why) {
    const std::string message = fmt::format("cache: remote {}: {}: {}", shown_url_, what, why);
    {
        const std::lock_guard lock(mutex_);
        last_failure_ = fmt::format("{}: {}: {}", shown_url_, what, why);
    }
    if (!warned_.exchange(true, std::memory_order_relaxed)) {
        logger().warn("{}; it is tried again now and then, without another warning", message);
    } else {
        logger().debug("{}", message);
    }
}

std::string RemoteStore::out_of_use() {
    if (!resting()) return {};
    const std::lock_guard lock(mutex_);
    return last_failure_;
}

Lookup RemoteStore::get(const CacheKey& key) try {
    if (resting()) return {};
    RemoteTransport::Reply reply = transport_->get(key, kMaxEntryBytes);
    if (!reply.failure.empty()) {
        rests_until_ns_ = steady_ns() + std::chrono::nanoseconds(kRest).count();
        fail("not read", reply.failure);
        return {.fault = true};
    }
    if (!reply.found) return {};
    Lookup found;
    std::string why;
    found.entry = std::move(reply.bytes);
    found.artifact = decode_artifact(key, found.entry, why, trusted_);
    if (found.artifact) return found;
    fail(fmt::format("entry {} is not used", key.hex()), why);
    return {.fault = true};
} catch (const std::exception& error) {
    fail("not read", error.what());
    return {.fault = true};
}

Kept RemoteStore::put(const CacheKey& key, std::span<const std::byte> entry, Durability) try {
    if (!writes_ || resting()) return Kept::no;
    const std::string failure = transport_->put(key, entry);
    if (failure.empty()) return Kept::yes;
    rests_until_ns_ = steady_ns() + std::chrono::nanoseconds(kRest).count();
    fail("not written", failure);
    return Kept::fault;
} catch (const std::exception& error) {
    fail("not written", error.what());
    return Kept::fault;
}

}  // namespace flce
