// Backward over exponentials that forward retained, for every option that they serve: which GEMMs there are, and what comes before them.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "templates/common/output_params.cuh"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce::retained_options {
namespace {

using test::InterpretedMap;
using test::Launched;
using test::Recorded;

constexpr std::int64_t kStep = std::int64_t{1} << 44;
constexpr std::int64_t kTokens = 4096;

constexpr std::int64_t kAll = std::int64_t{1} << 40;
constexpr std::int64_t kHalf = kTokens * 151'936;  // bytes: half of the vocabulary

Launched backward_of(const std::string& options, std::initializer_list<Slot> absent, std::int64_t retained = kAll,
                     std::int64_t grad_entropy = 0) {
    const Spec spec = parse_spec("D=2048,V=151936,dtype=bf16" + options);
    const Device device = describe_device("h100");
    const Plan plan = choose_plan(spec, device);
    EXPECT_EQ(plan.strategy, Strategy::retain) << options;
    const CudaProgram program = generate_cuda(spec, device, plan);
    CallSlots slots = test::made_up_call(kTokens, absent);
    slots[static_cast<std::size_t>(Slot::grad_entropy)] = grad_entropy;
    slots[static_cast<std::size_t>(Slot::retained)] = retained == 0 ? 0 : 99 * kStep;
    slots[static_cast<std::size_t>(Slot::retained_bytes)] = retained;
    return test::run(program, program.backward, slots);
}

int gemms(const Launched& pass) {
    return pass.count("dlogits") + pass.count("grad_hidden") + pass.count("grad_weight") + pass.count("backward_chunks");
}

class RetainedOptions : public testing::TestWithParam<const char*> {};

TEST_P(RetainedOptions, EverythingRetained_TwoGemms) {
    const Launched both = backward_of(GetParam(), {});
    EXPECT_EQ(both.count("grad_hidden"), 1);
    EXPECT_EQ(both.count("grad_weight"), 1);
    EXPECT_EQ(gemms(both), 2);
}

// A frozen head, frozen hidden states, or neither gradient: what nobody asks for is not computed.
TEST_P(RetainedOptions, OneGradient_OneGemm) {
    const Launched hidden = backward_of(GetParam(), {Slot::grad_weight, Slot::grad_bias});
    EXPECT_EQ(hidden.count("grad_hidden"), 1);
    EXPECT_EQ(gemms(hidden), 1);
    EXPECT_EQ(hidden.count("retained_bias"), 0);
    const Launched weight = backward_of(GetParam(), {Slot::grad_hidden, Slot::grad_bias});
    EXPECT_EQ(weight.count("grad_weight"), 1);
    EXPECT_EQ(gemms(weight), 1);
}

TEST_P(RetainedOptions, APart_TheRestIsComputedAgain) {
    const Launched pass = backward_of(GetParam(), {}, kHalf);
    EXPECT_GT(pass.count("dlogits") + pass.count("backward_chunks"), 0);
    const auto first = std::ranges::find(pass.launches, "flce_grad_hidden", &Recorded::kernel);
    ASSERT_NE(first, pass.launches.end());
    EXPECT_EQ(first->params<GradHiddenSm90Params>().columns, (kHalf / 2 / kTokens - 1) / kRetainedColumns * kRetainedColumns);
    EXPECT_NE(first->params<GradHiddenSm90Params>().row_scales, nullptr);
    EXPECT_EQ(first->params<GradHiddenSm90Params>().last, 0);
}

INSTANTIATE_TEST_SUITE_P(Every, RetainedOptions,
                         testing::Values("", ",softcap=30", ",bias", ",label_smoothing=0.1", ",z_loss=0.0001", ",class_weight",
                                         ",outputs=logprobs+entropy+top1,temperature", ",token_weight",
                                         ",bias,label_smoothing=0.1,class_weight", ",softcap=30,bias,temperature,logit_scale=0.5",
                                         ",teacher_top_k=64", ",teacher_top_k=1024,hard_weight=0.5,bias,label_smoothing=0.1,token_weight",
                                         ",teacher_top_k=1,softcap=30,bias,temperature,logit_scale=0.5"));

/// Where the launches of a pass stand; a kernel that is not launched is behind them all.
std::ptrdiff_t place(const Launched& pass, const std::string& kernel) {
    return std::ranges::find(pass.launches, "flce_" + kernel, &Recorded::kernel) - pass.launches.begin();
}

TEST(RetainedSmoothing, SumsComeBeforeWhatTakesThem) {
    const Launched pass = backward_of(",label_smoothing=0.1,bias,class_weight", {});
    for (const char* kernel : {"smoothing_sums", "smoothing_totals"}) EXPECT_EQ(pass.count(kernel), 1) << kernel;
    EXPECT_LT(place(pass, "retained_rows"), place(pass, "smoothing_sums"));
    EXPECT_LT(place(pass, "smoothing_sums"), place(pass, "smoothing_totals"));
    EXPECT_LT(place(pass, "smoothing_totals"), place(pass, "grad_hidden"));
    const auto totals = pass.launches[place(pass, "smoothing_totals")].params<SmoothingTotalsParams>();
    const auto sums = pass.launches[place(pass, "smoothing_sums")].params<SmoothingSumsParams>();
    const auto hidden = pass.launches[place(pass, "grad_hidden")].params<SmoothedGradHiddenSm90Params>();
    const auto weight = pass.launches[place(pass, "grad_weight")].params<SmoothedGradWeightSm90Params>();
    EXPECT_EQ(sums.columns, 151'936);
    EXPECT_EQ(totals.weight_sums, sums.weight_sums);
    EXPECT_EQ(totals.hidden_sums, sums.hidden_sums);
    EXPECT_EQ(hidden.weight_sum, totals.weight_sum);
    EXPECT_EQ(hidden.row_smoothing, sums.row_smoothing);
    EXPECT_EQ(weight.hidden_sum, totals.hidden_sum);
    EXPECT_EQ(weight.class_weight, sums.class_weight);
    const Recorded& of_totals = pass.launches[place(pass, "smoothing_totals")];
    EXPECT_EQ(of_totals.launch.grid[0], 2 * 2048 / 32 + 1) << "the last block adds up the rows' shares, for the bias";
    EXPECT_EQ(totals.row_smoothing, sums.row_smoothing);
    EXPECT_EQ(totals.rows, kTokens);
    EXPECT_EQ(totals.list.rows, sums.list.rows);
    const auto biased = pass.launches[place(pass, "grad_weight")].params<WithScaledBias<SmoothedGradWeightSm90Params>>();
    EXPECT_EQ(biased.smoothing_total, totals.smoothing_total);
    EXPECT_EQ(totals.smoothing_total, sums.hidden_sums + kSmoothingParts * 2048) << "behind the last sum";
}

// grad_bias, dz summed over tokens, is one more column of the GEMM that makes grad_weight. Its factors are the rows' scales in two parts.
TEST(RetainedBias, GradWeightAddsItUp) {
    const CallSlots slots = test::made_up_call(kTokens, {});
    for (const char* options : {",bias", ",bias,softcap=30", ",bias,teacher_top_k=64", ",bias,grad_weight_mode=accumulate"}) {
        const Launched pass = backward_of(options, {});
        EXPECT_EQ(pass.count("retained_bias"), 0) << options;
        const auto rows = pass.launches[place(pass, "retained_rows")].params<RetainedRowsParams>();
        const Recorded& launch = pass.launches[place(pass, "grad_weight")];
        const auto weight = launch.params<WithScaledBias<GradWeightSm90Params>>();
        EXPECT_EQ(reinterpret_cast<std::int64_t>(weight.grad_bias), slots[static_cast<std::size_t>(Slot::grad_bias)]);
        EXPECT_EQ(weight.smoothing_total, nullptr);
        const InterpretedMap& map = launch.launch.maps.back();
        EXPECT_EQ(map.address, reinterpret_cast<std::int64_t>(rows.bias_factors));
        EXPECT_EQ(map.address % 16, 0);
        EXPECT_EQ(map.columns, kTokens);
        EXPECT_EQ(map.rows, 2);
        EXPECT_EQ(map.row_bytes, rows.factor_pitch * 2);
        EXPECT_EQ(map.box_rows, 8) << "the columns of the operand";
        // Nothing writes over them before they have been read: no gradient, no part of a sum.
        const std::int64_t workspace = slots[static_cast<std::size_t>(Slot::workspace)];
        EXPECT_GE(map.address, workspace);
        const auto sum = pass.launches[place(pass, "grad_hidden")].params<GradHiddenSm90Params>();
        EXPECT_LE(reinterpret_cast<std::int64_t>(sum.tail_sums) + sum.tail_room * std::int64_t{2} * 4 * 128 * 128, map.address);
        EXPECT_LE(map.address + 2 * map.row_bytes, reinterpret_cast<std::int64_t>(rows.counters));
    }
}

// Alone, or where the vocabulary is not the product's first dimension, exponentials are gone through for it: before grad_weight, which may
// take their place.
TEST(RetainedBias, WithoutTheGemm_APassOfItsOwn) {
    const Launched alone = backward_of(",bias", {Slot::grad_weight});
    EXPECT_EQ(alone.count("retained_bias"), 1);
    EXPECT_EQ(alone.count("grad_weight"), 0);
    const Launched hidden_major = backward_of(",bias,layout=hidden_major", {});
    EXPECT_EQ(hidden_major.count("retained_bias"), 1);
    EXPECT_LT(place(hidden_major, "retained_bias"), place(hidden_major, "grad_weight"));
    EXPECT_EQ(backward_of(",bias", {Slot::grad_bias}).count("retained_bias"), 0);
    const Launched unwanted = backward_of(",bias", {Slot::grad_bias});
    const auto weight = unwanted.launches[place(unwanted, "grad_weight")].params<WithScaledBias<GradWeightSm90Params>>();
    EXPECT_EQ(weight.grad_bias, nullptr);
}

// Chunks that are computed again one by one have sums of their own; only the launch over exponentials adds up a bias's gradient.
TEST(RetainedBias, ChunkByChunk_GemmsLeaveItAlone) {
    const Launched pass = backward_of(",bias", {Slot::grad_hidden}, kHalf);
    int of_exponentials = 0;
    for (const Recorded& r : pass) {
        if (r.kernel == "flce_grad_weight") of_exponentials += r.params<WithScaledBias<GradWeightSm90Params>>().grad_bias != nullptr;
    }
    EXPECT_EQ(of_exponentials, 1);
    EXPECT_EQ(pass.count("grad_bias"), pass.count("grad_weight") - 1);
    EXPECT_GT(pass.count("grad_bias"), 0);
}

// Chunks that are computed again have label smoothing in their logits' gradients.
TEST(RetainedSmoothing, ChunksLackNothing) {
    const Launched pass = backward_of(",label_smoothing=0.1,bias", {}, kHalf);
    int chunks = 0;
    bool first = true;
    for (const Recorded& r : pass) {
        if (r.kernel != "flce_grad_hidden") continue;
        EXPECT_EQ(r.params<SmoothedGradHiddenSm90Params>().row_smoothing == nullptr, !first);
        chunks += first ? 0 : 1;
        first = false;
    }
    EXPECT_GT(chunks, 0);
}

/// The call's tensors of a teacher, from the first row on.
void expect_teacher(const TeacherParams& p, int top_k) {
    const CallSlots slots = test::made_up_call(kTokens, {});
    const auto at = [&](Slot slot) { return slots[static_cast<std::size_t>(slot)]; };
    EXPECT_EQ(reinterpret_cast<std::int64_t>(p.ids), at(Slot::teacher_ids));
    EXPECT_EQ(reinterpret_cast<std::int64_t>(p.probs), at(Slot::teacher_probs));
    EXPECT_EQ(reinterpret_cast<std::int64_t>(p.logprobs), at(Slot::teacher_logprobs));
    EXPECT_EQ(p.top_k, top_k);
}

TEST(RetainedTeacher, ItsClassesAreWrittenBeforeTheyAreRead) {
    const Launched pass = backward_of(",teacher_top_k=64,hard_weight=0.5,bias,softcap=30,temperature,logit_scale=0.5", {});
    const auto coefficients = pass.launches[place(pass, "row_coefficients")].params<RowCoefficientsParams>();
    const auto rows = pass.launches[place(pass, "retained_rows")].params<RetainedRowsParams>();
    expect_teacher(rows.teacher, 64);
    EXPECT_EQ(rows.row_teacher_weights, coefficients.row_teacher_weights);
    EXPECT_EQ(rows.row_temperatures, coefficients.row_temperatures);
    EXPECT_EQ(rows.slope.scale, 1.0F) << "logit_scale is a factor of the row";
    EXPECT_EQ(rows.derivative, 0.5F);
    EXPECT_EQ(rows.slope.inverse_softcap, 1.0F / 30);
    EXPECT_EQ(rows.columns, 151'936);
    for (const char* reader : {"grad_hidden", "grad_weight"}) {
        EXPECT_EQ(pass.count(reader), 1) << reader;
        EXPECT_LT(place(pass, "retained_rows"), place(pass, reader)) << reader;
    }
    EXPECT_EQ(pass.count("teacher_dlogits") + pass.count("teacher_bias"), 0) << "there is no chunk";
}

// Each class is written once: among the exponentials, or in the one chunk that has it.
TEST(RetainedTeacher, ChunksHaveTheClassesThatAreNotRetained) {
    for (const char* bias : {"", ",bias"}) {
        const Launched pass = backward_of(std::string(",teacher_top_k=64") + bias, {}, kHalf);
        std::int64_t next = pass.launches[place(pass, "retained_rows")].params<RetainedRowsParams>().columns;
        EXPECT_LT(next, 151'936);
        std::string before;
        for (const Recorded& r : pass) {
            if (r.kernel == "flce_teacher_dlogits") {
                EXPECT_EQ(before, "flce_dlogits");
                const auto p = r.params<TeacherRowsParams>();
                expect_teacher(p.teacher, 64);
                EXPECT_EQ(p.first_column, next);
                next += p.columns;
            }
            before = r.kernel;
        }
        EXPECT_EQ(next, 151'936);
        EXPECT_EQ(pass.count("dlogits"), pass.count("teacher_dlogits"));
        EXPECT_EQ(pass.count("teacher_bias"), *bias != 0 ? pass.count("dlogits") : 0);
        EXPECT_EQ(pass.count("backward_chunks"), 0) << "dlogits must lie still between two launches";
    }
}

// Exponentials are relative to the largest logit of the target and the teacher's classes.
TEST(RetainedTeacher, LogitsComeBeforeReferences) {
    const Spec spec = parse_spec("D=2048,V=151936,dtype=bf16,teacher_top_k=64,temperature");
    const Device device = describe_device("h100");
    const CudaProgram program = generate_cuda(spec, device, choose_plan(spec, device));
    CallSlots slots = test::made_up_call(kTokens, {});
    for (const std::int64_t retained : {std::int64_t{0}, kHalf, kAll}) {
        slots[static_cast<std::size_t>(Slot::retained)] = retained == 0 ? 0 : 99 * kStep;
        slots[static_cast<std::size_t>(Slot::retained_bytes)] = retained;
        const Launched pass = test::run(program, program.forward, slots);
        EXPECT_EQ(pass.count("teacher_logits"), 1) << retained;
        EXPECT_EQ(pass.count("references"), retained == 0 ? 0 : 1);
        EXPECT_LT(place(pass, "teacher_logits"), place(pass, "row_outputs"));
        expect_teacher(pass.launches[place(pass, "row_outputs")].params<RowOutputsParams>().teacher, 64);
        if (retained == 0) continue;
        EXPECT_LT(place(pass, "teacher_logits"), place(pass, "references"));
        EXPECT_LT(place(pass, "references"), place(pass, "forward"));
        expect_teacher(pass.launches[place(pass, "references")].params<ReferencesParams>().teacher, 64);
    }
}

// With nothing retained gather_rows does it.
TEST(RetainedRows, ListedOnesAreBroughtTogetherByReferences) {
    const Spec spec = parse_spec("D=2048,V=151936,dtype=bf16");
    const Device device = describe_device("h100");
    const CudaProgram program = generate_cuda(spec, device, choose_plan(spec, device));
    CallSlots slots = test::made_up_call(kTokens, {});
    for (const bool retains : {false, true}) {
        slots[static_cast<std::size_t>(Slot::retained)] = retains ? 99 * kStep : 0;
        slots[static_cast<std::size_t>(Slot::retained_bytes)] = retains ? kHalf : 0;
        const std::int64_t least = evaluate(program.forward_workspace_bytes, slots);
        for (const bool room : {false, true}) {
            slots[static_cast<std::size_t>(Slot::workspace_bytes)] = least + (room ? kTokens * 2048 * 2 + 256 : 0);
            const Launched pass = test::run(program, program.forward, slots);
            EXPECT_EQ(pass.count("gather_rows"), room && !retains ? 1 : 0);
            ASSERT_EQ(pass.count("references"), retains ? 1 : 0);
            if (!retains) continue;
            const auto p = pass.launches[place(pass, "references")].params<ReferencesParams>();
            EXPECT_EQ(p.tokens, kTokens);
            EXPECT_EQ(p.compact != nullptr, room);
        }
    }
}

TEST(RetainedEntropy, ItsGradient_TakesNoExponentials) {
    const std::string options = ",outputs=loss+entropy";
    EXPECT_EQ(backward_of(options, {}).count("retained_rows"), 1);
    const Launched pass = backward_of(options, {}, kAll, kStep);
    EXPECT_EQ(pass.count("retained_rows"), 0);
    EXPECT_GT(pass.count("dlogits") + pass.count("backward_chunks"), 0);
    const Launched none = backward_of(options, {}, 0, kStep);
    ASSERT_EQ(pass.launches.size(), none.launches.size());
    for (std::size_t i = 0; i < none.launches.size(); ++i) EXPECT_EQ(pass.launches[i].kernel, none.launches[i].kernel);
}

TEST(RetainedRules, WhatIsNoProduct_IsRefusedByName) {
    const Device device = describe_device("h100");
    for (const char* teacher : {"", ",teacher_top_k=8,hard_weight=0.5"}) {
        for (const auto& [options, text] : {std::pair{"dtype=bf16,softcap=30,label_smoothing=0.1", "smoothing's gradient under a softcap"},
                                            std::pair{"dtype=fp16", "exponentials have bf16's range"},
                                            std::pair{"dtype=bf16,weight_dtype=fp32", "references are single rows of the weight"}}) {
            const Spec spec = parse_spec(std::string("D=2048,V=151936,") + options + teacher);
            Plan plan = choose_plan(spec, device);
            EXPECT_EQ(plan.strategy, Strategy::recompute);
            plan.strategy = Strategy::retain;
            const auto reason = illegal_reason(spec, device, plan);
            ASSERT_TRUE(reason.has_value()) << spec.text();
            EXPECT_NE(reason->find(text), std::string::npos) << *reason;
        }
    }
}

}  // namespace
}  // namespace flce::retained_options
