#include "tests/support/kernel_run.hpp"
#include "tests/support/number_formats.hpp"

namespace flce::test {

/// Rows past the vocabulary have the largest codes and scales.
void KernelRun::add_quantized_weight() {
    constexpr float kLargeScale = 6e4F;
    const Spec& spec = problem_.spec;
    const bool nvfp4 = spec.weight_format == WeightFormat::nvfp4;
    const auto padded = static_cast<std::size_t>(held_.padded_vocab_size);
    std::vector<std::byte> codes = problem_.codes.codes;
    codes.resize(padded * static_cast<std::size_t>(weight_row_bytes(spec)), nvfp4 ? std::byte{0x77} : std::byte{0x7e});
    input("weight", std::move(codes), 16);
    if (nvfp4) {
        std::vector<std::byte> groups = problem_.codes.groups;
        groups.resize(padded * static_cast<std::size_t>(spec.hidden_size / kNvfp4Group), std::byte{0x7e});
        input("weight_scale", std::move(groups), 1);
        input("weight_tensor_scale", encode({problem_.codes.tensor_scale}, DType::fp32), 4);
        return;
    }
    std::vector<float> scales = problem_.codes.scales;
    const ExpectedShape shape = shape_of(Extent::weight_scale, spec, sizes_);
    scales.resize(static_cast<std::size_t>(shape.rows * (shape.ndim == 2 ? shape.columns : 1)), kLargeScale);
    input("weight_scale", encode(scales, DType::fp32), 4);
}

}  // namespace flce::test
