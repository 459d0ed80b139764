// Passes of a shard in stages: both together make the launches of the whole, and results that others wait for are complete first.
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

// A launch as bytes, to be found again.
std::string identity(const Recorded& r) {
    std::string text = r.kernel + fmt::format(" {} {} ", r.launch.grid[0], r.launch.grid[1]);
    for (const std::byte byte : r.launch.params) text += static_cast<char>(byte);
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

/// Without make_room, which only stages have. `but_rows`: without retained_rows, which the last stage may have once more, and scatter_rows,
/// which may scale hidden states in its place.
std::vector<std::string> sorted_identities(std::initializer_list<const Launched*> passes, bool but_rows = false) {
    std::vector<std::string> all;
    for (const Launched* pass : passes) {
        for (const Recorded& r : *pass) {
            if (r.kernel == "flce_make_room" || (but_rows && (of_rows(r) || r.kernel == "flce_scatter_rows"))) continue;
            all.push_back(identity(r));
        }
        for (const auto& [at, bytes] : pass->memsets) all.push_back(fmt::format("memset {} {}", at, bytes));
    }
    std::ranges::sort(all);
    return all;
}

/// How much of the vocabulary is retained, and where.
enum class Kept { none, all, part, lent, part_lent };

/// A layer, the retained part, and whether hidden is there in the first stage.
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
    EXPECT_EQ(rest.count("make_room"), with_room ? 1 : 0) << "rows of their own leave room as well";
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

// A part is retained in memory of its own: chunks come first, so that the retained part's grad_weight can be left for later.
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
