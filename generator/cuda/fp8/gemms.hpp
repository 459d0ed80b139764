// The GEMMs of the paths with products of 8-bit numbers: tiles, blocks, grids, and how kernels find their operands.
#pragma once

#include <type_traits>

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/launch_builder.hpp"
#include "generator/cuda/common/source.hpp"
#include "templates/fp8/params.cuh"

namespace flce::fp8 {

struct Gemms {
    std::string_view path;    ///< name of the path
    std::string_view header;  ///< file of templates/ that has the kernels
    bool maps;                ///< operands are tensor maps; else matrices that threads copy by themselves
    int cluster_blocks;       ///< blocks of a cluster, which stand along M
    int groups;               ///< parts of a tile's columns that have partial sums of their own
    GemmTile logits;
    GemmTile crowded_logits;  ///< where transforms crowd an epilogue's registers
    GemmTile gradient;
};
/// `path`: cuda_fp8 or cuda_fp8_sm89.
[[nodiscard]] const Gemms& gemms_of(PlanPath path);

[[nodiscard]] const GemmTile& logits_tile(const Gemms& gemms, const Spec& spec);
[[nodiscard]] const GemmTile& tile_of(const Gemms& gemms, const Spec& spec, GemmRole role);
/// Columns of a partial sum of exponentials.
[[nodiscard]] int sum_columns(const Gemms& gemms, const Spec& spec);
[[nodiscard]] bool is_logits(GemmRole role);
/// Whether grad_weight's parameters are those of WithResult.
[[nodiscard]] bool adds_by_threads(const Gemms& gemms, const Spec& spec);
[[nodiscard]] KernelBlock block(const Gemms& gemms, const Spec& spec, GemmRole role);

/// Blocks of a grid that has a tile's worth of work for `m` × `n` results: at most as many as the device runs at once.
[[nodiscard]] Expr grid_of(const Gemms& gemms, const Device& device, const GemmTile& tile, const Expr& m, const Expr& n);

[[nodiscard]] CudaSource source(const Spec& spec, const Device& device, const Plan& plan);

/// Tells a kernel where a matrix is: by a map that copies `box_rows` rows at a time, or by its address and sizes.
template <class Params, class Matrix>
void set_matrix(LaunchBuilder<Params>& launch, Matrix Params::* member, const MappedMatrix& matrix, const Expr& box_rows,
                std::int64_t element_bytes) {
    if constexpr (std::is_same_v<Matrix, TensorMap>) {
        launch.set_map(member, matrix, box_rows, element_bytes);
    } else {
        launch.set(member, &PlainMatrix::at, matrix.address)
            .set(member, &PlainMatrix::pitch, matrix.row_elements)
            .set(member, &PlainMatrix::rows, matrix.rows)
            .set(member, &PlainMatrix::columns, matrix.columns);
    }
}

}  // namespace flce::fp8
