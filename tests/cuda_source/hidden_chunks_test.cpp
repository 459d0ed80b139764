// grad_hidden alone, as a frozen head asks for it: the order in which halves of the rows take turns, and what the host passes to it.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "templates/sm90/chunk_phases.cuh"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce::hidden_chunks {
namespace {

using test::InterpretedMap;
using test::Launched;
using test::Recorded;

struct Shape {
    enum : bool { kHiddenOnly = true };
    int row_count;
    int all_columns;
    int width;
    [[nodiscard]] int rows() const { return row_count; }
    [[nodiscard]] int columns() const { return all_columns; }
    [[nodiscard]] int even_width() const { return width; }
    [[nodiscard]] int pair_width() const { return width; }
    [[nodiscard]] int parts() const { return 1; }
    [[nodiscard]] int half_rows() const { return ((row_count + 255) / 256 + 1) / 2 * 256; }
};
using Phases = ChunkPhases<Shape, 2048, 256, 192>;
using Phase = std::pair<ChunkKind, int>;

constexpr Shape kShapes[] = {{4096, 151936, 7680}, {4000, 1537, 768}, {2049, 500, 768}, {300, 3000, 768}, {256, 3000, 768}, {1, 3000, 768}};

std::vector<Phase> order_of(const Shape& shape) {
    std::vector<Phase> order;
    Phases phases(shape);
    do {
        order.emplace_back(phases.kind, phases.chunk);
    } while (phases.advance());
    return order;
}

TEST(HiddenChunkPhases, AnyShape_EveryRowMeetsEveryColumnOnce) {
    for (const Shape& shape : kShapes) {
        const Phases phases(shape);
        for (const ChunkKind kind : {ChunkKind::dlogits, ChunkKind::grad_hidden}) {
            std::set<std::pair<int, int>> corners;
            std::int64_t area = 0;
            for (const auto& [of, chunk] : order_of(shape)) {
                if (of != kind) continue;
                EXPECT_TRUE(corners.emplace(phases.first_row_of(chunk), phases.begin_of(chunk)).second);
                EXPECT_GT(phases.rows_of(chunk), 0);
                EXPECT_GT(phases.width_of(kind, chunk), 0);
                EXPECT_LE(phases.first_row_of(chunk) + phases.rows_of(chunk), shape.row_count);
                EXPECT_EQ(phases.place_of(chunk), 0) << "a half's place is its rows";
                area += std::int64_t{phases.rows_of(chunk)} * phases.width_of(kind, chunk);
            }
            EXPECT_EQ(area, std::int64_t{shape.row_count} * shape.all_columns);
        }
        for (const auto& [kind, chunk] : order_of(shape)) EXPECT_NE(kind, ChunkKind::grad_weight);
    }
}

// A tile waits for earlier phases, and where both halves have rows for one that is not just before.
TEST(HiddenChunkPhases, WhatIsWaitedFor_IsEarlier) {
    for (const Shape& shape : kShapes) {
        const std::vector<Phase> order = order_of(shape);
        const auto number = [&](const Phase& phase) { return std::ranges::find(order, phase) - order.begin(); };
        for (const Phase& phase : order) {
            Phases phases(shape);
            phases.kind = phase.first;
            phases.chunk = phase.second;
            std::set<Phase> waited;
            phases.for_each_needed([&](ChunkKind kind, int chunk) {
                waited.emplace(kind, chunk);
                EXPECT_LT(number({kind, chunk}), number(phase) - (phases.is_alone(chunk) ? 0 : 1));
            });
            if (phase.first == ChunkKind::grad_hidden) {
                EXPECT_TRUE(waited.contains({ChunkKind::dlogits, phase.second})) << "reads it";
            }
            if (phase.second >= 2) {
                EXPECT_TRUE(waited.contains({ChunkKind::grad_hidden, phase.second - 2})) << "read what this writes over, began this sum";
            }
        }
        // Where grad_hidden is written listed hidden states may lie, which either half's last logits are made of.
        Phases last(shape);
        last.kind = order.back().first;
        last.chunk = order.back().second;
        std::set<Phase> waited;
        last.for_each_reader_of_hidden([&](ChunkKind kind, int chunk) { waited.emplace(kind, chunk); });
        for (const auto& [kind, chunk] : order) {
            if (kind == ChunkKind::dlogits && last.is_last(chunk)) {
                EXPECT_TRUE(waited.contains({kind, chunk}));
            }
        }
    }
}

struct Frozen {
    std::int64_t tokens;
    std::int64_t groups;
    std::int64_t retained = 0;
};

Launched backward_of(const std::string& spec_text, const Frozen& call, std::initializer_list<Slot> absent, std::int64_t* bytes = nullptr) {
    const Spec spec = parse_spec(spec_text);
    const Device device = describe_device("h200");
    const CudaProgram program = generate_cuda(spec, device, choose_plan(spec, device));
    CallSlots slots = test::made_up_call(call.tokens, absent);
    slots[static_cast<std::size_t>(Slot::retained)] = call.retained == 0 ? 0 : std::int64_t{98} << 44;
    slots[static_cast<std::size_t>(Slot::retained_bytes)] = call.retained;
    if (bytes != nullptr) *bytes = evaluate(program.backward_workspace_bytes, slots);
    return test::run(program, program.backward, slots);
}

TEST(HiddenChunks, FrozenWeight_GroupsOfTokensCoverEverything) {
    for (const Frozen& call : {Frozen{2048, 1}, {4096, 1}, {5000, 1}, {8192, 2}, {12289, 3}, {4096, 1, std::int64_t{256} << 20}}) {
        for (const char* spec : {"D=2048,V=151936", "D=4096,V=128256,temperature", "D=2304,V=256000,softcap=30"}) {
            SCOPED_TRACE(std::string(spec) + " " + std::to_string(call.tokens));
            std::int64_t bytes = 0;
            const Launched pass = backward_of(spec, call, {Slot::grad_weight}, &bytes);
            EXPECT_EQ(pass.count("dlogits") + pass.count("grad_weight") + pass.count("backward_chunks"), 0);
            EXPECT_EQ(pass.count("grad_hidden"), call.retained != 0 ? 1 : 0);
            ASSERT_EQ(pass.count("hidden_chunks"), call.groups);
            std::int64_t rows = 0;
            const bool scatters = call.groups > 1;
            for (const Recorded& r : pass) {
                if (r.kernel != "flce_hidden_chunks") continue;
                const auto p = r.params<BackwardChunksSm90Params>();
                EXPECT_EQ(p.list.first, rows);
                rows += p.rows;
                EXPECT_EQ(p.first_column + p.columns, parse_spec(spec).vocab_size);
                EXPECT_EQ(p.first_column != 0, call.retained != 0);
                EXPECT_EQ(p.first, p.first_column == 0);
                EXPECT_EQ(p.last, scatters ? 0 : 1) << "hidden states of other groups lie in grad_hidden";
                EXPECT_EQ(p.even_width, p.pair_width);
                EXPECT_EQ(p.pair_width % 192, 0);
                EXPECT_LE(std::int64_t{2} * p.rows * p.pair_width, std::int64_t{64} << 20);
                const std::int64_t chunks = 2 * ((p.columns + p.pair_width - 1) / p.pair_width);
                const auto counters = reinterpret_cast<std::int64_t>(p.taken);
                ASSERT_TRUE(pass.memsets.contains(counters));
                EXPECT_LE((1 + chunks * kChunkKinds) * 4 * call.groups, pass.memsets.at(counters));
            }
            EXPECT_EQ(rows, call.tokens);
            const auto scatter = pass.launches.back().params<ScatterRowsParams>();
            EXPECT_EQ(pass.launches.back().kernel, "flce_scatter_rows");
            EXPECT_EQ(scatter.accumulator != nullptr && scatter.share.room == 0, scatters);
            for (const int listed : {1, 300, static_cast<int>(call.tokens)}) EXPECT_EQ(SumParts(scatter.share, listed).count, 1);
        }
    }
}

/// The map of a launch at `member`'s place.
InterpretedMap map_of(const Recorded& r, TensorMap RoundedChunksSm90Params::* member) {
    static const RoundedChunksSm90Params params{};
    const auto at = reinterpret_cast<const char*>(&(params.*member)) - reinterpret_cast<const char*>(&params);
    const auto found = std::ranges::find(r.launch.maps, static_cast<std::size_t>(at), &InterpretedMap::offset);
    EXPECT_NE(found, r.launch.maps.end());
    return found == r.launch.maps.end() ? InterpretedMap{} : *found;
}

/// Looks at the places of a launch that rounds its weight: two of a pair's rows behind dlogits, within the scratch.
void expect_two_places(const Recorded& r, const Launched& pass, const Spec& spec, std::int64_t workspace_bytes) {
    const auto p = r.params<RoundedChunksSm90Params>();
    const std::int64_t workspace = std::int64_t{100} << 44;
    const auto weight_at = static_cast<std::int64_t>(Slot::weight) + 1;
    EXPECT_EQ(reinterpret_cast<std::int64_t>(p.of.weight), weight_at << 44) << "the whole weight";
    EXPECT_EQ(p.of.scale != nullptr, is_quantized(spec));
    EXPECT_EQ(p.first_column + p.columns, spec.vocab_size);
    EXPECT_EQ(p.pair_width % RoundedChunksSm90Params::kRows, 0);
    const auto rounded = reinterpret_cast<std::int64_t>(p.rounded);
    for (const auto member : {&RoundedChunksSm90Params::weight_map, &RoundedChunksSm90Params::weight_sum_map}) {
        const InterpretedMap map = map_of(r, member);
        EXPECT_EQ(map.address, rounded);
        EXPECT_EQ(map.rows, 2 * p.pair_width);
        EXPECT_EQ(map.columns, spec.hidden_size);
    }
    const InterpretedMap dlogits = map_of(r, &RoundedChunksSm90Params::dlogits_map);
    EXPECT_GE(rounded, dlogits.address + dlogits.rows * dlogits.columns * 2);
    const std::int64_t end = rounded + std::int64_t{4} * p.pair_width * spec.hidden_size;
    EXPECT_LE(end, workspace + workspace_bytes);
    const auto sum = reinterpret_cast<std::int64_t>(p.accumulator);
    EXPECT_TRUE(sum >= end || sum < dlogits.address) << "grad_hidden's sum lies elsewhere";
    const std::int64_t pairs = (p.columns + p.pair_width - 1) / p.pair_width;
    const auto counters = reinterpret_cast<std::int64_t>(p.taken);
    const auto rounding = reinterpret_cast<std::int64_t>(p.rounding);
    EXPECT_GE(rounding, counters + (1 + 2 * pairs * kChunkKinds) * 4);
    ASSERT_TRUE(pass.memsets.contains(counters));
    EXPECT_LE(rounding + (1 + pairs) * 4, counters + pass.memsets.at(counters));
}

TEST(RoundedChunks, WeightIsRoundedInTwoPlaces) {
    for (const char* text : {"D=2048,V=151936,weight_dtype=e4m3", "D=4096,V=128256,weight_dtype=nvfp4,temperature",
                             "D=2048,V=50257,weight_dtype=fp32,bias", "D=1040,V=33333,weight_dtype=e4m3,weight_block=128"}) {
        const Spec spec = parse_spec(text).normalized();
        for (const Frozen& call : {Frozen{2048, 1}, {4096, 1}, {5000, 1}, {12289, 3}}) {
            SCOPED_TRACE(std::string(text) + " " + std::to_string(call.tokens));
            std::int64_t bytes = 0;
            const Launched pass = backward_of(text, call, {Slot::grad_weight, Slot::grad_bias}, &bytes);
            ASSERT_EQ(pass.count("hidden_chunks"), call.groups);
            EXPECT_EQ(pass.count("round_weight"), 0);
            EXPECT_LE(bytes, (std::int64_t{64} << 20) + 4 * call.tokens * spec.hidden_size);
            for (const Recorded& r : pass) {
                if (r.kernel == "flce_hidden_chunks") expect_two_places(r, pass, spec, bytes);
            }
            if (is_quantized(spec)) continue;
            const Launched both = backward_of(text, call, {}, &bytes);
            ASSERT_EQ(both.count("backward_chunks"), 1);
            EXPECT_EQ(both.count("round_weight"), 0);
            for (const Recorded& r : both) {
                if (r.kernel == "flce_backward_chunks") expect_two_places(r, both, spec, bytes);
            }
        }
    }
}

// Chunks of the fewest columns, of which there are as many as there are counters for.
TEST(RoundedChunks, EveryWidth_HasCountersForItsPairs) {
    for (const int hidden_size : {2048, 4096, 5120, 6144, 8192}) {
        for (const char* format : {"e4m3", "fp32"}) {
            const std::string text = "D=" + std::to_string(hidden_size) + ",V=128256,weight_dtype=" + format;
            const Spec spec = parse_spec(text).normalized();
            for (std::int64_t tokens = 2048; tokens <= 8192; tokens += 512) {
                SCOPED_TRACE(text + " " + std::to_string(tokens));
                std::int64_t bytes = 0;
                const Launched pass = backward_of(text, {tokens, 1}, {Slot::grad_weight}, &bytes);
                for (const Recorded& r : pass) {
                    if (r.kernel == "flce_hidden_chunks") expect_two_places(r, pass, spec, bytes);
                }
            }
        }
    }
}

// Few tokens have chunks of their own, each rounded by a launch before, in all of the scratch.
TEST(RoundedChunks, FewTokens_AreChunkByChunk) {
    const Launched pass = backward_of("D=2048,V=151936,weight_dtype=e4m3", {2047, 0}, {Slot::grad_weight});
    EXPECT_EQ(pass.count("hidden_chunks"), 0);
    EXPECT_EQ(pass.count("round_weight"), pass.count("dlogits"));
    EXPECT_EQ(backward_of("D=2048,V=151936,weight_dtype=fp32", {512, 0}, {}).count("backward_chunks"), 0);
}

TEST(HiddenChunks, WideEnoughThatSumsAreSeldomGoneThrough) {
    const Launched many = backward_of("D=4096,V=151936", {8192, 2}, {Slot::grad_weight});
    const Launched few = backward_of("D=4096,V=151936", {4096, 1}, {Slot::grad_weight});
    const auto width = [](const Launched& pass) {
        return std::ranges::find(pass.launches, "flce_hidden_chunks", &Recorded::kernel)->params<BackwardChunksSm90Params>().pair_width;
    };
    EXPECT_GE(width(many), width(few) * 9 / 10) << "however many tokens there are";
}

// Few tokens, and calls that want something else.
TEST(HiddenChunks, OtherCalls_HaveNone) {
    const std::string spec = "D=2048,V=151936";
    EXPECT_EQ(backward_of(spec, {2047, 0}, {Slot::grad_weight}).count("hidden_chunks"), 0);
    EXPECT_EQ(backward_of(spec, {4096, 0}, {}).count("hidden_chunks"), 0);
    EXPECT_EQ(backward_of(spec, {4096, 0}, {Slot::grad_hidden}).count("hidden_chunks"), 0);
    EXPECT_EQ(backward_of(spec + ",bias", {4096, 0}, {Slot::grad_weight}).count("hidden_chunks"), 0) << "grad_bias is asked for";
    EXPECT_EQ(backward_of(spec + ",bias", {4096, 0}, {Slot::grad_weight, Slot::grad_bias}).count("hidden_chunks"), 1);
    EXPECT_EQ(backward_of(spec, {300'000, 0}, {Slot::grad_weight}).count("hidden_chunks"), 0) << "tokens in blocks";
    const Launched nothing = backward_of(spec, {4096, 0}, {Slot::grad_weight, Slot::grad_hidden, Slot::grad_bias});
    for (const char* gemm : {"dlogits", "grad_hidden", "grad_weight", "backward_chunks", "hidden_chunks"}) {
        EXPECT_EQ(nothing.count(gemm), 0) << gemm;
    }
}

}  // namespace
}  // namespace flce::hidden_chunks
