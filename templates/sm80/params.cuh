// Parameter blocks of cuda_sm80's kernels where a Problem retains exponentials. Plain C++, as common/params.cuh.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/params.cuh"
#else
#include "templates/common/params.cuh"
#endif

namespace flce {

struct RetainForwardParams : ForwardParams {
    void* exponentials;       ///< blocks of [tokens, kRetainedColumns], from the launch's first row on
    const float* references;  ///< [rows]
    const unsigned* stale;    ///< the second time: stale rows (SplitSumsParams)
    long long block_bytes;    ///< from one block to the next
    int retained_columns;     ///< retained columns of the vocabulary, from its start; 0: nothing is retained
    int again;                ///< only rows that are stale, only their exponentials
};

struct RetainGradHiddenParams : GradHiddenParams {
    const float* row_scales;     ///< [rows], of exponentials: factors of their products; null: dlogits of a chunk
    const float* row_smoothing;  ///< [rows], with label smoothing, whose term products of exponentials lack (smoothing_sums)
    const float* weight_sum;     ///< [D], with label smoothing
    long long block_gap;         ///< elements between the end of a row in a block of exponentials and its beginning in the next one
};

struct RetainGradWeightParams : GradWeightParams {
    const float* hidden_sum;    ///< [D], of exponentials with label smoothing; null: nothing is lacking
    const float* class_weight;  ///< class weights of the launch's columns, where the Problem has class weights
    unsigned* taken;            ///< number of tiles taken; 0 before. Only beside `readers`
    unsigned* readers;          ///< tiles that have been multiplied, of each block of exponentials in grad_weight's memory; 0 before; null:
                                ///< exponentials lie elsewhere
    long long block_bytes;      ///< from one block of exponentials to the next; 0: dlogits of a chunk
    unsigned readers_of_block;  ///< tiles of a whole block
    int unused;
};

}  // namespace flce
