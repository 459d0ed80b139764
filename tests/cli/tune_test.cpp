// flce tune on the CPU: the same code that tunes a GPU, with real kernels of a tiny layer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

#include "records/record_store.hpp"
#include "tests/cli/process.hpp"

namespace flce::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

constexpr const char* kTunedSpec = "D=32,V=300,dtype=fp32";
/// Another plan of the cost model's first candidates on every x86-64: its chunk is not the default's.
std::string another_plan() {
    const auto explained = run_flce({"explain", "--spec", kTunedSpec, "--device", "cpu", "--json"}).json();
    std::string plan = explained.at("plan").get<std::string>();
    const auto at = plan.find("scratch=");
    return plan.substr(0, at) + "scratch=" + std::to_string(63 << 20);
}

std::string read_text(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

class FlceTune : public testing::Test {
protected:
    [[nodiscard]] ProcessResult run(std::vector<std::string> arguments, int interrupt_after_ms = 0) const {
        arguments.insert(arguments.begin(), "tune");
        return run_flce(arguments, {.environment = {{"FLCE_RECORDS_DIR", records_.path().string()}, {"FLCE_NUM_THREADS", "1"}},
                                    .interrupt_after_ms = interrupt_after_ms});
    }
    [[nodiscard]] nlohmann::json tune(const std::vector<std::string>& more = {}) const {
        std::vector<std::string> arguments{"--spec", kTunedSpec, "--num-tokens", "64", "--device", "cpu", "--budget-s", "30", "--json"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        const ProcessResult result = run(arguments);
        EXPECT_EQ(result.exit_code, 0) << result.err;
        return result.json();
    }
    [[nodiscard]] static Record read(const nlohmann::json& result) {
        std::string why;
        const auto record = read_record_file(result.at("record").get<std::string>(), why);
        EXPECT_TRUE(record) << why;
        return record.value_or(Record{});
    }
    TemporaryFolder records_;
};

TEST_F(FlceTune, Record_SessionsPlanByIt) {
    const auto result = tune({"--commit", "abc123"});
    EXPECT_GT(result.at("candidates"), 10);
    EXPECT_EQ(result.at("measured"), result.at("candidates"));
    EXPECT_TRUE(result.at("complete"));
    EXPECT_GT(result.at("best_ms"), 0);
    const Record record = read(result);
    EXPECT_EQ(record.best_plan(), result.at("best_plan"));
    EXPECT_EQ(record.key.request.num_tokens, 64);
    EXPECT_EQ(record.runs.begin()->second.commit, "abc123");
    // Blocks and panels of the register block are among the varied coordinates.
    std::set<std::tuple<int, int, int, int>> blocks;
    for (const auto& [text, candidate] : record.candidates) {
        EXPECT_EQ(candidate.outcome, Outcome::ok) << text << ": " << candidate.why;
        const CpuPlan cpu = parse_plan(text).cpu;
        blocks.insert({cpu.micro_m, cpu.block_m, cpu.block_n, cpu.block_k});
    }
    EXPECT_GE(blocks.size(), 6U);

    EXPECT_EQ(record.key.device.units, 1);
    const ProcessOptions with_records{.environment = {{"FLCE_RECORDS_DIR", records_.path().string()}, {"FLCE_NUM_THREADS", "1"}}};
    const auto explained = run_flce({"explain", "--spec", kTunedSpec, "--device", "cpu", "--json"}, with_records).json();
    EXPECT_EQ(explained.at("plan"), result.at("best_plan"));
    EXPECT_THAT(explained.at("plan_source").get<std::string>(), HasSubstr("measured"));
    const auto bench =
        run_flce({"bench", "--spec", kTunedSpec, "--device", "cpu", "--num-tokens", "8", "--rounds", "1", "--no-floor", "--json"},
                 with_records)
            .json();
    EXPECT_EQ(bench.at("plan"), result.at("best_plan"));
}

TEST_F(FlceTune, Again_MeasuresOnlyWhatIsNew) {
    // On a noisy machine a search may end while its last rounds still make others the winner; the next search goes on with these.
    constexpr int kMostSearches = 6;
    auto first = tune();
    auto again = tune();
    const std::size_t explored = read(first).candidates.size();
    for (int i = 2; i < kMostSearches && again.at("measured") > 0; ++i) first = std::exchange(again, tune());
    EXPECT_EQ(again.at("measured"), 0);
    EXPECT_EQ(read(again).candidates.size(), explored);
    EXPECT_EQ(again.at("best_plan"), first.at("best_plan"));
    EXPECT_EQ(read(again), read(first));
    const std::string own = another_plan();
    const auto more = tune({"--plan", own});
    const Record record = read(more);
    ASSERT_TRUE(record.candidates.contains(own));
    EXPECT_GT(record.candidates.at(own).sample_count(), 0U);
    // Other candidates are not measured again.
    for (const auto& [plan, candidate] : read(first).candidates) EXPECT_EQ(record.candidates.at(plan), candidate) << plan;
    EXPECT_EQ(tune({"--fresh"}).at("measured").get<int>() > 10, true);
}

TEST_F(FlceTune, CandidatesThatHangFaultOrLie_RecordedAndNeverBest) {
    // A chunk each of its own makes the victims known beforehand, whatever else is tried; scratch tells them apart.
    const std::string plan = another_plan();
    const auto with_scratch = [&](int mib) { return plan.substr(0, plan.find("scratch=")) + "scratch=" + std::to_string(mib << 20); };
    std::vector<std::string> arguments{"--candidate-timeout-s", "2"};
    std::vector<std::string> injected;
    const std::vector<std::tuple<std::string, int, Outcome, std::string>> faults = {{"hang", 61, Outcome::hung, "no answer"},
                                                                                    {"fault", 60, Outcome::faulted, "signal 11"},
                                                                                    {"wrong", 59, Outcome::wrong, "grad_hidden"},
                                                                                    {"fault-timing", 58, Outcome::faulted, "signal 9"}};
    for (const auto& [kind, mib, outcome, why] : faults) {
        arguments.insert(arguments.end(), {"--plan", with_scratch(mib)});
        injected.push_back(kind + "@scratch=" + std::to_string(mib << 20));
    }
    std::ranges::copy(test::with_faults(injected), std::back_inserter(arguments));
    const auto result = tune(arguments);
    const Record record = read(result);
    for (const auto& [kind, mib, outcome, why] : faults) {
        const Candidate& candidate = record.candidates.at(with_scratch(mib));
        EXPECT_EQ(candidate.outcome, outcome) << kind << ": " << to_string(candidate.outcome) << " " << candidate.why;
        EXPECT_THAT(candidate.why, HasSubstr(why)) << kind;
        EXPECT_NE(record.best_plan(), with_scratch(mib));
    }
    EXPECT_EQ(result.at("outcomes").at("faulted"), 2);
    EXPECT_EQ(result.at("processes"), 1 + faults.size());  // the others were measured after each of them
    EXPECT_GT(result.at("outcomes").at("ok"), 10);
    EXPECT_TRUE(result.at("complete"));
}

TEST_F(FlceTune, CompilerThatHangsOrDies_RecordedAndTheSearchGoesOn) {
    const std::string plan = another_plan();
    const auto with_scratch = [&](int mib) { return plan.substr(0, plan.find("scratch=")) + "scratch=" + std::to_string(mib << 20); };
    std::vector<std::string> arguments{"--candidate-timeout-s", "1.5",    "--coordinates", "chunk", "--plan",
                                       with_scratch(61),        "--plan", with_scratch(60)};
    std::ranges::copy(
        test::with_faults({"hang-compile@scratch=" + std::to_string(61 << 20), "fault-compile@scratch=" + std::to_string(60 << 20)}),
        std::back_inserter(arguments));
    const auto result = tune(arguments);
    const Record record = read(result);
    const Candidate& hung = record.candidates.at(with_scratch(61));
    EXPECT_EQ(hung.outcome, Outcome::hung);
    EXPECT_THAT(hung.why, AllOf(HasSubstr("compiler"), HasSubstr("no answer")));
    const Candidate& died = record.candidates.at(with_scratch(60));
    EXPECT_EQ(died.outcome, Outcome::faulted);
    EXPECT_THAT(died.why, AllOf(HasSubstr("compiler"), HasSubstr("signal 11")));
    EXPECT_GT(result.at("outcomes").at("ok"), 1);
}

TEST_F(FlceTune, GraphRefused_AllIsMeasuredAgainForARecordThatSaysSo) {
    // The default is timed as a graph before the other plan's is refused.
    const std::string plan = another_plan();
    const std::string own = plan.substr(0, plan.find("scratch=")) + "scratch=" + std::to_string(61 << 20);
    std::vector<std::string> arguments{"--spec", kTunedSpec, "--num-tokens",  "64",    "--device", "cpu", "--budget-s",
                                       "30",     "--json",   "--coordinates", "chunk", "--plan",   own,   "--always-graphs"};
    std::ranges::copy(test::with_faults({"refuse-graph@scratch=" + std::to_string(61 << 20)}), std::back_inserter(arguments));
    const ProcessResult result = run(arguments);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, AllOf(HasSubstr("without CUDA graphs"), HasSubstr("a test refuses it")));
    const auto json = result.json();
    EXPECT_EQ(json.at("policy"), kLaunchMeasurementPolicy);
    const Record record = read(json);
    EXPECT_EQ(record.key.policy, kLaunchMeasurementPolicy);
    EXPECT_EQ(record.runs.size(), 1U);
    EXPECT_GT(record.candidates.at(own).sample_count(), 0U);
    EXPECT_GT(record.candidates.at(json.at("default_plan").get<std::string>()).sample_count(), 0U);
    // Times of before, measured with graphs, are in no record.
    const auto shown = run({"--show", "--json"}).json();
    EXPECT_EQ(shown.at("records").size(), 1U);
    // A second run is refused again, and finds all of it there.
    EXPECT_EQ(run(arguments).json().at("measured"), 0);
}

TEST_F(FlceTune, GraphRefused_RecordMeasuredWithGraphsStaysAsItIs) {
    const auto graphs = tune({"--coordinates", "chunk"});  // samples of a CPU are launches, unless it is said to use graphs
    Record other = read(graphs);
    fs::remove(graphs.at("record").get<std::string>());
    other.key.policy = kGraphMeasurementPolicy;
    const fs::path file = records_.path() / other.key.file();
    write_record_file(file, other);
    const std::string plan = another_plan();
    const std::string own = plan.substr(0, plan.find("scratch=")) + "scratch=" + std::to_string(61 << 20);
    std::vector<std::string> arguments{"--coordinates", "chunk", "--plan", own, "--always-graphs"};
    std::ranges::copy(test::with_faults({"refuse-graph@scratch=" + std::to_string(61 << 20)}), std::back_inserter(arguments));
    const Record record = read(tune(arguments));
    EXPECT_EQ(record.key.policy, kLaunchMeasurementPolicy);
    ASSERT_EQ(record.runs.size(), 1U);
    for (const auto& [text, candidate] : record.candidates) {
        EXPECT_FALSE(candidate.times_ms.contains(other.runs.begin()->first)) << text;
    }
    std::string why;
    EXPECT_EQ(read_record_file(file, why), other) << why;
}

TEST_F(FlceTune, HangInASmallBudget_KilledAndRecorded) {
    std::vector<std::string> arguments{"--spec", kTunedSpec, "--num-tokens", "64", "--device", "cpu", "--budget-s", "3", "--json"};
    std::ranges::copy(test::with_faults({"hang@cpu"}), std::back_inserter(arguments));
    const auto first = run(arguments).json();
    ASSERT_TRUE(first.is_object());
    const Record record = read(first);
    ASSERT_FALSE(record.candidates.empty());
    for (const auto& [plan, candidate] : record.candidates) EXPECT_EQ(candidate.outcome, Outcome::hung) << plan;
}

TEST_F(FlceTune, LayerThatDoesNotStart_TheOthersAreTuned) {
    std::vector<std::string> arguments{"--spec",        "D=32,V=300,dtype=fp32",
                                       "--spec",        "D=48,V=300,dtype=fp32",
                                       "--spec",        "D=40,V=300,dtype=fp32",
                                       "--num-tokens",  "64",
                                       "--device",      "cpu",
                                       "--coordinates", "chunk",
                                       "--budget-s",    "3",
                                       "--json"};
    std::ranges::copy(test::with_faults({"hang-open@D=48"}), std::back_inserter(arguments));
    const ProcessResult result = run(arguments);
    EXPECT_EQ(result.exit_code, 3) << result.err;
    EXPECT_THAT(result.err, HasSubstr("D=48,V=300"));
    const auto json = result.json();
    ASSERT_TRUE(json.is_object()) << result.err;
    ASSERT_EQ(json.at("items").size(), 2U);
    EXPECT_THAT(json.at("items")[1].at("spec").get<std::string>(), HasSubstr("D=40"));
    ASSERT_EQ(json.at("errors").size(), 1U);
    EXPECT_THAT(json.at("errors")[0].at("spec").get<std::string>(), HasSubstr("D=48"));
    EXPECT_THAT(json.at("errors")[0].at("error").get<std::string>(), HasSubstr("no answer in 5 s"));
}

TEST_F(FlceTune, RecordThatLies_TuningGoesOn) {
    const auto first = tune({"--coordinates", "chunk"});
    Record record = read(first);
    const std::string run = record.runs.begin()->first;
    record.candidates["garbage"].times_ms[run] = std::vector<double>(kEnoughSamples, 0.0001);
    write_record_file(first.at("record").get<std::string>(), record);
    const auto again = tune({"--coordinates", "chunk"});
    EXPECT_EQ(again.at("best_plan"), first.at("best_plan"));
    EXPECT_EQ(read(again).candidates.at("garbage").outcome, Outcome::failed);
}

TEST_F(FlceTune, NothingTunedYet_ShowSaysSo) {
    const ProcessResult empty = run({"--show"});
    EXPECT_EQ(empty.exit_code, 0) << empty.err;
    EXPECT_THAT(empty.out, AllOf(HasSubstr("no tuning records"), HasSubstr(records_.path().string())));
    const ProcessResult fresh = run({"--show", "--json", "--records-dir", records_ / "none"});
    EXPECT_EQ(fresh.exit_code, 0) << fresh.err;
    EXPECT_TRUE(fresh.json().at("records").empty());
}

TEST_F(FlceTune, BudgetSpentOrCtrlC_BestSoFarIsKept) {
    const std::vector<std::string> large{"--spec", "D=256,V=20000,dtype=fp32", "--num-tokens", "256", "--device", "cpu", "--json"};
    std::vector<std::string> arguments = large;
    arguments.insert(arguments.end(), {"--budget-s", "2.5"});
    const ProcessResult spent = run(arguments);
    ASSERT_TRUE(spent.json().is_object()) << spent.err;
    EXPECT_FALSE(spent.json().at("complete"));
    arguments = large;
    arguments.insert(arguments.end(), {"--budget-s", "600", "--fresh"});
    const ProcessResult interrupted = run(arguments, 2500);
    EXPECT_EQ(interrupted.exit_code, 130);
    EXPECT_THAT(interrupted.err, HasSubstr("interrupted"));
    ASSERT_TRUE(interrupted.json().is_object()) << interrupted.out;
    EXPECT_FALSE(interrupted.json().at("complete"));
    if (interrupted.json().at("candidates") > 0) {
        for (const auto& [plan, candidate] : read(interrupted.json()).candidates) EXPECT_EQ(candidate.outcome, Outcome::ok) << plan;
    }
}

TEST_F(FlceTune, CandidatesFile_ReadWithComments) {
    const std::string own = another_plan();
    std::ofstream(records_ / "plans.txt") << "# two of ours\n\n" << own << "  \n";
    const auto result = tune({"--candidates-file", records_ / "plans.txt", "--coordinates", "chunk"});
    EXPECT_TRUE(read(result).candidates.contains(own));
    EXPECT_LT(result.at("candidates"), 10);
}

TEST_F(FlceTune, WorkspaceLimit_WhatIsRetainedKeepsToIt) {
    // Accumulated gradients cannot be lent, so retained values lie in the memory that the limit leaves. A smaller layer is not worth it.
    const std::vector<std::string> spec{"--spec", "D=64,V=4096,dtype=fp32,grad_weight_mode=accumulate", "--num-tokens", "64", "--device",
                                        "cpu"};
    std::vector<std::string> arguments = spec;
    arguments.insert(arguments.end(), {"--workspace-limit", "3M", "--coordinates", "chunk,blocks", "--json"});
    const ProcessResult result = run(arguments);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const Record record = read(result.json());
    EXPECT_EQ(record.key.request.workspace_limit_bytes, 3 << 20);
    EXPECT_LE(record.key.request.scratch_bytes, 3 << 20);
    bool retained = false;
    for (const auto& [plan, candidate] : record.candidates) {
        EXPECT_EQ(candidate.outcome, Outcome::ok) << candidate.why;
        EXPECT_LE(candidate.workspace_bytes + candidate.retained_bytes, 3 << 20);
        retained = retained || candidate.retained_bytes > 0;
    }
    EXPECT_TRUE(retained);
    arguments = spec;
    arguments.insert(arguments.end(), {"--retain", "none", "--coordinates", "chunk", "--json"});
    EXPECT_EQ(read(run(arguments).json()).key.retained, "none");
}

TEST_F(FlceTune, TiedLayer_ItsRecordServesEveryLayerThatAccumulates) {
    const ProcessResult tuned =
        run({"--spec", "D=32,V=300,dtype=fp32,tied", "--num-tokens", "64", "--device", "cpu", "--coordinates", "chunk,blocks", "--json"});
    ASSERT_EQ(tuned.exit_code, 0) << tuned.err;
    const std::string best = tuned.json().at("best_plan").get<std::string>();
    for (const auto& [spec, found] : {std::pair{"D=32,V=300,dtype=fp32,tied", true},
                                      {"D=32,V=300,dtype=fp32,grad_weight_mode=accumulate", true},
                                      {"D=32,V=300,dtype=fp32", false}}) {
        const auto explained =
            run_flce({"explain", "--spec", spec, "--device", "cpu", "--json"},
                     {.environment = {{"FLCE_RECORDS", tuned.json().at("record").get<std::string>()}, {"FLCE_NUM_THREADS", "1"}}})
                .json();
        EXPECT_EQ(explained.at("plan_source").get<std::string>().find("measured") != std::string::npos, found) << explained;
        EXPECT_TRUE(!found || explained.at("plan") == best) << spec;
    }
}

class FlceTuneRecords : public FlceTune {
protected:
    void SetUp() override {
        write("a.json", "run1", 2.0, 1.0);
        write("b.json", "run2", 2.2, 3.0);
    }
    void write(const std::string& name, const std::string& run, double first, double second) const {
        const Spec spec = parse_spec("D=2048,V=151936,dtype=bf16");
        Record record{.key = record_key(spec, describe_device("h100"), {.num_tokens = 4096})};
        record.runs[run] = {.date = "2026-11-21T00:00:00Z", .version = "0.1.0", .device = "NVIDIA H100 80GB HBM3", .driver = run};
        const auto plans = candidate_plans(spec, describe_device("h100"));
        record.candidates[plans[0].text()] = {.rank = 0, .workspace_bytes = 1 << 20, .times_ms = {{run, std::vector<double>(5, first)}}};
        record.candidates[plans[1].text()] = {.rank = 1, .workspace_bytes = 2 << 20, .times_ms = {{run, std::vector<double>(5, second)}}};
        record.candidates["<b>&\"hung\""] = {.rank = 2, .outcome = Outcome::hung, .why = "no answer in 3 s"};
        write_record_file(records_ / name, record);
    }
};

TEST_F(FlceTuneRecords, Show_TableAndJson) {
    const ProcessResult table = run({"--show", records_ / "a.json"});
    EXPECT_EQ(table.exit_code, 0) << table.err;
    EXPECT_THAT(table.out, AllOf(HasSubstr("D=2048,V=151936,dtype=bf16"), HasSubstr("NVIDIA H100, 4096 tokens"), HasSubstr("* "),
                                 HasSubstr("hung: no answer in 3 s"), HasSubstr("driver run1")));
    const auto json = run({"--show", records_.path().string(), "--json"}).json();
    ASSERT_EQ(json.at("records").size(), 2U);
    EXPECT_EQ(json.at("records")[0].at("best_ms"), 1.0);
    EXPECT_EQ(json.at("records")[1].at("best_ms"), 2.2);
    EXPECT_EQ(run({"--show", "--json"}).json(), json);
}

TEST_F(FlceTuneRecords, Diff_TimesAndProvenance) {
    const ProcessResult text = run({"--diff", records_ / "a.json", records_ / "b.json"});
    EXPECT_EQ(text.exit_code, 0) << text.err;
    EXPECT_THAT(text.out, AllOf(HasSubstr("driver \"run1\", then \"run2\""), HasSubstr("1.100"), HasSubstr("3 candidates in both")));
    const auto json = run({"--diff", records_ / "a.json", records_ / "b.json", "--json"}).json();
    EXPECT_TRUE(json.at("same_key"));
    EXPECT_EQ(json.at("both").size(), 3U);
}

TEST_F(FlceTuneRecords, Merge_OfBothInAnyOrderTheSameFile) {
    EXPECT_EQ(run({"--merge", records_ / "a.json", records_ / "b.json", "--out", records_ / "ab.json"}).exit_code, 0);
    EXPECT_EQ(run({"--merge", records_ / "b.json", records_ / "a.json", records_ / "ab.json", "--out", records_ / "ba.json"}).exit_code, 0);
    EXPECT_EQ(read_text(records_ / "ab.json"), read_text(records_ / "ba.json"));
    const auto merged = run({"--merge", records_ / "a.json", records_ / "b.json", "--out", records_ / "team", "--json"}).json();
    const fs::path file = merged.at("records")[0].get<std::string>();
    EXPECT_EQ(read_text(file), read_text(records_ / "ab.json"));
    EXPECT_EQ(file, records_.path() / "team" /
                        record_key(parse_spec("D=2048,V=151936,dtype=bf16"), describe_device("h100"), {.num_tokens = 4096}).file());
}

TEST_F(FlceTuneRecords, BadFileInADirectory_TheOthersAreReadWithAWarning) {
    std::ofstream(records_ / "bad.json") << "{}";
    const ProcessResult shown = run({"--show", records_.path().string(), "--json"});
    EXPECT_EQ(shown.exit_code, 0) << shown.err;
    EXPECT_EQ(shown.json().at("records").size(), 2U);
    EXPECT_THAT(shown.err, HasSubstr("bad.json"));
    const ProcessResult merged = run({"--merge", records_.path().string(), "--out", records_ / "ab.json"});
    EXPECT_EQ(merged.exit_code, 0) << merged.err;
    EXPECT_THAT(merged.err, HasSubstr("bad.json"));
    EXPECT_EQ(run({"--merge", records_ / "bad.json", "--out", records_ / "no.json"}).exit_code, 2);
    const ProcessResult unmerged = run({"--spec", "D=8,V=16", "--out", records_ / "no.json"});
    EXPECT_EQ(unmerged.exit_code, 2);
    EXPECT_THAT(unmerged.err, HasSubstr("--out requires --merge"));
}

TEST_F(FlceTuneRecords, Merge_OfManyRanksCanBeRead) {
    std::string why;
    const auto one = read_record_file(records_ / "a.json", why);
    ASSERT_TRUE(one) << why;
    fs::create_directory(records_.path() / "ranks");
    for (int i = 0; i < 1100; ++i) {
        Record rank{.key = one->key};
        const std::string run = "rank " + std::to_string(i);
        rank.runs[run] = one->runs.begin()->second;
        rank.candidates["plan"].times_ms[run] = {1.0 + i};
        std::ofstream(records_.path() / "ranks" / (std::to_string(i) + ".json")) << record_text(rank);
    }
    EXPECT_EQ(run({"--merge", records_ / "ranks", "--out", records_ / "all"}).exit_code, 0);
    const ProcessResult shown = run({"--show", records_ / "all", "--json"});
    EXPECT_EQ(shown.exit_code, 0) << shown.err;
    ASSERT_EQ(shown.json().at("records").size(), 1U) << shown.err;
    const auto all = read_record_file(shown.json().at("records")[0].at("record").get<std::string>(), why);
    ASSERT_TRUE(all) << why;
    EXPECT_EQ(all->runs.size(), 1100U);
}

// Files that several nodes have published of one key are one record to every reader and writer.
TEST_F(FlceTuneRecords, FilesOfSeveralNodes_AreOneRecord) {
    std::string why;
    const auto one = read_record_file(records_ / "a.json", why);
    const auto other = read_record_file(records_ / "b.json", why);
    ASSERT_TRUE(one && other) << why;
    const fs::path team = records_.path() / "team";
    const std::string stem = (team / one->key.file()).replace_extension().string();
    write_record_file(stem + ".0123456789abcdef0123456789abcdef.json", *one);
    write_record_file(stem + ".fedcba9876543210fedcba9876543210.json", *other);
    const auto shown = run({"--show", team, "--json"}).json();
    ASSERT_EQ(shown.at("records").size(), 1U);
    EXPECT_EQ(run({"--merge", team, "--out", records_ / "ab.json"}).exit_code, 0);
    EXPECT_EQ(read_record_file(records_ / "ab.json", why), merged(*one, *other)) << why;
    // Merged into, also where others own them.
    fs::permissions(stem + ".0123456789abcdef0123456789abcdef.json", fs::perms::others_write, fs::perm_options::add);
    EXPECT_EQ(run({"--merge", records_ / "b.json", "--out", team}).exit_code, 0);
    EXPECT_EQ(read_record_file(stem + ".json", why), merged(*one, *other)) << why;
}

TEST_F(FlceTuneRecords, Report_IsOneFileThatShowAndMergeRead) {
    EXPECT_EQ(run({"--show", records_ / "a.json", records_ / "b.json", "--report", records_ / "both.json"}).exit_code, 0);
    EXPECT_EQ(run({"--show", records_ / "both.json", "--json"}).json().at("records").size(), 2U);
    std::string why;
    const auto merged_record = [&](const std::vector<std::string>& from) {
        std::vector<std::string> arguments{"--merge"};
        arguments.insert(arguments.end(), from.begin(), from.end());
        arguments.insert(arguments.end(), {"--out", records_ / "out.json"});
        EXPECT_EQ(run(arguments).exit_code, 0);
        return read_record_file(records_ / "out.json", why);
    };
    const auto merged = merged_record({records_ / "a.json", records_ / "b.json"});
    ASSERT_TRUE(merged) << why;
    EXPECT_EQ(merged_record({records_ / "both.json"}), merged);
    EXPECT_EQ(merged_record({records_ / "both.json", records_ / "both.json"}), merged) << "of two reports a time counts once";
    EXPECT_EQ(run({"--show", records_ / "a.json", "--report", records_ / "report.html"}).exit_code, 2);

    nlohmann::json broken = nlohmann::json::parse(read_text(records_ / "both.json"));
    broken.at("records").at(1).erase("candidates");
    std::ofstream(records_ / "broken.json") << broken.dump();
    const ProcessResult refused = run({"--show", records_ / "broken.json"});
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.err, HasSubstr("record 2: the record has no \"candidates\""));
    std::ofstream(records_ / "deep.json") << R"({"report": 1, "records": [)" << std::string(1 << 20, '[');
    EXPECT_EQ(run({"--show", records_ / "deep.json"}).exit_code, 2);
    std::ofstream(records_ / "twice.json") << R"({"report": 1, "records": [], "records": []})";
    EXPECT_THAT(run({"--show", records_ / "twice.json"}).err, HasSubstr("given twice"));
}

TEST_F(FlceTuneRecords, Report_HasAPageWithNothingFromElsewhere) {
    EXPECT_EQ(run({"--show", records_.path().string(), "--report", records_ / "report.json"}).exit_code, 0);
    const std::string html = read_text(records_ / "report.html");
    EXPECT_THAT(html, AllOf(HasSubstr("<svg"), HasSubstr("memory beyond inputs"), HasSubstr("class=\"best\""),
                            HasSubstr("no answer in 3 s"), HasSubstr("&lt;b&gt;&amp;&quot;hung&quot;"), HasSubstr("</html>")));
    EXPECT_THAT(html, AllOf(Not(HasSubstr("http:")), Not(HasSubstr("https:")), Not(HasSubstr("src=")), Not(HasSubstr("<script")),
                            Not(HasSubstr("@import")), Not(HasSubstr("<b>&"))));
    EXPECT_THAT(read_text(records_ / "report.html"), HasSubstr("<h2>D=2048,<wbr>V=151936,<wbr>dtype=bf16</h2>"));
}

TEST_F(FlceTune, BadUsage_ExitsWith2) {
    const auto expect_refused = [&](const std::vector<std::string>& arguments, const char* reason) {
        const ProcessResult result = run(arguments);
        EXPECT_EQ(result.exit_code, 2) << reason;
        EXPECT_THAT(result.err, HasSubstr(reason));
    };
    expect_refused({}, "--spec");
    expect_refused({"--spec", kTunedSpec, "--device", "cpu", "--plan", "fast"}, "plan");
    expect_refused({"--spec", kTunedSpec, "--device", "cpu", "--num-tokens", "0"}, "num-tokens");
    expect_refused({"--spec", kTunedSpec, "--device", "cpu", "--coordinates", "blcoks"},
                   "blocks, block_m, block_n, block_k, chunk, bf16_dot");
    expect_refused({"--spec", kTunedSpec, "--device", "cpu", "--coordinates", "raster"}, "raster");
    expect_refused({"--spec", kTunedSpec, "--device", "cpu", "--exhaustive", "-1"}, "exhaustive");
    expect_refused({"--spec", kTunedSpec, "--device", "cpu", "--exhaustive", "0"}, "exhaustive");
    expect_refused({"--spec", kTunedSpec, "--device", "cpu", "--commit", std::string(5000, 'c')}, "commit has 5000 bytes");
    expect_refused({"--show", "/nonexistent.json"}, "/nonexistent.json");
    expect_refused({"--diff", "/nonexistent.json"}, "diff");
    std::ofstream(records_ / "bad.json") << "{}";
    expect_refused({"--show", records_ / "bad.json"}, "schema");
    EXPECT_THAT(run_flce({"--help"}).out, AllOf(HasSubstr("tune"), Not(HasSubstr("tune-worker"))));
    EXPECT_THAT(run_flce({"tune", "--help"}).out, AllOf(HasSubstr("Examples:"), HasSubstr("--budget-s"), Not(HasSubstr("--worker"))));
}

TEST_F(FlceTune, CompileOnly_ForADeviceThatIsNotHere) {
    const ProcessResult result = run({"--compile-only", "--spec", kTunedSpec, "--device", "x86-64-v3", "--json"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_GT(result.json().at("candidates"), 5);
    EXPECT_EQ(result.json().at("failed"), 0);
}

}  // namespace
}  // namespace flce::test
