#include "runtime/environment.hpp"

#include <fmt/format.h>
#include <pwd.h>
#include <spdlog/common.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "cache/log.hpp"
#include "generator/cuda/common/cuda_path.hpp"

namespace flce {
namespace {

// Part of a value that may be printed: printed values end up in bug reports.
enum class Show { value, url_without_login, that_it_is_set };

struct Entry {
    const char* name;
    const char* meaning;
    const char* default_value;
    Show show = Show::value;
};

constexpr std::array kTable{
    Entry{"FLCE_CACHE_DIR", "where compiled kernels are kept", "$XDG_CACHE_HOME/flce or ~/.cache/flce"},
    Entry{"FLCE_NO_DISK_CACHE", "1: keep nothing on disk and read nothing from the cache directory", "0"},
    Entry{"FLCE_CACHE_MAX_BYTES", "most bytes of the cache directory, e.g. 512M; 0: no limit", "2G"},
    Entry{"FLCE_CACHE_PACKS", "packs of compiled kernels to read, ':' between them", "none"},
    Entry{"FLCE_CACHE_REMOTE", "cache shared by machines: http://…, https://…, s3://bucket/prefix, redis://host:port", "none",
          Show::url_without_login},
    Entry{"FLCE_CACHE_REMOTE_TIMEOUT_MS", "longest wait for one entry of it", "5000"},
    Entry{"FLCE_CACHE_REMOTE_READ_ONLY", "1: store nothing there", "0"},
    Entry{"FLCE_CACHE_REMOTE_CA",
          "certificates (PEM file or folder) that vouch for its https; also AWS_CA_BUNDLE (s3://), CURL_CA_BUNDLE, SSL_CERT_FILE, "
          "SSL_CERT_DIR",
          "the system's"},
    Entry{"AWS_ACCESS_KEY_ID", "of s3:// caches; not set: requests are not signed", "none"},
    Entry{"AWS_SECRET_ACCESS_KEY", "of s3:// caches", "none", Show::that_it_is_set},
    Entry{"AWS_SESSION_TOKEN", "of s3:// caches", "none", Show::that_it_is_set},
    Entry{"AWS_REGION", "of s3:// caches; also AWS_DEFAULT_REGION", "us-east-1"},
    Entry{"AWS_ENDPOINT_URL_S3", "S3 service that is not Amazon's, http://host:port; also AWS_ENDPOINT_URL", "Amazon's",
          Show::url_without_login},
    Entry{"FLCE_TRUSTED_KEYS", "public keys (PEM), ':' between them: packs and remote entries must be signed with one", "none"},
    Entry{"FLCE_SIGNING_KEY", "private Ed25519 key (PEM) that signs what is compiled here", "none"},
    Entry{"FLCE_RECORDS_DIR", "where tuning records are kept", "\"records\" in the cache directory"},
    Entry{"FLCE_RECORDS", "further tuning records, files or directories, ':' between them; read before the user's own", "none"},
    Entry{"FLCE_NO_RECORDS", "1: plans are the cost model's, whatever has been measured", "0"},
    Entry{"FLCE_STRICT", "1: compile nothing; a kernel that no cache has, and a cache that cannot be used, are errors", "0"},
    Entry{"FLCE_DEVICE", "device of sessions that name none: cpu, cuda, cuda:1, …", "the first CUDA device, else cpu"},
    Entry{"FLCE_NUM_THREADS", "threads of CPU kernels", "every core"},
    Entry{"FLCE_NVRTC", "libnvrtc.so to load, or the folder it is in", "the toolkit, the system, the Python wheel"},
    Entry{
        "FLCE_PATH",
        "the only family of GPU kernels that plans are chosen from: cuda_sm80, cuda_sm90a, cuda_lt, cuda_gather, cuda_fp8 or cuda_fp8_sm89",
        "any"},
    Entry{"FLCE_CUBLASLT", "cuBLASLt library to load", "the process's, the toolkit, the Python wheel"},
    Entry{"FLCE_LIBCUDA", "CUDA driver library to load", "libcuda.so.1"},
    Entry{"FLCE_NCCL", "NCCL library to load", "libnccl.so.2"},
    Entry{"FLCE_LOG", "least severe message to show: trace, debug, info, warn, error, off", "warn"},
};

constexpr int kMostThreads = 4096;
constexpr int kDefaultRemoteTimeoutMs = 5000;
constexpr int kMostTimeoutMs = 600'000;

std::filesystem::path default_cache_dir(const std::function<std::string(const char*)>& get) {
    // The XDG specification has relative paths ignored.
    if (const std::string xdg = get("XDG_CACHE_HOME"); xdg.starts_with('/')) return std::filesystem::path(xdg) / "flce";
    std::string home = get("HOME");
    if (home.empty()) {
        passwd entry{};
        passwd* found = nullptr;
        std::array<char, 4096> buffer{};
        if (::getpwuid_r(::geteuid(), &entry, buffer.data(), buffer.size(), &found) == 0 && found != nullptr) home = found->pw_dir;
    }
    if (home.empty()) return {};
    return std::filesystem::path(home) / ".cache" / "flce";
}

bool parse_flag(const char* name, const std::string& text) {
    if (text.empty() || text == "0") return false;
    if (text == "1") return true;
    throw EnvironmentError(fmt::format("{} is \"{}\"; allowed are 0 and 1", name, text));
}

int parse_number(const char* name, const std::string& text, int most, int absent) {
    if (text.empty()) return absent;
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > most) {
        throw EnvironmentError(fmt::format("{} is \"{}\"; allowed are 1 to {}", name, text, most));
    }
    return value;
}

std::uint64_t parse_size(const char* name, const std::string& text, std::uint64_t absent) {
    if (text.empty()) return absent;
    std::uint64_t value = 0;
    const char* const last = text.data() + text.size();
    const auto [end, error] = std::from_chars(text.data(), last, value);
    const std::string_view unit(end, static_cast<std::size_t>(last - end));
    const std::size_t power = unit.empty() ? 0 : std::string_view(".KMGT").find(unit, 1);
    if (error != std::errc() || unit.size() > 1 || power > 4 || value > (~0ULL >> (10 * power))) {
        throw EnvironmentError(fmt::format("{} is \"{}\"; allowed are numbers of bytes like 1048576, 512M and 2G", name, text));
    }
    return value << (10 * power);
}

std::vector<std::filesystem::path> parse_paths(std::string_view text) {
    std::vector<std::filesystem::path> paths;
    while (!text.empty()) {
        const std::size_t length = std::min(text.find(':'), text.size());
        if (length > 0) paths.emplace_back(text.substr(0, length));
        text.remove_prefix(std::min(length + 1, text.size()));
    }
    return paths;
}

/// The first variable that is set. Variables that curl reads (as of libcurl only its command does) count here too.
std::filesystem::path first_of(const std::function<std::string(const char*)>& get, std::initializer_list<const char*> names) {
    for (const char* name : names) {
        if (std::string text = get(name); !text.empty()) return text;
    }
    return {};
}

S3Access parse_s3(const std::function<std::string(const char*)>& get) {
    const auto first = [&](const char* name, const char* other, std::string value) {
        for (const char* candidate : {other, name}) {
            if (std::string text = get(candidate); !text.empty()) value = std::move(text);
        }
        return value;
    };
    S3Access s3;
    s3.access_key = get("AWS_ACCESS_KEY_ID");
    s3.secret_key = get("AWS_SECRET_ACCESS_KEY");
    s3.session_token = get("AWS_SESSION_TOKEN");
    s3.region = first("AWS_REGION", "AWS_DEFAULT_REGION", s3.region);
    s3.endpoint = first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "");
    s3.authorities = first_of(get, {"FLCE_CACHE_REMOTE_CA", "AWS_CA_BUNDLE"});
    return s3;
}

std::string parse_path(const std::string& text) {
    if (text.empty()) return text;
    std::string names;
    for (const CudaPath* path : cuda_paths()) {
        if (text == path->name) return text;
        names += fmt::format("{}{}", names.empty() ? "" : ", ", path->name);
    }
    throw EnvironmentError(fmt::format("FLCE_PATH is \"{}\"; allowed are {}", text, names));
}

std::string parse_log_level(const std::string& text) {
    if (text.empty()) return "warn";
    for (const std::string_view level : {"trace", "debug", "info", "warn", "error", "off"}) {
        if (text == level) return text;
    }
    throw EnvironmentError(fmt::format("FLCE_LOG is \"{}\"; allowed are trace, debug, info, warn, error, off", text));
}

}  // namespace

EnvironmentReading read_environment(const std::function<const char*(const char*)>& getenv) {
    const std::function<std::string(const char*)> get = [&getenv](const char* name) {
        const char* value = getenv(name);
        return std::string(value == nullptr ? "" : value);
    };
    EnvironmentReading reading;
    // `parse` is given the variable's name and value; an exception of it is a fault, and the field keeps its default.
    const auto read = [&](auto& field, const char* name, auto parse) {
        try {
            field = parse(name, get(name));
        } catch (const EnvironmentError& error) {
            reading.faults.push_back({name, error.what()});
        }
    };
    Environment& environment = reading.environment;
    environment.cache_dir = get("FLCE_CACHE_DIR");
    if (environment.cache_dir.empty()) environment.cache_dir = default_cache_dir(get);
    read(environment.no_disk_cache, "FLCE_NO_DISK_CACHE", parse_flag);
    read(environment.cache_max_bytes, "FLCE_CACHE_MAX_BYTES",
         [](const char* name, const std::string& text) { return parse_size(name, text, kDefaultCacheMaxBytes); });
    environment.cache_packs = parse_paths(get("FLCE_CACHE_PACKS"));
    environment.cache_remote = get("FLCE_CACHE_REMOTE");
    read(environment.cache_remote_timeout, "FLCE_CACHE_REMOTE_TIMEOUT_MS", [](const char* name, const std::string& text) {
        return std::chrono::milliseconds(parse_number(name, text, kMostTimeoutMs, kDefaultRemoteTimeoutMs));
    });
    read(environment.cache_remote_read_only, "FLCE_CACHE_REMOTE_READ_ONLY", parse_flag);
    environment.cache_remote_ca = first_of(get, {"FLCE_CACHE_REMOTE_CA", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"});
    environment.s3 = parse_s3(get);
    environment.trusted_keys = parse_paths(get("FLCE_TRUSTED_KEYS"));
    environment.signing_key = get("FLCE_SIGNING_KEY");
    environment.records_dir = get("FLCE_RECORDS_DIR");
    environment.records = parse_paths(get("FLCE_RECORDS"));
    read(environment.no_records, "FLCE_NO_RECORDS", parse_flag);
    environment.device = get("FLCE_DEVICE");
    read(environment.num_threads, "FLCE_NUM_THREADS",
         [](const char* name, const std::string& text) { return parse_number(name, text, kMostThreads, 0); });
    environment.nvrtc = get("FLCE_NVRTC");
    read(environment.path, "FLCE_PATH", [](const char*, const std::string& text) { return parse_path(text); });
    environment.cublaslt = get("FLCE_CUBLASLT");
    environment.libcuda = get("FLCE_LIBCUDA");
    environment.nccl = get("FLCE_NCCL");
    read(environment.strict, "FLCE_STRICT", parse_flag);
    read(environment.log, "FLCE_LOG", [](const char*, const std::string& text) { return parse_log_level(text); });
    return reading;
}

Environment parse_environment(const std::function<const char*(const char*)>& getenv) {
    EnvironmentReading reading = read_environment(getenv);
    if (reading.faults.empty()) return std::move(reading.environment);
    std::string message;
    for (const EnvironmentFault& fault : reading.faults) message += (message.empty() ? "" : "; ") + fault.message;
    throw EnvironmentError(message);
}

namespace {
std::atomic<bool> faults_are_tolerated{false};
}  // namespace

void tolerate_environment_faults() noexcept { faults_are_tolerated = true; }

const Environment& environment() {
    static const Environment parsed = [] {
        const auto get = [](const char* name) { return std::getenv(name); };
        Environment result = faults_are_tolerated ? read_environment(get).environment : parse_environment(get);
        if (const char* level = std::getenv("FLCE_LOG"); level != nullptr && *level != '\0') {
            logger().set_level(spdlog::level::from_str(result.log));
        }
        for (const std::string& name : unknown_environment_variables()) {
            logger().warn("{} is set, and flce reads no variable of that name (flce info lists those that it reads)", name);
        }
        return result;
    }();
    return parsed;
}

std::vector<std::string> unknown_environment_variables() {
    // Variables of the Python package, and of the project's tests and tools.
    constexpr std::array<std::string_view, 2> kReadElsewhere{"FLCE_LIBRARY", "FLCE_PYTHON"};
    constexpr std::array<std::string_view, 2> kPrefixes{"FLCE_TEST_", "FLCE_FAULT_"};
    std::vector<std::string> unknown;
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
        const std::string_view text(*entry);
        const std::string_view name = text.substr(0, text.find('='));
        const auto starts_name = [name](std::string_view prefix) { return name.starts_with(prefix); };
        if (!name.starts_with("FLCE_") || std::ranges::find(kReadElsewhere, name) != kReadElsewhere.end() ||
            std::ranges::any_of(kPrefixes, starts_name) ||
            std::ranges::any_of(kTable, [name](const Entry& known) { return name == known.name; })) {
            continue;
        }
        unknown.emplace_back(name);
    }
    std::ranges::sort(unknown);
    return unknown;
}

std::vector<EnvironmentVariable> environment_variables() {
    std::vector<EnvironmentVariable> variables;
    for (const Entry& entry : kTable) {
        const char* value = std::getenv(entry.name);
        std::optional<std::string> shown;
        if (value != nullptr && *value != '\0') {
            shown = entry.show == Show::that_it_is_set      ? "(set)"
                    : entry.show == Show::url_without_login ? without_credentials(value)
                                                            : value;
        }
        variables.push_back({entry.name, entry.meaning, entry.default_value, std::move(shown)});
    }
    return variables;
}

}  // namespace flce
