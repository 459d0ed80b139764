// redis by hiredis: GET and SET of flce:<key>. Replies are read here in steps, since hiredis by itself does not bound the time or the size
// of a whole reply.
#include <fmt/format.h>

#include "cache/remote_store.hpp"
#include "flce/error.hpp"

#ifdef FLCE_HAVE_HIREDIS
#include <hiredis/hiredis.h>

#include <array>
#include <charconv>
#include <memory>
#include <utility>

#include "cache/byte_io.hpp"
#include "cache/connection_pool.hpp"

namespace flce {
namespace {

using Clock = std::chrono::steady_clock;

struct RedisPlace {
    std::string user;
    std::string password;
    std::string host;
    int port = 6379;
    int database = 0;
};

std::string percent_decoded(std::string_view text) {
    std::string decoded;
    for (std::size_t i = 0; i < text.size(); ++i) {
        unsigned char byte = 0;
        if (text[i] == '%' && i + 2 < text.size() &&
            std::from_chars(text.data() + i + 1, text.data() + i + 3, byte, 16).ptr == text.data() + i + 3) {
            decoded += static_cast<char>(byte);
            i += 2;
        } else {
            decoded += text[i];
        }
    }
    return decoded;
}

// redis://[user:password@]host[:port][/database]; a host in [] is an IPv6 address.
RedisPlace parse_place(const std::string& url) {
    const auto fail = [&](const char* what) {
        throw EnvironmentError(
            fmt::format("the remote cache is \"{}\"; {} (redis://[user:password@]host[:port][/database])", without_credentials(url), what));
    };
    const auto number = [&](std::string_view text, int most, const char* what) {
        int value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > most) fail(what);
        return value;
    };
    RedisPlace place;
    std::string_view rest = std::string_view(url).substr(std::string_view("redis://").size());
    const std::size_t slash = std::min(rest.find('/'), rest.size());
    if (slash + 1 < rest.size()) place.database = number(rest.substr(slash + 1), 1 << 20, "the database is a number");
    rest = rest.substr(0, slash);
    if (const std::size_t at = rest.rfind('@'); at != std::string_view::npos) {
        const std::string_view login = rest.substr(0, at);
        const std::size_t colon = login.find(':');
        if (colon == std::string_view::npos) fail("a login is user:password, or :password");
        place.user = percent_decoded(login.substr(0, colon));
        place.password = percent_decoded(login.substr(colon + 1));
        rest = rest.substr(at + 1);
    }
    std::size_t host_end = std::min(rest.find(':'), rest.size());
    if (rest.starts_with('[')) {
        const std::size_t bracket = rest.find(']');
        if (bracket == std::string_view::npos) fail("the address has no ]");
        place.host = rest.substr(1, bracket - 1);
        host_end = bracket + 1;
    } else {
        place.host = rest.substr(0, host_end);
    }
    if (place.host.empty()) fail("it names no host");
    if (host_end < rest.size()) place.port = number(rest.substr(host_end + 1), 65535, "the port is a number up to 65535");
    return place;
}

struct CloseContext {
    void operator()(redisContext* context) const { redisFree(context); }
};
using Connection = std::unique_ptr<redisContext, CloseContext>;

struct FreeReply {
    void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using ReplyPointer = std::unique_ptr<redisReply, FreeReply>;

timeval time_left(Clock::time_point deadline) {
    const auto left = std::max<std::int64_t>(1000, std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count());
    return {static_cast<time_t>(left / 1'000'000), static_cast<suseconds_t>(left % 1'000'000)};
}

/// One exchange on one connection: a command sent, its reply read, by a deadline and up to a size.
struct Exchange {
    redisContext* context;
    Clock::time_point deadline;
    std::size_t max_bytes;
    std::string failure{};

    [[nodiscard]] ReplyPointer command(std::initializer_list<std::string_view> words) {
        std::vector<const char*> pointers;
        std::vector<std::size_t> sizes;
        for (const std::string_view word : words) {
            pointers.push_back(word.data());
            sizes.push_back(word.size());
        }
        if (redisAppendCommandArgv(context, static_cast<int>(words.size()), pointers.data(), sizes.data()) != REDIS_OK) return fail();
        for (int done = 0; done == 0;) {
            if (!in_time() || redisBufferWrite(context, &done) != REDIS_OK) return fail();
        }
        while (true) {
            void* reply = nullptr;
            if (redisGetReplyFromReader(context, &reply) != REDIS_OK) return fail();
            if (reply != nullptr) return check(ReplyPointer(static_cast<redisReply*>(reply)));
            if (context->reader->len > max_bytes + kFraming) failure = fmt::format("more than {} bytes", max_bytes);
            if (!failure.empty() || !in_time() || redisBufferRead(context) != REDIS_OK) return fail();
        }
    }

private:
    static constexpr std::size_t kFraming = 64 << 10;

    bool in_time() {
        if (Clock::now() >= deadline) failure = "no answer in time";
        return failure.empty() && redisSetTimeout(context, time_left(deadline)) == REDIS_OK;
    }
    ReplyPointer fail() {
        // A socket's own timeout shows as EAGAIN.
        if (failure.empty()) failure = Clock::now() >= deadline ? "no answer in time" : context->errstr;
        if (failure.empty()) failure = "the connection failed";
        return nullptr;
    }
    ReplyPointer check(ReplyPointer reply) {
        if (reply->type != REDIS_REPLY_ERROR) return reply;
        failure = std::string(reply->str, reply->len);
        return nullptr;
    }
};

class RedisTransport final : public RemoteTransport {
public:
    RedisTransport(RedisPlace place, std::chrono::milliseconds timeout) : place_(std::move(place)), timeout_(timeout) {}

    [[nodiscard]] Reply get(const CacheKey& key, std::size_t max_bytes) override {
        Reply result;
        const ReplyPointer reply = exchange({"GET", name_of(key)}, max_bytes, result.failure);
        if (!reply || reply->type == REDIS_REPLY_NIL) return result;
        if (reply->type != REDIS_REPLY_STRING) return {.failure = "a reply that is no string"};
        const auto bytes = as_byte_span({reply->str, reply->len});
        result.found = true;
        result.bytes.assign(bytes.begin(), bytes.end());
        return result;
    }

    [[nodiscard]] std::string put(const CacheKey& key, std::span<const std::byte> entry) override {
        std::string failure;
        (void)exchange({"SET", name_of(key), as_text(entry)}, 0, failure);
        return failure;
    }

private:
    static std::string name_of(const CacheKey& key) { return "flce:" + key.hex(); }

    // A failure on a connection that has been lying about may only mean that the server closed it: then the request goes once more on a new
    // one.
    ReplyPointer exchange(std::initializer_list<std::string_view> words, std::size_t max_bytes, std::string& failure) {
        const auto deadline = Clock::now() + timeout_;
        if (Connection idle = pool_.take()) {
            if (auto reply = on(std::move(idle), words, max_bytes, deadline, failure)) return reply;
        }
        Connection fresh = connect(deadline, failure);
        return fresh ? on(std::move(fresh), words, max_bytes, deadline, failure) : nullptr;
    }

    ReplyPointer on(Connection connection, std::initializer_list<std::string_view> words, std::size_t max_bytes, Clock::time_point deadline,
                    std::string& failure) {
        Exchange exchange{connection.get(), deadline, max_bytes};
        ReplyPointer reply = exchange.command(words);
        failure = exchange.failure;
        if (reply) pool_.give_back(std::move(connection));
        return reply;
    }

    Connection connect(Clock::time_point deadline, std::string& failure) const {
        Connection connection(redisConnectWithTimeout(place_.host.c_str(), place_.port, time_left(deadline)));
        failure = !connection ? "out of memory" : connection->err != 0 ? connection->errstr : "";
        if (!failure.empty()) return nullptr;
        Exchange exchange{connection.get(), deadline, 0};
        if (!place_.password.empty()) {
            (void)(place_.user.empty() ? exchange.command({"AUTH", place_.password})
                                       : exchange.command({"AUTH", place_.user, place_.password}));
        }
        if (exchange.failure.empty() && place_.database != 0) (void)exchange.command({"SELECT", std::to_string(place_.database)});
        failure = exchange.failure;
        return failure.empty() ? std::move(connection) : nullptr;
    }

    RedisPlace place_;
    std::chrono::milliseconds timeout_;
    ConnectionPool<Connection> pool_;
};

}  // namespace

std::unique_ptr<RemoteTransport> make_redis_transport(const RemoteOptions& options) {
    return std::make_unique<RedisTransport>(parse_place(options.url), options.timeout);
}

}  // namespace flce

#else

namespace flce {

std::unique_ptr<RemoteTransport> make_redis_transport(const RemoteOptions& options) {
    throw EnvironmentError(
        fmt::format("the remote cache is \"{}\", but this libflce was built without hiredis", without_credentials(options.url)));
}

}  // namespace flce

#endif
