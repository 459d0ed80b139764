// The loss of four tokens and its gradients, on the CPU: a Spec, its kernel, forward, backward.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <flce/buffer.hpp>
#include <flce/flce.hpp>
#include <vector>

int main() {
    constexpr std::int64_t N = 4, D = 64, V = 1000;
    std::vector<float> hidden(N * D, 0.5F), weight(V * D, 0.01F), grad_hidden(N * D), grad_weight(V * D), lse(N);
    std::vector<std::int64_t> target{1, 2, 3, -100};
    float loss = 0;

    using flce::ScalarType, flce::TensorView;
    const TensorView h = TensorView::matrix(hidden.data(), ScalarType::fp32, N, D),
                     w = TensorView::matrix(weight.data(), ScalarType::fp32, V, D);
    const TensorView t = TensorView::vector(target.data(), ScalarType::int64, N), l = TensorView::vector(lse.data(), ScalarType::fp32, N);
    const TensorView dh = TensorView::matrix(grad_hidden.data(), ScalarType::fp32, N, D);
    const TensorView dw = TensorView::matrix(grad_weight.data(), ScalarType::fp32, V, D);

    flce::Session session({.device = "cpu"});
    const auto kernel = session.get_kernel(flce::parse_spec("D=64,V=1000,dtype=fp32"));
    const flce::Buffer scratch({}, kernel->workspace_bytes(N));
    const flce::Workspace workspace{scratch.data(), scratch.bytes()};
    kernel->forward({.hidden = h, .weight = w, .target = t, .loss = TensorView::scalar(&loss, ScalarType::fp32), .lse = l}, workspace);
    kernel->backward({.hidden = h, .weight = w, .target = t, .lse = l, .grad_hidden = dh, .grad_weight = dw}, workspace);

    // Every logit is the same, so the loss is ln V, and the weight's row of a label that one of the three tokens has receives (1/V − 1/3)
    // · hidden.
    const double expected_loss = std::log(double{V}), expected_grad = (1.0 / V - 1.0 / 3.0) * 0.5;
    std::printf("loss %.6f (ln V: %.6f), gradient of a label's row %.6f (%.6f)\n", loss, expected_loss, grad_weight[1 * D], expected_grad);
    return std::abs(loss - expected_loss) < 1e-5 && std::abs(grad_weight[1 * D] - expected_grad) < 1e-6 ? 0 : 1;
}
