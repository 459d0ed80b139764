// A remote cache by https: whom it is trusted to be, and what a redirect may take where.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/socket.h>

#include <mutex>
#include <string_view>

#include "cache/artifact_format.hpp"
#include "cache/remote_store.hpp"
#include "runtime/cache_options.hpp"
#include "tests/cache/certificates.hpp"
#include "tests/cache/log_capture.hpp"
#include "tests/cache/remote_support.hpp"
#include "tests/cache/servers.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::artifact_of;
using test::Certificate;
using test::key_of;
using test::kPatience;
using test::payload_of;
using test::payload_text;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class HttpsTest : public testing::Test {
protected:
    [[nodiscard]] Certificate certificate(const test::CertificateOptions& options = {}) const {
        return authority_.issue(folder_.path(), fmt::format("server{}", ++issued_), options);
    }
    [[nodiscard]] RemoteOptions trusting(const std::string& url) const {
        return {.url = url, .timeout = kPatience, .authorities = trusted_};
    }
    /// Lines of the requests that nginx has answered, and ends it: it writes them after the answers.
    [[nodiscard]] static std::string requests(test::Server& server) {
        server.finish();
        return test::read_file(server.folder.path() / "requests");
    }

    /// One compile, one warning, and no entry from afar.
    void expect_a_fault(const RemoteOptions& options, const std::string& reason) const {
        test::LogCapture log;
        ArtifactCache cache({.further = {std::make_shared<RemoteStore>(options)}});
        for (const char* name : {"k", "another"}) {
            EXPECT_EQ(payload_text(*cache.get_or_create(key_of(name), [] { return artifact_of("made here"); })), "made here");
        }
        EXPECT_EQ(cache.statistics().created, 2);
        EXPECT_EQ(cache.statistics().remote_faults, 1);
        EXPECT_EQ(log.warnings(), 1) << log.text();
        EXPECT_THAT(log.text(), HasSubstr(reason));
    }

    test::TemporaryDirectory folder_;
    test::CertificateAuthority authority_;
    fs::path trusted_ = authority_.write(folder_.path(), "authority");
    mutable int issued_ = 0;
    std::string why_;
};

std::vector<std::byte> entry_of(const char* name, std::string_view payload) { return encode_artifact(key_of(name), artifact_of(payload)); }

TEST_F(HttpsTest, TrustedAuthority_KeepsAndGives) {
    const auto server = test::start_nginx(why_, {.tls = certificate()});
    if (!server) GTEST_SKIP() << why_;
    test::expect_a_cache(trusting(server->url));
    // certificates as a folder, and as sessions are told
    RemoteOptions in_a_folder = trusting(server->url);
    in_a_folder.authorities = folder_.path() / "authority";
    EXPECT_EQ(payload_of(RemoteStore(in_a_folder).get(key_of("small"))), "another");
    Environment environment;
    environment.cache_remote = server->url;
    environment.cache_remote_ca = trusted_;
    environment.cache_remote_timeout = kPatience;
    const ArtifactCache::Options session = cache_options({.disk_cache = false}, environment);
    EXPECT_EQ(payload_of(session.further.at(0)->get(key_of("small"))), "another");
}

TEST_F(HttpsTest, S3_AuthorityOfItsOwn) {
    const auto server = test::start_nginx(why_, {.tls = certificate()});
    if (!server) GTEST_SKIP() << why_;
    RemoteOptions options{.url = "s3://bucket", .timeout = kPatience, .authorities = folder_.path() / "none.pem"};
    options.s3 = {.endpoint = fmt::format("https://127.0.0.1:{}", server->port), .authorities = trusted_};
    EXPECT_EQ(RemoteStore(options).put(key_of("k"), entry_of("k", "p"), Durability::now), Kept::yes);
    EXPECT_EQ(payload_of(RemoteStore(options).get(key_of("k"))), "p");
}

TEST_F(HttpsTest, CertificateThatIsNotGood_OneWarningNamesTheReason) {
    const auto good = test::start_nginx(why_, {.tls = certificate()});
    if (!good) GTEST_SKIP() << why_;
    const test::CertificateAuthority another;
    RemoteOptions theirs = trusting(good->url);
    theirs.authorities = another.write(folder_.path(), "another");
    expect_a_fault(theirs, "unable to get local issuer certificate");
    theirs.authorities = folder_.path() / "another";
    expect_a_fault(theirs, "unable to get local issuer certificate");
    theirs.authorities.clear();  // the system's, which do not know ours
    expect_a_fault(theirs, "certificate");
    theirs.authorities = folder_.path() / "none.pem";
    expect_a_fault(theirs, "none.pem");
    EXPECT_EQ(requests(*good), "");

    const auto expect_refused = [&](const test::CertificateOptions& wrong, const char* reason) {
        const auto server = test::start_nginx(why_, {.tls = certificate(wrong)});
        expect_a_fault(trusting(server->url), reason);
        EXPECT_EQ(requests(*server), "") << "something was asked of a server that nobody vouches for";
    };
    expect_refused({.host = "IP:127.0.0.2"}, "127.0.0.1");
    expect_refused({.host = "DNS:elsewhere.example"}, "127.0.0.1");
    expect_refused({.valid_from_s = -7200, .valid_until_s = -3600}, "certificate has expired");
    expect_refused({.valid_from_s = 3600, .valid_until_s = 7200}, "certificate is not yet valid");
}

TEST_F(HttpsTest, ServerWithoutTls_NothingGoesThereInPlainText) {
    std::string received;
    std::mutex mutex;
    const test::ScriptedServer server([&](int socket) {
        char buffer[4096];
        const ssize_t size = ::recv(socket, buffer, sizeof buffer, 0);
        {
            const std::lock_guard lock(mutex);  // before the answer, which ends the client's call
            if (size > 0) received.append(buffer, static_cast<std::size_t>(size));
        }
        const std::string_view answer = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        (void)!::send(socket, answer.data(), answer.size(), MSG_NOSIGNAL);
    });
    expect_a_fault(trusting(fmt::format("https://u:geheim@127.0.0.1:{}/cache", server.port())), "SSL connect error");
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(received.starts_with('\x16')) << "no TLS handshake was begun";
    EXPECT_THAT(received, AllOf(Not(HasSubstr("GET")), Not(HasSubstr("PUT")), Not(HasSubstr("Authorization"))));
}

TEST_F(HttpsTest, RedirectFromHttp_FollowedWithoutTheLogin) {
    const auto server = test::start_nginx(why_, {.tls = certificate()});
    if (!server) GTEST_SKIP() << why_;
    const auto before = test::start_nginx(why_, {.redirect_to = fmt::format("https://127.0.0.1:{}", server->port)});
    const std::string url = fmt::format("http://u:geheim@127.0.0.1:{}/cache", before->port);
    test::expect_a_cache(trusting(url));  // entries arrive whole
    // To where it leads the same is asked for as of an https URL.
    RemoteOptions theirs = trusting(url);
    theirs.authorities = test::CertificateAuthority().write(folder_.path(), "another");
    expect_a_fault(theirs, "unable to get local issuer certificate");
    EXPECT_THAT(requests(*before), HasSubstr("GET Basic"));
    EXPECT_THAT(requests(*server), AllOf(HasSubstr("GET - -"), HasSubstr("PUT - -"), Not(HasSubstr("Basic"))));
}

TEST_F(HttpsTest, RedirectToAnotherServer_FollowedWithoutTheLogin) {
    const auto server = test::start_nginx(why_, {.tls = certificate()});
    if (!server) GTEST_SKIP() << why_;
    const auto before = test::start_nginx(why_, {.tls = certificate(), .redirect_to = fmt::format("https://127.0.0.1:{}", server->port)});
    RemoteStore store(trusting(fmt::format("https://u:geheim@127.0.0.1:{}/cache", before->port)));
    EXPECT_EQ(store.put(key_of("k"), entry_of("k", "p"), Durability::now), Kept::yes);
    EXPECT_EQ(payload_of(store.get(key_of("k"))), "p");
    EXPECT_THAT(requests(*before), HasSubstr("PUT Basic"));
    EXPECT_THAT(requests(*server), AllOf(HasSubstr("GET - -"), HasSubstr("PUT - -"), Not(HasSubstr("Basic"))));
}

TEST_F(HttpsTest, RedirectToHttp_IsAFaultAndNothingIsAskedThere) {
    const test::ScriptedServer plain([](int) {});
    const std::string down = fmt::format("http://127.0.0.1:{}", plain.port());
    const auto before = test::start_nginx(why_, {.tls = certificate(), .redirect_to = down});
    if (!before) GTEST_SKIP() << why_;
    expect_a_fault(trusting(fmt::format("https://u:geheim@127.0.0.1:{}/cache", before->port)), "https leads to https only");
    EXPECT_EQ(plain.connections(), 0);
}

TEST_F(HttpsTest, SignedRequests_FollowNoRedirect) {
    const auto server = test::start_nginx(why_, {.tls = certificate()});
    if (!server) GTEST_SKIP() << why_;
    const auto before = test::start_nginx(why_, {.tls = certificate(), .redirect_to = fmt::format("https://127.0.0.1:{}", server->port)});
    RemoteOptions options{.url = "s3://bucket", .timeout = kPatience, .authorities = trusted_};
    options.s3 = {
        .access_key = "a", .secret_key = "s", .session_token = "geheim", .endpoint = fmt::format("https://127.0.0.1:{}", before->port)};
    test::LogCapture log;
    RemoteStore store(options);
    EXPECT_EQ(payload_of(store.get(key_of("k"))), "fault");
    EXPECT_EQ(store.put(key_of("k"), entry_of("k", "p"), Durability::now), Kept::fault);
    EXPECT_THAT(log.text(), AllOf(HasSubstr("HTTP status 302"), HasSubstr("AWS_REGION")));
    EXPECT_THAT(requests(*before), HasSubstr("geheim"));
    EXPECT_EQ(requests(*server), "");
}

}  // namespace
}  // namespace flce
