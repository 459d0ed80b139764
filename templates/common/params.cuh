// Parameter blocks of the kernels: one POD struct each, passed by value. Plain C++, so the generator takes field offsets from here.
// Shapes: rows = tokens of this launch, D = hidden_size, V = vocab_size, P = padded_vocab_size; pointers of optional tensors are null.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/row_math.cuh"
#else
#include "templates/common/row_math.cuh"
#endif

namespace flce {

enum : int {
    kMaxTransformParameters = 6,
    kFallRate = 4,       // number of Falls' rate among the transforms' parameters
    kFallSteepness = 5,  // number of Falls' steepness
    kRetainedShift = 9,  // retained exponentials lie in blocks of this many columns of the vocabulary
    kRetainedColumns = 1 << kRetainedShift,
    kPaceCounters = 64,          // counters of a Pace
    kMostTailTiles = 128,        // most tiles of TailParts: fewer than clusters
    kChunkKinds = 3,             ///< kinds of tiles of a chunk: dlogits, grad_hidden, grad_weight
    kRowThreads = 256,           ///< block of the kernels over rows
    kOutputRows = 64,            ///< rows of a block of row_outputs: several threads merge what forward has found for one
    kOutputThreads = 512,        ///< threads of a block of row_outputs
    kRowOutputs = 6,             ///< loss, z_loss, lse, logprobs, entropy, log_sum_sq_probs
    kListedClasses = 256,        ///< classes of a row that NamedClasses lists
    kTeacherColumns = 256,       ///< columns of a block of teacher_bias
    kTaughtRows = 32,            ///< rows of a block of row_coefficients, where rows have a teacher and several blocks
    kReduceThreads = 1024,       ///< block of the kernels that reduce everything in one block
    kSmoothingParts = 264,       ///< stretches that smoothing_sums adds up for themselves
    kTopThreads = 128,           ///< block of top_classes, whose warps have a row each
    kDenseTopColumns = 1536,     ///< first columns of the vocabulary, whose logits are all looked at for a top_k's bounds
    kBiasColumns = 128,          ///< columns of a block of retained_bias
    kNoGroup = -0x7fffffff - 1,  ///< group of a row to which no class belongs
    /// Products from which on a logit's own rounding is several times the error that rounded powers of two add (docs/numerics.md).
    kLongSum = 512,
};

/// A CUtensorMap: how the copy engine sees a matrix in global memory.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

/// How far the work of a launch has been taken: by whichever cluster runs, piece by piece. 0 before a launch, and again after it.
struct Tickets {
    unsigned taken;
    unsigned left;  ///< clusters that have found nothing to take any more
};

/// Numbers of a pass that only the device knows, in the workspace.
struct PassScalars {
    float class_weight_total;  ///< Σ c_j
    float class_weight_max;
    float cross_entropy_scale;    ///< factor from a token's upstream gradient of the loss to its cross entropy's
    float z_loss_scale;           ///< factor from a token's upstream gradient of the loss to its z-loss's
    unsigned dlogits_bound_bits;  ///< bits of the largest bound on |dz| of any row; non-negative floats compare as integers
    unsigned target_bits;         ///< bits of the largest bound on |t·logit_scale| of any row, a term that only the target's dz has
    int valid_rows;               ///< valid rows of a RowList
    int splits;                   ///< cuda_sm90a: `splits` of ForwardParams in the last launch of forward
    int top_splits;               ///< cuda_sm90a: lists of a row's classes, where the Problem has a top_k
    int unused;
    Tickets tickets;  ///< cuda_sm90a: tickets of the launch at hand
};

/// A token and its label, as load_target has it.
struct ListedRow {
    int row;
    int target;
};

/// List of rows where ignored tokens are left out: row i of a launch is entry first + i of a list of the call's tokens, and a launch has as
/// many rows as there are, up to the room that it has.
struct RowList {
    const ListedRow* rows;  ///< [num_tokens], valid ones in order, then the others; null: nothing is left out
    const int* valid;       ///< number of valid rows
    int first;
    int unused;
};

/// One block's part of the loss, and of a mean's divisor.
struct LossPartial {
    float cross_entropy;
    float z_loss;
    float class_weight;  ///< sum of class weights of the block's tokens; in a weighted mean each times its token's weight
    float tokens;        ///< number of the block's tokens; in a weighted mean the sum of their weights
};

/// Labels and the rule by which they are valid.
struct TargetParams {
    const void* target;  ///< [rows], int32 or int64
    long long ignore_index;
    long long first_class;  ///< label of the shard's first class, where the Problem is a shard
    int columns;            ///< number of the shard's classes, where the Problem is a shard
    int bits;
};

/// The caller's divisor of a mean.
struct CountParams {
    const void* num_valid;  ///< scalar or null
    int code;               ///< CountCode
    int reduction;          ///< ReductionCode
};

/// Classes that a teacher names for each row. Row 0 is the caller's row at which the labels begin.
struct TeacherParams {
    const void* ids;        ///< [rows, top_k], int32 or int64
    const float* probs;     ///< [rows, top_k]
    float* logprobs;        ///< [rows, top_k]: forward writes them, first as logits; backward reads them. In a shard's forward only the
                            ///< logits: [top_k, shard_rows], from the first row on at which the labels begin
    long long first_class;  ///< first_class of TargetParams, and so are `columns` and `bits`
    long long shard_rows;
    int columns;
    int bits;
    int top_k;
    int unused;
};

struct ForwardParams {
    const void* hidden;  ///< [rows, D]
    const void* weight;
    const void* bias;
    const float* class_weight;
    const float* class_offset;
    TargetParams targets;
    float* partials;       ///< [splits][fields][partial_rows]
    float* target_logits;  ///< [rows]
    long long partial_rows;
    int rows;
    int splits;
    float transform[kMaxTransformParameters];
};

/// State of a list of the classes of a row's largest logits.
struct TopState {
    float least;  ///< further logits up to it are not among the largest; NaN: it is not known of any
    int count;    ///< number of entries
};

/// Class-weight totals, for a mean's backward the divisors, and the list of rows.
struct PrepareParams {
    const float* class_weight;
    const float* target_class_weight;  ///< [num_tokens], in a shard's backward: class weights of its tokens' targets
    const float* class_weight_total;   ///< a shard's backward: total of all shards; null: total of the classes at hand
    PassScalars* scalars;
    TargetParams targets;
    CountParams count;
    ListedRow* list;  ///< [num_tokens], or null. With it forward's outputs of ignored rows, where they are wanted: 0
    float* outputs[kRowOutputs];
    long long* top1;  ///< top-1 classes of ignored rows, which become −1
    unsigned long long* invalid_label;
    const float* token_weight;  ///< [num_tokens]; null: 1
    const float* temperature;   ///< [num_tokens], where the Problem has temperatures
    unsigned* counters;         ///< set to 0
    long long num_tokens;
    int counter_count;
    int want_class_weights;
    int want_count;
    int unused;
};

/// Copies the listed rows of hidden to the front of `compact` and zeroes the rest. Without a list valid rows stay where they are, and the
/// others become 0.
struct GatherRowsParams {
    const void* hidden;  ///< [rows, D]
    void* compact;       ///< [rows, D]
    RowList list;
    int rows;
    int unless_all;  ///< not 0: nothing is done where no row is ignored
    TargetParams targets;
    const float* temperature;  ///< [rows], where the Problem has temperatures
};

/// Sizes that decide SumParts, beside the number of rows.
struct SumShare {
    int room;          ///< rows that there is memory for, in all parts together; 0: the sum stays in one part
    int cluster_rows;  ///< rows of a cluster of tiles
    int column_tiles;
    int clusters;  ///< clusters that run at once
    int slices;    ///< slices of the vocabulary in the first launch
    int unused;
};

/// Finishes grad_hidden: rows that are not listed become 0, the others the contents of `accumulator` in the list's order, if there is one:
/// row blocks' sum, or the sum of several parts.
struct ScatterRowsParams {
    const float* accumulator;  ///< [rows, D] fp32, or null
    void* grad_hidden;         ///< [rows, D]
    const PassScalars* scalars;
    RowList list;
    SumShare share;
    const void* hidden;       ///< [rows, D]; `hidden` to `rows_scaled` belong to retained exponentials
    const float* row_scales;  ///< row_scales of RetainedRowsParams
    void* scaled_hidden;      ///< [rows, D]; null: not made here
    unsigned* rows_scaled;    ///< rows that a warp has taken to scale; 0 before
    int rows;
    int unused;
};

/// Parameters of a block that lasts `cycles` and does nothing.
struct MakeRoomParams {
    long long cycles;
};

struct RowCoefficientsParams {
    const float* class_weight;  ///< class weights of the classes; a shard's: [rows], of the rows' targets
    PassScalars* scalars;
    TargetParams targets;
    CountParams count;
    const float* lse;
    const float* entropy;       ///< student_divergence where the Problem has a divergence
    const float* token_weight;  ///< [rows]; null: 1
    const float* logprobs;      ///< [rows], with dft; else null
    const float* temperature;   ///< [rows], where the Problem has temperatures
    float* row_temperatures;    ///< [rows], where the Problem has temperatures: 1 where the row is ignored
    const float* grad_loss;     ///< [rows] for reduction none, else scalar; null: absent_grad_loss
    const float* grad_lse;
    const float* grad_logprobs;
    const float* grad_entropy;
    TeacherParams teacher;       ///< classes of the Problem's teacher, if it has one; row_teacher_weights too
    float* row_teacher_weights;  ///< [rows]: factor with which a teacher's probability is taken off dz; 0 where the row is ignored
    void* coefficients;          ///< [rows] of float4 (a, b, t, s)
    void* row_targets;           ///< [rows] of {float lse, int target}; lse = +inf where the row is ignored
    RowList list;                ///< rows; with a list, arrays of rows that are read begin with the call's first row
    int rows;
    int prepares;    ///< not 0: this launch is one block, has every row, and does the work of `prepare`, which is not launched
    int want_count;  ///< want_count of PrepareParams
    float label_smoothing;
    float smoothing_per_class;
    float z_loss_weight;
    float absent_grad_loss;  ///< 1; 0 where the spec has no loss among its outputs
    float derivative_bound;  ///< largest |d logit / d (hidden · weightᵀ)| at a temperature of 1
    float hard_weight;       ///< share of the target's cross entropy, where the Problem has a teacher
    int block_rows;          ///< rows of a block, where the Problem has a teacher: a multiple of 4, at most kRowThreads
};

/// Logits of the classes that a teacher names.
struct TeacherLogitsParams {
    const void* hidden;  ///< [rows, D]
    const void* weight;  ///< the caller's
    const void* bias;
    const float* class_offset;
    TargetParams targets;
    TeacherParams teacher;
    unsigned long long* invalid_label;
    const float* temperature;  ///< [rows], where the Problem has temperatures
    RowList list;
    long long first_row;  ///< index of row 0 in the whole call, for invalid_label
    float transform[kMaxTransformParameters];
};

/// Adds the rows' named classes to dlogits of a chunk, after dlogits, and to the bias's gradient.
struct TeacherRowsParams {
    const PassScalars* scalars;
    const void* coefficients;
    const void* row_targets;
    const float* row_weights;       ///< [rows]
    const float* row_temperatures;  ///< [rows], where the Problem has temperatures
    void* dlogits;                  ///< [rows, ld]
    float* bias_partials;           ///< bias_partials of DlogitsParams
    TeacherParams teacher;
    RowList list;
    long long ld;
    long long first_column;  ///< first column of the chunk in the vocabulary
    LogitSlope slope;        ///< at a temperature of 1
    const float* class_offset;
    int rows;
    int columns;  ///< columns of the chunk
};

/// Finds a number near each row's logits, before forward retains exponentials.
struct ReferencesParams {
    const void* hidden;  ///< [rows, D]
    const void* weight;
    const void* bias;
    TargetParams targets;
    TeacherParams teacher;  ///< classes of the Problem's teacher, if it has one: their logits are known
    float* references;      ///< [rows]
    RowList list;
    void* compact;             ///< [tokens, D], of listed rows; null: nobody reads it
    const float* temperature;  ///< [rows], where the Problem has temperatures
    float transform[kMaxTransformParameters];
    int rows;
    int tokens;  ///< tokens of the call
};

/// Prepares the GEMMs over retained exponentials E: p_j = exp(reference − lse)·E_j. All rows are those of the launch.
struct RetainedRowsParams {
    const void* hidden;  ///< [rows, D]
    const void* coefficients;
    const void* row_targets;
    const PassScalars* scalars;
    const float* references;
    const float* target_logits;
    void* exponentials;                ///< blocks of [rows, kRetainedColumns]; the target's and the teacher's columns receive their dz's
    void* scaled_hidden;               ///< [rows, D]; null: not made here
    float* row_scales;                 ///< [rows]: dz = row scale · E, less
    float* row_smoothing;              ///< [rows]: times the classes' weights, with label smoothing
    const float* row_temperatures;     ///< row_temperatures of RowCoefficientsParams
    const float* row_teacher_weights;  ///< row_teacher_weights of RowCoefficientsParams
    unsigned* counters;                ///< counters of BackwardLayoutSm90, set to 0
    TeacherParams teacher;             ///< classes of the Problem's teacher, if it has one
    RowList list;
    LogitSlope slope;  ///< slope of the teacher's classes, but for `derivative`
    long long block_bytes;
    int counter_count;
    int rows;
    int columns;       ///< retained columns
    float derivative;  ///< d logit / d (hidden · weightᵀ) at a temperature of 1, but for a softcap's
    float transform[kMaxTransformParameters];
    void* bias_factors;  ///< row_scales in two parts, two rows of `factor_pitch`: factors of exponentials in grad_bias
    long long factor_pitch;
};

/// Σ_j c_j·weight[j] over the retained columns and Σ_i s_i·hidden[i], of kSmoothingParts stretches each.
struct SmoothingSumsParams {
    const void* weight;
    const void* hidden;         ///< [rows, D]
    const float* class_weight;  ///< where the Problem has class weights
    const float* row_smoothing;
    float* weight_sums;  ///< [kSmoothingParts, D]; only the first stretch's sums where the weight is hidden_major
    float* hidden_sums;  ///< [kSmoothingParts, D]
    RowList list;        ///< rows; with a list, `hidden` begins with the call's first row
    int columns;
    int rows;
};

struct SmoothingTotalsParams {
    const float* weight_sums;
    const float* hidden_sums;
    float* weight_sum;           ///< [D]
    float* hidden_sum;           ///< [D]
    const float* row_smoothing;  // row_smoothing to rows: the rows' sum, where grad_weight's kernel adds up grad_bias
    float* smoothing_total;      //
    RowList list;                //
    int rows;                    //
    int unused;
};

/// grad_bias of the retained columns, where grad_weight's kernel does not add it up.
struct RetainedBiasParams {
    const void* exponentials;  ///< exponentials of RetainedRowsParams
    const float* row_scales;
    const float* row_smoothing;  ///< row_smoothing of RetainedRowsParams, with label smoothing
    const float* class_weight;   ///< weights of the classes, with label smoothing, where the Problem has class weights
    const PassScalars* scalars;
    void* grad_bias;
    RowList list;
    long long block_bytes;
    int rows;
    int columns;  ///< retained columns
};

struct DlogitsParams {
    const void* hidden;  ///< [rows, D]
    const void* weight;  ///< at the chunk's first row (vocab_major) or column
    const void* bias;    ///< at the chunk's first column, and so are class_weight and class_offset
    const float* class_weight;
    const float* class_offset;
    const PassScalars* scalars;
    const void* coefficients;
    const void* row_targets;
    void* dlogits;         ///< [rows, ld]
    float* bias_partials;  ///< [GradBiasParams' row blocks][ld] fp32, or null
    long long ld;
    long long first_column;  ///< first column of the chunk in the vocabulary
    int rows;
    int columns;  ///< columns of the chunk
    float transform[kMaxTransformParameters];
};

struct GradHiddenParams {
    const void* dlogits;  ///< [rows, ld]
    const void* weight;   ///< at the chunk's first row or column
    const PassScalars* scalars;
    float* accumulator;  ///< [rows, D] fp32
    void* grad_hidden;   ///< [rows, D]
    long long ld;
    int rows;
    int columns;
    int first;  ///< first chunk: nothing accumulated yet
    int last;   ///< last chunk: grad_hidden is written
};

struct GradWeightParams {
    const void* dlogits;  ///< [rows, ld]
    const void* hidden;   ///< [rows, D]
    const PassScalars* scalars;
    float* accumulator;  ///< [columns, D] or [D, columns] fp32, over row blocks; null where there is one
    void* grad_weight;   ///< at the chunk's first row or column
    long long ld;
    long long accumulator_ld;
    int rows;
    int columns;
    int first;                ///< first row block
    int last;                 ///< last row block
    const void* row_targets;  ///< row_targets of DlogitsParams, [rows]; for kernels without a list
};

struct GradBiasParams {
    const float* bias_partials;  ///< [⌈rows / block_rows⌉][ld]
    const PassScalars* scalars;
    float* accumulator;  ///< [columns] fp32, over row blocks of the call
    void* grad_bias;     ///< at the chunk's first column
    RowList list;
    long long ld;
    int rows;
    int block_rows;
    int columns;
    int first;
    int last;
};

/// Parameters of a kernel that sees logits, where the Problem rules classes of a row's group out. Other Problems have plain Params.
template <class Params>
struct Grouped : Params {
    const int* row_groups;    ///< forward: the call's, from the row on at which the labels begin; backward: [rows], the launch's
    const int* class_groups;  ///< groups of the whole vocabulary
};
/// RowCoefficientsParams of such a Problem.
struct GroupedRowCoefficientsParams : RowCoefficientsParams {
    const int* groups;  ///< [rows]
    int* row_groups;    ///< [rows]: kNoGroup where the row is ignored
};

/// Parameters of a kernel that sees logits, where the Problem divides them by temperatures. Other Problems have plain Params.
template <class Params>
struct Tempered : Params {
    const float* temperatures;  ///< forward: the call's, from the row on at which the labels begin; backward: [rows], the launch's
};

/// Zeroes columns [first_column, columns) of a row-major matrix.
struct ZeroColumnsParams {
    void* data;
    long long columns;
    long long first_column;
    long long rows;
};

// A weight in fp32 under a 16-bit dtype is rounded a stretch of the vocabulary at a time, and forward computes one stretch a launch.

enum : int { kWeightNumbers, kWeightE4m3, kWeightNvfp4 };  ///< numbers of WeightFormat
enum : int { kRoundedTile = 32 };                          ///< side of the squares that a hidden_major weight is transposed in

/// `weight` and `weight_map` are the stretch's rounded rows.
struct ForwardStretchParams : ForwardParams {
    int first_column;  ///< first column of the stretch in the vocabulary, a multiple of the tile's columns
    int columns;       ///< columns of the stretch
};

struct RoundWeightParams {
    const float* weight;  ///< at the stretch's first row (vocab_major) or column
    void* rounded;        ///< [rows, D]
    int rows;             ///< rows of the vocabulary
    int unused;
};

/// A weight that is rounded, whole.
struct WeightToRound {
    const void* weight;         ///< codes, or fp32 numbers that have no scales
    const void* scale;          ///< fp32 [rows], or a block's [ceil(rows / block), ceil(D / block)]; nvfp4: e4m3 [rows, D / 16]
    const float* tensor_scale;  ///< nvfp4: one number
};

/// The rows of a quantised weight that a launch dequantises.
struct DequantizeWeightParams : WeightToRound {
    void* dequantized;  ///< [rows, D]
    long long first_row;
    int rows;
    int unused;
};

/// Adds one stretch's sums of forward to the sums of the stretches before it.
struct MergeStretchParams {
    const float* partials;  ///< partial sums of this launch's rows
    float* running;         ///< [fields][running_rows]
    const PassScalars* scalars;
    RowList list;
    long long partial_rows;
    long long running_rows;
    int rows;
    int splits;
    int first;  ///< first stretch: nothing before it
    int unused;
};

}  // namespace flce
