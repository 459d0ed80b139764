// Launches of an FP8 head whose weight is codes: what they read of it, by addresses.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "generator/planner.hpp"
#include "templates/fp8/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce {
namespace {

using test::Launched;
using test::Recorded;

struct CodesGpu {
    const char* name;
    const char* device;
    PlanPath path;
};
void PrintTo(const CodesGpu& gpu, std::ostream* out) { *out << gpu.name; }

struct CodesCase {
    const char* name;
    const char* options;
    std::int64_t tokens;
    double kept = 0;
    std::int64_t scratch = 64 << 20;
};
void PrintTo(const CodesCase& of, std::ostream* out) { *out << of.name; }

class Fp8CodesPrograms : public testing::TestWithParam<std::tuple<CodesGpu, CodesCase>> {
protected:
    const CodesGpu& gpu = std::get<0>(GetParam());
    const CodesCase& of = std::get<1>(GetParam());
    Spec spec = parse_spec(std::string("V=50257,fp8=e4m3,weight_dtype=e4m3,") + of.options).normalized();
    Device device = describe_device(gpu.device);
    Plan plan = path_plans(spec, device, gpu.path, {.scratch_bytes = of.scratch}).front();
    CudaProgram program = generate_cuda(spec, device, plan);
    CallSlots slots = call();

    CallSlots call() {
        CallSlots made = test::made_up_call(of.tokens, {Slot::grad_weight});
        const auto set = [&](Slot slot, std::int64_t value) { made[static_cast<std::size_t>(slot)] = value; };
        set(Slot::vocab_columns, columns());
        set(Slot::fp8_hidden_scale, std::bit_cast<std::int32_t>(static_cast<float>(spec.fp8_hidden_scale)));
        const auto bytes = static_cast<std::int64_t>(of.kept * static_cast<double>(evaluate(program.retained_bytes, made))) / 16 * 16;
        set(Slot::retained, bytes > 0 ? std::int64_t{1} << 50 : 0);
        set(Slot::retained_bytes, bytes);
        if (is_shard(spec)) set(Slot::stage, static_cast<std::int64_t>(StageCode::first));
        return made;
    }
    /// Classes of the call: fewer than a shard's most.
    [[nodiscard]] std::int64_t columns() const { return is_shard(spec) ? spec.vocab_size - 10001 : spec.vocab_size; }
    [[nodiscard]] std::int64_t slot_of(Slot slot) const { return slots[static_cast<std::size_t>(slot)]; }
    [[nodiscard]] std::int64_t weight_at(std::int64_t row) const { return slot_of(Slot::weight) + row * spec.hidden_size; }
    [[nodiscard]] std::int64_t scale_at(std::int64_t row) const { return slot_of(Slot::weight_scale) + row * 4; }
    static std::int64_t address(const void* at) { return reinterpret_cast<std::int64_t>(at); }

    /// Whether a launch of logits reads its columns' codes where the caller has them. Returns (first column, columns).
    template <class Matrix>
    static std::pair<std::int64_t, std::int64_t> columns_of(const Fp8LogitsOf<Matrix>& p) {
        return {p.first_column, p.columns};
    }
    std::pair<std::int64_t, std::int64_t> expect_own_codes(const Recorded& r) const {
        if (gpu.path == PlanPath::cuda_fp8_sm89) {
            const auto p = r.params<Fp8LogitsMmaParams>();
            EXPECT_EQ(address(p.weight_map.at), weight_at(p.first_column));
            EXPECT_EQ(p.weight_map.pitch, spec.hidden_size);
            return columns_of(p);
        }
        const auto p = r.params<Fp8LogitsParams>();
        const std::int64_t at = weight_at(p.first_column);
        const auto map = std::ranges::find(r.launch.maps, at, &test::InterpretedMap::address);
        EXPECT_TRUE(map != r.launch.maps.end()) << "no map of the caller's codes";
        if (map != r.launch.maps.end()) {
            EXPECT_EQ(map->row_bytes, spec.hidden_size);
            EXPECT_EQ(map->rows, p.columns);
        }
        return columns_of(p);
    }
    /// Looks at a launch that is not one of products.
    void expect_given(const Recorded& r) const {
        EXPECT_NE(r.kernel, "flce_fp8_both_codes");
        EXPECT_NE(r.kernel, "flce_grad_weight");
        EXPECT_NE(r.kernel, "flce_fp8_turn_hidden");
        if (r.kernel == "flce_fp8_codes") {
            EXPECT_EQ(address(r.params<Fp8CodesParams>().from), slot_of(Slot::hidden));
            EXPECT_EQ(r.params<Fp8CodesParams>().given_scale, static_cast<float>(spec.fp8_hidden_scale));
        }
        if (r.kernel == "flce_fp8_targets") {
            EXPECT_EQ(address(r.params<Fp8TargetsOfCodesParams>().class_scales), scale_at(0));
            EXPECT_EQ(r.params<Fp8TargetsOfCodesParams>().hidden_scale, static_cast<float>(spec.fp8_hidden_scale));
        }
        if (r.kernel == "flce_fp8_finish") {
            EXPECT_EQ(address(r.params<Fp8FinishOfCodesParams>().class_scales), scale_at(0));
        }
        if (r.kernel == "flce_smoothing_sums") {
            EXPECT_EQ(address(r.params<SmoothingSumsOfCodesParams>().class_scales), scale_at(0));
        }
    }
};

TEST_P(Fp8CodesPrograms, Forward_ReadsTheCallersCodesAndCopiesScales) {
    const Launched made = test::run(program, program.forward, slots);
    std::int64_t seen = 0;
    std::int64_t scaled = 0;  // the column whose scales the last launch has copied first
    const void* copies = nullptr;
    for (const Recorded& r : made) {
        expect_given(r);
        if (r.kernel == "flce_fp8_scales") {
            const auto p = r.params<Fp8GivenScalesParams>();
            scaled = (address(p.given) - scale_at(0)) / 4;
            copies = p.scales;
            EXPECT_EQ(p.largest, nullptr) << "no number is read in forward";
        }
        if (r.kernel != "flce_forward") continue;
        const auto [first, count] = expect_own_codes(r);
        EXPECT_EQ(first, scaled);
        seen = std::max(seen, first + count);
    }
    EXPECT_NE(copies, nullptr);
    EXPECT_EQ(seen, columns());
    EXPECT_LE(evaluate(program.forward_workspace_bytes, slots), of.scratch + workspace_of_tokens(spec, of.tokens).value());
    EXPECT_EQ(evaluate(program.lendable_bytes, slots), 0) << "there is no gradient of the weight";
}

TEST_P(Fp8CodesPrograms, Backward_TurnsEveryColumnOverOnceWithItsScales) {
    const Launched made = test::run(program, program.backward, slots);
    EXPECT_EQ(made.count("fp8_scales"), 1);
    std::int64_t turned = 0;
    bool has_largest = false;
    const float* scales = nullptr;
    for (const Recorded& r : made) {
        expect_given(r);
        if (r.kernel == "flce_fp8_scales") {
            const auto p = r.params<Fp8GivenScalesParams>();
            EXPECT_EQ(address(p.from), weight_at(0));
            EXPECT_EQ(address(p.given), scale_at(0));
            EXPECT_EQ(p.rows, columns());
            has_largest = p.largest != nullptr;
            scales = p.scales;
        }
        if (r.kernel == "flce_forward") (void)expect_own_codes(r);
        if (r.kernel != "flce_fp8_turn_weight") continue;
        const auto p = r.params<Fp8TurnParams>();
        EXPECT_TRUE(has_largest) << "the power of two is not known yet";
        EXPECT_EQ(address(p.from), weight_at(turned));
        EXPECT_EQ(p.factors, scales + turned);
        turned += p.rows;
    }
    EXPECT_EQ(turned, columns());
    EXPECT_LE(evaluate(program.backward_workspace_bytes, slots), of.scratch + workspace_of_tokens(spec, of.tokens).value());
}

TEST_P(Fp8CodesPrograms, BackwardOfABiasAlone_ReadsNoNumber) {
    slots[static_cast<std::size_t>(Slot::grad_hidden)] = 0;
    const Launched made = test::run(program, program.backward, slots);
    EXPECT_EQ(made.count("fp8_turn_weight") + made.count("grad_hidden") + made.count("fp8_finish"), 0);
    for (const Recorded& r : made) {
        if (r.kernel == "flce_fp8_scales") {
            EXPECT_EQ(r.params<Fp8GivenScalesParams>().largest, nullptr);
        }
    }
}

TEST_P(Fp8CodesPrograms, RetainedBytes_AreThoseOfRowsAloneWithoutABias) {
    const std::int64_t exponentials = of.tokens * columns();
    const std::int64_t bytes = evaluate(program.retained_bytes, slots);
    EXPECT_GE(bytes, exponentials * (spec.bias ? 2 : 1));
    EXPECT_LT(bytes, exponentials * (spec.bias ? 2 : 1) * 1.2);
}

// The cost model's view of them: two products with everything retained, three with nothing, and what a logit takes.
TEST_P(Fp8CodesPrograms, EverythingRetained_IsOneProductLess) {
    const double product = 2.0 * static_cast<double>(of.tokens) * static_cast<double>(spec.vocab_size * spec.hidden_size);
    EXPECT_NEAR(estimate_backward(spec, device, plan, of.tokens, 1.0).flops, product, 1e-6 * product);
    EXPECT_NEAR(estimate_backward(spec, device, plan, of.tokens, 0.0).flops, 2 * product, 1e-6 * product);
    EXPECT_EQ(retained_logit_bytes(spec, plan), spec.bias ? 2 : 1);
}

constexpr CodesGpu kCodesGpus[] = {{"H200", "h200", PlanPath::cuda_fp8}, {"L40s", "l40s", PlanPath::cuda_fp8_sm89}};
constexpr CodesCase kCodesCases[] = {{"Nothing", "D=2048,bias", 4096},
                                     {"All", "D=2048,bias", 4096, 1.0},
                                     {"NothingOfNoBias", "D=2048", 4096},
                                     {"AllOfNoBias", "D=2048", 4096, 1.0},
                                     {"HiddenScale", "D=2048,fp8_hidden_scale=0.25", 4096, 0.4},
                                     {"Part", "D=2048,bias,temperature", 4095, 0.4},
                                     {"Shard", "D=2048,bias,whole_vocab_size=90000", 4096},
                                     {"ShardAll", "D=528,whole_vocab_size=90000", 4096, 1.0},
                                     {"LittleScratch", "D=528,bias,label_smoothing=0.1", 333, 0.6, 4 << 20}};

INSTANTIATE_TEST_SUITE_P(All, Fp8CodesPrograms, testing::Combine(testing::ValuesIn(kCodesGpus), testing::ValuesIn(kCodesCases)),
                         [](const auto& info) { return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).name; });

}  // namespace
}  // namespace flce
