#include "flce/device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "flce/error.hpp"

namespace flce {
namespace {

TEST(Device, EveryKnownName_IsDescribed) {
    const auto names = known_device_names();
    EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
    for (const std::string& name : names) {
        const Device device = describe_device(name);
        if (device.kind == DeviceKind::cuda) {
            EXPECT_THAT(device.gpu.arch, testing::StartsWith("sm_" + std::to_string(device.gpu.compute_capability))) << name;
            EXPECT_GT(device.gpu.sm_count, 0) << name;
            EXPECT_LT(device.gpu.smem_per_block_bytes, device.gpu.smem_per_sm_bytes) << name;
            EXPECT_GT(device.gpu.bandwidth_bytes_per_s, 1e11) << name;
            EXPECT_GT(device.gpu.bf16_flops, 1e13) << name;
        } else {
            EXPECT_EQ(device.name, name);
            const bool arm = device.cpu.triple.starts_with("aarch64");
            EXPECT_EQ(device.cpu.cpu, name == "aarch64" ? "generic" : name);
            EXPECT_EQ(device.cpu.fma, arm || device.cpu.vector_bits > 128) << name;
        }
        const auto json = nlohmann::json::parse(device.json());
        EXPECT_EQ(json.at("kind"), device.kind == DeviceKind::cuda ? "cuda" : "cpu");
        EXPECT_EQ(json.at("name"), device.name);
        EXPECT_EQ(parse_device_json(device.json()), device);
    }
}

TEST(Device, Architectures_NameTheirExactTarget) {
    EXPECT_EQ(describe_device("sm_80").gpu.arch, "sm_80");
    EXPECT_EQ(describe_device("sm_90").gpu.arch, "sm_90a");
    EXPECT_EQ(describe_device("SM_90A").gpu.arch, "sm_90a");
    EXPECT_EQ(describe_device("sm_100").gpu.arch, "sm_100a");
    EXPECT_EQ(describe_device("sm_103").gpu.arch, "sm_103a");
    EXPECT_EQ(describe_device("sm_120").gpu.arch, "sm_120");
    EXPECT_EQ(describe_device("sm_120a").gpu.arch, "sm_120a");
    EXPECT_EQ(describe_device("sm_80").gpu.smem_per_block_bytes, 163 * 1024);
    EXPECT_EQ(describe_device("sm_86").gpu.smem_per_block_bytes, 99 * 1024);
    EXPECT_EQ(describe_device("sm_89").gpu.smem_per_block_bytes, 99 * 1024);
    EXPECT_EQ(describe_device("sm_90a").gpu.smem_per_block_bytes, 227 * 1024);
    EXPECT_EQ(describe_device("sm_120").gpu.smem_per_block_bytes, 99 * 1024);
}

// Every target from sm_80 on that a version of NVRTC since 12.0 lists, so that what `flce info` shows can be planned and compiled for.
TEST(Device, EveryTargetOfNvrtc_IsDescribed) {
    for (const int number : {80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121}) {
        EXPECT_EQ(describe_device("sm_" + std::to_string(number)).gpu.compute_capability, number);
    }
    EXPECT_EQ(describe_device("sm_110").gpu.arch, "sm_110a");
    EXPECT_EQ(describe_device("NVIDIA Thor").gpu, describe_device("sm_110").gpu);
}

TEST(Device, ProductNames_AreFoundAsDriversAndPeopleWriteThem) {
    const std::pair<const char*, const char*> cases[] = {
        {"NVIDIA H200", "NVIDIA H200"},
        {"h200", "NVIDIA H200"},
        {"NVIDIA H100 80GB HBM3", "NVIDIA H100"},
        {"NVIDIA H100 PCIe", "NVIDIA H100 PCIe"},
        {"NVIDIA A100-SXM4-80GB", "NVIDIA A100"},
        {"NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"},
        {"a10", "NVIDIA A10"},
        {"NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"},
        {"rtx4090", "NVIDIA GeForce RTX 4090"},
        {"RTX-5090", "NVIDIA GeForce RTX 5090"},
        {"L40", "NVIDIA L40"},
        {"L40S", "NVIDIA L40S"},
        {"NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 6000"},
        {"NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada"},
        {"NVIDIA GH200 480GB", "NVIDIA GH200"},
        {"B200", "NVIDIA B200"},
        {"gb200", "NVIDIA GB200"},
        {"spark", "NVIDIA DGX Spark"},
        {"NVIDIA GB10", "NVIDIA GB10"},
    };
    for (const auto& [asked, name] : cases) EXPECT_EQ(describe_device(asked).name, name) << asked;
    EXPECT_EQ(describe_device("h100").gpu.arch, "sm_90a");
    EXPECT_EQ(describe_device("h200").gpu.memory_bytes, 141LL << 30);
    EXPECT_EQ(describe_device("h200").gpu.sm_count, 132);
}

TEST(Device, Cpus_HaveTheirVectorUnits) {
    EXPECT_EQ(describe_device("x86-64").cpu.vector_bits, 128);
    EXPECT_EQ(describe_device("x86-64-v3").cpu.vector_bits, 256);
    EXPECT_EQ(describe_device("X86-64-V4").cpu.vector_bits, 512);
    EXPECT_FALSE(describe_device("x86-64-v4").cpu.bf16_dot);
    EXPECT_FALSE(describe_device("icelake-server").cpu.bf16_dot);
    EXPECT_TRUE(describe_device("znver4").cpu.bf16_dot);
    EXPECT_TRUE(describe_device("sapphirerapids").cpu.bf16_dot);
    EXPECT_EQ(describe_device("sapphirerapids").cpu.triple, "x86_64-unknown-linux-gnu");
    EXPECT_EQ(describe_device("aarch64").cpu.triple, "aarch64-unknown-linux-gnu");
    EXPECT_EQ(describe_device("Neoverse-V2").cpu.vector_bits, 128);
    EXPECT_TRUE(describe_device("neoverse-v2").cpu.fma);
}

TEST(Device, BadJson_NamesTheKey) {
    auto json = nlohmann::json::parse(describe_device("h100").json());
    auto message = [&] {
        try {
            (void)parse_device_json(json.dump());
        } catch (const EnvironmentError& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    EXPECT_EQ(message(), "");
    json["tensor_cores"] = 3;
    EXPECT_THAT(message(), testing::HasSubstr("keys beyond"));
    json.erase("tensor_cores");
    json["sm_count"] = "many";
    EXPECT_THAT(message(), testing::HasSubstr("sm_count"));
    json.erase("sm_count");
    EXPECT_THAT(message(), testing::HasSubstr("sm_count"));
    json["kind"] = "tpu";
    EXPECT_THAT(message(), testing::HasSubstr("tpu"));
}

TEST(Device, UnknownName_SuggestsTheNearest) {
    const std::pair<const char*, const char*> cases[] = {
        {"4090", "did you mean 'NVIDIA GeForce RTX 4090'?"},
        {"sm90a", "did you mean 'sm_90a'?"},
        {"sm_81", "did you mean 'sm_80'?"},
        {"H1000", "did you mean 'NVIDIA H100'?"},
        {"h20", "did you mean 'NVIDIA H200'?"},
        {"xnver4", "did you mean 'znver4'?"},
        {"x86_64_v3", "did you mean 'x86-64-v3'?"},
        {"icelake-sever", "did you mean 'icelake-server'?"},
        {"gpu", "cuda"},
        {"nvidia", "h100"},
        {"sm_70", "sm_80"},
    };
    for (const auto& [name, part] : cases) {
        try {
            (void)describe_device(name);
            ADD_FAILURE() << name;
        } catch (const EnvironmentError& error) {
            EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr(std::string("'") + name + "'"), testing::HasSubstr(part)));
            EXPECT_LT(std::string(error.what()).size(), 120U) << "one sentence, not every name";
        }
    }
}

TEST(Device, UnknownName_ListsTheKnownOnes) {
    for (const char* name : {"", "cpu", "cuda", "cuda:0", "native", "pentium"}) {
        try {
            (void)describe_device(name);
            ADD_FAILURE() << name;
        } catch (const EnvironmentError& error) {
            EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr(std::string("'") + name + "'"), testing::HasSubstr("sm_90a"),
                                                     testing::HasSubstr("NVIDIA H200"), testing::HasSubstr("znver4")));
        }
    }
}

}  // namespace
}  // namespace flce
