// The flce program as its users meet it: exit codes, text on stdout and on stderr, JSON keys, refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "tests/cli/process.hpp"

namespace flce::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kSmall = "D=16,V=50,dtype=fp32";

/// One line "flce: error: …" on stderr, nothing on stdout.
void expect_refused(const std::vector<std::string>& arguments, int exit_code, const std::string& reason) {
    const ProcessResult result = run_flce(arguments);
    const std::string command = testing::PrintToString(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << command << result.err;
    EXPECT_EQ(result.out, "") << command;
    EXPECT_THAT(result.err, AllOf(StartsWith("flce: error: "), HasSubstr(reason))) << command;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << command << result.err;
}

nlohmann::json expect_json(const std::vector<std::string>& arguments, int exit_code = 0) {
    const ProcessResult result = run_flce(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << testing::PrintToString(arguments) << result.err;
    nlohmann::json json = result.json();
    EXPECT_TRUE(json.is_object()) << result.out;
    return json;
}

void expect_keys(const nlohmann::json& json, const std::vector<std::string>& keys) {
    for (const std::string& key : keys) EXPECT_TRUE(json.contains(key)) << key << " in " << json.dump();
}

TEST(Flce_Help, IsOnStdoutForEveryCommand) {
    EXPECT_EQ(run_flce({"--help"}).exit_code, 0);
    EXPECT_THAT(run_flce({"--help"}).out,
                AllOf(HasSubstr("Examples:"), HasSubstr("Exit codes"), HasSubstr(", 130 ended by"), HasSubstr("softcap")));
    for (const char* command : {"demo", "run", "check", "bench", "explain", "prewarm", "tune", "info"}) {
        const ProcessResult result = run_flce({command, "--help"});
        EXPECT_EQ(result.exit_code, 0) << command;
        EXPECT_THAT(result.out, AllOf(HasSubstr("Examples:"), HasSubstr(std::string("flce ") + command))) << command;
        EXPECT_EQ(result.err, "") << command;
    }
    EXPECT_EQ(run_flce({"--version"}).exit_code, 0);
}

TEST(Flce_BadUsage, ExitsWith2AndOneLine) {
    expect_refused({}, 2, "subcommand");
    expect_refused({"nonsense"}, 2, "nonsense");
    expect_refused({"check"}, 2, "--spec");
    expect_refused({"check", "--spec", kSmall, "--nonsense"}, 2, "--nonsense");
    expect_refused({"check", "--spec", kSmall, "--num-tokens", "-1"}, 2, "num-tokens");
    expect_refused({"check", "--spec", kSmall, "--num-tokens", "many"}, 2, "num-tokens");
    expect_refused({"check", "--spec", kSmall, "--reduction", "median"}, 2, "reduction");
    expect_refused({"check", "--spec", kSmall, "--workspace", "lots"}, 2, "--workspace");
    expect_refused({"run", "--spec", kSmall}, 2, "--input");
    expect_refused({"prewarm", "--device", "sm_80"}, 2, "--spec");
    expect_refused({"prewarm", "--hf-config", "/nonexistent/config.json", "--device", "sm_80"}, 2, "/nonexistent/config.json");
    expect_refused({"explain", "--spec", "@/nonexistent.json"}, 2, "/nonexistent.json");
}

TEST(Flce_Typos, NameTheNearest) {
    expect_refused({"explian"}, 2, "did you mean explain?");
    expect_refused({"cache", "stat"}, 2, "did you mean stats?");
    expect_refused({"check", "--sepc", kSmall}, 2, "did you mean --spec?");
    expect_refused({"check", "--spec", kSmall, "--num-token=3"}, 2, "did you mean --num-tokens?");
    expect_refused({"bench", "--spec", kSmall, "--workspacelimit", "3"}, 2, "did you mean --workspace-limit?");
    expect_refused({"tune", "--spec", kSmall, "--buget-s", "3"}, 2, "did you mean --budget-s?");
    expect_refused({"check", "--spec", kSmall, "--seed", "explian"}, 2, "--seed");  // a value is no command
    expect_refused({"check", "--spec", "D=16,V=50,sofcap=3"}, 2, "did you mean softcap?");
    expect_refused({"explain", "--spec", kSmall, "--device", "4090"}, 3, "did you mean 'NVIDIA GeForce RTX 4090'?");
}

TEST(Flce_Spec, FieldsOwnWordsAndJsonComeOutInOneSpelling) {
    for (const char* spec :
         {"hidden_size=64,vocab_size=500,dtype=bfloat16", R"({"hidden_size": 64, "vocab_size": 500, "dtype": "bfloat16"})", "V=500,D=64"}) {
        EXPECT_EQ(expect_json({"explain", "--spec", spec, "--device", "h100", "--json"})["spec"], "D=64,V=500,dtype=bf16") << spec;
        EXPECT_THAT(run_flce({"explain", "--spec", spec, "--device", "h100"}).out, StartsWith("spec        D=64,V=500,dtype=bf16\n"));
    }
}

TEST(CMakePrewarm_OldNameOfLimits, SaysTheNewOne) {
    const TemporaryFolder folder;
    const std::string script = folder / "script.cmake";
    std::ofstream(script) << "include(" FLCE_SOURCE_DIR
                             "/cmake/flce_prewarm.cmake)\nflce_prewarm(kernels SPECS D=64,V=500 DEVICES cpu BUDGETS 2G)\n";
    FILE* const cmake = ::popen(("cmake -P " + script + " 2>&1").c_str(), "r");
    ASSERT_NE(cmake, nullptr);
    std::string said;
    for (int c = std::fgetc(cmake); c != EOF; c = std::fgetc(cmake)) said += static_cast<char>(c);
    EXPECT_NE(::pclose(cmake), 0);
    EXPECT_THAT(said, HasSubstr("BUDGETS is now called WORKSPACE_LIMITS"));
}

TEST(Flce_BadSpec, ExitsWith2NamingTheField) {
    const struct {
        const char* spec;
        const char* reason;
    } cases[] = {{"D=16", "V"},
                 {"V=50", "D"},
                 {"D=12,V=50", "8"},
                 {"D=16,V=1", "V"},
                 {"D=-8,V=50", "D"},
                 {"D=16,V=50,x=1", "x"},
                 {"D=16,V=50,dtype=int8", "dtype"},
                 {"D=16,D=16,V=50", "D"},
                 {"D=16,V=50,label_smoothing=2", "label_smoothing"},
                 {"", "D"}};
    for (const char* command : {"check", "bench", "explain"}) {
        for (const auto& c : cases) expect_refused({command, "--spec", c.spec}, 2, c.reason);
    }
}

TEST(Flce_BadPlanOrDevice, SaysWhatIsWrong) {
    expect_refused({"check", "--spec", kSmall, "--device", "cpu", "--plan", "nonsense"}, 2, "plan");
    expect_refused({"explain", "--spec", kSmall, "--device", "abacus"}, 3, "abacus");
    expect_refused({"check", "--spec", kSmall, "--device", "cuda:99"}, 3, "cuda");
}

TEST(FlceExplain_AnyDevice, HasEveryKey) {
    for (const char* device : {"cpu", "sm_80", "sm_90a", "NVIDIA H200", "x86-64-v4"}) {
        const auto json = expect_json({"explain", "--spec", "D=2048,V=151936,dtype=bf16,tied", "--device", device, "--json"});
        expect_keys(json, {"spec", "plan", "device", "workspace_bytes", "flops", "curve", "reasons"});
        ASSERT_GE(json["curve"].size(), 1U) << device;
        for (const auto& point : json["curve"]) expect_keys(point, {"workspace_bytes", "strategy", "plan", "forward_backward_ms"});
        // 8·N·D·V operations with the logits computed twice
        EXPECT_NEAR(json["flops"].get<double>(), 8.0 * 4096 * 2048 * 151936, 0.1 * 8.0 * 4096 * 2048 * 151936) << device;
        EXPECT_LE(json["workspace_bytes"].get<double>(), (64 << 20) + 4.0 * 4096 * 2048);
    }
    EXPECT_THAT(run_flce({"explain", "--spec", kSmall, "--device", "h100"}).out, AllOf(HasSubstr("why"), HasSubstr("recompute")));
}

TEST(FlceExplain_Retain, MoreIsFasterAndCostsWhatItSays) {
    const auto at = [](const std::string& spec, const char* retain) {
        return expect_json({"explain", "--spec", spec, "--device", "sm_90a", "--retain", retain, "--json"});
    };
    const std::string spec = "D=2048,V=151936,dtype=bf16";
    const auto none = at(spec, "none"), lent = at(spec, "grad_weight"), all = at(spec, "all");
    EXPECT_EQ(none["strategy"], "retain");
    EXPECT_LT(all["forward_backward_ms"].get<double>(), lent["forward_backward_ms"].get<double>());
    EXPECT_LT(lent["forward_backward_ms"].get<double>(), none["forward_backward_ms"].get<double>());
    EXPECT_EQ(lent["workspace_bytes"], none["workspace_bytes"]);
    EXPECT_EQ(lent["retained_part"], 0.5) << "4096 tokens, 2048 wide";
    EXPECT_EQ(all["workspace_bytes"].get<std::int64_t>() - none["workspace_bytes"].get<std::int64_t>(), std::int64_t{2} * 4096 * 151936);
    double last = 1e9;
    for (const auto& point : all["curve"]) {
        if (point["retained_bytes"].get<std::int64_t>() == 0) continue;
        EXPECT_LT(point["forward_backward_ms"].get<double>(), last);
        last = point["forward_backward_ms"].get<double>();
    }
    EXPECT_DOUBLE_EQ(last, all["forward_backward_ms"].get<double>()) << "the curve ends with everything";
    const std::string recomputes = ",softcap=30,label_smoothing=0.1";
    EXPECT_EQ(at(spec + recomputes, "all")["retained_bytes"], 0);
    for (const std::string& other : {recomputes, std::string(",grad_weight_mode=accumulate"), std::string(",layout=hidden_major")}) {
        expect_refused({"explain", "--spec", spec + other, "--device", "sm_90a", "--retain", "grad_weight"}, 2, "grad_weight");
    }
    for (const char* command : {"explain", "bench", "check"}) {
        expect_refused({command, "--spec", kSmall, "--device", "cpu", "--retain", "lots"}, 2, "--retain");
    }
}

TEST(FlceExplain_WorkspaceLimit, IsKeptAndUsed) {
    const std::string spec = "D=2048,V=151936,dtype=bf16";
    const auto at = [&](const std::string& limit, const std::string& more = "") {
        return expect_json({"explain", "--spec", spec + more, "--device", "sm_90a", "--workspace-limit", limit, "--json"});
    };
    double last = 1e9;
    for (const auto& [limit, bytes] : {std::pair{"800M", 800 << 20}, {"1G", 1 << 30}, {"1200M", 1200 << 20}}) {
        const auto json = at(limit);
        EXPECT_LE(json["workspace_bytes"].get<std::int64_t>(), bytes);
        EXPECT_GT(json["workspace_bytes"].get<std::int64_t>(), bytes / 10 * 9) << "what is allowed is used";
        EXPECT_LT(json["forward_backward_ms"].get<double>(), last) << limit;
        last = json["forward_backward_ms"].get<double>();
        bool on_the_curve = false;
        bool better = false;  // with less memory
        for (const auto& point : json["curve"]) {
            on_the_curve = on_the_curve || point["retained_bytes"] == json["retained_bytes"];
            better = better ||
                     (point["workspace_bytes"] < json["workspace_bytes"] && point["forward_backward_ms"] < json["forward_backward_ms"]);
        }
        EXPECT_NE(on_the_curve, better) << limit;
    }
    EXPECT_EQ(at("700M")["retained_part"], 0.5) << "50.9 % in memory of its own is hardly better than 50 % in grad_weight's";
    const auto little = at("100M");
    EXPECT_LE(little["workspace_bytes"].get<std::int64_t>(), 100 << 20);
    EXPECT_EQ(little["retained_part"], 0.5) << "in grad_weight's memory";
    EXPECT_EQ(at("100M", ",grad_weight_mode=accumulate")["retained_part"].get<double>() > 0.1, false);
    EXPECT_THAT(run_flce({"explain", "--spec", spec, "--device", "h100", "--workspace-limit", "1G"}).out,
                AllOf(HasSubstr("of 1.0 GiB"), HasSubstr("\n  * ")));
    expect_refused({"explain", "--spec", spec, "--device", "sm_90a", "--workspace-limit", "1M"}, 2, "workspace_limit_bytes");
    for (const char* device : {"h100", "a100", "znver4"}) {
        for (const char* dtype : {"bf16", "fp32"}) {
            const std::string layer = std::string("D=512,V=32000,dtype=") + dtype;
            const auto with = [&](const std::string& limit) {
                return run_flce({"explain", "--spec", layer, "--device", device, "--workspace-limit", limit, "--num-tokens", "1000"});
            };
            const ProcessResult small = with("1K");
            EXPECT_EQ(small.exit_code, 2);
            EXPECT_THAT(small.err, AllOf(HasSubstr("--workspace-limit"), HasSubstr("the smallest that works is ")));
            EXPECT_LT(small.err.size(), 250U) << "one sentence: " << small.err;
            const std::int64_t smallest = std::stoll(small.err.substr(small.err.find("works is ") + 9));
            EXPECT_EQ(with(std::to_string(smallest)).exit_code, 0) << device << ' ' << dtype;
            EXPECT_EQ(with(std::to_string(smallest - 1)).exit_code, 2) << device << ' ' << dtype;
        }
    }
    expect_refused({"explain", "--spec", spec, "--device", "sm_90a", "--workspace-limit", "100M", "--retain", "all"}, 2,
                   "--workspace-limit");
}

TEST(Flce_WorkspaceLimit, HoldsForWhatBenchAndCheckUse) {
    const std::vector<std::string> layer{"--spec", "D=64,V=5000,dtype=fp32,grad_weight_mode=accumulate", "--device", "cpu", "-N", "64"};
    const auto with = [&](std::vector<std::string> command, const std::vector<std::string>& more) {
        command.insert(command.end(), layer.begin(), layer.end());
        command.insert(command.end(), more.begin(), more.end());
        return command;
    };
    const auto json = expect_json(with({"bench"}, {"--rounds", "1", "--workspace-limit", "2M", "--json"}));
    EXPECT_GT(json["retained_bytes"].get<std::int64_t>(), 0);
    EXPECT_LE(json["retained_bytes"].get<std::int64_t>() + json["workspace_bytes"].get<std::int64_t>(), 2 << 20);
    EXPECT_EQ(expect_json(with({"bench"}, {"--rounds", "1", "--json"}))["retained_bytes"], 0);
    EXPECT_EQ(run_flce(with({"check"}, {"--workspace-limit", "2M"})).exit_code, 0);
    expect_refused(with({"check"}, {"--workspace-limit", "1K"}), 2, "the workspace limit of 1024 bytes");
    expect_refused(with({"check"}, {"--workspace-limit", "none"}), 2, "--workspace-limit");
    expect_refused(with({"bench"}, {"--workspace-limit", "1200K", "--retain", "all"}), 2, "auto takes what it leaves");
}

TEST(FlceExplain_ItsOwnPlan, CanBeReplayed) {
    const auto json = expect_json({"explain", "--spec", kSmall, "--device", "cpu", "--json"});
    const std::string plan = json["plan"];
    EXPECT_EQ(expect_json({"explain", "--spec", kSmall, "--device", "cpu", "--plan", plan, "--json"})["plan"], plan);
    EXPECT_EQ(expect_json({"check", "--spec", kSmall, "--device", "cpu", "--plan", plan, "--json"})["plan"], plan);
}

TEST(FlceCheck_EveryOption, PassesAndReportsEachOutput) {
    const auto json = expect_json(
        {"check", "--device", "cpu", "--json", "--spec",
         "D=64,V=301,padded_vocab_size=320,dtype=fp32,bias,logit_scale=0.7,softcap=10,label_smoothing=0.1,z_loss=0.001,class_weight,"
         "outputs=loss+lse+logprobs+entropy"});
    expect_keys(json, {"passed", "outputs", "device", "plan"});
    EXPECT_EQ(json["passed"], true);
    for (const char* output :
         {"loss", "z_loss", "lse", "logprobs", "entropy", "grad_hidden", "grad_weight", "grad_bias", "grad_weight_padding"}) {
        ASSERT_TRUE(json["outputs"].contains(output)) << output;
        EXPECT_LE(json["outputs"][output]["error"].get<double>(), json["outputs"][output]["bound"].get<double>()) << output;
    }
    EXPECT_GT(json["outputs"]["grad_hidden"]["error"].get<double>(), 0) << "an error of exactly 0 means that nothing was compared";
}

// A shard is the first of its layer, and the others have found nothing.
TEST(Flce_Shard, BenchRunsIt_PaddingIsRefused) {
    const std::string spec = "D=64,V=301,whole_vocab_size=900,dtype=fp32";
    const auto json = expect_json({"bench", "--device", "cpu", "--spec", spec, "-N", "64", "--rounds", "1", "--json"});
    EXPECT_GT(json["forward_backward_ms"].get<double>(), 0);
    expect_refused({"check", "--device", "cpu", "--spec", spec + ",padded_vocab_size=320"}, 2, "leave padded_vocab_size out");
}

TEST(FlceCheck_Variants, Pass) {
    const std::vector<std::vector<std::string>> cases{
        {"D=64,V=301,dtype=bf16"},
        {"D=64,V=301,dtype=fp16"},
        {"D=64,V=301,dtype=fp32,layout=hidden_major"},
        {"D=64,V=301,dtype=bf16,tied,grad_weight_dtype=fp32"},
        {"D=64,V=301,dtype=fp32,z_loss=0.001,outputs=lse+entropy"},
        {"D=64,V=301,dtype=bf16,outputs=logprobs", "--reduction", "none"},
        {"D=64,V=301,dtype=bf16,fp8=e4m3,fp8_dlogits=e4m3,bias,softcap=20,temperature,class_offset,tied,outputs=loss+lse+logprobs"},
        {"D=64,V=301,padded_vocab_size=320,dtype=fp32,fp8,class_weight,z_loss=0.001,logit_scale=-0.5", "--reduction", "none"},
        {"D=64,V=301,dtype=fp32,fp8=e4m3,label_smoothing=0.2,class_weight,bias,temperature,logit_scale=-0.5"},
        {"D=8,V=8,padded_vocab_size=16,dtype=fp32,layout=hidden_major,fp8", "--ignored", "0", "--seed", "60", "--num-tokens", "20"},
        {"D=64,V=301,dtype=bf16,fp8,fp8_hidden_scale=0.03,fp8_weight_scale=0.004,bias,outputs=loss+lse"},
        {"D=64,V=301,whole_vocab_size=900,dtype=bf16,grad_hidden_dtype=fp32,bias,label_smoothing=0.1,outputs=loss+lse+entropy+top1"},
        {"D=64,V=301,whole_vocab_size=900,dtype=fp32,class_weight,label_smoothing=0.1,layout=hidden_major"},
        {"D=64,V=301,whole_vocab_size=900,dtype=fp32,teacher_top_k=3,hard_weight=0.5,z_loss=0.001", "--reduction", "none"},
        {kSmall, "--reduction", "none"},
        {kSmall, "--reduction", "sum", "--ignored", "0"},
        {kSmall, "--ignored", "1"},
        {kSmall, "--num-tokens", "0"},
        {kSmall, "--num-tokens", "1", "--seed", "5"},
    };
    for (const auto& arguments : cases) {
        std::vector<std::string> command{"check", "--device", "cpu", "--json", "--spec"};
        command.insert(command.end(), arguments.begin(), arguments.end());
        EXPECT_EQ(expect_json(command)["passed"], true) << testing::PrintToString(arguments);
    }
}

TEST(FlceCheck_Fp8, HasBothErrors) {
    const auto json = expect_json({"check", "--device", "cpu", "--json", "--spec", "D=64,V=301,dtype=bf16,fp8,bias"});
    EXPECT_EQ(json["passed"], true);
    for (const char* output : {"loss", "lse", "grad_hidden", "grad_weight", "grad_bias"}) {
        EXPECT_GT(json["outputs"][output]["error_to_exact"].get<double>(), json["outputs"][output]["error"].get<double>()) << output;
    }
    EXPECT_GT(json["outputs"]["grad_hidden"]["error_to_exact"].get<double>(), 2e-3);
    EXPECT_LT(json["outputs"]["grad_hidden"]["error_to_exact"].get<double>(), 5e-2);
    EXPECT_FALSE(expect_json({"check", "--device", "cpu", "--json", "--spec", "D=64,V=301"})["outputs"]["lse"].contains("error_to_exact"));
}

TEST(FlceCheck_LargeLayer, SamplesItsReferenceAndSaysSo) {
    const auto json = expect_json({"check", "--device", "cpu", "--json", "--spec", "D=512,V=50257,dtype=fp32", "--num-tokens", "256"});
    EXPECT_THAT(json["reference"].get<std::string>(), StartsWith("sampled"));
    EXPECT_EQ(json["passed"], true);
}

// A mean over many tokens makes fp16 gradients subnormal; a framework's are as far from fp64.
TEST(FlceCheck_SubnormalGradients, AreHeldAgainstWhatFp16CanHold) {
    const auto json = expect_json({"check", "--device", "cpu", "--json", "--spec", "D=64,V=200,dtype=fp16", "--num-tokens", "20000"});
    EXPECT_TRUE(json["passed"].get<bool>());
    EXPECT_GT(json["outputs"]["grad_hidden"]["bound"].get<double>(), 5e-4);
    EXPECT_LE(json["outputs"]["grad_hidden"]["bound"].get<double>(), 5e-3);
}

TEST(FlceCheck_Text, PrintsATable) {
    const ProcessResult result = run_flce({"check", "--device", "cpu", "--spec", kSmall});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, AllOf(HasSubstr("grad_weight"), HasSubstr("bound"), HasSubstr("passed")));
}

TEST(FlceBench_Json, HasEveryKey) {
    const auto json =
        expect_json({"bench", "--device", "cpu", "--spec", "D=64,V=1000,dtype=fp32", "--num-tokens", "64", "--rounds", "5", "--json"});
    expect_keys(json, {"device", "plan", "forward_ms", "forward_backward_ms", "floor_forward_ms", "floor_forward_backward_ms",
                       "workspace_bytes", "forward_ms_min", "forward_ms_spread"});
    EXPECT_GT(json["forward_ms"].get<double>(), 0);
    EXPECT_GT(json["forward_backward_ms"].get<double>(), 0);
    EXPECT_LE(json["forward_ms_min"].get<double>(), json["forward_ms"].get<double>());
    EXPECT_EQ(json["floor_forward_ms"].is_null(), json["floor"].is_null());
    EXPECT_EQ(json["rounds"], 5);
    for (const char* frozen : {"weight", "hidden"}) {
        EXPECT_EQ(expect_json({"bench", "--device", "cpu", "--spec", kSmall, "--rounds", "1", "--frozen", frozen, "--json"})["frozen"],
                  frozen);
    }
    expect_refused({"bench", "--spec", kSmall, "--frozen", "lava"}, 2, "--frozen");
    EXPECT_EQ(run_flce({"bench", "--device", "cpu", "--spec", kSmall, "--rounds", "1", "--no-floor"}).exit_code, 0);
}

TEST(FlceInfo_Json, HasEveryKey) {
    const auto json = expect_json({"info", "--json"});
    EXPECT_EQ(json.at("kernel_versions").at("cuda").get<std::string>().size(), 16U);
    EXPECT_NE(json.at("kernel_versions").at("cuda"), json.at("kernel_versions").at("cpu"));
    expect_keys(json, {"version", "devices", "cuda_driver", "nvrtc", "llvm", "cache", "environment"});
    EXPECT_EQ(json["devices"].back()["device"], "cpu");
    EXPECT_GE(json["devices"].back()["cores"].get<int>(), 1);
    EXPECT_EQ(json["environment"]["FLCE_CACHE_DIR"]["value"], shared_cache().string());
    EXPECT_EQ(run_flce({"info"}).exit_code, 0);
}

TEST(FlceInfo_Check, WithoutAGpu_SaysWhyAndIsNoSuccess) {
    const std::map<std::string, std::string> none{{"FLCE_LIBCUDA", "/nonexistent/libcuda.so.1"}};
    const ProcessResult text = run_flce({"info", "--check"}, {.environment = none});
    EXPECT_EQ(text.exit_code, 3) << text.err;
    EXPECT_THAT(text.out, HasSubstr("/nonexistent/libcuda.so.1"));
    const ProcessResult json = run_flce({"info", "--check", "--json", "--spec", "D=64,V=500,dtype=fp16"}, {.environment = none});
    EXPECT_EQ(json.exit_code, 3);
    EXPECT_EQ(json.json().at("spec"), "D=64,V=500,dtype=fp16");
    EXPECT_EQ(json.json().at("checks").size(), 0U);
    EXPECT_THAT(json.json().at("why_no_gpu").get<std::string>(), HasSubstr("/nonexistent"));
    EXPECT_EQ(run_flce({"info", "--spec", "D=64,V=500"}).exit_code, 2) << "a layer without a comparison";
}

TEST(FlceInfo_WithoutNvrtc, SaysWhy) {
    const ProcessResult result = run_flce({"info", "--json"}, {.environment = {{"FLCE_NVRTC", "/nonexistent/libnvrtc.so"}}});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.json()["nvrtc"]["found"], false);
    EXPECT_THAT(result.json()["nvrtc"]["why"].get<std::string>(), HasSubstr("/nonexistent"));
}

TEST(Flce_NumbersThatAreNone, UsageErrorNamesTheOption) {
    const std::vector<std::string> layer{"--spec", kSmall, "--device", "cpu"};
    for (const auto& [command, option] :
         {std::pair{"check", "--ignored"}, {"bench", "--ignored"}, {"bench", "--seconds"}, {"tune", "--budget-s"}, {"demo", "--lr"}}) {
        for (const char* value : {"nan", "inf", "-nan"}) {
            std::vector<std::string> arguments{command, std::string(option) + "=" + value};
            if (std::string_view(command) != "demo") arguments.insert(arguments.end(), layer.begin(), layer.end());
            expect_refused(arguments, 2, option);
        }
    }
}

TEST(Flce_TooManyTokens, NamesTheBufferItsBytesAndWhatToChange) {
    // More than any machine has: nothing is asked for.
    for (const char* command : {"check", "bench"}) {
        expect_refused(
            {command, "--spec", "D=4096,V=50,dtype=fp32", "--device", "cpu", "-N", "1099511627776"}, 3,
            "out of memory on cpu: hidden [1099511627776, 4096] takes 16384.0 TiB (18014398509481984 bytes); fewer tokens need less");
    }
    if (*FLCE_SANITIZE != '\0') GTEST_SKIP() << "sanitizers end a process that asks for so much";
    // More than a process can address: the system is asked and refuses.
    expect_refused({"check", "--spec", "D=64,V=50,dtype=fp32", "--device", "cpu", "-N", "1099511627776"}, 3,
                   "hidden [1099511627776, 64] takes 256.0 TiB (281474976710656 bytes)");
}

TEST(Flce_Seed, UsageErrorWhereItIsNoUnsignedNumber) {
    for (const char* seed : {"-1", "-9223372036854775808", "18446744073709551616", "1.5", "nan", ""}) {
        const std::string option = std::string("--seed=") + seed;
        expect_refused({"check", "--spec", kSmall, "--device", "cpu", option}, 2, "--seed");
        expect_refused({"demo", option}, 2, "--seed");
    }
    const auto largest = expect_json({"check", "--spec", kSmall, "--device", "cpu", "--seed", "18446744073709551615", "--json"});
    EXPECT_EQ(largest.at("seed"), 18446744073709551615U);
}

TEST(FlceBench_Text, OperationsASecondFollowFromTheTime) {
    const ProcessResult result =
        run_flce({"bench", "--spec", "D=256,V=4000,dtype=fp32", "--device", "cpu", "-N", "256", "--rounds", "1", "--no-floor"});
    double median = 0;
    double rate = 0;
    const std::string text = result.out;
    const auto row = text.find("\n  forward ");
    ASSERT_NE(row, std::string::npos) << text;
    ASSERT_EQ(std::sscanf(text.c_str() + row, " forward %lf ms %*f ms %*f %% %lf", &median, &rate), 2) << text;
    EXPECT_NEAR(rate, 2.0 * 256 * 4000 * 256 / (median * 1e-3) / 1e12, 0.01 * rate);
}

TEST(FlcePrewarm_ForThisCpu, CompilesOnceThenHits) {
    const TemporaryFolder cache;
    const std::vector<std::string> command{
        "prewarm", "--spec", kSmall, "--spec", "D=8,V=9,dtype=fp32", "--device", "cpu", "--cache-dir", cache.path().string(), "--json"};
    const auto first = expect_json(command);
    expect_keys(first, {"compiled", "hits", "failed", "pack"});
    EXPECT_GE(first["compiled"].get<int>(), 1);
    EXPECT_EQ(first["failed"], 0);
    const auto second = expect_json(command);
    EXPECT_EQ(second["compiled"], 0);
    EXPECT_GE(second["hits"].get<int>(), 1);
}

TEST(FlcePrewarm_HfConfig, IsRead) {
    const TemporaryFolder folder;
    std::ofstream(folder / "config.json")
        << R"({"hidden_size": 16, "vocab_size": 50, "torch_dtype": "float32", "tie_word_embeddings": true})";
    const auto json = expect_json({"prewarm", "--hf-config", folder / "config.json", "--device", "cpu", "--json"});
    EXPECT_EQ(json["items"][0]["spec"], "D=16,V=50,dtype=fp32,tied");
    // A plain autograd step asks for this spec: a run of it is ready too.
    EXPECT_EQ(json["items"][1]["spec"], "D=16,V=50,dtype=fp32");
    expect_refused({"prewarm", "--hf-config", folder / "absent.json", "--device", "cpu"}, 2, "absent.json");
    std::ofstream(folder / "bad.json") << R"({"hidden_size": 16})";
    expect_refused({"prewarm", "--hf-config", folder / "bad.json", "--device", "cpu"}, 2, "vocab_size");
}

TEST(FlcePrewarm_WithoutNvrtc, FailsWithEnvironment) {
    const ProcessResult result = run_flce({"prewarm", "--spec", kSmall, "--device", "sm_80", "--json"},
                                          {.environment = {{"FLCE_NVRTC", "/nonexistent/libnvrtc.so"}}});
    EXPECT_EQ(result.exit_code, 3) << result.err;
    EXPECT_EQ(result.json()["failed"], 1);
    EXPECT_THAT(result.err, HasSubstr("flce: error: "));
}

TEST(Flce_Interrupted, EndsCleanly) {
    const ProcessResult result =
        run_flce({"bench", "--device", "cpu", "--spec", "D=64,V=1000,dtype=fp32", "--num-tokens", "64", "--rounds", "100000"},
                 {.interrupt_after_ms = 3000});
    EXPECT_EQ(result.exit_code, 130) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, HasSubstr("flce: error: interrupted"));
}

}  // namespace
}  // namespace flce::test
