// Every environment variable that flce reads, parsed once, here. The table is printed by `flce info`.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cache/remote_store.hpp"
#include "flce/flce.hpp"

namespace flce {

/// Thousands of kernels; a layer's set takes some 100 KiB.
inline constexpr std::uint64_t kDefaultCacheMaxBytes = 2ULL << 30;

struct Environment {
    std::filesystem::path cache_dir;  ///< FLCE_CACHE_DIR, else $XDG_CACHE_HOME/flce, else ~/.cache/flce; empty: no home, so no disk cache
    bool no_disk_cache = false;       ///< FLCE_NO_DISK_CACHE
    std::uint64_t cache_max_bytes = kDefaultCacheMaxBytes;  ///< FLCE_CACHE_MAX_BYTES; 0: no limit
    std::vector<std::filesystem::path> cache_packs;         ///< FLCE_CACHE_PACKS
    std::string cache_remote;                               ///< FLCE_CACHE_REMOTE; empty: none
    std::chrono::milliseconds cache_remote_timeout{5000};   ///< FLCE_CACHE_REMOTE_TIMEOUT_MS
    bool cache_remote_read_only = false;                    ///< FLCE_CACHE_REMOTE_READ_ONLY
    std::filesystem::path cache_remote_ca;                  ///< FLCE_CACHE_REMOTE_CA, else CURL_CA_BUNDLE, SSL_CERT_FILE, SSL_CERT_DIR
    S3Access s3;                                            ///< AWS_…
    std::vector<std::filesystem::path> trusted_keys;        ///< FLCE_TRUSTED_KEYS
    std::filesystem::path signing_key;                      ///< FLCE_SIGNING_KEY; empty: nothing is signed
    std::filesystem::path records_dir;                      ///< FLCE_RECORDS_DIR; empty: "records" in the cache directory
    std::vector<std::filesystem::path> records;             ///< FLCE_RECORDS
    bool no_records = false;                                ///< FLCE_NO_RECORDS
    std::string device;                                     ///< FLCE_DEVICE; empty: not set
    int num_threads = 0;                                    ///< FLCE_NUM_THREADS; 0: every core
    std::filesystem::path nvrtc;                            ///< FLCE_NVRTC: the library or the folder it is in; empty: search
    std::string path;                                       ///< FLCE_PATH: to_string of a GPU's PlanPath; empty: any
    std::filesystem::path cublaslt;                         ///< FLCE_CUBLASLT; empty: search
    std::filesystem::path libcuda;                          ///< FLCE_LIBCUDA; empty: libcuda.so.1
    std::filesystem::path nccl;                             ///< FLCE_NCCL; empty: libnccl.so.2
    bool strict = false;                                    ///< FLCE_STRICT
    std::string log = "warn";                               ///< FLCE_LOG
};

/// A variable whose value is not understood.
struct EnvironmentFault {
    std::string variable;
    std::string message;  ///< text that names the variable, its value and the allowed ones
};

struct EnvironmentReading {
    Environment environment;  ///< settings; a variable that is not understood has its default
    std::vector<EnvironmentFault> faults;
};

/// A variable set to "" counts as not set.
[[nodiscard]] EnvironmentReading read_environment(const std::function<const char*(const char*)>& getenv);

/// Reads the environment; throws EnvironmentError that names every variable with a value that is not understood.
[[nodiscard]] Environment parse_environment(const std::function<const char*(const char*)>& getenv);

/// The process's, parsed at the first call, which also sets the logger's level and warns of FLCE_ variables that nothing reads. Throws what
/// parse_environment throws, at every call until it succeeds.
[[nodiscard]] const Environment& environment();

/// Makes environment() take defaults for variables that are not understood, from now on: for `flce info`, which has to report their faults.
void tolerate_environment_faults() noexcept;

/// Names of FLCE_ variables of this process that are set and that nothing reads: misspelt, most likely.
[[nodiscard]] std::vector<std::string> unknown_environment_variables();

}  // namespace flce
