// Steps of passes that retain exponentials, over rows, which all paths have: forward's references and the rows that are gone through again,
// backward's scales and label smoothing's sums. A path's program puts its own GEMMs between them.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "generator/cuda/common/backward_steps.hpp"
#include "generator/cuda/common/forward_steps.hpp"

namespace flce {

/// An address in retained memory.
[[nodiscard]] inline Expr retained_at(const Expr& offset) { return slot(Slot::retained) + offset; }

// Forward.

/// Retained memory of the launch that kRowsLoop is at.
struct RetainedLaunch {
    const RetainedLayout& layout;
    // Addresses of the launch's rows.
    Expr references;
    Expr target_logits;
    Expr stale;

    RetainedLaunch(const RetainedLayout& layout, const LaunchRows& rows);
    /// An address, or 0 where the caller has no memory to retain in.
    [[nodiscard]] Expr if_retained(const Expr& address) const;
};

/// The GEMM and what follows from it of one launch's rows. `gemm` makes the launches of the GEMM; `again`: only of stale rows, and nothing
/// else. `compact`: address at which hidden states of listed tokens are brought together, or 0.
[[nodiscard]] std::vector<Statement> retaining_steps(const ForwardPass& pass, const RetainedLaunch& retained, const Expr& compact,
                                                     const std::function<std::vector<Statement>(bool again)>& gemm);

// Backward.

/// Retained memory of a backward pass, and offsets in the workspace.
struct RetainedPlaces {
    const RetainedLayout& layout;
    Expr counters;               ///< the path's counters, which are set to 0
    std::int64_t counter_count;  ///< words of 4 bytes
    Expr smoothing;              ///< smoothing_bytes of label smoothing's sums
};

/// The rows' scales, scaled hidden states (an address, or 0), and the target's and the teacher's elements of each row of exponentials.
[[nodiscard]] LaunchBuilder<RetainedRowsParams> retained_rows_launch(const BackwardPass& pass, const RetainedPlaces& places,
                                                                     const RowBlock& rows, const Expr& scaled_hidden);
/// `rows_launch` of all tokens, with their coefficients where there is memory for coefficients of one block at a time.
[[nodiscard]] Statement retained_rows_step(const BackwardPass& pass, const std::function<Statement(const RowBlock& rows)>& rows_launch);

/// Addresses of label smoothing's sums: both totals, then both sums of stretches, then the total of the rows' shares.
struct SmoothingSums {
    Expr weight_sum{0};
    Expr hidden_sum{0};
    Expr weight_sums{0};
    Expr hidden_sums{0};
    Expr smoothing_total{0};

    SmoothingSums(const Spec& spec, const Expr& smoothing);
};
/// Numbers that label smoothing's terms are made of.
struct SmoothingTerms {
    Expr row_smoothing;  ///< address: RetainedRowsParams'
    Expr columns;        ///< classes that lack their terms, the first ones
    SmoothingSums sums;
};
/// Adds up label smoothing's terms of stretches, which grad_hidden and grad_weight of exponentials lack.
[[nodiscard]] LaunchBuilder<SmoothingSumsParams> smoothing_sums_launch(const BackwardPass& pass, const SmoothingTerms& terms);
/// Adds the stretches up. `of_bias`: terms that grad_bias lacks as well.
[[nodiscard]] Statement smoothing_totals_step(const BackwardPass& pass, const SmoothingTerms& terms, bool of_bias);
/// Both steps.
[[nodiscard]] std::vector<Statement> smoothing_steps(const BackwardPass& pass, const SmoothingTerms& terms, bool of_bias);
/// The terms that products of retained exponentials lack.
[[nodiscard]] SmoothingTerms retained_smoothing(const BackwardPass& pass, const RetainedPlaces& places);

/// grad_bias of the retained columns, where no GEMM adds it up.
[[nodiscard]] Statement retained_bias_launch(const BackwardPass& pass, const RetainedLayout& retained);

}  // namespace flce
