// What kernels of a shard launch: work for the classes that a call has, in memory for the most that one may have, and backward in stages.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "flce/flce.hpp"
#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "generator/shard_layout.hpp"
#include "templates/common/output_params.cuh"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce::shard_programs {
namespace {

using test::Launched;
using test::Recorded;

constexpr std::int64_t kStep = std::int64_t{1} << 44;
constexpr std::int64_t kStart = 5000;

std::int64_t address(Slot slot) { return (static_cast<std::int64_t>(slot) + 1) * kStep; }
std::int64_t as_address(const void* pointer) { return reinterpret_cast<std::int64_t>(pointer); }
void set(CallSlots& slots, Slot slot, std::int64_t value) { slots[static_cast<std::size_t>(slot)] = value; }

struct Layer {
    Spec spec;
    Device device;
    Plan plan;
    CudaProgram program;

    explicit Layer(const std::string& text, const char* device_name = "h100")
        : spec(parse_spec(text)),
          device(describe_device(device_name)),
          plan(choose_plan(spec, device)),
          program(generate_cuda(spec, device, plan)) {}

    /// Of a pass, with made-up addresses for what it is given.
    [[nodiscard]] CallSlots call(Pass pass, std::int64_t tokens, std::int64_t columns, std::int64_t rows) const {
        CallSlots slots = test::made_up_call(tokens, {});
        for (std::size_t i = 0; i < kCallTensorCount; ++i) {
            const CallTensor& tensor = kCallTensors[i];
            const Use use = pass == Pass::forward ? tensor.shard : pass == Pass::merge ? tensor.merge : tensor.backward;
            if (use == Use::none) slots[i] = 0;
        }
        set(slots, Slot::grad_entropy, 0);
        set(slots, Slot::num_valid, 0);
        set(slots, Slot::vocab_start, pass == Pass::merge ? 0 : kStart);
        set(slots, Slot::vocab_columns, pass == Pass::merge ? 0 : columns);
        set(slots, Slot::weight_rows, pass == Pass::merge ? 0 : rows);
        return slots;
    }
};

std::int64_t end_of_workspace(const Expr& bytes, std::int64_t tokens) {
    CallSlots slots{};
    set(slots, Slot::num_tokens, tokens);
    return 100 * kStep + evaluate(bytes, slots);  // whatever the number of classes
}

const char* const kSpecs[] = {
    "D=2048,V=9000,whole_vocab_size=30000,dtype=bf16,bias",
    "D=2048,V=9000,padded_vocab_size=9100,whole_vocab_size=30000,dtype=fp16,bias,grad_hidden_dtype=fp32",
    "D=512,V=9000,padded_vocab_size=9008,whole_vocab_size=30000,dtype=bf16,layout=hidden_major",
    "D=512,V=9000,whole_vocab_size=30000,dtype=bf16,weight_dtype=fp32,class_weight,label_smoothing=0.1",
    "D=512,V=9000,whole_vocab_size=30000,dtype=fp32,bias,teacher_top_k=4",
    "D=512,V=9000,whole_vocab_size=30000,dtype=bf16,weight_dtype=fp32,outputs=loss+entropy",
};

class ShardPrograms : public testing::TestWithParam<std::tuple<const char*, const char*>> {
protected:
    const Layer layer{std::get<0>(GetParam()), std::get<1>(GetParam())};
    [[nodiscard]] std::vector<std::int64_t> columns() const { return {0, 1, 100, 5000, layer.spec.vocab_size}; }
    [[nodiscard]] std::int64_t rows_of(std::int64_t columns) const {
        return layer.spec.layout == WeightLayout::hidden_major ? layer.spec.padded_vocab_size
                                                               : std::min(columns + 7, layer.spec.padded_vocab_size);
    }
};

bool is_forward(const Recorded& r) { return r.kernel.starts_with("flce_forward"); }

TEST_P(ShardPrograms, Forward_SumsOfEveryTokenWhateverTheColumns) {
    for (const std::int64_t tokens : {1, 70, 150, 3000}) {
        for (const std::int64_t c : columns()) {
            const CallSlots slots = layer.call(Pass::forward, tokens, c, rows_of(c));
            const Launched forward = test::run(layer.program, layer.program.forward, slots);
            std::int64_t finished = 0;
            for (const Recorded& r : forward) {
                if (r.kernel == "flce_shard_sums") {
                    const auto p = r.params<ShardSumsParams>();
                    EXPECT_EQ(p.targets.columns, c);
                    EXPECT_EQ(p.targets.first_class, kStart);
                    EXPECT_EQ(p.ld, tokens);
                    EXPECT_GE(as_address(p.sums), address(Slot::partial_sums));
                    EXPECT_LE(as_address(p.sums), address(Slot::partial_sums) + finished * 4);
                    finished += p.rows;
                }
                if (!is_forward(r)) continue;
                EXPECT_EQ(r.params<ForwardParams>().targets.columns, c);
                EXPECT_GT(c, 0);
                if (!layer.plan.text().starts_with("cuda_sm90a") || rounds_weight(layer.spec)) continue;
                EXPECT_TRUE(std::ranges::any_of(r.launch.maps, [&](const auto& map) {
                    const bool vocab_major = layer.spec.layout == WeightLayout::vocab_major;
                    return map.address == address(Slot::weight) && (vocab_major ? map.rows : map.columns) == c;
                }));
            }
            EXPECT_EQ(finished, tokens);
            EXPECT_EQ(std::ranges::any_of(forward, is_forward), c > 0);
            EXPECT_EQ(forward.count("row_outputs") + forward.count("reduce_loss"), 0) << "merge has the loss";
        }
    }
}

TEST_P(ShardPrograms, Backward_EveryColumnOnceAndPaddingIsZeroed) {
    const std::int64_t element = static_cast<std::int64_t>(element_bytes(layer.spec.grad_weight_dtype));
    for (const std::int64_t tokens : {1, 70, 3000}) {
        for (const std::int64_t c : columns()) {
            const std::int64_t rows = rows_of(c);
            const Launched backward = test::run(layer.program, layer.program.backward, layer.call(Pass::backward, tokens, c, rows));
            std::int64_t next = 0;
            bool written = false;
            const std::int64_t end = end_of_workspace(layer.program.backward_workspace_bytes, tokens);
            for (const Recorded& r : backward) {
                const bool joined = r.kernel == "flce_backward_chunks";
                if (r.kernel == "flce_dlogits" || joined) {
                    const auto p = r.params<DlogitsParams>();
                    EXPECT_EQ(p.first_column, next);
                    EXPECT_EQ(p.rows, tokens);
                    next += p.columns;
                    if (as_address(p.dlogits) >= 100 * kStep) {
                        const auto bytes = static_cast<std::int64_t>(element_bytes(layer.spec.dtype));
                        EXPECT_LE(as_address(p.dlogits) + p.rows * p.ld * bytes, end);
                    }
                }
                if (joined) written = written || r.params<BackwardChunksSm90Params>().last != 0;
                if (r.kernel == "flce_grad_hidden") {
                    EXPECT_FALSE(written) << "the last one writes it";
                    written = r.params<GradHiddenParams>().last != 0;
                    EXPECT_EQ(r.params<GradHiddenParams>().first != 0, next == r.params<GradHiddenParams>().columns);
                }
            }
            EXPECT_EQ(next, c);
            EXPECT_EQ(written, c > 0);
            const std::int64_t hidden =
                tokens * layer.spec.hidden_size * static_cast<std::int64_t>(element_bytes(grad_hidden_dtype(layer.spec)));
            EXPECT_EQ(backward.memsets.contains(address(Slot::grad_hidden)), c == 0);
            if (c == 0) {
                EXPECT_EQ(backward.memsets.at(address(Slot::grad_hidden)), hidden);
            }
            if (layer.spec.layout == WeightLayout::vocab_major && rows > c) {
                const std::int64_t row = layer.spec.hidden_size * element;
                EXPECT_EQ(backward.memsets.at(address(Slot::grad_weight) + c * row), (rows - c) * row);
            } else if (rows > c) {
                EXPECT_EQ(backward.count("zero_columns"), 1);
            }
            if (layer.spec.bias && rows > c) {
                EXPECT_EQ(backward.memsets.at(address(Slot::grad_bias) + c * element), (rows - c) * element);
            }
        }
    }
}

TEST_P(ShardPrograms, Merge_AllRowsOnceAndOneWriterOfTheLoss) {
    for (const std::int64_t tokens : {0, 1, 64, 65, 3000}) {
        CallSlots slots = layer.call(Pass::merge, tokens, 0, 0);
        set(slots, Slot::num_shards, 3);
        const Launched merge = test::run(layer.program, layer.program.merge, slots);
        std::int64_t rows = 0;
        int writers = merge.count("reduce_loss");
        for (const Recorded& r : merge) {
            if (r.kernel != "flce_merge_shards") continue;
            const auto p = r.params<MergeShardsParams>();
            EXPECT_EQ(p.shards, 3);
            EXPECT_EQ(p.stride, tokens * shard_fields(layer.spec).count);
            EXPECT_EQ(as_address(p.sums), address(Slot::all_partial_sums));
            EXPECT_EQ(p.targets.first_class, 0);
            EXPECT_EQ(p.targets.columns, 30000) << "labels are the whole layer's";
            if (layer.spec.teacher_top_k > 0) {
                EXPECT_EQ(p.teacher.columns, 30000);
                EXPECT_EQ(as_address(p.teacher.logprobs), address(Slot::teacher_logprobs));
            }
            rows += p.rows;
            writers += p.scalar_loss != nullptr ? 1 : 0;
            if (p.loss_partials == nullptr) continue;
            EXPECT_LE(as_address(p.loss_partials) + (p.rows + 63) / 64 * static_cast<std::int64_t>(sizeof(LossPartial)),
                      end_of_workspace(layer.program.merge_workspace_bytes, tokens));
        }
        EXPECT_EQ(rows, tokens);
        EXPECT_EQ(writers, 1);
    }
}

std::string name_of(const testing::TestParamInfo<std::tuple<const char*, const char*>>& info) {
    const auto* const* spec =
        std::ranges::find(kSpecs, std::string_view(std::get<0>(info.param)), [](const char* s) { return std::string_view(s); });
    return fmt::format("spec{}_{}", spec - kSpecs, std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Every, ShardPrograms, testing::Combine(testing::ValuesIn(kSpecs), testing::Values("a100", "h100")), name_of);

// A plain layer's programs know of no shard.
TEST(ShardPrograms, NoShard_NothingToMerge) {
    const Layer plain("D=2048,V=9000,dtype=bf16");
    EXPECT_TRUE(plain.program.merge.body.empty());
    for (const KernelEntry& kernel : plain.program.kernels) EXPECT_EQ(kernel.name.find("shard"), std::string::npos);
}

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
    EXPECT_EQ(rest.count("make_room"), retains && kept == Kept::all && !defers ? 1 : 0) << "rows of their own leave room as well";
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

TEST(ShardMemory, RetainedBytes_FollowTheColumns) {
    const Layer layer("D=2048,V=9000,whole_vocab_size=30000,dtype=bf16");
    const auto bytes = [&](const Expr& e, std::int64_t columns) {
        CallSlots slots{};
        set(slots, Slot::num_tokens, 1000);
        set(slots, Slot::vocab_columns, columns);
        return evaluate(e, slots);
    };
    EXPECT_EQ(bytes(layer.program.lendable_bytes, 5000), 5000 * 2048 * 2);
    EXPECT_EQ(bytes(layer.program.lendable_bytes, 0), 0);
    EXPECT_EQ(bytes(layer.program.retained_bytes, 513) - bytes(layer.program.retained_bytes, 512), 1000 * 512 * 2);
    for (const Expr* fixed : {&layer.program.forward_workspace_bytes, &layer.program.backward_workspace_bytes}) {
        EXPECT_EQ(bytes(*fixed, 0), bytes(*fixed, 9000)) << "one size for every rank";
    }
}

}  // namespace
}  // namespace flce::shard_programs
