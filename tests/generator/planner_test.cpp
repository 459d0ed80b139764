
#include "generator/planner.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "flce/error.hpp"
#include "flce/plan.hpp"

namespace flce {
namespace {

using testing::HasSubstr;

const std::vector<const char*>& specs() {
    static const std::vector<const char*> all = {
        "D=2048,V=151936,tied",
        "D=8,V=2",
        "D=8,V=2,dtype=fp32",
        "D=64,V=50,layout=hidden_major,bias",
        "D=2560,V=50257,dtype=fp32,label_smoothing=0.1,outputs=loss+lse+logprobs+entropy,bias,class_weight,softcap=30",
        "D=4096,V=128256,dtype=fp16,grad_weight_dtype=fp32,grad_weight_mode=accumulate",
        "D=200,V=127,padded_vocab_size=128,dtype=fp32",
        "D=2048,V=151936,weight_dtype=fp32",
        "D=7168,V=129280,label_smoothing=0.1,outputs=loss+entropy,bias",
        "D=4096,V=32064,whole_vocab_size=128256",
        "D=2048,V=1,whole_vocab_size=50257,dtype=fp16,grad_hidden_dtype=fp32,bias",
    };
    return all;
}

TEST(Planner, EveryCandidate_IsLegalAndPrintsBack) {
    for (const std::string& name : known_device_names()) {
        const Device device = describe_device(name);
        for (const char* text : specs()) {
            const Spec spec = parse_spec(text);
            const auto plans = candidate_plans(spec, device);
            ASSERT_FALSE(plans.empty());
            std::set<std::string> seen;
            for (const Plan& plan : plans) {
                EXPECT_EQ(illegal_reason(spec, device, plan), std::nullopt) << name << ' ' << text << ' ' << plan.text();
                EXPECT_EQ(parse_plan(plan.text()), plan);
                EXPECT_EQ(plan.scratch_bytes, kDefaultScratchBytes);
                EXPECT_TRUE(seen.insert(plan.text()).second) << "twice: " << plan.text();
            }
            EXPECT_EQ(plans, candidate_plans(spec, device)) << "the same question has the same answer";
            EXPECT_EQ(choose_plan(spec, device), plans.front());
        }
    }
}

// A token beyond those whose list lies in the scratch takes the list's bytes as well.
TEST(Planner, WorkspaceOfTokens_HoldsAsManyAndNoMore) {
    const Spec spec = parse_spec("D=64,V=1000");
    EXPECT_EQ(workspace_of_tokens(spec, 262144), 262144 * 4 * 64);
    EXPECT_EQ(workspace_of_tokens(spec, 262145), 262145 * 4 * 64 + 8);
    for (const std::int64_t tokens : {0, 1, 4096, 262144, 262145, 1000000}) {
        const std::int64_t bytes = workspace_of_tokens(spec, tokens).value();
        EXPECT_EQ(tokens_with_workspace(spec, bytes), tokens);
        EXPECT_EQ(tokens_with_workspace(spec, bytes + 4 * 64 - 1), tokens);
    }
}

TEST(Planner, Candidates_AreOrderedByExpectedTime) {
    const Spec spec = parse_spec("D=2048,V=151936");
    for (const char* name : {"sm_90a", "sm_80", "sm_89", "sm_100a", "x86-64-v4", "x86-64"}) {
        const Device device = describe_device(name);
        double last = 0;
        for (const Plan& plan : candidate_plans(spec, device)) {
            double seconds = 0;  // for a token, at two numbers of them
            for (const std::int64_t tokens : {4096, 8192}) {
                const Cost forward = estimate_forward(spec, device, plan, tokens);
                seconds += (forward.seconds + estimate_backward(spec, device, plan, tokens).seconds) / static_cast<double>(tokens) / 2;
            }
            EXPECT_GE(seconds, last);
            last = seconds;
        }
    }
}

// Steps of the generic path on an H100, measured with these tiles for all four products (benchmarks/results/h100-2026-11-21*.json,
// docs/experiments/2026-11-27.md, docs/kernels-sm80.md).
TEST(Planner, GenericPathOnHopper_ModelledAsMeasured) {
    const Device h100 = describe_device("h100");
    struct Measured {
        const char* spec;
        const char* tile;
        std::int64_t tokens;
        double ms;
        double retained = 0;
    };
    for (const Measured& m :
         {Measured{"D=2048,V=151936", "128x128x32x3/2x2", 4096, 26.8}, Measured{"D=2048,V=151936", "128x256x64x3/2x4", 4096, 25.3},
          Measured{"D=4096,V=128256", "128x128x32x3/2x2", 4096, 45.0}, Measured{"D=4096,V=128256", "128x256x64x3/2x4", 4096, 42.3},
          Measured{"D=2048,V=151936,dtype=fp32", "64x128x32x3/2x2", 4096, 201.9},
          Measured{"D=2048,V=151936", "128x256x64x3/2x4", 4096, 22.0, 0.5}, Measured{"D=2048,V=151936", "128x256x64x3/2x4", 4096, 18.1, 1},
          Measured{"D=4096,V=128256", "128x256x64x3/2x4", 4096, 31.1, 1}}) {
        const Spec spec = parse_spec(m.spec);
        const Plan plan =
            parse_plan(fmt::format("cuda_sm80:{1},chunk=16384,scratch=67108864,forward={0},dlogits={0},grad_hidden={0},"
                                   "grad_weight={0},raster=8",
                                   m.tile, m.retained > 0 ? "retain" : "recompute"));
        const double seconds = estimate_forward(spec, h100, plan, m.tokens, m.retained).seconds +
                               estimate_backward(spec, h100, plan, m.tokens, m.retained).seconds;
        EXPECT_NEAR(1e3 * seconds, m.ms, 0.15 * m.ms) << m.spec << ' ' << m.tile;
    }
}

TEST(Planner, Reasons_SayWhatIsMeasuredAndWhatIsGuessed) {
    const Spec spec = parse_spec("D=2048,V=151936");
    for (const char* name : {"sm_80", "sm_89", "b200", "sm_110", "rtx 5090", "h100", "h200"}) {
        const Device device = describe_device(name);
        const std::string line = plan_reasons(spec, device, choose_plan(spec, device)).at(1);
        const bool measured = name[0] == 'h';
        EXPECT_EQ(has_measured_rates(device), measured);
        EXPECT_EQ(line.find("as measured on H100 and H200") != std::string::npos, measured) << line;
        EXPECT_EQ(line.find("guessed: ") != std::string::npos, !measured) << line;
    }
}

TEST(Planner, MeasuredRates_TakeThePlaceOfAssumedOnes) {
    const Spec spec = parse_spec("D=4096,V=128256,dtype=bf16");
    const Device assumed = describe_device("rtx 5090");
    Device device = assumed;
    device.gpu.measured = {.mma_flops = 100e12, .library_flops = 50e12, .l2_bytes_per_s = 3e12, .launch_seconds = 5e-6};
    const auto seconds = [&](const Device& on, PlanPath path) {
        return estimate_forward(spec, on, path_plans(spec, on, path).front(), 4096).seconds;
    };
    const double flops = 2.0 * 4096 * 4096 * 128256;
    EXPECT_GT(seconds(device, PlanPath::cuda_sm80), flops / 100e12);
    EXPECT_LT(seconds(device, PlanPath::cuda_sm80), 1.8 * flops / 100e12);
    EXPECT_GT(seconds(device, PlanPath::cuda_lt), flops / 50e12);
    EXPECT_LT(seconds(device, PlanPath::cuda_lt), 1.3 * flops / 50e12);
    Device slow = device;
    slow.gpu.measured.launch_seconds = 1e-3;
    EXPECT_GT(seconds(slow, PlanPath::cuda_lt), 1.5 * seconds(device, PlanPath::cuda_lt));
    Device poor = device;
    poor.gpu.measured.l2_bytes_per_s = 1e11;
    EXPECT_GT(seconds(poor, PlanPath::cuda_lt), 1.2 * seconds(device, PlanPath::cuda_lt));
    EXPECT_TRUE(has_measured_rates(device));
    EXPECT_FALSE(has_measured_rates(assumed));
    // Many launches of narrow stretches are worse where a launch is dear: the order of candidates follows the rates.
    EXPECT_GE(path_plans(spec, slow, PlanPath::cuda_lt).front().cuda.forward.block_n,
              path_plans(spec, device, PlanPath::cuda_lt).front().cuda.forward.block_n);
    const auto order = [&](const Device& on) { return path_plans(spec, on, PlanPath::cuda_sm80); };
    Device quick = device;
    quick.gpu.measured.mma_flops = 1e18;  // only bytes count
    EXPECT_NE(order(quick), order(assumed));
    const std::string line = plan_reasons(spec, device, choose_plan(spec, device)).at(1);
    EXPECT_NE(line.find("after rates measured on this GPU"), std::string::npos) << line;
    EXPECT_EQ(parse_device_json(device.json()), device);
}

TEST(Planner, Reasons_SayWhichPathAndWhyItIsNotTheGpusOwn) {
    const auto said = [](const char* spec, const char* name) {
        const Device device = describe_device(name);
        return plan_reasons(parse_spec(spec), device, choose_plan(parse_spec(spec), device)).front();
    };
    EXPECT_EQ(said("D=2048,V=151936", "gh200"), "cuda_sm90a: kernels of wgmma, made for sm_90a");
    EXPECT_EQ(said("D=2048,V=151936", "spark"), "cuda_sm80: kernels of mma.sync, for every GPU; none are made for sm_121 alone");
    EXPECT_THAT(said("D=2048,V=151936,dtype=fp32", "h100"), testing::AllOf(testing::StartsWith("cuda_sm80: "), testing::HasSubstr("fp32")));
}

TEST(Planner, ReasonsOfAHeadInEightBits_NameItsPathAlone) {
    const Spec spec = parse_spec("D=2048,V=151936,fp8");
    const auto said = [&](const char* name, const Plan& plan) {
        std::string all;
        for (const std::string& line : plan_reasons(spec, describe_device(name), plan)) all += line + '\n';
        EXPECT_EQ(all.find("cuda_sm80"), std::string::npos) << all;
        return all;
    };
    const Plan wgmma = choose_plan(spec, describe_device("h200"));
    EXPECT_THAT(said("h200", wgmma), testing::StartsWith("cuda_fp8: kernels of 8-bit wgmma, made for sm_90a"));
    const Plan mma = choose_plan(spec, describe_device("l40s"));
    EXPECT_THAT(said("l40s", mma),
                testing::AllOf(testing::StartsWith("cuda_fp8_sm89: kernels of 8-bit mma.sync, made for sm_89"), HasSubstr("guessed: ")));
    EXPECT_THAT(said("h200", mma), testing::AllOf(HasSubstr("cuda_fp8 is made for sm_90a"), HasSubstr("measured cuda_fp8_sm89 on sm_90a")));
}

// Where wide tiles have no room: narrow ones of the quicker path, and not the other path's wide ones.
TEST(Planner, LittleScratchOnHopper_ItsOwnPathInNarrowTiles) {
    const Device device = describe_device("h100");
    const Spec spec = parse_spec("D=2048,V=151936,weight_dtype=fp32");
    EXPECT_EQ(choose_plan(spec, device, {.scratch_bytes = 6 << 20}).path, PlanPath::cuda_sm90a);
}

TEST(Planner, GradHiddensTileOnHopper_IsTheOneThatWasMeasuredToBeQuicker) {
    // hidden_size in tiles of 192 and of 256 columns: H100 and H200 records, and 3000 tokens at 2560.
    const std::pair<int, int> quicker[] = {{768, 192}, {2048, 256}, {2304, 192}, {2560, 256}, {4096, 256}, {7168, 256}};
    for (const auto& [hidden_size, columns] : quicker) {
        const Plan plan = choose_plan(parse_spec(fmt::format("D={},V=128256", hidden_size)), describe_device("h200"));
        EXPECT_EQ(plan.cuda.grad_hidden.block_n, columns) << hidden_size;
    }
}

TEST(Planner, RetainsApart_WhereTheLimitHasRoomThatGradWeightHasNot) {
    const Device h200 = describe_device("h200");
    constexpr std::int64_t kMiB = 1 << 20;
    constexpr std::int64_t kLlama = 128LL * kMiB + 2LL * 8192 * 128256;  // the sum, and exponentials of 8192 tokens
    const auto apart = [&](const char* spec, std::int64_t limit, std::int64_t tokens, const Device& device) {
        return retains_apart(parse_spec(spec), device, {.workspace_limit_bytes = limit, .num_tokens = tokens});
    };
    EXPECT_FALSE(apart("D=4096,V=128256,dtype=bf16", 0, 8192, h200)) << "no limit says nothing";
    EXPECT_FALSE(apart("D=4096,V=128256,dtype=bf16", kLlama + 60 * kMiB, 8192, h200)) << "no room for scratch";
    EXPECT_TRUE(apart("D=4096,V=128256,dtype=bf16", kLlama + 80 * kMiB, 8192, h200));
    EXPECT_FALSE(apart("D=4096,V=128256,dtype=bf16", kLlama, 4096, h200)) << "grad_weight's memory holds as much";
    EXPECT_TRUE(apart("D=4096,V=128256,dtype=bf16,grad_weight_mode=accumulate", kLlama, 4096, h200));
    EXPECT_TRUE(apart("D=4096,V=128256,dtype=bf16,layout=hidden_major", kLlama, 4096, h200));
    EXPECT_FALSE(apart("D=4096,V=128256,dtype=fp16", 2 * kLlama, 8192, h200)) << "retains nothing";
    EXPECT_TRUE(apart("D=4096,V=128256,dtype=bf16", 2 * kLlama, 8192, describe_device("a100"))) << "every GPU retains";
    EXPECT_FALSE(apart("D=4096,V=128256,dtype=fp32", 2 * kLlama, 8192, describe_device("a100"))) << "retains nothing";
    EXPECT_FALSE(apart("D=4096,V=128256,dtype=bf16", 2 * kLlama, 8192, describe_device("x86-64-v4")));
}

TEST(Planner, GradWeightsTile_LendsUnlessAllExponentialsLieElsewhere) {
    // Measured in a row on an H100: with everything retained 128x256 takes 3 to 5 % less of the step than 192x128.
    const auto columns = [&](const std::string& spec, std::int64_t limit, std::int64_t tokens) {
        const PlanRequest request{.workspace_limit_bytes = limit, .num_tokens = tokens};
        return choose_plan(parse_spec("dtype=bf16," + spec), describe_device("h100"), request).cuda.grad_weight.block_n;
    };
    constexpr std::int64_t kAll = std::int64_t{1} << 40;
    for (const int hidden_size : {2048, 2304, 4096}) {
        const std::string layer = fmt::format("D={},V=128256", hidden_size);
        EXPECT_EQ(columns(layer, 0, 8192), 192) << layer;
        EXPECT_EQ(columns(layer, kAll, 8192), 256) << layer;
    }
    EXPECT_EQ(columns("D=4096,V=128256", kAll, 4096), 192) << "grad_weight's memory is enough";
    EXPECT_EQ(columns("D=4096,V=64128,whole_vocab_size=128256", 0, 8192), 256) << "a shard retains all in memory of its own";
    const std::string added_to = "D=2048,V=128256,grad_weight_mode=accumulate";
    EXPECT_NE(columns(added_to, 0, 4096), 256) << "nothing is retained";
    EXPECT_EQ(columns(added_to, 600 << 20, 4096), 256) << "a part";
    EXPECT_NE(columns("D=2048,V=128256,bias", kAll, 4096), 256) << "its kernel has no room to add up grad_bias";
}

// By whole waves 4096 tokens of 18992 classes would have 128x192 or 192x128, and 3328 of 16032 would, too.
TEST(Planner, GradWeightsTileOfAShard_IsTheFastestWithoutWholeWaves) {
    for (const char* device : {"NVIDIA H200", "h100"}) {
        for (const char* shard : {"D=2048,V=18992,whole_vocab_size=151936", "D=2048,V=37984,whole_vocab_size=151936",
                                  "D=4096,V=16032,whole_vocab_size=128256", "D=4096,V=32064,whole_vocab_size=128256"}) {
            for (const std::int64_t tokens : {3328, 4096, 4800, 8192}) {
                const PlanRequest everything{.workspace_limit_bytes = std::int64_t{1} << 40, .num_tokens = tokens};
                const Plan plan = choose_plan(parse_spec(std::string("dtype=bf16,") + shard), describe_device(device), everything);
                EXPECT_EQ(plan.cuda.grad_weight.block_m, 128) << shard;
                EXPECT_EQ(plan.cuda.grad_weight.block_n, 256) << shard;
            }
        }
    }
}

// With few tokens grad_weight takes as long as it takes to write it.
TEST(Planner, GradWeightOfAShard_TakesNoLessThanItsBytes) {
    const std::string shard = "dtype=bf16,D=4096,V=32064,whole_vocab_size=128256";
    const Device device = describe_device("NVIDIA H200");
    const auto seconds = [&](const std::string& text) {
        const Spec spec = parse_spec(text);
        return estimate_backward(spec, device, choose_plan(parse_spec(shard), device), 64, 1).seconds;
    };
    const double bytes = 32'064.0 * 4096 * 2;  // more of a gradient in fp32
    EXPECT_GT(seconds(shard + ",grad_weight_dtype=fp32") - seconds(shard), 0.99 * bytes / device.gpu.bandwidth_bytes_per_s);
}

TEST(Planner, OwnMemory_OfShardsAndOfGradientsThatAreAddedTo) {
    const Device h100 = describe_device("h100");
    constexpr std::int64_t kMiB = 1 << 20;
    const auto own = [&](const std::string& spec, std::int64_t limit, std::int64_t tokens) {
        return own_memory(parse_spec("dtype=bf16," + spec), h100, {.workspace_limit_bytes = limit, .num_tokens = tokens});
    };
    const std::string shard = "D=4096,V=64128,whole_vocab_size=128256";
    EXPECT_EQ(own(shard, 0, 8192), OwnMemory::all) << "two ranks retain twice the tokens that grad_weight's memory holds on one";
    EXPECT_EQ(own(shard, 0, 16384), OwnMemory::none);
    EXPECT_EQ(own(shard, 96 * kMiB, 8192), OwnMemory::none) << "the limit has room for scratch alone";
    EXPECT_EQ(own(shard + ",grad_weight_mode=accumulate", 0, 16384), OwnMemory::part);
    const std::string added_to = "D=2048,V=128256,grad_weight_mode=accumulate";
    EXPECT_EQ(own(added_to, 0, 4096), OwnMemory::none);
    EXPECT_EQ(own(added_to, 100 * kMiB, 4096), OwnMemory::none);
    EXPECT_EQ(own(added_to, 600 * kMiB, 4096), OwnMemory::part);
    EXPECT_EQ(own(added_to, 2048 * kMiB, 4096), OwnMemory::all);
    EXPECT_EQ(own("D=2048,V=128256", 600 * kMiB, 4096), OwnMemory::none) << "grad_weight's memory is lent";
    EXPECT_EQ(own(added_to, 2048 * kMiB, 64), OwnMemory::none) << "retaining takes longer than it spares";
    EXPECT_EQ(unlimited_own_bytes(parse_spec("D=2048,V=128256")), 0);
    EXPECT_EQ(unlimited_own_bytes(parse_spec(shard)), 33LL * 128256 * 4096 * 2 / 32);
}

TEST(Planner, TilesThatLieOpen_AreNotTakenWhereOldValuesAreAddedTo) {
    for (const char* hidden_size : {"768", "2048", "2304", "2560", "4096"}) {
        const Spec spec = parse_spec(fmt::format("D={},V=128256,grad_weight_mode=accumulate", hidden_size));
        const GemmTile tile = choose_plan(spec, describe_device("h100")).cuda.grad_weight;
        EXPECT_EQ(tile.schedule, TileSchedule::by_turns) << hidden_size;
    }
}

TEST(Planner, Choice_DoesNotDependOnOptionValues) {
    const Device device = describe_device("h100");
    EXPECT_EQ(choose_plan(parse_spec("D=2048,V=32000,softcap=30"), device), choose_plan(parse_spec("D=2048,V=32000,softcap=50"), device));
}

TEST(Planner, Choice_IsTheSameForAnArchitectureAndItsProducts) {
    for (const std::string& name : known_device_names()) {
        const Device device = describe_device(name);
        if (device.kind != DeviceKind::cuda) continue;
        for (const char* text : specs()) {
            const Spec spec = parse_spec(text);
            EXPECT_EQ(choose_plan(spec, device).text(), choose_plan(spec, describe_device(device.gpu.arch)).text()) << name << ' ' << text;
        }
    }
}

TEST(Planner, HugeHiddenSize_StillHasAPlan) {
    for (const char* name : {"h100", "a100", "rtx4090", "x86-64-v4"}) {
        for (const char* text : {"D=32768,V=256000", "D=61440,V=256000", "D=61440,V=256000,dtype=fp32,bias"}) {
            EXPECT_NO_THROW((void)choose_plan(parse_spec(text), describe_device(name))) << name << ' ' << text;
        }
    }
}

TEST(Planner, TooLittleScratch_OneSentenceWithTheSmallestThatWorks) {
    const Spec spec = parse_spec("D=2048,V=151936");
    for (const char* name : {"h100", "x86-64-v4"}) {
        const Device device = describe_device(name);
        for (const std::int64_t scratch : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{4096}}) {
            try {
                (void)choose_plan(spec, device, {.scratch_bytes = scratch});
                ADD_FAILURE() << name << ' ' << scratch;
            } catch (const PlanError& error) {
                EXPECT_THAT(error.what(),
                            testing::AllOf(testing::HasSubstr("scratch=" + std::to_string(scratch)), testing::HasSubstr(spec.text())));
                const std::string message = error.what();
                EXPECT_LT(message.size(), 160U) << message;
                const std::int64_t least = std::stoll(message.substr(message.find("works is ") + 9));
                EXPECT_EQ(least, smallest_scratch_bytes(spec, device));
                EXPECT_NO_THROW((void)choose_plan(spec, device, {.scratch_bytes = least}));
                EXPECT_THROW((void)choose_plan(spec, device, {.scratch_bytes = least - 1}), PlanError);
            }
        }
    }
}

TEST(Planner, LeastScratchInAReason_IsEnough) {
    const Spec spec = parse_spec("D=2048,V=151936");
    for (const char* name : {"h100", "x86-64-v4"}) {
        const Device device = describe_device(name);
        Plan plan = choose_plan(spec, device);
        plan.scratch_bytes = 0;
        const std::string reason = illegal_reason(spec, device, plan).value();
        plan.scratch_bytes = std::stoll(reason.substr(reason.find("at least ") + 9));
        EXPECT_EQ(illegal_reason(spec, device, plan), std::nullopt);
        --plan.scratch_bytes;
        EXPECT_NE(illegal_reason(spec, device, plan), std::nullopt);
    }
}

TEST(Planner, Reasons_SayWhatWasRefused) {
    const Spec spec = parse_spec("D=2048,V=151936");
    const Device device = describe_device("rtx4090");
    const Plan plan = choose_plan(spec, device);
    const auto lines = plan_reasons(spec, device, plan);
    EXPECT_THAT(lines, testing::Contains(HasSubstr("number 1 of")));
    EXPECT_THAT(lines, testing::Contains(testing::AllOf(HasSubstr("refused forward=128x256x64x3/2x4"), HasSubstr("shared memory"))));
    Plan own = plan;
    own.cuda.raster = 7;
    EXPECT_THAT(plan_reasons(spec, device, own), testing::Contains(HasSubstr("does not consider unasked")));
}

TEST(CostModel, CountsOperations) {
    const Spec spec = parse_spec("D=2048,V=151936");
    for (const char* name : {"h100", "x86-64-v4"}) {
        const Device device = describe_device(name);
        const Plan plan = choose_plan(spec, device);
        const double nvd = 4096.0 * 2048 * 151936;
        EXPECT_DOUBLE_EQ(estimate_forward(spec, device, plan, 4096).flops, 2 * nvd);
        EXPECT_DOUBLE_EQ(estimate_backward(spec, device, plan, 4096, 0).flops, 6 * nvd);
        EXPECT_EQ(estimate_forward(spec, device, plan, 0).seconds, 0);
        EXPECT_EQ(estimate_backward(spec, device, plan, 0).flops, 0);
        EXPECT_GT(estimate_backward(spec, device, plan, 4096).seconds, estimate_forward(spec, device, plan, 4096).seconds);
        EXPECT_GT(estimate_forward(spec, device, plan, 65536).seconds, 10 * estimate_forward(spec, device, plan, 4096).seconds);
        EXPECT_GE(estimate_forward(spec, device, plan, 1).bytes, 2.0 * 2048 * 151936) << "the weight is read at least once";
    }
}

TEST(CostModel, RetainedLogitsOnACpu_SpareBackwardAGemm) {
    const Spec spec = parse_spec("D=2048,V=151936");
    const Device device = describe_device("x86-64-v4");
    const Plan plan = choose_plan(spec, device);
    const double nvd = 4096.0 * 2048 * 151936;
    EXPECT_DOUBLE_EQ(estimate_backward(spec, device, plan, 4096, 1).flops, 4 * nvd);
    EXPECT_DOUBLE_EQ(estimate_backward(spec, device, plan, 4096, 0.5).flops, 5 * nvd);
    EXPECT_LT(estimate_backward(spec, device, plan, 4096, 1).seconds, estimate_backward(spec, device, plan, 4096, 0).seconds);
    EXPECT_EQ(estimate_backward(spec, device, plan, 4096).seconds, estimate_backward(spec, device, plan, 4096, 0).seconds);
}

TEST(CostModel, Fp32CostsMoreThanBf16) {
    const Device device = describe_device("h100");
    const Spec half = parse_spec("D=2048,V=32000");
    const Spec full = parse_spec("D=2048,V=32000,dtype=fp32");
    EXPECT_GT(estimate_forward(full, device, choose_plan(full, device), 4096).seconds,
              4 * estimate_forward(half, device, choose_plan(half, device), 4096).seconds);
}

TEST(PathPlans, ArePlansOfThatPathAlone) {
    const Spec spec = parse_spec("D=2048,V=50257");
    for (const char* name : {"a100", "h100", "b200"}) {
        for (const PlanPath path : {PlanPath::cuda_sm80, PlanPath::cuda_lt}) {
            const std::vector<Plan> plans = path_plans(spec, describe_device(name), path);
            ASSERT_FALSE(plans.empty()) << name;
            for (const Plan& plan : plans) {
                EXPECT_EQ(plan.path, path) << name;
                EXPECT_EQ(illegal_reason(spec.normalized(), describe_device(name), plan), std::nullopt);
            }
        }
    }
    EXPECT_TRUE(path_plans(spec, describe_device("a100"), PlanPath::cuda_sm90a).empty());
    EXPECT_TRUE(path_plans(spec, describe_device("a100"), PlanPath::cpu).empty());
    EXPECT_TRUE(path_plans(parse_spec("D=2048,V=50257,dtype=fp32"), describe_device("b200"), PlanPath::cuda_lt).empty());
}

// Calls of a library are as large as scratch allows, as long as there is any plan.
TEST(PathPlans, LittleScratch_SmallCallsOfTheLibrary) {
    const Spec spec = parse_spec("D=1024,V=50257");
    const Device device = describe_device("b200");
    int last = 0;
    for (const std::int64_t megabytes : {12, 24, 64, 256}) {
        const std::vector<Plan> plans = path_plans(spec, device, PlanPath::cuda_lt, {.scratch_bytes = megabytes << 20});
        ASSERT_FALSE(plans.empty()) << megabytes;
        const GemmTile& tile = plans.front().cuda.forward;
        EXPECT_GE(tile.block_m * tile.block_n, last) << megabytes;
        last = tile.block_m * tile.block_n;
    }
    EXPECT_TRUE(path_plans(spec, device, PlanPath::cuda_lt, {.scratch_bytes = 1 << 20}).empty());
}

TEST(Planner, ShallowLayersOnBlackwell_TakeTheGenericPath) {
    const Device device = describe_device("b200");
    EXPECT_EQ(choose_plan(parse_spec("D=504,V=50257"), device).path, PlanPath::cuda_sm80);
    EXPECT_EQ(choose_plan(parse_spec("D=512,V=50257"), device).path, PlanPath::cuda_lt);
    EXPECT_EQ(choose_plan(parse_spec("D=2048,V=50257,dtype=fp32"), device).path, PlanPath::cuda_sm80);
    EXPECT_EQ(choose_plan(parse_spec("D=2048,V=50257,layout=hidden_major"), device).path, PlanPath::cuda_sm80) << "rows begin anywhere";
    EXPECT_EQ(choose_plan(parse_spec("D=2048,V=50257,padded_vocab_size=50304,layout=hidden_major"), device).path, PlanPath::cuda_lt);
}

TEST(Planner, ShallowLayersOnACpu_KeepDlogitsInFp32) {
    const Device device = describe_device("znver4");
    EXPECT_FALSE(choose_plan(parse_spec("D=128,V=5000,dtype=bf16"), device).cpu.bf16_dot);
    EXPECT_TRUE(choose_plan(parse_spec("D=256,V=5000,dtype=bf16"), device).cpu.bf16_dot);
}

}  // namespace
}  // namespace flce
