// A cache that several machines share, behind a network: HTTP, S3 or redis. Whatever it does wrong costs time and nothing else.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>

#include "cache/signature.hpp"
#include "cache/store.hpp"

namespace flce {

/// Credentials and place of an S3 service, as its other clients take them from AWS_… variables.
struct S3Access {
    std::string access_key;  ///< empty: requests are not signed
    std::string secret_key;
    std::string session_token;
    std::string region = "us-east-1";
    std::string endpoint;               ///< "http://host:port" of another service than Amazon's; empty: Amazon's
    std::filesystem::path authorities;  ///< certificates as in RemoteOptions; empty: those of RemoteOptions
};

struct RemoteOptions {
    /// http://… or https://… (GET and PUT of <url>/<first two hex digits>/<key>.art), s3://bucket/prefix,
    /// redis://[user:password@]host[:port][/database].
    std::string url;
    std::chrono::milliseconds timeout{5000};  ///< most time for one lookup or one entry stored, connecting included
    bool read_only = false;
    TrustedKeys trusted;  ///< with any, entries must be signed by one of them
    bool signs = false;   ///< entries that this process stores are signed
    /// Certificates (PEM), a file or a folder as `openssl rehash` makes it, one of which an https server must show to be vouched for by;
    /// empty: those that libcurl takes, which are the system's.
    std::filesystem::path authorities;
    S3Access s3;
};

/// How entries travel. Thread-safe; a process that forks does not share connections with its child.
class RemoteTransport {
public:
    RemoteTransport() = default;
    virtual ~RemoteTransport() = default;
    RemoteTransport(const RemoteTransport&) = delete;
    RemoteTransport& operator=(const RemoteTransport&) = delete;

    struct Reply {
        bool found = false;
        std::vector<std::byte> bytes;
        std::string failure;   ///< failure; empty: none, the entry is there or it is not
        bool refused = false;  ///< with a failure: the server is up and says no
        std::string doubt;     ///< why "not there" may be something else; said once
    };
    /// No more than `max_bytes` are taken into memory.
    [[nodiscard]] virtual Reply get(const CacheKey& key, std::size_t max_bytes) = 0;
    /// Stores the entry. Returns the failure; empty: none.
    [[nodiscard]] virtual std::string put(const CacheKey& key, std::span<const std::byte> entry) = 0;
};

/// Throw EnvironmentError for a URL that is not understood.
[[nodiscard]] std::unique_ptr<RemoteTransport> make_http_transport(const RemoteOptions& options);   ///< http, https, s3
[[nodiscard]] std::unique_ptr<RemoteTransport> make_redis_transport(const RemoteOptions& options);  ///< redis

class RemoteStore final : public Store {
public:
    /// Throws EnvironmentError for a URL that is not understood. Connects to nothing yet.
    explicit RemoteStore(const RemoteOptions& options);
    RemoteStore(std::unique_ptr<RemoteTransport> transport, const RemoteOptions& options);

    [[nodiscard]] std::string_view name() const noexcept override { return "remote"; }
    [[nodiscard]] Lookup get(const CacheKey& key) override;
    /// Stores the entry, except in a cache whose readers ask for signatures when this process has no key to sign with.
    [[nodiscard]] Kept put(const CacheKey& key, std::span<const std::byte> entry, Durability durability) override;
    /// Leaves the entry where it is. The process that compiles a good entry stores it over the bad one.
    [[nodiscard]] bool reject(const CacheKey& key, std::span<const std::byte> entry, const std::string& why) override;
    /// Why the network is being left alone after a failure; empty: it is not.
    [[nodiscard]] std::string out_of_use() override;

    /// After a failure the network is left alone for this long, so that a server that is down costs one timeout, not one a kernel. One that
    /// takes no entries is read meanwhile, and one that gives none is written: only a server that cannot be reached when it is read rests
    /// as a whole.
    static constexpr std::chrono::seconds kRest{30};

private:
    using Rest = std::atomic<std::int64_t>;  // end of the rest, of the steady clock, which does not jump

    void fail(const std::string& what, const std::string& why);

    std::string shown_url_;
    std::unique_ptr<RemoteTransport> transport_;
    TrustedKeys trusted_;
    bool writes_;
    Rest reads_rest_until_ns_{0};
    Rest writes_rest_until_ns_{0};
    std::atomic<bool> warned_{false};
    std::atomic<bool> doubted_{false};
    std::mutex mutex_;
    std::string last_failure_;  // under mutex_
};

/// A URL for messages: without what stands before its last '@', in which somebody may have written a password, rightly or not.
[[nodiscard]] std::string without_credentials(const std::string& url);

}  // namespace flce
