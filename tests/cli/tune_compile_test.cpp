// Kernels that flce tune finds compiled, and the scripts that measure with it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "records/record_store.hpp"
#include "tests/cli/process.hpp"
#include "tests/support/level.hpp"

namespace flce::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class FlceTuneCompiled : public testing::Test {
protected:
    [[nodiscard]] ProcessResult run(std::vector<std::string> arguments, const std::string& cache) const {
        arguments.insert(arguments.begin(), "tune");
        arguments.insert(arguments.end(), {"--device", "cpu", "--json"});
        return run_flce(arguments, {.environment = environment(cache)});
    }
    [[nodiscard]] std::map<std::string, std::string> environment(const std::string& cache) const {
        return {{"FLCE_RECORDS_DIR", folder_ / "records"}, {"FLCE_NUM_THREADS", "1"}, {"FLCE_CACHE_DIR", folder_ / cache}};
    }
    TemporaryFolder folder_;
};

TEST_F(FlceTuneCompiled, AfterCompileOnly_TuningCompilesNothing) {
    for (const std::string spec : {"D=32,V=300,dtype=fp32", "D=32,V=300,dtype=bf16"}) {
        const std::vector<std::string> tuning{"--spec", spec, "--num-tokens", "64", "--budget-s", "30", "--fresh"};
        const ProcessResult before = run(tuning, "cold");
        ASSERT_EQ(before.exit_code, 0) << before.err;
        EXPECT_GT(before.json().at("compiled"), 1);
        const ProcessResult compiled = run({"--compile-only", "--spec", spec}, "warm");
        ASSERT_EQ(compiled.exit_code, 0) << compiled.err;
        EXPECT_GT(compiled.json().at("compiled"), 1);
        EXPECT_THAT(compiled.err, HasSubstr("compile: "));  // progress
        const ProcessResult after = run(tuning, "warm");
        ASSERT_EQ(after.exit_code, 0) << after.err;
        EXPECT_EQ(after.json().at("compiled"), 0) << spec;
        EXPECT_TRUE(after.json().at("complete"));
    }
}

TEST_F(FlceTuneCompiled, TuneModels_MeasuresWhatIsCompiled) {
    FLCE_FROM_LEVEL(test::Level::full);
    const std::filesystem::path script = std::filesystem::path(FLCE_SOURCE_DIR) / "tools/tune_models.sh";
    if (!std::filesystem::exists(script)) GTEST_SKIP() << script << " is not here";
    auto variables = environment("script");
    variables.insert({{"FLCE", flce_program().string()},
                      {"DEVICE", "cpu"},
                      {"TOKENS", "64"},
                      {"BUDGET_S", "20"},
                      {"MODELS", "first D=32,V=300,dtype=fp32\nsecond D=40,V=300,dtype=bf16"}});
    const ProcessResult result = run_flce({"test", folder_ / "out", "abc123"}, {.environment = variables, .program = script});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, ContainsRegex("first-64: compiled at .*compiled or found, 0 failed"));
    EXPECT_THAT(result.out, HasSubstr(" measured now, 0 compiled"));
    EXPECT_THAT(result.out, testing::Not(ContainsRegex("measured now, [1-9][0-9]* compiled")));
    std::string why;
    for (const char* name : {"test-first-64.json", "test-second-64.json"}) {
        const auto record = read_record_file(std::filesystem::path(folder_ / "out") / name, why);
        ASSERT_TRUE(record) << name << why;
        EXPECT_EQ(record->runs.begin()->second.commit, "abc123");
    }
}

TEST_F(FlceTuneCompiled, ExhaustiveTune_MeasuresEveryCombinationBesideTheTunersChoice) {
    FLCE_FROM_LEVEL(test::Level::full);
    const std::filesystem::path script = std::filesystem::path(FLCE_SOURCE_DIR) / "benchmarks/exhaustive_tune.py";
    const ProcessOptions with_python{.environment = environment("exhaustive"), .program = "/usr/bin/env"};
    if (!std::filesystem::exists(script)) GTEST_SKIP() << script << " is not here";
    if (run_flce({"python3", "--version"}, with_python).exit_code != 0) GTEST_SKIP() << "no python3";
    const std::string out = folder_ / "exhaustive.json";
    const ProcessResult result =
        run_flce({"python3", script, "--flce", flce_program(), "--device", "cpu", "--shape", "64xD=32,V=300,dtype=fp32", "--coordinates",
                  "block_m,block_k", "--tune-budget-s", "30", "--limit-s", "120", "--commit", "abc123", "--out", out},
                 with_python);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("tuned ms"));
    const auto json = nlohmann::json::parse(std::ifstream(out));
    EXPECT_EQ(json.at("commit"), "abc123");
    const auto& row = json.at("rows").at(0);
    EXPECT_TRUE(row.at("complete"));
    EXPECT_GT(row.at("combinations"), 10);
    EXPECT_GE(row.at("timed"), row.at("combinations"));  // and the cost model's first choices
    EXPECT_EQ(row.at("timed"), row.at("candidates"));
    EXPECT_GT(row.at("quickest_ms"), 0);
    EXPECT_GE(row.at("tuned_to_quickest"), 1.0);
    EXPECT_GT(row.at("cost_model_ms"), 0);
}

}  // namespace
}  // namespace flce::test
