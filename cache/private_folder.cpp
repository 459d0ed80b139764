#include "cache/private_folder.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <string>
#include <system_error>

#include "flce/error.hpp"

namespace flce {

PrivateFolder::PrivateFolder(std::string_view purpose) {
    std::error_code error;
    const std::filesystem::path temporary = std::filesystem::temp_directory_path(error);
    if (error) {
        throw EnvironmentError(fmt::format("no folder for temporary files ({}): set TMPDIR to one that exists", error.message()));
    }
    std::string pattern = (temporary / fmt::format("flce-{}-XXXXXX", purpose)).string();
    if (::mkdtemp(pattern.data()) == nullptr) {
        throw EnvironmentError(fmt::format("{}: cannot be created; set TMPDIR to a folder that can be written", pattern));
    }
    path_ = pattern;
}

PrivateFolder::~PrivateFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
}

}  // namespace flce
