// Parameter blocks of cuda_gather's kernels. Plain C++, as common/params.cuh. A place is one of the N·K ids of a call, counted row by row.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/params.cuh"
#else
#include "templates/common/params.cuh"
#endif

namespace flce {

enum : int {
    kSortBits = 9,  ///< bits of a class that one round of sorting goes by
    kSortBins = 1 << kSortBits,
    kSortPlaces = 4096,       ///< places of a block of a round
    kGatherLeastPiece = 128,  ///< fewest places of a piece
};

/// Logits of the rows' ids and their sums.
struct GatherForwardParams : TeacherLogitsParams {
    float* partials;       ///< [fields][partial_rows]
    float* target_logits;  ///< [rows]; −inf where the row does not name its target
    long long partial_rows;
};

/// dz of every place, and grad_hidden.
struct GatherHiddenParams {
    const void* weight;
    const void* coefficients;
    const void* row_targets;
    const float* row_weights;       ///< row_teacher_weights of RowCoefficientsParams
    const float* row_temperatures;  ///< [rows], where the Problem has temperatures
    void* grad_hidden;              ///< [rows, D]; null: not wanted
    float* dlogits;                 ///< [rows, K]; null: not wanted
    TeacherParams teacher;
    LogitSlope slope;  ///< at a temperature of 1
    const float* class_offset;
};

/// A place and its class.
struct ClassPlace {
    unsigned id;
    unsigned place;
};

/// One round of sorting places by class: by kSortBits bits from `shift` on, places of equal bits in their order.
struct GatherSortParams {
    TeacherParams teacher;
    const void* row_targets;
    const ClassPlace* from;  ///< [places], of the round before; null: the call's ids in their order
    ClassPlace* to;          ///< [places]
    unsigned* counts;        ///< [kSortBins][blocks]: numbers of places, then of those in blocks before; then a bin's total, [kSortBins]
    unsigned places;
    unsigned nowhere;  ///< the class of places that name none here: behind all others
    int blocks;
    int shift;
};

/// grad_weight and grad_bias of sorted places.
struct GatherWeightParams {
    const void* hidden;        ///< [rows, D]
    const float* dlogits;      ///< [rows, K]
    const ClassPlace* sorted;  ///< [places]
    float* heads;              ///< [pieces, D + 8]: a piece's sum of a class that began in an earlier one
    float* tails;              ///< [pieces, D + 8]: of a class that begins in the piece and goes on in the next
    void* grad_weight;         ///< null: not wanted
    void* grad_bias;           ///< null: not wanted
    unsigned places;
    unsigned nowhere;
    int piece;  ///< places of a piece
    int top_k;
};

}  // namespace flce
