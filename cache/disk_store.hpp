// Artifacts as files of one directory, shared by processes and, on network file systems, by machines.
//
//     <directory>/artifacts/<first two hex digits>/<key>.art        one entry each (cache/artifact_format.hpp)
//     <directory>/artifacts/<first two hex digits>/<key>.art.corrupt   an entry that failed its checks, renamed aside
//     <directory>/artifacts/<first two hex digits>/.<key>.XXXXXX    an entry being written
//     <directory>/locks/<key>                                       cache/key_lock.hpp
//
// An entry appears by rename, complete or not at all. ENOENT, ESTALE and EBUSY mean "not there".
#pragma once

#include <atomic>
#include <filesystem>
#include <mutex>
#include <string>

#include "cache/store.hpp"

namespace flce {

class DiskStore final : public Store {
public:
    /// Touches nothing yet. The directory is made, private to the user, when the first artifact is kept. One that another user owns, or
    /// that group or others may write, is not used: whoever can write it could have this process load code of theirs.
    explicit DiskStore(std::filesystem::path directory);

    [[nodiscard]] std::optional<Artifact> get(const CacheKey& key) override;
    void put(const CacheKey& key, const Artifact& artifact) override;
    [[nodiscard]] std::int64_t faults() const override { return faults_.load(std::memory_order_relaxed); }

    [[nodiscard]] std::filesystem::path path_of(const CacheKey& key) const;
    /// Whether the directory exists and may be trusted. With `make`, creates it first.
    [[nodiscard]] bool usable(bool make);

private:
    enum class Verdict { unknown, usable, refused };

    void quarantine(const std::filesystem::path& path, int file, const std::string& why);
    bool publish(const std::filesystem::path& path, const std::vector<std::byte>& entry, int& error);
    void fault(std::atomic<bool>& warned, const std::string& message);

    std::filesystem::path directory_;
    std::mutex mutex_;
    Verdict verdict_ = Verdict::unknown;
    std::atomic<std::int64_t> faults_{0};
    std::atomic<bool> warned_directory_{false};
    std::atomic<bool> warned_read_{false};
    std::atomic<bool> warned_write_{false};
};

}  // namespace flce
