// Figures of GPUs and CPUs that were published, a line each. describe_device reads these tables, so that nobody has to have the devices.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace flce {

/// An architecture's limits; `target` is the exact one that kernels are compiled for. The accelerated targets ("a") are taken where the
/// architecture has instructions that only they offer.
struct GpuArch {
    std::string_view name;  ///< name that is asked for
    std::string_view target;
    int compute_capability;
    int smem_per_block_kib;  ///< opt-in
    int smem_per_sm_kib;
    std::string_view product;  ///< product whose remaining figures stand for the architecture
};

inline constexpr std::array kGpuArchs = {
    GpuArch{"sm_80", "sm_80", 80, 163, 164, "NVIDIA A100"},
    GpuArch{"sm_86", "sm_86", 86, 99, 100, "NVIDIA RTX A6000"},
    GpuArch{"sm_87", "sm_87", 87, 163, 164, "NVIDIA Jetson AGX Orin"},
    GpuArch{"sm_88", "sm_88", 88, 99, 100, "NVIDIA Jetson AGX Orin"},  // no figures are published: the least that an sm_8x has
    GpuArch{"sm_89", "sm_89", 89, 99, 100, "NVIDIA L40S"},
    GpuArch{"sm_90", "sm_90a", 90, 227, 228, "NVIDIA H100"},
    GpuArch{"sm_90a", "sm_90a", 90, 227, 228, "NVIDIA H100"},
    GpuArch{"sm_100", "sm_100a", 100, 227, 228, "NVIDIA B200"},
    GpuArch{"sm_100a", "sm_100a", 100, 227, 228, "NVIDIA B200"},
    GpuArch{"sm_101", "sm_101a", 101, 227, 228, "NVIDIA Jetson AGX Thor"},  // CUDA 12's name for sm_110
    GpuArch{"sm_101a", "sm_101a", 101, 227, 228, "NVIDIA Jetson AGX Thor"},
    GpuArch{"sm_103", "sm_103a", 103, 227, 228, "NVIDIA B300"},
    GpuArch{"sm_103a", "sm_103a", 103, 227, 228, "NVIDIA B300"},
    GpuArch{"sm_110", "sm_110a", 110, 227, 228, "NVIDIA Jetson AGX Thor"},
    GpuArch{"sm_110a", "sm_110a", 110, 227, 228, "NVIDIA Jetson AGX Thor"},
    GpuArch{"sm_120", "sm_120", 120, 99, 100, "NVIDIA GeForce RTX 5090"},
    GpuArch{"sm_120a", "sm_120a", 120, 99, 100, "NVIDIA GeForce RTX 5090"},
    GpuArch{"sm_121", "sm_121", 121, 99, 100, "NVIDIA GB10"},
    GpuArch{"sm_121a", "sm_121a", 121, 99, 100, "NVIDIA GB10"},
};

struct GpuProduct {
    std::string_view name;  ///< "NVIDIA", "GeForce" and what follows the model (memory size, form factor) may be left out when asking
    std::string_view arch;
    int sm_count;
    int l2_mib;
    int memory_gib;
    double bandwidth_gb_per_s;
    double bf16_tflops;  ///< dense, accumulated in fp32
};

inline constexpr std::array kGpuProducts = {
    GpuProduct{"NVIDIA A100", "sm_80", 108, 40, 80, 2039, 312},
    GpuProduct{"NVIDIA A100-SXM4-40GB", "sm_80", 108, 40, 40, 1555, 312},
    GpuProduct{"NVIDIA A100-PCIE-40GB", "sm_80", 108, 40, 40, 1555, 312},
    GpuProduct{"NVIDIA A30", "sm_80", 56, 24, 24, 933, 165},
    GpuProduct{"NVIDIA A10", "sm_86", 72, 6, 24, 600, 125},
    GpuProduct{"NVIDIA A40", "sm_86", 84, 6, 48, 696, 150},
    GpuProduct{"NVIDIA RTX A6000", "sm_86", 84, 6, 48, 768, 155},
    GpuProduct{"NVIDIA GeForce RTX 3090", "sm_86", 82, 6, 24, 936, 71},
    GpuProduct{"NVIDIA Jetson AGX Orin", "sm_87", 16, 4, 64, 205, 42},
    GpuProduct{"NVIDIA L4", "sm_89", 58, 48, 24, 300, 121},
    GpuProduct{"NVIDIA L40", "sm_89", 142, 96, 48, 864, 181},
    GpuProduct{"NVIDIA L40S", "sm_89", 142, 96, 48, 864, 362},
    GpuProduct{"NVIDIA RTX 6000 Ada", "sm_89", 142, 96, 48, 960, 364},
    GpuProduct{"NVIDIA GeForce RTX 4090", "sm_89", 128, 72, 24, 1008, 165},
    GpuProduct{"NVIDIA H100", "sm_90a", 132, 50, 80, 3350, 989},
    GpuProduct{"NVIDIA H100 PCIe", "sm_90a", 114, 50, 80, 2039, 756},
    GpuProduct{"NVIDIA H100 NVL", "sm_90a", 132, 50, 94, 3900, 835},
    GpuProduct{"NVIDIA H200", "sm_90a", 132, 50, 141, 4800, 989},
    GpuProduct{"NVIDIA GH200", "sm_90a", 132, 50, 96, 4000, 989},
    GpuProduct{"NVIDIA B200", "sm_100a", 148, 126, 180, 8000, 2250},
    GpuProduct{"NVIDIA GB200", "sm_100a", 148, 126, 186, 8000, 2500},
    GpuProduct{"NVIDIA B300", "sm_103a", 148, 126, 270, 8000, 2500},
    GpuProduct{"NVIDIA GB300", "sm_103a", 148, 126, 279, 8000, 2500},
    GpuProduct{"NVIDIA Jetson AGX Thor", "sm_110a", 20, 32, 128, 273, 258},
    GpuProduct{"NVIDIA Thor", "sm_110a", 20, 32, 128, 273, 258},  // the driver's name for it
    GpuProduct{"NVIDIA GeForce RTX 5080", "sm_120", 84, 64, 16, 960, 113},
    GpuProduct{"NVIDIA GeForce RTX 5090", "sm_120", 170, 96, 32, 1792, 210},
    GpuProduct{"NVIDIA RTX PRO 6000", "sm_120", 188, 128, 96, 1792, 500},
    GpuProduct{"NVIDIA GB10", "sm_121", 48, 24, 128, 273, 125},
    GpuProduct{"NVIDIA DGX Spark", "sm_121", 48, 24, 128, 273, 125},  // the machine that has a GB10
};

// Architectures of hosts, as target triples begin with them.
inline constexpr std::string_view kX86_64 = "x86_64";
inline constexpr std::string_view kAarch64 = "aarch64";

/// CpuProperties::triple of hosts of an architecture. Distributions name vendors of their own in it, which mean nothing to generated code.
[[nodiscard]] std::string linux_triple(std::string_view arch);

struct CpuModel {
    std::string_view name;
    int vector_bits;
    bool fma;
    bool bf16_dot;
    std::string_view features;  ///< beyond what the name implies: full-width vectors where LLVM would rather use half of them
    int cores;
    int l1d_kib;
    int l2_kib;
    int l3_mib;
    std::string_view arch = kX86_64;
    std::string_view cpu = name;  ///< LLVM's name
};

inline constexpr std::string_view kFullWidth = "-prefer-256-bit";
inline constexpr std::array kCpuModels = {
    CpuModel{"x86-64", 128, false, false, "", 8, 32, 256, 8},
    CpuModel{"x86-64-v2", 128, false, false, "", 8, 32, 256, 8},
    CpuModel{"x86-64-v3", 256, true, false, "", 8, 32, 256, 16},
    CpuModel{"x86-64-v4", 512, true, false, kFullWidth, 16, 32, 1024, 16},
    CpuModel{"haswell", 256, true, false, "", 8, 32, 256, 16},
    CpuModel{"broadwell", 256, true, false, "", 8, 32, 256, 16},
    CpuModel{"skylake", 256, true, false, "", 8, 32, 256, 8},
    CpuModel{"skylake-avx512", 512, true, false, kFullWidth, 16, 32, 1024, 22},
    CpuModel{"cascadelake", 512, true, false, kFullWidth, 16, 32, 1024, 22},
    CpuModel{"cooperlake", 512, true, true, kFullWidth, 16, 32, 1024, 32},
    CpuModel{"icelake-server", 512, true, false, kFullWidth, 16, 48, 1280, 36},
    CpuModel{"sapphirerapids", 512, true, true, kFullWidth, 16, 48, 2048, 60},
    CpuModel{"emeraldrapids", 512, true, true, kFullWidth, 16, 48, 2048, 160},
    CpuModel{"graniterapids", 512, true, true, kFullWidth, 16, 48, 2048, 240},
    CpuModel{"znver1", 256, true, false, "", 8, 32, 512, 16},
    CpuModel{"znver2", 256, true, false, "", 8, 32, 512, 16},
    CpuModel{"znver3", 256, true, false, "", 8, 32, 512, 32},
    CpuModel{"znver4", 512, true, true, "", 8, 32, 1024, 32},
    CpuModel{"znver5", 512, true, true, "", 8, 48, 1024, 32},
    CpuModel{"aarch64", 128, true, false, "", 8, 64, 512, 8, kAarch64, "generic"},
    CpuModel{"neoverse-n1", 128, true, false, "", 16, 64, 1024, 32, kAarch64},  // Graviton2, Ampere Altra
    CpuModel{"neoverse-v1", 128, true, false, "", 16, 64, 1024, 32, kAarch64},  // Graviton3
    CpuModel{"neoverse-n2", 128, true, false, "", 16, 64, 1024, 64, kAarch64},
    CpuModel{"neoverse-v2", 128, true, false, "", 72, 64, 1024, 114, kAarch64},  // Grace, Graviton4
};

}  // namespace flce
