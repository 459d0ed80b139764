// Every rule of illegal_reason: a legal plan with one thing wrong is refused for that thing.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "flce/error.hpp"
#include "flce/plan.hpp"

namespace flce {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Plan legal_cuda_plan() {
    const GemmTile tile{128, 128, 32, 3, 2, 2};
    return {.path = PlanPath::cuda_sm80,
            .vocab_chunk = 8192,
            .scratch_bytes = kDefaultScratchBytes,
            .cuda = {.forward = tile, .dlogits = tile, .grad_hidden = tile, .grad_weight = tile, .raster = 8}};
}

Plan legal_cpu_plan() {
    return {.path = PlanPath::cpu, .vocab_chunk = 4032, .scratch_bytes = kDefaultScratchBytes, .cpu = {512, false, 14, 32, 112, 448, 256}};
}

struct Case {
    const char* what;
    std::function<void(Plan&)> change;
    std::vector<const char*> parts;  ///< parts of the reason; empty: legal
};

void expect_reasons(const char* spec_text, const char* device_name, const Plan& legal, const std::vector<Case>& cases) {
    const Spec spec = parse_spec(spec_text);
    const Device device = describe_device(device_name);
    ASSERT_EQ(illegal_reason(spec, device, legal), std::nullopt);
    for (const Case& c : cases) {
        Plan plan = legal;
        c.change(plan);
        const std::string reason = illegal_reason(spec, device, plan).value_or("");
        if (c.parts.empty()) {
            EXPECT_EQ(reason, "") << c.what;
        }
        for (const char* part : c.parts) EXPECT_THAT(reason, HasSubstr(part)) << c.what;
    }
}

TEST(Legality, CudaTiles_AreRefusedWithTheirReason) {
    expect_reasons("D=2048,V=151936", "h100", legal_cuda_plan(),
                   {
                       {"wide tile", [](Plan& p) { p.cuda.forward = {128, 256, 64, 3, 2, 4}; }, {}},
                       {"no warps", [](Plan& p) { p.cuda.forward.warps_m = 0; }, {"forward", "from 1"}},
                       {"negative", [](Plan& p) { p.cuda.dlogits.block_n = -128; }, {"dlogits", "-128"}},
                       {"absurd", [](Plan& p) { p.cuda.dlogits.block_n = 1 << 30; }, {"dlogits", "1073741824"}},
                       {"three warps", [](Plan& p) { p.cuda.grad_hidden.warps_n = 3; }, {"grad_hidden", "warps 2x3"}},
                       {"32 warps", [](Plan& p) { p.cuda.forward = {256, 256, 32, 2, 8, 4}; }, {"forward", "warps 8x4"}},
                       {"too many threads", [](Plan& p) { p.cuda.forward = {256, 256, 32, 2, 8, 8}; }, {"forward", "warps 8x8"}},
                       {"block of 96", [](Plan& p) { p.cuda.grad_weight.block_m = 96; }, {"grad_weight", "block 96x128"}},
                       {"block of 16", [](Plan& p) { p.cuda.grad_weight.block_n = 16; }, {"grad_weight", "block 128x16"}},
                       {"block of 1024", [](Plan& p) { p.cuda.forward = {64, 1024, 32, 2, 1, 16}; }, {"forward", "block 64x1024", "512"}},
                       {"block of 32", [](Plan& p) { p.cuda.forward = {32, 128, 32, 3, 1, 2}; }, {"forward", "block 32x128"}},
                       {"warps of 8 rows", [](Plan& p) { p.cuda.forward = {64, 128, 32, 3, 8, 1}; }, {"forward", "warp", "8x128"}},
                       {"registers", [](Plan& p) { p.cuda.forward = {256, 256, 32, 2, 2, 2}; }, {"forward", "registers", "512"}},
                       {"block_k of 48", [](Plan& p) { p.cuda.forward.block_k = 48; }, {"forward", "block_k 48"}},
                       {"block_k of 16", [](Plan& p) { p.cuda.forward.block_k = 16; }, {"forward", "block_k 16"}},
                       {"one stage", [](Plan& p) { p.cuda.forward.stages = 1; }, {"forward", "stages 1"}},
                       {"shared memory", [](Plan& p) { p.cuda.forward = {128, 256, 64, 6, 2, 4}; }, {"forward", "shared memory", "232448"}},
                   });
}

TEST(Legality, HopperTiles_AreRefusedWithTheirReason) {
    const Plan legal = choose_plan(parse_spec("D=2048,V=151936"), describe_device("h100"));
    ASSERT_EQ(legal.path, PlanPath::cuda_sm90a);
    const auto tall = [](Plan& p) {
        p.cuda.grad_weight = {.block_m = 512, .block_n = 64, .block_k = 64, .stages = 2, .schedule = TileSchedule::together};
    };
    expect_reasons("D=2048,V=151936", "h100", legal,
                   {
                       {"two stages", [](Plan& p) { p.cuda.grad_hidden.stages = 2; }, {}},
                       {"one stage", [](Plan& p) { p.cuda.grad_hidden.stages = 1; }, {"grad_hidden", "stages 1: 2 to 8"}},
                       {"512 rows", tall, {"grad_weight", "block_m 512", "at most 256"}},
                       {"96 rows", [](Plan& p) { p.cuda.dlogits.block_m = 96; }, {"dlogits", "block_m 96"}},
                       {"96 columns", [](Plan& p) { p.cuda.dlogits.block_n = 96; }, {"dlogits", "block_n 96"}},
                   });
    for (const auto& [columns, reason] : {std::pair{100, "rows of 100"}, {104, ""}}) {
        const Spec spec = parse_spec("D=64,layout=hidden_major,V=" + std::to_string(columns));
        const Plan plan = choose_plan(parse_spec("D=64,layout=hidden_major,V=104"), describe_device("h100"));
        EXPECT_THAT(illegal_reason(spec, describe_device("h100"), plan).value_or(""), HasSubstr(reason)) << columns;
    }
}

TEST(Legality, CudaSizes_AreRefusedWithTheirReason) {
    expect_reasons("D=2048,V=151936", "h100", legal_cuda_plan(),
                   {
                       {"raster 1", [](Plan& p) { p.cuda.raster = 1; }, {}},
                       {"raster 1024", [](Plan& p) { p.cuda.raster = 1024; }, {}},
                       {"raster 1025", [](Plan& p) { p.cuda.raster = 1025; }, {"raster=1025"}},
                       {"raster 0", [](Plan& p) { p.cuda.raster = 0; }, {"raster=0"}},
                       {"chunk 0", [](Plan& p) { p.vocab_chunk = 0; }, {"chunk=0"}},
                       {"negative chunk", [](Plan& p) { p.vocab_chunk = -128; }, {"chunk=-128"}},
                       {"huge chunk", [](Plan& p) { p.vocab_chunk = 1LL << 40; }, {"chunk=1099511627776"}},
                       {"ragged chunk", [](Plan& p) { p.vocab_chunk = 8192 + 64; }, {"chunk=8256", "multiple", "128"}},
                       {"no scratch", [](Plan& p) { p.scratch_bytes = 0; }, {"scratch=0", "at least"}},
                       {"negative scratch", [](Plan& p) { p.scratch_bytes = -1; }, {"scratch=-1"}},
                       {"scratch beyond sense", [](Plan& p) { p.scratch_bytes = INT64_MAX; }, {"scratch=9223372036854775807"}},
                       {"cpu path", [](Plan& p) { p.path = PlanPath::cpu; }, {"path cpu", "GPU"}},
                       {"retain", [](Plan& p) { p.strategy = Strategy::retain; }, {}},
                       {"retain in narrow warps",
                        [](Plan& p) {
                            p.strategy = Strategy::retain;
                            p.cuda.forward = {64, 64, 64, 3, 2, 4};
                        },
                        {"forward", "warp tile of 16 columns", "32"}},
                       {"narrow warps", [](Plan& p) { p.cuda.forward = {64, 64, 64, 3, 2, 4}; }, {}},
                   });
    Plan retaining = legal_cuda_plan();
    retaining.strategy = Strategy::retain;
    const Device device = describe_device("h100");
    for (const auto& [spec, part] : {std::pair{"D=2048,V=151936,dtype=fp16", "bf16's range"},
                                     {"D=2048,V=151936,weight_dtype=fp32", "references"},
                                     {"D=2048,V=151936,softcap=30,label_smoothing=0.1", "under a softcap"}}) {
        EXPECT_THAT(illegal_reason(parse_spec(spec), device, retaining).value_or(""), HasSubstr(part)) << spec;
    }
}

TEST(Legality, Fp32Tiles_HaveTheirOwnLimits) {
    Plan plan = legal_cuda_plan();
    const GemmTile tile{128, 128, 16, 3, 2, 4};
    plan.cuda = {tile, tile, tile, tile, 8};
    expect_reasons("D=2048,V=151936,dtype=fp32", "h100", plan,
                   {
                       {"64x64 a warp", [](Plan& p) { p.cuda.forward.warps_n = 2; }, {"forward", "registers", "fp32 allows 64"}},
                       {"block_k of 64", [](Plan& p) { p.cuda.forward.block_k = 64; }, {"forward", "block_k 64"}},
                   });
}

TEST(Legality, SharedMemory_IsTheDevices) {
    const Spec spec = parse_spec("D=2048,V=151936");
    Plan plan = legal_cuda_plan();
    plan.cuda.forward = {128, 256, 64, 3, 2, 4};
    EXPECT_EQ(illegal_reason(spec, describe_device("sm_80"), plan), std::nullopt);
    EXPECT_THAT(illegal_reason(spec, describe_device("sm_86"), plan).value_or(""), AllOf(HasSubstr("sm_86"), HasSubstr("101376")));
    EXPECT_THAT(illegal_reason(spec, describe_device("sm_120"), plan).value_or(""), AllOf(HasSubstr("sm_120"), HasSubstr("101376")));
}

TEST(Legality, OldGpu_IsRefused) {
    Device device = describe_device("sm_80");
    device.gpu.compute_capability = 75;
    EXPECT_THAT(illegal_reason(parse_spec("D=64,V=50"), device, legal_cuda_plan()).value_or(""), AllOf(HasSubstr("7.5"), HasSubstr("8.0")));
}

TEST(Legality, BatchInvariant_HasOneForwardTile) {
    const char* spec = "D=2048,V=151936,batch_invariant";
    const Plan legal = choose_plan(parse_spec(spec), describe_device("h100"));
    EXPECT_EQ(legal.strategy, Strategy::recompute);
    expect_reasons(spec, "h100", legal,
                   {
                       {"wide", [](Plan& p) { p.cuda.forward.block_n = 128; }, {"forward", "batch_invariant", "128x192", "by turns"}},
                       {"schedule", [](Plan& p) { p.cuda.forward.schedule = TileSchedule::together; }, {"batch_invariant"}},
                       {"retain", [](Plan& p) { p.strategy = Strategy::retain; }, {"retain", "batch_invariant"}},
                       {"path", [](Plan& p) { p = legal_cuda_plan(); }, {"batch_invariant", "cuda_sm80", "CPU", "Hopper"}},
                       {"stages", [](Plan& p) { p.cuda.forward.stages = 4; }, {}},
                       {"other tiles", [](Plan& p) { p.cuda.dlogits.stages = 3; }, {}},
                   });
    EXPECT_THAT(illegal_reason(parse_spec("D=2048,V=151936,batch_invariant,dtype=fp16"), describe_device("h100"), legal).value_or(""),
                AllOf(HasSubstr("batch_invariant"), HasSubstr("fp16")));
}

TEST(Legality, CpuPlans_AreRefusedWithTheirReason) {
    expect_reasons("D=2048,V=151936", "znver4", legal_cpu_plan(),
                   {
                       {"bf16 pairs", [](Plan& p) { p.cpu.bf16_dot = true; }, {}},
                       {"retain", [](Plan& p) { p.strategy = Strategy::retain; }, {"strategy retain", "under recompute"}},
                       {"narrow vectors", [](Plan& p) { p.cpu = {256, false, 6, 16, 96, 192, 256}; }, {}},
                       {"odd width", [](Plan& p) { p.cpu.vector_bits = 384; }, {"vector=384", "128, 256 or 512"}},
                       {"no rows", [](Plan& p) { p.cpu.micro_m = 0; }, {"micro", "not 0"}},
                       {"negative block", [](Plan& p) { p.cpu.block_k = -8; }, {"block", "not -8"}},
                       {"half a vector", [](Plan& p) { p.cpu.micro_n = 24; }, {"micro=14x24", "16 lanes"}},
                       {"registers", [](Plan& p) { p.cpu.micro_m = 28; }, {"micro=28x32", "59 vector registers", "32"}},
                       {"odd rows",
                        [](Plan& p) {
                            p.cpu.micro_m = 7;
                            p.cpu.block_m = 112;
                        },
                        {"micro=7x32", "even"}},
                       {"ragged block_m", [](Plan& p) { p.cpu.block_m = 100; }, {"block_m=100", "micro_m = 14"}},
                       {"ragged block_n", [](Plan& p) { p.cpu.block_n = 48; }, {"block_n=48", "micro_n = 32"}},
                       {"block_n that rows do not divide", [](Plan& p) { p.cpu.block_n = 512; }, {"block_n=512", "micro_m = 14"}},
                       {"odd rows", [](Plan& p) { p.cpu = {512, false, 7, 32, 112, 448, 256}; }, {"micro=7x32", "even"}},
                       {"ragged block_k", [](Plan& p) { p.cpu.block_k = 100; }, {"block_k=100", "multiple of 8"}},
                       {"ragged chunk", [](Plan& p) { p.vocab_chunk = 4064; }, {"chunk=4064", "block_n = 448"}},
                       {"no scratch", [](Plan& p) { p.scratch_bytes = 1; }, {"scratch=1", "at least"}},
                       {"gpu path", [](Plan& p) { p.path = PlanPath::cuda_sm80; }, {"path cuda_sm80", "CPU"}},
                   });
    expect_reasons("D=2048,V=151936", "icelake-server", legal_cpu_plan(),
                   {{"bf16 pairs", [](Plan& p) { p.cpu.bf16_dot = true; }, {"bf16_dot=1", "icelake-server", "VDPBF16PS"}}});
    expect_reasons("D=2048,V=151936,dtype=fp16", "znver4", legal_cpu_plan(),
                   {{"bf16 pairs", [](Plan& p) { p.cpu.bf16_dot = true; }, {"bf16_dot=1", "dtype bf16", "fp16"}}});
}

TEST(Legality, VectorsWiderThanTheCpus_AreRefused) {
    const std::string reason = illegal_reason(parse_spec("D=64,V=50"), describe_device("haswell"), legal_cpu_plan()).value_or("");
    EXPECT_THAT(reason, AllOf(HasSubstr("vector=512"), HasSubstr("haswell"), HasSubstr("256")));
}

TEST(Legality, IllegalSpec_IsASpecErrorNotAReason) {
    Spec spec{.hidden_size = 12, .vocab_size = 50};
    EXPECT_THROW((void)illegal_reason(spec, describe_device("h100"), legal_cuda_plan()), SpecError);
}

TEST(Legality, QuantizedWeightOfATeacherOrATopK_RunsOnCpusAlone) {
    for (const char* option : {"teacher_top_k=4", "teacher_top_k=4,support", "top_k=8"}) {
        for (const char* format : {"e4m3", "nvfp4"}) {
            const Spec spec = parse_spec(fmt::format("D=64,V=5000,weight_dtype={},{}", format, option));
            EXPECT_NO_THROW((void)choose_plan(spec, describe_device("x86-64-v3"))) << spec.text();
            for (const char* gpu : {"a100", "h200", "b200"}) {
                try {
                    (void)choose_plan(spec, describe_device(gpu));
                    ADD_FAILURE() << spec.text() << " on " << gpu;
                } catch (const PlanError& error) {
                    EXPECT_THAT(error.what(), HasSubstr("that runs on CPUs")) << spec.text();
                }
            }
        }
    }
}

TEST(Legality, SupportOfTheLargestVocabulary_RunsOnACpuInTheDefaultScratch) {
    const Spec spec = parse_spec("D=64,V=1073741824,teacher_top_k=8,support,outputs=loss");
    EXPECT_NO_THROW((void)choose_plan(spec, describe_device("x86-64-v3")));
}

}  // namespace
}  // namespace flce
