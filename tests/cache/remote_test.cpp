// The remote tier against real servers, and against servers that misbehave.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "cache/artifact_format.hpp"
#include "cache/byte_io.hpp"
#include "cache/remote_store.hpp"
#include "flce/error.hpp"
#include "tests/cache/keys.hpp"
#include "tests/cache/log_capture.hpp"
#include "tests/cache/remote_support.hpp"
#include "tests/cache/servers.hpp"

namespace flce {
namespace {

using test::artifact_of;
using test::big_payload;
using test::expect_a_cache;
using test::key_of;
using test::kPatience;
using test::payload_of;
using test::payload_text;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr std::chrono::milliseconds kImpatience{200};

TEST(RemoteCache, Redis_KeepsAndGives) {
    std::string why;
    for (const char* password : {"", "p@ss:word/1"}) {
        const auto server = test::start_redis(why, password);
        if (!server) GTEST_SKIP() << why;
        if (*password != '\0') server->url = fmt::format("redis://:p%40ss%3Aword%2F1@127.0.0.1:{}/2", server->port);
        expect_a_cache({.url = server->url, .timeout = kPatience});
    }
}

TEST(RemoteCache, RedisStopsAndComesBack_AskedAgainOnANewConnection) {
    std::string why;
    auto server = test::start_redis(why);
    if (!server) GTEST_SKIP() << why;
    const auto transport = make_redis_transport({.url = server->url, .timeout = kPatience});
    EXPECT_EQ(transport->put(key_of("a"), as_byte_span("x")), "");
    server->stop();
    EXPECT_NE(transport->get(key_of("a"), 100).failure, "");
    server->start();
    const auto reply = transport->get(key_of("a"), 100);
    EXPECT_EQ(reply.failure, "");
    EXPECT_FALSE(reply.found);
}

TEST(RemoteCache, RedisWantsAPassword_FaultNamesIt) {
    std::string why;
    const auto server = test::start_redis(why, "secret");
    if (!server) GTEST_SKIP() << why;
    const auto transport = make_redis_transport({.url = fmt::format("redis://127.0.0.1:{}", server->port), .timeout = kPatience});
    EXPECT_THAT(transport->get(key_of("a"), 100).failure, HasSubstr("NOAUTH"));
}

TEST(RemoteCache, NginxWithDav_KeepsAndGives) {
    std::string why;
    const auto server = test::start_nginx(why);
    if (!server) GTEST_SKIP() << why;
    expect_a_cache({.url = server->url, .timeout = kPatience});
    // entries are plain files, which other tools read
    const std::string hex = key_of("small").hex();
    EXPECT_TRUE(std::filesystem::exists(server->folder.path() / "data/cache" / hex.substr(0, 2) / (hex + ".art")));
}

TEST(RemoteCache, S3_KeepsAndGivesWithTheRightKeyOnly) {
    std::string why;
    const auto server = test::start_s3(why);
    if (!server) GTEST_SKIP() << why;
    RemoteOptions options{.url = server->url, .timeout = kPatience};
    options.s3 = {
        .access_key = server->access_key, .secret_key = server->secret_key, .endpoint = fmt::format("http://127.0.0.1:{}/", server->port)};
    expect_a_cache(options);
    RemoteOptions wrong = options;
    wrong.s3.secret_key += "x";
    EXPECT_THAT(make_http_transport(wrong)->get(key_of("small"), 1000).failure, HasSubstr("403"));
    EXPECT_THAT(make_http_transport(wrong)->put(key_of("small"), as_byte_span("x")), HasSubstr("403"));
    wrong.s3 = {.endpoint = options.s3.endpoint};
    const auto unsigned_reply = make_http_transport(wrong)->get(key_of("small"), 1000);
    EXPECT_THAT(unsigned_reply.failure + unsigned_reply.doubt, HasSubstr("403"));
}

TEST(RemoteCache, Url_UnderstoodOrRefusedWithoutShowingTheLogin) {
    for (const char* url : {"ftp://u:geheim@h/x",
                            "h:1",
                            "redis://u:geheim@",
                            "redis://u:geheim@h:x",
                            "redis://geheim@h",
                            "redis://h:70000",
                            "redis://h/x",
                            "redis://[::1",
                            "s3://",
                            "s3:///x",
                            "s3://b/a b",
                            "s3://b/%41",
                            "redis://:x/geheim@localhost:6379",
                            "redis://:geheim/x@h",
                            "redis://u:x?geheim/@h:x",
                            "s3://AKIA:geheim@bucket/x",
                            "s3://AKIA:x/geheim@bucket",
                            "s3://AKIA:geheim/x@",
                            "ftp://u:x/geheim#y@h",
                            "u:geheim@h:1",
                            "u:x/geheim@h"}) {
        EXPECT_THAT([&] { RemoteStore(RemoteOptions{.url = url}); },
                    ThrowsMessage<EnvironmentError>(AllOf(HasSubstr("the remote cache is"), Not(HasSubstr("geheim")))))
            << url;
    }
    for (const char* url : {"redis://h", "redis://u:p@h:1/2", "redis://[::1]:1", "http://h", "https://u:p@h/x/", "s3://bucket"}) {
        EXPECT_NO_THROW(RemoteStore(RemoteOptions{.url = url})) << url;
    }
    EXPECT_EQ(without_credentials("https://u:p@h/x"), "https://h/x");
    EXPECT_EQ(without_credentials("https://u:p/q?r#s@h/x"), "https://h/x");
    EXPECT_EQ(without_credentials("https://u:p@q@h"), "https://h");
    EXPECT_EQ(without_credentials("u:p@h"), "h");
    EXPECT_EQ(without_credentials("redis://h:1/2"), "redis://h:1/2");
}

TEST(RemoteCache, NobodyAnswers_WarningDoesNotShowTheLogin) {
    for (const char* url : {"http://u:geheim@127.0.0.1:1/x", "http://u:geheim/x@127.0.0.1:1", "https://u:x?geheim@127.0.0.1:1",
                            "redis://u:geheim@127.0.0.1:1"}) {
        test::LogCapture log;
        RemoteStore store(RemoteOptions{.url = url, .timeout = kPatience});
        EXPECT_EQ(payload_of(store.get(key_of("k"))), "fault") << url;
        EXPECT_EQ(log.warnings(), 1);
        EXPECT_THAT(log.text() + store.out_of_use(), AllOf(HasSubstr("127.0.0.1:1"), Not(HasSubstr("geheim")))) << url;
    }
}

// ── Servers that misbehave ───────────────────────────────────

void send_text(int socket, std::string_view text) { (void)!::send(socket, text.data(), text.size(), MSG_NOSIGNAL); }

void read_some(int socket) {
    char buffer[4096];
    (void)!::recv(socket, buffer, sizeof buffer, 0);
}

void read_until_closed(int socket) {
    char buffer[4096];
    while (::recv(socket, buffer, sizeof buffer, 0) > 0) {
    }
}

struct Misbehaviour {
    const char* name;
    const char* scheme;
    std::function<void(int)> serve;
};

std::string whole_entry() {
    const auto entry = encode_artifact(key_of("k"), artifact_of("from afar"));
    return std::string(as_text(entry));
}

std::vector<Misbehaviour> misbehaviours() {
    const auto answer = [](std::string text) {
        return [text = std::move(text)](int socket) { read_some(socket), send_text(socket, text); };
    };
    const auto http = [](std::size_t length, std::string_view body) {
        return fmt::format("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{}", length, body);
    };
    const std::string entry = whole_entry();
    const auto drip = [](std::string first) {
        return [first = std::move(first)](int socket) {
            read_some(socket);
            send_text(socket, first);
            for (int i = 0; i < 100; ++i) {
                if (::send(socket, "x", 1, MSG_NOSIGNAL) != 1) return;
                std::this_thread::sleep_for(std::chrono::milliseconds(20));
            }
        };
    };
    return {
        {"never answers", "http", [](int socket) { read_until_closed(socket); }},
        {"closes at once", "http", [](int) {}},
        {"closes after the request", "http", [](int socket) { read_some(socket); }},
        {"drops in the middle", "http", answer(http(entry.size(), std::string_view(entry).substr(0, entry.size() / 2)))},
        {"half an entry, said to be whole", "http", answer(http(entry.size() / 2, std::string_view(entry).substr(0, entry.size() / 2)))},
        {"a page that says sorry", "http", answer(http(13, "<html>sorry<"))},
        {"an entry of another key", "http", answer(http(entry.size(), entry.substr(0, 20) + "XX" + entry.substr(22)))},
        {"status 500", "http", answer("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")},
        {"status 403", "http", answer("HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")},
        {"redirects for ever", "http", answer("HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")},
        {"redirects to a file", "http", answer("HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n")},
        {"declares a terabyte", "http", answer(http(1ULL << 40, "x"))},
        {"no HTTP", "http", answer("What?\r\n\r\n")},
        {"a byte now and then", "http", drip(http(entry.size(), ""))},
        {"never answers", "redis", [](int socket) { read_until_closed(socket); }},
        {"closes at once", "redis", [](int) {}},
        {"closes after the request", "redis", [](int socket) { read_some(socket); }},
        {"drops in the middle", "redis", answer(fmt::format("${}\r\n{}", entry.size(), entry.substr(0, entry.size() / 2)))},
        {"half an entry, said to be whole", "redis",
         answer(fmt::format("${}\r\n{}\r\n", entry.size() / 2, entry.substr(0, entry.size() / 2)))},
        {"an error", "redis", answer("-LOADING the data set\r\n")},
        {"a number", "redis", answer(":7\r\n")},
        {"a list", "redis", answer("*2\r\n:1\r\n:2\r\n")},
        {"declares a terabyte", "redis", answer("$1099511627776\r\nx")},
        {"no redis", "redis", answer("HTTP/1.1 200 OK\r\n\r\n")},
        {"a byte now and then", "redis", drip(fmt::format("${}\r\n", entry.size()))},
    };
}

TEST(RemoteCache, ServerMisbehaves_OneCompileOneWarningAndNoMoreQuestions) {
    for (const Misbehaviour& misbehaviour : misbehaviours()) {
        SCOPED_TRACE(fmt::format("{}: {}", misbehaviour.scheme, misbehaviour.name));
        const test::ScriptedServer server(misbehaviour.serve);
        test::LogCapture log;
        const auto store = std::make_shared<RemoteStore>(
            RemoteOptions{.url = fmt::format("{}://127.0.0.1:{}", misbehaviour.scheme, server.port()), .timeout = kImpatience});
        ArtifactCache cache({.further = {store}});
        int created = 0;
        for (int i = 0; i < 3; ++i) {
            EXPECT_EQ(payload_text(*cache.get_or_create(key_of("k"), [&] { return ++created, artifact_of("made here"); })), "made here");
        }
        EXPECT_EQ(created, 3);  // one for each call: nobody holds the artifact
        EXPECT_EQ(log.warnings(), 1) << log.text();
        EXPECT_GE(cache.statistics().remote_faults, 1);
        EXPECT_EQ(cache.statistics().remote_hits, 0);
    }
}

/// A request's first line, once all of it is here.
std::string whole_request(int socket) {
    std::string request;
    char buffer[4096];
    while (true) {
        const ssize_t count = ::recv(socket, buffer, sizeof buffer, 0);
        if (count <= 0) return "";
        request.append(buffer, static_cast<std::size_t>(count));
        const std::size_t head = request.find("\r\n\r\n");
        const std::size_t length = request.find("Content-Length: ");
        const std::size_t body = length == std::string::npos ? 0 : std::stoul(request.substr(length + 16));
        if (head != std::string::npos && request.size() >= head + 4 + body) return request.substr(0, request.find("\r\n"));
    }
}

/// An HTTP server that answers GET and PUT with these statuses and bodies.
struct Verbs {
    std::atomic<int> gets{0};
    std::atomic<int> puts{0};
    std::function<std::pair<int, std::string>()> get;
    std::function<int()> put;
    test::ScriptedServer server{[this](int socket) {
        const std::string request = whole_request(socket);
        const bool reads = request.starts_with("GET");
        ++(reads ? gets : puts);
        const auto [status, body] = reads ? get() : std::pair(put(), std::string());
        send_text(socket, fmt::format("HTTP/1.1 {} X\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{}", status, body.size(), body));
    }};
};

TEST(RemoteCache, ServerTakesNothing_IsReadAllTheSame) {
    Verbs verbs{.get = [] { return std::pair(200, whole_entry()); }, .put = [] { return 403; }};
    test::LogCapture log;
    RemoteStore store(RemoteOptions{.url = fmt::format("http://127.0.0.1:{}", verbs.server.port()), .timeout = kPatience});
    const auto entry = encode_artifact(key_of("k"), artifact_of("p"));
    EXPECT_EQ(store.put(key_of("k"), entry, Durability::now), Kept::fault);
    EXPECT_EQ(payload_of(store.get(key_of("k"))), "from afar");
    EXPECT_EQ(store.put(key_of("k"), entry, Durability::now), Kept::no);  // it rests
    EXPECT_EQ(payload_of(store.get(key_of("k"))), "from afar");
    EXPECT_EQ(verbs.puts, 1);
    EXPECT_EQ(log.warnings(), 1) << log.text();
}

TEST(RemoteCache, ServerGivesNothing_IsWrittenAllTheSame) {
    Verbs verbs{.get = [] { return std::pair(500, std::string()); }, .put = [] { return 201; }};
    test::LogCapture log;
    RemoteStore store(RemoteOptions{.url = fmt::format("http://127.0.0.1:{}", verbs.server.port()), .timeout = kPatience});
    EXPECT_EQ(payload_of(store.get(key_of("k"))), "fault");
    EXPECT_EQ(payload_of(store.get(key_of("k"))), "absent");  // it rests
    EXPECT_EQ(store.put(key_of("k"), encode_artifact(key_of("k"), artifact_of("p")), Durability::now), Kept::yes);
    EXPECT_EQ(verbs.gets, 1);
    EXPECT_EQ(log.warnings(), 1) << log.text();
}

TEST(RemoteCache, S3WithoutListBucket_FillsWithOneWarning) {
    std::atomic<bool> filled{false};
    const std::string denied = "<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>";
    for (const std::string& body : {denied, std::string()}) {
        filled = false;
        Verbs verbs{.get = [&] { return filled ? std::pair(200, whole_entry()) : std::pair(403, body); },
                    .put = [&] { return filled = true, 200; }};
        test::LogCapture log;
        RemoteOptions options{.url = "s3://bucket/prefix", .timeout = kPatience};
        options.s3 = {.access_key = "a", .secret_key = "s", .endpoint = fmt::format("http://127.0.0.1:{}", verbs.server.port())};
        RemoteStore store(options);
        for (int i = 0; i < 3; ++i) EXPECT_EQ(payload_of(store.get(key_of("k"))), "absent");
        EXPECT_EQ(verbs.gets, 3);
        EXPECT_EQ(store.put(key_of("k"), encode_artifact(key_of("k"), artifact_of("from afar")), Durability::now), Kept::yes);
        EXPECT_EQ(payload_of(store.get(key_of("k"))), "from afar");
        EXPECT_EQ(log.warnings(), 1) << log.text();
        EXPECT_THAT(log.text(), HasSubstr("s3:ListBucket"));
        EXPECT_EQ(store.out_of_use(), "");
    }
}

TEST(RemoteCache, S3WithAWrongKey_IsAFaultThatNamesIt) {
    Verbs verbs{.get = [] { return std::pair(403, std::string("<Error><Code>SignatureDoesNotMatch</Code></Error>")); },
                .put = [] { return 403; }};
    test::LogCapture log;
    RemoteOptions options{.url = "s3://bucket", .timeout = kPatience};
    options.s3 = {.access_key = "a", .secret_key = "s", .endpoint = fmt::format("http://127.0.0.1:{}", verbs.server.port())};
    RemoteStore store(options);
    EXPECT_EQ(payload_of(store.get(key_of("k"))), "fault");
    EXPECT_EQ(log.warnings(), 1) << log.text();
    EXPECT_THAT(log.text(), HasSubstr("SignatureDoesNotMatch"));
}

TEST(RemoteCache, ServerIsDown_AskedOnceThenLeftAlone) {
    const int nobody = test::free_port();
    for (const char* scheme : {"http", "redis"}) {
        test::LogCapture log;
        const auto store =
            std::make_shared<RemoteStore>(RemoteOptions{.url = fmt::format("{}://127.0.0.1:{}", scheme, nobody), .timeout = kPatience});
        ArtifactCache cache({.further = {store}});
        for (const char* name : {"a", "b", "c"}) (void)cache.get_or_create(key_of(name), [&] { return artifact_of("p"); });
        EXPECT_EQ(cache.statistics().remote_faults, 1) << scheme;
        EXPECT_EQ(cache.statistics().tiers.back().misses, 3) << scheme;
        EXPECT_EQ(log.warnings(), 1) << log.text();
    }
}

TEST(RemoteCache, WrongEntry_ReplacedByTheRightOne) {
    std::string why;
    const auto server = test::start_redis(why);
    if (!server) GTEST_SKIP() << why;
    const RemoteOptions options{.url = server->url, .timeout = kPatience};
    EXPECT_EQ(make_redis_transport(options)->put(key_of("k"), as_byte_span("junk")), "");
    test::LogCapture log;
    {
        ArtifactCache cache({.further = {std::make_shared<RemoteStore>(options)}});
        EXPECT_EQ(payload_text(*cache.get_or_create(key_of("k"), [] { return artifact_of("right"); })), "right");
    }
    EXPECT_EQ(log.warnings(), 1);
    EXPECT_EQ(payload_of(RemoteStore(options).get(key_of("k"))), "right");
}

TEST(RemoteCache, SignaturesAskedFor_OnlySignedEntriesAreTaken) {
    std::string why;
    const auto server = test::start_redis(why);
    if (!server) GTEST_SKIP() << why;
    const test::TemporaryDirectory folder;
    const auto ours = test::make_key_pair(folder.path(), "ours");
    const auto theirs = test::make_key_pair(folder.path(), "theirs");
    const auto cache_with = [&](const test::KeyPair* signs, const test::KeyPair* trusts) {
        ArtifactCache::Options options;
        RemoteOptions remote{.url = server->url, .timeout = kPatience};
        if (trusts != nullptr) remote.trusted = TrustedKeys::read({trusts->public_key});
        if (signs != nullptr) options.signer = SigningKey::read(signs->private_key);
        remote.signs = signs != nullptr;
        options.further.push_back(std::make_shared<RemoteStore>(remote));
        return std::make_unique<ArtifactCache>(std::move(options));
    };
    const auto get = [](ArtifactCache& cache, const char* name, const char* made) {
        return payload_text(*cache.get_or_create(key_of(name), [&] { return artifact_of(made); }));
    };
    test::LogCapture log;
    EXPECT_EQ(get(*cache_with(nullptr, nullptr), "unsigned", "by anybody"), "by anybody");
    EXPECT_EQ(get(*cache_with(&theirs, nullptr), "theirs", "by them"), "by them");
    EXPECT_EQ(get(*cache_with(&ours, nullptr), "ours", "by us"), "by us");
    // A process that trusts us only, and has no key itself: it takes ours, and leaves the rest as it is.
    EXPECT_EQ(get(*cache_with(nullptr, &ours), "ours", "made"), "by us");
    EXPECT_EQ(get(*cache_with(nullptr, &ours), "unsigned", "made"), "made");
    EXPECT_EQ(get(*cache_with(nullptr, &ours), "theirs", "made"), "made");
    EXPECT_EQ(get(*cache_with(nullptr, nullptr), "unsigned", "no"), "by anybody");
    // One that has our key mends them.
    EXPECT_EQ(get(*cache_with(&ours, &ours), "theirs", "made again"), "made again");
    EXPECT_EQ(get(*cache_with(nullptr, &ours), "theirs", "no"), "made again");
    EXPECT_THAT(log.text(), HasSubstr("not signed"));
    EXPECT_THAT(log.text(), HasSubstr("not trusted"));
}

TEST(RemoteCache, ForkedChild_DoesNotShareTheParentsConnection) {
    std::string why;
    const auto server = test::start_redis(why);
    if (!server) GTEST_SKIP() << why;
    RemoteStore store(RemoteOptions{.url = server->url, .timeout = kPatience});
    const auto entry = encode_artifact(key_of("big"), artifact_of(big_payload()));
    ASSERT_EQ(store.put(key_of("big"), entry, Durability::now), Kept::yes);
    const auto all_right = [&] {
        for (int i = 0; i < 20; ++i) {
            if (payload_of(store.get(key_of("big"))) != big_payload()) return false;
        }
        return true;
    };
    const pid_t child = ::fork();
    if (child == 0) ::_exit(all_right() ? 0 : 1);
    EXPECT_TRUE(all_right());
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace flce
