// Launches that both passes have: codes of rows, and logits from codes.
#pragma once

#include <vector>

#include "generator/cuda/common/launch_builder.hpp"
#include "generator/cuda/fp8/path.hpp"
#include "templates/fp8/params.cuh"

namespace flce::fp8 {

/// A launch's rows, whose codes and scales are where.
struct CodesAt {
    Expr from;
    Expr rows;
    Expr codes;
    Expr scales;
    Slot given_scale;  ///< the operand's, where the spec has scales
    Expr largest{0};   ///< Fp8CodesParams', and so is `unless`
    Expr unless{0};
    Expr factors{0};  ///< row_factors of Fp8CodesParams, where scales come before codes
};
/// Codes of the weight's rows. Columns of a hidden_major one take two steps.
[[nodiscard]] std::vector<Statement> weight_codes_steps(const Spec& spec, const CudaSource& source, const CodesAt& at);
/// Scales of the weight's rows without their codes.
[[nodiscard]] Statement scales_launch(const Spec& spec, const CudaSource& source, const CodesAt& at);
/// Copies of the scales of a weight of codes, from its row `first` on, and its largest number.
[[nodiscard]] Statement given_scales_launch(const CudaSource& source, const CodesAt& at, const Expr& first);
/// Codes of hidden: zeros for ignored tokens.
[[nodiscard]] Statement hidden_codes_launch(const Spec& spec, const CudaSource& source, const Expr& codes, const Expr& scales);
/// Address of the weight's row `row`, a column of a hidden_major one.
[[nodiscard]] Expr weight_row_at(const Spec& spec, const Expr& row);

/// Rows of a matrix, turned over to `codes`.
struct TurnAt {
    Expr from;
    Expr rows;
    Expr codes;
    Expr positions;
    Expr largest;
};
[[nodiscard]] LaunchBuilder<Fp8TurnParams> turn_launch(const Spec& spec, const CudaSource& source, KernelRole kernel, const TurnAt& at);

/// Columns of a launch of logits, and addresses of what it reads and writes.
struct LogitsAt {
    Expr first{0};
    Expr columns{0};
    Expr hidden_codes{0};
    Expr row_scales{0};
    Expr weight_codes{0};
    Expr column_scales{0};
    Expr powers{0};
    Expr stored{0};  ///< Fp8LogitsParams', and so are `again`, `unless`, `sums` and `row_shares`
    Expr exponentials{0};
    Expr turned{0};
    Expr pitch{0};
    Expr again{0};
    Expr unless{0};
    Expr sums{0};
    Expr row_shares{0};
};
/// Adds to `launch` everything but what ForwardParams has.
[[nodiscard]] Statement logits_launch(const Gemms& gemms, const Spec& spec, LaunchBuilder<ForwardParams> launch, const LogitsAt& at);
[[nodiscard]] Expr logits_grid(const Gemms& gemms, const Spec& spec, const Device& device, const Expr& columns);

/// Targets' logits from codes of single rows.
[[nodiscard]] Statement targets_launch(const Spec& spec, const CudaSource& source, const Expr& target_logits);

/// Blocks of a kernel whose warps have a row each.
[[nodiscard]] Expr warps_grid(const Expr& rows);

}  // namespace flce::fp8
