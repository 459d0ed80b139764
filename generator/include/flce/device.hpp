// Device: where a kernel runs. Read from the machine by the runtime, or described by name so that a machine without the device can plan and
// compile for it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flce {

enum class DeviceKind : std::uint8_t { cpu, cuda };

/// Rates that `flce tune` measures on a GPU on which nobody has measured flce, for the cost model.
struct MeasuredRates {
    double mma_flops = 0;         ///< operations a second of mma.sync on bf16, operands read from shared memory by ldmatrix
    double library_flops = 0;     ///< operations a second of a large product in bf16 by cuBLASLt; 0: there is none
    double copy_bytes_per_s = 0;  ///< bytes read and bytes written, of a copy in device memory
    double l2_bytes_per_s = 0;    ///< bytes read from the L2 cache
    double launch_seconds = 0;    ///< from the end of one small kernel to the end of the next one in line
    friend bool operator==(const MeasuredRates&, const MeasuredRates&) = default;
};

/// Properties of a GPU that the planner and the generator know. All but arch are defaults of the architecture when the GPU is described by
/// name.
struct GpuProperties {
    std::string arch{};          ///< exact target: "sm_80", "sm_90a", "sm_100a", "sm_120", …
    int compute_capability = 0;  ///< major · 10 + minor
    int sm_count = 0;
    std::int64_t smem_per_block_bytes = 0;  ///< opt-in limit of one block
    std::int64_t smem_per_sm_bytes = 0;
    std::int64_t l2_bytes = 0;
    std::int64_t memory_bytes = 0;
    double bandwidth_bytes_per_s = 0;  ///< device memory, for the cost model
    double bf16_flops = 0;             ///< dense tensor-core rate, for the cost model
    MeasuredRates measured{};          ///< rates of this very GPU, which take the place of assumed ones; 0: not measured
    friend bool operator==(const GpuProperties&, const GpuProperties&) = default;
};

/// Properties of a CPU that the planner and the host code generator know.
struct CpuProperties {
    std::string triple{};    ///< LLVM target triple
    std::string cpu{};       ///< LLVM's name: "x86-64-v4", "znver4", "neoverse-v2", …
    std::string features{};  ///< LLVM's feature string, "+avx512f,-amx-tile,…"; empty means the features that the name implies
    int vector_bits = 128;
    bool fma = false;       ///< fused multiply-add, and conversion of fp16 in hardware
    bool bf16_dot = false;  ///< VDPBF16PS
    int cores = 1;          ///< threads that may be used
    std::int64_t l1d_bytes = 32 << 10;
    std::int64_t l2_bytes = 1 << 20;
    std::int64_t l3_bytes = 16 << 20;
    friend bool operator==(const CpuProperties&, const CpuProperties&) = default;
};

struct Device {
    DeviceKind kind = DeviceKind::cpu;
    std::string name{};   ///< marketing or described name, for people: never part of a cache key
    GpuProperties gpu{};  ///< meaningful for kind == cuda
    CpuProperties cpu{};  ///< meaningful for kind == cpu
    friend bool operator==(const Device&, const Device&) = default;

    /// A JSON object as text: "kind", "name" and the fields of its kind; parse_device_json reads the text back.
    [[nodiscard]] std::string json() const;
};

/// Throws EnvironmentError naming a missing, unknown or ill-typed key.
[[nodiscard]] Device parse_device_json(std::string_view json);

/// A Device from its name: an architecture ("sm_80", "sm_90a", "sm_100a", "sm_120"; "sm_90" means sm_90a, "sm_100" sm_100a), a product
/// ("NVIDIA H200", "h100", "a100"), an x86-64 level ("x86-64", "x86-64-v3", "x86-64-v4"), "aarch64", or an LLVM CPU name known to have
/// those features ("znver4", "neoverse-v2"). Case does not matter. Throws EnvironmentError with the name that is nearest, or all of them
/// where none is near. "cpu", "native" and "cuda[:i]" are the runtime's to resolve, not this function's.
[[nodiscard]] Device describe_device(std::string_view name);
[[nodiscard]] std::vector<std::string> known_device_names();

}  // namespace flce
