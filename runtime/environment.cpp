#include "runtime/environment.hpp"

#include <fmt/format.h>
#include <pwd.h>
#include <spdlog/common.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "cache/log.hpp"

namespace flce {
namespace {

struct Entry {
    const char* name;
    const char* meaning;
    const char* default_value;
};

constexpr std::array kTable{
    Entry{"FLCE_CACHE_DIR", "where compiled kernels are kept", "$XDG_CACHE_HOME/flce or ~/.cache/flce"},
    Entry{"FLCE_NO_DISK_CACHE", "1: keep nothing on disk and read nothing from it", "0"},
    Entry{"FLCE_DEVICE", "device of sessions that name none: cpu, cuda, cuda:1, …", "the first CUDA device, else cpu"},
    Entry{"FLCE_NUM_THREADS", "threads of CPU kernels", "every core"},
    Entry{"FLCE_NVRTC", "libnvrtc.so to load, or the folder it is in", "the toolkit, the system, the Python wheel"},
    Entry{"FLCE_LIBCUDA", "CUDA driver library to load", "libcuda.so.1"},
    Entry{"FLCE_LOG", "least severe message to show: trace, debug, info, warn, error, off", "warn"},
};

constexpr int kMostThreads = 4096;

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

int parse_threads(const std::string& text) {
    if (text.empty()) return 0;
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > kMostThreads) {
        throw EnvironmentError(fmt::format("FLCE_NUM_THREADS is \"{}\"; allowed are 1 to {}", text, kMostThreads));
    }
    return value;
}

std::string parse_log_level(const std::string& text) {
    if (text.empty()) return "warn";
    for (const std::string_view level : {"trace", "debug", "info", "warn", "error", "off"}) {
        if (text == level) return text;
    }
    throw EnvironmentError(fmt::format("FLCE_LOG is \"{}\"; allowed are trace, debug, info, warn, error, off", text));
}

}  // namespace

Environment parse_environment(const std::function<const char*(const char*)>& getenv) {
    const std::function<std::string(const char*)> get = [&getenv](const char* name) {
        const char* value = getenv(name);
        return std::string(value == nullptr ? "" : value);
    };
    Environment environment;
    environment.cache_dir = get("FLCE_CACHE_DIR");
    if (environment.cache_dir.empty()) environment.cache_dir = default_cache_dir(get);
    environment.no_disk_cache = parse_flag("FLCE_NO_DISK_CACHE", get("FLCE_NO_DISK_CACHE"));
    environment.device = get("FLCE_DEVICE");
    environment.num_threads = parse_threads(get("FLCE_NUM_THREADS"));
    environment.nvrtc = get("FLCE_NVRTC");
    environment.libcuda = get("FLCE_LIBCUDA");
    environment.log = parse_log_level(get("FLCE_LOG"));
    return environment;
}

const Environment& environment() {
    static const Environment parsed = [] {
        Environment result = parse_environment([](const char* name) { return std::getenv(name); });
        if (const char* level = std::getenv("FLCE_LOG"); level != nullptr && *level != '\0') {
            logger().set_level(spdlog::level::from_str(result.log));
        }
        return result;
    }();
    return parsed;
}

std::vector<EnvironmentVariable> environment_variables() {
    std::vector<EnvironmentVariable> variables;
    for (const Entry& entry : kTable) {
        const char* value = std::getenv(entry.name);
        variables.push_back({entry.name, entry.meaning, entry.default_value,
                             value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value)});
    }
    return variables;
}

}  // namespace flce
