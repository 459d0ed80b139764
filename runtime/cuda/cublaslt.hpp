// cuBLASLt, loaded at run time: products that launch programs leave to the vendor's library.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/launcher.hpp"

namespace flce {

/// Numbers of cublasLt.h, which no build of flce needs. A test compares them where the header is.
namespace cublaslt {
inline constexpr int kCompute32F = 68;
inline constexpr int kTypeFp32 = 0;
inline constexpr int kTypeFp16 = 2;
inline constexpr int kTypeBf16 = 14;
inline constexpr int kDescPointerMode = 2;
inline constexpr int kDescTransposeA = 3;
inline constexpr int kDescTransposeB = 4;
inline constexpr int kPointerModeDevice = 1;
inline constexpr int kPreferenceWorkspaceBytes = 1;
inline constexpr int kPreferenceReductions = 3;
inline constexpr std::array kPreferenceAlignments = {5, 6, 7, 8};  ///< alignments of A, B, C and D
/// Sums of parts through memory, in a fixed order. Not CUBLASLT_REDUCTION_SCHEME_INPLACE, whose order is that in which blocks end.
inline constexpr std::uint32_t kRepeatableReductions = 2 | 4;
inline constexpr int kStatusAllocationFailed = 3;
inline constexpr int kStatusNotSupported = 15;
}  // namespace cublaslt

/// The library's functions that flce calls. Handles and descriptors are pointers; an algorithm is 64 bytes.
struct CublasLtFunctions {
    struct Algorithm {
        std::array<std::uint64_t, 8> data;
    };
    struct Heuristic {
        Algorithm algorithm;
        std::size_t workspace_bytes;
        int state;
        float waves;
        std::array<int, 4> reserved;
    };
    std::size_t (*version)() = nullptr;
    const char* (*status_name)(int) = nullptr;
    int (*create)(void** handle) = nullptr;
    int (*destroy)(void* handle) = nullptr;
    int (*desc_create)(void** desc, int compute_type, int scale_type) = nullptr;
    int (*desc_destroy)(void* desc) = nullptr;
    int (*desc_set)(void* desc, int attribute, const void* value, std::size_t bytes) = nullptr;
    int (*layout_create)(void** layout, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t ld) = nullptr;
    int (*layout_destroy)(void* layout) = nullptr;
    int (*preference_create)(void** preference) = nullptr;
    int (*preference_destroy)(void* preference) = nullptr;
    int (*preference_set)(void* preference, int attribute, const void* value, std::size_t bytes) = nullptr;
    int (*heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference, int most, Heuristic* results,
                     int* count) = nullptr;
    int (*matmul)(void* handle, void* desc, const void* alpha, const void* a, void* layout_a, const void* b, void* layout_b,
                  const void* beta, const void* c, void* layout_c, void* d, void* layout_d, const Algorithm* algorithm, void* workspace,
                  std::size_t workspace_bytes, void* stream) = nullptr;
};

class CublasLt {
public:
    /// The process's library: FLCE_CUBLASLT, else one that is loaded already (PyTorch's), else the toolkit's or a wheel's. Throws
    /// EnvironmentError with the places that were looked at.
    [[nodiscard]] static std::shared_ptr<const CublasLt> load();
    /// The library in this file, or of this name on the loader's path. Throws EnvironmentError.
    [[nodiscard]] static std::shared_ptr<const CublasLt> open(const std::filesystem::path& file);

    [[nodiscard]] const CublasLtFunctions& functions() const noexcept { return functions_; }
    [[nodiscard]] int version() const noexcept { return version_; }  ///< 130100 for 13.1.0
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
    /// "CUBLAS_STATUS_NOT_SUPPORTED".
    [[nodiscard]] std::string describe(int status) const;

private:
    CublasLt() = default;

    CublasLtFunctions functions_;
    int version_ = 0;
    std::filesystem::path path_;
};

/// Products on one device. Descriptors and algorithms of the sizes that were met are kept. Thread-safe.
class LibraryGemms {
public:
    /// The device's. It lives as long as the process: the library frees what it has at exit, in an order that nobody knows.
    [[nodiscard]] static const LibraryGemms& of(const std::shared_ptr<const CudaContext>& context);
    LibraryGemms(const LibraryGemms&) = delete;
    LibraryGemms& operator=(const LibraryGemms&) = delete;

    /// Submits the product; returns the library's status, 0 where it was taken.
    [[nodiscard]] int run(const GemmCall& call, void* stream) const noexcept;
    [[nodiscard]] const CublasLt& library() const noexcept { return *library_; }

private:
    LibraryGemms(std::shared_ptr<const CublasLt> library, std::shared_ptr<const CudaContext> context);
    ~LibraryGemms() = default;

    struct Prepared;
    using Key = std::array<std::int64_t, 16>;

    [[nodiscard]] std::shared_ptr<const Prepared> prepared(const GemmCall& call, int& status) const;
    [[nodiscard]] std::shared_ptr<const Prepared> prepare(const GemmCall& call, int& status) const;

    std::shared_ptr<const CublasLt> library_;
    std::shared_ptr<const CudaContext> context_;
    void* handle_ = nullptr;
    mutable std::mutex mutex_;
    mutable std::map<Key, std::shared_ptr<const Prepared>> known_;
};

/// LauncherContext::gemm over its gemm_library, a LibraryGemms: the algorithm that the call names.
int run_gemm(const LauncherContext* context, const GemmCall* call, void* stream);
/// run_gemm with the library's favourite: the program's numbers are those of another version of the library.
int run_favourite_gemm(const LauncherContext* context, const GemmCall* call, void* stream);

}  // namespace flce
