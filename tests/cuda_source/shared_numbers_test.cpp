// Numbers that the host and a kernel both work out: they are the same.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "flce/plan.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/sm90/rules.hpp"
#include "generator/cuda_program.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "templates/common/tile_order.cuh"
#include "templates/sm90/forward_share.cuh"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/kernel_check.hpp"
#include "tests/support/gpu.hpp"
#include "tests/support/interpreter.hpp"

namespace flce::shared_numbers_test {
namespace {

using test::interpret;
using test::InterpretedLaunch;
using test::InterpretedMap;

constexpr std::int64_t kWorkspace = std::int64_t{1} << 44;

struct Layer {
    const char* device;
    const char* spec;
    std::int64_t scratch_bytes = kDefaultScratchBytes;
};
constexpr Layer kLayers[] = {
    {"h100", "D=2048,V=151936"},
    {"h100", "D=2048,V=151936,outputs=loss+entropy,label_smoothing=0.1"},
    {"h200", "D=7168,V=129280,grad_weight_mode=accumulate"},
    {"h100", "D=64,V=1000"},
    {"h100", "D=2048,V=50257,bias,label_smoothing=0.1", 4 << 20},
    {"h100", "D=2048,V=50257,weight_dtype=fp32"},
    {"h100", "D=2048,V=151936,batch_invariant"},
    {"h100", "D=64,V=1000,batch_invariant,softcap=30,temperature,outputs=logprobs+entropy", 8 << 20},
    {"h200", "D=2048,V=50257,batch_invariant,weight_dtype=fp32"},
    {"sm_80", "D=2048,V=151936"},
    {"sm_80", "D=2048,V=50257,outputs=loss+entropy", 4 << 20},
    {"sm_120", "D=200,V=1001,dtype=fp32,bias"},
    {"sm_80", "D=2048,V=50257,weight_dtype=fp32"},
};

CallSlots call(std::int64_t num_tokens) {
    CallSlots slots{};
    std::int64_t address = kWorkspace;
    for (const Slot slot : {Slot::hidden, Slot::weight, Slot::bias, Slot::target, Slot::loss, Slot::lse, Slot::entropy, Slot::grad_hidden,
                            Slot::grad_weight, Slot::grad_bias}) {
        slots[static_cast<std::size_t>(slot)] = address += kWorkspace;
    }
    slots[static_cast<std::size_t>(Slot::workspace)] = kWorkspace;
    slots[static_cast<std::size_t>(Slot::num_tokens)] = num_tokens;
    slots[static_cast<std::size_t>(Slot::target_bits)] = 64;
    return slots;
}

template <class Params>
Params params_of(const InterpretedLaunch& launch) {
    Params p;
    EXPECT_GE(launch.params.size(), sizeof(Params));  // stretches of the vocabulary have fields behind
    std::memcpy(&p, launch.params.data(), sizeof p);
    return p;
}

/// Calls `visit(kernel's name, launch)` for every launch of `pass`.
template <class Visit>
void for_each_launch(const CudaProgram& program, const LaunchProgram& pass, std::int64_t num_tokens, const Visit& visit) {
    interpret(
        pass, call(num_tokens),
        [&](const InterpretedLaunch& launch) { visit(program.kernels[static_cast<std::size_t>(launch.kernel)].name, launch); },
        [](std::int64_t, std::int64_t) {});
}

/// Where the partial sums of a launch end, as its kernel writes them.
std::int64_t end_of_partials(const ForwardParams& p, const Spec& spec, std::int64_t splits, std::int64_t rows) {
    return reinterpret_cast<std::int64_t>(p.partials) + splits * partial_fields(spec) * rows * 4;
}

sm90::ForwardShape shape_of(const Spec& spec, const Plan& plan, const std::string& kernel) {
    return kernel == "flce_forward_few" ? sm90::few_tokens_shape(spec, plan) : sm90::forward_shape(plan);
}

/// Rows of hidden states that one copy takes.
std::int64_t copied_at_once(const InterpretedLaunch& launch, const ForwardSm90Params& p) {
    const auto offset = reinterpret_cast<const char*>(&p.hidden_map) - reinterpret_cast<const char*>(&p);
    const auto map = std::ranges::find(launch.maps, offset, &InterpretedMap::offset);
    return map == launch.maps.end() ? 0 : map->box_rows;
}

void expect_clusters_share(const Spec& spec, const Plan& plan, const std::string& kernel, const InterpretedLaunch& launch,
                           std::int64_t end) {
    const auto p = params_of<ForwardSm90Params>(launch);
    const auto shape = shape_of(spec, plan, kernel);
    const GemmTile& tile = shape.tile;
    std::int64_t columns = spec.vocab_size;
    if (rounds_weight(spec)) {
        const auto stretch = params_of<ForwardStretchSm90Params>(launch);
        columns = stretch.columns;
        EXPECT_TRUE(columns % tile.block_n == 0 || stretch.first_column + columns == spec.vocab_size) << "a tile of two stretches";
    }
    const auto tiles = static_cast<int>((columns + tile.block_n - 1) / tile.block_n);
    const int dealt = spec.batch_invariant ? ForwardShare::segments_of(tiles, sm90::segment_tiles(spec, tile)) : tiles;
    const ForwardShare share(p.rows, dealt, tile.block_m * shape.cluster, ForwardShare::writers_of(sm90::takes_turns(tile)), p.clusters,
                             spec.batch_invariant);
    EXPECT_LE(share.clusters, launch.grid[0] / shape.cluster) << "a share without a cluster";
    EXPECT_EQ(launch.grid[0] % shape.cluster, 0);
    EXPECT_GE(p.clusters, launch.grid[0] / shape.cluster);
    EXPECT_LE(share.row_clusters, share.clusters) << "what VocabularyWalk needs";
    if (shape.cluster == 1) {
        EXPECT_EQ(share.row_clusters, 1) << "a tile has all tokens";
        EXPECT_EQ(copied_at_once(launch, p), p.rows);
        EXPECT_LE(p.rows, tile.block_m);
    }
    EXPECT_EQ(std::gcd(p.stride, p.clusters), 1);
    EXPECT_LE(end_of_partials(p, spec, share.splits, (p.rows + 31) / 32 * 32), end);
}

TEST(SharedNumbers, Forward_SharesAndPartialSumsAreTheHosts) {
    for (const Layer& layer : kLayers) {
        const Spec spec = parse_spec(layer.spec).normalized();
        const Device device = describe_device(layer.device);
        const std::vector<Plan> plans = candidate_plans(spec, device, {.scratch_bytes = layer.scratch_bytes});
        for (std::size_t i = 0; i < plans.size(); i += 4) {
            const Plan& plan = plans[i];
            SCOPED_TRACE(fmt::format("{} on {}: {}", layer.spec, layer.device, plan.text()));
            const CudaProgram program = generate_cuda(spec, device, plan);
            for (const std::int64_t tokens :
                 {1, 2, 127, 128, 129, 130, 144, 145, 160, 191, 192, 193, 255, 257, 1000, 4096, 8192, 20'000, 70'001, 100'003}) {
                const std::int64_t end = kWorkspace + evaluate(program.forward_workspace_bytes, call(tokens));
                std::map<std::string, int> seen;
                for_each_launch(program, program.forward, tokens, [&](const std::string& kernel, const InterpretedLaunch& launch) {
                    if (!kernel.starts_with("flce_forward")) return;
                    ++seen[kernel];
                    if (plan.path == PlanPath::cuda_sm90a) return expect_clusters_share(spec, plan, kernel, launch, end);
                    const auto p = params_of<ForwardParams>(launch);
                    EXPECT_EQ(launch.grid[0], (p.rows + plan.cuda.forward.block_m - 1) / plan.cuda.forward.block_m);
                    EXPECT_EQ(launch.grid[1], p.splits);
                    EXPECT_LE(end_of_partials(p, spec, p.splits, p.partial_rows), end);
                });
                EXPECT_EQ(seen.size(), 1U) << tokens;
            }
        }
    }
}

TEST(SharedNumbers, Forward_StretchesOfARoundedWeightAreWholeWaves) {
    const Device device = describe_device("h200");
    const std::int64_t clusters = device.gpu.sm_count / sm90::kClusterBlocks;
    for (const char* text : {"D=4096,V=128256,weight_dtype=e4m3", "D=2048,V=151936,weight_dtype=fp32"}) {
        const Spec spec = parse_spec(text).normalized();
        const Plan plan = choose_plan(spec, device, {});
        ASSERT_EQ(plan.path, PlanPath::cuda_sm90a);
        const CudaProgram program = generate_cuda(spec, device, plan);
        for (const std::int64_t tokens : {2048, 4096, 8192}) {
            std::int64_t first = 0;  // columns of the first stretch: the last may have fewer
            std::int64_t rows = 0;
            for_each_launch(program, program.forward, tokens, [&](const std::string& kernel, const InterpretedLaunch& launch) {
                if (first > 0 || kernel != "flce_forward") return;
                first = params_of<ForwardStretchSm90Params>(launch).columns;
                rows = params_of<ForwardSm90Params>(launch).rows;
            });
            const GemmTile& tile = plan.cuda.forward;
            const std::int64_t tiles = rows / (std::int64_t{sm90::kClusterBlocks} * tile.block_m) * (first / tile.block_n);
            const std::int64_t waves = (tiles + clusters - 1) / clusters;
            EXPECT_GE(static_cast<double>(tiles), 0.93 * static_cast<double>(waves * clusters)) << text << ", " << tokens << " tokens";
        }
    }
}

TEST(SharedNumbers, TileOrder_HasEveryTileOnce) {
    for (const int tiles_m : {1, 3, 8, 17}) {
        for (const int tiles_n : {1, 2, 9}) {
            std::map<std::pair<int, int>, int> times;
            for (unsigned block = 0; block < static_cast<unsigned>(tiles_m * tiles_n); ++block) {
                std::pair<int, int> at;
                tile_of_block<8>(block, tiles_m, tiles_n, at.first, at.second);
                EXPECT_TRUE(at.first >= 0 && at.first < tiles_m && at.second >= 0 && at.second < tiles_n);
                ++times[at];
            }
            EXPECT_EQ(std::ssize(times), static_cast<std::ptrdiff_t>(tiles_m) * tiles_n);
        }
    }
}

TEST(SharedNumbers, EveryGemm_AssertsWhatTheLaunchGivesIt) {
    for (const Layer& layer : kLayers) {
        const Spec spec = parse_spec(layer.spec).normalized();
        const Device device = describe_device(layer.device);
        const CudaProgram program = generate_cuda(spec, device, choose_plan(spec, device));
        for (std::size_t i = 1; i < program.units.size(); ++i) {  // the first has the small kernels, without dynamic shared memory
            const CudaUnit& unit = program.units[i];
            const KernelEntry& kernel = unit.kernels.front();
            EXPECT_NE(unit.source.find(fmt::format("kSmemBytes == {} ", kernel.dynamic_smem_bytes)), std::string::npos) << unit.source;
            EXPECT_NE(unit.source.find(fmt::format("kThreads == {},", kernel.block_threads)), std::string::npos) << unit.source;
        }
        for (const KernelEntry& kernel : program.units.front().kernels) EXPECT_EQ(kernel.dynamic_smem_bytes, 0U) << kernel.name;
    }
}

// Different sizes in the host and the kernel would be a silent overrun.
TEST(SharedNumbers, OtherSharedMemory_DoesNotCompile) {
    for (const char* arch : {"sm_80", "sm_90a"}) {
        FLCE_REQUIRE_NVRTC_FOR(arch);
        const Spec spec = parse_spec("D=64,V=1000").normalized();
        const Device device = describe_device(arch);
        CudaProgram program = generate_cuda(spec, device, choose_plan(spec, device));
        CudaUnit& unit = program.units.back();
        const std::string bytes = fmt::format("kSmemBytes == {} ", unit.kernels.front().dynamic_smem_bytes);
        unit.source.replace(unit.source.find(bytes), bytes.size(), "kSmemBytes == 16 ");
        EXPECT_THROW((void)Nvrtc::load()->compile(unit.source, embedded_templates(), program.options, unit.kernels), CompileError) << arch;
    }
}

}  // namespace
}  // namespace flce::shared_numbers_test
