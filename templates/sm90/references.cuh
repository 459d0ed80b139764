// Finds a number near each row's logits before forward retains exponentials, and copies hidden states of listed rows beside each other.
#pragma once

#include "flce/common/reference_rows.cuh"
#include "flce/sm90/ptx.cuh"

namespace flce {

/// A warp has a row of the launch. The warp begins while `prepare` still makes the list, with the token whose row this is if no earlier
/// token is ignored. Where the list has another token, the warp begins again. Memory that the warp reads early was written before `prepare`
/// began. So nothing is read early without a list, since `prepare` is not launched then, and with a teacher, whose logits come between the
/// two. Where any token is ignored, the warp also copies the row's hidden states to where listed rows lie beside each other.
template <class Problem>
__device__ __forceinline__ void references(const ReferencesParams& p) {
    using Element = typename Problem::Element;
    const int row = (static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x)) / 32;
    ListedRow listed{-1, kIgnored};
    float logit = 0.f;
    if constexpr (Problem::lists_rows && !Problem::teacher) {
        if (p.list.rows != nullptr && row < p.rows) {
            const int token = static_cast<int>(p.list.first) + row;
            listed = {token, load_target<Problem>(p.targets, p.temperature, token)};
            logit = reference_of<Problem>(p, listed);
        }
    }
    ptx::griddepcontrol_wait();
    if (row >= p.rows) return;
    const int rows = listed_rows<Problem>(p.list, p.rows, 1);
    const ListedRow assumed = listed;
    if (row < rows) listed = listed_row<Problem>(p.list, p.targets, row);
    if constexpr (Problem::lists_rows) {
        if (p.compact != nullptr && *p.list.valid != p.tokens) {
            const bool exists = p.list.first + row < *p.list.valid;
            const Element* const hidden = static_cast<const Element*>(p.hidden) + static_cast<long long>(listed.row) * Problem::hidden_size;
            Element* const compact = static_cast<Element*>(p.compact) + (p.list.first + row) * static_cast<long long>(Problem::hidden_size);
            bring_row<Problem>(exists ? hidden : nullptr, compact);
        }
    }
    if (row >= rows) return;
    if (listed.row != assumed.row) logit = reference_of<Problem>(p, listed);
    if (threadIdx.x % 32 == 0) p.references[row] = logit;
}

}  // namespace flce
