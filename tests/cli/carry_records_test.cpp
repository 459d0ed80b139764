// tools/carry_records.py: records of kernels that have another version and the same code.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "records/kernel_version.hpp"
#include "records/record_store.hpp"
#include "tests/cli/process.hpp"
#include "tests/support/gpu.hpp"
#include "tests/support/level.hpp"

namespace flce::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class CarryRecords : public testing::Test {
protected:
    void SetUp() override {
        if (!fs::exists(script_)) GTEST_SKIP() << script_ << " is not here";
        if (run_flce({"python3", "--version"}, {.program = "/usr/bin/env"}).exit_code != 0) GTEST_SKIP() << "no python3";
        // Measured, it says, with kernels of another version.
        const Spec spec = parse_spec("D=64,V=1000,dtype=bf16").normalized();
        const Device device = describe_device("h100");
        Record record{.key = record_key(spec, device, {.num_tokens = 4096}, kRetainedAutomatically, 1)};
        record.key.kernel_version = "0123456789abcdef";
        record.runs["run"] = {.date = "2026-01-01T00:00:00Z", .version = "0.1.0"};
        record.candidates[choose_plan(spec, device).text()].times_ms["run"] = {1.0};
        write_record_file(file(), record);
    }
    [[nodiscard]] fs::path file() const { return fs::path(folder_ / "record.json"); }
    [[nodiscard]] std::string version() const {
        std::string why;
        const auto record = read_record_file(file(), why);
        EXPECT_TRUE(record) << why;
        return record ? record->key.kernel_version : "";
    }
    [[nodiscard]] ProcessResult carry(const fs::path& measured, const std::vector<std::string>& options = {}) const {
        std::vector<std::string> arguments = {"python3", script_,        "--measured", measured,
                                              "--today", flce_program(), "--work",     folder_ / "work"};
        arguments.insert(arguments.end(), options.begin(), options.end());
        arguments.push_back(file());
        return run_flce(arguments, {.program = "/usr/bin/env"});
    }

    fs::path script_ = fs::path(FLCE_SOURCE_DIR) / "tools/carry_records.py";
    TemporaryFolder folder_;
};

// One test, as its steps share what they compile.
TEST_F(CarryRecords, SameKernels_RecordGetsTheirVersion) {
    FLCE_FROM_LEVEL(test::Level::nightly);
    FLCE_REQUIRE_NVRTC_FOR("sm_90a");
    std::string why;
    auto record = read_record_file(file(), why);
    ASSERT_TRUE(record) << why;
    const auto expect_carried = [&](const ProcessResult& result) {
        EXPECT_EQ(result.exit_code, 0) << result.err;
        EXPECT_THAT(result.out, HasSubstr("1 sets of tiles, 8 cubins, the same"));
        EXPECT_EQ(version(), kernel_version(DeviceKind::cuda));
        write_record_file(file(), *record);
    };
    expect_carried(carry(flce_program()));
    expect_carried(carry(flce_program(), {"--except", "flce_prepare"}));

    // a candidate with other tiles
    const std::vector<Plan> plans = candidate_plans(parse_spec(record->key.spec), describe_device("h100"));
    const auto other = std::ranges::find_if(plans, [&](const Plan& plan) {
        return plan.path == plans.front().path && !(plan.cuda.grad_weight == plans.front().cuda.grad_weight);
    });
    ASSERT_NE(other, plans.end());
    record->candidates[other->text()].times_ms["run"] = {2.0};
    write_record_file(file(), *record);
    const ProcessResult result = carry(flce_program(), {"--except", "flce_grad_weight"});
    EXPECT_EQ(result.exit_code, 1) << result.out;
    EXPECT_THAT(result.err, HasSubstr("tiles change flce_grad_weight"));
    EXPECT_EQ(version(), "0123456789abcdef");
}

TEST_F(CarryRecords, OtherKernels_RecordStaysAsItIs) {
    FLCE_FROM_LEVEL(test::Level::nightly);
    FLCE_REQUIRE_NVRTC_FOR("sm_90a");
    // An flce whose kernels add to grad_weight.
    const fs::path other = folder_ / "other";
    std::ofstream(other) << "#!/bin/bash\nexec '" << flce_program().string()
                         << "' \"${@/%dtype=bf16/dtype=bf16,grad_weight_mode=accumulate}\"\n";
    fs::permissions(other, fs::perms::owner_all);
    const std::string before{std::istreambuf_iterator<char>(std::ifstream(file()).rdbuf()), {}};
    const ProcessResult result = carry(other);
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_THAT(result.out, HasSubstr("other flce_"));
    EXPECT_THAT(result.out, HasSubstr("flce_grad_weight"));
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(std::ifstream(file()).rdbuf()), {}), before);
}

}  // namespace
}  // namespace flce::test
