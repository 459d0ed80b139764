#include "runtime/setup_report.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <functional>

#include "cache/disk_store.hpp"
#include "cache/pack_store.hpp"
#include "cache/remote_store.hpp"
#include "cache/signature.hpp"
#include "flce/flce.hpp"
#include "runtime/cache_options.hpp"
#include "runtime/environment.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

void add_disk_use(DirectoryReport& report) {
    std::error_code error;
    auto it = fs::recursive_directory_iterator(report.path, fs::directory_options::skip_permission_denied, error);
    for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
        std::error_code ignored;
        if (!it->is_regular_file(ignored)) continue;
        const auto bytes = it->file_size(ignored);
        if (ignored) continue;
        ++report.files;
        report.bytes += static_cast<std::int64_t>(bytes);
    }
}

/// Why a directory that is not there yet cannot be made; empty: nothing speaks against it.
std::string cannot_be_made(fs::path path) {
    std::error_code error;
    while (!fs::exists(path, error) && path.has_relative_path()) path = path.parent_path();
    if (!fs::is_directory(path, error)) return fmt::format("cannot be made: {} is not a directory", path.string());
    if (::access(path.c_str(), W_OK | X_OK) != 0) return fmt::format("cannot be made: {} cannot be written", path.string());
    return {};
}

DirectoryReport report_cache_dir(const Environment& environment) {
    DirectoryReport report;
    if (environment.no_disk_cache) {
        report.fault = "switched off by FLCE_NO_DISK_CACHE";
        return report;
    }
    if (environment.cache_dir.empty()) {
        report.fault = "none: neither FLCE_CACHE_DIR nor XDG_CACHE_HOME nor HOME is set, and the user has no home directory";
        return report;
    }
    std::error_code error;
    report.path = fs::absolute(environment.cache_dir, error);
    if (error) report.path = environment.cache_dir;
    report.exists = fs::exists(fs::symlink_status(report.path, error));
    report.fault = DiskStore(report.path).out_of_use();
    if (!report.fault.empty()) return report;
    if (!report.exists) {
        report.fault = cannot_be_made(report.path);
    } else if (::access(report.path.c_str(), W_OK | X_OK) != 0) {
        report.fault = "cannot be written: kernels are read from it, and none are kept";
    }
    if (report.exists) add_disk_use(report);
    return report;
}

PackReport report_pack(const fs::path& path, const TrustedKeys& trusted) {
    PackReport report{.path = path};
    try {
        const auto pack = PackFile::open(path, trusted);
        for (const PackedEntry& entry : pack->index()) {
            ++report.entries;
            report.bytes += static_cast<std::int64_t>(entry.bytes);
        }
    } catch (const std::exception& error) {
        report.fault = error.what();
    }
    return report;
}

/// "cpu", "cuda" and "cuda:1" are devices, whether they are here or not.
bool names_a_device(const std::string& name) {
    if (name.empty() || name == "cpu" || name == "cuda") return true;
    constexpr std::string_view kIndexed = "cuda:";
    return name.starts_with(kIndexed) && name.size() > kIndexed.size() && name.size() <= kIndexed.size() + 4 &&
           name.find_first_not_of("0123456789", kIndexed.size()) == std::string::npos;
}

}  // namespace

SetupReport report_setup() {
    SetupReport report;
    for (EnvironmentFault& fault : read_environment([](const char* name) { return std::getenv(name); }).faults) {
        report.faults.push_back({std::move(fault.variable), std::move(fault.message)});
    }
    tolerate_environment_faults();
    const Environment& set = environment();
    report.unknown_variables = unknown_environment_variables();
    const auto attempt = [&](const char* variable, const std::function<void()>& use) {
        try {
            use();
        } catch (const std::exception& error) {
            report.faults.push_back({variable, error.what()});
        }
    };
    if (!names_a_device(set.device)) {
        report.faults.push_back({"FLCE_DEVICE", fmt::format("FLCE_DEVICE is \"{}\"; allowed are cpu, cuda and cuda:I", set.device)});
    }
    TrustedKeys trusted;
    attempt("FLCE_TRUSTED_KEYS", [&] { trusted = TrustedKeys::read(set.trusted_keys); });
    attempt("FLCE_SIGNING_KEY", [&] {
        if (!set.signing_key.empty()) (void)SigningKey::read(set.signing_key);
    });
    report.cache = report_cache_dir(set);
    for (const fs::path& path : set.cache_packs) {
        report.packs.push_back(report_pack(path, trusted));
        if (!report.packs.back().fault.empty()) report.faults.push_back({"FLCE_CACHE_PACKS", report.packs.back().fault});
    }
    if (!set.cache_remote.empty()) {
        report.remote = without_credentials(set.cache_remote);
        attempt("FLCE_CACHE_REMOTE", [&] { const RemoteStore opened({.url = set.cache_remote, .s3 = set.s3}); });
    }
    report.records_dir = record_places({}, set).directory;
    return report;
}

}  // namespace flce
