#include "runtime/cuda/nvrtc.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <semaphore>
#include <thread>

#include "cache/dynamic_library.hpp"
#include "flce/error.hpp"
#include "runtime/cuda/cubin.hpp"
#include "runtime/cuda/nvrtc_search.hpp"
#include "runtime/environment.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

// NVRTC's C interface, the same since CUDA 11; declared here because nvrtc.h comes with the compiler, which need not be there at build
// time.
using NvrtcResult = int;
using NvrtcProgram = struct NvrtcProgramObject*;
constexpr NvrtcResult kSuccess = 0;
constexpr const char* kSourceName = "flce_kernels.cu";

struct Functions {
    const char* (*error_string)(NvrtcResult) = nullptr;
    NvrtcResult (*version)(int*, int*) = nullptr;
    NvrtcResult (*supported_arch_count)(int*) = nullptr;
    NvrtcResult (*supported_archs)(int*) = nullptr;
    NvrtcResult (*create)(NvrtcProgram*, const char*, const char*, int, const char* const*, const char* const*) = nullptr;
    NvrtcResult (*destroy)(NvrtcProgram*) = nullptr;
    NvrtcResult (*compile)(NvrtcProgram, int, const char* const*) = nullptr;
    NvrtcResult (*cubin_size)(NvrtcProgram, std::size_t*) = nullptr;
    NvrtcResult (*cubin)(NvrtcProgram, char*) = nullptr;
    NvrtcResult (*log_size)(NvrtcProgram, std::size_t*) = nullptr;
    NvrtcResult (*log)(NvrtcProgram, char*) = nullptr;
};

Functions bind_functions(const DynamicLibrary& library) {
    Functions f;
    std::string missing;
    const auto bind = [&](auto& target, const char* name) {
        if (!library.bind(target, name)) missing += fmt::format(" {}", name);
    };
    bind(f.error_string, "nvrtcGetErrorString");
    bind(f.version, "nvrtcVersion");
    bind(f.supported_arch_count, "nvrtcGetNumSupportedArchs");
    bind(f.supported_archs, "nvrtcGetSupportedArchs");
    bind(f.create, "nvrtcCreateProgram");
    bind(f.destroy, "nvrtcDestroyProgram");
    bind(f.compile, "nvrtcCompileProgram");
    bind(f.cubin_size, "nvrtcGetCUBINSize");
    bind(f.cubin, "nvrtcGetCUBIN");
    bind(f.log_size, "nvrtcGetProgramLogSize");
    bind(f.log, "nvrtcGetProgramLog");
    if (!missing.empty()) throw EnvironmentError(fmt::format("{} lacks{}: CUDA 12.0 or newer is needed", library.path().string(), missing));
    return f;
}

class Program {
public:
    Program(const Functions& f, const std::string& source, std::span<const EmbeddedHeader> headers) : f_(f) {
        // NVRTC wants terminated strings; string_views do not promise that.
        std::vector<std::string> texts;
        std::vector<std::string> names;
        std::vector<const char*> text_pointers;
        std::vector<const char*> name_pointers;
        for (const EmbeddedHeader& header : headers) {
            texts.emplace_back(header.text);
            names.emplace_back(header.name);
        }
        for (std::size_t i = 0; i < headers.size(); ++i) {
            text_pointers.push_back(texts[i].c_str());
            name_pointers.push_back(names[i].c_str());
        }
        check(
            f_.create(&program_, source.c_str(), kSourceName, static_cast<int>(headers.size()), text_pointers.data(), name_pointers.data()),
            "nvrtcCreateProgram");
    }
    ~Program() {
        if (program_ != nullptr) f_.destroy(&program_);
    }
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    NvrtcResult compile(const std::vector<std::string>& options) {
        std::vector<const char*> pointers;
        for (const std::string& option : options) pointers.push_back(option.c_str());
        return f_.compile(program_, static_cast<int>(pointers.size()), pointers.data());
    }

    [[nodiscard]] std::string log() const {
        std::size_t size = 0;
        if (f_.log_size(program_, &size) != kSuccess || size <= 1) return {};
        std::string text(size, '\0');
        if (f_.log(program_, text.data()) != kSuccess) return {};
        text.resize(size - 1);  // the terminator counts
        return text;
    }

    [[nodiscard]] std::vector<std::byte> cubin() const {
        std::size_t size = 0;
        check(f_.cubin_size(program_, &size), "nvrtcGetCUBINSize");
        std::vector<std::byte> bytes(size);
        if (size > 0) check(f_.cubin(program_, reinterpret_cast<char*>(bytes.data())), "nvrtcGetCUBIN");
        return bytes;
    }

private:
    void check(NvrtcResult result, const char* call) const {
        if (result != kSuccess) throw CompileError(fmt::format("{} failed: {}", call, f_.error_string(result)), {}, {});
    }

    const Functions& f_;
    NvrtcProgram program_ = nullptr;
};

/// Writes the source, its headers and the options into a new folder under the temp directory; an empty path when that fails.
fs::path save_source(const std::string& source, std::span<const EmbeddedHeader> headers, const std::vector<std::string>& options) {
    std::error_code error;
    std::string folder = (fs::temp_directory_path(error) / "flce-source-XXXXXX").string();
    if (error || ::mkdtemp(folder.data()) == nullptr) return {};
    const auto write = [&](const fs::path& name, std::string_view text) {
        const fs::path path = fs::path(folder) / name;
        fs::create_directories(path.parent_path(), error);
        std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
    };
    for (const EmbeddedHeader& header : headers) write(header.name, header.text);
    std::string lines;
    for (const std::string& option : options) lines += option + "\n";
    write("options.txt", lines);
    write(kSourceName, source);
    const fs::path path = fs::path(folder) / kSourceName;
    return fs::exists(path, error) ? path : fs::path();
}

std::string architecture_of(const std::vector<std::string>& options) {
    for (const std::string& option : options) {
        for (const std::string_view prefix : {"--gpu-architecture=", "-arch="}) {
            if (option.starts_with(prefix)) return option.substr(prefix.size());
        }
    }
    throw InternalError("NVRTC options name no --gpu-architecture");
}

class LoadedNvrtc final : public Nvrtc {
public:
    explicit LoadedNvrtc(NvrtcLocation location) : location_(std::move(location)) {}

    std::pair<int, int> version() const override {
        int major = 0;
        int minor = 0;
        functions().version(&major, &minor);
        return {major, minor};
    }
    std::string build_id() const override { return location_.build_id; }
    fs::path path() const override { return location_.library; }

    std::vector<std::string> supported_architectures() const override {
        const Functions& f = functions();
        int count = 0;
        std::vector<std::string> names;
        if (f.supported_arch_count(&count) != kSuccess || count <= 0) return names;
        std::vector<int> numbers(static_cast<std::size_t>(count));
        if (f.supported_archs(numbers.data()) != kSuccess) return names;
        for (const int number : numbers) names.push_back(fmt::format("sm_{}", number));
        return names;
    }

    Result compile(const std::string& source, std::span<const EmbeddedHeader> headers, const std::vector<std::string>& options,
                   std::span<const KernelEntry> kernels) const override {
        const Functions& f = functions();
        const std::string arch = architecture_of(options);
        check_architecture(arch);
        Program program(f, source, headers);
        const NvrtcResult status = compile_in_turn(program, options);
        Result result;
        result.log = program.log();
        std::string fault;
        if (status != kSuccess) {
            fault = f.error_string(status);
        } else {
            // Success is not enough: after some failures the size is 0, and a kernel that nobody instantiates is silently left out.
            result.cubin = program.cubin();
            fault = cubin_fault(result.cubin, arch, kernels);
            if (!fault.empty()) fault = "the cubin is unusable: " + fault;
        }
        if (!fault.empty()) fail(fault, arch, result.log, save_source(source, headers, options));
        return result;
    }

private:
    NvrtcResult compile_in_turn(Program& program, const std::vector<std::string>& options) const {
        struct Turn {
            std::counting_semaphore<>& turns;
            explicit Turn(std::counting_semaphore<>& all) : turns(all) { turns.acquire(); }
            ~Turn() { turns.release(); }
            Turn(const Turn&) = delete;
            Turn& operator=(const Turn&) = delete;
        };
        const Turn turn(turns_);
        return program.compile(options);
    }

    /// Loaded at the first use: a key needs the build-id only, and a kernel from the cache should not wait for a 100 MB library.
    const Functions& functions() const {
        const std::scoped_lock lock(mutex_);
        if (loaded_) return functions_;
        std::string why;
        // NVRTC opens its builtins by bare name and some wheels give it no RPATH: once loaded by path, the name resolves.
        for (const fs::path& builtins : location_.builtins) {
            if (!DynamicLibrary::open(builtins, &why))
                throw EnvironmentError(fmt::format("{} cannot be loaded: {}", builtins.string(), why));
        }
        const DynamicLibrary library = DynamicLibrary::open(location_.library, &why);
        if (!library) throw EnvironmentError(fmt::format("NVRTC at {} cannot be loaded: {}", location_.library.string(), why));
        functions_ = bind_functions(library);
        loaded_ = true;
        return functions_;
    }

    /// An NVRTC older than the GPU is the installation's fault, not the source's.
    void check_architecture(const std::string& arch) const {
        const std::vector<std::string> known = supported_architectures();
        const std::string plain = arch.substr(0, arch.find_last_of("0123456789") + 1);  // "sm_90" of "sm_90a"
        if (known.empty() || std::find(known.begin(), known.end(), plain) != known.end()) return;
        const auto [major, minor] = version();
        throw EnvironmentError(
            fmt::format("NVRTC {}.{} ({}) cannot compile for {}; it knows {}. Install a newer CUDA toolkit or nvidia-cuda-nvrtc", major,
                        minor, location_.library.string(), arch, fmt::join(known, ", ")));
    }

    [[noreturn]] void fail(const std::string& fault, const std::string& arch, const std::string& log, const fs::path& saved) const {
        const auto [major, minor] = version();
        throw CompileError(fmt::format("NVRTC {}.{} did not compile the kernels for {}: {}. Source {}. Log:\n{}", major, minor, arch, fault,
                                       saved.empty() ? "could not be saved" : "saved as " + saved.string(), log),
                           log, saved);
    }

    NvrtcLocation location_;
    /// No more compiles at a time than cores: each takes 100 MB and more.
    mutable std::counting_semaphore<> turns_{std::max(1, static_cast<int>(std::thread::hardware_concurrency()))};
    mutable std::mutex mutex_;
    mutable bool loaded_ = false;
    mutable Functions functions_;
};

}  // namespace

std::shared_ptr<const Nvrtc> Nvrtc::load() {
    // Never destroyed, as NVRTC cannot be unloaded. A failure is not remembered: somebody may be installing it.
    static std::mutex mutex;
    static auto& loaded = *new std::shared_ptr<const Nvrtc>();
    const std::scoped_lock lock(mutex);
    if (loaded == nullptr) loaded = open(environment().nvrtc);
    return loaded;
}

std::shared_ptr<const Nvrtc> Nvrtc::open(const fs::path& place) { return std::make_shared<LoadedNvrtc>(find_nvrtc(place)); }

}  // namespace flce
