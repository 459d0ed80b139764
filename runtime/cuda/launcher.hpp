// Lowers a launch program to host code with LLVM: one function per pass, all constants folded, no branch on an option left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/artifact_cache.hpp"
#include "flce/device.hpp"
#include "generator/cuda_program.hpp"

namespace flce {

/// Memory that a compiled launcher reads besides the slots: the driver's entry points and the loaded kernels.
struct LauncherContext {
    /// CUresult cuLaunchKernel(CUfunction, 6 × unsigned, unsigned smem, CUstream, void** params, void** extra). The parameter block is the
    /// kernel's one parameter.
    void* launch_kernel = nullptr;
    /// CUresult (const LauncherContext*, CUfunction, grid x, y, z, block x, smem: unsigned, CUstream, void** params): launches
    /// with programmatic stream serialization; launch_overlapping below, or a stand-in.
    void* launch_overlapping = nullptr;
    void* launch_kernel_ex = nullptr;  ///< cuLaunchKernelEx
    void* memset_async = nullptr;      ///< CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream)
    void* const* functions = nullptr;  ///< CUfunction of each KernelEntry
    /// CUresult (const LauncherContext*, void* map, int64 address, columns, rows, row_bytes, blocks, block_bytes, unsigned box_rows,
    /// element_bytes): writes the CUtensorMap that a TensorMapField describes; encode_map below, or a stand-in.
    void* encode_map = nullptr;
    void* tensor_map_encode = nullptr;  ///< cuTensorMapEncodeTiled
    /// int (const LauncherContext*, const GemmCall*, CUstream): multiplies; run_gemm of cublaslt.hpp, or a stand-in.
    void* gemm = nullptr;
    const void* gemm_library = nullptr;  ///< object that `gemm` multiplies with
};

/// A Gemm with the values that its fields have in one call. Compiled launchers write it: all fields have eight bytes.
struct GemmCall {
    std::int64_t transpose_a, transpose_b;
    std::int64_t operands, result_type;  ///< DType
    std::int64_t algorithm;
    std::int64_t m, n, k;
    std::int64_t a, lda, b, ldb, result, ld;
    std::int64_t adds, factors, workspace;
};

/// Returns 0, or of the first call that failed (CUresult | number of its statement << 32), with kMapFailed added where the call was to
/// write a tensor map; of a product, the library's status. Nothing is launched after it. launcher_failure reads the number.
using LauncherFunction = std::int64_t (*)(const LauncherContext* context, const std::int64_t* slots, void* stream);
inline constexpr std::uint64_t kMapFailed = 1ULL << 31;

/// A driver call of a launcher that failed.
struct LauncherFailure {
    std::size_t statement = 0;  ///< numbered_statement's
    bool tensor_map = false;    ///< whether the call was to write a tensor map of the statement's launch
    int result = 0;             ///< CUresult, or cublasStatus_t of a Gemm
    friend bool operator==(const LauncherFailure&, const LauncherFailure&) = default;
};
/// Failure that a LauncherFunction has returned; std::nullopt where nothing failed.
[[nodiscard]] std::optional<LauncherFailure> launcher_failure(std::int64_t returned) noexcept;
/// The function that failed, the driver's or the library's: "cuLaunchKernel", "cublasLtMatmul".
[[nodiscard]] const char* failed_call(const LaunchProgram& program, const std::vector<KernelEntry>& kernels,
                                      const LauncherFailure& failure);

// The context's functions over the driver's.
int launch_overlapping(const LauncherContext* context, void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned smem_bytes, void* stream, void** params);
int encode_map(const LauncherContext* context, void* map, std::int64_t address, std::int64_t columns, std::int64_t rows,
               std::int64_t row_bytes, std::int64_t blocks, std::int64_t block_bytes, unsigned box_rows, unsigned element_bytes);

inline constexpr const char* kForwardLauncherSymbol = "flce_launch_forward";
inline constexpr const char* kMergeLauncherSymbol = "flce_launch_merge";
inline constexpr const char* kBackwardLauncherSymbol = "flce_launch_backward";

/// The baseline of the host's architecture: launchers are a few integer instructions, so one object serves every host of a cluster.
[[nodiscard]] CpuProperties launcher_target(const std::string& host_triple);

/// A digest of the code that lowers launch programs and of what compiled launchers read (LauncherContext, Slot): 16 hexadecimal digits,
/// made when the library is built.
[[nodiscard]] std::string_view launcher_generator() noexcept;

/// The key of what compile_launchers makes of these.
[[nodiscard]] CacheKey launchers_key(const CudaProgram& program, const CpuProperties& target, std::string_view generator);

/// Object file with the three symbols above, for the machine described by `host`.
[[nodiscard]] std::vector<std::byte> compile_launchers(const CudaProgram& program, const CpuProperties& host);

}  // namespace flce
