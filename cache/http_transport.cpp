// HTTP and S3 by libcurl, which is loaded when it is first needed: linked, it would bring some thirty libraries into every process that
// computes a loss, and into every release tree. Its interface has been the same since 2006 (libcurl.so.4).
#include <fmt/format.h>

#include "cache/remote_store.hpp"
#include "flce/error.hpp"

#if __has_include(<curl/curl.h>)
#define CURL_DISABLE_TYPECHECK
#define CURL_DISABLE_DEPRECATION
#include <curl/curl.h>

#include <array>
#include <cctype>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "cache/byte_io.hpp"
#include "cache/connection_pool.hpp"
#include "cache/dynamic_library.hpp"
#include "cache/sha256.hpp"

namespace flce {
namespace {

struct Curl {
    decltype(&curl_global_init) global_init = nullptr;
    decltype(&curl_easy_init) easy_init = nullptr;
    decltype(&curl_easy_setopt) easy_setopt = nullptr;
    decltype(&curl_easy_perform) easy_perform = nullptr;
    decltype(&curl_easy_getinfo) easy_getinfo = nullptr;
    decltype(&curl_easy_reset) easy_reset = nullptr;
    decltype(&curl_easy_cleanup) easy_cleanup = nullptr;
    decltype(&curl_easy_strerror) easy_strerror = nullptr;
    decltype(&curl_slist_append) slist_append = nullptr;
    decltype(&curl_slist_free_all) slist_free_all = nullptr;
    std::string why_not;  // empty: loaded
};

Curl load_curl() {
    Curl curl;
    for (const char* name : {"libcurl.so.4", "libcurl-gnutls.so.4"}) {
        const DynamicLibrary library = DynamicLibrary::open(name, &curl.why_not);
        if (!library) continue;
        const bool complete =
            library.bind(curl.global_init, "curl_global_init") && library.bind(curl.easy_init, "curl_easy_init") &&
            library.bind(curl.easy_setopt, "curl_easy_setopt") && library.bind(curl.easy_perform, "curl_easy_perform") &&
            library.bind(curl.easy_getinfo, "curl_easy_getinfo") && library.bind(curl.easy_reset, "curl_easy_reset") &&
            library.bind(curl.easy_cleanup, "curl_easy_cleanup") && library.bind(curl.easy_strerror, "curl_easy_strerror") &&
            library.bind(curl.slist_append, "curl_slist_append") && library.bind(curl.slist_free_all, "curl_slist_free_all");
        curl.why_not = complete && curl.global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK ? "" : library.path().string() + " cannot be used";
        if (curl.why_not.empty()) return curl;
    }
    curl.why_not = fmt::format("libcurl is not there ({}); install libcurl4 or use a redis:// URL", curl.why_not);
    return curl;
}

const Curl& curl() {
    static const Curl& loaded = *new Curl(load_curl());
    return loaded;
}

struct CloseHandle {
    void operator()(CURL* handle) const { curl().easy_cleanup(handle); }
};
using Handle = std::unique_ptr<CURL, CloseHandle>;

struct FreeList {
    void operator()(curl_slist* list) const { curl().slist_free_all(list); }
};

struct Body {
    std::vector<std::byte> bytes;
    std::size_t max_bytes;
    bool too_long = false;
};

std::size_t receive(char* data, std::size_t, std::size_t size, void* into) {
    Body& body = *static_cast<Body*>(into);
    if (size > body.max_bytes - body.bytes.size()) {
        body.too_long = true;
        return 0;  // ends the transfer
    }
    const auto* bytes = reinterpret_cast<const std::byte*>(data);
    body.bytes.insert(body.bytes.end(), bytes, bytes + size);
    return size;
}

// An answer that says no in many words is not kept.
constexpr std::size_t kMostBytesOfAnAnswer = 64 << 10;

class HttpTransport final : public RemoteTransport {
public:
    HttpTransport(std::string base, const RemoteOptions& options, std::optional<S3Access> s3)
        : base_(std::move(base)), timeout_(options.timeout), authorities_(options.authorities), s3_(std::move(s3)) {
        if (s3_ && !s3_->authorities.empty()) authorities_ = s3_->authorities;
    }

    [[nodiscard]] Reply get(const CacheKey& key, std::size_t max_bytes) override {
        Answer answer = request(key, nullptr, max_bytes);
        if (!answer.failure.empty()) return {.failure = std::move(answer.failure)};
        if (answer.status == 404 || answer.status == 410) return {};
        if (answer.status == 403 && s3_) return s3_refusal(as_text(answer.body));
        if (answer.status != 200) return {.failure = refusal(answer.status), .refused = true};
        return {.found = true, .bytes = std::move(answer.body)};
    }

    [[nodiscard]] std::string put(const CacheKey& key, std::span<const std::byte> entry) override {
        Answer answer = request(key, &entry, kMostBytesOfAnAnswer);
        if (!answer.failure.empty()) return std::move(answer.failure);
        return answer.status >= 200 && answer.status < 300 ? "" : refusal(answer.status);
    }

private:
    struct Answer {
        long status = 0;
        std::vector<std::byte> body;
        std::string failure;
    };

    // S3 answers 403 for an object that does not exist where the key may not list the bucket. A key or signature that is wrong has a code
    // of its own.
    static Reply s3_refusal(std::string_view body) {
        const std::string_view tag = "<Code>";
        const std::size_t start = body.find(tag);
        const std::string_view code =
            start == std::string_view::npos ? "" : body.substr(start + tag.size(), body.find('<', start + tag.size()) - start - tag.size());
        if (!code.empty() && code != "AccessDenied") return {.failure = fmt::format("HTTP status 403, {:.64}", code), .refused = true};
        return {.doubt =
                    "GET is answered with HTTP status 403, which is taken as \"not there\": S3 says so of objects that do not exist unless "
                    "s3:ListBucket is allowed on the bucket (and of all objects unless s3:GetObject is allowed on them)"};
    }

    /// Credentials that requests are signed with; null: none.
    [[nodiscard]] const S3Access* signer() const { return s3_ && !s3_->access_key.empty() ? &*s3_ : nullptr; }

    [[nodiscard]] std::string refusal(long status) const {
        const bool redirect = signer() != nullptr && status >= 300 && status < 400;
        return fmt::format("HTTP status {}{}", status,
                           redirect ? ", a redirect, which signed requests do not follow (is AWS_REGION the bucket's?)" : "");
    }

    // Failure without any part of the URL: a failed certificate check is named by libcurl, but other details of libcurl's quote the URL.
    [[nodiscard]] static std::string failure_of(CURL* handle, CURLcode result, const char* details) {
        const bool tls =
            result == CURLE_PEER_FAILED_VERIFICATION || result == CURLE_SSL_CONNECT_ERROR || result == CURLE_SSL_CACERT_BADFILE;
        std::string failure = curl().easy_strerror(result);
        if (tls && *details != '\0') failure += fmt::format(" ({})", details);
        long redirects = 0;
        (void)curl().easy_getinfo(handle, CURLINFO_REDIRECT_COUNT, &redirects);
        if (result == CURLE_UNSUPPORTED_PROTOCOL && redirects > 0) failure += " (of a redirect: https leads to https only, http to either)";
        return failure;
    }

    // A redirect is followed as far as it takes nothing along that was meant for the first server: libcurl leaves a login behind where
    // host, port or scheme change, but no header of ours, so that signed requests follow none; and nothing that was asked for by https
    // comes by http.
    template <class Set>
    void allow_redirects(const Set& set) const {
        const long http = CURLPROTO_HTTP;
        const long https = CURLPROTO_HTTPS;
        set(CURLOPT_PROTOCOLS, http | https);
        set(CURLOPT_REDIR_PROTOCOLS, base_.starts_with("https:") ? https : http | https);
        set(CURLOPT_FOLLOWLOCATION, signer() != nullptr ? 0L : 1L);
        set(CURLOPT_MAXREDIRS, 3L);
        set(CURLOPT_POSTREDIR, static_cast<long>(CURL_REDIR_POST_ALL));  // else what follows is a PUT of nothing
    }

    template <class Set>
    void trust_authorities(const Set& set) const {
        if (authorities_.empty()) return;
        std::error_code error;
        const bool folder = std::filesystem::is_directory(authorities_, error);
        // These certificates and no others: the system's would still count as the other of the two.
        set(CURLOPT_CAINFO, folder ? nullptr : authorities_.c_str());
        set(CURLOPT_CAPATH, folder ? authorities_.c_str() : nullptr);
    }

    [[nodiscard]] std::string url_of(const CacheKey& key) const {
        const std::string hex = key.hex();
        return fmt::format("{}/{}/{}.art", base_, hex.substr(0, 2), hex);
    }

    Answer request(const CacheKey& key, const std::span<const std::byte>* upload, std::size_t max_bytes) {
        const Curl& api = curl();
        if (!api.why_not.empty()) return {.failure = api.why_not};
        std::array<char, CURL_ERROR_SIZE> details{};  // outlives the handle, which may write to it when it is closed
        Handle handle = pool_.take();
        if (!handle) handle.reset(api.easy_init());
        if (!handle) return {.failure = "curl_easy_init failed"};
        api.easy_reset(handle.get());  // keeps the connection
        const auto set = [&](CURLoption option, auto value) { (void)api.easy_setopt(handle.get(), option, value); };
        const std::string url = url_of(key);
        Body body{{}, max_bytes};
        set(CURLOPT_URL, url.c_str());
        set(CURLOPT_NOSIGNAL, 1L);  // in somebody else's process
        set(CURLOPT_ERRORBUFFER, details.data());
        allow_redirects(set);
        trust_authorities(set);
        set(CURLOPT_TIMEOUT_MS, static_cast<long>(timeout_.count()));
        set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(timeout_.count()));
        set(CURLOPT_WRITEFUNCTION, &receive);
        set(CURLOPT_WRITEDATA, static_cast<void*>(&body));
        if (upload != nullptr) {
            // A body in memory, not a stream: libcurl can send it again after a redirect, and sign it.
            set(CURLOPT_CUSTOMREQUEST, "PUT");
            set(CURLOPT_EXPECT_100_TIMEOUT_MS, 20L);  // no long wait for leave to send
            set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(upload->size()));
            set(CURLOPT_POSTFIELDS, reinterpret_cast<const char*>(upload->data()));
        }
        const std::unique_ptr<curl_slist, FreeList> headers = headers_for(upload);
        set(CURLOPT_HTTPHEADER, headers.get());
        std::string user;
        std::string signing;
        if (const S3Access* s3 = signer()) {
            user = s3->access_key + ":" + s3->secret_key;
            signing = "aws:amz:" + s3->region + ":s3";
            set(CURLOPT_USERPWD, user.c_str());
            set(CURLOPT_AWS_SIGV4, signing.c_str());
        }
        Answer answer;
        const CURLcode result = api.easy_perform(handle.get());
        if (result != CURLE_OK) {
            answer.failure =
                body.too_long ? fmt::format("more than {} bytes", max_bytes) : failure_of(handle.get(), result, details.data());
            return answer;
        }
        (void)api.easy_getinfo(handle.get(), CURLINFO_RESPONSE_CODE, &answer.status);
        answer.body = std::move(body.bytes);
        set(CURLOPT_ERRORBUFFER, static_cast<char*>(nullptr));
        pool_.give_back(std::move(handle));
        return answer;
    }

    [[nodiscard]] std::unique_ptr<curl_slist, FreeList> headers_for(const std::span<const std::byte>* upload) const {
        std::unique_ptr<curl_slist, FreeList> headers;
        const auto add = [&](const std::string& line) {
            if (curl_slist* longer = curl().slist_append(headers.get(), line.c_str())) (void)headers.release(), headers.reset(longer);
        };
        if (upload != nullptr) add("Content-Type: application/octet-stream");
        if (const S3Access* s3 = signer()) {
            add("x-amz-content-sha256: " + hex_of(sha256_of(upload == nullptr ? std::span<const std::byte>() : *upload)));
            if (!s3->session_token.empty()) add("x-amz-security-token: " + s3->session_token);
        }
        return headers;
    }

    std::string base_;
    std::chrono::milliseconds timeout_;
    std::filesystem::path authorities_;
    std::optional<S3Access> s3_;
    ConnectionPool<Handle> pool_;
};

std::string s3_base(const std::string& url, const S3Access& s3) {
    std::string path = url.substr(std::string_view("s3://").size());
    const std::string shown = without_credentials(url);
    if (path.find('@') != std::string::npos) {
        throw EnvironmentError(
            fmt::format("the remote cache is \"{}\" after a login, which S3 takes from AWS_ACCESS_KEY_ID and "
                        "AWS_SECRET_ACCESS_KEY instead (s3://bucket/prefix)",
                        shown));
    }
    const auto allowed = [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) != 0 || std::string_view("-._~/").find(c) != std::string_view::npos;
    };
    for (const char c : path) {
        if (!allowed(c)) throw EnvironmentError(fmt::format("the remote cache is \"{}\"; '{}' cannot be in it", shown, c));
    }
    const std::size_t slash = std::min(path.find('/'), path.size());
    const std::string bucket = path.substr(0, slash);
    const std::string prefix = path.substr(slash);
    if (bucket.empty()) throw EnvironmentError(fmt::format("the remote cache is \"{}\"; it names no bucket", shown));
    if (s3.endpoint.empty()) return fmt::format("https://{}.s3.{}.amazonaws.com{}", bucket, s3.region, prefix);
    std::string endpoint = s3.endpoint;
    while (endpoint.ends_with('/')) endpoint.pop_back();
    return fmt::format("{}/{}{}", endpoint, bucket, prefix);
}

}  // namespace

std::unique_ptr<RemoteTransport> make_http_transport(const RemoteOptions& options) {
    const bool s3 = options.url.starts_with("s3://");
    std::string base = s3 ? s3_base(options.url, options.s3) : options.url;
    while (base.ends_with('/')) base.pop_back();
    return std::make_unique<HttpTransport>(std::move(base), options, s3 ? std::optional(options.s3) : std::nullopt);
}

}  // namespace flce

#else

namespace flce {

std::unique_ptr<RemoteTransport> make_http_transport(const RemoteOptions& options) {
    throw EnvironmentError(
        fmt::format("the remote cache is \"{}\", but this libflce was built without libcurl's headers", without_credentials(options.url)));
}

}  // namespace flce

#endif
