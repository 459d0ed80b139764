// A folder for temporary files that nobody else reads, and that goes away with its owner.
#pragma once

#include <filesystem>
#include <string_view>

namespace flce {

class PrivateFolder {
public:
    /// "flce-<purpose>-" and six letters, in the system's folder for temporary files. Throws EnvironmentError where it cannot be made.
    explicit PrivateFolder(std::string_view purpose);
    ~PrivateFolder();
    PrivateFolder(const PrivateFolder&) = delete;
    PrivateFolder& operator=(const PrivateFolder&) = delete;
    [[nodiscard]] const std::filesystem::path& path() const { return path_; }

private:
    std::filesystem::path path_;
};

}  // namespace flce
