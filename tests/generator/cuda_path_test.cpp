// The table of paths, and what all paths have to agree on.
#include "generator/cuda/common/cuda_path.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "flce/error.hpp"
#include "generator/cuda/lt/path.hpp"
#include "generator/cuda/sm80/path.hpp"
#include "generator/cuda/sm90/path.hpp"
#include "generator/cuda/sm90/rules.hpp"

namespace flce {
namespace {

TEST(CudaPaths, Table_HasEachPathOnceByIdAndName) {
    std::set<PlanPath> ids;
    std::set<std::string_view> names;
    for (const CudaPath* path : cuda_paths()) {
        EXPECT_TRUE(ids.insert(path->id).second) << path->name;
        EXPECT_TRUE(names.insert(path->name).second) << path->name;
        EXPECT_EQ(&cuda_path(path->id), path);
        EXPECT_EQ(to_string(path->id), path->name);
    }
    EXPECT_EQ(ids.count(PlanPath::cpu), 0U);
    EXPECT_THROW((void)cuda_path(PlanPath::cpu), InternalError);
}

TEST(CudaPaths, FirstOfTheTable_RunsWhereAnyPathDoes) {
    const Spec spec = parse_spec("D=2048,V=50257");
    const std::pair<const char*, const CudaPath*> own_paths[] = {{"sm_80", nullptr},    {"sm_89", nullptr},    {"sm_90a", &kPathSm90},
                                                                 {"sm_100a", &kPathLt}, {"sm_103a", &kPathLt}, {"sm_110a", &kPathLt},
                                                                 {"sm_120", nullptr},   {"sm_121", nullptr}};
    for (const auto& [name, own] : own_paths) {
        const Device device = describe_device(name);
        EXPECT_EQ(cuda_paths().front()->problem(spec, device, Strategy::recompute), std::nullopt) << name;
        EXPECT_EQ(own_cuda_path(spec, device), own) << name;
    }
    EXPECT_EQ(own_cuda_path(parse_spec("D=2048,V=50257,dtype=fp32"), describe_device("sm_90a")), nullptr) << "wgmma has no fp32";
}

TEST(CudaPaths, TilesOfTheTables_KeepTheirWarpsAndTakeWholeWarps) {
    const Device device = describe_device("h100");
    for (const CudaPath* path : cuda_paths()) {
        if (path->calls_library || path->gathers) continue;  // warps are the library's own, or there are no tiles
        for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
            const Spec spec{.hidden_size = 2048, .vocab_size = 50257, .dtype = dtype, .grad_weight_dtype = dtype};
            for (const TileCandidate& candidate : path->tiles(dtype)) {
                GemmTile bare = candidate.tile;
                bare.warps_m = bare.warps_n = 0;
                bare.schedule = TileSchedule::warp_grid;
                EXPECT_EQ(path->with_warps(bare, path->warps(candidate.tile)), candidate.tile) << path->name;
                if (path->eight_bits) continue;  // one tile for each product
                const KernelBlock block = path->id == PlanPath::cuda_sm90a
                                              ? sm90::block(spec.normalized(), GemmRole::dlogits, candidate.tile)
                                              : sm80::block(spec.normalized(), device, GemmRole::dlogits, candidate.tile);
                EXPECT_EQ(block.threads % 32, 0) << path->name;
                EXPECT_GE(block.threads, 32 * path->warps(candidate.tile).m * path->warps(candidate.tile).n) << path->name;
                const TileRate rate = path->tile_rate(spec.normalized(), device, GemmRole::dlogits, candidate.tile);
                EXPECT_EQ(rate.blocks_per_sm, block.per_sm) << path->name;
                EXPECT_GE(block.per_sm, 1) << path->name;
            }
        }
    }
}

}  // namespace
}  // namespace flce
