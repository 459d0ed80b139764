// Parameter blocks of cuda_sm90a's kernels. Plain C++, as common/params.cuh.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/heads_params.cuh"
#include "flce/common/params.cuh"
#else
#include "templates/common/heads_params.cuh"
#include "templates/common/params.cuh"
#endif

namespace flce {

// The fields that every path has, and tensor maps of the operands instead of their addresses. Maps begin at the launch's first row and
// column and end with its last, so that what lies outside reads as 0 and is not written.

/// How far the work of a launch of forward has been taken, of which each cluster has a share. Behind it lie two words for each share,
/// `owner` and `done`.
struct ShareTickets {
    Tickets tickets;  ///< taken: stretches of shares whose own cluster does not run
    unsigned owned;   ///< shares whose own cluster runs
    unsigned unused;
};

struct ForwardSm90Params : ForwardParams {
    TensorMap hidden_map;
    TensorMap weight_map;
    TensorMap compact_map;    ///< tensor map of listed rows in order
    TensorMap retained_map;   ///< to store exponentials, where the Problem retains them
    ShareTickets* shares;     ///< shares of this launch; null: each cluster has its own share, whenever it runs
    const float* references;  ///< [rows]
    const unsigned* stale;    ///< the second time: stale rows (SplitSumsParams)
    PassScalars* scalars;
    RowList list;          ///< rows; with a list, `hidden`, its map and the targets begin with the call's first row
    int clusters;          ///< most that share the work
    int stride;            ///< stride of VocabularyWalk, for launches with this number of clusters
    int retained_columns;  ///< retained columns of the vocabulary, from its start
    int again;             ///< only rows that are stale, only their exponentials
    int compact_rows;      ///< tokens of the call, whose listed rows gather_rows has brought together if any is ignored; 0: it has not
    int unused;
    void* top_keys;              ///< with a top_k: [ForwardShare::lists][partial rows] lists of TopEntry, and their states
    TopState* top_states;        ///< 0 before the launch
    const TopState* top_bounds;  ///< [rows] states that lists begin with; null: 0
    float* top_dense;            ///< [rows][kDenseTopColumns] all logits of the launch's columns, in the place of lists; null: lists
};

/// Numbers of ForwardStretchParams, for a stretch of the vocabulary.
struct ForwardStretchSm90Params : ForwardSm90Params {
    int first_column;
    int columns;
};

/// Classes that rows name, by the tiles of forward that have them.
struct NamedLists {
    unsigned long long* records;  ///< [rows][tiles] TileRecord
    unsigned* names;              ///< [rows][top_k] TileName of each place that names a class, tile after tile
    int tiles;                    ///< tiles of the vocabulary
    int unused;
};

/// Parameters of a kernel of forward that picks the logits of named classes.
template <class Params>
struct WithNamed : Params {
    TeacherParams teacher;
    NamedLists named;
};

/// Makes NamedLists.
struct NamedTilesParams : TeacherLogitsParams {
    NamedLists named;
    int rows;
    int tile_columns;
};

enum : int { kHeadsWarpsBeside = 3 };  ///< warps of a block that neither bring slices nor multiply

/// How a launch over both heads cuts rows × columns: jobs of a cluster of rows and a strip of tiles.
struct HeadsJobs {
    int strips;
    int pairs;           ///< strips of two tiles, which come before those of one; below 0: strips are nearly alike
    int block_clusters;  ///< clusters of rows that go through all strips side by side
    int unused;
};

/// Both heads of a divergence. `hidden` and `weight` are the student's.
struct HeadsSm90Params : ForwardParams {
    TensorMap hidden_map;
    TensorMap weight_map;
    TensorMap teacher_hidden_map;
    TensorMap teacher_weight_map;
    Tickets* tickets;
    float* parked;  ///< [blocks][consumers] tiles of the student's products, as their threads hold them
    RetainedPairs retained;
    const void* teacher_bias;
    const float* lse;  ///< [rows], of a mixture's second walk, and so is teacher_lse
    const float* teacher_lse;
    float teacher_transform[kMaxTransformParameters];
    HeadsJobs jobs;  ///< each strip has two partial results
    unsigned* done;  ///< [blocks of a tile's rows], warps that have written what they have of a strip; 0 before
    float beta;
    int first_column;    ///< column of the vocabulary from which on the launch computes
    int gradient_rows;   ///< rows, from the first on, of which the launch leaves gradients in the place of their pairs
    int gradient_warps;  ///< warps that make them, kHeadsWarpsBeside of each block
};

/// Both heads of a chunk of a divergence. The base has the student's.
struct HeadsDlogitsSm90Params : DlogitsParams {
    TensorMap hidden_map;
    TensorMap weight_map;
    TensorMap teacher_hidden_map;
    TensorMap teacher_weight_map;
    Tickets* tickets;
    float* parked;             ///< parked of HeadsSm90Params
    float* factors;            ///< Gemm::factors of grad_weight, written here
    const void* teacher_bias;  ///< at the chunk's first column
    const float* teacher_lse;  ///< [rows], and so is student_divergence
    const float* student_divergence;
    float teacher_transform[kMaxTransformParameters];
    HeadsJobs jobs;
    float beta;
    int unused;
};

struct DlogitsSm90Params : DlogitsParams {
    TensorMap hidden_map;
    TensorMap weight_map;
    TensorMap dlogits_map;  ///< to store
    Tickets* tickets;
    RowList list;
};

struct GradHiddenSm90Params : GradHiddenParams {
    TensorMap dlogits_map;
    TensorMap weight_map;
    TensorMap accumulator_map;  ///< fp32, to store and add
    const float* row_scales;    ///< [rows], in the first launch: factors of its products; null: 1
    unsigned* pace;             ///< [kPaceCounters], 0 before; null: no pace
    Tickets* tickets;
    RowList list;  ///< rows; with a list, grad_hidden begins with the call's first row
    SumShare share;
    float* tail_sums;         ///< sums of TailParts, each a cluster's tile as its threads hold it
    unsigned* tail_counters;  ///< for each tile that is made in parts: warps that have written theirs; 0 before
    int tail_room;            ///< sums that there is room for; 0: no tile is made in parts
    int column_shift;         ///< shift of BlockedMap, for dlogits_map where the Problem retains
};

struct GradWeightSm90Params : GradWeightParams {
    TensorMap dlogits_map;
    TensorMap hidden_map;
    TensorMap grad_weight_map;  ///< to store, or to add to
    unsigned* readers;          ///< warps that are done with each block of exponentials in grad_weight's memory; null: exponentials lie
                                ///< elsewhere
    Tickets* tickets;
    RowList list;
    long long block_bytes;      ///< from one block to the next
    unsigned readers_of_block;  ///< warps that multiply a whole block
    int column_shift;           ///< shift of BlockedMap, for dlogits_map where the Problem retains
};

/// Label smoothing's terms, which products of retained exponentials lack (smoothing_sums).
struct SmoothedGradHiddenSm90Params : GradHiddenSm90Params {
    const float* row_smoothing;  ///< [rows]; null: nothing is lacking
    const float* weight_sum;     ///< [D]
};
struct SmoothedGradWeightSm90Params : GradWeightSm90Params {
    const float* hidden_sum;    ///< [D]; null: nothing is lacking
    const float* class_weight;  ///< class weights of the launch's columns, where the Problem has class weights
};

/// Parameters of a kernel that adds up grad_bias beside grad_weight.
template <class Params>
struct WithGradBias : Params {
    void* grad_bias;  ///< at the launch's first column; null: nobody asks for it
};
/// WithGradBias over exponentials, whose factors are the rows' scales.
template <class Params>
struct WithScaledBias : WithGradBias<Params> {
    const float* smoothing_total;  ///< amount that label smoothing takes in all rows, before classes' weights; where the Problem has label
                                   ///< smoothing
    TensorMap scales_map;          ///< bias_factors of RetainedRowsParams
};

/// Several chunks of the vocabulary in one launch. Everything begins with the first chunk: the base's columns are the columns of all
/// chunks. Chunks take turns with two places for dlogits that lie side by side, so that [rows, pair_width] holds one chunk of each kind.
struct BackwardChunksSm90Params : DlogitsParams {
    TensorMap hidden_map;            // operands of the logits
    TensorMap weight_map;            //
    TensorMap dlogits_map;           ///< to store, and grad_weight's first operand; its second one:
    TensorMap hidden_sum_map;        //
    TensorMap dlogits_sum_map;       // operands of grad_hidden
    TensorMap last_dlogits_sum_map;  ///< for the last chunk: columns behind it have nothing to do with this pass
    TensorMap weight_sum_map;        //
    TensorMap accumulator_map;       ///< fp32, to store and add
    TensorMap grad_weight_map;       ///< to store, or to add to
    float* accumulator;              ///< [rows, D] fp32, all parts below each other
    void* grad_hidden;               ///< [rows, D]; begins with the call's first row where there is a list
    unsigned* taken;                 ///< number of tiles taken, 0 before the launch
    unsigned* progress;              ///< [chunks][kChunkKinds]: tiles that are done, of each block
    RowList list;
    SumShare share;
    int even_width;  ///< columns of chunks 0, 2, …
    int pair_width;  ///< columns of a chunk and the next one
    int first;       ///< nothing accumulated yet
    int last;        ///< the last chunk writes grad_hidden, where its sum is in one part
};
/// Joined chunks of a weight that is rounded. The maps of the weight show two places of pair_width rows, one below the other: pairs take
/// turns with them.
struct RoundedChunksSm90Params : BackwardChunksSm90Params {
    enum : int { kRows = 4 };  ///< rows that a warp rounds at a time
    WeightToRound of;
    void* rounded;       ///< both places
    unsigned* rounding;  ///< groups of rows taken, and behind it those that are done of each pair; 0 before the launch
};

}  // namespace flce
