// Layouts of cuda_sm90a's passes: those of every path, and what this path divides and places beside.
#pragma once

#include "generator/cuda/common/workspace.hpp"
#include "generator/cuda/sm90/rules.hpp"

namespace flce::sm90 {

struct ForwardLayoutSm90 : ForwardLayout {
    RetainedLayout retained;
    Expr compact{0};   ///< hidden states of listed tokens, where the caller's workspace goes further than `total`
    Expr compacts{0};  ///< whether the caller's workspace goes further, and tokens are listed
    Expr top_keys{0};  ///< lists of classes and their states, where the spec has a top_k
    Expr top_states{0};
    Expr top_state_bytes{0};
    Expr top_kept{0};  ///< TopClassesParams::kept and bounds
    Expr top_bounds{0};
    Expr named_records{0};  ///< NamedLists, where forward picks the logits of named classes
    Expr named_names{0};
};
/// Tiles of forward's that the vocabulary has, of the most classes that a call may have.
[[nodiscard]] std::int64_t named_tiles(const Spec& spec, const Plan& plan);
[[nodiscard]] ForwardLayoutSm90 forward_layout(const Spec& spec, const Device& device, const Plan& plan);

/// How a launch of forward divides its work. The number of partial sums of a row is known to the device alone (PassScalars::splits).
struct ForwardGrid {
    Expr clusters{0};                ///< clusters in the grid
    std::int64_t most_clusters = 0;  ///< most clusters that share the work
    std::int64_t stride = 0;         ///< stride of VocabularyWalk
};
[[nodiscard]] ForwardGrid forward_grid(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows);
/// Grid of a kernel whose tile has all tokens.
[[nodiscard]] ForwardGrid few_tokens_grid(const Spec& spec, const Device& device, const Plan& plan, const ForwardShape& shape);

struct BackwardLayoutSm90 : BackwardLayout {
    RetainedLayout retained;  ///< retained memory that backward reads
    Expr sum_rows{0};         ///< rows that hidden_accumulator has room for: N, or more where so few tokens need several parts (SumShare)
    /// Whether this number of tokens joins chunks in one launch, where the call wants both gradients; chunk and wide_chunk are then a
    /// pair's. Constant 0 where chunks are never joined.
    Expr joined{0};
    /// Joined chunks where the call wants grad_hidden alone: groups of tokens one after the other, with wider chunks in dlogits' place. 0
    /// groups: chunks are not joined.
    Expr hidden_groups{0};
    Expr hidden_rows{0};   ///< tokens of a group
    Expr hidden_chunk{0};  ///< columns of a chunk
    Expr progress{0};      ///< counters of the tiles of joined chunks
    std::int64_t progress_bytes = 0;
    std::int64_t rounding = 0;  ///< offset of RoundedChunksSm90Params' counters in `progress`
    Expr smoothing{0};          ///< SmoothingTotalsParams' totals and sums, where exponentials are retained with label smoothing
    /// Counters of two Paces, of TailParts' tiles, of the readers of each block of retained exponentials, and last of rows that
    /// scatter_rows scales.
    Expr counters{0};
    std::int64_t counter_count = 0;
};
[[nodiscard]] BackwardLayoutSm90 backward_layout(const Spec& spec, const Device& device, const Plan& plan);

/// Columns of the first chunk of a joined pair: the wider one, where they cannot be alike.
[[nodiscard]] Expr first_of_pair(const Plan& plan, const Expr& pair);

/// CudaPath::least_scratch_bytes.
[[nodiscard]] std::int64_t least_scratch_bytes(const Spec& spec, const Plan& plan);

}  // namespace flce::sm90
