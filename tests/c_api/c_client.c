#include "tests/c_api/c_client.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flce/flce.h"

#define CHECK(condition)                                                                            \
    do {                                                                                            \
        if (!(condition)) {                                                                         \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, flce_last_error()); \
            return __LINE__;                                                                        \
        }                                                                                           \
    } while (0)

enum { kTokens = 5, kHidden = 8, kVocab = 11 };
static const char* const kSpec = "D=8,V=11,dtype=fp32";

static flce_tensor scalar(void* data, int32_t dtype) {
    flce_tensor tensor = {0};
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.device_type = FLCE_CPU;
    return tensor;
}

static flce_tensor vector(void* data, int32_t dtype, int64_t size) {
    flce_tensor tensor = scalar(data, dtype);
    tensor.ndim = 1;
    tensor.shape[0] = size;
    tensor.strides[0] = 1;
    return tensor;
}

static flce_tensor matrix(void* data, int32_t dtype, int64_t rows, int64_t columns) {
    flce_tensor tensor = scalar(data, dtype);
    tensor.ndim = 2;
    tensor.shape[0] = rows;
    tensor.shape[1] = columns;
    tensor.strides[0] = columns;
    tensor.strides[1] = 1;
    return tensor;
}

static flce_status open_session(const char* cache_dir, flce_session** session) {
    flce_session_options options = FLCE_SESSION_OPTIONS_INIT;
    options.device = "cpu";
    options.cache_dir = cache_dir;
    options.threads = 1;
    return flce_session_create(&options, session);
}

/* With a weight of zeros every class has probability 1/V: loss = ln V, and the gradient of the weight has a closed form. */
int c_client_trains_on_cpu(const char* cache_dir) {
    flce_session* session = NULL;
    flce_kernel* kernel = NULL;
    CHECK(flce_abi_version() == FLCE_ABI_VERSION);
    CHECK(flce_token_bucket(100) == 64 && flce_token_bucket(129) == 256 && flce_token_bucket(0) == 4096);
    CHECK(open_session(cache_dir, &session) == FLCE_OK);
    CHECK(flce_get_kernel(session, kSpec, NULL, &kernel) == FLCE_OK);
    flce_session_release(session); /* the kernel outlives it */

    _Alignas(16) float hidden[kTokens][kHidden];
    _Alignas(16) float weight[kVocab][kHidden] = {{0}};
    _Alignas(16) float grad_hidden[kTokens][kHidden];
    _Alignas(16) float grad_weight[kVocab][kHidden];
    int64_t target[kTokens] = {0, 10, -100, 3, 3};
    float loss = -1, lse[kTokens];
    uint64_t invalid = UINT64_MAX;
    for (int i = 0; i < kTokens * kHidden; ++i) hidden[i / kHidden][i % kHidden] = 0.125f * (float)(i % 7 - 3);

    const flce_tensor t_hidden = matrix(hidden, FLCE_FP32, kTokens, kHidden), t_weight = matrix(weight, FLCE_FP32, kVocab, kHidden);
    const flce_tensor t_grad_hidden = matrix(grad_hidden, FLCE_FP32, kTokens, kHidden);
    const flce_tensor t_grad_weight = matrix(grad_weight, FLCE_FP32, kVocab, kHidden);
    const flce_tensor t_target = vector(target, FLCE_INT64, kTokens), t_lse = vector(lse, FLCE_FP32, kTokens);
    const flce_tensor t_loss = scalar(&loss, FLCE_FP32), t_invalid = scalar(&invalid, FLCE_UINT64);

    size_t bytes = 0;
    CHECK(flce_kernel_workspace_bytes(kernel, kTokens, FLCE_FORWARD_BACKWARD, &bytes) == FLCE_OK);
    void* const workspace = aligned_alloc(256, (bytes + 511) / 256 * 256);
    CHECK(workspace != NULL);

    flce_forward_args forward = FLCE_FORWARD_ARGS_INIT;
    forward.hidden = &t_hidden;
    forward.weight = &t_weight;
    forward.target = &t_target;
    forward.loss = &t_loss;
    forward.lse = &t_lse;
    forward.invalid_label = &t_invalid;
    CHECK(loss == -1);
    CHECK(flce_kernel_forward(kernel, &forward, workspace, bytes, NULL) == FLCE_OK);
    CHECK(fabs(loss - log(kVocab)) < 1e-5);
    CHECK(fabs(lse[0] - log(kVocab)) < 1e-5 && lse[2] == 0);
    CHECK(flce_kernel_check_invalid_label(kernel, invalid) == FLCE_OK);

    flce_backward_args backward = FLCE_BACKWARD_ARGS_INIT;
    backward.hidden = &t_hidden;
    backward.weight = &t_weight;
    backward.target = &t_target;
    backward.lse = &t_lse;
    backward.grad_hidden = &t_grad_hidden;
    backward.grad_weight = &t_grad_weight;
    backward.hidden_ready = 2;
    CHECK(flce_kernel_backward(kernel, &backward, workspace, bytes, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(strstr(flce_last_error(), "hidden_ready is 2") != NULL);
    backward.hidden_ready = 1; /* nothing else in a call that is not cut in two */
    CHECK(flce_kernel_backward(kernel, &backward, workspace, bytes, NULL) == FLCE_OK);
    for (int v = 0; v < kVocab; ++v) {
        for (int d = 0; d < kHidden; ++d) {
            double expected = 0;
            for (int n = 0; n < kTokens; ++n) {
                if (target[n] != -100) expected += (1.0 / kVocab - (target[n] == v)) * hidden[n][d] / (kTokens - 1);
            }
            CHECK(fabs(grad_weight[v][d] - expected) < 1e-6);
        }
    }
    for (int n = 0; n < kTokens; ++n) CHECK(grad_hidden[n][0] == 0);

    /* Logits wait for backward in grad_weight: the same gradients. */
    float expected_grad[kVocab][kHidden];
    memcpy(expected_grad, grad_weight, sizeof grad_weight);
    CHECK(flce_kernel_retained_bytes(kernel, kTokens, FLCE_RETAINED_OWN, &backward.retained_bytes) == FLCE_OK);
    CHECK(backward.retained_bytes == 4 * kTokens * kVocab);
    CHECK(flce_kernel_retained_bytes(kernel, kTokens, FLCE_RETAINED_GRAD_WEIGHT, &backward.retained_bytes) == FLCE_OK);
    CHECK(backward.retained_bytes == sizeof grad_weight);
    flce_retain_options retain = FLCE_RETAIN_OPTIONS_INIT;
    int32_t place = -1;
    size_t chosen = 1;
    CHECK(flce_kernel_choose_retained(kernel, kTokens, NULL, &place, &chosen) == FLCE_OK &&
          chosen == 0); /* too small a layer to retain anything */
    retain.least_work = 1;
    CHECK(flce_kernel_choose_retained(kernel, kTokens, &retain, &place, &chosen) == FLCE_OK);
    CHECK(place == FLCE_RETAINED_GRAD_WEIGHT && chosen == backward.retained_bytes);
    retain.retain_in_grad_weight = 2;
    CHECK(flce_kernel_choose_retained(kernel, kTokens, &retain, &place, &chosen) == FLCE_ERROR_ARGUMENT);
    retain.retain_in_grad_weight = -1;
    CHECK(flce_kernel_choose_retained(kernel, kTokens, &retain, &place, &chosen) == FLCE_OK && chosen == 0);
    retain.workspace_limit_bytes = 1 << 30;
    CHECK(flce_kernel_choose_retained(kernel, kTokens, &retain, &place, &chosen) == FLCE_OK);
    CHECK(place == FLCE_RETAINED_OWN && chosen == 4 * kTokens * kVocab);
    retain.least_work = -1;
    CHECK(flce_kernel_choose_retained(kernel, kTokens, &retain, &place, &chosen) == FLCE_ERROR_ARGUMENT);
    int32_t late = 7;
    CHECK(flce_kernel_reads_hidden_late(kernel, kTokens, FLCE_RETAINED_OWN, 1 << 20, 0, &late) == FLCE_OK && late == 0);
    CHECK(flce_kernel_reads_hidden_late(kernel, kTokens, 2, 1 << 20, 0, &late) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_reads_hidden_late(kernel, kTokens, FLCE_RETAINED_OWN, 1 << 20, 0, NULL) == FLCE_ERROR_ARGUMENT);
    forward.retained = grad_weight;
    forward.retained_bytes = backward.retained_bytes;
    forward.retained_place = FLCE_RETAINED_GRAD_WEIGHT;
    backward.retained = grad_weight;
    CHECK(flce_kernel_backward(kernel, &backward, workspace, bytes, NULL) == FLCE_ERROR_ARGUMENT); /* its own memory is not grad_weight's */
    CHECK(strstr(flce_last_error(), "overlaps") != NULL);
    backward.retained_place = 2;
    CHECK(flce_kernel_backward(kernel, &backward, workspace, bytes, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(strstr(flce_last_error(), "retained_place") != NULL);
    backward.retained_place = FLCE_RETAINED_GRAD_WEIGHT;
    CHECK(flce_kernel_forward(kernel, &forward, workspace, bytes, NULL) == FLCE_OK);
    CHECK(memcmp(grad_weight, expected_grad, sizeof grad_weight) != 0);
    CHECK(flce_kernel_backward(kernel, &backward, workspace, bytes, NULL) == FLCE_OK);
    CHECK(memcmp(grad_weight, expected_grad, sizeof grad_weight) == 0);
    /* A caller compiled before there was a place gets equal results. */
    forward.struct_size = offsetof(flce_forward_args, retained_place);
    backward.struct_size = offsetof(flce_backward_args, retained_place);
    memset(grad_weight, 0, sizeof grad_weight);
    CHECK(flce_kernel_forward(kernel, &forward, workspace, bytes, NULL) == FLCE_OK);
    CHECK(flce_kernel_backward(kernel, &backward, workspace, bytes, NULL) == FLCE_OK);
    CHECK(memcmp(grad_weight, expected_grad, sizeof grad_weight) == 0);
    forward.struct_size = sizeof forward;
    backward.struct_size = sizeof backward;
    backward.retained = NULL; /* its bytes without it */
    CHECK(flce_kernel_backward(kernel, &backward, workspace, bytes, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(strstr(flce_last_error(), "retained") != NULL);
    forward.retained = NULL;
    forward.retained_bytes = 0;
    forward.retained_place = FLCE_RETAINED_OWN;

    /* A caller compiled before these fields were there. */
    backward.struct_size = offsetof(flce_backward_args, retained);
    CHECK(flce_kernel_backward(kernel, &backward, workspace, bytes, NULL) == FLCE_OK);
    forward.struct_size = offsetof(flce_forward_args, retained);
    CHECK(flce_kernel_forward(kernel, &forward, workspace, bytes, NULL) == FLCE_OK);

    target[3] = kVocab; /* out of range */
    CHECK(flce_kernel_forward(kernel, &forward, workspace, bytes, NULL) == FLCE_OK);
    CHECK(invalid == 3);
    CHECK(flce_kernel_check_invalid_label(kernel, invalid) == FLCE_ERROR_ARGUMENT);
    CHECK(strstr(flce_last_error(), "target[3]") != NULL && strstr(flce_last_error(), "0 to 10") != NULL);

    forward.lse = NULL;
    CHECK(flce_kernel_forward(kernel, &forward, workspace, bytes, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(strcmp(flce_last_error(), "forward: lse is absent; it must be fp32 [num_tokens]") == 0);

    flce_kernel_retain(kernel);
    flce_kernel_release(kernel);
    flce_kernel_release(kernel);
    free(workspace);
    return 0;
}

/* Distillation: a teacher's probabilities times ln V, and its classes in the gradient of the weight. */
int c_client_distils_on_cpu(const char* cache_dir) {
    enum { kClasses = 2 };
    flce_session* session = NULL;
    flce_kernel* kernel = NULL;
    CHECK(open_session(cache_dir, &session) == FLCE_OK);
    CHECK(flce_get_kernel(session, "D=8,V=11,dtype=fp32,teacher_top_k=2,hard_weight=0.25", NULL, &kernel) == FLCE_OK);
    flce_session_release(session);

    _Alignas(16) float hidden[kTokens][kHidden];
    _Alignas(16) float weight[kVocab][kHidden] = {{0}};
    _Alignas(16) float grad_weight[kVocab][kHidden];
    int64_t target[kTokens] = {0, 10, -100, 3, 3};
    int32_t ids[kTokens][kClasses] = {{4, 4}, {-1, 0}, {2, 3}, {kVocab, 5}, {-1, -1}};
    float probs[kTokens][kClasses] = {{0.5f, 0.25f}, {9, 1}, {1, 1}, {9, 0.5f}, {9, 9}};
    const double sums[kTokens] = {0.75, 1, 0, 0.5, 0};
    float loss = -1, lse[kTokens], logprobs[kTokens][kClasses];
    uint64_t invalid = UINT64_MAX;
    for (int i = 0; i < kTokens * kHidden; ++i) hidden[i / kHidden][i % kHidden] = 0.125f * (float)(i % 7 - 3);
    const flce_tensor t_hidden = matrix(hidden, FLCE_FP32, kTokens, kHidden), t_weight = matrix(weight, FLCE_FP32, kVocab, kHidden);
    const flce_tensor t_grad_weight = matrix(grad_weight, FLCE_FP32, kVocab, kHidden);
    const flce_tensor t_target = vector(target, FLCE_INT64, kTokens), t_lse = vector(lse, FLCE_FP32, kTokens);
    const flce_tensor t_ids = matrix(ids, FLCE_INT32, kTokens, kClasses), t_probs = matrix(probs, FLCE_FP32, kTokens, kClasses);
    const flce_tensor t_logprobs = matrix(logprobs, FLCE_FP32, kTokens, kClasses);
    const flce_tensor t_loss = scalar(&loss, FLCE_FP32), t_invalid = scalar(&invalid, FLCE_UINT64);
    size_t bytes = 0;
    CHECK(flce_kernel_workspace_bytes(kernel, kTokens, FLCE_FORWARD_BACKWARD, &bytes) == FLCE_OK);
    void* const workspace = aligned_alloc(256, (bytes + 511) / 256 * 256);
    CHECK(workspace != NULL);

    flce_forward_args forward = FLCE_FORWARD_ARGS_INIT;
    forward.hidden = &t_hidden;
    forward.weight = &t_weight;
    forward.target = &t_target;
    forward.reduction = FLCE_REDUCTION_SUM;
    forward.loss = &t_loss;
    forward.lse = &t_lse;
    forward.invalid_label = &t_invalid;
    forward.teacher_ids = &t_ids;
    forward.teacher_probs = &t_probs;
    CHECK(flce_kernel_forward(kernel, &forward, workspace, bytes, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(strstr(flce_last_error(), "teacher_logprobs is absent") != NULL);
    forward.teacher_logprobs = &t_logprobs;
    CHECK(flce_kernel_forward(kernel, &forward, workspace, bytes, NULL) == FLCE_OK);
    double expected_loss = 0;
    for (int n = 0; n < kTokens; ++n) expected_loss += (n == 2 ? 0 : 0.25 + 0.75 * sums[n]) * log(kVocab);
    CHECK(fabs(loss - expected_loss) < 1e-5);
    CHECK(fabs(logprobs[0][1] + log(kVocab)) < 1e-6 && logprobs[1][0] == 0 && logprobs[2][0] == 0 && logprobs[3][0] == 0);
    CHECK(invalid == 3);
    CHECK(flce_kernel_check_invalid_label(kernel, invalid) == FLCE_ERROR_ARGUMENT);
    CHECK(strstr(flce_last_error(), "teacher_ids[3]") != NULL);

    flce_backward_args backward = FLCE_BACKWARD_ARGS_INIT;
    backward.hidden = &t_hidden;
    backward.weight = &t_weight;
    backward.target = &t_target;
    backward.reduction = FLCE_REDUCTION_SUM;
    backward.lse = &t_lse;
    backward.grad_weight = &t_grad_weight;
    backward.teacher_ids = &t_ids;
    backward.teacher_probs = &t_probs;
    backward.teacher_logprobs = &t_logprobs;
    CHECK(flce_kernel_backward(kernel, &backward, workspace, bytes, NULL) == FLCE_OK);
    for (int v = 0; v < kVocab; ++v) {
        double expected = 0;
        for (int n = 0; n < kTokens; ++n) {
            if (target[n] == -100) continue;
            double dz = 0.25 * (1.0 / kVocab - (target[n] == v)) + 0.75 * sums[n] / kVocab;
            for (int k = 0; k < kClasses; ++k) dz -= ids[n][k] == v ? 0.75 * probs[n][k] : 0;
            expected += dz * hidden[n][1];
        }
        CHECK(fabs(grad_weight[v][1] - expected) < 1e-6);
    }
    flce_kernel_release(kernel);
    free(workspace);
    return 0;
}

int c_client_null_pointers_are_errors(const char* cache_dir) {
    flce_session* session = NULL;
    flce_kernel* kernel = NULL;
    size_t bytes = 0;
    int32_t type = 0, index = 0;
    char text[8];
    flce_statistics statistics = FLCE_STATISTICS_INIT;
    const flce_forward_args forward = FLCE_FORWARD_ARGS_INIT;
    const flce_backward_args backward = FLCE_BACKWARD_ARGS_INIT;
    CHECK(flce_session_create(NULL, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(strstr(flce_last_error(), "session is NULL") != NULL);
    CHECK(flce_session_default(NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(open_session(cache_dir, &session) == FLCE_OK);
    CHECK(flce_get_kernel(NULL, kSpec, NULL, &kernel) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_get_kernel(session, NULL, NULL, &kernel) == FLCE_ERROR_ARGUMENT);
    CHECK(strcmp(flce_last_error(), "spec is NULL") == 0);
    CHECK(flce_get_kernel(session, kSpec, NULL, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_prewarm(NULL, kSpec, "sm_90a", NULL, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_prewarm(session, NULL, "sm_90a", NULL, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_prewarm(session, kSpec, NULL, NULL, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_session_statistics(NULL, &statistics) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_session_statistics(session, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_session_device(NULL, &type, &index) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_session_device(session, NULL, &index) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_session_device(session, &type, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_session_device_json(NULL, text, sizeof text, &bytes) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_session_cache_dir(NULL, text, sizeof text, &bytes) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_spec_text(NULL, text, sizeof text, &bytes) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_spec_json(NULL, text, sizeof text, &bytes) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_workspace_bytes(NULL, 1, FLCE_FORWARD, &bytes) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_retained_bytes(NULL, 1, FLCE_RETAINED_OWN, &bytes) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_text(NULL, FLCE_TEXT_SPEC, text, sizeof text, &bytes) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_device(NULL, &type, &index) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_forward(NULL, &forward, NULL, 0, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_backward(NULL, &backward, NULL, 0, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_check_invalid_label(NULL, 0) == FLCE_ERROR_ARGUMENT);
    flce_session_release(NULL);
    flce_kernel_retain(NULL);
    flce_kernel_release(NULL);

    CHECK(flce_get_kernel(session, kSpec, NULL, &kernel) == FLCE_OK);
    CHECK(flce_kernel_workspace_bytes(kernel, 1, FLCE_FORWARD, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_workspace_bytes(kernel, -1, FLCE_FORWARD, &bytes) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_workspace_bytes(kernel, 1, 3, &bytes) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_retained_bytes(kernel, 1, FLCE_RETAINED_OWN, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_retained_bytes(kernel, 1, 2, &bytes) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_device(kernel, NULL, &index) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_forward(kernel, NULL, NULL, 0, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_backward(kernel, NULL, NULL, 0, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_kernel_forward(kernel, &forward, NULL, 0, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(strstr(flce_last_error(), "hidden is absent") != NULL);
    CHECK(flce_kernel_backward(kernel, &backward, NULL, 0, NULL) == FLCE_ERROR_ARGUMENT);
    flce_kernel_release(kernel);
    flce_session_release(session);
    return 0;
}

int c_client_text_sizes(void) {
    char text[64];
    size_t needed = 0, again = 0;
    const char* const spec = "V=11,D=8,dtype=fp32";
    CHECK(flce_spec_text(spec, NULL, 0, &needed) == FLCE_OK);
    CHECK(needed > 1 && needed <= sizeof text);
    CHECK(flce_spec_text(spec, text, needed, NULL) == FLCE_OK);
    CHECK(strlen(text) + 1 == needed);
    memset(text, 'x', sizeof text);
    CHECK(flce_spec_text(spec, text, needed - 1, &again) == FLCE_ERROR_ARGUMENT);
    CHECK(again == needed && text[0] == 'x');
    CHECK(flce_spec_text(spec, NULL, 5, &again) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_spec_text(spec, NULL, 0, NULL) == FLCE_ERROR_ARGUMENT);
    CHECK(flce_spec_text("D=8,V=11,colour=red", text, sizeof text, NULL) == FLCE_ERROR_SPEC);
    CHECK(strstr(flce_last_error(), "colour") != NULL);
    CHECK(flce_spec_json("{\"D\": 8, \"V\": 11, \"dtype\": \"fp32\"}", NULL, 0, &needed) == FLCE_OK);
    return 0;
}

int c_client_struct_sizes(const char* cache_dir) {
    flce_session* session = NULL;
    struct {
        flce_session_options known;
        int64_t future;
    } options = {FLCE_SESSION_OPTIONS_INIT, 0};
    options.known.device = "cpu";
    options.known.cache_dir = cache_dir;
    options.known.struct_size = 0;
    CHECK(flce_session_create(&options.known, &session) == FLCE_ERROR_ARGUMENT);
    CHECK(strstr(flce_last_error(), "options.struct_size is 0") != NULL);
    CHECK(session == NULL);
    options.known.struct_size = (size_t)-1;
    CHECK(flce_session_create(&options.known, &session) == FLCE_ERROR_ARGUMENT);
    options.known.struct_size = sizeof options;
    options.future = 1; /* a field that this library cannot honour */
    CHECK(flce_session_create(&options.known, &session) == FLCE_ERROR_ARGUMENT);
    options.future = 0;
    options.known.reserved = 1;
    CHECK(flce_session_create(&options.known, &session) == FLCE_ERROR_ARGUMENT);
    CHECK(strstr(flce_last_error(), "options.reserved is 1") != NULL);
    options.known.reserved = 0;
    options.known.num_records = 1; /* one record of none */
    CHECK(flce_session_create(&options.known, &session) == FLCE_ERROR_ARGUMENT);
    CHECK(strstr(flce_last_error(), "options.records is NULL") != NULL);
    options.known.struct_size = offsetof(flce_session_options, no_records); /* a caller from before they were */
    CHECK(flce_session_create(&options.known, &session) == FLCE_OK);
    flce_session_release(session);
    options.known.num_records = 0;
    options.known.struct_size = sizeof options;
    CHECK(flce_session_create(&options.known, &session) == FLCE_OK);

    flce_statistics statistics = FLCE_STATISTICS_INIT;
    CHECK(flce_session_statistics(session, &statistics) == FLCE_OK);
    CHECK(statistics.struct_size == sizeof statistics);
    statistics.struct_size = 8;
    CHECK(flce_session_statistics(session, &statistics) == FLCE_ERROR_ARGUMENT);
    flce_session_release(session);
    return 0;
}
