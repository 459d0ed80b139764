#include "records/record.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <random>

#include "tests/records/record_support.hpp"

namespace flce {
namespace {

using test::key_at;
using test::record_of;
using test::run_of;
using testing::HasSubstr;

const std::vector<double> kFive{5, 5, 5, 5, 5};

TEST(Record, Text_ReadsBackEqual) {
    Record record = record_of(key_at({.scratch_bytes = 1 << 20, .workspace_limit_bytes = 1 << 30, .num_tokens = 4096}, kNothingRetained),
                              {{"a", {1.25, 1.5}}, {"b", {2}}});
    record.candidates["c"] = {
        .rank = 7, .outcome = Outcome::hung, .why = "no answer in 3 s \"\xff\"", .workspace_bytes = 10, .retained_bytes = 20};
    record.candidates["c"].why = "no answer in 3 s";
    std::string why;
    const auto read = parse_record(record_text(record), why);
    ASSERT_TRUE(read) << why;
    EXPECT_EQ(*read, record);
    EXPECT_EQ(record_text(*read), record_text(record));
    EXPECT_EQ(peek_subject(record_text(record)), record.key.subject());
}

TEST(Record, KeyFields_EachMakesAnotherDigest) {
    const RecordKey base = key_at(4096);
    std::vector<RecordKey> others(10, base);
    others[0].device.name = "NVIDIA H200";
    others[1].device.units = 114;
    others[2].device.l2_bytes = 1;
    others[3].kernel_version = "0";
    others[4].spec = "D=8,V=16";
    others[5].request.num_tokens = 64;
    others[6].request.scratch_bytes = 1;
    others[7].request.workspace_limit_bytes = 1;
    others[8].policy = "once";
    others[9].retained = kNothingRetained;
    std::vector<std::string> digests{base.digest()};
    for (const RecordKey& other : others) digests.push_back(other.digest());
    std::ranges::sort(digests);
    EXPECT_EQ(std::ranges::unique(digests).begin(), digests.end());
    EXPECT_NE(others[0].subject(), base.subject());
    EXPECT_NE(others[4].subject(), base.subject());
    EXPECT_EQ(others[3].subject(), base.subject());
}

TEST(Record, DeviceHereAndByName_SameKey) {
    Device here = describe_device("h100");
    here.name = "NVIDIA H100 80GB HBM3";
    here.gpu.memory_bytes -= 12345;
    EXPECT_EQ(tuned_device(here), tuned_device(describe_device("NVIDIA H100")));
    EXPECT_EQ(tuned_device(describe_device("sm_90a")), tuned_device(describe_device("h100")));
    EXPECT_NE(tuned_device(describe_device("h200")), tuned_device(describe_device("h100")));
    here.gpu.sm_count = 60;  // a part of one
    EXPECT_NE(tuned_device(here), tuned_device(describe_device("h100")));
}

TEST(Record, TiedLayer_KeyOfOneThatAccumulates) {
    const auto key = [](const char* spec) { return record_key(parse_spec(spec), describe_device("h200"), {.num_tokens = 4096}); };
    EXPECT_EQ(key("D=2048,V=151936,tied"), key("D=2048,V=151936,grad_weight_mode=accumulate"));
    EXPECT_EQ(key("D=2048,V=151936,tied,grad_weight_mode=write"), key("D=2048,V=151936"));
    EXPECT_NE(key("D=2048,V=151936,tied"), key("D=2048,V=151936"));
    EXPECT_EQ(key("D=2048,V=151936,tied").spec, "D=2048,V=151936,dtype=bf16,grad_weight_mode=accumulate");
}

TEST(Record, WithinTwoPercent_FirstByRankWins) {
    const auto times = [](double ms) { return std::vector<double>(5, ms); };
    EXPECT_EQ(record_of(key_at(64), {{"z", times(101)}, {"a", times(100)}}).best_plan(), "z");
    EXPECT_EQ(record_of(key_at(64), {{"z", times(103)}, {"a", times(100)}}).best_plan(), "a");
}

TEST(Record, EvenNumberOfTimes_TheMeanOfTheMiddleTwo) {
    EXPECT_EQ(record_of(key_at(64), {{"a", {8, 1, 2, 5}}}).candidates.at("a").median_ms(), 3.5);
}

TEST(Record, FewerSamples_DoNotWin) {
    EXPECT_EQ(record_of(key_at(64), {{"often", kFive}, {"once", {1}}}).best_plan(), "often");
    EXPECT_EQ(record_of(key_at(64), {{"a", {2}}, {"b", {1}}}).best_plan(), "b");
}

TEST(Record, WrongHungOrFaulted_NeverBest) {
    for (const Outcome outcome : {Outcome::failed, Outcome::faulted, Outcome::hung, Outcome::wrong}) {
        Record record = record_of(key_at(64), {{"slow", kFive}, {"quick", {1, 1, 1, 1, 1}}});
        record.candidates["quick"].outcome = outcome;
        EXPECT_EQ(record.best_plan(), "slow");
        record.candidates["slow"].outcome = outcome;
        EXPECT_EQ(record.best_plan(), "");
    }
}

/// Records that share plans and runs in every way.
Record random_record(std::mt19937& random) {
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    Record record{.key = key_at(4096)};
    for (int i = 0; i < 3; ++i) record.runs[fmt::format("run{}", below(4))] = test::run_of(fmt::format("driver {}", below(3)));
    for (int i = 0; i < 4; ++i) {
        Candidate candidate{
            .rank = below(3), .outcome = static_cast<Outcome>(below(5)), .why = fmt::format("{}", below(3)), .workspace_bytes = below(3)};
        for (int run = 0; run < below(3); ++run)
            candidate.times_ms[fmt::format("run{}", below(4))].assign(1 + static_cast<unsigned>(below(3)), below(9));
        record.candidates[fmt::format("plan{}", below(6))] = candidate;
    }
    return record;
}

TEST(Record, Merge_CommutativeAssociativeIdempotent) {
    std::mt19937 random(1);
    for (int i = 0; i < 200; ++i) {
        const Record a = random_record(random);
        const Record b = random_record(random);
        const Record c = random_record(random);
        ASSERT_EQ(merged(a, b), merged(b, a));
        ASSERT_EQ(merged(a, a), a);
        ASSERT_EQ(merged(merged(a, b), b), merged(a, b));
        ASSERT_EQ(merged(merged(a, b), c), merged(a, merged(b, c)));
    }
}

TEST(Record, Merge_KeepsEveryTimeAndTheWorstOutcome) {
    Record a = record_of(key_at(64), {{"x", {1, 2}}}, "first");
    Record b = record_of(key_at(64), {{"x", {3}}, {"y", {4}}}, "second");
    b.candidates["x"].outcome = Outcome::wrong;
    const Record both = merged(a, b);
    EXPECT_EQ(both.candidates.at("x").sample_count(), 3U);
    EXPECT_EQ(both.candidates.at("x").outcome, Outcome::wrong);
    EXPECT_EQ(both.candidates.at("y").sample_count(), 1U);
    EXPECT_EQ(both.runs.size(), 2U);
    EXPECT_EQ(both.best_plan(), "y");
}

TEST(Record, RunsOfManyRanks_ReadBack) {
    Record all{.key = key_at(64)};
    for (int i = 0; i < 1500; ++i) {
        const std::string run = fmt::format("run{:04}", i);
        all.runs[run] = run_of();
        all.candidates["x"].times_ms[run] = {1.0 + i};
    }
    std::string why;
    const auto read = parse_record(record_text(all), why);
    ASSERT_TRUE(read) << why;
    EXPECT_EQ(*read, all);
    std::size_t dropped = 7;
    EXPECT_EQ(fitted(all, dropped), all);
    EXPECT_EQ(dropped, 0U);
}

/// A run with times of `plans` plans of its own, and of one that all runs have.
Record run_of_many(const std::string& id, const std::string& date, int plans) {
    Record record = record_of(key_at(64), {{"all", {2}}}, id);
    record.runs[id].date = date;
    for (int i = 0; i < plans; ++i) record.candidates[fmt::format("{} plan {}", id, i)].times_ms[id] = {1};
    return record;
}

TEST(Record, MoreThanAFileHolds_TheOldestRunsGiveWayInWhateverOrderTheyWereMerged) {
    Record oldest = run_of_many("c", "2026-01-01", 1500);
    oldest.candidates["hangs"] = {.outcome = Outcome::hung, .why = "no answer"};
    const Record older = run_of_many("a", "2026-01-02", 1500);
    const Record newest = run_of_many("b", "2026-01-03", 2000);
    std::size_t dropped = 0;
    const Record kept = fitted(merged(merged(oldest, older), newest), dropped);
    EXPECT_EQ(dropped, 1U);
    EXPECT_EQ(kept, fitted(merged(newest, merged(older, oldest)), dropped));
    EXPECT_EQ(kept.candidates.size(), 3502U);
    EXPECT_FALSE(kept.runs.contains("c"));
    EXPECT_EQ(kept.candidates.at("all").sample_count(), 2U);
    EXPECT_EQ(kept.candidates.at("hangs").outcome, Outcome::hung);
}

TEST(Record, MoreBytesThanAFileHolds_OnlyAsManyRunsGiveWayAsItTakes) {
    Record record{.key = key_at(64)};
    for (const std::string run : {"1", "2", "3"}) {
        record.runs[run] = run_of();
        for (int i = 0; i < 1300; ++i) record.candidates[fmt::format("{}{:01000}", run, i)].times_ms[run] = {1};
    }
    ASSERT_GT(record_text(record).size(), kMaxRecordBytes);
    std::size_t dropped = 0;
    const Record kept = fitted(record, dropped);
    std::string why;
    EXPECT_TRUE(parse_record(record_text(kept), why)) << why;
    EXPECT_EQ(dropped, 1U);
    EXPECT_FALSE(kept.runs.contains("1"));
    EXPECT_EQ(kept.candidates.size(), 2600U);
}

TEST(Record, RankedPlans_TheBestThenTheOthersByTime) {
    Record record = record_of(key_at(64), {{"default", {1.01, 1.01, 1.01, 1.01, 1.01}},
                                           {"quicker", {1, 1, 1, 1, 1}},
                                           {"slow", {3, 3, 3, 3, 3}},
                                           {"once", {0.5}},
                                           {"wrong", {0.1, 0.1, 0.1, 0.1, 0.1}}});
    record.candidates["wrong"].outcome = Outcome::wrong;
    record.candidates["untimed"] = {};
    EXPECT_THAT(record.ranked_plans(), testing::ElementsAre("default", "quicker", "slow", "once"));
}

TEST(Record, ThreadsOfACpu_AreAnotherDevice) {
    const auto key = [](const char* device, int threads) {
        return record_key(parse_spec("D=64,V=512,dtype=fp32"), describe_device(device), {.num_tokens = 64}, kRetainedAutomatically,
                          threads);
    };
    const int cores = describe_device("znver4").cpu.cores;
    ASSERT_GT(cores, 1);
    EXPECT_EQ(key("znver4", 1).device.units, 1);
    EXPECT_NE(key("znver4", 1).file(), key("znver4", 0).file());
    EXPECT_EQ(key("znver4", cores), key("znver4", 0));
    EXPECT_EQ(key("znver4", cores + 5), key("znver4", 0));
    EXPECT_EQ(key("h100", 1), key("h100", 0));
}

TEST(Record, BadText_ReasonAndNoRecord) {
    const std::string good = record_text(record_of(key_at(4096), {{"a", kFive}}));
    const auto expect_bad = [](const std::string& text, const char* reason) {
        std::string why;
        EXPECT_FALSE(parse_record(text, why)) << text;
        EXPECT_THAT(why, HasSubstr(reason));
    };
    const auto replaced = [&](const std::string& from, const std::string& to) {
        std::string text = good;
        const auto at = text.find(from);
        EXPECT_NE(at, std::string::npos) << from;
        return text.replace(at, from.size(), to);
    };
    expect_bad("", "JSON");
    expect_bad("[]", "object");
    expect_bad("{}", "schema");
    expect_bad(std::string(1 << 20, '['), "JSON");
    expect_bad("{\"schema\":" + std::string(1 << 19, '[') + std::string(1 << 19, ']') + "}", "deep");
    expect_bad(replaced("\"schema\": 2", "\"schema\": 1"), "schema");
    expect_bad(replaced("V=151936", "V=151937"), "subject");
    expect_bad(replaced("\"outcome\":\"ok\"", "\"outcome\":\"good\""), "outcome");
    expect_bad(replaced("[5.0,", "[-5.0,"), "milliseconds");
    expect_bad(replaced("[5.0,", "[\"5\","), "milliseconds");
    expect_bad(replaced("\"rank\":0", "\"rank\":-1"), "rank");
    expect_bad(replaced("\"rank\":0", "\"rank\":1e99"), "rank");
    expect_bad(replaced("\"num_tokens\": 4096", "\"num_tokens\": 18446744073709551615"), "num_tokens");
    expect_bad(std::string(kMaxRecordBytes + 1, ' '), "bytes long");
    // No prefix of it is one, and none is a crash.
    for (std::size_t size = 0; size + 2 < good.size(); size += 7) expect_bad(good.substr(0, size), "");
}

TEST(Record, EveryByteChanged_NoCrash) {
    const std::string good = record_text(record_of(key_at(4096), {{"a", {5}}}));
    std::string why;
    for (std::size_t i = 0; i < good.size(); ++i) {
        std::string text = good;
        text[i] = static_cast<char>(text[i] ^ 0x11);
        const auto record = parse_record(text, why);
        EXPECT_NE(record.has_value(), !why.empty());
    }
}

TEST(TokenBuckets, Nearest_ByRatioTheSmallerOfTwo) {
    EXPECT_EQ(token_bucket(0), kTypicalTokens);
    EXPECT_EQ(token_bucket(1), 64);
    EXPECT_EQ(token_bucket(128), 64);
    EXPECT_EQ(token_bucket(129), 256);
    EXPECT_EQ(token_bucket(5792), 4096);  // below 4096 · sqrt(2)
    EXPECT_EQ(token_bucket(5793), 8192);
    EXPECT_EQ(token_bucket(std::int64_t{1} << 62), 65536);
    for (const std::int64_t bucket : token_buckets()) EXPECT_EQ(token_bucket(bucket), bucket);
}

}  // namespace
}  // namespace flce
