// Parameter blocks of the kernels that end forward and merge. Plain C++, like params.cuh.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/params.cuh"
#else
#include "templates/common/params.cuh"
#endif

namespace flce {

/// Outputs of rows whose logits have been reduced, and their parts of the loss.
struct OutputsParams {
    TargetParams targets;
    float* loss;    ///< [rows] for reduction none, else null
    float* z_loss;  ///< [rows] for reduction none, else null
    float* lse;
    float* logprobs;
    float* entropy;
    float* log_sum_sq_probs;
    long long* top1;      ///< −1 where the row is ignored
    float* top_logprobs;  ///< [rows, top_k], of a merge
    long long* top_ids;
    LossPartial* loss_partials;  ///< one for each block; null: no scalar loss, or this block writes it
    float* scalar_loss;          ///< scalar loss, where this launch is one block and has every row; else null
    float* scalar_z_loss;        ///< z-loss's part of scalar_loss, in the launches that have scalar_loss
    CountParams count;           ///< divisor of the scalar losses
    unsigned long long* invalid_label;
    const float* token_weight;  ///< [rows]; null: 1
    const float* temperature;   ///< [rows], where the Problem has temperatures
    TeacherParams teacher;      ///< where the Problem has one
    RowList list;               ///< rows; with a list, outputs, targets and a row's other numbers begin with the call's first row
    long long first_row;        ///< index of row 0 in the whole call, for invalid_label
    int rows;
    float label_smoothing;
    float smoothing_per_class;
    float z_loss_weight;
    int dft;            ///< a token's loss is multiplied by its target's probability
    float hard_weight;  ///< share of the target's cross entropy, where the Problem has a teacher
};

/// Sums that forward has made, by splits of the vocabulary.
struct SplitSumsParams {
    const float* partials;
    const float* target_logits;
    const PassScalars* scalars;
    float* references;              ///< references of retained exponentials; null: none are retained, and the next two are null
    float* retained_target_logits;  ///< [rows]
    unsigned* stale;                ///< for each block of kOutputRows: 1 where a row's exponentials have to be written again, else 0
    long long partial_rows;
    int splits;
    int unused;
};

struct RowOutputsParams : OutputsParams {
    SplitSumsParams found;
    const float* class_weight;
};

enum : int { kMostLtSplits = 6 };  ///< parts of a stretch that cuda_lt reduces apart

/// Classes of rows' largest logits that become outputs, or a shard's partial sums. They come from lists, or from all logits of the launch's
/// columns, and with them those that have been kept of columns before.
struct TopClassesParams {
    const void* keys;    ///< [splits][partial_rows] lists of TopEntry
    TopState* states;    ///< [splits][partial_rows]; their counts are 0 afterwards, where further columns follow
    const float* dense;  ///< [rows][kDenseTopColumns] logits in the place of lists, from class 0 on; null: there are lists
    void* kept;          ///< [rows][TopCollected::kMostKept] TopEntry, from and for launches over other columns
    TopState* bounds;    ///< [rows]: states that lists over the columns behind begin with, and the numbers of kept entries
    float* running;      ///< sums of all columns so far, one part; null: these are all columns
    long long running_rows;
    const float* partials;  ///< partials of ForwardParams
    const PassScalars* scalars;
    TargetParams targets;
    RowList list;
    const float* temperature;  ///< [rows], where the Problem has temperatures
    float* logprobs;           ///< [rows, top_k], from the launch's first row on, or the call's where there is a list; so are the others
    long long* ids;
    float* shard_sums;  ///< sums of ShardSumsParams
    long long ld;
    long long partial_rows;
    int rows;
    int splits;
    int first_field;  ///< ShardFields::top_logits
    int dense_columns;
    int kept_before;  ///< whether there are kept classes, and running sums
    int last;         ///< whether these are the last columns
};

/// Outputs of rows whose divergence from a teacher has been summed up.
struct DivergenceOutputsParams : OutputsParams {
    const float* partials;   ///< [splits][fields][partial_rows]: numbers of DivergenceSums or, with `mixture`, of MixtureTerm. In a merge
                             ///< the splits are shards
    long long split_stride;  ///< numbers from one split to the next
    long long partial_rows;
    float* teacher_lse;
    float* teacher_entropy;  ///< or null
    float* student_divergence;
    int splits;
    int mixture;  ///< not 0: sums of a mixture's divergences, after lse and teacher_lse have been written
    int last;     ///< not 0: the loss is written
    int unused;
};

/// A walk of a shard's divergence ends with the sums of its classes.
struct DivergenceShardSumsParams {
    const float* partials;  ///< partials of DivergenceOutputsParams, and so is `mixture`
    TargetParams targets;
    const float* temperature;
    float* sums;  ///< sums of ShardSumsParams
    long long ld;
    long long partial_rows;
    int rows;
    int splits;
    int mixture;
    int unused;
};

/// A shard's forward ends with the sums of its classes.
struct ShardSumsParams {
    SplitSumsParams found;
    TargetParams targets;
    RowList list;
    const float* class_weight;  ///< weights of the shard's classes
    const float* temperature;   ///< [rows], where the Problem has temperatures
    float* sums;                ///< ShardFields, `ld` numbers apart, from the launch's first row on, or the call's where there is a list
    long long ld;
    int rows;
    int top_k;  ///< top_k of TeacherParams, where the Problem has a teacher
};

/// All shards' sums become outputs.
struct MergeShardsParams : OutputsParams {
    const float* sums;           ///< sums of the first shard, from the launch's first row on
    float* target_class_weight;  ///< [rows], added up over the shards; 0 where the row is ignored
    float* class_weight_total;
    long long ld;      ///< distance from one field to the next
    long long stride;  ///< distance from one shard to the next
    int shards;
    int top_field;  ///< ShardFields::top_logits
};

struct ReduceLossParams {
    const LossPartial* loss_partials;
    float* loss;
    float* z_loss;
    CountParams count;
    long long blocks;
};

}  // namespace flce
