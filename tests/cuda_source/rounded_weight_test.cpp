// Launches of a layer whose weight is fp32 under a 16-bit dtype: the vocabulary in stretches, each rounded before it is read, in little
// workspace.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "generator/planner.hpp"
#include "templates/common/output_params.cuh"
#include "templates/sm90/params.cuh"
#include "tests/support/interpreter.hpp"

namespace flce::rounded_weight_test {
namespace {

using test::interpret;
using test::InterpretedLaunch;
using test::InterpretedMap;

constexpr std::int64_t kHidden = 2048;
constexpr std::int64_t kVocab = 151936;
constexpr std::int64_t kStep = std::int64_t{1} << 44;
constexpr std::int64_t address(Slot slot) { return (static_cast<std::int64_t>(slot) + 1) * kStep; }

std::int64_t as_address(const void* pointer) { return reinterpret_cast<std::int64_t>(pointer); }

struct Recorded {
    std::string kernel;
    InterpretedLaunch launch;
    template <class Params>
    [[nodiscard]] Params params() const {
        Params p;
        EXPECT_EQ(launch.params.size(), sizeof(Params)) << kernel;
        std::memcpy(&p, launch.params.data(), sizeof p);
        return p;
    }
    /// Tensor map at `offset`.
    [[nodiscard]] InterpretedMap map(std::size_t offset) const {
        for (const InterpretedMap& m : launch.maps) {
            if (m.offset == offset) return m;
        }
        ADD_FAILURE() << kernel << " has no map at " << offset;
        return {};
    }
};

template <class Params>
std::size_t offset_of(TensorMap Params::* member) {
    static const Params params{};
    return static_cast<std::size_t>(as_address(&(params.*member)) - as_address(&params));
}

CallSlots call(std::int64_t num_tokens) {
    CallSlots slots{};
    for (const Slot slot : {Slot::hidden, Slot::weight, Slot::target, Slot::loss, Slot::lse, Slot::grad_hidden, Slot::grad_weight,
                            Slot::workspace, Slot::weight_scale, Slot::weight_tensor_scale}) {
        slots[static_cast<std::size_t>(slot)] = address(slot);
    }
    slots[static_cast<std::size_t>(Slot::num_tokens)] = num_tokens;
    slots[static_cast<std::size_t>(Slot::target_bits)] = 64;
    return slots;
}

std::vector<Recorded> launches(const CudaProgram& program, const LaunchProgram& pass, std::int64_t num_tokens) {
    std::vector<Recorded> result;
    interpret(
        pass, call(num_tokens),
        [&](const InterpretedLaunch& launch) { result.push_back({program.kernels[static_cast<std::size_t>(launch.kernel)].name, launch}); },
        [](std::int64_t, std::int64_t) {});
    return result;
}

/// Rows of the weight in the workspace, followed from launch to launch.
struct RoundedRows {
    std::int64_t at = 0;     ///< address
    std::int64_t first = 0;  ///< vocabulary row
    std::int64_t rows = 0;
};
RoundedRows rounded_by(const Recorded& launch) {
    const auto p = launch.params<RoundWeightParams>();
    const std::int64_t offset = as_address(p.weight) - address(Slot::weight);
    EXPECT_EQ(offset % (kHidden * 4), 0);
    EXPECT_GE(launch.launch.grid[0] * kRowThreads * 8, p.rows * kHidden);
    EXPECT_LT((launch.launch.grid[0] - 1) * kRowThreads * 8, p.rows * kHidden);
    return {as_address(p.rounded), offset / (kHidden * 4), p.rows};
}

struct Case {
    const char* device;
    std::int64_t scratch;
    std::int64_t num_tokens;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.device << ' ' << c.scratch << " bytes " << c.num_tokens << " tokens"; }

class RoundedWeight : public testing::TestWithParam<Case> {
protected:
    const Spec spec_ = parse_spec("D=2048,V=151936,weight_dtype=fp32");
    const Device device_ = describe_device(GetParam().device);
    const Plan plan_ = choose_plan(spec_, device_, {.scratch_bytes = GetParam().scratch});
    const CudaProgram program_ = generate_cuda(spec_, device_, plan_);
    const std::int64_t n_ = GetParam().num_tokens;
    const bool sm90_ = plan_.path == PlanPath::cuda_sm90a;

    [[nodiscard]] std::int64_t workspace_end(bool backward) const {
        return address(Slot::workspace) +
               evaluate(backward ? program_.backward_workspace_bytes : program_.forward_workspace_bytes, call(n_));
    }
};

TEST_P(RoundedWeight, Forward_ComputesEveryTokenOfEveryStretchAndMergesItInOrder) {
    RoundedRows weight;
    std::int64_t next_column = 0;
    std::int64_t rows = 0;
    std::int64_t forward_partials = 0;
    std::int64_t running = 0;
    std::int64_t finished = 0;
    bool pending = false;  // forward has written partial sums that nobody has read
    for (const Recorded& r : launches(program_, program_.forward, n_)) {
        if (r.kernel == "flce_round_weight") {
            EXPECT_EQ(rows, next_column == 0 ? 0 : n_);
            weight = rounded_by(r);
            EXPECT_EQ(weight.first, next_column);
            EXPECT_LE(weight.at + weight.rows * kHidden * 2, workspace_end(false));
            next_column += weight.rows;
            rows = 0;
        } else if (r.kernel.starts_with("flce_forward")) {
            EXPECT_FALSE(pending);
            pending = true;
            const auto check = [&](const auto& p) {
                EXPECT_EQ(as_address(p.weight), weight.at);
                EXPECT_EQ(p.first_column, weight.first);
                EXPECT_EQ(p.columns, weight.rows);
                forward_partials = as_address(p.partials);
            };
            if (sm90_) {
                const auto p = r.params<ForwardStretchSm90Params>();
                check(p);
                const InterpretedMap map = r.map(offset_of(&ForwardStretchSm90Params::weight_map));
                EXPECT_EQ(map.address, weight.at);
                EXPECT_EQ(map.rows, weight.rows);
                EXPECT_EQ(map.columns, kHidden);
            } else {
                check(r.params<ForwardStretchParams>());
                EXPECT_LE(r.launch.grid[1] * plan_.cuda.forward.block_n, weight.rows + plan_.cuda.forward.block_n - 1);
            }
        } else if (r.kernel == "flce_merge_stretch") {
            EXPECT_TRUE(pending);
            pending = false;
            const auto p = r.params<MergeStretchParams>();
            EXPECT_EQ(as_address(p.partials), forward_partials);
            EXPECT_EQ(p.first, weight.first == 0 ? 1 : 0);
            if (rows == 0 && weight.first == 0) running = as_address(p.running);
            EXPECT_EQ(as_address(p.running), running + rows * 4);
            EXPECT_LE(running + p.running_rows * 2 * 4, workspace_end(false));
            rows += p.rows;
        } else if (r.kernel == "flce_row_outputs") {
            EXPECT_EQ(next_column, kVocab);
            const auto p = r.params<RowOutputsParams>();
            EXPECT_EQ(as_address(p.found.partials), running + finished * 4);
            EXPECT_EQ(p.found.splits, 1);
            finished += p.rows;
        }
    }
    EXPECT_EQ(next_column, kVocab);
    EXPECT_EQ(rows, n_);
    EXPECT_EQ(finished, n_);
    EXPECT_LE(workspace_end(false) - address(Slot::workspace), GetParam().scratch + 4 * n_ * kHidden);
}

TEST_P(RoundedWeight, Backward_ReadsEveryChunkAsItWasRounded) {
    RoundedRows weight;
    std::int64_t next_column = 0;
    std::int64_t rows = 0;
    for (const Recorded& r : launches(program_, program_.backward, n_)) {
        if (r.kernel == "flce_backward_chunks") {  // it rounds by itself
            const auto p = r.params<RoundedChunksSm90Params>();
            next_column = p.first_column + p.columns;
            rows = p.rows;
        }
        const auto check_map = [&](std::size_t offset) {
            const InterpretedMap map = r.map(offset);
            EXPECT_EQ(map.address, weight.at) << r.kernel;
            EXPECT_EQ(map.rows, weight.rows) << r.kernel;
            EXPECT_EQ(map.columns, kHidden) << r.kernel;
        };
        if (r.kernel == "flce_round_weight") {
            EXPECT_EQ(rows, next_column == 0 ? 0 : n_);
            weight = rounded_by(r);
            EXPECT_EQ(weight.first, next_column);
            EXPECT_LE(weight.at + weight.rows * kHidden * 2, workspace_end(true));
            next_column += weight.rows;
            rows = 0;
        } else if (r.kernel == "flce_dlogits") {
            DlogitsParams p;
            std::memcpy(&p, r.launch.params.data(), sizeof p);
            EXPECT_EQ(as_address(p.weight), weight.at);
            EXPECT_EQ(p.first_column, weight.first);
            EXPECT_EQ(p.columns, weight.rows);
            rows += p.rows;
            if (sm90_) check_map(offset_of(&DlogitsSm90Params::weight_map));
        } else if (r.kernel == "flce_grad_hidden") {
            GradHiddenParams p;
            std::memcpy(&p, r.launch.params.data(), sizeof p);
            EXPECT_EQ(as_address(p.weight), weight.at);
            EXPECT_EQ(p.columns, weight.rows);
            if (sm90_) check_map(offset_of(&GradHiddenSm90Params::weight_map));
        }
    }
    EXPECT_EQ(next_column, kVocab);
    EXPECT_EQ(rows, n_);
    EXPECT_LE(workspace_end(true) - address(Slot::workspace), GetParam().scratch + 4 * n_ * kHidden);
}

INSTANTIATE_TEST_SUITE_P(Plans, RoundedWeight,
                         testing::Values(Case{"h100", 64 << 20, 100}, Case{"h100", 64 << 20, 4096}, Case{"h100", 64 << 20, 20000},
                                         Case{"h100", 8 << 20, 2000}, Case{"a100", 64 << 20, 4096}, Case{"a100", 8 << 20, 3000}));

TEST(RoundedWeightPlan, Hopper_KeepsItsPathAndSaysWhatItDoesNot) {
    const Spec spec = parse_spec("D=2048,V=151936,weight_dtype=fp32");
    const Device device = describe_device("h100");
    const Plan plan = choose_plan(spec, device);
    EXPECT_EQ(plan.path, PlanPath::cuda_sm90a);
    EXPECT_EQ(plan.strategy, Strategy::recompute);
    std::string reasons;
    for (const std::string& line : plan_reasons(spec, device, plan)) reasons += line + '\n';
    EXPECT_NE(reasons.find("the weight is fp32 and rounded to bf16"), std::string::npos) << reasons;
    EXPECT_NE(reasons.find("refused retain: "), std::string::npos) << reasons;
}

TEST(RoundedWeightProgram, NoTokens_NothingIsRounded) {
    const Spec spec = parse_spec("D=2048,V=151936,weight_dtype=fp32");
    const Device device = describe_device("h100");
    const CudaProgram program = generate_cuda(spec, device, choose_plan(spec, device));
    for (const LaunchProgram* pass : {&program.forward, &program.backward}) {
        for (const Recorded& r : launches(program, *pass, 0)) EXPECT_NE(r.kernel, "flce_round_weight");
    }
}

// A stretch may begin within a block of a quantised weight, which its launch is given whole.
TEST(RoundedWeightProgram, QuantizedWeight_IsDequantizedStretchByStretch) {
    for (const char* text : {"D=2048,V=151936,weight_dtype=e4m3", "D=2048,V=151936,weight_dtype=nvfp4"}) {
        const Spec spec = parse_spec(text);
        for (const char* name : {"h100", "a100"}) {
            const Device device = describe_device(name);
            const CudaProgram program = generate_cuda(spec, device, choose_plan(spec, device));
            for (const LaunchProgram* pass : {&program.forward, &program.backward}) {
                std::int64_t next_row = 0;
                for (const Recorded& r : launches(program, *pass, 1000)) {
                    if (r.kernel != "flce_round_weight") continue;
                    const auto p = r.params<DequantizeWeightParams>();
                    EXPECT_EQ(as_address(p.weight), address(Slot::weight));
                    EXPECT_EQ(as_address(p.scale), address(Slot::weight_scale));
                    EXPECT_EQ(as_address(p.tensor_scale), address(Slot::weight_tensor_scale));
                    EXPECT_EQ(p.first_row, next_row);
                    EXPECT_GE(r.launch.grid[0] * kRowThreads * 8, p.rows * kHidden);
                    next_row += p.rows;
                }
                EXPECT_EQ(next_row, kVocab) << text << " on " << name;
            }
        }
    }
}

TEST(RoundedWeightProgram, WeightOfTheDtype_HasNoKernelForIt) {
    const Spec spec = parse_spec("D=2048,V=151936");
    for (const char* name : {"h100", "a100"}) {
        const Device device = describe_device(name);
        for (const KernelEntry& kernel : generate_cuda(spec, device, choose_plan(spec, device)).kernels) {
            EXPECT_NE(kernel.name, "flce_round_weight");
            EXPECT_NE(kernel.name, "flce_merge_stretch");
        }
    }
}

}  // namespace
}  // namespace flce::rounded_weight_test
