// Checks that the tuner makes of a candidate's results before it times them.
#include "autotune/measured_layer.hpp"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <tuple>

#include "runtime/layer/number_formats.hpp"
#include "tests/autotune/documented_bounds.hpp"
#include "tests/cache/cache_test_support.hpp"

namespace flce {
namespace {

using namespace test;

class TunerJudges : public testing::TestWithParam<DType> {
protected:
    TunerJudges() {
        options_.spec =
            parse_spec("D=16,V=300,bias,outputs=loss+lse+logprobs+entropy,z_loss=0.001,dtype=" + std::string(to_string(GetParam())))
                .normalized();
        options_.session.device = "cpu";
        options_.session.cache_dir = folder_.path();
        options_.session.threads = 1;
        options_.num_tokens = 40;
        options_.retain = false;
    }

    /// Why a result is refused in which `output` is off by `relative`, in row `row` alone or in all of them.
    std::string refused(MeasuredLayer& layer, Tensor LayerOutputs::* output, double relative, std::int64_t row = -1) const {
        const DType dtype =
            output == &LayerOutputs::grad_hidden || output == &LayerOutputs::grad_weight || output == &LayerOutputs::grad_bias
                ? GetParam()
                : DType::fp32;
        layer.spoil_results([&](LayerOutputs& outputs) {
            Tensor& tensor = outputs.*output;
            auto bytes = tensor.to_host<std::byte>();
            std::vector<float> values(bytes.size() / element_bytes(dtype));
            to_real(bytes.data(), dtype, values.data(), values.size());
            const std::size_t width = row < 0 ? values.size() : static_cast<std::size_t>(options_.spec.hidden_size);
            const std::size_t first = row < 0 ? 0 : static_cast<std::size_t>(row) * width;
            for (std::size_t i = first; i < first + width; ++i) values[i] *= static_cast<float>(1 + relative);
            from_float(values.data(), dtype, bytes.data(), values.size());
            tensor.buffer.upload(bytes.data(), bytes.size());
        });
        return layer.check("").wrong;
    }

    TemporaryDirectory folder_;
    MeasuredLayerOptions options_;
};

// A sample's bound is twice that of the whole.
TEST_P(TunerJudges, FirstPlan_HeldAgainstFp64) {
    const double product_norm = 2 * std::sqrt(16.0);
    const double lse = output_floor(product_norm, 7);
    const double gradient = GetParam() == DType::fp32 ? gradient_floor(DType::fp32, product_norm) : gradient_cap(GetParam());
    const auto fresh = [&](Tensor LayerOutputs::* output, double relative) {
        MeasuredLayer layer(options_);
        return refused(layer, output, relative);
    };
    for (const auto& [name, output, bound] : {std::tuple{"lse", &LayerOutputs::lse, 2 * lse},
                                              {"grad_hidden", &LayerOutputs::grad_hidden, 2 * gradient},
                                              {"grad_weight", &LayerOutputs::grad_weight, 2 * gradient}}) {
        EXPECT_EQ(fresh(output, kPasses * bound), "") << name;
        EXPECT_TRUE(fresh(output, kRefused * bound).starts_with(std::string(name) + " is off by")) << name;
    }
}

TEST_P(TunerJudges, LaterPlans_HeldAgainstTheFirst) {
    MeasuredLayer layer(options_);
    ASSERT_EQ(layer.check("").wrong, "");
    ASSERT_EQ(layer.check("").wrong, "");
    const double output = 10 * output_cap(GetParam());
    const double gradient = 3 * gradient_cap(GetParam());
    for (const auto& [name, tensor, bound] : {std::tuple{"loss", &LayerOutputs::loss, output},
                                              {"z_loss", &LayerOutputs::z_loss, output},
                                              {"logprobs", &LayerOutputs::logprobs, output},
                                              {"entropy", &LayerOutputs::entropy, output},
                                              {"grad_weight", &LayerOutputs::grad_weight, gradient},
                                              {"grad_bias", &LayerOutputs::grad_bias, gradient}}) {
        EXPECT_EQ(refused(layer, tensor, kPasses * bound), "") << name;
        EXPECT_TRUE(refused(layer, tensor, kRefused * bound).starts_with(std::string(name) + " differs from another plan's")) << name;
    }
}

// A row off by a quarter is none that is rounded otherwise, though the whole hardly shows it. Rows are compared at both ends, and every
// 127th.
class TunerJudgesRows : public TunerJudges {};
TEST_P(TunerJudgesRows, OneRowWrong_RefusedThoughTheWholeIsNear) {
    options_.spec = parse_spec("D=16,V=4000,dtype=bf16").normalized();
    options_.num_tokens = 8;
    MeasuredLayer layer(options_);
    std::map<double, std::int64_t> rows;  // by their squared norms
    double all = 0;
    layer.spoil_results([&](LayerOutputs& outputs) {
        const auto bytes = outputs.grad_weight.to_host<std::byte>();
        std::vector<float> values(bytes.size() / 2);
        to_real(bytes.data(), DType::bf16, values.data(), values.size());
        for (std::int64_t row = 0; row < 4000; ++row) {
            if (row >= 8 && row < 4000 - 8 && row % 127 != 0) continue;
            const auto first = values.begin() + row * 16;
            const double square = std::inner_product(first, first + 16, first, 0.0);
            rows[square] = row;
            all += square;
        }
    });
    ASSERT_EQ(layer.check("").wrong, "");
    const auto small = *rows.lower_bound(0.0012 * all / static_cast<double>(rows.size()));
    ASSERT_LT(std::sqrt(small.first / all) * kRefused * 0.25, 3 * gradient_cap(DType::bf16));
    EXPECT_NE(refused(layer, &LayerOutputs::grad_weight, kRefused * 0.25, small.second), "");
    EXPECT_EQ(refused(layer, &LayerOutputs::grad_weight, kPasses * 0.25, small.second), "");
}

TEST_P(TunerJudges, NothingWritten_Refused) {
    MeasuredLayer layer(options_);
    layer.spoil_results([](LayerOutputs& outputs) { outputs.grad_hidden.buffer.fill(std::byte{0xff}); });
    EXPECT_NE(layer.check("").wrong, "");
    EXPECT_EQ(layer.check("").wrong, "") << "a wrong result has become the one that others are held against";
}

// fp16's rows may be subnormal, and fp32's whole shows a row.
INSTANTIATE_TEST_SUITE_P(Dtypes, TunerJudgesRows, testing::Values(DType::bf16),
                         [](const auto& info) { return std::string(to_string(info.param)); });
INSTANTIATE_TEST_SUITE_P(Dtypes, TunerJudges, testing::Values(DType::bf16, DType::fp16, DType::fp32),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace flce
