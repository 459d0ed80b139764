// File operations that the stores share. Errors are errno values, 0 for none: most of them only mean a miss.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "cache/store.hpp"

namespace flce {

/// Whether a network file system's error means that another machine is replacing or has removed the file. Also true of "there is none".
[[nodiscard]] bool means_absent(int error);

/// Makes the directory and its parents, readable by the user alone.
[[nodiscard]] int make_private_directories(const std::filesystem::path& path);

/// Fills `out` from `offset` of the file; a file that ends before is EIO.
[[nodiscard]] int read_at(int file, std::uint64_t offset, std::span<std::byte> out);

/// The pieces, one after another, as `path`: complete or not at all, through a temporary beside it. Durability::now: they survive a power
/// cut.
[[nodiscard]] int write_atomically(const std::filesystem::path& path, std::span<const std::span<const std::byte>> pieces,
                                   Durability durability);

/// Why a file or directory of this status may have been written by somebody who could have this process load code of theirs; empty: it was
/// not. `system`: root may own it.
enum class Owner { user, user_or_root };
[[nodiscard]] std::string ownership_fault(const struct stat& status, Owner owner);

/// Ownership fault of a directory that the user must own; also when there is none. `error`: why the directory cannot be looked at, 0
/// otherwise.
[[nodiscard]] std::string directory_fault(const std::filesystem::path& path, int& error);

}  // namespace flce
