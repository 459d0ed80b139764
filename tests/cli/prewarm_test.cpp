// flce prewarm: manifests, workers, packs, --check, and strict runs on prewarmed kernels.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "records/record_store.hpp"
#include "tests/cli/process.hpp"
#include "tests/support/gpu.hpp"

namespace flce::test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kPrewarmedSpec = "D=64,V=500,dtype=fp32";
constexpr const char* kCpu = "x86-64-v3";
using Environment = std::map<std::string, std::string>;

class Prewarm : public testing::Test {
protected:
    [[nodiscard]] ProcessResult run(std::vector<std::string> arguments, Environment environment = {}, int interrupt_after_ms = 0) const {
        environment.try_emplace("FLCE_CACHE_DIR", folder_ / "cache");
        arguments.insert(arguments.begin(), "prewarm");
        arguments.emplace_back("--json");
        return run_flce(arguments, {.environment = std::move(environment), .interrupt_after_ms = interrupt_after_ms});
    }
    [[nodiscard]] std::string write(const std::string& name, const std::string& text) const {
        std::ofstream(folder_ / name) << text;
        return folder_ / name;
    }
    [[nodiscard]] static std::string read(const std::string& path) {
        std::ifstream file(path, std::ios::binary);
        return {std::istreambuf_iterator<char>(file), {}};
    }
    TemporaryFolder folder_;
};

TEST_F(Prewarm, Manifest_SpecsConfigsDevicesAndLimits) {
    fs::create_directory(folder_ / "model");
    (void)write("model/config.json", R"({"hidden_size": 16, "vocab_size": 50, "torch_dtype": "float32"})");
    const std::string manifest = write("kernels.json", R"({"specs": ["D=64,V=500,dtype=fp32", {"D": 8, "V": 9, "dtype": "fp32"}],
        "hf_configs": ["model/config.json"], "devices": ["x86-64-v3"], "num_tokens": [16], "workspace_limits": [0, "40M"]})");
    const auto json = run({"--manifest", manifest}).json();
    ASSERT_EQ(json.at("failed"), 0);
    // Each with a session's scratch, and with what the limit leaves.
    ASSERT_EQ(json.at("items").size(), 8u);
    EXPECT_THAT(json.at("items")[0].at("plan").get<std::string>(), HasSubstr("scratch=67108864"));
    EXPECT_THAT(json.at("items")[1].at("plan").get<std::string>(), HasSubstr("scratch=33554432"));
    EXPECT_THAT(json.at("items")[4].at("spec").get<std::string>(), HasSubstr("D=16,V=50,dtype=fp32,tied"));
    EXPECT_EQ(json.at("items")[6].at("spec"), "D=16,V=50,dtype=fp32");
    EXPECT_EQ(run({"--manifest", manifest, "--check"}).exit_code, 0);
    EXPECT_EQ(run({"--manifest", manifest}).json().at("compiled"), 0);
}

// Trainer(bf16=True) asks for these dtypes where a model's config.json says something else.
TEST_F(Prewarm, HfConfigUnderAutocast_WeightStaysFp32) {
    const std::string config = write("config.json", R"({"hidden_size": 16, "vocab_size": 50, "torch_dtype": "float16"})");
    const auto specs = [&](const std::vector<std::string>& arguments) {
        std::vector<std::string> texts;
        const auto json = run(arguments).json();
        for (const auto& item : json.at("items")) texts.push_back(item.at("spec").get<std::string>());
        return texts;
    };
    const std::vector<std::string> autocast{"D=16,V=50,dtype=bf16,tied,weight_dtype=fp32", "D=16,V=50,dtype=bf16,weight_dtype=fp32"};
    EXPECT_EQ(specs({"--hf-config", config, "--autocast", "bf16", "--device", kCpu}), autocast);
    const std::string manifest = write("kernels.json", R"({"hf_configs": ["config.json"], "autocast": ["bf16"]})");
    EXPECT_EQ(specs({"--manifest", manifest, "--device", kCpu}), autocast);
    const ProcessResult bad = run({"--hf-config", config, "--autocast", "fp32", "--device", kCpu});
    EXPECT_EQ(bad.exit_code, 2);
    EXPECT_THAT(bad.err, HasSubstr("\"fp32\" is not bf16 or fp16"));
}

TEST_F(Prewarm, ManifestThatIsWrong_UsageErrorNamesFileAndKey) {
    for (const auto& [text, what] : std::vector<std::pair<std::string, std::string>>{
             {"{", "is not JSON"},
             {"[]", "is not a JSON object"},
             {R"({"spec": []})", "\"spec\"; allowed are specs"},
             {R"({"specs": "D=8,V=9"})", "\"specs\" is not a list"},
             {R"({"specs": [7]})", "7 in \"specs\" is not text"},
             {R"({"specs": [)" + std::string(200'000, '[') + std::string(200'000, ']') + "]}", "in \"specs\" is not text"},
             {R"({"specs": ["D=7,V=9"]})", "hidden_size"},
             {R"({"devices": ["x86-64-v3"]})", "names no spec"},
             {R"({"specs": ["D=8,V=9"]})", "names no device"},
             {R"({"specs": ["D=8,V=9"], "devices": ["x86-64-v3"], "num_tokens": [-1]})", "-1 in \"num_tokens\""},
             {R"({"specs": ["D=8,V=9"], "devices": ["x86-64-v3"], "workspace_limits": ["much"]})", "\"much\" is not a number of bytes"},
             {R"({"hf_configs": ["none.json"], "devices": ["x86-64-v3"]})", "none.json"}}) {
        const ProcessResult result = run({"--manifest", write("bad.json", text)});
        EXPECT_EQ(result.exit_code, 2) << text;
        EXPECT_THAT(result.err, AllOf(HasSubstr(what), HasSubstr(text.find("none") == std::string::npos ? "bad.json" : ""))) << text;
    }
    EXPECT_FALSE(fs::exists(folder_ / "cache"));
}

TEST_F(Prewarm, ManifestWithoutDevices_TakesTheCommandLines) {
    const std::string manifest = write("kernels.json", R"({"specs": ["D=64,V=500,dtype=fp32"]})");
    const auto json = run({"--manifest", manifest, "--device", kCpu, "--device", "x86-64"}).json();
    EXPECT_EQ(json.at("items").size(), 2u);
}

TEST_F(Prewarm, RequestsThatComeToOneKernelSet_OneItem) {
    const auto json = run({"--spec", kPrewarmedSpec, "--spec", kPrewarmedSpec, "--device", kCpu, "--num-tokens", "16", "--num-tokens",
                           "4096", "--workspace-limit", "40M", "--workspace-limit", "41M"})
                          .json();
    EXPECT_EQ(json.at("items").size(), 1u);
}

TEST_F(Prewarm, Pack_HoldsWhatTheseSpecsUseAndHasOneForm) {
    const std::vector<std::string> what{
        "--spec", "D=64,V=500,dtype=fp32,softcap=30", "--spec", "D=64,V=500,dtype=fp32,softcap=40", "--spec", kPrewarmedSpec, "--device",
        kCpu};
    const auto pack = [&](const std::string& name, const std::string& jobs, const std::string& cache) {
        std::vector<std::string> arguments = what;
        arguments.insert(arguments.end(), {"--out", folder_ / name, "--jobs", jobs});
        const auto json = run(arguments, {{"FLCE_CACHE_DIR", folder_ / cache}}).json();
        EXPECT_EQ(json.at("pack"), folder_ / name);
        return read(folder_ / name);
    };
    const std::string first = pack("a.flcepack", "1", "cache");
    // Another cache has more, and the shared object from another spec.
    ASSERT_EQ(run({"--spec", "D=64,V=500,dtype=fp32,softcap=50", "--spec", "D=64,V=500,dtype=bf16,bias", "--device", kCpu},
                  {{"FLCE_CACHE_DIR", folder_ / "other"}})
                  .exit_code,
              0);
    EXPECT_EQ(pack("b.flcepack", "3", "other"), first);
    EXPECT_EQ(pack("c.flcepack", "2", "cache"), first);  // all of them hits
    const auto entries = run_flce({"cache", "ls", "--pack", folder_ / "a.flcepack", "--json"}).json().at("entries");
    EXPECT_EQ(entries.size(), 2u);

    Environment elsewhere{{"FLCE_CACHE_PACKS", folder_ / "a.flcepack"}, {"FLCE_NO_DISK_CACHE", "1"}};
    std::vector<std::string> check = what;
    check.emplace_back("--check");
    EXPECT_EQ(run(check, elsewhere).exit_code, 0);
}

TEST_F(Prewarm, Check_NamesWhatIsMissingAndCompilesNothing) {
    ASSERT_EQ(run({"--spec", kPrewarmedSpec, "--device", kCpu}).exit_code, 0);
    const ProcessResult result = run({"--spec", kPrewarmedSpec, "--spec", "D=64,V=500,dtype=fp32,bias", "--device", kCpu, "--check"});
    EXPECT_EQ(result.exit_code, 1);
    ASSERT_EQ(result.json().at("missing").size(), 1u);
    EXPECT_EQ(result.json().at("missing")[0].at("spec"), "D=64,V=500,dtype=fp32,bias");
    EXPECT_EQ(result.json().at("hits"), 1);
    EXPECT_EQ(run_flce({"cache", "ls", "--cache-dir", folder_ / "cache", "--json"}).json().at("entries").size(), 1u);
    EXPECT_EQ(run({"--spec", kPrewarmedSpec, "--device", kCpu, "--check", "--out", folder_ / "x"}).exit_code, 2);
}

TEST_F(Prewarm, WhatNoCacheKeeps_IsAnError) {
    const std::vector<std::string> command{"--spec", kPrewarmedSpec, "--device", kCpu};
    const auto expect_lost = [&](const ProcessResult& result) {
        EXPECT_EQ(result.exit_code, 3) << result.err;
        EXPECT_THAT(result.err, HasSubstr("no cache keeps them"));
        EXPECT_EQ(result.json().at("not_kept"), 1);
    };
    (void)write("cache", "a file in the place of the directory");
    expect_lost(run(command));
    fs::remove(folder_ / "cache");
    expect_lost(run(command, {{"FLCE_NO_DISK_CACHE", "1"}}));
    expect_lost(run(command, {{"FLCE_CACHE_MAX_BYTES", "1"}}));
    // A pack keeps them.
    std::vector<std::string> packed = command;
    packed.insert(packed.end(), {"--out", folder_ / "kernels.flcepack"});
    EXPECT_EQ(run(packed, {{"FLCE_NO_DISK_CACHE", "1"}}).exit_code, 0);
    const ProcessResult kept = run(command);
    EXPECT_EQ(kept.exit_code, 0);
    EXPECT_EQ(kept.json().at("not_kept"), 0);
}

TEST_F(Prewarm, TokensWithoutALimit_CallsThatDoNotSayHowManyToo) {
    // Measured: one plan the quickest at 4096 tokens, which is what calls that do not say are planned for, and another at 8192.
    const Spec spec = parse_spec("D=64,V=1000,dtype=bf16").normalized();
    const Device device = describe_device("h100");
    const std::vector<Plan> plans = candidate_plans(spec, device);
    ASSERT_GE(plans.size(), 2U);
    fs::create_directory(folder_ / "records");
    for (const auto& [tokens, plan] : {std::pair{4096, plans.front()}, {8192, plans.back()}}) {
        Record record{.key = record_key(spec, device, {.num_tokens = tokens}, kRetainedAutomatically, 1)};
        record.runs["run"] = {.date = "2026-01-01T00:00:00Z", .version = "0.1.0"};
        record.candidates[plan.text()].times_ms["run"] = {1.0};
        write_record_file(fs::path(folder_ / "records") / record.key.file(), record);
    }
    const Environment environment{{"FLCE_RECORDS", folder_ / "records"}};
    const auto missing_with = [&](const char* limit) {
        std::set<std::string> missing;
        const auto json =
            run({"--spec", spec.text(), "--device", "h100", "--num-tokens", "8192", "--workspace-limit", limit, "--check"}, environment)
                .json();
        for (const auto& item : json.at("missing")) missing.insert(item.at("plan").get<std::string>());
        return missing;
    };
    EXPECT_THAT(missing_with("0"), testing::UnorderedElementsAre(plans.front().text(), plans.back().text()));
    EXPECT_EQ(missing_with("2G").size(), 1u) << "a limit goes with a number of tokens";
}

TEST_F(Prewarm, Depfile_NamesWhatThePackIsMadeFrom) {
    const std::string layer = write("a layer.json", R"({"D": 64, "V": 500, "dtype": "fp32"})");
    const std::string manifest = write("kernels.json", R"({"specs": ["@a layer.json"], "devices": ["x86-64-v3"]})");
    const std::string pack = folder_ / "kernels.flcepack";
    ASSERT_EQ(run({"--manifest", manifest, "--out", pack, "--depfile", pack + ".d"}).exit_code, 0);
    std::string escaped = layer;
    escaped.insert(escaped.find(' '), "\\");
    EXPECT_THAT(read(pack + ".d"), AllOf(testing::StartsWith(pack + ":"), HasSubstr(manifest), HasSubstr(escaped)));
    EXPECT_EQ(run({"--manifest", manifest, "--depfile", pack + ".d"}).exit_code, 2);
    EXPECT_EQ(run({"--manifest", manifest, "--out", folder_ / "absent/kernels.flcepack"}).exit_code, 2);
}

TEST_F(Prewarm, CheckInAStrictEnvironment_AnswersForAStrictRun) {
    const std::vector<std::string> command{"--spec", kPrewarmedSpec, "--device", kCpu, "--check"};
    ASSERT_EQ(run({"--spec", kPrewarmedSpec, "--device", kCpu}).exit_code, 0);
    EXPECT_EQ(run(command, {{"FLCE_STRICT", "1"}}).exit_code, 0);
    const std::string absent = folder_ / "absent.flcepack";
    EXPECT_EQ(run(command, {{"FLCE_CACHE_PACKS", absent}}).exit_code, 0);
    EXPECT_EQ(run(command, {{"FLCE_CACHE_PACKS", absent}, {"FLCE_STRICT", "1"}}).exit_code, 3) << "such a run would not start";
}

TEST_F(Prewarm, AnotherCpuWithTheSamePlan_AnotherObject) {
    const auto explained = run_flce({"explain", "--spec", kPrewarmedSpec, "--device", kCpu, "--json"}).json();
    const auto with = [&](const char* device) {
        return std::vector<std::string>{"--spec", kPrewarmedSpec, "--plan", explained.at("plan").get<std::string>(), "--device", device};
    };
    ASSERT_EQ(run(with(kCpu)).json().at("compiled"), 1);
    for (const auto& [device, exit_code] : {std::pair{kCpu, 0}, {"haswell", 1}, {"znver3", 1}}) {
        std::vector<std::string> check = with(device);
        check.emplace_back("--check");
        EXPECT_EQ(run(check).exit_code, exit_code) << device;
    }
}

TEST_F(Prewarm, Strict_MissNamesTheCommandThatThenServesIt) {
    const std::vector<std::string> check{"check",        "--device", kCpu,          "--spec",          kPrewarmedSpec,
                                         "--num-tokens", "4",        "--cache-dir", folder_ / "cache", "--json"};
    const ProcessResult miss = run_flce(check, {.environment = {{"FLCE_STRICT", "1"}}});
    EXPECT_EQ(miss.exit_code, 3);
    EXPECT_THAT(miss.err, HasSubstr("flce prewarm --spec 'D=64,V=500,dtype=fp32' --device 'x86-64-v3'"));
    ASSERT_EQ(run({"--spec", kPrewarmedSpec, "--device", kCpu}, {{"FLCE_STRICT", "1"}}).exit_code, 0);
    EXPECT_EQ(run_flce(check, {.environment = {{"FLCE_STRICT", "1"}}}).exit_code, 0);
}

TEST_F(Prewarm, KernelThatFails_ListedAtTheEndWithoutAPack) {
    const ProcessResult result = run({"--spec", kPrewarmedSpec, "--device", "sm_80", "--device", kCpu, "--out", folder_ / "x.flcepack"},
                                     {{"FLCE_NVRTC", "/nonexistent/libnvrtc.so"}});
    EXPECT_EQ(result.exit_code, 3) << result.err;
    EXPECT_EQ(result.json().at("failed"), 1);
    EXPECT_EQ(result.json().at("compiled"), 1);
    EXPECT_TRUE(result.json().at("pack").is_null());
    EXPECT_FALSE(fs::exists(folder_ / "x.flcepack"));
    EXPECT_THAT(result.err, HasSubstr("flce: error: D=64,V=500,dtype=fp32 for sm_80"));
}

/// Processes that have `text` on their command line.
int processes_with(const std::string& text) {
    int count = 0;
    for (const auto& entry : fs::directory_iterator("/proc")) {
        std::ifstream file(entry.path() / "cmdline", std::ios::binary);
        const std::string command{std::istreambuf_iterator<char>(file), {}};
        count += command.find("prewarm-worker") != std::string::npos && command.find(text) != std::string::npos ? 1 : 0;
    }
    return count;
}

TEST_F(Prewarm, Interrupted_ValidCacheAndNoWorkerLeft) {
    std::vector<std::string> arguments{"--jobs", "2", "--cache-dir", folder_ / "cut short"};
    for (const char* device :
         {"haswell", "broadwell", "skylake", "skylake-avx512", "cascadelake", "icelake-server", "znver2", "znver3", "znver4"}) {
        arguments.insert(arguments.end(), {"--device", device});
    }
    for (const char* dtype : {"bf16", "fp16", "fp32"}) {
        for (const char* option : {"", ",softcap=30", ",logit_scale=2", ",softcap=30,logit_scale=2"}) {
            arguments.insert(arguments.end(), {"--spec", std::string("D=64,V=500,dtype=") + dtype + option});
        }
    }
    const ProcessResult result = run(arguments, {}, 700);
    EXPECT_EQ(result.exit_code, 130) << result.err;
    EXPECT_EQ(result.json()["error"]["message"], "interrupted") << result.out;
    EXPECT_EQ(processes_with(folder_ / "cut short"), 0);
    const auto verified = run_flce({"cache", "verify", "--cache-dir", folder_ / "cut short", "--json"}).json();
    EXPECT_EQ(verified.at("bad").size(), 0u);
}

TEST_F(Prewarm, CudaPack_ServesEveryBudgetItWasMadeFor) {
    const std::vector<std::string> what{"--spec", "D=64,V=500,dtype=fp32", "--device", "sm_80", "--num-tokens", "4096", "--workspace-limit",
                                        "40M",    "--workspace-limit",     "0"};
    std::vector<std::string> pack = what;
    pack.insert(pack.end(), {"--out", folder_ / "k.flcepack"});
    const ProcessResult built = run(pack, {{"FLCE_CACHE_DIR", shared_cache().string()}});
    if (built.exit_code == 3) GTEST_SKIP() << "no NVRTC: " << built.err;
    ASSERT_EQ(built.exit_code, 0) << built.err;
    Environment elsewhere{{"FLCE_CACHE_PACKS", folder_ / "k.flcepack"}, {"FLCE_NO_DISK_CACHE", "1"}};
    std::vector<std::string> check = what;
    check.emplace_back("--check");
    EXPECT_EQ(run(check, elsewhere).exit_code, 0);
    elsewhere["FLCE_NVRTC"] = "none";
    EXPECT_EQ(run(check, elsewhere).exit_code, 0);
    // Keys hold no path: installed elsewhere, in another folder, by another user, without a driver, the program asks for the same.
    const TemporaryFolder container;
    std::error_code linked;
    fs::create_hard_link(flce_program(), container / "flce", linked);
    if (linked) fs::copy_file(flce_program(), container / "flce");
    Dl_info library{};
    ASSERT_NE(::dladdr(reinterpret_cast<const void*>(&version), &library), 0);
    const Environment of_container{{"LD_LIBRARY_PATH", fs::absolute(library.dli_fname).parent_path().string()},
                                   {"HOME", container / "home"},
                                   {"TMPDIR", container.path().string()},
                                   {"FLCE_LIBCUDA", "/none"},
                                   {"FLCE_NO_DISK_CACHE", "1"},
                                   {"TZ", "Pacific/Kiritimati"},
                                   {"FLCE_CACHE_PACKS", folder_ / "k.flcepack"}};
    std::vector<std::string> installed = check;
    installed.insert(installed.begin(), "prewarm");
    const auto there = run_flce(installed, {.environment = of_container, .program = container / "flce", .directory = container.path()});
    EXPECT_EQ(there.exit_code, 0) << there.out << there.err;
    std::vector<std::string> other = check;
    other[3] = "sm_87";  // limits, plans and sources are equal, the architecture alone is another
    const ProcessResult elsewhere_too = run(other, elsewhere);
    EXPECT_EQ(elsewhere_too.json().at("missing").size(), built.json().at("items").size()) << elsewhere_too.out;
    check[7] = "24M";
    const ProcessResult smaller = run(check, elsewhere);
    EXPECT_EQ(smaller.exit_code, 1) << smaller.out;
    EXPECT_EQ(smaller.json().at("missing").size(), 1u);
}

}  // namespace
}  // namespace flce::test
