#include "generator/cpu/rules.hpp"

#include <fmt/format.h>

#include <array>

#include "generator/cpu/layout.hpp"

namespace flce {

int vector_registers(const CpuProperties& cpu, int vector_bits) noexcept {
    return vector_bits == 512 || cpu.triple.starts_with("aarch64") ? 32 : 16;
}

std::optional<std::string> cpu_plan_problem(const Spec& spec, const Device& device, const Plan& plan) {
    const CpuPlan& p = plan.cpu;
    if (p.vector_bits != 128 && p.vector_bits != 256 && p.vector_bits != 512)
        return fmt::format("vector={}: must be 128, 256 or 512", p.vector_bits);
    if (p.vector_bits > device.cpu.vector_bits) {
        return fmt::format("vector={}: {} has vectors of at most {} bits", p.vector_bits, device.cpu.cpu, device.cpu.vector_bits);
    }
    if (p.bf16_dot && spec.dtype != DType::bf16) return fmt::format("bf16_dot=1: needs dtype bf16, not {}", to_string(spec.dtype));
    if (p.bf16_dot && !device.cpu.bf16_dot) return fmt::format("bf16_dot=1: {} has no VDPBF16PS", device.cpu.cpu);
    if (p.bf16_dot && p.vector_bits != 512) return fmt::format("bf16_dot=1: needs vector=512, not {}", p.vector_bits);
    for (const int part : {p.micro_m, p.micro_n, p.block_m, p.block_n, p.block_k}) {
        if (part < 1 || part > (1 << 20)) return fmt::format("every number of micro and block must be from 1 to 2^20, not {}", part);
    }
    const int lanes = p.vector_bits / 32;
    if (p.micro_n % lanes != 0) return fmt::format("micro={}x{}: columns must be a multiple of {} lanes", p.micro_m, p.micro_n, lanes);
    // Sums stay in registers, a row of B is loaded, and one element of A is broadcast.
    const std::int64_t vectors = p.micro_n / lanes;
    const std::int64_t registers = p.micro_m * vectors + vectors + 1;
    if (const int most = vector_registers(device.cpu, p.vector_bits); registers > most) {
        return fmt::format("micro={}x{}: needs {} vector registers, vectors of {} bits have {}", p.micro_m, p.micro_n, registers,
                           p.vector_bits, most);
    }
    if (p.block_m % p.micro_m != 0) return fmt::format("block_m={}: must be a multiple of micro_m = {}", p.block_m, p.micro_m);
    // A strip of logits is columns when it is computed and rows of grad_weight afterwards.
    if (p.block_n % p.micro_n != 0 || p.block_n % p.micro_m != 0) {
        return fmt::format("block_n={}: must be a multiple of micro_n = {} and of micro_m = {}", p.block_n, p.micro_n, p.micro_m);
    }
    if (p.block_k % 8 != 0) return fmt::format("block_k={}: must be a multiple of 8", p.block_k);
    if (p.micro_m % 2 != 0) return fmt::format("micro={}x{}: rows must be even, as they pair up in depth", p.micro_m, p.micro_n);
    if (plan.vocab_chunk % p.block_n != 0) return fmt::format("chunk={}: must be a multiple of block_n = {}", plan.vocab_chunk, p.block_n);
    return std::nullopt;
}

}  // namespace flce
