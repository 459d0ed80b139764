#include "cache/statistics_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <iterator>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "cache/file_descriptor.hpp"
#include "cache/key_lock.hpp"
#include "cache/log.hpp"
#include "cache/machine_folder.hpp"

namespace flce {
namespace {

constexpr const char* kPurpose = "statistics";
constexpr std::size_t kMaxFileBytes = 4096;
constexpr int kAttempts = 20;
constexpr std::chrono::microseconds kPause{200};

constexpr std::array kTiers{"memory", "local", "packs", "remote"};
constexpr std::array<std::pair<const char*, std::int64_t TierStatistics::*>, 4> kCounters{{{"hits", &TierStatistics::hits},
                                                                                           {"misses", &TierStatistics::misses},
                                                                                           {"faults", &TierStatistics::faults},
                                                                                           {"stored", &TierStatistics::stored}}};

// The number after `name` and a space at the beginning of a line; 0 if there is none.
std::int64_t number_of(std::string_view text, const std::string& name) {
    const std::string line = "\n" + name + " ";
    const std::size_t at = text.find(line);
    if (at == std::string_view::npos) return 0;
    const char* const digits = text.data() + at + line.size();
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(digits, text.data() + text.size(), value);
    return error == std::errc() && value >= 0 ? value : 0;
}

std::string read_text(int file) {
    std::string text(kMaxFileBytes, '\0');
    const ssize_t size = ::pread(file, text.data(), text.size(), 0);
    text.resize(size < 0 ? 0 : static_cast<std::size_t>(size));
    return text;
}

CacheStatistics parse(const std::string& text) {
    CacheStatistics statistics;
    statistics.created = number_of(text, "created");
    for (const char* tier : kTiers) {
        TierStatistics& counts = statistics.tiers.emplace_back();
        counts.name = tier;
        for (const auto& [name, counter] : kCounters) counts.*counter = number_of(text, fmt::format("{}.{}", tier, name));
    }
    return statistics;
}

std::string print(const CacheStatistics& statistics) {
    std::string text = fmt::format("created {:020}\n", statistics.created);
    for (const TierStatistics& tier : statistics.tiers) {
        for (const auto& [name, counter] : kCounters)
            fmt::format_to(std::back_inserter(text), "{}.{} {:020}\n", tier.name, name, tier.*counter);
    }
    return text;
}

std::filesystem::path file_of(const std::filesystem::path& directory) { return directory / "statistics"; }

}  // namespace

CacheStatistics read_statistics(const std::filesystem::path& directory) {
    if (directory.empty()) return parse("");
    const FileDescriptor file(::open(file_of(directory).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    return parse(file ? "\n" + read_text(file.get()) : "");
}

Counted add_statistics(const std::filesystem::path& directory, const CacheStatistics& news) {
    const FileDescriptor file(::open(file_of(directory).c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (!file || !is_local_file(file.get())) return Counted::no;
    for (int attempt = 1; ::flock(file.get(), LOCK_EX | LOCK_NB) != 0; ++attempt) {
        if (errno != EWOULDBLOCK && errno != EINTR) return Counted::no;
        if (attempt == kAttempts) return Counted::busy;
        std::this_thread::sleep_for(kPause);
    }
    const std::string before = read_text(file.get());
    CacheStatistics sums = parse("\n" + before);
    sums.created += news.created;
    for (TierStatistics& sum : sums.tiers) {
        const auto added = std::ranges::find(news.tiers, sum.name, &TierStatistics::name);
        if (added == news.tiers.end()) continue;
        for (const auto& [name, counter] : kCounters) sum.*counter += (*added).*counter;
    }
    const std::string text = print(sums);
    if (::pwrite(file.get(), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size())) return Counted::yes;
    // A full disk can cut short only a new file: counts that go elsewhere must not be half counted here.
    if (before.size() < text.size()) (void)!::ftruncate(file.get(), static_cast<off_t>(before.size()));
    return Counted::no;
}

Counted add_machine_statistics(const CacheStatistics& news) {
    std::string why;
    const std::filesystem::path folder = machine_folder(kPurpose, true, why);
    if (!why.empty()) logger().debug("cache: nothing is counted in {}", why);
    return folder.empty() ? Counted::no : add_statistics(folder, news);
}

MachineStatistics read_machine_statistics() {
    MachineStatistics statistics;
    statistics.folder = machine_folder(kPurpose, false, statistics.why);
    statistics.sums = read_statistics(statistics.folder);
    return statistics;
}

}  // namespace flce
