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
/// Forward where the spec has a teacher's head.
void run_cpu_divergence(const CpuContext& context, const CpuCall& call);
void run_cpu_merge(const CpuCall& call);
void run_cpu_divergence_merge(const CpuCall& call);
void run_cpu_backward(const CpuContext& context, const CpuCall& call);

/// A worker's own part of the workspace.
struct WorkerSlot {
    WorkerSlot(const SlotLayout& layout, std::byte* start)
        : tile(reinterpret_cast<float*>(start + layout.tile)),
          b_block(start + layout.b_block),
          bias(reinterpret_cast<float*>(start + layout.bias)),
          class_weight(reinterpret_cast<float*>(start + layout.class_weight)),
          class_offset(reinterpret_cast<float*>(start + layout.class_offset)),
          class_groups(reinterpret_cast<std::int32_t*>(start + layout.class_groups)),
          group_rows(reinterpret_cast<GroupRow*>(start + layout.group_rows)),
          sums(reinterpret_cast<RowSums*>(start + layout.sums)),
          teacher_tile(reinterpret_cast<float*>(start + layout.teacher_tile)),
          teacher_bias(reinterpret_cast<float*>(start + layout.teacher_bias)),
          dequantized(reinterpret_cast<float*>(start + layout.dequantized)),
          class_factors(reinterpret_cast<float*>(start + layout.class_factors)),
          class_scales(reinterpret_cast<float*>(start + layout.class_scales)) {}

    /// Bias, class weights and offsets of vocabulary [begin, begin + columns) as fp32, 0 up to block_n, groups, and scales of the codes.
    void load_strip(const CpuContext& context, const CpuCall& call, std::int64_t begin, std::int64_t columns) const;

    float* tile;
    std::byte* b_block;
    float* bias;
    float* class_weight;
    float* class_offset;
    std::int32_t* class_groups;
    GroupRow* group_rows;
    RowSums* sums;
    float* teacher_tile;
    float* teacher_bias;
    float* dequantized;
    float* class_factors;
    float* class_scales;
};

/// B of the logits: the weight from vocabulary row `begin` on.
[[nodiscard]] UnpackedB weight_for_logits(const CpuContext& context, const CpuCall& call, const WorkerSlot& slot, std::int64_t begin);
/// B of the logits of the teacher's head.
[[nodiscard]] UnpackedB teacher_weight_for_logits(const CpuContext& context, const CpuCall& call, std::int64_t begin);
/// Makes a tile of hidden · weightᵀ for vocabulary from `begin` on, whose strip is loaded. `hidden_scales`: with fp8, of the panels' rows.
void multiply_logits(const CpuContext& context, const CpuCall& call, const WorkerSlot& slot, const PackedA& hidden,
                     const float* hidden_scales, std::int64_t begin, TileRange range);

/// Memory for packing rows of hidden states in 8 bits: a worker's slots, and the rows' factors and scales.
struct Fp8Rows {
    const SlotLayout& layout;
    std::byte* first_slot;
    std::int64_t slots;
    float* factors;
    float* scales;
};
/// Packs the codes of hidden rows [begin, begin + rows) as A of the logits. An ignored token's are 0, whatever its row holds.
void pack_hidden_codes(const CpuContext& context, const CpuCall& call, const Fp8Rows& memory, const PackedA& panels, std::int64_t begin,
                       std::int64_t rows);
/// Packs hidden rows [begin, begin + rows) as A of the logits. `hidden`: the tensor, of the student's or the teacher's depth.
void pack_hidden_rows(const CpuContext& context, const CpuCall& call, Slot hidden, const PackedA& panels, std::int64_t begin,
                      std::int64_t rows);

}  // namespace flce
