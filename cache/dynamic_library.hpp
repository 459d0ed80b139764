// A shared library opened at run time. It stays loaded for the life of the process: libcuda, libnvrtc and libcurl do not survive being
// unloaded.
#pragma once

#include <filesystem>
#include <string>

namespace flce {

class DynamicLibrary {
public:
    /// nullptr handle (and the loader's message in `why`) when it cannot be loaded. A name without a slash is looked for on the loader's
    /// path.
    [[nodiscard]] static DynamicLibrary open(const std::filesystem::path& file, std::string* why);

    [[nodiscard]] explicit operator bool() const noexcept { return handle_ != nullptr; }
    [[nodiscard]] void* find(const char* symbol) const noexcept;
    /// The file that the loader chose; the name that was asked for if the loader does not say.
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

    template <typename Function>
    bool bind(Function*& target, const char* symbol) const noexcept {
        target = reinterpret_cast<Function*>(find(symbol));
        return target != nullptr;
    }

private:
    void* handle_ = nullptr;
    std::filesystem::path path_;
};

}  // namespace flce
