#include "runtime/cuda/nvrtc_search.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <llvm/BinaryFormat/ELF.h>
#include <llvm/Object/BuildID.h>
#include <llvm/Object/ELFObjectFile.h>
#include <llvm/Support/MemoryBuffer.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <span>

#include "cache/dynamic_library.hpp"
#include "flce/error.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

// Newest first: a newer compiler knows every architecture that an older one does.
constexpr std::array kLibraryNames = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
// Folders in which toolkits and wheels put libraries, below the folder that names them.
constexpr std::array kSubfolders = {"",
                                    "lib64",
                                    "lib",
                                    "targets/x86_64-linux/lib",
                                    "targets/sbsa-linux/lib",
                                    "nvidia/cu13/lib",
                                    "nvidia/cuda_nvrtc/lib",
                                    "cu13/lib",
                                    "cuda_nvrtc/lib",
                                    "nvidia/cublas/lib",
                                    "cublas/lib"};

#if defined(__x86_64__)
constexpr unsigned kHostMachine = llvm::ELF::EM_X86_64;
#elif defined(__aarch64__)
constexpr unsigned kHostMachine = llvm::ELF::EM_AARCH64;
#endif

std::string hex(std::span<const std::uint8_t> bytes) {
    std::string text;
    for (const std::uint8_t byte : bytes) text += fmt::format("{:02x}", byte);
    return text;
}

std::string sha256(llvm::StringRef bytes) {
    std::array<std::uint8_t, EVP_MAX_MD_SIZE> digest{};
    unsigned size = 0;
    if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1) {
        throw InternalError("SHA-256 of a library failed");
    }
    return hex(std::span(digest).first(size));
}

/// A mapped ELF file of this machine, or why it is not one.
struct ElfFile {
    std::unique_ptr<llvm::MemoryBuffer> bytes;
    std::unique_ptr<llvm::object::ObjectFile> object;
    std::string why;
};

ElfFile open_elf(const fs::path& file) {
    ElfFile result;
    auto buffer = llvm::MemoryBuffer::getFile(file.string(), /*IsText=*/false, /*RequiresNullTerminator=*/false);
    if (!buffer) {
        result.why = buffer.getError().message();
        return result;
    }
    result.bytes = std::move(*buffer);
    auto object = llvm::object::ObjectFile::createELFObjectFile(result.bytes->getMemBufferRef());
    if (!object) {
        result.why = "not a shared library (" + llvm::toString(object.takeError()) + ")";
        return result;
    }
    const auto* elf = llvm::cast<llvm::object::ELFObjectFileBase>(object->get());
    if (elf->getEMachine() != kHostMachine || elf->getBytesInAddress() != 8) {
        result.why = "built for another machine";
        return result;
    }
    result.object = std::move(*object);
    return result;
}

bool exports(const llvm::object::ObjectFile& object, llvm::StringRef wanted) {
    for (const auto& symbol : llvm::cast<llvm::object::ELFObjectFileBase>(object).getDynamicSymbolIterators()) {
        auto name = symbol.getName();
        if (!name) {
            llvm::consumeError(name.takeError());
        } else if (*name == wanted) {
            return true;
        }
    }
    return false;
}

std::string identity_of(const ElfFile& file) {
    const llvm::object::BuildIDRef id = llvm::object::getBuildID(file.object.get());
    return id.empty() ? sha256(file.bytes->getBuffer()) : hex({id.data(), id.size()});
}

/// "13" of "libnvrtc.so.13", of the file itself rather than of a link to it; empty when no name says.
std::string major_version(const fs::path& library) {
    for (const fs::path& name : {fs::path(fs::canonical(library).filename()), library.filename()}) {
        const std::string text = name.string();
        const std::size_t at = text.find(".so.");
        if (at != std::string::npos) return text.substr(at + 4, text.find('.', at + 4) - (at + 4));
    }
    return {};
}

std::vector<fs::path> builtins_beside(const fs::path& library) {
    const std::string prefix = "libnvrtc-builtins.so." + major_version(library);
    std::vector<fs::path> found;
    for (const fs::path& folder : {library.parent_path(), fs::canonical(library).parent_path()}) {
        std::error_code ignored;
        for (const auto& entry : fs::directory_iterator(folder, ignored)) {
            const std::string name = entry.path().filename().string();
            if (name.starts_with(prefix)) found.push_back(fs::canonical(entry.path(), ignored));
        }
    }
    // Links to one file ("….so.12.4", "….so.12.4.127") are one.
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? std::string() : std::string(value);
}

/// Folders of a Python prefix that have NVIDIA's wheels, the newest Python's first.
std::vector<fs::path> python_packages(const fs::path& prefix) {
    std::error_code ignored;
    std::vector<fs::path> folders;
    for (const char* library : {"lib", "local/lib"}) {
        for (const auto& entry : fs::directory_iterator(prefix / library, ignored)) {
            if (!entry.path().filename().string().starts_with("python3")) continue;
            for (const char* packages : {"site-packages", "dist-packages"}) {
                if (fs::exists(entry.path() / packages / "nvidia", ignored)) folders.push_back(entry.path() / packages);
            }
        }
    }
    std::sort(folders.rbegin(), folders.rend());
    return folders;
}

/// A search that notes every place that was tried, for the error.
class Search {
public:
    std::optional<NvrtcLocation> file(const fs::path& path) {
        NvrtcProbe probe = probe_nvrtc(path);
        if (probe.usable) return std::move(probe.location);
        tried_ += fmt::format("\n  {}: {}", path.string(), probe.why);
        return std::nullopt;
    }

    std::optional<NvrtcLocation> folder(const fs::path& root, const char* because) {
        if (root.empty()) return std::nullopt;
        bool any = false;
        std::error_code ignored;
        for (const char* subfolder : kSubfolders) {
            for (const char* name : kLibraryNames) {
                const fs::path path = (root / subfolder / name).lexically_normal();
                if (!fs::exists(path, ignored)) continue;
                any = true;
                if (auto found = file(path)) return found;
            }
        }
        if (!any) tried_ += fmt::format("\n  {} ({}): no libnvrtc.so.13 or .12", root.string(), because);
        return std::nullopt;
    }

    std::optional<NvrtcLocation> loader_path() {
        for (const char* name : kLibraryNames) {
            std::string why;
            const DynamicLibrary library = DynamicLibrary::open(name, &why);
            if (!library) continue;
            if (auto found = file(library.path())) return found;
        }
        tried_ += "\n  the loader's path (LD_LIBRARY_PATH, ld.so.cache): no libnvrtc.so.13 or .12";
        return std::nullopt;
    }

    std::optional<NvrtcLocation> python(const fs::path& prefix, const char* because) {
        if (prefix.empty()) return std::nullopt;
        const std::vector<fs::path> folders = python_packages(prefix);
        for (const fs::path& packages : folders) {
            if (auto found = folder(packages, because)) return found;
        }
        if (folders.empty()) tried_ += fmt::format("\n  {} ({}): no NVIDIA wheels", prefix.string(), because);
        return std::nullopt;
    }

    [[nodiscard]] const std::string& tried() const { return tried_; }

private:
    std::string tried_;
};

/// The folder that libflce (or a program it is linked into) was loaded from.
fs::path library_folder() {
    Dl_info info{};
    if (::dladdr(reinterpret_cast<const void*>(&library_folder), &info) == 0 || info.dli_fname == nullptr) return {};
    std::error_code ignored;
    return fs::canonical(info.dli_fname, ignored).parent_path();
}

/// FLCE_NVRTC_HINTS: folders relative to libflce's, separated by ':'. Relative, so that no build machine's path is in the library.
std::vector<fs::path> recorded_folders() {
    std::vector<fs::path> folders;
#if defined(FLCE_NVRTC_HINTS)
    const fs::path base = library_folder();
    const std::string hints = FLCE_NVRTC_HINTS;
    for (std::size_t begin = 0; begin < hints.size() && !base.empty();) {
        const std::size_t end = std::min(hints.find(':', begin), hints.size());
        if (end > begin) folders.push_back((base / hints.substr(begin, end - begin)).lexically_normal());
        begin = end + 1;
    }
#endif
    return folders;
}

/// The folder of NVIDIA's wheels beside this one's, where libflce was installed in site-packages/flce/lib; else empty.
fs::path wheels_beside() {
    const fs::path library = library_folder();
    if (library.parent_path().filename() != "flce") return {};
    std::error_code ignored;
    const fs::path wheels = library.parent_path().parent_path() / "nvidia";
    return fs::is_directory(wheels, ignored) ? wheels : fs::path();
}

/// Guess at sys.prefix: the folder above the one that holds the first python3 of PATH.
fs::path python_prefix() {
    const std::string path = variable("PATH");
    std::error_code ignored;
    for (std::size_t begin = 0; begin < path.size();) {
        const std::size_t end = std::min(path.find(':', begin), path.size());
        const fs::path folder = path.substr(begin, end - begin);
        if (!folder.empty() && fs::exists(folder / "python3", ignored)) return folder.parent_path();
        begin = end + 1;
    }
    return {};
}

std::optional<NvrtcLocation> search_everywhere(Search& search) {
    for (const fs::path& folder : recorded_folders()) {
        if (auto found = search.folder(folder, "recorded by the build")) return found;
    }
    if (auto found = search.folder(wheels_beside(), "wheels beside flce's")) return found;
    for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
        if (auto found = search.folder(variable(name), name)) return found;
    }
    if (auto found = search.folder("/usr/local/cuda", "the toolkit's default")) return found;
    if (auto found = search.loader_path()) return found;
    for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
        if (auto found = search.python(variable(name), name)) return found;
    }
    if (auto found = search.python(python_prefix(), "python3 of PATH")) return found;
    const std::string home = variable("HOME");
    return home.empty() ? std::nullopt : search.python(fs::path(home) / ".local", "pip install --user");
}

}  // namespace

NvrtcProbe probe_nvrtc(const fs::path& file) {
    NvrtcProbe probe;
    const ElfFile elf = open_elf(file);
    if (elf.object == nullptr) {
        probe.why = elf.why;
        return probe;
    }
    if (!exports(*elf.object, "nvrtcCompileProgram")) {
        probe.why = "not NVRTC: it does not export nvrtcCompileProgram";
        return probe;
    }
    probe.location.library = fs::absolute(file);
    probe.location.builtins = builtins_beside(probe.location.library);
    probe.location.build_id = identity_of(elf);
    for (const fs::path& builtins : probe.location.builtins) {
        const ElfFile beside = open_elf(builtins);
        if (beside.object != nullptr) probe.location.build_id.append("-").append(identity_of(beside));
    }
    probe.usable = true;
    return probe;
}

std::vector<fs::path> cuda_library_folders() {
    std::vector<fs::path> roots = recorded_folders();
    roots.insert(roots.end(), {wheels_beside(), variable("CUDA_HOME"), variable("CUDA_PATH"), "/usr/local/cuda"});
    const std::string home = variable("HOME");
    for (const fs::path& prefix : {fs::path(variable("VIRTUAL_ENV")), fs::path(variable("CONDA_PREFIX")), python_prefix(),
                                   home.empty() ? fs::path() : fs::path(home) / ".local"}) {
        if (!prefix.empty()) std::ranges::copy(python_packages(prefix), std::back_inserter(roots));
    }
    std::vector<fs::path> folders;
    std::error_code ignored;
    for (const fs::path& root : roots) {
        if (root.empty()) continue;
        for (const char* subfolder : kSubfolders) {
            const fs::path folder = (root / subfolder).lexically_normal();
            if (fs::is_directory(folder, ignored)) folders.push_back(folder);
        }
    }
    return folders;
}

NvrtcLocation find_nvrtc(const fs::path& chosen) {
    Search search;
    std::error_code ignored;
    if (!chosen.empty()) {
        auto found = fs::is_directory(chosen, ignored) ? search.folder(chosen, "FLCE_NVRTC") : search.file(chosen);
        if (found) return *found;
        throw EnvironmentError(fmt::format("FLCE_NVRTC={} names no usable NVRTC (allowed: libnvrtc.so.12 or .13, or a folder with it):{}",
                                           chosen.string(), search.tried()));
    }
    if (auto found = search_everywhere(search)) return *found;
    throw EnvironmentError(fmt::format(
        "NVRTC (libnvrtc.so.13 or .12) was not found. Install a CUDA toolkit or `pip install nvidia-cuda-nvrtc`, or set FLCE_NVRTC to "
        "the file or its folder. Looked at:{}",
        search.tried()));
}

}  // namespace flce
