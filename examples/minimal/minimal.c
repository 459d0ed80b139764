/* minimal.cpp again, through the C ABI. */
#include <flce/flce.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 4, D = 64, V = 1000 };
static float hidden[N * D], weight[V * D], grad_hidden[N * D], grad_weight[V * D], lse[N], loss;
static int64_t target[N] = {1, 2, 3, -100};

static void check(flce_status status) {
    if (status == FLCE_OK) return;
    fprintf(stderr, "%s\n", flce_last_error());
    exit(1);
}

/* A contiguous tensor; its strides are in elements. */
static flce_tensor tensor(void* data, int32_t dtype, int32_t ndim, int64_t rows, int64_t columns) {
    flce_tensor t = {data, dtype, ndim, {rows, columns}, {ndim == 2 ? columns : 1, 1}, FLCE_CPU, 0};
    return t;
}

int main(void) {
    for (int i = 0; i < N * D; ++i) hidden[i] = 0.5F;
    for (int i = 0; i < V * D; ++i) weight[i] = 0.01F;
    flce_tensor h = tensor(hidden, FLCE_FP32, 2, N, D), w = tensor(weight, FLCE_FP32, 2, V, D), t = tensor(target, FLCE_INT64, 1, N, 0);
    flce_tensor l = tensor(&loss, FLCE_FP32, 0, 0, 0), s = tensor(lse, FLCE_FP32, 1, N, 0);
    flce_tensor dh = tensor(grad_hidden, FLCE_FP32, 2, N, D), dw = tensor(grad_weight, FLCE_FP32, 2, V, D);

    flce_session_options options = FLCE_SESSION_OPTIONS_INIT;
    flce_session* session = NULL;
    flce_kernel* kernel = NULL;
    size_t bytes = 0;
    options.device = "cpu";
    check(flce_session_create(&options, &session));
    check(flce_get_kernel(session, "D=64,V=1000,dtype=fp32", NULL, &kernel));
    check(flce_kernel_workspace_bytes(kernel, N, FLCE_FORWARD_BACKWARD, &bytes));
    /* Aligned to 256 bytes, in C99, which has no aligned_alloc. */
    char* memory = malloc(bytes + 255);
    if (!memory) return 1;
    void* workspace = memory + (256 - (uintptr_t)memory % 256) % 256;

    flce_forward_args forward = FLCE_FORWARD_ARGS_INIT;
    forward.hidden = &h, forward.weight = &w, forward.target = &t, forward.loss = &l, forward.lse = &s;
    check(flce_kernel_forward(kernel, &forward, workspace, bytes, NULL));
    flce_backward_args backward = FLCE_BACKWARD_ARGS_INIT;
    backward.hidden = &h, backward.weight = &w, backward.target = &t, backward.lse = &s, backward.grad_hidden = &dh,
    backward.grad_weight = &dw;
    check(flce_kernel_backward(kernel, &backward, workspace, bytes, NULL));

    const double expected_loss = log(V), expected_grad = (1.0 / V - 1.0 / 3.0) * 0.5;
    printf("loss %.6f (ln V: %.6f), gradient of a label's row %.6f (%.6f)\n", loss, expected_loss, grad_weight[1 * D], expected_grad);
    free(memory);
    flce_kernel_release(kernel);
    flce_session_release(session);
    return fabs(loss - expected_loss) < 1e-5 && fabs(grad_weight[1 * D] - expected_grad) < 1e-6 ? 0 : 1;
}
