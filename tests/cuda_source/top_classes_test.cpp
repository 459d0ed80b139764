// Launches that find the classes of rows' largest logits on Hopper: every column of the vocabulary goes through one of them, and a launch
// knows what the launches before have found.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flce/plan.hpp"
#include "generator/cuda/common/workspace.hpp"
#include "generator/cuda_program.hpp"
#include "generator/planner.hpp"
#include "templates/common/output_params.cuh"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/kernel_check.hpp"
#include "tests/cuda_source/recorded_launch.hpp"
#include "tests/support/gpu.hpp"

namespace flce::top_classes {
namespace {

using test::Recorded;

CudaProgram program_of(const std::string& options) {
    const Spec spec = parse_spec(options);
    const Device device = describe_device("h100");
    return generate_cuda(spec, device, path_plans(spec, device, PlanPath::cuda_sm90a).front());
}

std::int64_t as_address(const void* pointer) { return reinterpret_cast<std::int64_t>(pointer); }

struct Found {
    std::vector<std::string> order;
    std::vector<ForwardStretchSm90Params> forwards;
    std::vector<TopClassesParams> classes;
    std::int64_t zeroed = 0;
};

Found found_by(const std::string& options, std::int64_t num_tokens, std::int64_t columns = 0) {
    const CudaProgram program = program_of(options);
    CallSlots slots = test::made_up_call(num_tokens, {});
    slots[static_cast<std::size_t>(Slot::vocab_columns)] = columns;
    slots[static_cast<std::size_t>(Slot::weight_rows)] = columns;
    Found found;
    const test::Launched launched = test::run(program, program.forward, slots);
    for (const Recorded& r : launched) {
        const std::string name = r.kernel.substr(5);
        if (name == "forward" || name == "forward_few") {
            found.forwards.push_back(r.params<ForwardStretchSm90Params>());
        } else if (name == "top_classes") {
            found.classes.push_back(r.params<TopClassesParams>());
        } else if (name != "row_outputs" && name != "shard_sums") {
            continue;
        }
        found.order.push_back(name);
    }
    for (const auto& [at, bytes] : launched.memsets) found.zeroed += bytes;
    return found;
}

void expect_all_columns(const Found& found, std::int64_t all) {
    std::int64_t next = 0;
    for (const ForwardStretchSm90Params& p : found.forwards) {
        EXPECT_EQ(p.first_column, next);
        EXPECT_GT(p.columns, 0);
        next = p.first_column + p.columns;
    }
    EXPECT_EQ(next, all);
}

TEST(TopClasses, Launches_GoThroughTheVocabularyAndTellBounds) {
    const Found found = found_by("D=2048,V=151936,top_k=64", 4096);
    const std::vector<std::string> order = {"forward", "top_classes", "forward", "top_classes", "forward", "top_classes", "row_outputs"};
    ASSERT_EQ(found.order, order);
    expect_all_columns(found, 151936);
    const auto& first = found.forwards[0];
    EXPECT_EQ(first.columns, kDenseTopColumns);
    EXPECT_NE(first.top_dense, nullptr);
    EXPECT_EQ(as_address(found.classes[0].dense), as_address(first.top_dense));
    EXPECT_EQ(found.classes[0].dense_columns, kDenseTopColumns);
    EXPECT_EQ(found.classes[0].kept_before, 0);
    for (std::size_t i = 1; i < 3; ++i) {
        EXPECT_EQ(found.forwards[i].top_dense, nullptr);
        EXPECT_EQ(as_address(found.forwards[i].top_bounds), as_address(found.classes[i - 1].bounds));
        EXPECT_EQ(as_address(found.forwards[i].top_keys), as_address(found.classes[i].keys));
        EXPECT_EQ(found.classes[i].dense, nullptr);
        EXPECT_EQ(found.classes[i].kept_before, 1);
        EXPECT_EQ(as_address(found.classes[i].kept), as_address(found.classes[i - 1].kept));
        EXPECT_EQ(as_address(found.classes[i].running), as_address(found.classes[i - 1].running));
    }
    EXPECT_EQ(found.classes[0].last + found.classes[1].last, 0);
    EXPECT_EQ(found.classes[2].last, 1);
    EXPECT_EQ(found.zeroed, 0) << "top_classes empties lists of the launch behind it";
}

TEST(TopClasses, Weight_BeginsWithTheLaunchsColumns) {
    for (const char* layout : {"", ",layout=hidden_major"}) {
        const CudaProgram program = program_of(std::string("D=2048,V=151936,top_k=8") + layout);
        const CallSlots slots = test::made_up_call(512, {});
        std::vector<std::int64_t> addresses;
        for (const Recorded& r : test::run(program, program.forward, slots)) {
            if (r.kernel != "flce_forward") continue;
            const auto p = r.params<ForwardStretchSm90Params>();
            const std::int64_t stride = *layout == 0 ? 2048 * 2 : 2;
            for (const auto& map : r.launch.maps) {
                const std::int64_t at = map.address - slots[static_cast<std::size_t>(Slot::weight)];
                if (at == p.first_column * stride) addresses.push_back(at);
            }
        }
        EXPECT_EQ(addresses.size(), 3U) << layout;
    }
}

TEST(TopClasses, FewColumns_HaveNoLists) {
    const Found found = found_by("D=2048,V=1000,top_k=64", 4096);
    ASSERT_EQ(found.order, (std::vector<std::string>{"forward", "top_classes", "row_outputs"}));
    expect_all_columns(found, 1000);
    EXPECT_EQ(found.classes[0].dense_columns, 1000);
    EXPECT_EQ(found.classes[0].last, 1);
    EXPECT_EQ(found.classes[0].kept_before, 0);
}

TEST(TopClasses, FewTokens_AreOneLaunch) {
    const Found found = found_by("D=2048,V=151936,top_k=64", 100);
    ASSERT_EQ(found.order, (std::vector<std::string>{"forward_few", "top_classes", "row_outputs"}));
    expect_all_columns(found, 151936);
    EXPECT_EQ(found.forwards[0].top_bounds, nullptr);
    EXPECT_EQ(found.forwards[0].top_dense, nullptr);
    EXPECT_EQ(found.classes[0].dense, nullptr);
    EXPECT_EQ(found.classes[0].last, 1);
    EXPECT_GT(found.zeroed, 0) << "lists are empty at first";
}

// Places of a list follow each other in the low half of an address alone.
TEST(TopClasses, Lists_BeginAtMultiplesOfTheirSize) {
    constexpr std::int64_t kListBytes = 8 * top_list_keys(64);
    for (const char* options : {"D=2048,V=151936,top_k=64", "D=256,V=20000,top_k=1"}) {
        for (const std::int64_t num_tokens : {100, 4096}) {
            for (const ForwardStretchSm90Params& p : found_by(options, num_tokens).forwards) {
                EXPECT_EQ(as_address(p.top_keys) % kListBytes, 0) << options;
            }
        }
    }
}

TEST(TopClasses, BatchInvariance_LeavesTheVocabularyWhole) {
    const Found found = found_by("D=2048,V=151936,top_k=64,batch_invariant", 4096);
    EXPECT_GT(found.zeroed, 0);
    for (const ForwardStretchSm90Params& p : found.forwards) {
        EXPECT_EQ(p.columns, 151936);
        EXPECT_EQ(p.top_bounds, nullptr);
    }
}

TEST(TopClasses, Shards_HaveTheirColumnsAlone) {
    for (const std::int64_t columns : {std::int64_t{0}, std::int64_t{700}, std::int64_t{10'000}, std::int64_t{32'064}}) {
        const Found found = found_by("D=2048,V=32064,whole_vocab_size=128256,top_k=64,outputs=loss+lse", 4096, columns);
        expect_all_columns(found, columns);
        EXPECT_EQ(found.classes.size(), columns > 16'512 ? 3U : columns > kDenseTopColumns ? 2U : 1U) << columns;
        EXPECT_EQ(found.classes.back().last, 1);
    }
}

// A consumer for each row leaves less room in the place of lists than the first launch's logits take.
TEST(TopClasses, TilesThatConsumersShare_AreRefused) {
    const Spec spec = parse_spec("D=512,V=151936,top_k=8");
    const Device device = describe_device("h100");
    Plan plan = path_plans(spec, device, PlanPath::cuda_sm90a).front();
    EXPECT_EQ(plan.cuda.forward.schedule, TileSchedule::by_turns);
    plan.cuda.forward.schedule = TileSchedule::together;
    const auto reason = illegal_reason(spec, device, plan);
    ASSERT_TRUE(reason.has_value());
    EXPECT_NE(reason->find("by turns"), std::string::npos) << *reason;
}

// The kernel has lists beside the accumulators, and a few bytes of the stack for a list that is narrowed. test::compiled looks for
// multiplications that wait for each other.
TEST(TopClasses, Forward_MultipliesWithoutWaiting) {
    FLCE_REQUIRE_NVRTC_FOR("sm_90a");
    for (const char* options : {"D=2048,V=151936,top_k=64", "D=2048,V=151936,top_k=64,bias,softcap=30,temperature,logit_scale=0.5",
                                "D=2048,V=32064,whole_vocab_size=128256,top_k=1,dtype=fp16,outputs=loss+lse+entropy",
                                "D=2048,V=151936,top_k=64,layout=hidden_major,outputs=loss+top1+log_sum_sq_probs"}) {
        const CudaProgram program = program_of(options);
        const bool plain = std::string_view(options).ends_with("top_k=64");
        for (const CudaUnit& unit : program.units) {
            if (unit.kernels.front().name != "flce_forward") continue;
            const std::vector<KernelResources> report = test::compiled(unit, program.options);
            EXPECT_TRUE(!plain || report.front().stack_bytes <= 32) << report.front().stack_bytes;
        }
    }
}

}  // namespace
}  // namespace flce::top_classes
