#include "cache/machine_folder.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "cache/file_io.hpp"

namespace flce {

std::filesystem::path machine_folder(std::string_view purpose, bool make, std::string& why) {
    why.clear();
    std::error_code error;
    const std::filesystem::path temporary = std::filesystem::temp_directory_path(error);
    if (error) return {};
    std::filesystem::path folder = temporary / fmt::format("flce-{}-{}", purpose, ::geteuid());
    if (make && ::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return {};
    // Everybody may write the temporary directory: a link of that name would lead to wherever another user likes, so it is not followed.
    struct stat status{};
    if (::lstat(folder.c_str(), &status) != 0) return {};
    const std::string fault = S_ISDIR(status.st_mode) ? ownership_fault(status, Owner::user) : "not a directory";
    if (fault.empty()) return folder;
    why = fmt::format("{}: {}", folder.string(), fault);
    return {};
}

}  // namespace flce
