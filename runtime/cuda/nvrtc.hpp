// NVRTC, loaded at run time from the toolkit, the system or the PyPI wheel. CUDA 12.x and 13.x.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "generator/cuda_program.hpp"

namespace flce {

class Nvrtc {
public:
    /// The process's NVRTC. Throws EnvironmentError listing where it was looked for (FLCE_NVRTC overrides the search).
    [[nodiscard]] static std::shared_ptr<const Nvrtc> load();
    /// The NVRTC at `place` (a file, or a folder with it); empty: the usual places.
    [[nodiscard]] static std::shared_ptr<const Nvrtc> open(const std::filesystem::path& place);
    virtual ~Nvrtc() = default;

    [[nodiscard]] virtual std::pair<int, int> version() const = 0;
    /// ELF build-ids of libnvrtc and its builtins: part of every cubin's key, as the version alone does not carry the build.
    [[nodiscard]] virtual std::string build_id() const = 0;
    [[nodiscard]] virtual std::filesystem::path path() const = 0;
    [[nodiscard]] virtual std::vector<std::string> supported_architectures() const = 0;  ///< "sm_80", …

    struct Result {
        std::vector<std::byte> cubin;
        std::string log;
    };
    /// Compiles to a cubin for the architecture named in `options` and checks that it is an ELF that holds every kernel in `kernels`.
    /// Throws CompileError with the whole log; the source is saved and its path named. Throws EnvironmentError for an architecture that
    /// this NVRTC is too old to know.
    [[nodiscard]] virtual Result compile(const std::string& source, std::span<const EmbeddedHeader> headers,
                                         const std::vector<std::string>& options, std::span<const KernelEntry> kernels) const = 0;

protected:
    Nvrtc() = default;
};

}  // namespace flce
