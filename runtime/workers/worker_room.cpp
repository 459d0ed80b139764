#include "runtime/workers/worker_room.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace flce {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

/// The number in a file; nothing where there is none ("max", no file).
std::optional<std::int64_t> number_in(const fs::path& path) {
    std::ifstream file(path);
    std::int64_t value = 0;
    if (file >> value) return value;
    return std::nullopt;
}

/// The number after `name` in lines of "name number".
std::int64_t number_after(const fs::path& path, const std::string& name) {
    std::ifstream file(path);
    std::string word;
    while (file >> word) {
        std::int64_t value = 0;
        if (word == name) return file >> value ? value : 0;
        file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
    }
    return 0;
}

/// Bytes that one control group leaves. Files that it has read and would give back count as free.
std::int64_t left_in(const fs::path& group, const char* limit, const char* usage, const char* cached) {
    const auto most = number_in(group / limit);
    if (!most) return kNoLimit;
    const std::int64_t used = number_in(group / usage).value_or(0) - number_after(group / "memory.stat", cached);
    return std::max<std::int64_t>(*most - std::max<std::int64_t>(used, 0), 0);
}

/// A group's limit holds for those below it.
std::int64_t least_on_the_way(const fs::path& mount, const std::string& group, const char* limit, const char* usage, const char* cached) {
    std::int64_t least = kNoLimit;
    for (fs::path path = fs::path(group).relative_path();; path = path.parent_path()) {
        least = std::min(least, left_in(mount / path, limit, usage, cached));
        if (path.empty()) return least;
    }
}

}  // namespace

std::int64_t available_memory_bytes(const fs::path& root) {
    std::int64_t available = number_after(root / "proc/meminfo", "MemAvailable:") * 1024;
    const fs::path mount = root / "sys/fs/cgroup";
    std::ifstream groups(root / "proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // "0::/user.slice" or "4:memory:/docker/…"
        const std::size_t first = line.find(':');
        const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string group = line.substr(second + 1);
        if (controllers.empty()) {
            available = std::min(available, least_on_the_way(mount, group, "memory.max", "memory.current", "inactive_file"));
        } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
            available = std::min(available, least_on_the_way(mount / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                                             "total_inactive_file"));
        }
    }
    return available;
}

std::size_t worker_count(int cores, std::int64_t memory_bytes, std::size_t pieces) {
    const std::int64_t room = std::min<std::int64_t>(memory_bytes / kWorkerBytes, cores);
    return static_cast<std::size_t>(std::clamp<std::int64_t>(std::min<std::int64_t>(room, static_cast<std::int64_t>(pieces)), 1, 1024));
}

}  // namespace flce
