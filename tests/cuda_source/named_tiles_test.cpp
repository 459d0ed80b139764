// Hopper's forward where a teacher names many classes: they are sorted by forward's tiles, which then pick their logits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "generator/planner.hpp"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce::named_tiles {
namespace {

using test::Recorded;

constexpr std::int64_t kRetainedAt = 99 * (std::int64_t{1} << 44);

struct Program {
    Spec spec;
    Device device;
    Plan plan;
    CudaProgram program;
};

Program program_of(const std::string& options, const char* device_name = "h100") {
    Program p{.spec = parse_spec(options), .device = describe_device(device_name), .plan = {}, .program = {}};
    p.plan = choose_plan(p.spec, p.device);
    p.program = generate_cuda(p.spec, p.device, p.plan);
    return p;
}

CallSlots call_of(const Spec& spec, std::int64_t num_tokens, std::int64_t retained_bytes) {
    CallSlots slots = test::made_up_call(num_tokens, {});
    slots[static_cast<std::size_t>(Slot::retained)] = retained_bytes == 0 ? 0 : kRetainedAt;
    slots[static_cast<std::size_t>(Slot::retained_bytes)] = retained_bytes;
    slots[static_cast<std::size_t>(Slot::vocab_columns)] = slots[static_cast<std::size_t>(Slot::weight_rows)] = spec.vocab_size;
    return slots;
}

std::int64_t as_address(const void* pointer) { return reinterpret_cast<std::int64_t>(pointer); }

std::vector<std::string> forward_order(const Program& p, std::int64_t num_tokens, std::int64_t retained_bytes) {
    std::vector<std::string> order;
    for (const Recorded& r : test::run(p.program, p.program.forward, call_of(p.spec, num_tokens, retained_bytes))) {
        order.push_back(r.kernel.substr(5));
    }
    return order;
}

bool has(const std::vector<std::string>& names, const std::string& name) { return std::ranges::find(names, name) != names.end(); }

TEST(NamedTiles, ManyClasses_AreSortedBeforeTheProducts) {
    const Program p = program_of("D=2048,V=151936,teacher_top_k=1024");
    for (const std::int64_t retained : {std::int64_t{0}, std::int64_t{1} << 31}) {
        const std::vector<std::string> order = forward_order(p, 4096, retained);
        const auto sorted = std::ranges::find(order, "named_tiles");
        ASSERT_NE(sorted, order.end());
        EXPECT_LT(sorted, std::ranges::find(order, "forward"));
        EXPECT_LT(std::ranges::find(order, "forward"), std::ranges::find(order, "row_outputs"));
        EXPECT_FALSE(has(order, "teacher_logits"));
        EXPECT_EQ(has(order, "references"), retained != 0);
    }
}

TEST(NamedTiles, FewTokensOrFewClassesOrAnotherPath_HaveProductsOfSingleRows) {
    EXPECT_EQ(forward_order(program_of("D=2048,V=151936,teacher_top_k=1024"), 128, 0),
              (std::vector<std::string>{"teacher_logits", "forward_few", "row_outputs", "reduce_loss"}));
    for (const char* options : {"D=2048,V=151936,teacher_top_k=64", "D=2048,V=151936,teacher_top_k=1024,batch_invariant",
                                "D=2048,V=151936,teacher_top_k=1024,weight_dtype=fp32", "D=2048,V=300000,teacher_top_k=1024"}) {
        const std::vector<std::string> order = forward_order(program_of(options), 4096, 0);
        EXPECT_TRUE(has(order, "teacher_logits")) << options;
        EXPECT_FALSE(has(order, "named_tiles")) << options;
    }
    EXPECT_TRUE(has(forward_order(program_of("D=2048,V=151936,teacher_top_k=1024", "a100"), 4096, 0), "teacher_logits"));
}

// Places that the launches of some rows have in the workspace lie in it, apart from each other, and both kernels have the same.
TEST(NamedTiles, Lists_LieInTheWorkspaceForAnyNumberOfTokens) {
    for (const char* options : {"D=2048,V=151936,teacher_top_k=1024", "D=512,V=262144,teacher_top_k=256,dtype=fp16",
                                "D=4096,V=32064,whole_vocab_size=128256,teacher_top_k=1024"}) {
        const Program p = program_of(options);
        for (const std::int64_t num_tokens : {129, 4096, 20001}) {
            const CallSlots slots = call_of(p.spec, num_tokens, 0);
            const std::int64_t begin = slots[static_cast<std::size_t>(Slot::workspace)];
            const std::int64_t end = begin + evaluate(p.program.forward_workspace_bytes, slots);
            NamedTilesParams sorted{};
            std::int64_t rows = 0;
            for (const Recorded& r : test::run(p.program, p.program.forward, slots)) {
                if (r.kernel == "flce_named_tiles") {
                    sorted = r.params<NamedTilesParams>();
                    EXPECT_EQ(r.launch.grid[0], sorted.rows);
                    EXPECT_EQ(sorted.tile_columns, p.plan.cuda.forward.block_n);
                    EXPECT_GE(std::int64_t{sorted.named.tiles} * sorted.tile_columns, p.spec.vocab_size);
                    const std::int64_t records = as_address(sorted.named.records);
                    const std::int64_t names = as_address(sorted.named.names);
                    EXPECT_GE(records, begin);
                    EXPECT_GE(names, records + std::int64_t{8} * sorted.rows * sorted.named.tiles);
                    EXPECT_LE(names + std::int64_t{4} * sorted.rows * p.spec.teacher_top_k, end);
                    rows += sorted.rows;
                } else if (r.kernel == "flce_forward") {
                    const auto forward = r.params<WithNamed<ForwardSm90Params>>();
                    EXPECT_EQ(forward.named.records, sorted.named.records);
                    EXPECT_EQ(forward.named.names, sorted.named.names);
                    EXPECT_EQ(forward.named.tiles, sorted.named.tiles);
                    EXPECT_EQ(forward.teacher.logprobs, sorted.teacher.logprobs);
                    EXPECT_EQ(forward.rows, sorted.rows);
                }
            }
            EXPECT_EQ(rows, num_tokens) << options;
            EXPECT_LE(end - begin, p.plan.scratch_bytes) << options << ", " << num_tokens << " tokens";
        }
    }
}

// A block has a row of backward's kernels over named classes.
TEST(NamedTiles, Backward_HasABlockARow) {
    const Program p = program_of("D=2048,V=151936,teacher_top_k=1024");
    int seen = 0;
    for (const std::int64_t retained : {std::int64_t{0}, std::int64_t{1} << 29}) {
        for (const Recorded& r : test::run(p.program, p.program.backward, call_of(p.spec, 3000, retained))) {
            if (r.kernel != "flce_retained_rows" && r.kernel != "flce_teacher_dlogits") continue;
            EXPECT_EQ(r.launch.grid[0], 3000) << r.kernel;
            ++seen;
        }
    }
    EXPECT_GT(seen, 2);
}

}  // namespace
}  // namespace flce::named_tiles
