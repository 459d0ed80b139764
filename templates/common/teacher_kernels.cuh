// A teacher's few classes of a row in both passes: their log-probabilities and the row's cross entropy going forward, and their places in
// dz going backward.
#pragma once

#include "flce/common/named_rows.cuh"

namespace flce {

/// A Problem whose calls have a teacher. Kernels over tiles know nothing of it.
template <class Problem>
struct Taught : Problem {
    enum : bool { teacher = true };
};

/// Logits of the classes, where their log-probabilities will be; 0 at no class and in ignored rows. In a shard they are a part of its sums:
/// −inf there, and at classes that another shard has. A block has a row.
template <class Problem>
__device__ __forceinline__ void teacher_logits(const TeacherLogitsParams& p) {
    __shared__ NamedPlaces named;
    const ListedRow listed = listed_row<Problem>(p.list, p.targets, p.temperature, static_cast<int>(blockIdx.x));
    load_named<Problem>(p, named, listed);
    named_logits<Problem>(p, named, listed.row,
                          [&](int i, float logit) { teacher_logit<Problem>(p.teacher, listed.row, named.places[i]) = logit; });
}

/// A row as the warps of a block see it that finish its classes.
struct TaughtRow {
    long long row;  ///< row of the teacher's tensors; −1: ignored
    int target;
    float target_logit;
    float max;
    float log_sum;
    float cross_entropy;
};

/// Makes log-probabilities of a row's logits, for a warp, and returns a lane's part of the row's cross entropy with the teacher. For many
/// classes: loads of several are on their way together.
template <class Problem>
__device__ __forceinline__ float finish_named_at_once(const TeacherParams& p, const TaughtRow& of) {
    constexpr int kAtOnce = 8;
    const long long first = of.row * p.top_k;
    float sum = 0.f;
#pragma unroll 1
    for (int begin = static_cast<int>(threadIdx.x) % 32; begin < p.top_k; begin += 32 * kAtOnce) {
        int ids[kAtOnce];
        float logits[kAtOnce];
        float probabilities[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int k = begin + 32 * i;
            const long long at = first + min(k, p.top_k - 1);
            ids[i] = k < p.top_k ? teacher_id<Problem>(p, at) : kIgnored;
            logits[i] = p.logprobs[at];
            probabilities[i] = p.probs[at];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (ids[i] < 0) continue;
            const float logit = ids[i] == of.target ? of.target_logit : fminf(logits[i], of.max);
            const float logprob = (logit - of.max) - of.log_sum;
            p.logprobs[first + begin + 32 * i] = logprob;
            sum += teacher_term(probabilities[i], logprob);
        }
    }
    return sum;
}

/// Makes log-probabilities of logits, and each row's cross entropy with the teacher. The target's logit is forward's own, which was added
/// up like the logits in lse; other logits are cut off at the largest. `rows` [kOutputRows], shared, is filled.
template <class Problem, int kThreads>
__device__ __forceinline__ void finish_teacher(const TeacherParams& p, TaughtRow* rows) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int i = static_cast<int>(threadIdx.x) / 32; i < kOutputRows; i += kThreads / 32) {
        const TaughtRow of = rows[i];
        if (of.row < 0) continue;
        float sum = 0.f;
        if constexpr (Problem::picks_named) {
            sum = finish_named_at_once<Problem>(p, of);
        } else {
            for (int k = lane; k < p.top_k; k += 32) {
                const long long at = of.row * p.top_k + k;
                const int id = teacher_id<Problem>(p, at);
                if (id < 0) continue;
                const float logit = id == of.target ? of.target_logit : fminf(p.logprobs[at], of.max);
                const float logprob = (logit - of.max) - of.log_sum;
                p.logprobs[at] = logprob;
                sum += teacher_term(p.probs[at], logprob);
            }
        }
        sum = warp_sum(sum);
        if (lane == 0) rows[i].cross_entropy = sum;
    }
    __syncthreads();  // every row's is there
}

/// Sum of a row's probabilities, and sum of their sizes.
struct TeacherSums {
    float sum;
    float sizes;
};
/// Sums of some rows of the teacher's tensors, −1 for none, on every lane of a warp. Their loads are on their way together.
template <class Problem, int kRows>
__device__ __forceinline__ void add_teacher(const TeacherParams& p, const long long (&rows)[kRows], TeacherSums (&sums)[kRows]) {
    for (int k = static_cast<int>(threadIdx.x) % 32; k < p.top_k; k += 32) {
        float probabilities[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const long long at = max(rows[i], 0ll) * p.top_k + k;
            probabilities[i] = rows[i] < 0 || teacher_id<Problem>(p, at) < 0 ? 0.f : p.probs[at];
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            sums[i].sum += probabilities[i];
            sums[i].sizes += fabsf(probabilities[i]);
        }
    }
#pragma unroll
    for (TeacherSums& of_row : sums) of_row = {warp_sum(of_row.sum), warp_sum(of_row.sizes)};
}

/// Row `row` of a backward launch, as the teacher's tensors count it.
__device__ __forceinline__ long long teacher_row(const RowList& list, int row) {
    return list.rows != nullptr ? list.rows[list.first + row].row : row;
}

/// A class's slope_of_class in a row of a backward launch. `offset`: the class's, where the Problem has offsets.
template <class Problem, class Params>
__device__ __forceinline__ float slope_in_row(const Params& p, int row, float logprob, float lse, float offset) {
    return slope_of_class(p.slope, logprob, lse, Problem::temperature ? p.row_temperatures[row] : 1.f, offset);
}

/// A class's offset; 0 where the Problem has none.
template <class Problem>
__device__ __forceinline__ float offset_of(const float* offsets, long long id) {
    if constexpr (Problem::class_offset) return offsets[id];
    return 0.f;
}

/// Columns of a launch, from class `first` on.
struct LaunchColumns {
    long long first;
    int count;

    /// The column of the class at place `at` of the rows' ids; −1: none of these.
    template <class Problem>
    __device__ __forceinline__ int of_id(const TeacherParams& p, long long at) const {
        const int id = teacher_id<Problem>(p, at);
        const long long column = id - first;
        return id >= 0 && column >= 0 && column < count ? static_cast<int>(column) : -1;
    }
};

/// Visits place k, if no place before it has its column. `columns` [top_k, rounded up to a multiple of 4], on 16 bytes: of all places.
template <class Visit>
__device__ __forceinline__ void visit_if_first(const int* columns, const TeacherParams& p, long long first, int k, const Visit& visit) {
    const int column = columns[k];
    float probability = 0.f;
    for (int four = 0; four < p.top_k; four += 4) {
        const int4 others = *reinterpret_cast<const int4*>(&columns[four]);
        if (others.x != column && others.y != column && others.z != column && others.w != column) continue;
        for (int other = four; other < four + 4; ++other) {
            if (columns[other] != column) continue;
            if (other < k) return;
            probability += p.probs[first + other];
        }
    }
    visit(k, column, probability);
}

/// The classes that a row's teacher names among a launch's columns, in shared memory. A warp has a row. Up to kListedClasses of them are
/// listed; where there are more, `columns` has an entry for every class that the row names, and bits of columns tell most of those that no
/// other equals.
struct NamedClasses {
    enum : int { kMost = 1024 };  // classes of a row: Spec::teacher_top_k
    enum : int { kBits = 4096 };
    unsigned seen[kBits / 32];   ///< bits that columns have
    unsigned again[kBits / 32];  ///< bits that several have
    union {
        struct {
            int columns[kListedClasses];
            float probabilities[kListedClasses];
            short places[kListedClasses];  ///< among all that the row names
        } list;
        alignas(16) int columns[kMost];  ///< −1: not one of the launch's
    };

    /// Returns how many there are, equal ones included. `first`: the row's first place in the teacher's tensors.
    template <class Problem>
    __device__ __forceinline__ int load(const TeacherParams& p, long long first, const LaunchColumns& launch) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        int found = 0;
        for (int begin = 0; begin < p.top_k; begin += 32) {
            const int k = begin + lane;
            const int column = k < p.top_k ? launch.of_id<Problem>(p, first + k) : -1;
            const unsigned here = __ballot_sync(0xffffffffu, column >= 0);
            const int at = found + __popc(here & ((1u << lane) - 1u));
            if (column >= 0 && at < kListedClasses) {
                list.columns[at] = column;
                list.probabilities[at] = p.probs[first + k];
                list.places[at] = static_cast<short>(k);
            }
            found += __popc(here);
        }
        __syncwarp();
        if (found > kListedClasses) {
            const int end = (p.top_k + 3) / 4 * 4;
            for (int word = lane; word < kBits / 32; word += 32) seen[word] = again[word] = 0u;
            for (int k = lane; k < end; k += 32) columns[k] = k < p.top_k ? launch.of_id<Problem>(p, first + k) : -1;
            __syncwarp();  // all words are 0
            for (int k = lane; k < end; k += 32) {
                if (columns[k] < 0) continue;
                const unsigned bit = bit_of(columns[k]);
                const unsigned of_word = 1u << bit % 32;
                if ((atomicOr(&seen[bit / 32], of_word) & of_word) != 0u) atomicOr(&again[bit / 32], of_word);
            }
            __syncwarp();
        }
        return found;
    }
    /// Calls `visit` once for each of the columns, on any lane: the first place that names it, the column, and the sum of all that do.
    /// `found`: what `load` has returned.
    template <class Visit>
    __device__ __forceinline__ void for_each(const TeacherParams& p, long long first, int found, const Visit& visit) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        if (found > kListedClasses) {
            for (int k = lane; k < p.top_k; k += 32) {
                if (columns[k] >= 0) visit_first(p, first, k, visit);
            }
            return;
        }
        for (int i = lane; i < found; i += 32) {
            int before = 0;
            float probability = 0.f;
            for (int other = 0; other < found; ++other) {
                if (list.columns[other] != list.columns[i]) continue;
                before += other < i ? 1 : 0;
                probability += list.probabilities[other];
            }
            if (before == 0) visit(list.places[i], list.columns[i], probability);
        }
    }

private:
    static __device__ __forceinline__ unsigned bit_of(int column) { return static_cast<unsigned>(column) * 2654435761u >> 20; }

    /// Visits place k, if no place before it has its column.
    template <class Visit>
    __device__ __forceinline__ void visit_first(const TeacherParams& p, long long first, int k, const Visit& visit) const {
        const unsigned bit = bit_of(columns[k]);
        if ((again[bit / 32] >> bit % 32 & 1u) == 0u) return visit(k, columns[k], p.probs[first + k]);
        visit_if_first(columns, p, first, k, visit);
    }
};

/// A warp that has a row, and the row's named classes.
struct NamedOfWarp {
    enum : int { kThreads = 32 };
    using Shared = NamedClasses[kRowThreads / kThreads];

    NamedClasses& classes;
    int found = 0;

    __device__ __forceinline__ NamedOfWarp(Shared& shared, unsigned warp) : classes(shared[warp]) {}
    /// Returns whether there are any.
    template <class Problem>
    __device__ __forceinline__ bool load(const TeacherParams& p, long long first, const LaunchColumns& launch) {
        found = classes.load<Problem>(p, first, launch);
        return found > 0;
    }
    template <class Visit>
    __device__ __forceinline__ void for_each(const TeacherParams& p, long long first, const Visit& visit) const {
        classes.for_each(p, first, found, visit);
    }
    /// Sum of the probabilities' sizes.
    template <class Problem>
    __device__ __forceinline__ float sizes(const TeacherParams& p, long long first, const LaunchColumns& launch) const {
        float sum = 0.f;
        for (int k = static_cast<int>(threadIdx.x) % kThreads; k < p.top_k; k += kThreads) {
            if (launch.of_id<Problem>(p, first + k) >= 0) sum += fabsf(p.probs[first + k]);
        }
        return warp_sum(sum);
    }
    __device__ __forceinline__ bool any(bool value) const { return __any_sync(0xffffffffu, value) != 0; }
};

/// A block that has a row, and the row's named classes, of which each thread has some. A table of their columns, with a free slot for each,
/// tells those that several places name. For many classes a row: a warp would wait for one access to memory after the other.
struct NamedOfBlock {
    enum : int { kThreads = kRowThreads };
    enum : int { kOfThread = NamedClasses::kMost / kThreads };
    enum : int { kTableBits = 11 };
    enum : int { kTable = 1 << kTableBits };
    static_assert(+kTable >= 2 * NamedClasses::kMost, "there are free slots, and searches are short");
    enum : unsigned { kAgain = 1u << 31 };
    struct Shared {
        unsigned table[kTable];                        ///< a column + 1, and kAgain where several places name it; 0: a free slot
        alignas(16) int columns[NamedClasses::kMost];  ///< −1: not one of the launch's
        float of_warps[kThreads / 32];
    };

    Shared& shared;
    int columns[kOfThread];
    int slots[kOfThread];
    float probabilities[kOfThread];

    __device__ __forceinline__ NamedOfBlock(Shared& shared_, unsigned /*number*/) : shared(shared_) {}
    template <class Problem>
    __device__ __forceinline__ bool load(const TeacherParams& p, long long first, const LaunchColumns& launch) {
        for (int slot = static_cast<int>(threadIdx.x); slot < kTable; slot += kThreads) shared.table[slot] = 0u;
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {  // loads are on their way together
            const int k = place(i);
            columns[i] = k < p.top_k ? launch.of_id<Problem>(p, first + k) : -1;
            probabilities[i] = k < p.top_k ? p.probs[first + k] : 0.f;
            shared.columns[k] = columns[i];
        }
        __syncthreads();  // all slots are free, and all columns are there
        bool any = false;
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
            any = any || columns[i] >= 0;
            slots[i] = columns[i] >= 0 ? enter(static_cast<unsigned>(columns[i]) + 1u) : 0;
        }
        return __syncthreads_or(any) != 0;  // all columns are in the table
    }
    template <class Visit>
    __device__ __forceinline__ void for_each(const TeacherParams& p, long long first, const Visit& visit) const {
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
            if (columns[i] < 0) continue;
            if ((shared.table[slots[i]] & kAgain) == 0u) {
                visit(place(i), columns[i], probabilities[i]);
            } else {
                visit_if_first(shared.columns, p, first, place(i), visit);
            }
        }
    }
    template <class Problem>
    __device__ __forceinline__ float sizes(const TeacherParams& /*p*/, long long /*first*/, const LaunchColumns& /*launch*/) const {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) sum += columns[i] >= 0 ? fabsf(probabilities[i]) : 0.f;
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = sum;
        __syncthreads();  // every warp's sum is there
        float total = 0.f;
#pragma unroll
        for (const float of_warp : shared.of_warps) total += of_warp;
        return total;
    }
    __device__ __forceinline__ bool any(bool value) const { return __syncthreads_or(value) != 0; }

private:
    static __device__ __forceinline__ int place(int i) { return kThreads * i + static_cast<int>(threadIdx.x); }
    /// Returns the slot.
    __device__ __forceinline__ int enter(unsigned entry) const {
        unsigned slot = entry * 2654435761u >> (32 - kTableBits);
        while (true) {
            const unsigned before = ptx::atom_shared_cas(&shared.table[slot], 0u, entry);
            if (before == 0u) break;
            if ((before & ~kAgain) == entry) {
                atomicOr(&shared.table[slot], +kAgain);
                break;
            }
            slot = (slot + 1u) % kTable;
        }
        return static_cast<int>(slot);
    }
};

/// Who has a row of kernels over the rows' named classes.
template <class Problem>
using NamedOf = Select<Problem::picks_named, NamedOfBlock, NamedOfWarp>;

/// Writes dz of the named classes that lie in the chunk, each from its own terms and rounded once.
template <class Problem>
__device__ __forceinline__ void teacher_dlogits(const TeacherRowsParams& p) {
    using Element = typename Problem::Element;
    using Named = NamedOf<Problem>;
    __shared__ typename Named::Shared shared;
    const int number = static_cast<int>(threadIdx.x) / Named::kThreads;  // number of the row in the block
    const int row = static_cast<int>(blockIdx.x) * (kRowThreads / Named::kThreads) + number;
    if (row >= listed_rows<Problem>(p.list, p.rows, 1)) return;
    const RowTarget target = static_cast<const RowTarget*>(p.row_targets)[row];
    if (target.target < 0) return;
    const long long first = teacher_row(p.list, row) * p.teacher.top_k;
    Named named(shared, static_cast<unsigned>(number));
    named.template load<Problem>(p.teacher, first, {p.first_column, p.columns});
    const float4 c = static_cast<const float4*>(p.coefficients)[row];
    const float scale = dlogits_scale<Problem>(p.scalars, false);
    Element* const dlogits = static_cast<Element*>(p.dlogits) + row * p.ld;
    named.for_each(p.teacher, first, [&](int k, int column, float probability) {
        const float logprob = p.teacher.logprobs[first + k];
        const float p_k = ::expf(logprob);
        float dz = p_k * (Problem::entropy ? c.x + c.y * logit_of_share(p_k, logprob + target.lse) : c.x);
        if (target.target - p.first_column == column) dz -= c.z;
        if constexpr (Problem::label_smoothing) dz -= c.w;
        const float offset = offset_of<Problem>(p.class_offset, p.first_column + column);
        dz = (dz - p.row_weights[row] * probability) * slope_in_row<Problem>(p, row, logprob, target.lse, offset) * scale;
        if constexpr (kSame<Element, Fp16>) dz = ptx::clamp_nan(dz, 65504.f);
        dlogits[column] = Numeric<Element>::from_float(dz);
    });
}

/// Adds each lane's value at its column, −1 for none; where columns are equal, in the order of the lanes. For a warp's own sums.
__device__ __forceinline__ void add_by_column(float* sums, int column, float value) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const unsigned same = __match_any_sync(0xffffffffu, column >= 0 ? column : -1 - lane);
    if (__any_sync(0xffffffffu, (same & (same - 1u)) != 0u) == 0) {
        if (column >= 0) sums[column] += value;
    } else {
        for (int of = 0; of < 32; ++of) {
            if (lane == of && column >= 0) sums[column] += value;
            __syncwarp();
        }
    }
    __syncwarp();
}

/// Adds what the named classes take off to sums of dz over rows: to the first of the partial sums for a bias's gradient, which were made
/// before. A block has kTeacherColumns columns and goes through all rows; each warp adds up its own part of them, in order.
template <class Problem>
__device__ __forceinline__ void teacher_bias(const TeacherRowsParams& p) {
    constexpr int kWarps = kReduceThreads / 32;
    constexpr int kAtOnce = 4;  // reads under way of a thread
    __shared__ float sums[kWarps][kTeacherColumns];
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int column0 = static_cast<int>(blockIdx.x) * kTeacherColumns;
    for (int i = lane; i < kTeacherColumns; i += 32) sums[warp][i] = 0.f;
    __syncwarp();
    const int width = min(kTeacherColumns, p.columns - column0);
    const long long entries = static_cast<long long>(listed_rows<Problem>(p.list, p.rows, 1)) * p.teacher.top_k;
    const float scale = dlogits_scale<Problem>(p.scalars, false);
    for (long long begin = warp * 32 * kAtOnce; begin < entries; begin += kWarps * 32 * kAtOnce) {
        int columns[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const long long entry = begin + 32 * i + lane;
            columns[i] = -1;
            if (entry >= entries) continue;
            const int row = static_cast<int>(entry / p.teacher.top_k);
            const long long at = teacher_row(p.list, row) * p.teacher.top_k + entry % p.teacher.top_k;
            const int id = teacher_id<Problem>(p.teacher, at);
            const long long column = id - p.first_column - column0;
            if (id >= 0 && column >= 0 && column < width) columns[i] = static_cast<int>(column);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (__ballot_sync(0xffffffffu, columns[i] >= 0) == 0u) continue;
            float taken = 0.f;
            if (columns[i] >= 0) {
                const long long entry = begin + 32 * i + lane;
                const int row = static_cast<int>(entry / p.teacher.top_k);
                const RowTarget target = static_cast<const RowTarget*>(p.row_targets)[row];
                const long long at = teacher_row(p.list, row) * p.teacher.top_k + entry % p.teacher.top_k;
                if (target.target >= 0) {
                    const float offset = offset_of<Problem>(p.class_offset, p.first_column + column0 + columns[i]);
                    const float slope = slope_in_row<Problem>(p, row, p.teacher.logprobs[at], target.lse, offset);
                    taken = p.row_weights[row] * p.teacher.probs[at] * slope * scale;
                }
            }
            add_by_column(sums[warp], columns[i], -taken);
        }
    }
    __syncthreads();  // every warp is through with its rows
    for (int i = static_cast<int>(threadIdx.x); i < width; i += kReduceThreads) {
        float sum = p.bias_partials[column0 + i];
        for (int w = 0; w < kWarps; ++w) sum += sums[w][i];
        p.bias_partials[column0 + i] = sum;
    }
}

}  // namespace flce
