// The passes of the CPU backend over one call.
#pragma once

#include "runtime/cpu/cpu_call.hpp"
#include "runtime/cpu/gemm.hpp"
#include "runtime/cpu/workers.hpp"

namespace flce {

/// State of a kernel for all its calls.
struct CpuContext {
    Plan plan;
    int threads = 1;
    CpuFunctions code;
    std::vector<float> transform_parameters;
    const Workers* workers = nullptr;
};

void run_cpu_forward(const CpuContext& context, const CpuCall& call);
void run_cpu_merge(const CpuCall& call);
void run_cpu_backward(const CpuContext& context, const CpuCall& call);

/// A worker's own part of the workspace.
struct WorkerSlot {
    WorkerSlot(const SlotLayout& layout, std::byte* start)
        : tile(reinterpret_cast<float*>(start + layout.tile)),
          b_block(start + layout.b_block),
          bias(reinterpret_cast<float*>(start + layout.bias)),
          class_weight(reinterpret_cast<float*>(start + layout.class_weight)),
          sums(reinterpret_cast<RowSums*>(start + layout.sums)) {}

    /// Bias and class weights of vocabulary [begin, begin + columns) as fp32, 0 up to block_n.
    void load_strip(const CpuContext& context, const CpuCall& call, std::int64_t begin, std::int64_t columns) const;

    float* tile;
    std::byte* b_block;
    float* bias;
    float* class_weight;
    RowSums* sums;
};

/// B of the logits: the weight from vocabulary row `begin` on.
[[nodiscard]] UnpackedB weight_for_logits(const CpuContext& context, const CpuCall& call, std::int64_t begin);
/// Packs hidden rows [begin, begin + rows) as A of the logits.
void pack_hidden_rows(const CpuContext& context, const CpuCall& call, const PackedA& panels, std::int64_t begin, std::int64_t rows);

}  // namespace flce
