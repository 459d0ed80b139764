// Passes of a shard in stages: both together launch what the whole does, and what others wait for is complete first.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "flce/flce.hpp"
#include "flce/plan.hpp"
#include "generator/shard_layout.hpp"
#include "templates/common/output_params.cuh"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"
#include "tests/cuda_source/shard_layer.hpp"

namespace flce::shard_stages {
namespace {

using shard_layers::kStep;
using shard_layers::set;
using test::Launched;
using test::Recorded;
using Layer = shard_layers::ShardLayer;

bool joins(const Recorded& r) { return r.kernel == "flce_grad_weight" && r.params<GradWeightSm90Params>().joins != 0; }

// A launch as bytes, to be found again, but for what it shares with another one (Relay).
std::string identity(const Recorded& r) {
    std::string text = r.kernel + fmt::format(" {} {} ", r.launch.grid[0], r.launch.grid[1]);
    std::vector<std::byte> params = r.launch.params;
    if (r.kernel == "flce_grad_weight" && params.size() >= sizeof(GradWeightSm90Params)) {
        GradWeightSm90Params p{};
        std::memcpy(&p, params.data(), sizeof(p));
        p.clusters = p.leaving = 0;
        std::memcpy(params.data(), &p, sizeof(p));
    }
    for (const std::byte byte : params) text += static_cast<char>(byte);
    for (const auto& map : r.launch.maps) {
        text += fmt::format(" {} {} {} {} {} {}", map.offset, map.address, map.columns, map.rows, map.row_bytes, map.blocks);
    }
    return text;
}

bool of_rows(const Recorded& r) { return r.kernel == "flce_retained_rows"; }

/// A call's retained_rows, the first one.
RetainedRowsParams rows_of(const Launched& pass) { return std::ranges::find_if(pass, of_rows)->params<RetainedRowsParams>(); }

ScatterRowsParams scatter_of(const Launched& pass) {
    return std::ranges::find(pass, std::string("flce_scatter_rows"), &Recorded::kernel)->params<ScatterRowsParams>();
}

/// Address of the hidden states that a pass's grad_weight reads.
std::int64_t hidden_of_grad_weight(const Launched& pass) {
    const auto launch = std::ranges::find(pass, std::string("flce_grad_weight"), &Recorded::kernel);
    const GradWeightSm90Params p{};
    const auto offset = reinterpret_cast<const std::byte*>(&p.hidden_map) - reinterpret_cast<const std::byte*>(&p);
    return std::ranges::find(launch->launch.maps, offset, [](const auto& map) { return static_cast<std::ptrdiff_t>(map.offset); })->address;
}
std::int64_t address_of(const void* at) { return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at)); }

/// Without what only stages have: make_room, and the second of two launches that share tiles. `but_rows`: without retained_rows, which the
/// last stage may have once more, and scatter_rows, which may scale hidden states in its place.
std::vector<std::string> sorted_identities(std::initializer_list<const Launched*> passes, bool but_rows = false) {
    std::vector<std::string> all;
    for (const Launched* pass : passes) {
        for (const Recorded& r : *pass) {
            if (r.kernel == "flce_make_room" || joins(r) || (but_rows && (of_rows(r) || r.kernel == "flce_scatter_rows"))) continue;
            all.push_back(identity(r));
        }
        for (const auto& [at, bytes] : pass->memsets) all.push_back(fmt::format("memset {} {}", at, bytes));
    }
    std::ranges::sort(all);
    return all;
}

/// How much of the vocabulary is retained, and where.
enum class Kept { none, all, part, lent, part_lent };

/// What a layer is, what is retained, and whether hidden is there in the first stage.
class Stages : public testing::TestWithParam<std::tuple<const char*, Kept, bool>> {
protected:
    const Layer layer{std::get<0>(GetParam())};
    static constexpr std::int64_t kTokens = 3000;
    static constexpr std::int64_t kColumns = 8000;

    [[nodiscard]] Launched run(std::int64_t stage) const {
        CallSlots slots = layer.call(Pass::backward, kTokens, kColumns, kColumns);
        const Kept kept = std::get<1>(GetParam());
        const bool lent = kept == Kept::lent || kept == Kept::part_lent;
        const std::int64_t all = evaluate(layer.program.retained_bytes, slots);
        const std::int64_t lendable = evaluate(layer.program.lendable_bytes, slots);
        if (kept != Kept::none) {
            set(slots, Slot::retained, lent ? slots[static_cast<std::size_t>(Slot::grad_weight)] : 99 * kStep);
            set(slots, Slot::retained_bytes,
                kept == Kept::lent        ? lendable
                : kept == Kept::part_lent ? lendable / 2
                : kept == Kept::part      ? all / 2
                                          : all);
            set(slots, Slot::retained_in_grad_weight, lent ? 1 : 0);
        }
        set(slots, Slot::stage, stage);
        set(slots, Slot::hidden_ready, std::get<2>(GetParam()) ? 1 : 0);
        return test::run(layer.program, layer.program.backward, slots);
    }
};

bool of_retained(const Recorded& r) {
    return r.kernel == "flce_grad_weight" && r.params<GradWeightSm90Params>().column_shift == kRetainedShift;
}

TEST_P(Stages, BothTogether_WhatTheWholeLaunches) {
    const Launched whole = run(0);
    const Launched first = run(1);
    const Launched rest = run(2);
    const Kept kept = std::get<1>(GetParam());
    const bool retains = layer.plan.strategy == Strategy::retain;
    const bool defers = layer.program.defers_hidden && kept == Kept::all && !std::get<2>(GetParam());
    EXPECT_EQ(sorted_identities({&first, &rest}, defers), sorted_identities({&whole}, defers));
    EXPECT_EQ(rest.count("retained_rows"), defers || (kept == Kept::part && retains) ? 1 : 0);
    const bool with_room = retains && kept == Kept::all && !defers;
    const auto relays = std::ranges::count_if(rest, joins);
    EXPECT_EQ(rest.count("make_room") + relays, with_room ? 1 : 0) << "rows of their own leave room as well";
    EXPECT_FALSE(std::ranges::any_of(whole, joins) || std::ranges::any_of(first, joins));
    EXPECT_EQ(whole.count("make_room") + first.count("make_room"), 0) << "no collective is launched before";
    if (retains && kept == Kept::all) {
        EXPECT_EQ(rows_of(whole).scaled_hidden, nullptr);
        EXPECT_NE(scatter_of(whole).scaled_hidden, nullptr) << "it is made while clusters of grad_hidden end";
        const void* const scaled = defers ? rows_of(rest).scaled_hidden : scatter_of(first).scaled_hidden;
        EXPECT_EQ(address_of(scaled), hidden_of_grad_weight(rest)) << "what one stage leaves is what the other reads";
    }
    if (defers) {
        EXPECT_EQ(rows_of(first).scaled_hidden, nullptr) << "hidden may still be on its way";
        EXPECT_EQ(scatter_of(first).scaled_hidden, nullptr);
        EXPECT_EQ(rows_of(rest).scaled_hidden, scatter_of(whole).scaled_hidden);
    }
    EXPECT_EQ(rest.count("grad_hidden") + rest.count("backward_chunks") + rest.count("dlogits") + rest.count("scatter_rows"), 0)
        << "grad_hidden is complete before";
    const bool leaves = retains && (kept == Kept::all || kept == Kept::part);
    EXPECT_EQ(std::ranges::any_of(rest, of_retained), leaves);
    if (leaves) {
        EXPECT_FALSE(std::ranges::any_of(first, of_retained)) << "it runs beside a reduction of grad_hidden";
    }
}

// What other ranks wait for comes first: of two launches of rows, too, the look for exponentials that are written again is left to the end.
TEST(Stages, Forward_PartialSumsAreCompleteBeforeExponentialsAreWrittenAgain) {
    const Layer layer("D=2048,V=9000,whole_vocab_size=30000,dtype=bf16");
    const auto launches = [&](std::int64_t tokens, bool retains, std::int64_t stage) {
        CallSlots slots = layer.call(Pass::forward, tokens, 8000, 8000);
        if (retains) {
            set(slots, Slot::retained, 99 * kStep);
            set(slots, Slot::retained_bytes, evaluate(layer.program.retained_bytes, slots));
        }
        set(slots, Slot::stage, stage);
        return test::run(layer.program, layer.program.forward, slots);
    };
    const auto again = [](const Launched& pass) {
        return std::ranges::count_if(
            pass, [](const Recorded& r) { return r.kernel == "flce_forward" && r.params<ForwardSm90Params>().again != 0; });
    };
    for (const std::int64_t tokens : {3000, 20000}) {
        const Launched first = launches(tokens, true, 1);
        const Launched rest = launches(tokens, true, 2);
        const Launched whole = launches(tokens, true, 0);
        EXPECT_EQ(sorted_identities({&first, &rest}), sorted_identities({&whole}));
        EXPECT_EQ(again(first), 0);
        EXPECT_EQ(again(rest), static_cast<std::ptrdiff_t>(rest.launches.size()));
        EXPECT_EQ(first.count("shard_sums"), rest.launches.size());
        EXPECT_TRUE(launches(tokens, false, 2).launches.empty()) << "nothing is retained";
    }
    EXPECT_GT(launches(20000, true, 2).launches.size(), 1U);
}

// By what the last stage of forward has written there, backward knows that it has run.
TEST(Stages, StatesOfRetainedRows_AreOneArray) {
    const Layer layer("D=2048,V=9000,whole_vocab_size=30000,dtype=bf16");
    const auto launched = [&](Pass pass, std::int64_t stage) {
        CallSlots slots = layer.call(pass, 3000, 8000, 8000);
        set(slots, Slot::retained, 99 * kStep);
        set(slots, Slot::retained_bytes, evaluate(layer.program.retained_bytes, slots));
        set(slots, Slot::stage, stage);
        return test::run(layer.program, pass == Pass::forward ? layer.program.forward : layer.program.backward, slots);
    };
    const Launched first = launched(Pass::forward, 1);
    const auto sums = std::ranges::find(first, std::string("flce_shard_sums"), &Recorded::kernel)->params<ShardSumsParams>();
    ASSERT_NE(sums.found.retained_states, nullptr);
    EXPECT_EQ(launched(Pass::forward, 2).launches.front().params<ForwardSm90Params>().states, sums.found.retained_states);
    EXPECT_EQ(rows_of(launched(Pass::backward, 0)).states, sums.found.retained_states);
}

// A collective's blocks come onto SMs of clusters that end after a tile. A second launch goes on with their work: each tile is made once,
// and the counter of tiles is 0 again when the clusters of both have left.
TEST(Stages, ManyTiles_TwoLaunchesShareThem) {
    const Layer layer("D=2048,V=9000,whole_vocab_size=30000,dtype=bf16");
    const auto grad_weights = [&](std::int64_t columns, std::int64_t stage) {
        CallSlots slots = layer.call(Pass::backward, 3000, columns, columns);
        set(slots, Slot::retained, 99 * kStep);
        set(slots, Slot::retained_bytes, evaluate(layer.program.retained_bytes, slots));
        set(slots, Slot::stage, stage);
        set(slots, Slot::hidden_ready, 1);
        std::vector<std::pair<std::int64_t, GradWeightSm90Params>> found;
        for (const Recorded& r : test::run(layer.program, layer.program.backward, slots)) {
            if (r.kernel == "flce_grad_weight") found.emplace_back(r.launch.grid[0], r.params<GradWeightSm90Params>());
        }
        return found;
    };
    const auto two = grad_weights(9000, 2);  // 36 clusters of rows, 8 of columns: 288 tiles for 66 clusters
    ASSERT_EQ(two.size(), 2U);
    EXPECT_EQ(two[0].first, 132);
    EXPECT_EQ(two[1].first, 64) << "an SM for each block that NCCL may have";
    EXPECT_EQ(two[0].second.leaving, 32);
    EXPECT_EQ(two[1].second.leaving, 0);
    EXPECT_EQ(two[0].second.joins, 0);
    EXPECT_EQ(two[1].second.joins, 1);
    for (const auto& [blocks, p] : two) EXPECT_EQ(p.clusters, 66 + 32);
    EXPECT_EQ(two[0].second.tickets, two[1].second.tickets);
    for (const auto& one : {grad_weights(9000, 0), grad_weights(8000, 2)}) {  // all of a call; 256 tiles, fewer than four a cluster
        ASSERT_EQ(one.size(), 1U);
        EXPECT_EQ(one[0].second.clusters + one[0].second.leaving + one[0].second.joins, 0);
    }
}

// Of what lies in memory of its own a part is retained: chunks first, so that the retained part's grad_weight can be left for later.
TEST(Stages, APart_ChunksComeFirstAndTheRetainedPartFinishesTheSum) {
    const Layer layer("D=2048,V=9000,whole_vocab_size=30000,dtype=bf16");
    constexpr std::int64_t kTokens = 3000;
    CallSlots slots = layer.call(Pass::backward, kTokens, 8000, 8000);
    set(slots, Slot::retained, 99 * kStep);
    set(slots, Slot::retained_bytes, evaluate(layer.program.retained_bytes, slots) / 2);
    const Launched pass = test::run(layer.program, layer.program.backward, slots);
    std::vector<std::string> order;
    for (const Recorded& r : pass) order.push_back(r.kernel);
    const auto place = [&](const char* kernel) { return std::ranges::find(order, kernel) - order.begin(); };
    EXPECT_LT(place("flce_backward_chunks"), place("flce_retained_rows"));
    EXPECT_LT(place("flce_retained_rows"), place("flce_grad_hidden"));
    EXPECT_LT(place("flce_grad_hidden"), place("flce_grad_weight"));
    EXPECT_EQ(pass.count("retained_rows"), 2) << "scaled hidden states have been written over";
    for (const Recorded& r : pass) {
        if (r.kernel == "flce_backward_chunks") {
            const auto p = r.params<BackwardChunksSm90Params>();
            EXPECT_EQ(p.last, 0);
            EXPECT_EQ(p.first != 0, p.first_column == 3584) << p.first_column;
        }
        if (r.kernel != "flce_grad_hidden") continue;
        EXPECT_EQ(r.params<GradHiddenSm90Params>().first, 0);
        EXPECT_EQ(r.params<GradHiddenSm90Params>().last, 1);
    }
}

// Without shards a call that is cut in two does the same things, too.
INSTANTIATE_TEST_SUITE_P(Every, Stages,
                         testing::Combine(testing::Values("D=2048,V=9000,whole_vocab_size=30000,dtype=bf16,bias,label_smoothing=0.1",
                                                          "D=2048,V=9000,whole_vocab_size=30000,dtype=bf16,grad_hidden_dtype=fp32",
                                                          "D=2048,V=9000,whole_vocab_size=30000,dtype=fp16,bias"),
                                          testing::Values(Kept::none, Kept::all, Kept::part, Kept::lent, Kept::part_lent),
                                          testing::Bool()));

TEST(Stages, HiddenIsDeferred_WhereNothingElseWantsIt) {
    EXPECT_TRUE(Layer("D=2048,V=9000,whole_vocab_size=30000,dtype=bf16").program.defers_hidden);
    EXPECT_TRUE(Layer("D=2048,V=9000,whole_vocab_size=30000,dtype=bf16,bias,teacher_top_k=5").program.defers_hidden);
    EXPECT_FALSE(Layer("D=2048,V=9000,whole_vocab_size=30000,dtype=bf16,label_smoothing=0.1").program.defers_hidden)
        << "its sum over hidden goes along with the one over the weight";
    EXPECT_FALSE(Layer("D=2048,V=9000,dtype=bf16").program.defers_hidden);
    EXPECT_FALSE(Layer("D=2048,V=9000,whole_vocab_size=30000,dtype=fp32").program.defers_hidden) << "nothing is retained";
}

// All of the vocabulary is retained: hidden states are scaled beside the last clusters of grad_hidden, and before grad_weight reads them.
// A call for one gradient has nothing to scale, or nothing to do it beside.
TEST(ScaledHidden, AllRetained_IsMadeBesideGradHidden) {
    for (const char* spec : {"D=2048,V=9000,dtype=bf16", "D=2048,V=9000,dtype=bf16,bias,label_smoothing=0.1",
                             "D=2048,V=9000,whole_vocab_size=30000,dtype=bf16"}) {
        const Layer layer(spec);
        for (const std::int64_t tokens : {600, 3000}) {
            CallSlots slots = layer.call(Pass::backward, tokens, layer.spec.vocab_size, layer.spec.vocab_size);
            set(slots, Slot::retained, 99 * kStep);
            set(slots, Slot::retained_bytes, evaluate(layer.program.retained_bytes, slots));
            const Launched both = test::run(layer.program, layer.program.backward, slots);
            std::vector<std::string> order;
            for (const Recorded& r : both) order.push_back(r.kernel);
            const auto place = [&](const char* kernel) { return std::ranges::find(order, kernel) - order.begin(); };
            ASSERT_LT(place("flce_grad_hidden"), place("flce_grad_weight")) << spec;
            EXPECT_LT(place("flce_grad_hidden"), place("flce_scatter_rows"));
            EXPECT_LT(place("flce_scatter_rows"), place("flce_grad_weight"));
            const RetainedRowsParams rows = rows_of(both);
            EXPECT_EQ(rows.scaled_hidden, nullptr);
            const ScatterRowsParams p = scatter_of(both);
            EXPECT_EQ(address_of(p.scaled_hidden), hidden_of_grad_weight(both));
            EXPECT_EQ(p.row_scales, rows.row_scales);
            EXPECT_EQ(p.rows_scaled, rows.counters + rows.counter_count - 1) << "it is 0 before";
            CallSlots alone = slots;
            set(alone, Slot::grad_hidden, 0);
            EXPECT_NE(rows_of(test::run(layer.program, layer.program.backward, alone)).scaled_hidden, nullptr);
            alone = slots;
            set(alone, Slot::grad_weight, 0);
            const Launched without = test::run(layer.program, layer.program.backward, alone);
            EXPECT_EQ(rows_of(without).scaled_hidden, nullptr);
            EXPECT_EQ(scatter_of(without).scaled_hidden, nullptr);
        }
    }
}

TEST(Stages, NoShard_BothTogetherAreTheWhole) {
    const Layer layer("D=2048,V=9000,dtype=bf16");
    for (const std::int64_t part : {1, 2, 4}) {
        std::vector<Launched> passes;
        for (const std::int64_t stage : {0, 1, 2}) {
            CallSlots slots = layer.call(Pass::backward, 3000, 9000, 9000);
            set(slots, Slot::retained, 99 * kStep);
            set(slots, Slot::retained_bytes, evaluate(layer.program.retained_bytes, slots) / part);
            set(slots, Slot::stage, stage);
            passes.push_back(test::run(layer.program, layer.program.backward, slots));
        }
        EXPECT_EQ(sorted_identities({&passes[1], &passes[2]}), sorted_identities({&passes[0]}));
    }
}

}  // namespace
}  // namespace flce::shard_stages
