// Refusals of a shard's calls, and the slots that a kernel gets of them.
#include <gmock/gmock.h>

#include "tests/session/fake_backend.hpp"

namespace flce {
namespace {

using test::RecordingKernel;
using testing::HasSubstr;

constexpr std::int64_t kShardTokens = 6;
constexpr std::int64_t kShardRows = 40;
constexpr std::int64_t kShardHidden = 16;

/// Addresses that are never followed: each tensor has a megabyte of its own.
void* shard_place(std::size_t number) { return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (number << 20)); }

TensorView shard_matrix(std::size_t number, std::int64_t rows, std::int64_t columns, ScalarType type = ScalarType::fp32) {
    return TensorView::matrix(shard_place(number), type, rows, columns);
}
TensorView shard_vector(std::size_t number, std::int64_t size, ScalarType type = ScalarType::fp32) {
    return TensorView::vector(shard_place(number), type, size);
}

template <class Call>
std::string shard_refusal(const Call& call) {
    try {
        call();
    } catch (const ArgumentError& error) {
        return error.what();
    }
    return "(no error)";
}

class ShardArguments : public testing::Test {
protected:
    ForwardArgs forward_args(std::int64_t rows = kShardRows, std::int64_t start = 80) const {
        return {.hidden = shard_matrix(1, kShardTokens, kShardHidden),
                .weight = shard_matrix(2, rows, kShardHidden),
                .bias = shard_vector(3, rows),
                .target = shard_vector(4, kShardTokens, ScalarType::int64),
                .vocab_start = start,
                .partial_sums = shard_matrix(5, kernel_.partial_sum_fields(), kShardTokens)};
    }
    MergeArgs merge_args() const {
        return {.all_partial_sums = shard_matrix(6, std::int64_t{3} * kernel_.partial_sum_fields(), kShardTokens),
                .target = shard_vector(4, kShardTokens, ScalarType::int64),
                .loss = TensorView::scalar(shard_place(7), ScalarType::fp32),
                .lse = shard_vector(8, kShardTokens)};
    }
    BackwardArgs backward_args(std::int64_t rows = kShardRows) const {
        return {.hidden = shard_matrix(1, kShardTokens, kShardHidden),
                .weight = shard_matrix(2, rows, kShardHidden),
                .bias = shard_vector(3, rows),
                .target = shard_vector(4, kShardTokens, ScalarType::int64),
                .lse = shard_vector(8, kShardTokens),
                .grad_hidden = shard_matrix(9, kShardTokens, kShardHidden),
                .grad_weight = shard_matrix(10, rows, kShardHidden),
                .grad_bias = shard_vector(11, rows),
                .vocab_start = 80};
    }
    [[nodiscard]] std::string refused(const ForwardArgs& args) const {
        return shard_refusal([&] { kernel_.forward(args, {shard_place(100), 1 << 20}); });
    }
    [[nodiscard]] std::string refused(const MergeArgs& args) const {
        return shard_refusal([&] { kernel_.merge(args, {shard_place(100), 1 << 20}); });
    }
    [[nodiscard]] std::string refused(const BackwardArgs& args) const {
        return shard_refusal([&] { kernel_.backward(args, {shard_place(100), 1 << 20}); });
    }

    RecordingKernel kernel_{parse_spec("D=16,V=40,padded_vocab_size=48,whole_vocab_size=130,dtype=fp32,bias")};
    RecordingKernel plain_{parse_spec("D=16,V=40,dtype=fp32")};
};

TEST_F(ShardArguments, RowsOfTheWeight_AreClassesUpToTheVocabularysEnd) {
    struct Case {
        std::int64_t rows, start, classes;
    };
    for (const auto& [rows, start, classes] :
         {Case{40, 0, 40}, {40, 80, 40}, {40, 100, 30}, {48, 120, 10}, {40, 130, 0}, {40, 500, 0}, {0, 10, 0}, {7, 10, 7}}) {
        ASSERT_EQ(refused(forward_args(rows, start)), "(no error)") << rows << " rows from " << start;
        EXPECT_EQ(kernel_.slot(Slot::vocab_start), start);
        EXPECT_EQ(kernel_.slot(Slot::weight_rows), rows);
        EXPECT_EQ(kernel_.slot(Slot::vocab_columns), classes);
    }
}

TEST_F(ShardArguments, Weight_ThatNoShardHas_Refused) {
    EXPECT_THAT(refused(forward_args(49, 0)), HasSubstr("weight.shape is [49, 16]; a shard has at most padded_vocab_size = 48 rows"));
    EXPECT_THAT(refused(forward_args(48, 0)), HasSubstr("from label 0 on it has 48 classes, and the spec's vocab_size is 40"));
    EXPECT_THAT(refused(forward_args(40, -1)), HasSubstr("vocab_start is -1"));
    ForwardArgs args = forward_args();
    args.bias = shard_vector(3, 39);
    EXPECT_THAT(refused(args), HasSubstr("bias.shape is [39]"));
    BackwardArgs backward = backward_args();
    backward.grad_bias = shard_vector(11, 39);
    EXPECT_THAT(refused(backward), HasSubstr("grad_bias.shape is [39]"));
    backward = backward_args();
    backward.grad_weight = shard_matrix(10, 48, kShardHidden);
    EXPECT_THAT(refused(backward), HasSubstr("grad_weight.shape is [48, 16]"));
}

TEST_F(ShardArguments, Forward_WritesPartialSumsAlone) {
    ForwardArgs args = forward_args();
    args.partial_sums = {};
    EXPECT_THAT(refused(args), HasSubstr("partial_sums is absent"));
    args.partial_sums = shard_matrix(5, kernel_.partial_sum_fields() + 1, kShardTokens);
    EXPECT_THAT(refused(args), HasSubstr("partial_sums.shape"));
    args = forward_args();
    args.lse = shard_vector(8, kShardTokens);
    EXPECT_THAT(refused(args), HasSubstr("lse is given, but the spec is a shard's; Kernel::merge writes it"));
}

TEST_F(ShardArguments, PlainSpec_HasNothingOfIt) {
    EXPECT_EQ(plain_.partial_sum_fields(), 0);
    EXPECT_THAT(shard_refusal([&] { plain_.merge(merge_args(), {shard_place(100), 1 << 20}); }), HasSubstr("no whole_vocab_size"));
    EXPECT_THAT(shard_refusal([&] { (void)plain_.workspace_bytes(4, Pass::merge); }), HasSubstr("no whole_vocab_size"));
    ForwardArgs args = forward_args(40, 5);
    args.bias = args.partial_sums = {};
    args.lse = shard_vector(8, kShardTokens);
    EXPECT_THAT(shard_refusal([&] { plain_.forward(args, {shard_place(100), 1 << 20}); }), HasSubstr("vocab_start is 5; it must be 0"));
    args.vocab_start = 0;
    args.partial_sums = shard_matrix(5, 3, kShardTokens);
    EXPECT_THAT(shard_refusal([&] { plain_.forward(args, {shard_place(100), 1 << 20}); }), HasSubstr("the spec has no whole_vocab_size"));
}

TEST_F(ShardArguments, Merge_CountsShards) {
    ASSERT_EQ(refused(merge_args()), "(no error)");
    EXPECT_EQ(kernel_.slot(Slot::num_shards), 3);
    EXPECT_EQ(kernel_.slot(Slot::num_tokens), kShardTokens);
    MergeArgs args = merge_args();
    args.all_partial_sums = shard_matrix(6, 3 * kernel_.partial_sum_fields() + 1, kShardTokens);
    EXPECT_THAT(refused(args), HasSubstr("all_partial_sums.shape"));
    args.all_partial_sums = shard_matrix(6, kernel_.partial_sum_fields(), kShardTokens + 1);
    EXPECT_THAT(refused(args), HasSubstr("all_partial_sums.shape"));
    args = merge_args();
    args.lse = {};
    EXPECT_THAT(refused(args), HasSubstr("lse is absent"));
}

TEST_F(ShardArguments, Stage_ReachesTheKernelOrIsRefused) {
    BackwardArgs args = backward_args();
    for (const BackwardStage stage : {BackwardStage::whole, BackwardStage::until_grad_hidden, BackwardStage::rest}) {
        args.stage = stage;
        ASSERT_EQ(refused(args), "(no error)");
        EXPECT_EQ(kernel_.slot(Slot::stage), static_cast<std::int64_t>(stage));
    }
    for (const bool ready : {true, false}) {
        args.hidden_ready = ready;
        ASSERT_EQ(refused(args), "(no error)");
        EXPECT_EQ(kernel_.slot(Slot::hidden_ready), ready ? 1 : 0);
    }
    args.stage = static_cast<BackwardStage>(3);
    EXPECT_THAT(refused(args), HasSubstr("stage is 3"));
}

TEST_F(ShardArguments, ClassWeights_AreAskedForByMergeAndBackward) {
    const RecordingKernel kernel(parse_spec("D=16,V=40,whole_vocab_size=130,dtype=fp32,class_weight,label_smoothing=0.1"));
    MergeArgs merge = merge_args();
    merge.all_partial_sums = shard_matrix(6, kernel.partial_sum_fields(), kShardTokens);
    const auto refuses = [&] { return shard_refusal([&] { kernel.merge(merge, {shard_place(100), 1 << 20}); }); };
    EXPECT_THAT(refuses(), HasSubstr("target_class_weight is absent"));
    merge.target_class_weight = shard_vector(12, kShardTokens);
    EXPECT_THAT(refuses(), HasSubstr("class_weight_total is absent"));
    merge.class_weight_total = TensorView::scalar(shard_place(13), ScalarType::fp32);
    EXPECT_EQ(refuses(), "(no error)");
    merge = merge_args();
    merge.target_class_weight = shard_vector(12, kShardTokens);
    EXPECT_THAT(refused(merge), HasSubstr("target_class_weight is given, but the spec has no whole_vocab_size with class_weight"));
}

}  // namespace
}  // namespace flce
