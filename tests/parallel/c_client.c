/* flce/parallel.h from C: one rank, host memory. */
#include "tests/parallel/c_client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flce/parallel.h"

#define CHECK(condition)                                                                          \
    if (!(condition)) {                                                                           \
        snprintf(failure, capacity, "line %d: %s (%s)", __LINE__, #condition, flce_last_error()); \
        return 1;                                                                                 \
    }

enum { TOKENS = 6, HIDDEN = 8, CLASSES = 12 };

struct counts {
    int gathers;
    int reductions;
    int status;
};

static int32_t gather(void* user, const void* part, void* all, size_t bytes, void* stream) {
    struct counts* counts = user;
    (void)stream;
    counts->gathers++;
    memcpy(all, part, bytes);
    return counts->status;
}

static int32_t reduce(void* user, void* data, int64_t count, int32_t dtype, void* stream) {
    struct counts* counts = user;
    (void)data, (void)stream;
    counts->reductions++;
    return count == TOKENS * HIDDEN && dtype == FLCE_FP32 ? counts->status : -1;
}

static flce_tensor tensor(void* data, int32_t dtype, int32_t ndim, int64_t rows, int64_t columns) {
    flce_tensor made;
    memset(&made, 0, sizeof(made));
    made.data = data, made.dtype = dtype, made.ndim = ndim, made.device_type = FLCE_CPU;
    made.shape[0] = rows, made.shape[1] = columns;
    made.strides[0] = ndim == 2 ? columns : 1, made.strides[1] = 1;
    return made;
}

int run_parallel_client(char* failure, size_t capacity) {
    static _Alignas(16) float hidden[TOKENS * HIDDEN], weight[CLASSES * HIDDEN], grad_hidden[TOKENS * HIDDEN],
        grad_weight[CLASSES * HIDDEN];
    static float lse[TOKENS], loss, expected_lse[TOKENS], expected;
    static int64_t target[TOKENS];
    for (int i = 0; i < TOKENS * HIDDEN; ++i) hidden[i] = (float)(i % 7) * 0.25f - 0.5f;
    for (int i = 0; i < CLASSES * HIDDEN; ++i) weight[i] = (float)(i % 5) * 0.5f - 1.0f;
    for (int i = 0; i < TOKENS; ++i) target[i] = i * 2;

    flce_session_options options = FLCE_SESSION_OPTIONS_INIT;
    options.device = "cpu", options.no_disk_cache = 1;
    flce_session* session = NULL;
    CHECK(flce_session_create(&options, &session) == FLCE_OK);
    flce_kernel *whole = NULL, *shard = NULL;
    CHECK(flce_get_kernel(session, "D=8,V=12,dtype=fp32", NULL, &whole) == FLCE_OK);
    CHECK(flce_get_kernel(session, "D=8,V=12,whole_vocab_size=12,dtype=fp32", NULL, &shard) == FLCE_OK);

    flce_tensor h = tensor(hidden, FLCE_FP32, 2, TOKENS, HIDDEN), w = tensor(weight, FLCE_FP32, 2, CLASSES, HIDDEN);
    flce_tensor t = tensor(target, FLCE_INT64, 1, TOKENS, 0), l = tensor(&loss, FLCE_FP32, 0, 0, 0);
    flce_tensor s = tensor(lse, FLCE_FP32, 1, TOKENS, 0), dh = tensor(grad_hidden, FLCE_FP32, 2, TOKENS, HIDDEN);
    flce_tensor dw = tensor(grad_weight, FLCE_FP32, 2, CLASSES, HIDDEN);
    flce_forward_args forward = FLCE_FORWARD_ARGS_INIT;
    forward.hidden = &h, forward.weight = &w, forward.target = &t, forward.loss = &l, forward.lse = &s;
    size_t bytes = 0;
    CHECK(flce_kernel_workspace_bytes(whole, TOKENS, FLCE_FORWARD_BACKWARD, &bytes) == FLCE_OK);
    void* memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    CHECK(flce_kernel_forward(whole, &forward, memory, bytes, NULL) == FLCE_OK);
    expected = loss;
    memcpy(expected_lse, lse, sizeof(lse));
    free(memory);

    struct counts counts = {0, 0, 0};
    flce_communicator ranks = FLCE_COMMUNICATOR_INIT;
    flce_parallel* parallel = NULL;
    CHECK(flce_parallel_create(shard, &ranks, NULL, &parallel) == FLCE_ERROR_ARGUMENT && parallel == NULL);
    ranks.user = &counts, ranks.all_gather = gather, ranks.all_reduce = reduce;
    CHECK(flce_parallel_create(whole, &ranks, NULL, &parallel) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_parallel_create(shard, &ranks, NULL, &parallel) == FLCE_OK);
    flce_kernel_release(shard);
    CHECK(flce_parallel_workspace_bytes(parallel, TOKENS, &bytes) == FLCE_OK);
    memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    loss = -1;
    CHECK(flce_parallel_forward(parallel, &forward, NULL, NULL, memory, bytes, NULL) == FLCE_OK);
    CHECK(counts.gathers == 1 && loss == expected && memcmp(lse, expected_lse, sizeof(lse)) == 0);
    flce_backward_args backward = FLCE_BACKWARD_ARGS_INIT;
    backward.hidden = &h, backward.weight = &w, backward.target = &t, backward.lse = &s;
    backward.grad_hidden = &dh, backward.grad_weight = &dw;
    CHECK(flce_parallel_backward(parallel, &backward, memory, bytes, NULL) == FLCE_OK);
    CHECK(counts.reductions == 1);
    counts.status = 9;
    CHECK(flce_parallel_forward(parallel, &forward, NULL, NULL, memory, bytes, NULL) == FLCE_ERROR_DEVICE);
    CHECK(strstr(flce_last_error(), "all_gather of the communicator failed with 9") != NULL);
    free(memory);
    flce_parallel_release(parallel);
    flce_kernel_release(whole);
    flce_session_release(session);
    return 0;
}
