#include "runtime/cpu/gemm.hpp"

#include <algorithm>
#include <cstring>

namespace flce {

CpuFunctions CpuFunctions::find(const HostCode& code) {
    CpuFunctions f{};
    const auto set = [&](auto& function, const char* symbol) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(code.symbol(symbol));
    };
    set(f.micro_kernel, cpu_symbol::kMicroKernel);
    set(f.pack_hidden, cpu_symbol::kPackHidden);
    set(f.pack_weight_logits, cpu_symbol::kPackWeightLogits);
    set(f.pack_weight_grad, cpu_symbol::kPackWeightGrad);
    set(f.pack_hidden_grad, cpu_symbol::kPackHiddenGrad);
    set(f.pack_dlogits_rows, cpu_symbol::kPackDlogitsRows);
    set(f.pack_dlogits_columns, cpu_symbol::kPackDlogitsColumns);
    set(f.forward_tile, cpu_symbol::kForwardTile);
    set(f.backward_tile, cpu_symbol::kBackwardTile);
    set(f.column_sums, cpu_symbol::kColumnSums);
    set(f.write_float, cpu_symbol::kWriteFloat);
    set(f.add_float, cpu_symbol::kAddFloat);
    set(f.store_hidden, cpu_symbol::kStoreHidden);
    set(f.store_weight, cpu_symbol::kStoreWeight);
    set(f.store_bias, cpu_symbol::kStoreBias);
    set(f.to_float, cpu_symbol::kToFloat);
    return f;
}

namespace {

/// Zeroes depth `depth` of a packed panel of B of `width` columns. Two depths share a unit where they are pairs.
void zero_depth(const CpuPlan& plan, std::byte* panel, std::int64_t depth, std::int64_t width) {
    if (!plan.bf16_dot) {
        std::memset(panel + 4 * depth * width, 0, static_cast<std::size_t>(4 * width));
        return;
    }
    std::byte* unit = panel + 4 * (depth / 2 * width) + 2 * (depth % 2);
    for (std::int64_t n = 0; n < width; ++n) std::memset(unit + 4 * n, 0, 2);
}

/// Packs `lines` columns of a B whose rows `source` loads, over `depth` units of depth from (line, from) on.
template <class Source>
void pack_loaded(const UnpackedB& b, const Source& source, std::int64_t line, std::int64_t lines, std::int64_t from, std::int64_t depth,
                 std::byte* panel) {
    const std::int64_t ld = b.depth_contiguous ? depth : lines;
    const std::int64_t rows = b.depth_contiguous ? lines : depth;
    const std::int64_t first = b.first_class + (b.depth_contiguous ? line : from);
    for (std::int64_t i = 0; i < rows; ++i) source.load(first + i, b.depth_contiguous ? from : line, ld, b.dequantized + i * ld);
    b.pack(b.dequantized, ld, panel, lines, depth);
}

/// Packs columns `range` of B over depth [k, k + depth), where lines are contiguous a few depths at a time.
void pack_block(const CpuPlan& plan, const UnpackedB& b, const TileRange& range, std::int64_t k, std::int64_t depth, std::byte* b_block) {
    const std::int64_t units = depth_units(plan, depth);
    const std::int64_t slab = b.depth_contiguous ? depth : kDepthsAtATime;
    for (std::int64_t from = 0; from < depth; from += slab) {
        for (std::int64_t n = 0; n < range.columns; n += plan.micro_n) {
            std::byte* const panel = b_block + 4 * (n * units + depth_units(plan, from) * plan.micro_n);
            const std::int64_t lines = std::min<std::int64_t>(plan.micro_n, range.columns - n);
            const std::int64_t deep = std::min(slab, depth - from);
            if (b.quantized) {
                pack_loaded(b, *b.quantized, range.column + n, lines, k + from, deep, panel);
            } else if (b.rounded) {
                pack_loaded(b, *b.rounded, range.column + n, lines, k + from, deep, panel);
            } else {
                b.pack(b.at(range.column + n, k + from), b.ld, panel, lines, deep);
            }
        }
        if (b.call == nullptr) continue;
        for (std::int64_t at = from; at < std::min(from + slab, depth); ++at) {
            if (b.call->valid_label(b.first_token + k + at) >= 0) continue;
            for (std::int64_t n = 0; n < range.columns; n += plan.micro_n) zero_depth(plan, b_block + 4 * n * units, at, plan.micro_n);
        }
    }
}

/// A's panels against one packed block of B: `units` of depth from unit `first` on. A's panel stays in the nearer caches while B's pass by;
/// the next one comes from far away, so the micro-kernels ask for it meanwhile.
void multiply_block(const CpuFunctions& code, const CpuPlan& plan, const PackedA& a, const TileRange& range, std::int64_t first,
                    std::int64_t units, bool adds, const std::byte* b_block, float* tile) {
    const std::int64_t panel_bytes = std::int64_t{4} * plan.micro_m * units;
    for (std::int64_t m = 0; m < range.rows; m += plan.micro_m) {
        const std::byte* panel = a.at(plan, range.row + m, first);
        const bool last = m + plan.micro_m >= range.rows;
        const std::byte* next = last ? a.at(plan, range.row, first + units) : a.at(plan, range.row + m + plan.micro_m, first);
        std::int64_t fetched = 0;
        for (std::int64_t n = 0; n < range.columns; n += plan.micro_n) {
            const std::byte* wanted = fetched < panel_bytes ? next + fetched : panel;
            fetched += kPrefetchBytes * units;
            code.micro_kernel(units, panel, b_block + 4 * n * units, tile + m * plan.block_n + n, plan.block_n, adds, wanted);
        }
    }
}

}  // namespace

void multiply_tile(const CpuFunctions& code, const CpuPlan& plan, const PackedA& a, const UnpackedB& b, const TileRange& range,
                   std::int64_t depth, std::byte* b_block, float* tile, bool adds) {
    for (std::int64_t k = 0; k < depth; k += plan.block_k) {
        const std::int64_t block_depth = std::min<std::int64_t>(plan.block_k, depth - k);
        const std::int64_t units = depth_units(plan, block_depth);
        pack_block(plan, b, range, k, block_depth, b_block);
        multiply_block(code, plan, a, range, depth_units(plan, k), units, adds || k > 0, b_block, tile);
    }
}

}  // namespace flce
