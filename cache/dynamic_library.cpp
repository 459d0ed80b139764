#include "cache/dynamic_library.hpp"

#include <dlfcn.h>
#include <link.h>

namespace flce {

DynamicLibrary DynamicLibrary::open(const std::filesystem::path& file, std::string* why) {
    DynamicLibrary library;
    library.path_ = file;
    library.handle_ = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library.handle_ == nullptr) {
        const char* message = ::dlerror();
        if (why != nullptr) *why = message != nullptr ? message : "dlopen failed";
        return library;
    }
    const link_map* map = nullptr;
    if (::dlinfo(library.handle_, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 && map != nullptr && map->l_name != nullptr &&
        *map->l_name != '\0') {
        library.path_ = map->l_name;
    }
    return library;
}

void* DynamicLibrary::find(const char* symbol) const noexcept { return handle_ == nullptr ? nullptr : ::dlsym(handle_, symbol); }

}  // namespace flce
