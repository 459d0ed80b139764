// Launches of the generic path where exponentials are retained: which GEMMs there are, where their operands lie, and in which order memory
// is written over.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "templates/common/output_params.cuh"
#include "templates/common/tile_order.cuh"
#include "templates/sm80/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"
#include "tests/cuda_source/shard_layer.hpp"

namespace flce::retained_generic {
namespace {

using shard_layers::as_address;
using shard_layers::kStep;
using shard_layers::set;
using test::Launched;
using test::Recorded;
using Layer = shard_layers::ShardLayer;

constexpr std::int64_t kTokens = 3000;
constexpr std::int64_t kOwn = 99 * kStep;

/// Amount of the exponentials that is retained, and the memory in which they lie.
enum class Kept { none, all, half, lent };

struct Call {
    Kept kept = Kept::all;
    std::int64_t tokens = kTokens;
    std::vector<Slot> absent;
    std::int64_t stage = 0;
};

class Passes {
public:
    explicit Passes(const std::string& options, const char* device = "a100") : layer("D=2048,V=9000,dtype=bf16" + options, device) {
        EXPECT_EQ(layer.plan.path, PlanPath::cuda_sm80);
        EXPECT_EQ(layer.plan.strategy, Strategy::retain) << options;
    }
    [[nodiscard]] CallSlots slots(Pass pass, const Call& call) const {
        CallSlots slots = layer.call(pass, call.tokens, layer.spec.vocab_size, layer.spec.padded_vocab_size);
        const std::int64_t all = evaluate(layer.program.retained_bytes, slots);
        const bool lent = call.kept == Kept::lent;
        if (call.kept != Kept::none) {
            set(slots, Slot::retained, lent ? shard_layers::address(Slot::grad_weight) : kOwn);
            set(slots, Slot::retained_bytes,
                lent                      ? evaluate(layer.program.lendable_bytes, slots)
                : call.kept == Kept::half ? all / 2
                                          : all);
            set(slots, Slot::retained_in_grad_weight, lent ? 1 : 0);
        }
        for (const Slot slot : call.absent) set(slots, slot, 0);
        set(slots, Slot::stage, call.stage);
        return slots;
    }
    [[nodiscard]] Launched backward(const Call& call) const {
        return test::run(layer.program, layer.program.backward, slots(Pass::backward, call));
    }
    [[nodiscard]] Launched forward(const Call& call) const {
        return test::run(layer.program, layer.program.forward, slots(Pass::forward, call));
    }
    [[nodiscard]] std::int64_t workspace_end(const Call& call) const {
        const CallSlots of = slots(Pass::backward, call);
        return of[static_cast<std::size_t>(Slot::workspace)] + evaluate(layer.program.backward_workspace_bytes, of);
    }

    const Layer layer;
};

int gemms(const Launched& pass) { return pass.count("dlogits") + pass.count("grad_hidden") + pass.count("grad_weight"); }

std::ptrdiff_t place(const Launched& pass, const std::string& kernel) {
    return std::ranges::find(pass.launches, "flce_" + kernel, &Recorded::kernel) - pass.launches.begin();
}
/// Parameters of a kernel's first launch.
template <class Params>
Params first_of(const Launched& pass, const std::string& kernel) {
    const auto found = std::ranges::find(pass.launches, "flce_" + kernel, &Recorded::kernel);
    if (found == pass.launches.end()) {
        ADD_FAILURE() << "no launch of " << kernel;
        return {};
    }
    return found->params<Params>();
}

class RetainedGeneric : public testing::TestWithParam<const char*> {
protected:
    const Passes passes{GetParam()};
};

TEST_P(RetainedGeneric, EverythingRetained_TwoGemms) {
    const Launched pass = passes.backward({});
    EXPECT_EQ(pass.count("grad_hidden"), 1);
    EXPECT_EQ(pass.count("grad_weight"), 1);
    EXPECT_EQ(gemms(pass), 2);
    EXPECT_EQ(pass.count("retained_rows"), 1);
    EXPECT_EQ(pass.count("retained_bias"), passes.layer.spec.bias ? 1 : 0);
    const auto hidden = first_of<RetainGradHiddenParams>(pass, "grad_hidden");
    EXPECT_EQ(hidden.columns, 9000);
    EXPECT_EQ(hidden.first, 1);
    EXPECT_EQ(hidden.last, 1);
    EXPECT_EQ(hidden.block_gap, kTokens * kRetainedColumns - kRetainedColumns) << "from a row's end to its place in the next block";
    const auto rows = first_of<RetainedRowsParams>(pass, "retained_rows");
    EXPECT_EQ(hidden.row_scales, rows.row_scales);
    EXPECT_EQ(hidden.dlogits, rows.exponentials);
    EXPECT_EQ(first_of<RetainGradWeightParams>(pass, "grad_weight").dlogits, rows.exponentials);
    EXPECT_EQ(first_of<RetainGradWeightParams>(pass, "grad_weight").readers, nullptr) << "memory of their own";
}

TEST_P(RetainedGeneric, OneGradient_OneGemm) {
    const Launched hidden = passes.backward({.absent = {Slot::grad_weight, Slot::grad_bias}});
    EXPECT_EQ(hidden.count("grad_hidden"), 1);
    EXPECT_EQ(gemms(hidden), 1);
    EXPECT_EQ(first_of<RetainedRowsParams>(hidden, "retained_rows").scaled_hidden, nullptr) << "nobody reads it";
    const Launched weight = passes.backward({.absent = {Slot::grad_hidden, Slot::grad_bias}});
    EXPECT_EQ(weight.count("grad_weight"), 1);
    EXPECT_EQ(gemms(weight), 1);
}

TEST_P(RetainedGeneric, APart_TheRestIsComputedAgain) {
    const Launched pass = passes.backward({.kept = Kept::half});
    const auto hidden = first_of<RetainGradHiddenParams>(pass, "grad_hidden");
    EXPECT_EQ(hidden.columns % kRetainedColumns, 0);
    EXPECT_GT(hidden.columns, 0);
    EXPECT_LT(hidden.columns, 9000);
    EXPECT_EQ(hidden.last, 0);
    std::int64_t next = hidden.columns;
    int launches = 0;
    for (const Recorded& r : pass) {
        if (r.kernel == "flce_dlogits") {
            const auto p = r.params<DlogitsParams>();
            EXPECT_EQ(p.first_column, next);
            next += p.columns;
        } else if (r.kernel == "flce_grad_hidden" && ++launches > 1) {
            const auto p = r.params<RetainGradHiddenParams>();
            EXPECT_EQ(p.row_scales, nullptr);
            EXPECT_EQ(p.block_gap, 0);
            EXPECT_EQ(p.first, 0) << "it goes on with the retained part's sum";
            EXPECT_EQ(p.accumulator, hidden.accumulator);
            EXPECT_EQ(p.last, next == 9000 ? 1 : 0);
        }
    }
    EXPECT_EQ(next, 9000);
    EXPECT_LT(place(pass, "grad_weight"), place(pass, "dlogits")) << "wide chunks may lie behind it";
}

TEST_P(RetainedGeneric, StagesTogether_WhatTheWholeLaunches) {
    for (const Kept kept : {Kept::none, Kept::all, Kept::half, Kept::lent}) {
        if (kept == Kept::lent && passes.layer.spec.grad_weight_mode == GradMode::accumulate) continue;
        const Launched whole = passes.backward({.kept = kept});
        const Launched first = passes.backward({.kept = kept, .stage = 1});
        const Launched rest = passes.backward({.kept = kept, .stage = 2});
        EXPECT_EQ(first.launches.size() + rest.launches.size(), whole.launches.size());
        EXPECT_EQ(rest.launches.size(), kept == Kept::all ? 1U : 0U) << "grad_hidden is complete before";
        if (kept == Kept::all) {
            EXPECT_EQ(rest.count("grad_weight"), 1);
        }
    }
}

TEST_P(RetainedGeneric, Workspace_KeepsItsBound) {
    for (const std::int64_t tokens : {16, 300, 3000, 50'000}) {
        const CallSlots slots = passes.slots(Pass::backward, {.tokens = tokens});
        EXPECT_LE(evaluate(passes.layer.program.backward_workspace_bytes, slots), kDefaultScratchBytes + tokens * 2048 * 4) << tokens;
    }
}

INSTANTIATE_TEST_SUITE_P(Every, RetainedGeneric,
                         testing::Values("", ",softcap=30", ",bias", ",label_smoothing=0.1", ",class_weight,z_loss=0.0001",
                                         ",outputs=logprobs+entropy+top1,temperature", ",bias,label_smoothing=0.1,class_weight",
                                         ",teacher_top_k=64,hard_weight=0.5,bias", ",grad_weight_mode=accumulate",
                                         ",whole_vocab_size=30000", ",whole_vocab_size=30000,grad_hidden_dtype=fp32,bias"));

// grad_weight is written over exponentials: tiles take their numbers in order, block of exponentials by block.
TEST(RetainedGenericLent, GradWeight_IsLastAndWaitsForReaders) {
    for (const std::int64_t tokens : {300, 2048, 3000}) {
        const Passes passes("");
        const Launched pass = passes.backward({.kept = Kept::lent, .tokens = tokens});
        EXPECT_LT(place(pass, "grad_hidden"), place(pass, "grad_weight"));
        const auto rows = first_of<RetainedRowsParams>(pass, "retained_rows");
        const auto p = first_of<RetainGradWeightParams>(pass, "grad_weight");
        const GemmTile& tile = passes.layer.plan.cuda.grad_weight;
        EXPECT_EQ(p.taken, rows.counters);
        EXPECT_EQ(p.readers, rows.counters + 1);
        EXPECT_EQ(rows.counter_count, 1 + (9000 + 511) / 512) << "all are 0 before";
        EXPECT_EQ(p.readers_of_block, kRetainedColumns / tile.block_m * ((2048 + tile.block_n - 1) / tile.block_n));
        // A block of exponentials ends behind the gradient of its own columns, so that a tile waits for blocks before its own.
        const std::int64_t gradient = kRetainedColumns * std::int64_t{2048} * 2;
        EXPECT_GE(p.block_bytes, gradient);
        EXPECT_GE(p.block_bytes, tokens * kRetainedColumns * 2);
        EXPECT_EQ(as_address(p.dlogits), as_address(p.grad_weight) + p.block_bytes);
        EXPECT_GT(p.columns, 0);
        EXPECT_LE((p.columns / kRetainedColumns + 1) * p.block_bytes, 9000 * std::int64_t{2048} * 2) << "within the memory that is lent";
    }
}

// Numbers of tiles that have been taken never wait for numbers that have not.
TEST(RetainedGenericLent, TilesOfABlock_FollowOneAnother) {
    constexpr int kTilesOfBlock = 4;
    for (const auto& [tiles_m, tiles_n] : {std::pair{71, 8}, {3, 1}, {4, 7}}) {
        int last = 0;
        for (unsigned number = 0; number < static_cast<unsigned>(tiles_m * tiles_n); ++number) {
            int m = 0;
            int n = 0;
            tile_of_block<kTilesOfBlock>(number, tiles_m, tiles_n, m, n);
            EXPECT_GE(m / kTilesOfBlock, last);
            last = m / kTilesOfBlock;
        }
    }
}

// Scaled hidden states lie where nothing is written before grad_weight has read them.
TEST(RetainedGenericHidden, ScaledOnes_LieBesideTheSum) {
    for (const char* options : {"", ",whole_vocab_size=30000,grad_hidden_dtype=fp32"}) {
        const Passes passes(options);
        const bool own_sum = passes.layer.spec.grad_hidden_dtype == DType::fp32;
        for (const Kept kept : {Kept::all, Kept::half}) {
            const Launched pass = passes.backward({.kept = kept});
            const auto rows = first_of<RetainedRowsParams>(pass, "retained_rows");
            const auto weight = first_of<RetainGradWeightParams>(pass, "grad_weight");
            const auto hidden = first_of<RetainGradHiddenParams>(pass, "grad_hidden");
            EXPECT_EQ(weight.hidden, rows.scaled_hidden);
            EXPECT_EQ(weight.row_targets, nullptr) << "hidden states of ignored tokens are 0 there";
            const std::int64_t at = as_address(weight.hidden);
            if (kept == Kept::half && !own_sum) {
                EXPECT_EQ(at, shard_layers::address(Slot::grad_hidden)) << "it is written last";
                EXPECT_NE(hidden.accumulator, hidden.grad_hidden);
            } else {
                EXPECT_LE(at + kTokens * 2048 * 2, passes.workspace_end({.kept = kept}));
                EXPECT_GE(at, as_address(rows.counters)) << "behind all other places";
            }
            if (own_sum) {
                EXPECT_EQ(as_address(hidden.accumulator), shard_layers::address(Slot::grad_hidden));
            }
        }
    }
}

TEST(RetainedGenericSmoothing, BothGemmsTakeTheirTerms) {
    const Passes passes(",label_smoothing=0.1,bias,class_weight");
    const Launched pass = passes.backward({});
    EXPECT_LT(place(pass, "retained_rows"), place(pass, "smoothing_sums"));
    EXPECT_LT(place(pass, "smoothing_totals"), place(pass, "grad_hidden"));
    const auto totals = first_of<SmoothingTotalsParams>(pass, "smoothing_totals");
    const auto hidden = first_of<RetainGradHiddenParams>(pass, "grad_hidden");
    const auto weight = first_of<RetainGradWeightParams>(pass, "grad_weight");
    EXPECT_EQ(hidden.weight_sum, totals.weight_sum);
    EXPECT_EQ(hidden.row_smoothing, first_of<RetainedRowsParams>(pass, "retained_rows").row_smoothing);
    EXPECT_EQ(weight.hidden_sum, totals.hidden_sum);
    EXPECT_EQ(as_address(weight.class_weight), shard_layers::address(Slot::class_weight));
    // Chunks that are computed again have label smoothing in their logits' gradients.
    for (const Recorded& r : passes.backward({.kept = Kept::half})) {
        if (r.kernel != "flce_grad_weight" || r.params<RetainGradWeightParams>().block_bytes != 0) continue;
        EXPECT_EQ(r.params<RetainGradWeightParams>().hidden_sum, nullptr);
    }
}

TEST(RetainedGenericForward, StaleRows_AreWrittenAgainAfterTheOutputs) {
    const Passes passes("");
    const Launched none = passes.forward({.kept = Kept::none});
    EXPECT_EQ(none.count("references"), 0);
    EXPECT_EQ(none.count("forward"), 1);
    EXPECT_EQ(first_of<RetainForwardParams>(none, "forward").retained_columns, 0);
    EXPECT_EQ(first_of<RowOutputsParams>(none, "row_outputs").found.references, nullptr);
    const Launched pass = passes.forward({});
    ASSERT_EQ(pass.count("forward"), 2);
    EXPECT_LT(place(pass, "references"), place(pass, "forward"));
    const auto again =
        std::find_if(pass.launches.rbegin(), pass.launches.rend(), [](const Recorded& r) { return r.kernel == "flce_forward"; });
    EXPECT_GT(pass.launches.rend() - again - 1, place(pass, "row_outputs")) << "they say which rows are stale";
    const auto p = again->params<RetainForwardParams>();
    const auto first = first_of<RetainForwardParams>(pass, "forward");
    const auto found = first_of<RowOutputsParams>(pass, "row_outputs").found;
    EXPECT_EQ(first.again, 0);
    EXPECT_EQ(p.again, 1);
    EXPECT_EQ(p.exponentials, first.exponentials);
    EXPECT_EQ(p.references, found.references);
    EXPECT_EQ(p.stale, found.stale);
    EXPECT_EQ(p.retained_columns, 9000);
}

}  // namespace
}  // namespace flce::retained_generic
