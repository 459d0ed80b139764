#include "generator/cuda/common/round_weight.hpp"

#include "generator/cuda/common/launch_builder.hpp"

namespace flce {

Statement round_weight_launch(const Spec& spec, const CudaSource& source, const Expr& first, const Expr& rows, const Expr& rounded) {
    const bool vocab_major = spec.layout == WeightLayout::vocab_major;
    const auto element = static_cast<std::int64_t>(element_bytes(weight_dtype(spec)));
    constexpr std::int64_t kElementsOfBlock = std::int64_t{8} * kRowThreads;
    const Expr squares = ceil_div(rows, kRoundedTile) * ceil_div(spec.hidden_size, kRoundedTile);
    const Expr blocks = vocab_major ? ceil_div(rows * spec.hidden_size, kElementsOfBlock) : squares;
    LaunchBuilder<RoundWeightParams> launch(source.kernel(KernelRole::round_weight), blocks);
    launch.set(&RoundWeightParams::weight, slot(Slot::weight) + first * (element * (vocab_major ? spec.hidden_size : 1)))
        .set(&RoundWeightParams::rounded, rounded)
        .set(&RoundWeightParams::rows, rows);
    return {If{less(0, slot(Slot::num_tokens)), {launch.build()}}};
}

}  // namespace flce
