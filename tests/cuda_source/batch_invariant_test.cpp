// Launches of batch-invariant passes: what a row's sums follow from does not depend on the number of tokens.
#include <gtest/gtest.h>

#include <string>

#include "flce/plan.hpp"
#include "generator/cuda/sm90/rules.hpp"
#include "generator/cuda_program.hpp"
#include "templates/common/sum_parts.cuh"
#include "templates/sm90/forward_share.cuh"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce::batch_invariant {
namespace {

using test::Launched;
using test::made_up_call;
using test::Recorded;

constexpr std::int64_t kTokens[] = {1, 64, 128, 129, 257, 1000, 4096, 20'000, 100'003};

struct Layer {
    Spec spec;
    Plan plan;
    CudaProgram program;
    explicit Layer(const char* text, std::int64_t scratch_bytes = kDefaultScratchBytes)
        : spec(parse_spec(text)),
          plan(choose_plan(spec, describe_device("h100"), {.scratch_bytes = scratch_bytes})),
          program(generate_cuda(spec, describe_device("h100"), plan)) {}
};

TEST(BatchInvariant, Forward_HasTheSameSegmentsForAnyNumberOfTokens) {
    for (const char* text :
         {"D=2048,V=151936,batch_invariant", "D=2304,V=256000,softcap=30,batch_invariant", "D=64,V=1000,batch_invariant"}) {
        const Layer layer(text);
        const GemmTile& many = layer.plan.cuda.forward;
        const GemmTile few = sm90::few_tokens_shape(layer.spec, layer.plan).tile;
        EXPECT_EQ(few.block_n, many.block_n) << "a thread has other columns";
        const auto tiles = static_cast<int>((layer.spec.vocab_size + many.block_n - 1) / many.block_n);
        const int segment = sm90::segment_tiles(layer.spec, many);
        EXPECT_EQ(segment % 2, 0);
        const int segments = ForwardShare::segments_of(tiles, segment);
        EXPECT_LE(segments, 512);
        for (const std::int64_t tokens : kTokens) {
            const Launched forward = test::run(layer.program, layer.program.forward, made_up_call(tokens, {}));
            for (const Recorded& r : forward.launches) {
                if (!r.kernel.starts_with("flce_forward")) continue;
                const auto p = r.params<ForwardSm90Params>();
                const int cluster_rows = many.block_m * (r.kernel == "flce_forward" ? 2 : 1);
                const ForwardShare share(p.rows, segments, cluster_rows, 2, p.clusters, true);
                EXPECT_EQ(share.splits, 2 * segments) << tokens;
            }
        }
    }
}

TEST(BatchInvariant, Backward_GoesOnWithOneSumFromChunkToChunk) {
    const Layer layer("D=2048,V=151936,batch_invariant");
    for (const std::int64_t tokens : kTokens) {
        const Launched backward = test::run(layer.program, layer.program.backward, made_up_call(tokens, {}));
        EXPECT_EQ(backward.count("backward_chunks") + backward.count("hidden_chunks"), 0);
        std::int64_t row_blocks = 0;
        for (const Recorded& r : backward.launches) {
            if (r.kernel != "flce_grad_hidden") continue;
            const auto p = r.params<GradHiddenSm90Params>();
            row_blocks += p.first;
            EXPECT_TRUE(p.columns % 64 == 0 || p.last != 0) << "the next chunk would begin within 16 columns";
            EXPECT_EQ(SumParts(p.share, p.rows).count, 1) << tokens;
            EXPECT_EQ(SumParts(p.share, 1).count, 1) << "all but one ignored";
        }
        EXPECT_GE(row_blocks, 1);
    }
}

TEST(BatchInvariant, Source_HasSegmentsWhereTheyAreAskedFor) {
    const auto configuration = [](const char* text) { return Layer(text).program.units.front().source; };
    EXPECT_EQ(configuration("D=2048,V=151936").find("segment_tiles = "), std::string::npos);
    EXPECT_NE(configuration("D=2048,V=151936,batch_invariant").find("segment_tiles = 2"), std::string::npos);
    EXPECT_NE(configuration("D=2304,V=256000,batch_invariant").find("segment_tiles = 4"), std::string::npos);
}

}  // namespace
}  // namespace flce::batch_invariant
