#include "runtime/cpu/gemm.hpp"

#include <algorithm>

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

void multiply_tile(const CpuFunctions& code, const CpuPlan& plan, const PackedA& a, const UnpackedB& b, const TileRange& range,
                   std::int64_t depth, std::byte* b_block, float* tile) {
    const std::int64_t micro_m = plan.micro_m;
    const std::int64_t micro_n = plan.micro_n;
    for (std::int64_t k = 0; k < depth; k += plan.block_k) {
        const std::int64_t block_depth = std::min<std::int64_t>(plan.block_k, depth - k);
        const std::int64_t units = depth_units(plan, block_depth);
        for (std::int64_t n = 0; n < range.columns; n += micro_n) {
            b.pack(b.at(range.column + n, k), b.ld, b_block + 4 * n * units, std::min(micro_n, range.columns - n), block_depth);
        }
        // A's panel stays in the first-level cache while B's panels pass by.
        for (std::int64_t m = 0; m < range.rows; m += micro_m) {
            const std::byte* a_panel = a.at(plan, range.row + m, depth_units(plan, k));
            for (std::int64_t n = 0; n < range.columns; n += micro_n) {
                code.micro_kernel(units, a_panel, b_block + 4 * n * units, tile + m * plan.block_n + n, plan.block_n, k > 0);
            }
        }
    }
}

}  // namespace flce
