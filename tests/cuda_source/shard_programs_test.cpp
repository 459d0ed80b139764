// Launches of a shard's kernels: work for the classes that a call has, in memory for the most that one may have.
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
#include "tests/cuda_source/shard_layer.hpp"

namespace flce::shard_programs {
namespace {

using shard_layers::address;
using shard_layers::as_address;
using shard_layers::kStart;
using shard_layers::kStep;
using shard_layers::set;
using test::Launched;
using test::Recorded;
using Layer = shard_layers::ShardLayer;

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
