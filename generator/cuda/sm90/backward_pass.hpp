// State that all launches of a backward pass on Hopper's path share: the retained memory, the places of hidden states and of grad_hidden's
// sum, and the division of the work among clusters.
#pragma once

#include <vector>

#include "flce/device.hpp"
#include "generator/cuda/common/backward_steps.hpp"
#include "generator/cuda/sm90/layout.hpp"

namespace flce::sm90 {

struct BackwardPassSm90 : BackwardPass {
    const BackwardLayoutSm90& layout;  ///< BackwardPass's, with this path's places
    std::int64_t clusters;             ///< clusters that the device runs at a time
    const RetainedLayout& retained;    ///< the layout's
    Expr all_retained;                 ///< whether the whole vocabulary is retained, so that no logits are computed again
    /// Whether the chunks of the unretained part come first, so that only the retained columns' part of grad_weight is left when
    /// grad_hidden is complete. True for shards alone, where other ranks may wait for grad_hidden, and false where exponentials lie in
    /// grad_weight's memory: they have to be used before chunks write over them.
    Expr chunks_first;
    /// Whether the call reads hidden in the last of two stages alone. grad_hidden of retained exponentials has no use for hidden, which may
    /// still be on its way from other ranks.
    Expr defers_hidden;
    /// Whether scatter_rows scales the hidden states that grad_weight of retained exponentials reads. Else retained_rows does.
    Expr scales_behind{0};
    Expr joined;         ///< whether a stretch's chunks are one launch
    Expr hidden_joined;  ///< whether a stretch's chunks are one launch for grad_hidden alone

    BackwardPassSm90(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source, const BackwardLayoutSm90& layout);
};

/// All tokens of the call.
[[nodiscard]] RowBlock all_rows();

/// Persistent clusters, at most as many as there are tiles of m × n results.
[[nodiscard]] Expr cluster_grid(const BackwardPassSm90& pass, const GemmTile& tile, const Expr& m, const Expr& n);
/// Persistent clusters for grad_hidden, whose sum may have several parts.
[[nodiscard]] Expr sum_grid(const BackwardPassSm90& pass, const Expr& rows);
/// Address of the launch's Tickets.
[[nodiscard]] Expr tickets_at();

/// Address of the hidden states that GEMMs read: those of listed rows, or of all with zeros for ignored ones, or scaled ones beside
/// retained exponentials. Hidden states for GEMMs lie in grad_hidden, which is written after their use, or in the place of its sum.
[[nodiscard]] Expr compact_hidden_at(const BackwardPassSm90& pass);
/// Address of the scaled hidden states that grad_weight of the retained columns is made of: where they are first, or where the sum of
/// grad_hidden was, if grad_hidden has been written since.
[[nodiscard]] Expr scaled_hidden_at(const BackwardPassSm90& pass);
/// Whether a call does the retained part's grad_weight, which is left to the end where grad_hidden does not wait for chunks behind it.
[[nodiscard]] Expr does_retained_weight(const BackwardPassSm90& pass);
/// Hidden states of some rows as a tensor map shows them.
[[nodiscard]] MappedMatrix hidden_matrix(const BackwardPassSm90& pass, const RowBlock& rows);

/// Whether scatter_rows is launched, where the call wants grad_hidden.
[[nodiscard]] Expr scatters_rows(const BackwardPassSm90& pass);

/// Address of grad_hidden's fp32 sum: behind hidden states where they lie in its place.
[[nodiscard]] Expr sum_at(const BackwardPassSm90& pass);
/// Rows that there is memory for at sum_at.
[[nodiscard]] Expr sum_room(const BackwardPassSm90& pass);
/// `rows` rows of the sum from `first` on.
[[nodiscard]] MappedMatrix sum_matrix(const BackwardPassSm90& pass, const Expr& first, const Expr& rows);
/// The fields of a SumShare: how the sum over the vocabulary is divided into parts. The division is the same where chunks are joined, so
/// that calls for one gradient alone have the same bits.
struct SumShareFields {
    Expr room;
    Expr cluster_rows;
    Expr column_tiles;
    Expr clusters;
    Expr slices;
};
[[nodiscard]] SumShareFields sum_share(const BackwardPassSm90& pass);
template <class Params>
void set_share(LaunchBuilder<Params>& launch, const BackwardPassSm90& pass) {
    const SumShareFields share = sum_share(pass);
    launch.set(&Params::share, &SumShare::room, share.room)
        .set(&Params::share, &SumShare::cluster_rows, share.cluster_rows)
        .set(&Params::share, &SumShare::column_tiles, share.column_tiles)
        .set(&Params::share, &SumShare::clusters, share.clusters)
        .set(&Params::share, &SumShare::slices, share.slices);
}
/// Whether scatter_rows writes grad_hidden, and not its last chunk: a row block, or a group of hidden_joined, would write over hidden
/// states of the others.
[[nodiscard]] Expr scatters_sum(const BackwardPassSm90& pass);
[[nodiscard]] Expr scatters_groups(const BackwardPassSm90& pass);

// GEMMs of one chunk of the vocabulary and one row block (chunk_gemms.cpp): kernels dlogits, grad_hidden and grad_weight.

[[nodiscard]] ChunkGemms chunk_gemms(const BackwardPassSm90& pass, const Stretch& stretch);

// All chunks of a stretch of the vocabulary in one launch, which orders its tiles by counters (backward_chunks.cpp): kernels
// backward_chunks and hidden_chunks.

[[nodiscard]] std::vector<Statement> backward_chunks_steps(const BackwardPassSm90& pass, const Stretch& stretch);
/// Makes grad_hidden alone, of the vocabulary behind the retained part: a launch for each group of tokens.
[[nodiscard]] Statement hidden_chunks_groups(const BackwardPassSm90& pass);

// The gradients of the columns whose exponentials forward retained, all tokens at once (retained_gemms.cpp): plain GEMMs, with the rows'
// scales in the hidden states and in grad_hidden's epilogue. Kernels retained_rows, grad_hidden and grad_weight.

/// Operands of the GEMMs, then grad_hidden's GEMM, and grad_bias where grad_weight's does not add it up.
[[nodiscard]] std::vector<Statement> retained_hidden_steps(const BackwardPassSm90& pass);
/// grad_weight's, of the scaled hidden states that the steps above have left.
[[nodiscard]] Statement retained_weight_step(const BackwardPassSm90& pass);
/// Between the first stage's grad_hidden and the last one's grad_weight, for a collective that was launched in between: its blocks need
/// SMs, and grad_weight's clusters leave none until they end.
[[nodiscard]] Statement make_room_step(const BackwardPassSm90& pass);
/// grad_weight's, with scaled hidden states made before it: where chunks are first, and grad_hidden has been written over the others; and
/// in the last stage of a backward whose first one has deferred hidden.
[[nodiscard]] std::vector<Statement> retained_weight_with_rows_steps(const BackwardPassSm90& pass);

}  // namespace flce::sm90
