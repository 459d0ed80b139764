// How grad_hidden's sum is divided among clusters that would be idle, and that every launch of a pass agrees on it.
#include "templates/common/sum_parts.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda_program.hpp"
#include "templates/sm90/params.cuh"
#include "tests/support/interpreter.hpp"

namespace flce {
namespace {

using test::interpret;
using test::InterpretedLaunch;

constexpr int kClusters = 66;

TEST(SumParts, OneForEveryTwoIdleClusters) {
    // 1024 of 4096 tokens, D = 2048 in tiles of 256 columns: 32 tiles.
    const SumShare share{.room = 4096, .cluster_rows = 256, .column_tiles = 8, .clusters = kClusters, .slices = 512};
    EXPECT_EQ(SumParts(share, 1024).count, 2);
    EXPECT_EQ(SumParts(share, 1024).stride, 1024);
    EXPECT_EQ(SumParts(share, 1000).stride, 1024);
    EXPECT_EQ(SumParts(share, 4096).count, 1) << "no room";
    EXPECT_EQ(SumParts(share, 1).count, 8);
}

TEST(SumParts, PartsThatWouldNotEndSooner_AreNotMade) {
    const SumShare share{.room = 1 << 20, .cluster_rows = 256, .column_tiles = 11, .clusters = kClusters, .slices = 256};
    EXPECT_EQ(SumParts(share, 6 * 256).count, 1) << "one whole wave";
    EXPECT_GT(SumParts(share, 7 * 256).count, 1) << "a second one with 11 of 66";
}

TEST(TailParts, TilesOfTheLastWave_AreMadeByIdleClusters) {
    const TailParts gemma(288, kClusters, 4000, 1000);  // 8192 tokens, D = 2304
    EXPECT_EQ(gemma.full, 264);
    EXPECT_EQ(gemma.count, 2) << "24 tiles for 66 clusters";
    EXPECT_EQ(TailParts(128, kClusters, 4000, 1000).count, 1) << "62 tiles have no idle clusters to speak of";
    EXPECT_EQ(TailParts(132, kClusters, 4000, 1000).count, 1) << "whole waves";
    EXPECT_EQ(TailParts(8, kClusters, 4000, 1000).count, 8);
    EXPECT_EQ(TailParts(8, kClusters, 4000, 17).count, 3) << "room for the sums of two parts of eight tiles";
    EXPECT_EQ(TailParts(8, kClusters, 66, 1000).count, 2) << "a part is 32 slices";
    EXPECT_EQ(TailParts(24, kClusters, 4000, 0).count, 1) << "no room";
}

TEST(TailParts, AnyNumbers_EveryTileHasEveryPartOnceAndTheLastOneLast) {
    for (int clusters : {1, 2, 57, 66}) {
        for (int tiles : {0, 1, 7, 33, 66, 67, 160, 288, 1001}) {
            for (int room : {0, 10, 1000}) {
                const TailParts tail(tiles, clusters, 4000, room);
                ASSERT_LE((tail.count - 1) * tail.rest, room);
                ASSERT_TRUE(tail.count == 1 || tail.count * tail.rest <= clusters) << "one wave";
                std::map<int, int> parts;
                for (int number = tail.full; number < tail.numbers(); ++number) {
                    const int tile = tail.tile_of(number);
                    ASSERT_GE(tile, tail.full);
                    ASSERT_LT(tile, tiles);
                    ASSERT_EQ(tail.part_of(number), parts[tile]++) << "a part waits for those before it, which have smaller numbers";
                }
                ASSERT_EQ(std::ssize(parts), tail.rest);
                for (const auto& [tile, count] : parts) ASSERT_EQ(count, tail.count) << tile;
            }
        }
    }
}

TEST(SumParts, AnyShare_FitsAndCoversEverySlice) {
    for (int room : {0, 1, 255, 256, 1000, 4096, 100'000}) {
        for (int rows : {0, 1, 256, 257, 4096, 99'999}) {
            for (int slices : {1, 2, 15, 16, 63, 64, 65, 600, 4000}) {
                const SumShare share{.room = room, .cluster_rows = 256, .column_tiles = 9, .clusters = kClusters, .slices = slices};
                const SumParts parts(share, rows);
                ASSERT_GE(parts.count, 1);
                ASSERT_LE(parts.count, SumParts::kMost);
                ASSERT_GE(parts.stride, std::max(rows, 1));
                ASSERT_TRUE(parts.count == 1 || parts.count * parts.stride <= room);
                ASSERT_EQ(PartSlices(slices, parts.count).count, parts.count) << "the first launch begins every part";
                for (int later : {1, 2, 7, 8, 31, slices}) {
                    const PartSlices here(later, parts.count);
                    ASSERT_LE(here.count, parts.count);
                    ASSERT_GT(later - (here.count - 1) * here.of_part, 0);
                    ASSERT_LE(later - (here.count - 1) * here.of_part, here.of_part);
                }
            }
        }
    }
}

struct Pass {
    std::vector<GradHiddenSm90Params> sums;
    std::vector<ScatterRowsParams> finishes;
    std::vector<std::int64_t> blocks;
};

Pass backward_of(const char* spec_text, std::int64_t num_tokens, std::int64_t retained = 0) {
    const Spec spec = parse_spec(spec_text);
    const Device device = describe_device("h100");
    const CudaProgram program = generate_cuda(spec, device, choose_plan(spec, device));
    CallSlots slots{};
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i + 1) << 44;
    const auto set = [&](Slot slot, std::int64_t value) { slots[static_cast<std::size_t>(slot)] = value; };
    set(Slot::num_tokens, num_tokens);
    set(Slot::target_bits, 64);
    set(Slot::reduction, 0);
    set(Slot::num_valid_code, 0);
    set(Slot::ignore_index, -100);
    set(Slot::retained_bytes, retained);
    set(Slot::grad_weight, 0);  // chunk by chunk
    Pass pass;
    interpret(
        program.backward, slots,
        [&](const InterpretedLaunch& launch) {
            const std::string& kernel = program.kernels[static_cast<std::size_t>(launch.kernel)].name;
            if (kernel == "flce_grad_hidden") {
                std::memcpy(&pass.sums.emplace_back(), launch.params.data(), sizeof(GradHiddenSm90Params));
                pass.blocks.push_back(launch.grid[0]);
            }
            if (kernel == "flce_scatter_rows") std::memcpy(&pass.finishes.emplace_back(), launch.params.data(), sizeof(ScatterRowsParams));
        },
        [](std::int64_t, std::int64_t) {});
    return pass;
}

// Sums of tiles that are made in parts lie where dlogits of chunks will be, which nothing has computed yet.
TEST(TailParts, SumsOfAnyCall_LieInWorkspaceThatIsFree) {
    for (const char* spec_text : {"D=5120,V=152064", "D=2304,V=256000,softcap=30", "D=1032,V=5001"}) {
        const Spec spec = parse_spec(spec_text);
        const Device device = describe_device("h100");
        const Plan plan = choose_plan(spec, device);
        const CudaProgram program = generate_cuda(spec, device, plan);
        for (const std::int64_t n : {16, 300, 2048, 8192}) {
            const Pass pass = backward_of(spec_text, n, std::int64_t{1} << 40);
            ASSERT_EQ(pass.sums.size(), 1U);
            const GradHiddenSm90Params& sum = pass.sums.front();
            CallSlots slots{};
            slots[static_cast<std::size_t>(Slot::num_tokens)] = n;
            const std::int64_t bytes = evaluate(program.backward_workspace_bytes, slots);
            const std::int64_t begin = (static_cast<std::int64_t>(Slot::workspace) + 1) << 44;
            const auto at = [&](const auto* pointer) { return reinterpret_cast<std::int64_t>(pointer) - begin; };
            const std::int64_t of_tile = std::int64_t{2} * 4 * plan.cuda.grad_hidden.block_m * plan.cuda.grad_hidden.block_n;
            EXPECT_GE(sum.tail_room, n < 300 ? 0 : 10) << "too few to gain anything";
            EXPECT_GE(at(sum.tail_sums), 0);
            EXPECT_LE(at(sum.tail_sums) + sum.tail_room * of_tile, bytes);
            EXPECT_LE(at(sum.tail_sums) + sum.tail_room * of_tile, at(sum.pace)) << "counters";
            EXPECT_LE(at(sum.tail_sums) + sum.tail_room * of_tile, at(sum.accumulator)) << "hidden states and the sum";
            EXPECT_EQ(sum.tail_counters - sum.pace, kPaceCounters);
            EXPECT_EQ(at(sum.tail_sums) % 16, 0);
        }
    }
}

void expect_agreement(const Pass& pass) {
    ASSERT_FALSE(pass.sums.empty());
    ASSERT_EQ(pass.finishes.size(), 1U);
    // Where chunks may be joined, the sum has one part, and the finishing kernel has nothing to add up.
    const bool divisible = pass.sums.front().share.room > 0;
    for (const GradHiddenSm90Params& sum : pass.sums) {
        EXPECT_EQ(std::memcmp(&sum.share, &pass.finishes.front().share, sizeof(SumShare)), 0);
        EXPECT_EQ(divisible ? sum.accumulator : nullptr, pass.finishes.front().accumulator);
    }
    EXPECT_EQ(pass.sums.front().first, 1);
    EXPECT_EQ((pass.sums.front().columns + 63) / 64, pass.sums.front().share.slices);
}

TEST(SumParts, EveryLaunchOfAPass_HasTheSameShare) {
    for (const char* spec : {"D=2048,V=151936", "D=2048,V=151936,grad_weight_mode=accumulate", "D=136,V=50257"}) {
        for (const std::int64_t n : {64, 257, 1024, 2000}) {
            SCOPED_TRACE(testing::Message() << spec << ", " << n);
            expect_agreement(backward_of(spec, n));
        }
    }
    expect_agreement(backward_of("D=2048,V=151936", 2000, std::int64_t{256} << 20));
    expect_agreement(backward_of("D=2048,V=151936", 4096, std::int64_t{1} << 40));
}

TEST(SumParts, FewTokensOfAShortSum_CostNoLaunch) {
    EXPECT_TRUE(backward_of("D=136,V=2571", 256).finishes.empty());
    EXPECT_FALSE(backward_of("D=136,V=50257", 256).finishes.empty());
}

TEST(SumParts, FewTokens_UseEveryCluster) {
    const Pass pass = backward_of("D=4096,V=128256", 256);
    for (const std::int64_t blocks : pass.blocks) EXPECT_GE(blocks, 64);
    EXPECT_GT(SumParts(pass.sums.front().share, 256).count, 1);
}

}  // namespace
}  // namespace flce
