// Room of a machine for workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

namespace flce {

/// Most bytes that a worker takes while it compiles, roughly: all GEMM kernels of a set at once take 230 to 280 MiB (NVRTC 13.0, sm_90a and
/// sm_100a, most options); the rest is for other compilers and larger kernels.
inline constexpr std::int64_t kWorkerBytes = 512LL << 20;

/// Bytes that new processes may take: the system's available memory, within the limits of this process's control groups (version 1 or 2).
/// `root` stands in for / in tests.
[[nodiscard]] std::int64_t available_memory_bytes(const std::filesystem::path& root = "/");

/// Workers for `pieces` of work: one a core, as many as memory has room for, at least one.
[[nodiscard]] std::size_t worker_count(int cores, std::int64_t memory_bytes, std::size_t pieces);

}  // namespace flce
