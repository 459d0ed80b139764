// Folders of the user's own on this machine, in its temporary directory, for files that cannot lie in the cache directory: because that is
// on a network file system, or there is none that could be used.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace flce {

/// <temporary directory>/flce-<purpose>-<user>, private to the user. Empty where it is not there (`make`: and cannot be made), and where
/// somebody else has prepared it or may write it: `why` says so then, and is empty otherwise.
[[nodiscard]] std::filesystem::path machine_folder(std::string_view purpose, bool make, std::string& why);

}  // namespace flce
