// Logits of both heads of a divergence that forward leaves to backward. Plain C++, as params.cuh.
#pragma once

namespace flce {

enum : int { kPairColumns = 512 };  ///< columns of a block of pairs
enum : int { kPairGroup = 64 };     ///< columns that share a row's largest logits
enum : int { kPairGroups = 8 };     ///< groups of a block

/// Logits of both heads, side by side: for each kPairColumns columns of the vocabulary a block of [tokens, kPairColumns] pairs, the
/// student's and the teacher's as fp16 less the row's largest of kPairGroup columns, and elsewhere these, rounded to bf16,
/// [tokens, kPairGroups] pairs. Their rounding leaves the largest logit z as much as 2^-9·|z| from its reference, where fp16 is off by
/// 2^-20·|z|: less than fp32 sums of 256 products or more. Blocks follow one another, or a token's parts of all blocks do.
struct RetainedPairs {
    void* data;
    long long block_bytes;            ///< from one block to the next
    long long references;             ///< from `data` to the references of the first block
    long long reference_block_bytes;  ///< from one block's references to the next
    long long first_row;              ///< row of the call at which the launch's rows begin
    int row_bytes;                    ///< from one token of a block to the next
    int reference_row_bytes;
    int columns;  ///< retained columns of the vocabulary, from its start; 0: none
    int unused;
};

/// Bytes of a token in a block.
enum : int { kPairBytes = 4 * +kPairColumns + 4 * +kPairGroups };
static_assert(+kPairGroups * +kPairGroup == +kPairColumns, "groups are all of a block");

}  // namespace flce
