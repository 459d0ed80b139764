// tools/gpu_tests.py: test binaries' cases, many processes at once, within a time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/cli/process.hpp"

namespace flce::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

// A test binary with these cases of Gpu/Suite: good, skipped, bad, dies, leaks, sleeps.
constexpr const char* kBinary = R"bash(#!/bin/bash
if [[ $1 == --gtest_list_tests ]]; then
    printf 'Gpu/Suite.\n'
    for name in $CASES; do printf '  %s/1  # GetParam() = (1)\n' "$name"; done
    exit 0
fi
status=0
IFS=:
for case in ${1#--gtest_filter=}; do
    echo "[ RUN      ] $case"
    case $case in
        *good*) echo "[       OK ] $case (3 ms)" ;;
        *skipped*) echo "[  SKIPPED ] $case (0 ms)" ;;
        *bad*) echo 'off by one' && echo "[  FAILED  ] $case, where GetParam() = (1) (3 ms)" && status=1 ;;
        *dies*) kill -9 $$ ;;
        *leaks*) echo "[       OK ] $case (3 ms)" && status=23 ;;
        *sleeps*) exec sleep 60 ;;
    esac
done
exit $status
)bash";

class ManyCasesAtOnce : public testing::Test {
protected:
    void SetUp() override {
        if (!fs::exists(script_)) GTEST_SKIP() << script_ << " is not here";
        if (run_flce({"python3", "--version"}, {.program = "/usr/bin/env"}).exit_code != 0) GTEST_SKIP() << "no python3";
        std::ofstream(fs::path(folder_ / "test_any")) << kBinary;
        fs::permissions(folder_ / "test_any", fs::perms::owner_all);
    }
    [[nodiscard]] ProcessResult run(const std::string& cases, const std::vector<std::string>& more = {}) const {
        std::vector<std::string> arguments{"CASES=" + cases, "python3", script_, folder_ / "test_any", "--out", folder_ / "run.json"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        return run_flce(arguments, {.program = "/usr/bin/env"});
    }
    [[nodiscard]] std::string text(const char* name) const {
        return {std::istreambuf_iterator<char>(std::ifstream(fs::path(folder_ / name)).rdbuf()), {}};
    }

    fs::path script_ = fs::path(FLCE_SOURCE_DIR) / "tools/gpu_tests.py";
    TemporaryFolder folder_;
};

TEST_F(ManyCasesAtOnce, PassedAndSkipped_AreCountedAndPassedOnesLeftOutAfterwards) {
    const ProcessResult result = run("good skipped");
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("| test_any:Gpu/Suite | 1 | 0 | 1 | 0 | 0 |"));
    EXPECT_THAT(result.out, HasSubstr("every case was begun"));
    EXPECT_FALSE(fs::exists(folder_ / "run.failures"));

    fs::rename(folder_ / "run.json", folder_ / "first.json");
    const ProcessResult rest = run("good skipped goods", {"--after", folder_ / "first.json"});
    EXPECT_EQ(rest.exit_code, 0) << rest.err;
    EXPECT_THAT(rest.out, HasSubstr("| test_any:Gpu/Suite | 1 | 0 | 1 | 0 | 0 |"));  // a skipped test may run on another GPU
    EXPECT_THAT(text("run.json"), HasSubstr("goods"));
    const ProcessResult nothing = run("good", {"--after", folder_ / "first.json"});
    EXPECT_EQ(nothing.exit_code, 0) << nothing.err;
    EXPECT_THAT(nothing.out, HasSubstr("no case is left"));
}

TEST_F(ManyCasesAtOnce, FailedAndDied_AreToldApartWithWhatTheyPrinted) {
    const ProcessResult result = run("good bad dies", {"--chunk", "1"});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.out, HasSubstr("| test_any:Gpu/Suite | 1 | 1 | 0 | 1 | 0 |"));
    EXPECT_THAT(result.out, HasSubstr("FAILED: test_any:Gpu/Suite.bad/1"));
    EXPECT_THAT(result.out, HasSubstr("died: test_any:Gpu/Suite.dies/1"));
    EXPECT_THAT(text("run.failures"), HasSubstr("off by one"));
    EXPECT_THAT(text("run.failures"), Not(HasSubstr("good/1")));
}

TEST_F(ManyCasesAtOnce, PassedInAProcessThatEndsWithAnError_IsNoSuccess) {
    const ProcessResult result = run("good leaks", {"--chunk", "1"});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.out, HasSubstr("test_any ended with 23: Gpu/Suite.leaks/1"));
    EXPECT_THAT(text("run.failures"), HasSubstr("exit code 23"));
}

TEST_F(ManyCasesAtOnce, TimeIsOver_SaysWhatWasCutOffAndNotBegun) {
    const ProcessResult result =
        run("good sleeps goods", {"--chunk", "1", "--workers", "1", "--seconds", "1.5", "--first", "sleeps", "--gpus", "2"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("| test_any:Gpu/Suite | 0 | 0 | 0 | 0 | 1 |"));
    EXPECT_THAT(result.out, HasSubstr("2 cases were not begun"));
}

TEST_F(ManyCasesAtOnce, NoSuchCaseBinaryOrNumber_IsAnErrorWithoutATraceback) {
    for (const std::vector<std::string>& wrong : std::vector<std::vector<std::string>>{{folder_ / "absent"},
                                                                                       {"--after", folder_ / "absent"},
                                                                                       {"--workers", "0"},
                                                                                       {"--gpus", "0"},
                                                                                       {"--out", folder_ / "no/run.json"}}) {
        const ProcessResult result = run("good", wrong);
        EXPECT_NE(result.exit_code, 0) << wrong.front();
        EXPECT_THAT(result.err, Not(HasSubstr("Traceback"))) << wrong.front();
    }
    const ProcessResult result = run("good", {"--filter", "*"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(run("").exit_code, 1);
    EXPECT_THAT(run("").err, HasSubstr("no case is named *Gpu*"));
}

}  // namespace
}  // namespace flce::test
