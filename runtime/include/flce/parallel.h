/* A layer whose classes lie over several ranks: flce/parallel.hpp in C. Communication is the caller's. */
#ifndef FLCE_PARALLEL_H_
#define FLCE_PARALLEL_H_

#include "flce/flce.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A group of ranks as one rank sees it. All ranks call the same functions in the same order. A function returns 0, or an error of its own,
 * which ends the call with FLCE_ERROR_DEVICE. On a GPU a function is asynchronous on `stream` (a CUstream of the kernel's device); on a CPU
 * its work has ended when it returns. dtype: FLCE_BF16, FLCE_FP16 or FLCE_FP32. */
typedef struct flce_communicator {
    size_t struct_size;
    void* user; /* handed to each function */
    int32_t rank;
    int32_t size;
    /* Every rank's `bytes` at `part`, in the order of ranks, to `all`. */
    int32_t (*all_gather)(void* user, const void* part, void* all, size_t bytes, void* stream);
    /* The sum over ranks of `count` elements at `data`, in place. */
    int32_t (*all_reduce)(void* user, void* data, int64_t count, int32_t dtype, void* stream);
    /* The sum over ranks of size x count elements at `data`, of which this rank gets part number `rank`. With sequence_parallel. */
    int32_t (*reduce_scatter)(void* user, const void* data, void* part, int64_t count, int32_t dtype, void* stream);
} flce_communicator;
#define FLCE_COMMUNICATOR_INIT {sizeof(flce_communicator), NULL, 0, 1, NULL, NULL, NULL}

typedef struct flce_parallel_options {
    size_t struct_size;
    int32_t sequence_parallel; /* not 0: each rank has N/R of the tokens' hidden states, and gets its part of grad_hidden */
    int32_t reserved;          /* 0 */
    /* A CUstream other than the call's. On it grad_hidden is added up while grad_weight is made, and with sequence_parallel hidden states
     * are gathered while grad_hidden is made, where grad_hidden does not read them. NULL: everything runs on the call's stream, in turn. */
    void* communication_stream;
} flce_parallel_options;
#define FLCE_PARALLEL_OPTIONS_INIT {sizeof(flce_parallel_options), 0, 0, NULL}

typedef struct flce_parallel flce_parallel;

/* A rank's part of every step of the layer of `kernel`, whose spec has whole_vocab_size. `options` may be NULL. */
FLCE_API flce_status flce_parallel_create(const flce_kernel* kernel, const flce_communicator* communicator,
                                          const flce_parallel_options* options, flce_parallel** parallel);
/* Does flce_parallel_create over an ncclComm_t of the caller's, which has to outlive it. NCCL is loaded at run time (libnccl.so.2, or
 * FLCE_NCCL). */
FLCE_API flce_status flce_parallel_create_nccl(const flce_kernel* kernel, void* nccl_comm, const flce_parallel_options* options,
                                               flce_parallel** parallel);
/* NULL is ignored. */
FLCE_API void flce_parallel_release(flce_parallel* parallel);

/* Scratch bytes of either pass over num_tokens tokens of all ranks. */
FLCE_API flce_status flce_parallel_workspace_bytes(const flce_parallel* parallel, int64_t num_tokens, size_t* bytes);
/* Does flce_kernel_forward of a layer without shards: hidden is [N, D], or [N/R, D] with sequence_parallel, and partial_sums is NULL.
 * target_class_weight and class_weight_total: as in flce_merge_args, NULL where the spec has no class_weight. */
FLCE_API flce_status flce_parallel_forward(const flce_parallel* parallel, const flce_forward_args* args,
                                           const flce_tensor* target_class_weight, const flce_tensor* class_weight_total, void* workspace,
                                           size_t workspace_bytes, void* stream);
/* Does flce_kernel_backward of a layer without shards; grad_hidden, which all ranks ask for or none, is the sum over ranks. */
FLCE_API flce_status flce_parallel_backward(const flce_parallel* parallel, const flce_backward_args* args, void* workspace,
                                            size_t workspace_bytes, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* FLCE_PARALLEL_H_ */
