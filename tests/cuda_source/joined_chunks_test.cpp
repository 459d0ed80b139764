// Backward of many chunks of the vocabulary in one launch: the order of its phases, and what the host passes to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "flce/plan.hpp"
#include "generator/cuda/sm90/layout.hpp"
#include "generator/cuda_program.hpp"
#include "templates/sm90/chunk_phases.cuh"
#include "templates/sm90/params.cuh"
#include "tests/support/interpreter.hpp"

namespace flce::joined_chunks {
namespace {

using test::interpret;
using test::InterpretedLaunch;
using test::InterpretedMap;

struct Shape {
    enum : bool { kHiddenOnly = false };
    int row_count;
    int all_columns;
    int even;
    int pair;
    int sum_parts = 1;
    [[nodiscard]] int rows() const { return row_count; }
    [[nodiscard]] int columns() const { return all_columns; }
    [[nodiscard]] int even_width() const { return even; }
    [[nodiscard]] int pair_width() const { return pair; }
    [[nodiscard]] int parts() const { return sum_parts; }
};
using Phases = ChunkPhases<Shape, 2048, 256, 192>;
using Phase = std::pair<ChunkKind, int>;

constexpr Shape kShapes[] = {
    {4096, 151936, 3840, 7680}, {300, 1536, 768, 1536}, {300, 1537, 768, 1536}, {300, 500, 768, 1536},  {300, 768, 768, 1536},
    {300, 769, 768, 1536},      {64, 3500, 1536, 2304}, {64, 4608, 1536, 2304}, {64, 6144, 1536, 2304}, {8192, 128256, 2304, 3840},
};

std::vector<Phase> order_of(const Shape& shape) {
    std::vector<Phase> order;
    Phases phases(shape);
    do {
        order.emplace_back(phases.kind, phases.chunk);
    } while (phases.advance());
    return order;
}

TEST(ChunkPhases, AnyShape_CoverTheVocabularyOnce) {
    for (const Shape& shape : kShapes) {
        const Phases phases(shape);
        std::map<ChunkKind, std::map<int, int>> widths;  // by kind: where a chunk begins, its columns
        for (const auto& [kind, chunk] : order_of(shape)) {
            EXPECT_TRUE(widths[kind].emplace(phases.begin_of(chunk), phases.width_of(kind, chunk)).second) << "a phase comes once";
            EXPECT_GE(phases.place_of(chunk), 0);
            EXPECT_LE(phases.place_of(chunk) + phases.width_of(kind, chunk), shape.pair);
        }
        for (const ChunkKind kind : {ChunkKind::dlogits, ChunkKind::grad_hidden, ChunkKind::grad_weight}) {
            int next = 0;
            for (const auto& [begin, width] : widths[kind]) {
                EXPECT_EQ(begin, next);
                EXPECT_GT(width, 0);
                next += width;
            }
            EXPECT_EQ(next, shape.all_columns);
        }
    }
}

/// Whether `phase` waits for `before`, directly or through other phases.
bool follows(const Shape& shape, const Phase& phase, const Phase& before) {
    Phases phases(shape);
    phases.kind = phase.first;
    phases.chunk = phase.second;
    bool found = false;
    phases.for_each_needed([&](ChunkKind kind, int chunk) {
        const Phase needed{kind, chunk};
        found = found || needed == before || follows(shape, needed, before);
    });
    return found;
}

TEST(ChunkPhases, AnyShape_NothingIsReadOrWrittenTooEarly) {
    for (Shape shape : kShapes) {
        shape.all_columns = std::min(shape.all_columns, 5 * shape.pair + shape.even / 2);
        const Phases phases(shape);
        const std::vector<Phase> order = order_of(shape);
        for (const Phase& phase : order) {
            const auto& [kind, chunk] = phase;
            if (kind != ChunkKind::dlogits) {
                EXPECT_TRUE(follows(shape, phase, {ChunkKind::dlogits, chunk})) << "reads it";
            } else if (chunk >= 2) {
                EXPECT_TRUE(follows(shape, phase, {ChunkKind::grad_weight, chunk - 2})) << "writes over what that reads";
                EXPECT_TRUE(follows(shape, phase, {ChunkKind::grad_hidden, chunk / 2 * 2 - 2})) << "writes over what that reads";
            }
            if (kind == ChunkKind::grad_hidden) {
                if (!phases.is_alone(chunk)) {
                    EXPECT_TRUE(follows(shape, phase, {ChunkKind::dlogits, chunk + 1}));
                }
                if (chunk > 0) {
                    EXPECT_TRUE(follows(shape, phase, {ChunkKind::grad_hidden, chunk - 2})) << "sums are added in order";
                }
            }
        }
        // Where grad_hidden is written, no tile of grad_weight may still read hidden states.
        std::vector<Phase> waited;
        Phases last(shape);
        last.kind = order.back().first;
        last.chunk = order.back().second;
        ASSERT_EQ(last.kind, ChunkKind::grad_hidden);
        last.for_each_reader_of_hidden([&](ChunkKind kind, int chunk) { waited.emplace_back(kind, chunk); });
        for (const Phase& phase : order) {
            if (phase.first != ChunkKind::grad_weight) continue;
            const bool is_waited = std::ranges::any_of(waited, [&](const Phase& w) { return w == phase || follows(shape, w, phase); });
            EXPECT_TRUE(is_waited || follows(shape, order.back(), phase)) << "grad_weight of chunk " << phase.second;
        }
    }
}

// A tile waits only for earlier ones, so that blocks which take them in order cannot wait for each other for ever; and in the middle of a
// long vocabulary for those of a phase that is not the one just before.
TEST(ChunkPhases, WhatIsWaitedFor_IsEarlierByMoreThanAPhase) {
    for (const Shape& shape : kShapes) {
        const std::vector<Phase> order = order_of(shape);
        const auto number = [&](const Phase& phase) { return std::ranges::find(order, phase) - order.begin(); };
        for (std::ptrdiff_t i = 0; i < std::ssize(order); ++i) {
            Phases phases(shape);
            phases.kind = order[static_cast<std::size_t>(i)].first;
            phases.chunk = order[static_cast<std::size_t>(i)].second;
            const bool ends = phases.is_last(phases.chunk) || phases.is_alone(phases.chunk / 2 * 2);
            phases.for_each_needed([&](ChunkKind kind, int chunk) {
                EXPECT_LT(number({kind, chunk}), i);
                if (!ends) {
                    EXPECT_LT(number({kind, chunk}), i - 1);
                }
            });
        }
    }
}

TEST(ChunkPhases, SumInParts_CoversEveryPairOnce) {
    for (Shape shape : kShapes) {
        for (const int parts : {2, 3, 8}) {
            shape.sum_parts = parts;
            const Phases phases(shape);
            for (const auto& [kind, chunk] : order_of(shape)) {
                if (kind != ChunkKind::grad_hidden) continue;
                const PartSlices divided = phases.parts_of(chunk);
                EXPECT_LE(divided.count, parts);
                EXPECT_GE(divided.count * divided.of_part * kSumSlice, phases.width_of(kind, chunk));
                EXPECT_LT((divided.count - 1) * divided.of_part * kSumSlice, phases.width_of(kind, chunk)) << "a part without a slice";
                const int clusters = phases.rows_of_part() / 256;
                EXPECT_GE(clusters * 256, shape.row_count);
                EXPECT_EQ(phases.tiles_of(kind, chunk), static_cast<unsigned>(divided.count * clusters * phases.columns_of(kind, chunk)));
            }
        }
    }
}

constexpr std::int64_t address(Slot slot) { return (static_cast<std::int64_t>(slot) + 1) << 44; }

struct Launched {
    std::string kernel;
    InterpretedLaunch launch;
};
struct Pass {
    std::vector<Launched> launches;
    std::vector<std::pair<std::int64_t, std::int64_t>> memsets;
    std::int64_t workspace_bytes = 0;

    [[nodiscard]] std::int64_t count(const std::string& kernel) const { return std::ranges::count(launches, kernel, &Launched::kernel); }
    [[nodiscard]] std::vector<BackwardChunksSm90Params> joined() const {
        std::vector<BackwardChunksSm90Params> all;
        for (const Launched& l : launches) {
            if (l.kernel != "flce_backward_chunks") continue;
            std::memcpy(static_cast<void*>(&all.emplace_back()), l.launch.params.data(), sizeof(BackwardChunksSm90Params));
        }
        return all;
    }
};

Pass backward_of(const std::string& spec_text, std::int64_t num_tokens, const std::map<Slot, std::int64_t>& others = {},
                 const std::optional<GemmTile>& grad_hidden = {}) {
    const Spec spec = parse_spec(spec_text);
    const Device device = describe_device("h200");
    Plan plan = choose_plan(spec, device);
    if (grad_hidden) plan.cuda.grad_hidden = *grad_hidden;
    EXPECT_EQ(illegal_reason(spec, device, plan), std::nullopt);
    const CudaProgram program = generate_cuda(spec, device, plan);
    CallSlots slots{};
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i + 1) << 44;
    const auto set = [&](Slot slot, std::int64_t value) { slots[static_cast<std::size_t>(slot)] = value; };
    set(Slot::num_tokens, num_tokens);
    set(Slot::target_bits, 64);
    set(Slot::reduction, 0);
    set(Slot::num_valid_code, 0);
    set(Slot::ignore_index, -100);
    set(Slot::retained_bytes, 0);
    for (const auto& [slot, value] : others) set(slot, value);
    Pass pass;
    pass.workspace_bytes = evaluate(program.backward_workspace_bytes, slots);
    interpret(
        program.backward, slots,
        [&](const InterpretedLaunch& launch) {
            pass.launches.push_back({program.kernels[static_cast<std::size_t>(launch.kernel)].name, launch});
        },
        [&](std::int64_t at, std::int64_t bytes) { pass.memsets.emplace_back(at, bytes); });
    return pass;
}

// A chunk that ended within a cluster's tiles of grad_weight would have them written over the next one's.
TEST(JoinedChunks, TilesOfOtherSizes_EveryChunkIsWholeTiles) {
    const Spec spec = parse_spec("D=2048,V=151936,dtype=bf16").normalized();
    const Device device = describe_device("h200");
    Plan plan = choose_plan(spec, device);
    plan.cuda.dlogits = {.block_m = 128, .block_n = 128, .block_k = 64, .stages = 6, .schedule = TileSchedule::by_turns};
    plan.cuda.grad_weight = {.block_m = 192, .block_n = 128, .block_k = 64, .stages = 4, .schedule = TileSchedule::by_turns};
    std::size_t joined = 0;
    for (const std::int64_t scratch : {64, 100, 160, 200, 240, 280, 2048, 4096}) {
        plan.scratch_bytes = scratch << 20;
        ASSERT_EQ(illegal_reason(spec, device, plan), std::nullopt);
        const sm90::BackwardLayoutSm90 layout = sm90::backward_layout(spec, device, plan);
        CallSlots slots{};
        slots[static_cast<std::size_t>(Slot::grad_weight)] = std::int64_t{1} << 44;
        for (std::int64_t n = 4000; n < 200'000; n += 1000) {
            slots[static_cast<std::size_t>(Slot::num_tokens)] = n;
            if (evaluate(layout.joined, slots) == 0) continue;
            ++joined;
            for (const Expr& pair : {layout.chunk, layout.wide_chunk}) {
                EXPECT_EQ(evaluate(pair, slots) % 256, 0) << n;
                EXPECT_EQ(evaluate(sm90::first_of_pair(plan, pair), slots) % 256, 0) << n;
            }
        }
    }
    EXPECT_GT(joined, 10U);
}

TEST(JoinedChunks, BothGradients_AreOneLaunchForAllOfTheVocabulary) {
    for (const char* mode : {"", ",grad_weight_mode=accumulate", ",softcap=30"}) {
        for (const std::int64_t n : {600, 1536, 4096, 8192}) {
            const Pass pass = backward_of(std::string("D=2048,V=151936") + mode, n);
            EXPECT_EQ(pass.count("flce_dlogits") + pass.count("flce_grad_hidden") + pass.count("flce_grad_weight"), 0);
            std::int64_t next = 0;
            const std::vector<BackwardChunksSm90Params> joined = pass.joined();
            ASSERT_FALSE(joined.empty());
            for (const BackwardChunksSm90Params& p : joined) {
                EXPECT_EQ(p.first_column, next);
                EXPECT_EQ(p.first, next == 0);
                next += p.columns;
                EXPECT_EQ(p.last, next == 151936);
                EXPECT_EQ(p.rows, n);
                EXPECT_EQ(p.even_width % 768, 0);
                EXPECT_EQ((p.pair_width - p.even_width) % 768, 0);
                EXPECT_GE(p.even_width, p.pair_width - p.even_width);
                EXPECT_LT(p.even_width, p.pair_width);
            }
            EXPECT_EQ(next, 151936);
        }
    }
}

TEST(JoinedChunks, CountersAndSums_HaveTheirPlaceInTheWorkspace) {
    for (const std::int64_t n : {600, 1000, 1536, 4096, 8192}) {
        const Pass pass = backward_of("D=2048,V=151936,grad_weight_mode=accumulate", n);
        ASSERT_EQ(pass.joined().size(), 1U);
        const BackwardChunksSm90Params p = pass.joined().front();
        const auto taken = reinterpret_cast<std::int64_t>(p.taken);
        const auto progress = reinterpret_cast<std::int64_t>(p.progress);
        const auto sum = reinterpret_cast<std::int64_t>(p.accumulator);
        const std::int64_t chunks = 2 * ((p.columns + p.pair_width - 1) / p.pair_width);
        ASSERT_EQ(pass.memsets.size(), 1U);
        const auto [zeroed, bytes] = pass.memsets.front();
        EXPECT_EQ(zeroed, taken);
        EXPECT_LE(progress + chunks * kChunkKinds * 4, zeroed + bytes);
        EXPECT_LE(zeroed + bytes, sum);
        const SumParts parts(p.share, static_cast<int>(n));
        EXPECT_LE(sum + std::max(n, std::int64_t{parts.count} * parts.stride) * 2048 * 4, address(Slot::workspace) + pass.workspace_bytes);
        const auto launch = std::ranges::find(pass.launches, "flce_backward_chunks", &Launched::kernel);
        std::vector<std::int64_t> dlogits_columns;
        for (const InterpretedMap& map : launch->launch.maps) {
            if (map.row_bytes != p.pair_width * 2) continue;
            dlogits_columns.push_back(map.columns);
            EXPECT_LE(map.address + n * map.row_bytes, taken) << "dlogits' places end before";
        }
        const std::int64_t last = p.columns - (chunks / 2 - 1) * p.pair_width;
        EXPECT_THAT(dlogits_columns, testing::UnorderedElementsAre(p.pair_width, p.pair_width, last));
    }
}

/// Work of the last launch on rows of grad_hidden.
ScatterRowsParams scattered(const Pass& pass) {
    ScatterRowsParams params{};
    EXPECT_EQ(pass.count("flce_scatter_rows"), 1);
    std::memcpy(static_cast<void*>(&params), pass.launches.back().launch.params.data(), sizeof(params));
    return params;
}

// The joined launch writes grad_hidden where it has the sum in one part; the kernels after it have to leave it alone then.
TEST(JoinedChunks, OneWritesGradHidden_ItOrTheLastLaunch) {
    const GemmTile tall{.block_m = 256, .block_n = 128, .block_k = 64, .stages = 4, .schedule = TileSchedule::together};
    for (const std::optional<GemmTile>& grad_hidden : {std::optional<GemmTile>(), std::optional(tall)}) {
        for (const std::int64_t n : {600, 1000, 1536, 4096, 8192}) {
            const Pass pass = backward_of("D=2048,V=151936,grad_weight_mode=accumulate", n, {}, grad_hidden);
            ASSERT_EQ(pass.joined().size(), 1U);
            const SumShare share = pass.joined().front().share;
            const ScatterRowsParams scatter = scattered(pass);
            EXPECT_EQ(std::memcmp(&scatter.share, &share, sizeof(share)), 0);
            for (const int listed : {static_cast<int>(n), static_cast<int>(n) / 4, 1}) {
                const int parts = SumParts(share, listed).count;
                const bool sums = scatter.accumulator != nullptr && (scatter.share.room == 0 || parts > 1);
                EXPECT_EQ(sums, parts > 1) << n << ' ' << listed;
                if (grad_hidden) {
                    EXPECT_EQ(parts, 1) << "the two kernels' clusters of rows are not alike";
                }
            }
        }
    }
}

// Clusters that take a second tile of a sum keep all others waiting, which have nothing else to do. Tokens that are left of many are few as
// well.
TEST(JoinedChunks, SumOfFewTokens_HasPartsThatTheLastLaunchAddsUp) {
    for (const auto& [n, listed] : {std::pair{1000, 1000}, {600, 600}, {4096, 1024}}) {
        const Pass pass = backward_of("D=2048,V=151936", n);
        ASSERT_FALSE(pass.joined().empty());
        const BackwardChunksSm90Params joined = pass.joined().front();
        const SumShare& share = joined.share;
        EXPECT_GT(SumParts(share, listed).count, 1) << n;
        const ScatterRowsParams scatter = scattered(pass);
        EXPECT_EQ(std::memcmp(&scatter.share, &share, sizeof(share)), 0);
        EXPECT_EQ(scatter.accumulator, joined.accumulator);
        if (n >= 2048) continue;  // halves of the rows then take turns (hidden_chunks_test)
        // A call for this gradient alone sums the same parts.
        const Pass alone = backward_of("D=2048,V=151936", n, {{Slot::grad_weight, 0}});
        const auto launch = std::ranges::find(alone.launches, "flce_grad_hidden", &Launched::kernel);
        ASSERT_NE(launch, alone.launches.end());
        GradHiddenSm90Params params;
        std::memcpy(static_cast<void*>(&params), launch->launch.params.data(), sizeof(params));
        EXPECT_EQ(SumParts(params.share, listed).count, SumParts(share, listed).count) << n;
    }
    EXPECT_EQ(SumParts(backward_of("D=2048,V=151936", 4096).joined().front().share, 4096).count, 1) << "tiles enough";
}

TEST(JoinedChunks, WhatIsRetained_ComesBefore) {
    const Pass pass = backward_of("D=2048,V=151936", 4096, {{Slot::retained_bytes, std::int64_t{256} << 20}});
    EXPECT_EQ(pass.count("flce_grad_hidden"), 1);
    EXPECT_EQ(pass.count("flce_grad_weight"), 1);
    const std::vector<BackwardChunksSm90Params> joined = pass.joined();
    ASSERT_FALSE(joined.empty());
    EXPECT_GT(joined.front().first_column, 0);
    for (const BackwardChunksSm90Params& p : joined) EXPECT_EQ(p.first, 0) << "the sum has been begun";
    EXPECT_EQ(joined.back().last, 1);
    EXPECT_EQ(joined.back().first_column + joined.back().columns, 151936);
    const Pass all = backward_of("D=2048,V=151936", 4096, {{Slot::retained_bytes, std::int64_t{1} << 40}});
    EXPECT_TRUE(all.joined().empty());
}

// The launch that makes grad_weight adds up grad_bias, from the stretch's first column on, so that there are no partial sums, which wide
// chunks would have no room for.
TEST(JoinedChunks, Bias_IsAddedUpInTheLaunch) {
    for (const char* mode : {"", ",grad_weight_mode=accumulate", ",grad_weight_dtype=fp32", ",temperature"}) {
        for (const std::int64_t retained : {std::int64_t{0}, std::int64_t{256} << 20}) {
            const Pass pass = backward_of(std::string("D=2048,V=151936,bias") + mode, 4096,
                                          {{Slot::retained_bytes, retained}, {Slot::retained_in_grad_weight, 0}});
            EXPECT_EQ(pass.count("flce_grad_bias") + pass.count("flce_dlogits") + pass.count("flce_retained_bias"), 0);
            ASSERT_FALSE(pass.joined().empty());
            const std::int64_t element = std::string_view(mode).ends_with("fp32") ? 4 : 2;
            for (const Launched& l : pass.launches) {
                if (l.kernel != "flce_backward_chunks") continue;
                WithGradBias<BackwardChunksSm90Params> p;
                std::memcpy(static_cast<void*>(&p), l.launch.params.data(), sizeof(p));
                EXPECT_EQ(reinterpret_cast<std::int64_t>(p.bias), address(Slot::bias) + p.first_column * 2);
                EXPECT_EQ(reinterpret_cast<std::int64_t>(p.grad_bias), address(Slot::grad_bias) + p.first_column * element);
                EXPECT_EQ(p.bias_partials, nullptr);
            }
        }
    }
    // widths are those without a bias where the call wants both gradients, and otherwise as large as the partial sums allow
    const auto widest = [](const std::string& spec, const std::map<Slot, std::int64_t>& others) {
        return backward_of(spec, 4096, others).joined().front().pair_width;
    };
    EXPECT_EQ(widest("D=2048,V=151936,bias", {}), widest("D=2048,V=151936", {}));
    const Pass without = backward_of("D=2048,V=151936,bias", 4096, {{Slot::grad_bias, 0}});
    ASSERT_FALSE(without.joined().empty());
    const Pass apart = backward_of("D=2048,V=151936,bias", 4096, {{Slot::grad_hidden, 0}});
    for (const Launched& l : apart.launches) {
        if (l.kernel != "flce_dlogits") continue;
        DlogitsParams p;
        std::memcpy(static_cast<void*>(&p), l.launch.params.data(), sizeof(p));
        const auto partials = reinterpret_cast<std::int64_t>(p.bias_partials);
        EXPECT_GE(reinterpret_cast<std::int64_t>(p.dlogits), partials + 4096 / 64 * p.ld * 4) << "the partial sums' place";
        EXPECT_LT(reinterpret_cast<std::int64_t>(p.dlogits), address(Slot::workspace) + apart.workspace_bytes);
    }
}

TEST(JoinedChunks, OneGradient_ChunkByChunk) {
    for (const auto& [slot, n] : {std::pair{Slot::grad_hidden, 4096}, {Slot::grad_weight, 2000}}) {
        const Pass pass = backward_of("D=2048,V=151936", n, {{slot, 0}});
        EXPECT_TRUE(pass.joined().empty());
        EXPECT_GT(pass.count("flce_dlogits"), 1);
        EXPECT_EQ(pass.count("flce_grad_hidden") > 0, slot != Slot::grad_hidden);
        EXPECT_EQ(pass.count("flce_grad_weight") > 0, slot != Slot::grad_weight);
    }
    EXPECT_TRUE(backward_of("D=2048,V=151936,bias", 4096, {{Slot::grad_hidden, 0}}).joined().empty());
    EXPECT_TRUE(backward_of("D=2048,V=151936,layout=hidden_major", 4096).joined().empty());
    EXPECT_TRUE(backward_of("D=2048,V=151936", 64).joined().empty()) << "few tokens";
    EXPECT_TRUE(backward_of("D=2048,V=151936", 300000).joined().empty()) << "tokens in blocks";
}

}  // namespace
}  // namespace flce::joined_chunks
