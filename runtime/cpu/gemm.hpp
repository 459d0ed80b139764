// The packed-panel GEMM of the CPU backend: one tile of C at a time, from packed panels of A and blocks of B that it packs as it goes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "generator/cpu/code.hpp"
#include "generator/cpu/layout.hpp"
#include "runtime/cpu/cpu_call.hpp"
#include "runtime/cpu/fp8.hpp"
#include "runtime/cpu/quantized_weight.hpp"
#include "runtime/host/host_code.hpp"

namespace flce {

/// The symbols that a loaded object has.
inline constexpr std::array kCpuSymbols{
    cpu_symbol::kMicroKernel,    cpu_symbol::kPackHidden,      cpu_symbol::kPackWeightLogits,   cpu_symbol::kPackWeightGrad,
    cpu_symbol::kPackHiddenGrad, cpu_symbol::kPackDlogitsRows, cpu_symbol::kPackDlogitsColumns, cpu_symbol::kForwardTile,
    cpu_symbol::kBackwardTile,   cpu_symbol::kColumnSums,      cpu_symbol::kWriteFloat,         cpu_symbol::kAddFloat,
    cpu_symbol::kStoreHidden,    cpu_symbol::kStoreWeight,     cpu_symbol::kStoreBias,          cpu_symbol::kToFloat};

/// The functions of a loaded object (generator/cpu/code.hpp).
struct CpuFunctions {
    MicroKernel micro_kernel;
    PackPanel pack_hidden, pack_weight_logits, pack_weight_grad, pack_hidden_grad, pack_dlogits_rows, pack_dlogits_columns;
    ForwardTile forward_tile;
    BackwardTile backward_tile;
    ColumnSums column_sums;
    StoreTile write_float, add_float, store_hidden, store_weight, store_bias;
    ToFloat to_float;

    [[nodiscard]] static CpuFunctions find(const HostCode& code);
};

/// Packed panels of A: micro_m rows each, `depth` deep.
struct PackedA {
    std::byte* panels = nullptr;
    std::int64_t panel_units = 0;  ///< units of depth in a panel

    /// Address at which the panel of row `row` (a multiple of micro_m) begins, at `unit`.
    [[nodiscard]] std::byte* at(const CpuPlan& plan, std::int64_t row, std::int64_t unit) const {
        return panels + 4 * (row * panel_units + unit * plan.micro_m);
    }
};

/// B where the caller has it: `lines` columns of C by depth.
struct UnpackedB {
    const std::byte* data = nullptr;
    std::int64_t ld = 0;  ///< elements between lines, or between depths
    std::int64_t element_bytes = 0;
    bool depth_contiguous = false;
    PackPanel pack = nullptr;
    const CpuCall* call = nullptr;  ///< call whose tokens depth counts, from first_token on: ignored ones are packed as 0
    std::int64_t first_token = 0;
    std::optional<QuantizedWeight> quantized{};  ///< B's numbers, in place of data: depth or lines are classes from first_class on
    std::int64_t first_class = 0;
    float* dequantized = nullptr;         ///< room for a panel's numbers
    std::optional<Fp8Numbers> rounded{};  ///< B's numbers in 8 bits, in place of data: depth or lines are rows

    [[nodiscard]] const std::byte* at(std::int64_t line, std::int64_t depth) const {
        return data + element_bytes * (depth_contiguous ? line * ld + depth : depth * ld + line);
    }
};

/// A rectangle of C.
struct TileRange {
    std::int64_t row = 0;  ///< first row, a multiple of micro_m
    std::int64_t rows = 0;
    std::int64_t column = 0;
    std::int64_t columns = 0;  ///< at most block_n
};

/// tile[rows, columns] = A·B over `depth`, `adds`: += A·B, in fp32 with leading dimension block_n; rows and columns are written up to whole
/// register blocks. Depth is summed in blocks of block_k, in order. `b_block` holds one packed block of B.
void multiply_tile(const CpuFunctions& code, const CpuPlan& plan, const PackedA& a, const UnpackedB& b, const TileRange& range,
                   std::int64_t depth, std::byte* b_block, float* tile, bool adds = false);

}  // namespace flce
