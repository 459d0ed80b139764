#include "cache/cleanup.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <string>
#include <string_view>
#include <utility>

#include "cache/file_descriptor.hpp"
#include "cache/key_lock.hpp"
#include "cache/log.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kReferenceBytes = 1024;
constexpr std::int64_t kLeftoverSeconds = 24LL * 3600;
constexpr int kListings = 3;

void note(std::string& fault, const fs::path& path, const char* what, const std::string& why) {
    if (fault.empty()) fault = fmt::format("{} cannot be {}: {}", path.string(), what, why);
}

// Names in a folder; none where there is no folder. A directory that another machine changes may be stale for a moment.
std::vector<fs::path> names_in(const fs::path& folder, std::string& fault) {
    std::vector<fs::path> names;
    std::error_code error;
    for (int attempt = 0; attempt < kListings; ++attempt) {
        names.clear();
        for (fs::directory_iterator file(folder, error); !error && file != fs::directory_iterator(); file.increment(error)) {
            names.push_back(file->path());
        }
        if (error.value() != ESTALE && error.value() != EBUSY) break;
    }
    if (error && error.value() != ENOENT && error.value() != ENOTDIR) note(fault, folder, "listed", error.message());
    return names;
}

struct Found {
    std::vector<StoredFile> entries;
    std::vector<StoredFile> leftovers;  // temporaries, quarantined entries; no keys
    std::string fault;
};

void look_at(const fs::path& file, Found& found) {
    struct stat status{};
    if (::lstat(file.c_str(), &status) != 0) {
        if (errno != ENOENT) note(found.fault, file, "looked at", std::strerror(errno));
        return;
    }
    StoredFile stored{file, {}, static_cast<std::uint64_t>(status.st_size), status.st_atim.tv_sec};
    const std::string name = file.filename().string();
    const auto key = name.ends_with(".art") ? CacheKey::parse(std::string_view(name).substr(0, name.size() - 4)) : std::nullopt;
    if (key && S_ISREG(status.st_mode)) {
        stored.key = *key;
        found.entries.push_back(std::move(stored));
    } else if (name.starts_with('.') || name.ends_with(".corrupt")) {
        stored.used = status.st_mtim.tv_sec;
        found.leftovers.push_back(std::move(stored));
    }
}

Found look_through(const fs::path& directory) {
    Found found;
    for (const fs::path& shard : names_in(directory / "artifacts", found.fault)) {
        if (shard.filename().native().size() != 2) continue;
        for (const fs::path& file : names_in(shard, found.fault)) look_at(file, found);
    }
    return found;
}

bool left_behind(std::int64_t written, std::int64_t now) { return written > now + kLeftoverSeconds || written < now - kLeftoverSeconds; }

void remove_leftovers(const Found& found, bool all, std::int64_t now, CleanupResult& result) {
    for (const StoredFile& file : found.leftovers) {
        // A young temporary is somebody's who is writing it.
        const bool temporary = file.path.filename().native().starts_with('.');
        if ((temporary || !all) && !left_behind(file.used, now)) continue;
        std::error_code error;
        fs::remove_all(file.path, error);  // a quarantined entry may be a directory
        if (!error) result.removed_bytes += file.bytes;
    }
}

void remove_locks(const fs::path& directory, bool all, std::int64_t now) {
    std::string ignored;
    for (const fs::path& file : names_in(directory / "locks", ignored)) {
        struct stat status{};
        if (::lstat(file.c_str(), &status) != 0) continue;
        if (all || left_behind(status.st_mtim.tv_sec, now)) KeyLock::remove_unheld(file);
    }
}

}  // namespace

std::vector<StoredFile> list_entries(const fs::path& directory, std::string& fault) {
    Found found = look_through(directory);
    fault = std::move(found.fault);
    std::ranges::sort(found.entries, {}, &StoredFile::key);
    return std::move(found.entries);
}

CleanupResult clean_up(const fs::path& directory, std::uint64_t max_bytes) {
    CleanupResult result;
    const FileDescriptor turn(::open((directory / "cleanup.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (turn && is_local_file(turn.get()) && ::flock(turn.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        result.busy = true;
        return result;
    }
    Found found = look_through(directory);
    result.fault = std::move(found.fault);
    const std::int64_t now = std::time(nullptr);
    remove_leftovers(found, max_bytes == 0, now, result);
    remove_locks(directory, max_bytes == 0, now);

    // A time ahead of now comes from a clock that jumped: it counts as now, or it would stay for ever.
    for (StoredFile& entry : found.entries) entry.used = std::min(entry.used, now);
    const auto order = [](const StoredFile& entry) { return std::tuple(entry.bytes <= kReferenceBytes, entry.used, entry.key); };
    std::ranges::sort(found.entries, {}, order);
    for (const StoredFile& entry : found.entries) result.kept_bytes += entry.bytes;
    result.kept_entries = static_cast<std::int64_t>(found.entries.size());
    // One that cannot be removed just now counts as gone here: or else one would go that is within the limit.
    std::uint64_t rest = result.kept_bytes;
    for (const StoredFile& entry : found.entries) {
        if (rest <= max_bytes) break;
        rest -= entry.bytes;
        if (::unlink(entry.path.c_str()) != 0 && errno != ENOENT) {
            note(result.fault, entry.path, "removed", std::strerror(errno));
            continue;
        }
        result.kept_bytes -= entry.bytes;
        result.removed_bytes += entry.bytes;
        --result.kept_entries;
        ++result.removed_entries;
    }
    if (result.removed_entries > 0) {
        logger().info("cache: removed {} entries of {} bytes from {}", result.removed_entries, result.removed_bytes, directory.string());
    }
    return result;
}

}  // namespace flce
