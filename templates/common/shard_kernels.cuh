// Rows of a layer whose vocabulary lies on several ranks: a shard's forward leaves its sums, and merge makes outputs of all shards'.
#pragma once

#include "flce/common/row_outputs.cuh"
#include "flce/common/shard_fields.cuh"
#include "flce/common/top_classes.cuh"

namespace flce {

/// ShardFields of a Problem, whose teacher names any number of classes.
template <class Problem>
__host__ __device__ constexpr ShardFields shard_fields_of() {
    return shard_fields(ShardContents{Problem::entropy, Problem::label_smoothing, Problem::square_sum, Problem::top1, Problem::class_weight,
                                      Problem::teacher ? 1 : 0, 0});
}
template <class Problem>
struct ShardFieldsOf {
    enum : int { kTargetLogit = shard_fields_of<Problem>().target_logit };
    enum : int { kTargetClassWeight = shard_fields_of<Problem>().target_class_weight };
    enum : int { kClassWeightTotal = shard_fields_of<Problem>().class_weight_total };
    enum : int { kTeacherLogits = shard_fields_of<Problem>().teacher_logits };
    static_assert(kTargetLogit == PartialFields<Problem>::kCount, "the fields before are forward's partial sums");
};

/// Distance in nats above which a row's reference is corrected where elements of its own are written among the exponentials. Such elements
/// are divided by exp(reference − lse) of all shards, cut off at 2^-100, and the cut has to be next to nothing beside the other
/// exponentials (retained_rows).
enum : int { kMostAboveWritten = 20 };

/// Whether the shard has any of the classes that the teacher names for a row of the block, which then has a logit among the row's sums. For
/// the whole block. `row`: the caller's, −1 for none.
template <class Problem>
__device__ __forceinline__ bool has_named(const ShardSumsParams& p, const MergedSplits<Problem>& merged, int row) {
    __shared__ int named[kOutputRows];
    if (merged.part == 0) named[merged.row_of_block] = 0;
    __syncthreads();  // every row's is 0
    const float* const logits = p.sums + row + ShardFieldsOf<Problem>::kTeacherLogits * p.ld;
    for (int k = merged.part; row >= 0 && k < p.top_k; k += merged.kParts) {
        if (logits[k * p.ld] > -infinity()) named[merged.row_of_block] = 1;
    }
    __syncthreads();  // every thread has told
    return named[merged.row_of_block] != 0;
}

/// Merges the splits of each row of a shard. Where the row is ignored, or the shard has no class, they are the sums of nothing.
template <class Problem>
__device__ __forceinline__ void shard_sums(const ShardSumsParams& p) {
    using Fields = ShardFieldsOf<Problem>;
    const MergedSplits<Problem> merged;
    const int row = merged.row;
    const int rows = listed_rows<Problem>(p.list, p.rows, 0);
    const bool exists = row < p.rows;  // the list has ignored rows behind the others
    const ListedRow listed = exists ? listed_row<Problem>(p.list, p.targets, p.temperature, row) : ListedRow{0, kIgnored};
    const int target = row < rows ? listed.target : kIgnored;
    RowSums sums = merged.sums(p.found, rows, target < 0 || p.targets.columns == 0);
    bool stale = false;
    const bool has_target = target >= 0 && target != kElsewhere;
    bool is_written = has_target;
    if constexpr (Problem::teacher) {
        if (p.found.references != nullptr && has_named(p, merged, target >= 0 ? listed.row : -1)) is_written = true;
    }
    if (merged.part == 0 && exists) {
        if (has_target) sums.target_logit = p.found.target_logits[row];
        if (p.found.references != nullptr && target >= 0) {
            stale =
                corrects_reference(p.found, row, sums, sums.max + logf(sums.exp_sum), is_written ? kMostAboveWritten : kMostAboveReference);
        }
        if (Problem::top1 && sums.top1 != FLCE_NO_CLASS) sums.top1 += static_cast<int>(p.targets.first_class);
        float* const to = p.sums + listed.row;
        PartialFields<Problem>::store(to, p.ld, sums);
        to[Fields::kTargetLogit * p.ld] = sums.target_logit;
        if constexpr (Problem::class_weight) to[Fields::kTargetClassWeight * p.ld] = has_target ? p.class_weight[target] : 0.f;
        if constexpr (Problem::class_weight && Problem::label_smoothing) {
            to[Fields::kClassWeightTotal * p.ld] = p.found.scalars->class_weight_total;
        }
    }
    tell_stale(p.found, stale);
}

/// Merges shards' numbers for one field of a row: to the largest, or to the sum. `at`: the first shard's.
__device__ __forceinline__ float largest_of_shards(const MergeShardsParams& p, const float* at) {
    float largest = -infinity();
#pragma unroll 4
    for (int shard = 0; shard < p.shards; ++shard) largest = fmaxf(largest, at[shard * p.stride]);
    return largest;
}
__device__ __forceinline__ float sum_of_shards(const MergeShardsParams& p, const float* at) {
    float sum = 0.f;
#pragma unroll 4
    for (int shard = 0; shard < p.shards; ++shard) sum += at[shard * p.stride];
    return sum;
}

/// The logits of the row's named classes, where finish_teacher finds them: each from the shard that has it; 0 at no class and in ignored
/// rows. Each of a row's threads takes some.
template <class Problem>
__device__ __forceinline__ void gather_teacher_logits(const MergeShardsParams& p, const MergedSplits<Problem>& merged, bool ignored) {
    if (merged.row >= p.rows) return;
    const float* const logits = p.sums + merged.row + ShardFieldsOf<Problem>::kTeacherLogits * p.ld;
    for (int k = merged.part; k < p.teacher.top_k; k += merged.kParts) {
        const long long at = static_cast<long long>(merged.row) * p.teacher.top_k + k;
        const int id = ignored ? kIgnored : teacher_id<Problem>(p.teacher, at);
        p.teacher.logprobs[at] = id >= 0 ? largest_of_shards(p, logits + k * p.ld) : 0.f;
        if (id == kOutOfRange && p.invalid_label != nullptr) {
            atomicMin(p.invalid_label, static_cast<unsigned long long>(p.first_row + merged.row));
        }
    }
}

/// The classes of the row's largest logits of all shards, merged shard by shard in the outputs' own memory. `sums`: of all shards.
template <class Problem>
__device__ __forceinline__ void merge_top_classes(const MergeShardsParams& p, int row, bool ignored, const RowSums& sums) {
    constexpr int kTopK = Problem::top_k;
    float* const logits = p.top_logprobs + static_cast<long long>(row) * kTopK;
    long long* const ids = p.top_ids + static_cast<long long>(row) * kTopK;
    const auto put = [&](int at, ClassKey key) {
        logits[at] = logit_of(key);
        ids[at] = id_of(key);
    };
    const auto key_at = [&](int at) { return class_key(logits[at], static_cast<int>(ids[at])); };
    for (int i = 0; i < kTopK; ++i) {
        logits[i] = ignored ? 0.f : logit_of(no_class_key());
        ids[i] = ignored ? -1 : FLCE_NO_CLASS;
    }
    if (ignored) return;
    for (int shard = 0; shard < p.shards; ++shard) {
        const float* const from = p.sums + row + shard * p.stride + p.top_field * p.ld;
        const auto other = [&](int i) { return class_key(from[i * p.ld], __float_as_int(from[(kTopK + i) * p.ld])); };
        int mine = 0;
        while (mine < kTopK && key_at(mine) >= other(kTopK - 1 - mine)) ++mine;  // classes of what is there that stay
        int at = kTopK - 1;
        for (int i = mine - 1, j = kTopK - 1 - mine; j >= 0; --at) {
            const bool moves = i >= 0 && key_at(i) < other(j);
            put(at, moves ? key_at(i--) : other(j--));
        }
    }
    const float log_sum = logf(sums.exp_sum);
    for (int i = 0; i < kTopK; ++i) logits[i] = (logits[i] - sums.max) - log_sum;
}

/// A row's sums and target's logit of all shards. A row's threads take turns with the shards, whose loads are on their way together; the
/// first thread has the sums. All threads of the block.
template <class Problem>
__device__ __forceinline__ RowSums sums_of_shards(const MergeShardsParams& p, const MergedSplits<Problem>& merged) {
    using Fields = PartialFields<Problem>;
    constexpr int kParts = MergedSplits<Problem>::kParts;
    __shared__ float parts[kParts][Fields::kCount][kOutputRows];
    __shared__ float target_logits[kParts][kOutputRows];
    const int shards = merged.row < p.rows ? p.shards : 0;
    const float* const of_row = p.sums + merged.row;
    const float* const logits = of_row + ShardFieldsOf<Problem>::kTargetLogit * p.ld;
    float target_logit = -infinity();
    for (int shard = merged.part; shard < shards; shard += kParts) target_logit = fmaxf(target_logit, logits[shard * p.stride]);
    Fields::store(&parts[merged.part][0][merged.row_of_block], kOutputRows,
                  merge_splits<Problem, kParts, 4>(of_row, p.stride, p.ld, merged.part, shards));
    target_logits[merged.part][merged.row_of_block] = target_logit;
    __syncthreads();
    if (merged.part != 0) return sums_of_nothing(-infinity(), -infinity());
    RowSums sums = merge_splits<Problem, 1>(&parts[0][0][merged.row_of_block], Fields::kCount * kOutputRows, kOutputRows, 0, kParts);
    for (int part = 1; part < kParts; ++part) target_logit = fmaxf(target_logit, target_logits[part][merged.row_of_block]);
    sums.target_logit = target_logit;
    return sums;
}

/// Outputs of all rows from all shards' sums. Labels are the whole layer's.
template <class Problem>
__device__ __forceinline__ void merge_shards(const MergeShardsParams& p) {
    using Fields = ShardFieldsOf<Problem>;
    const MergedSplits<Problem> merged;
    const int row = merged.row;
    const bool first = merged.part == 0 && row < p.rows;
    const int target = row < p.rows ? load_target<Problem>(p.targets, p.temperature, row) : kIgnored;
    const float* const of_row = p.sums + row;
    const RowSums found = sums_of_shards<Problem>(p, merged);
    const RowSums sums = Problem::support ? of_support(found) : found;
    float c_y = 1.f;
    float total = static_cast<float>(whole_vocab_size<Problem>());
    if constexpr (Problem::class_weight) {
        if (first && target >= 0) c_y = sum_of_shards(p, of_row + Fields::kTargetClassWeight * p.ld);
    }
    if constexpr (Problem::class_weight) {
        if (first) p.target_class_weight[row] = target >= 0 ? c_y : 0.f;
    }
    if constexpr (Problem::class_weight && Problem::label_smoothing) {
        if (first) total = sum_of_shards(p, of_row + Fields::kClassWeightTotal * p.ld);
        if (first && p.first_row + row == 0) *p.class_weight_total = total;
    }
    float of_teacher = 0.f;
    if constexpr (Problem::teacher) {
        gather_teacher_logits<Problem>(p, merged, target < 0);
        of_teacher = teacher_cross_entropy_of<Problem>(p.teacher, merged.part == 0, merged.row_of_block, target >= 0 ? row : -1, target,
                                                       sums.target_logit, sums);
    }
    LossPartial mine{0.f, 0.f, 0.f, 0.f};
    RowOutputs out{0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    int top1 = -1;
    if (first && target >= 0) {
        out = row_outputs(sums, c_y, value_or(p.token_weight, row, 1.f), of_teacher, loss_options<Problem>(p, total));
        top1 = sums.top1 == FLCE_NO_CLASS ? 0 : sums.top1;
        const float share = share_of_token(p.count, p.token_weight, row);
        mine = {out.cross_entropy, out.z_loss, share * c_y, share};
    } else if (first && target == kOutOfRange && p.invalid_label != nullptr) {
        atomicMin(p.invalid_label, static_cast<unsigned long long>(p.first_row + row));
    }
    if (first) write_outputs<Problem>(p, row, out, top1);
    if constexpr (Problem::top_k > 0) {
        if (first) merge_top_classes<Problem>(p, row, target < 0, sums);
    }
    write_losses<Problem>(p, mine);
}

}  // namespace flce
