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

bool is_resting(const std::atomic<std::int64_t>& until) { return steady_ns() < until.load(std::memory_order_relaxed); }

void rest(std::atomic<std::int64_t>& until) { until = steady_ns() + std::chrono::nanoseconds(RemoteStore::kRest).count(); }

}  // namespace

std::string without_credentials(const std::string& url) {
    const std::size_t scheme = url.find("://");
    const std::size_t start = scheme == std::string::npos ? 0 : scheme + 3;
    // A login may go past the first '/', '?' or '#': they are in passwords that somebody forgot to encode.
    const std::size_t at = url.rfind('@');
    if (at == std::string::npos || at < start) return url;
    return url.substr(0, start) + url.substr(at + 1);
}

RemoteStore::RemoteStore(const RemoteOptions& options) : RemoteStore(make_transport(options), options) {}

RemoteStore::RemoteStore(std::unique_ptr<RemoteTransport> transport, const RemoteOptions& options)
    : shown_url_(without_credentials(options.url)),
      transport_(std::move(transport)),
      trusted_(options.trusted),
      writes_(!options.read_only && (options.trusted.empty() || options.signs)) {}

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
    if (!is_resting(reads_rest_until_ns_) && !is_resting(writes_rest_until_ns_)) return {};
    const std::lock_guard lock(mutex_);
    return last_failure_;
}

Lookup RemoteStore::get(const CacheKey& key) try {
    if (is_resting(reads_rest_until_ns_)) return {};
    RemoteTransport::Reply reply = transport_->get(key, kMaxEntryBytes);
    if (!reply.failure.empty()) {
        rest(reads_rest_until_ns_);
        if (!reply.refused) rest(writes_rest_until_ns_);
        fail("not read", reply.failure);
        return {.fault = true};
    }
    if (!reply.doubt.empty() && !doubted_.exchange(true, std::memory_order_relaxed)) {
        logger().warn("cache: remote {}: {}", shown_url_, reply.doubt);
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

bool RemoteStore::reject(const CacheKey& key, std::span<const std::byte>, const std::string& why) try {
    fail(fmt::format("entry {} is not used", key.hex()), why);
    return false;
} catch (const std::exception&) {
    return false;  // no memory for a message
}

Kept RemoteStore::put(const CacheKey& key, std::span<const std::byte> entry, Durability) try {
    if (!writes_ || is_resting(writes_rest_until_ns_)) return Kept::no;
    const std::string failure = transport_->put(key, entry);
    if (failure.empty()) return Kept::yes;
    rest(writes_rest_until_ns_);
    fail("not written", failure);
    return Kept::fault;
} catch (const std::exception& error) {
    fail("not written", error.what());
    return Kept::fault;
}

}  // namespace flce
