// Artifacts as files of one directory, shared by processes and, on network file systems, by machines.
//
//     <directory>/artifacts/<first two hex digits>/<key>.art        one entry each (cache/artifact_format.hpp)
//     <directory>/artifacts/<first two hex digits>/<key>.art.corrupt   an entry that failed its checks, or whose payload
//                                                                   cannot be used, renamed aside
//     <directory>/artifacts/<first two hex digits>/.<key>.XXXXXX    an entry being written, or a folder with one on its way aside
//     <directory>/locks/<key>                                       cache/key_lock.hpp
//     <directory>/statistics                                        cache/statistics_file.hpp
//
// An entry appears by rename, complete or not at all. ENOENT, ESTALE and EBUSY mean "not there". An entry's access time says when it was
// last used, to the hour: reading one sets it, since file systems are mounted without access times.
#pragma once

#include <array>
#include <atomic>
#include <filesystem>
#include <mutex>
#include <string>

#include "cache/store.hpp"

namespace flce {

class DiskStore final : public Store {
public:
    /// Touches nothing yet. The directory is made, private to the user, when the first artifact is kept. One that another user owns, or
    /// that group or others may write, is not used, and neither is such a file or directory in it: a user who can write it could have this
    /// process load code of theirs. `max_bytes`: cache/cleanup.hpp, asked now and then when entries are kept; 0: no limit.
    explicit DiskStore(std::filesystem::path directory, std::uint64_t max_bytes = 0);

    [[nodiscard]] std::string_view name() const noexcept override { return "local"; }
    [[nodiscard]] Lookup get(const CacheKey& key) override;
    [[nodiscard]] Kept put(const CacheKey& key, std::span<const std::byte> entry, Durability durability) override;
    /// Renames the file aside, unless another entry has taken its place meanwhile.
    [[nodiscard]] bool reject(const CacheKey& key, std::span<const std::byte> entry, const std::string& why) override;

    /// The directory is refused, or could not be written.
    [[nodiscard]] std::string out_of_use() override;

    /// Reads an entry by the rules of get, but leaves a harmed one where it is, and its time of use. Neither artifact nor fault: there is
    /// none, or none any more; `why` names the fault.
    [[nodiscard]] Lookup inspect(const CacheKey& key, std::string& why);

    /// Whether there is a file for it; whether that is sound shows when it is read.
    [[nodiscard]] bool contains(const CacheKey& key);
    [[nodiscard]] std::filesystem::path path_of(const CacheKey& key) const;
    /// Whether the directory exists and may be trusted. With `make`, creates it first.
    [[nodiscard]] bool usable(bool make);

private:
    enum class Verdict { unknown, usable, refused };

    [[nodiscard]] Lookup read(const std::filesystem::path& path, const CacheKey& key);
    [[nodiscard]] bool shard_usable(const CacheKey& key, std::string& why);
    void warn_once(const std::string& message);
    void cannot_write(const std::string& message);
    void clean_up_now_and_then();

    std::filesystem::path directory_;
    std::uint64_t max_bytes_;
    std::mutex mutex_;
    Verdict verdict_ = Verdict::unknown;
    std::array<std::atomic<Verdict>, 256> shards_{};  // artifacts/00 to ff; refused ones stay unknown, so that a chmod mends them
    std::string out_of_use_;                          // under mutex_, like the verdict
    std::atomic<std::uint64_t> puts_{0};
    std::atomic<bool> warned_{false};
};

}  // namespace flce
