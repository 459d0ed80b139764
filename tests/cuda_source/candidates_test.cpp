// Every tile that a plan may have: the kernel compiles and keeps its accumulators in registers, not only with the tiles that the planner
// prefers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "flce/plan.hpp"
#include "tests/cuda_source/kernel_check.hpp"
#include "tests/support/gpu.hpp"
#include "tests/support/level.hpp"

namespace flce::test {
namespace {

struct Tiles {
    friend void PrintTo(const Tiles& tiles, std::ostream* out) { *out << tiles.name; }

    const char* name;
    const char* arch;
    const char* spec;
    PlanPath path = PlanPath::cuda_sm90a;
    Strategy strategy = Strategy::recompute;
    std::vector<const char*> kernels;
    std::size_t every = 1;  ///< one row of the matrix has every `every`-th tile, from `first` on (counted from 0); before nightly a fourth
    std::size_t first = 0;
    Level from = Level::full;
};

/// One of each source of `kernel` among the candidates for the spec.
std::vector<CudaUnit> candidates(const Tiles& tiles, const std::string& kernel, std::vector<std::string>& options) {
    const Spec spec = parse_spec(tiles.spec).normalized();
    const Device device = describe_device(tiles.arch);
    std::vector<CudaUnit> units;
    int raster = 0;
    std::vector<Plan> plans = candidate_plans(spec, device);
    std::ranges::copy(candidate_plans(spec, device, {.workspace_limit_bytes = std::int64_t{1} << 40, .num_tokens = 8192}),
                      std::back_inserter(plans));
    for (const Plan& plan : plans) {
        if (plan.path != tiles.path || plan.strategy != tiles.strategy) continue;
        if (raster == 0) raster = plan.cuda.raster;
        if (plan.cuda.raster != raster) continue;  // another order of tiles has no other kernels
        const CudaProgram program = generate_cuda(spec, device, plan);
        options = program.options;
        for (const CudaUnit& unit : program.units) {
            if (unit.kernels.front().name != kernel) continue;
            if (std::ranges::find(units, unit.source, &CudaUnit::source) == units.end()) units.push_back(unit);
        }
    }
    return units;
}

class CandidateTiles : public testing::TestWithParam<Tiles> {};

TEST_P(CandidateTiles, Every_CompilesWithoutSpills) {
    FLCE_FROM_LEVEL(GetParam().from);
    FLCE_REQUIRE_NVRTC_FOR(GetParam().arch);
    const bool all_of_them = GetParam().from == Level::quick || level() == Level::nightly;
    const std::size_t step = GetParam().every * (all_of_them ? 1 : 4);
    // fp32 holds two sets of accumulators; ptxas may put by a row's number before the main loop and fetch it after.
    const int most = parse_spec(GetParam().spec).dtype == DType::fp32 ? 8 : 0;
    for (const char* kernel : GetParam().kernels) {
        std::vector<std::string> options;
        std::vector<CudaUnit> mine;
        const std::vector<CudaUnit> all = candidates(GetParam(), kernel, options);
        ASSERT_GE(all.size(), 2U) << kernel;
        for (std::size_t i = GetParam().first; i < all.size(); i += step) mine.push_back(all[i]);
        const std::vector<KernelResources> report = compiled(together(mine), options);
        for (const KernelResources& used : report) {
            EXPECT_LE(used.stack_bytes, most) << used.name;
            EXPECT_LE(used.spill_store_bytes, most) << used.name;
            EXPECT_LE(used.spill_load_bytes, most) << used.name;
        }
        if (!testing::Test::HasFailure()) continue;
        for (const CudaUnit& unit : mine) ADD_FAILURE() << unit.source.substr(unit.source.find("extern \"C\""));
    }
}

constexpr auto kSm80 = PlanPath::cuda_sm80;
constexpr const char* kHidden = "flce_grad_hidden";
constexpr const char* kWeight = "flce_grad_weight";
constexpr const char* kHalf = "D=2048,V=50257";
constexpr const char* kFloat = "D=2048,V=50257,dtype=fp32";

// On Hopper's path every tile in every role, in both strategies where their kernels differ. The path of all other GPUs has four times as
// many: there every tile in two roles or more, which the architectures share.
const Tiles kTiles[] = {
    {.name = "Hopper",
     .arch = "sm_90a",
     .spec = "D=2048,V=50256,dtype=fp16,layout=hidden_major,grad_weight_mode=accumulate",
     .kernels = {"flce_forward", "flce_dlogits", kHidden, kWeight}},
    {.name = "HopperRetain", .arch = "sm_90a", .spec = kHalf, .strategy = Strategy::retain, .kernels = {"flce_forward", kHidden, kWeight}},
    {.name = "HopperJoined",
     .arch = "sm_90a",
     .spec = "D=2048,V=50257,softcap=30,grad_weight_mode=accumulate",
     .kernels = {"flce_backward_chunks"},
     .from = Level::quick},
    {.name = "HopperJoinedHalf", .arch = "sm_90a", .spec = "D=2048,V=50257,dtype=fp16", .kernels = {"flce_backward_chunks"}},
    {.name = "HopperBias",
     .arch = "sm_90a",
     .spec = "D=2048,V=50257,bias,grad_weight_mode=accumulate",
     .strategy = Strategy::retain,
     .kernels = {kWeight}},
    {.name = "HopperBiasSmoothing",
     .arch = "sm_90a",
     .spec = "D=2048,V=50257,bias,label_smoothing=0.1,class_weight",
     .strategy = Strategy::retain,
     .kernels = {kWeight}},
    {.name = "HalfForward", .arch = "sm_80", .spec = kHalf, .path = kSm80, .kernels = {"flce_forward"}, .every = 2},
    {.name = "HalfRetain",
     .arch = "sm_80",
     .spec = kHalf,
     .path = kSm80,
     .strategy = Strategy::retain,
     .kernels = {"flce_forward"},
     .from = Level::quick},
    {.name = "HalfRetainOptions",
     .arch = "sm_120",
     .spec = "D=2048,V=50257,softcap=50,temperature,outputs=loss+entropy+top1+log_sum_sq_probs",
     .path = kSm80,
     .strategy = Strategy::retain,
     .kernels = {"flce_forward"}},
    {.name = "HalfRetainGradients",
     .arch = "sm_80",
     .spec = "D=2048,V=50257,label_smoothing=0.1,class_weight",
     .path = kSm80,
     .strategy = Strategy::retain,
     .kernels = {kHidden, kWeight},
     .every = 2},
    {.name = "HalfDlogits", .arch = "sm_100a", .spec = kHalf, .path = kSm80, .kernels = {"flce_dlogits"}, .every = 2, .first = 1},
    {.name = "HalfGradHidden", .arch = "sm_80", .spec = kHalf, .path = kSm80, .kernels = {kHidden}, .every = 2},
    {.name = "HalfGradWeight", .arch = "sm_80", .spec = kHalf, .path = kSm80, .kernels = {kWeight}, .every = 2, .first = 1},
    {.name = "HalfConsumer", .arch = "sm_120", .spec = kHalf, .path = kSm80, .kernels = {"flce_forward", kHidden}, .every = 4, .first = 1},
    {.name = "FloatForward", .arch = "sm_120", .spec = kFloat, .path = kSm80, .kernels = {"flce_forward"}, .from = Level::quick},
    {.name = "FloatDlogits", .arch = "sm_80", .spec = kFloat, .path = kSm80, .kernels = {"flce_dlogits", kWeight}, .every = 2},
    {.name = "FloatGradHidden", .arch = "sm_100a", .spec = kFloat, .path = kSm80, .kernels = {kHidden}, .every = 2, .first = 1},
};

INSTANTIATE_TEST_SUITE_P(Paths, CandidateTiles, testing::ValuesIn(kTiles), [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace flce::test
