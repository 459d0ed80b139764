#include "cache/pack_store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>

#include "cache/artifact_format.hpp"
#include "cache/file_io.hpp"
#include "cache/log.hpp"
#include "flce/error.hpp"

namespace flce {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void refuse(const fs::path& path, const std::string& why) {
    throw EnvironmentError(fmt::format("pack {}: {}", path.string(), why));
}

}  // namespace

std::unique_ptr<PackFile> PackFile::open(const fs::path& path, const TrustedKeys& trusted) {
    auto pack = std::unique_ptr<PackFile>(new PackFile);
    pack->path_ = path;
    pack->file_ = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status{};
    if (!pack->file_ || ::fstat(pack->file_.get(), &status) != 0) refuse(path, std::strerror(errno));
    if (!S_ISREG(status.st_mode)) refuse(path, "not a regular file");
    std::string why = trusted.empty() ? ownership_fault(status, Owner::user_or_root) : "";
    if (!why.empty()) refuse(path, why);

    const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
    std::vector<std::byte> head(std::min<std::uint64_t>(kPackHeaderBytes, file_bytes));
    if (const int error = read_at(pack->file_.get(), 0, head)) refuse(path, std::strerror(error));
    const auto head_bytes = pack_head_bytes(head, file_bytes, why);
    if (!head_bytes) refuse(path, why);
    head.resize(*head_bytes);
    if (const int error = read_at(pack->file_.get(), 0, head)) refuse(path, std::strerror(error));
    auto index = decode_pack_head(head, file_bytes, why, trusted);
    if (!index) refuse(path, why);
    pack->index_ = std::move(*index);
    return pack;
}

Lookup PackFile::get(const CacheKey& key, std::string& why) const {
    const auto at = std::ranges::lower_bound(index_, key, {}, &PackedEntry::key);
    if (at == index_.end() || at->key != key) return {};
    Lookup found;
    found.entry.resize(at->bytes);
    if (const int error = read_at(file_.get(), at->offset, found.entry)) {
        why = std::strerror(error);
    } else if (sha256_of(found.entry) != at->digest) {
        why = "digest mismatch";
    } else {
        found.artifact = decode_artifact(key, found.entry, why);
    }
    if (found.artifact) return found;
    return {.fault = true};
}

bool PackFile::holds(const CacheKey& key, const Sha256& digest) const {
    const auto at = std::ranges::lower_bound(index_, key, {}, &PackedEntry::key);
    return at != index_.end() && at->key == key && at->digest == digest;
}

void write_pack(const fs::path& path, const PackContents& contents, const SigningKey* signer) {
    static constexpr std::array<std::byte, kPackAlignment> kZeros{};
    const PackHead head = encode_pack_head(contents, signer);
    std::vector<std::span<const std::byte>> pieces{head.bytes};
    pieces.reserve(1 + 2 * contents.size());
    std::uint64_t end = head.bytes.size();
    auto place = head.index.begin();
    for (const auto& [key, entry] : contents) {
        pieces.push_back(std::span(kZeros).first(place->offset - end));
        pieces.emplace_back(entry);
        end = place->offset + place->bytes;
        ++place;
    }
    if (const int error = write_atomically(path, pieces, Durability::now)) {
        throw EnvironmentError(fmt::format("pack {} cannot be written: {}", path.string(), std::strerror(error)));
    }
    // The temporary was the user's alone; a pack is made to be given away.
    ::chmod(path.c_str(), 0644);
}

bool PackStore::open_all() {
    bool complete = true;
    std::call_once(opened_, [&] {
        for (const fs::path& path : paths_) {
            try {
                packs_.push_back(PackFile::open(path, trusted_));
            } catch (const std::exception& error) {
                complete = false;
                if (left_out_.empty()) left_out_ = error.what();
                logger().warn("cache: {}; it is not used", error.what());
            }
        }
    });
    return complete;
}

std::string PackStore::out_of_use() {
    (void)open_all();
    return left_out_;
}

Lookup PackStore::get(const CacheKey& key) try {
    bool fault = !open_all();
    for (const auto& pack : packs_) {
        if (const std::lock_guard lock(mutex_); rejected_.contains({pack.get(), key})) continue;
        std::string why;
        Lookup found = pack->get(key, why);
        if (found.fault) {
            fault = true;
            logger().warn("cache: the entry {} in pack {} is not used: {}", key.hex(), pack->path().string(), why);
        }
        if (!found.artifact) continue;
        found.fault = fault;
        return found;
    }
    return {.fault = fault};
} catch (const std::exception& error) {
    logger().warn("cache: packs: {}", error.what());
    return {.fault = true};
}

bool PackStore::reject(const CacheKey& key, std::span<const std::byte> entry, const std::string& why) try {
    (void)open_all();
    bool news = false;
    const Sha256 digest = sha256_of(entry);
    const std::lock_guard lock(mutex_);
    for (const auto& pack : packs_) {
        if (!pack->holds(key, digest) || !rejected_.emplace(pack.get(), key).second) continue;
        news = true;
        logger().warn("cache: the entry {} in pack {} is not used: {}", key.hex(), pack->path().string(), why);
    }
    return news;
} catch (const std::exception& error) {
    logger().warn("cache: packs: {}", error.what());
    return false;
}

}  // namespace flce
