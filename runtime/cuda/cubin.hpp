// Contents of a cubin, read from its bytes and from ptxas' report: checked before anything is cached, recorded in the cache's metadata.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "generator/launch_program.hpp"

namespace flce {

struct CubinKernel {
    std::string name;
    std::optional<std::uint32_t> param_bytes;  ///< size of its parameter block, where the cubin says
};

struct CubinContents {
    int sm = 0;  ///< 90 for sm_90 and sm_90a
    std::vector<CubinKernel> kernels;
};

/// Parses an ELF for NVIDIA GPUs (both ABI versions: CUDA 12 and 13). std::nullopt with the reason in `why` if it is none.
[[nodiscard]] std::optional<CubinContents> read_cubin(std::span<const std::byte> cubin, std::string* why);

/// Why `cubin` cannot serve `kernels` on architecture `arch` ("sm_90a"); empty when it can.
[[nodiscard]] std::string cubin_fault(std::span<const std::byte> cubin, std::string_view arch, std::span<const KernelEntry> kernels);

/// Resources of one kernel by ptxas -v.
struct KernelResources {
    std::string name;
    int registers = 0;  ///< per thread
    std::int64_t static_smem_bytes = 0;
    std::int64_t stack_bytes = 0;  ///< per thread
    std::int64_t spill_store_bytes = 0;
    std::int64_t spill_load_bytes = 0;
};
[[nodiscard]] std::vector<KernelResources> parse_ptxas_report(std::string_view log);

}  // namespace flce
