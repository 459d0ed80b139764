#include "cache/file_io.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "cache/file_descriptor.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

int write_all(int file, std::span<const std::byte> in) {
    while (!in.empty()) {
        const ssize_t count = ::write(file, in.data(), in.size());
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno;
        in = in.subspan(static_cast<std::size_t>(count));
    }
    return 0;
}

int write_pieces(FileDescriptor& file, std::span<const std::span<const std::byte>> pieces, Durability durability) {
    for (const auto piece : pieces) {
        if (const int error = write_all(file.get(), piece)) return error;
    }
    // Synced before the rename: after a power cut the name must never lead to missing bytes.
    if (durability == Durability::now && ::fsync(file.get()) != 0) return errno;
    return file.close() ? 0 : errno;
}

}  // namespace

bool means_absent(int error) { return error == ENOENT || error == ENOTDIR || error == ESTALE || error == EBUSY; }

int make_private_directories(const fs::path& path) {
    if (::mkdir(path.c_str(), 0700) == 0) return 0;
    if (errno == EEXIST) return 0;
    if (errno != ENOENT || !path.has_parent_path() || path.parent_path() == path) return errno;
    if (const int error = make_private_directories(path.parent_path())) return error;
    return ::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST ? 0 : errno;
}

int read_at(int file, std::uint64_t offset, std::span<std::byte> out) {
    while (!out.empty()) {
        const ssize_t count = ::pread(file, out.data(), out.size(), static_cast<off_t>(offset));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno;
        if (count == 0) return EIO;
        out = out.subspan(static_cast<std::size_t>(count));
        offset += static_cast<std::uint64_t>(count);
    }
    return 0;
}

int write_atomically(const fs::path& path, std::span<const std::span<const std::byte>> pieces, Durability durability) {
    std::string temporary = (path.parent_path() / ("." + path.stem().string() + ".XXXXXX")).string();
    FileDescriptor file(::mkostemp(temporary.data(), O_CLOEXEC));
    if (!file) return errno;
    int error = write_pieces(file, pieces, durability);
    if (error == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
    if (error != 0) {
        ::unlink(temporary.c_str());
        return error;
    }
    if (durability == Durability::now) {
        const fs::path parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
        const FileDescriptor folder(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        if (folder) ::fsync(folder.get());  // some file systems refuse this on a directory; the file is complete either way
    }
    return 0;
}

std::string ownership_fault(const struct stat& status, Owner owner) {
    const bool owned = status.st_uid == ::geteuid() || (owner == Owner::user_or_root && status.st_uid == 0);
    if (!owned) return fmt::format("owned by user {}, not by user {}", status.st_uid, ::geteuid());
    if ((status.st_mode & (S_IWGRP | S_IWOTH)) == 0) return {};
    return fmt::format("mode {:04o} lets group or others write; chmod go-w to use it", status.st_mode & 07777);
}

std::string directory_fault(const fs::path& path, int& error) {
    struct stat status{};
    error = ::stat(path.c_str(), &status) == 0 ? 0 : errno;
    if (error != 0) return std::strerror(error);
    return S_ISDIR(status.st_mode) ? ownership_fault(status, Owner::user) : "not a directory";
}

}  // namespace flce
