#include "flce/plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "flce/error.hpp"

namespace flce {
namespace {

using testing::HasSubstr;

constexpr const char* kCudaText =
    "cuda_sm80:recompute,chunk=8192,scratch=67108864,forward=128x256x32x3/2x4,dlogits=128x256x64x3/2x4,grad_hidden=128x128x32x4/2x2,"
    "grad_weight=64x128x64x3/2x2,raster=8";
constexpr const char* kCpuText = "cpu:recompute,vector=512,bf16_dot=1,micro=14x32,block=168x1024x256,chunk=4096,scratch=1048576";

Plan cuda_plan() {
    return {.path = PlanPath::cuda_sm80,
            .vocab_chunk = 8192,
            .scratch_bytes = 64 << 20,
            .cuda = {.forward = {128, 256, 32, 3, 2, 4},
                     .dlogits = {128, 256, 64, 3, 2, 4},
                     .grad_hidden = {128, 128, 32, 4, 2, 2},
                     .grad_weight = {64, 128, 64, 3, 2, 2},
                     .raster = 8}};
}

Plan cpu_plan() {
    return {.path = PlanPath::cpu, .vocab_chunk = 4096, .scratch_bytes = 1 << 20, .cpu = {512, true, 14, 32, 168, 1024, 256}};
}

std::string message_of(const std::string& text) {
    try {
        (void)parse_plan(text);
    } catch (const PlanError& error) {
        return error.what();
    }
    return "no PlanError";
}

TEST(PlanText, Canonical_IsWhatItWas) {
    EXPECT_EQ(cuda_plan().text(), kCudaText);
    EXPECT_EQ(cpu_plan().text(), kCpuText);
    EXPECT_EQ(cpu_plan().json(),
              R"({"path":"cpu","strategy":"recompute","vector":512,"bf16_dot":1,"micro":"14x32","block":"168x1024x256","chunk":4096,)"
              R"("scratch":1048576})");
}

TEST(PlanText, ParsesBack) {
    EXPECT_EQ(parse_plan(kCudaText), cuda_plan());
    EXPECT_EQ(parse_plan(kCpuText), cpu_plan());
    EXPECT_EQ(parse_plan_json(cuda_plan().json()), cuda_plan());
    EXPECT_EQ(parse_plan_json(cpu_plan().json()), cpu_plan());
    EXPECT_EQ(parse_plan("cpu:recompute,scratch=1048576,chunk=4096,block=168x1024x256,micro=14x32,bf16_dot=1,vector=512"), cpu_plan());
}

TEST(PlanText, RandomPlans_RoundTrip) {
    std::mt19937_64 random(7);
    auto number = [&] { return std::uniform_int_distribution<int>(0, 1 << 20)(random); };
    auto tile = [&] { return GemmTile{number(), number(), number(), number(), number(), number()}; };
    for (int i = 0; i < 500; ++i) {
        Plan plan{.path = i % 2 == 0 ? PlanPath::cpu : PlanPath::cuda_sm80, .vocab_chunk = number(), .scratch_bytes = number() * 100000LL};
        if (plan.path == PlanPath::cpu) {
            plan.cpu = {number(), i % 4 == 0, number(), number(), number(), number(), number()};
        } else {
            plan.cuda = {tile(), tile(), tile(), tile(), number()};
        }
        ASSERT_EQ(parse_plan(plan.text()), plan) << plan.text();
        ASSERT_EQ(parse_plan_json(plan.json()), plan) << plan.json();
    }
}

TEST(PlanText, HopperTiles_NameTheirSchedule) {
    const auto text_with = [](const std::string& tiles) {
        return "cuda_sm90a:recompute,chunk=16384,scratch=67108864," + tiles +
               ",grad_hidden=128x128x64x4/2x2,grad_weight=128x64x64x6/8x1,raster=8";
    };
    const std::string text = text_with("forward=128x192x64x5/4x1,dlogits=128x128x64x4/8x1");
    const Plan plan = parse_plan(text);
    EXPECT_EQ(plan.cuda.forward.schedule, TileSchedule::by_turns);
    EXPECT_EQ(plan.cuda.dlogits.schedule, TileSchedule::together);
    EXPECT_EQ(plan.cuda.grad_hidden, (GemmTile{128, 128, 64, 4, 2, 2})) << "no schedule; legality says so";
    EXPECT_EQ(plan.text(), text);
    EXPECT_EQ(parse_plan_json(plan.json()), plan);
    EXPECT_THAT(illegal_reason(parse_spec("D=2048,V=50257"), describe_device("h100"), plan).value_or(""),
                HasSubstr("grad_hidden: warps 2x2"));
    // On the other path these numbers are a grid of warps.
    EXPECT_EQ(parse_plan("cuda_sm80" + text.substr(text.find(':'))).cuda.forward, (GemmTile{128, 192, 64, 5, 4, 1}));
}

TEST(PlanText, BadText_NamesKeyAndValue) {
    const std::string cpu = kCpuText;
    const std::pair<std::string, std::vector<const char*>> cases[] = {
        {"", {"path and a strategy"}},
        {"cuda_sm80", {"path and a strategy"}},
        {"tpu:recompute", {"path=tpu", "cpu, cuda_sm80, cuda_sm90a, cuda_lt, cuda_gather, cuda_fp8 or cuda_fp8_sm89"}},
        {"cpu:remember", {"strategy=remember", "recompute or retain"}},
        {"cpu:recompute", {"'vector' is missing", "bf16_dot"}},
        {cpu + ",raster=8", {"unknown key 'raster'", "cpu has"}},
        {cpu + ",chunk=1", {"'chunk' is given twice"}},
        {cpu + ",", {"last comma"}},
        {cpu + ",,", {"last comma"}},
        {"cpu:recompute,,", {"last comma"}},
        {"cpu:recompute,,vector=512", {"unknown key ''"}},
        {"cpu:recompute,vector=512x", {"vector=512x", "integer"}},
        {"cpu:recompute,vector", {"vector=", "integer"}},
        {"cpu:recompute,chunk=99999999999999999999", {"chunk=99999999999999999999"}},
        {"cpu:recompute,bf16_dot=2", {"bf16_dot=2", "0 or 1"}},
        {"cpu:recompute,micro=14", {"micro=14", "14x32"}},
        {"cpu:recompute,block=1x2x3x4", {"block=1x2x3x4"}},
        {"cuda_sm80:recompute,forward=128x256x32x3", {"forward=128x256x32x3", "128x256x32x3/2x4"}},
        {"cuda_sm80:recompute,forward=128x256x32x3/2", {"forward="}},
        {"cuda_sm80:recompute,forward=128x256x32x3/2x4 ", {"forward="}},
        {"cuda_sm80:recompute,forward=axbxcxd/2x4", {"forward="}},
        {"cuda_sm80:recompute,vector=512", {"unknown key 'vector'"}},
    };
    for (const auto& [text, parts] : cases) {
        for (const char* part : parts) EXPECT_THAT(message_of(text), HasSubstr(part)) << text;
    }
}

TEST(PlanJson, BadJson_Throws) {
    auto object = nlohmann::json::parse(cpu_plan().json());
    EXPECT_NO_THROW((void)parse_plan_json(object.dump()));
    object["path"] = 3;
    EXPECT_THROW((void)parse_plan_json(object.dump()), PlanError);
    object.erase("path");
    EXPECT_THROW((void)parse_plan_json(object.dump()), PlanError);
    EXPECT_THROW((void)parse_plan_json("{"), PlanError);
    EXPECT_THROW((void)parse_plan_json(R"({"path":"cpu","path":"cpu"})"), PlanError);
}

}  // namespace
}  // namespace flce
