// flce tune on a GPU, with candidates whose kernels never end or write where they must not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "records/record_store.hpp"
#include "tests/cli/process.hpp"
#include "tests/support/gpu.hpp"

namespace flce::test {
namespace {

using ::testing::HasSubstr;

constexpr const char* kGpuSpec = "D=256,V=32000,dtype=bf16";
constexpr double kGpuBudgetS = 240;  // the kernels of a few chunks are compiled in it

class FlceTuneGpu : public testing::Test {
protected:
    /// The cost model's choice with so much scratch, by which it is told from all other candidates.
    [[nodiscard]] static std::string with_scratch(int mib) {
        static const std::string plan =
            run_flce({"explain", "--spec", kGpuSpec, "--device", "cuda", "--json"}).json().at("plan").get<std::string>();
        const std::size_t begin = plan.find("scratch=");
        return plan.substr(0, begin) + "scratch=" + std::to_string(mib << 20) + plan.substr(plan.find(',', begin));
    }
    /// Tunes with each of `kinds` injected into a candidate of its own.
    [[nodiscard]] nlohmann::json tune(const std::vector<std::pair<std::string, int>>& kinds) const {
        std::vector<std::string> faults;
        std::vector<std::string> arguments{"tune",
                                           "--spec",
                                           kGpuSpec,
                                           "--num-tokens",
                                           "256",
                                           "--device",
                                           "cuda",
                                           "--coordinates",
                                           "chunk",
                                           "--budget-s",
                                           std::to_string(kGpuBudgetS),
                                           "--candidate-timeout-s",
                                           "5",
                                           "--json"};
        for (const auto& [kind, mib] : kinds) {
            arguments.insert(arguments.end(), {"--plan", with_scratch(mib)});
            faults.push_back(kind + "@scratch=" + std::to_string(mib << 20));
        }
        std::ranges::copy(with_faults(faults), std::back_inserter(arguments));
        const ProcessResult result = run_flce(arguments, {.environment = {{"FLCE_RECORDS_DIR", records_.path().string()}}});
        EXPECT_EQ(result.exit_code, 0) << result.err;
        return result.json();
    }
    [[nodiscard]] static Record read(const nlohmann::json& result) {
        std::string why;
        const auto record = read_record_file(result.at("record").get<std::string>(), why);
        EXPECT_TRUE(record) << why;
        return record.value_or(Record{});
    }
    /// The search went on to its end in new processes, and chose among the candidates that are right.
    static void expect_others_measured(const nlohmann::json& result, const Record& record, std::size_t bad) {
        EXPECT_TRUE(result.at("complete"));
        EXPECT_LT(result.at("seconds"), kGpuBudgetS);
        EXPECT_EQ(result.at("processes"), 1 + bad);
        std::size_t timed = 0;
        for (const auto& [plan, candidate] : record.candidates) {
            if (candidate.outcome != Outcome::ok) continue;
            EXPECT_GT(candidate.sample_count(), 0U) << plan;
            ++timed;
        }
        EXPECT_EQ(timed + bad, record.candidates.size());
        EXPECT_GE(timed, 2U);
        const auto best = record.candidates.find(record.best_plan());
        ASSERT_NE(best, record.candidates.end());
        EXPECT_EQ(best->second.outcome, Outcome::ok);
        EXPECT_GE(best->second.sample_count(), kEnoughSamples);
    }
    TemporaryFolder records_;
};

TEST_F(FlceTuneGpu, KernelThatNeverEnds_KilledAndTheOthersAreMeasured) {
    FLCE_REQUIRE_GPU();
    const auto result = tune({{"hang", 61}, {"hang-time", 60}});
    const Record record = read(result);
    for (const int mib : {61, 60}) {
        const Candidate& hung = record.candidates.at(with_scratch(mib));
        EXPECT_EQ(hung.outcome, Outcome::hung) << to_string(hung.outcome) << ": " << hung.why;
        EXPECT_THAT(hung.why, HasSubstr("no answer in 5 s"));
        EXPECT_EQ(hung.sample_count(), 0U);
    }
    // One was right before it hung.
    EXPECT_GT(record.candidates.at(with_scratch(60)).workspace_bytes, 0);
    expect_others_measured(result, record, 2);
}

TEST_F(FlceTuneGpu, KernelThatWritesToAnIllegalAddress_FaultedAndTheOthersAreMeasured) {
    FLCE_REQUIRE_GPU();
    const auto result = tune({{"fault", 61}, {"fault-time", 60}});
    const Record record = read(result);
    for (const int mib : {61, 60}) {
        const Candidate& faulted = record.candidates.at(with_scratch(mib));
        EXPECT_EQ(faulted.outcome, Outcome::faulted) << to_string(faulted.outcome) << ": " << faulted.why;
        EXPECT_THAT(faulted.why, HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
    }
    EXPECT_GT(record.candidates.at(with_scratch(60)).workspace_bytes, 0);
    expect_others_measured(result, record, 2);
}

TEST_F(FlceTuneGpu, Rates_AreMeasuredAndInTheReport) {
    FLCE_REQUIRE_GPU();
    const std::filesystem::path report = records_.path() / "report.json";
    const auto tune_with = [&](std::vector<std::string> more) {
        std::vector<std::string> arguments{"tune", "--spec",        kGpuSpec, "--num-tokens",   "256",      "--device",
                                           "cuda", "--coordinates", "chunk",  "--always-rates", "--report", report.string()};
        std::ranges::move(more, std::back_inserter(arguments));
        const ProcessResult result = run_flce(arguments, {.environment = {{"FLCE_RECORDS_DIR", records_.path().string()}}});
        EXPECT_EQ(result.exit_code, 0) << result.err;
        std::ifstream file(report);
        return std::pair(nlohmann::json::parse(file).at("about").at("device"), result.err);
    };
    const auto [device, warnings] = tune_with({});
    for (const char* rate : {"mma_flops", "copy_bytes_per_s", "l2_bytes_per_s", "launch_seconds"}) {
        EXPECT_GT(device.at(std::string("measured_") + rate).get<double>(), 0) << rate;
    }
    EXPECT_EQ(device.at("bandwidth_bytes_per_s"), device.at("measured_copy_bytes_per_s"));
    EXPECT_EQ(warnings.find("are assumed"), std::string::npos) << warnings;
    const auto [unmeasured, said] = tune_with(with_faults({"fault-rates@"}));
    EXPECT_EQ(unmeasured.at("measured_mma_flops"), 0);
    EXPECT_THAT(said, HasSubstr("are assumed, not measured: ended by signal"));
}

}  // namespace
}  // namespace flce::test
