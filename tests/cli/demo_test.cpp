// flce demo on a small text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string_view>

#include "tests/cli/process.hpp"

namespace flce::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Text with something to learn: which word follows which.
std::string small_text() {
    const std::vector<std::string> nouns{"token", "logit", "gradient", "kernel", "vocabulary", "row"};
    std::string text;
    unsigned state = 1;
    for (int i = 0; i < 4000; ++i) {
        state = state * 1664525U + 1013904223U;
        const std::string& noun = nouns[(state >> 16) % nouns.size()];
        text += "the " + noun + " of the " + nouns[((state >> 20) + 1) % nouns.size()] + " has a " + noun + ".\n";
    }
    return text;
}

std::vector<std::string> demo_command(const TemporaryFolder& folder, const std::vector<std::string>& more = {}, const char* steps = "30") {
    std::ofstream(folder / "text.txt") << small_text();
    std::vector<std::string> command{"demo",  "--device", "cpu",           "--text", folder / "text.txt",  "--steps",     steps,
                                     "-N",    "128",      "--hidden-size", "32",     "--no-architectures", "--cache-dir", folder / "cache",
                                     "--json"};
    command.insert(command.end(), more.begin(), more.end());
    return command;
}

TEST(FlceDemo_TwoRuns, LearnAndTheSecondCompilesNothing) {
    const TemporaryFolder folder;
    const ProcessResult first = run_flce(demo_command(folder));
    ASSERT_EQ(first.exit_code, 0) << first.err;
    const auto json = first.json();
    for (const char* key : {"device", "steps", "first_loss", "last_loss", "held_out_loss", "gradient_error", "kernels_compiled",
                            "get_kernel_cold_s", "get_kernel_disk_s", "get_kernel_hot_s"}) {
        EXPECT_TRUE(json.contains(key)) << key;
    }
    EXPECT_EQ(json["steps"], 30);
    EXPECT_LT(json["held_out_loss"].get<double>(), 0.6 * json["first_held_out_loss"].get<double>());
    EXPECT_LT(json["last_loss"].get<double>(), 0.6 * json["first_loss"].get<double>());
    EXPECT_LT(json["gradient_error"].get<double>(), 2e-6);
    EXPECT_GT(json["gradient_error"].get<double>(), 0);
    EXPECT_GE(json["kernels_compiled"].get<int>(), 1);
    EXPECT_LT(json["get_kernel_hot_s"].get<double>(), json["get_kernel_disk_s"].get<double>());
    EXPECT_LT(json["get_kernel_disk_s"].get<double>(), json["get_kernel_cold_s"].get<double>());
    EXPECT_THAT(first.err, HasSubstr("training: 30/30"));

    const ProcessResult second = run_flce(demo_command(folder));
    ASSERT_EQ(second.exit_code, 0) << second.err;
    EXPECT_EQ(second.json()["kernels_compiled"], 0);
    EXPECT_GT(second.json()["get_kernel_cold_s"].get<double>(), 0);
    for (const char* key : {"first_loss", "last_loss", "held_out_loss", "gradient_error"}) EXPECT_EQ(second.json()[key], json[key]) << key;
}

TEST(FlceDemo_OtherDtypesAndSgd, LearnToo) {
    for (const std::vector<std::string>& more :
         {std::vector<std::string>{"--dtype", "bf16"}, {"--dtype", "fp16"}, {"--optimizer", "sgd"}}) {
        const TemporaryFolder folder;
        const ProcessResult result = run_flce(demo_command(folder, more));
        ASSERT_EQ(result.exit_code, 0) << more.back() << result.err;
        EXPECT_LT(result.json()["held_out_loss"].get<double>(), 0.8 * result.json()["first_held_out_loss"].get<double>()) << more.back();
    }
}

TEST(FlceDemo_LossDiverges, StopsAndSaysWhatToLower) {
    for (const char* optimizer : {"adamw", "sgd"}) {
        const TemporaryFolder folder;
        const ProcessResult result = run_flce(demo_command(folder, {"--lr", "1e38", "--optimizer", optimizer}));
        EXPECT_EQ(result.exit_code, 1) << optimizer << result.err;
        EXPECT_EQ(result.json()["error"]["exit_code"], 1) << optimizer << result.out;
        EXPECT_THAT(result.err, AllOf(HasSubstr("training diverged: the loss of"), HasSubstr("of 30 steps; lower --lr (it is 1e+38)")));
        EXPECT_THAT(result.err, Not(HasSubstr("training: 30/30"))) << optimizer;
    }
}

// Tokens that are all alike: sums of equal terms, and after some steps probabilities so near 1 that little of their gradient is left in
// fp32.
TEST(FlceDemo_OneWordOverAndOver, IsHeldAgainstWhatItsArithmeticCanGive) {
    const TemporaryFolder folder;
    std::string text;
    for (int i = 0; i < 20000; ++i) text += "the ";
    std::ofstream(folder / "word.txt") << text;
    for (const char* steps : {"6", "9", "18"}) {
        const ProcessResult result = run_flce({"demo", "--device", "cpu", "--text", folder / "word.txt", "--steps", steps,
                                               "--no-architectures", "--cache-dir", folder / "cache", "--json"});
        ASSERT_EQ(result.exit_code, 0) << steps << " steps" << result.err;
        EXPECT_LT(result.json()["gradient_error"].get<double>(), std::string_view(steps) == "6" ? 1e-5 : 0.1) << steps << " steps";
    }
}

TEST(FlceDemo_TextWithoutStructure, IsHeldAgainstWhatItsArithmeticCanGive) {
    // Calibrated models of a few words by chance: tokens' gradients cancel, and the errors of lse that they have in common do not.
    const TemporaryFolder folder;
    std::string coin;
    std::string letters;
    unsigned state = 3;
    for (int i = 0; i < 20000; ++i) {
        state = state * 1664525U + 1013904223U;
        coin += state >> 31 != 0 ? "heads " : "tails ";
        letters += std::string(1, "ACGT"[state >> 30]) + ' ';
    }
    for (const auto& [name, text] : {std::pair{"coin", coin}, {"letters", letters}}) {
        std::ofstream(folder / name) << text;
        const ProcessResult result = run_flce({"demo", "--device", "cpu", "--text", folder / name, "--steps", "30", "--no-architectures",
                                               "--cache-dir", folder / "cache", "--json"});
        ASSERT_EQ(result.exit_code, 0) << name << result.err;
        EXPECT_LT(result.json()["gradient_error"].get<double>(), 1e-4) << name;
    }
}

TEST(FlceDemo_TemporaryFolderMissing, ExitsWith3AndSaysWhatToSet) {
    const TemporaryFolder folder;
    const ProcessResult result = run_flce(demo_command(folder, {}, "2"), {.environment = {{"TMPDIR", "/nonexistent"}}});
    EXPECT_EQ(result.exit_code, 3);
    EXPECT_THAT(result.err, HasSubstr("set TMPDIR"));
}

TEST(FlceDemo_BadText, ExitsWith2) {
    const TemporaryFolder folder;
    std::ofstream(folder / "short.txt") << "too short";
    EXPECT_EQ(run_flce({"demo", "--text", folder / "short.txt"}).exit_code, 2);
    EXPECT_EQ(run_flce({"demo", "--text", folder / "missing.txt"}).exit_code, 2);
    EXPECT_EQ(run_flce({"demo", "--text", folder.path().string()}).exit_code, 2) << "the folder holds nothing long enough";
}

TEST(FlceDemo_WithoutNvrtc, SaysWhyNothingIsCompiledForGpus) {
    const TemporaryFolder folder;
    auto command = demo_command(folder);
    command.erase(std::find(command.begin(), command.end(), "--no-architectures"));
    const ProcessResult result = run_flce(command, {.environment = {{"FLCE_NVRTC", "/nonexistent/libnvrtc.so"}}});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const auto architectures = result.json()["architectures"];
    ASSERT_EQ(architectures.size(), 4U);
    for (const auto& architecture : architectures) EXPECT_THAT(architecture["error"].get<std::string>(), HasSubstr("/nonexistent"));
}

TEST(FlceDemo_Interrupted, EndsCleanly) {
    const TemporaryFolder folder;
    const ProcessResult result = run_flce(demo_command(folder, {}, "1000000"), {.interrupt_after_ms = 4000});
    EXPECT_EQ(result.exit_code, 130) << result.err;
    EXPECT_EQ(result.json()["error"]["message"], "interrupted") << result.out;
}

}  // namespace
}  // namespace flce::test
