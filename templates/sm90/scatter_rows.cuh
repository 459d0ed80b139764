// The end of grad_hidden on sm_90a: rows of its sum become rows of it. Blocks come onto SMs that grad_hidden's clusters have left, and wait
// there for the others; meanwhile they scale the hidden states that grad_weight's product reads.
#pragma once

#include "flce/common/retain_kernels.cuh"
#include "flce/sm90/ptx.cuh"

namespace flce {

/// A warp scales rows as long as there are any that no warp has taken.
template <class Problem>
__device__ __forceinline__ void scale_rows(const ScatterRowsParams& p) {
    while (true) {
        unsigned row = static_cast<unsigned>(p.rows);
        if (threadIdx.x % 32 == 0 && ptx::ld_relaxed_gpu(p.rows_scaled) < row) row = ptx::atom_relaxed_gpu_add(p.rows_scaled, 1u);
        row = __shfl_sync(0xffffffffu, row, 0);
        if (row >= static_cast<unsigned>(p.rows)) return;
        scale_hidden<Problem>(p.hidden, p.list, static_cast<int>(row), p.row_scales[row], p.scaled_hidden);
    }
}

/// A warp finishes a row of grad_hidden.
template <class Problem>
__device__ __forceinline__ void scatter_row(const ScatterRowsParams& p) {
    using Out = GradHiddenOf<Problem>;
    const int entry = static_cast<int>(blockIdx.x) * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (entry >= p.rows) return;
    const int rows = listed_rows<Problem>(p.list, p.rows, 1);
    const bool listed = p.list.rows == nullptr || entry < *p.list.valid;
    const SumParts parts(p.share, rows);
    const bool summed = p.accumulator != nullptr && (p.share.room == 0 || parts.count > 1);
    if (listed && !summed) return;
    const float factor = dlogits_scale<Problem>(p.scalars, true);
    const float* const sum = p.accumulator + static_cast<long long>(entry) * Problem::hidden_size;
    const long long part = static_cast<long long>(parts.stride) * Problem::hidden_size;
    const long long row = p.list.rows == nullptr ? entry : p.list.rows[entry].row;
    Out* const to = static_cast<Out*>(p.grad_hidden) + row * Problem::hidden_size;
    for (int k = static_cast<int>(threadIdx.x) % 32 * 2; k < Problem::hidden_size; k += 64) {
        float2 pair = make_float2(0.f, 0.f);
        if (listed) pair = *reinterpret_cast<const float2*>(sum + k);
        for (int i = 1; listed && i < parts.count; ++i) {
            const float2 more = *reinterpret_cast<const float2*>(sum + i * part + k);
            pair.x += more.x;
            pair.y += more.y;
        }
        if constexpr (sizeof(Out) == 4) {
            *reinterpret_cast<float2*>(to + k) = make_float2(pair.x * factor, pair.y * factor);
        } else {
            *reinterpret_cast<unsigned*>(to + k) = Numeric<Out>::pack(pair.x * factor, pair.y * factor);
        }
    }
}

/// The kernel waits for the one before it by itself. A cluster that has taken a tile of grad_hidden did so when the kernels before
/// grad_hidden had ended: the scales are there.
template <class Problem>
__device__ __forceinline__ void scatter_rows(const ScatterRowsParams& p) {
    if constexpr (Problem::retain) {
        const bool scales = p.scaled_hidden != nullptr;
        const bool begun = scales && ptx::ld_acquire_gpu(&p.scalars->tickets.taken) != 0u;
        if (__all_sync(0xffffffffu, begun)) scale_rows<Problem>(p);
        ptx::griddepcontrol_wait();
        if (scales) scale_rows<Problem>(p);
    } else {
        ptx::griddepcontrol_wait();
    }
    scatter_row<Problem>(p);
}

/// One block, between a kernel that something on another stream waits for and one whose blocks take every SM until they end: blocks of the
/// other stream come onto their SMs meanwhile.
template <class Problem>
__device__ __forceinline__ void make_room(const MakeRoomParams& p) {
    const long long begin = clock64();
    while (clock64() - begin < p.cycles) {
    }
}

}  // namespace flce
