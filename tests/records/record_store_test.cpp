#include "records/record_store.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "flce/error.hpp"
#include "records/shipped_records.hpp"
#include "tests/cache/cache_test_support.hpp"
#include "tests/cache/log_capture.hpp"
#include "tests/records/record_support.hpp"

namespace flce {
namespace {

using test::key_at;
using test::LogCapture;
using test::record_of;
using test::TemporaryDirectory;
using testing::HasSubstr;

class RecordStoreTest : public testing::Test {
protected:
    [[nodiscard]] RecordStore store(std::vector<std::filesystem::path> extra = {}) const {
        return RecordStore({.extra = std::move(extra), .directory = directory_.path(), .shipped = false});
    }
    TemporaryDirectory directory_;
};

TEST_F(RecordStoreTest, Saved_Found) {
    RecordStore records = store();
    EXPECT_TRUE(records.plans(key_at(4096)).empty());
    const auto file = records.save(record_of(key_at(4096), {{"a", {1}}}));
    EXPECT_TRUE(std::filesystem::exists(file));
    ASSERT_EQ(records.plans(key_at(4096)).size(), 1U);
    EXPECT_EQ(store().plans(key_at(4096)).front().best(), "a");
    EXPECT_EQ(store().plans(key_at(4096)).front().origin, file.string());
}

TEST_F(RecordStoreTest, SavedTwice_Merged) {
    RecordStore records = store();
    (void)records.save(record_of(key_at(4096), {{"a", {1}}}, "first"));
    (void)records.save(record_of(key_at(4096), {{"b", {2}}}, "second"));
    const auto both = records.find(key_at(4096));
    ASSERT_TRUE(both);
    EXPECT_EQ(both->candidates.size(), 2U);
    EXPECT_EQ(both->runs.size(), 2U);
}

TEST_F(RecordStoreTest, ManyWriters_NothingLost) {
    std::vector<std::thread> writers;
    for (int i = 0; i < 8; ++i) {
        writers.emplace_back(
            [this, i] { (void)store().save(record_of(key_at(4096), {{fmt::format("plan{}", i), {1}}}, fmt::format("run{}", i))); });
    }
    for (std::thread& writer : writers) writer.join();
    EXPECT_EQ(store().find(key_at(4096))->candidates.size(), 8U);
}

TEST_F(RecordStoreTest, NearestBucket_SmallerOfTwoEquallyNear) {
    RecordStore records = store();
    for (const std::int64_t tokens : {64, 1024, 4096}) (void)records.save(record_of(key_at(tokens), {{fmt::format("at{}", tokens), {1}}}));
    const auto plan_at = [&](std::int64_t tokens) { return records.plans(key_at(tokens)).front().best(); };
    EXPECT_EQ(plan_at(64), "at64");
    EXPECT_EQ(plan_at(256), "at64");  // four times either
    EXPECT_EQ(plan_at(2048), "at1024");
    EXPECT_EQ(plan_at(65536), "at4096");
}

TEST_F(RecordStoreTest, OtherKernelsOrMemory_FartherThanOwn) {
    RecordStore records = store();
    RecordKey old = key_at(4096);
    old.kernel_version = "another";
    (void)records.save(record_of(old, {{"old", {1}}}));
    ASSERT_EQ(records.plans(key_at(4096)).size(), 1U);
    EXPECT_TRUE(records.plans(key_at(4096)).front().other_kernels);
    (void)records.save(record_of(key_at(64), {{"few", {1}}}));
    EXPECT_EQ(records.plans(key_at(4096)).front().best(), "few");
    (void)records.save(record_of(key_at({.scratch_bytes = 1 << 20, .num_tokens = 4096}), {{"narrow", {1}}}));
    (void)records.save(record_of(key_at({.workspace_limit_bytes = 1 << 30, .num_tokens = 4096}), {{"limited", {1}}}));
    EXPECT_EQ(records.plans(key_at(4096)).front().best(), "narrow");
    EXPECT_EQ(records.plans(key_at({.workspace_limit_bytes = 2LL << 30, .num_tokens = 4096})).front().best(), "limited");
    EXPECT_FALSE(records.plans(key_at(4096)).front().other_kernels);
}

TEST_F(RecordStoreTest, WhatIsRetainedAndTheDistance_ComeBeforeALimitAndAPlace) {
    const PlanRequest narrow{.workspace_limit_bytes = 1 << 20, .num_tokens = 4096};
    const PlanRequest wide{.workspace_limit_bytes = 1 << 30, .num_tokens = 4096};
    RecordStore records = store();
    (void)records.save(record_of(key_at(narrow), {{"narrow", {1}}}));
    (void)records.save(record_of(key_at(wide, kNothingRetained), {{"nothing retained", {1}}}));
    EXPECT_EQ(records.plans(key_at(wide)).front().best(), "narrow");
    const TemporaryDirectory team;
    RecordStore teams({.directory = team.path(), .shipped = false});
    (void)teams.save(record_of(key_at({.workspace_limit_bytes = 1 << 20, .num_tokens = 64}), {{"the team's", {1}}}));
    EXPECT_EQ(store({team.path()}).plans(key_at(wide)).front().best(), "narrow") << "a first place has a record of other calls";
}

TEST_F(RecordStoreTest, OtherSpecOrDevice_NotFound) {
    RecordStore records = store();
    (void)records.save(record_of(key_at(4096), {{"a", {1}}}));
    EXPECT_TRUE(records.plans(record_key(parse_spec("D=8,V=16"), test::h100(), {.num_tokens = 4096})).empty());
    EXPECT_TRUE(records.plans(record_key(test::tuned_spec(), describe_device("h200"), {.num_tokens = 4096})).empty());
}

TEST_F(RecordStoreTest, ExtraPlaces_BeforeTheUsers) {
    (void)store().save(record_of(key_at(4096), {{"own", {1}}}));
    const TemporaryDirectory team;
    RecordStore teams({.directory = team.path(), .shipped = false});
    const auto file = teams.save(record_of(key_at(4096), {{"team", {1}}}));
    EXPECT_EQ(store({team.path()}).plans(key_at(4096)).front().best(), "team");
    EXPECT_EQ(store({file}).plans(key_at(4096)).front().best(), "team");
    EXPECT_EQ(store({file}).plans(key_at(4096)).size(), 2U);
}

TEST_F(RecordStoreTest, CorruptRecord_OneWarningAndIgnored) {
    const auto file = store().save(record_of(key_at(4096), {{"a", {1}}}));
    const std::string text = test::read_file(file);
    for (const std::string& bad : {text.substr(0, text.size() / 2), std::string("{}"), std::string(5 << 20, ' ')}) {
        test::write_file(file, bad);
        const LogCapture log;
        RecordStore records = store();
        EXPECT_TRUE(records.plans(key_at(4096)).empty());
        EXPECT_TRUE(records.plans(key_at(64)).empty());
        EXPECT_EQ(log.warnings(), 1);
        EXPECT_THAT(log.text(), HasSubstr(file.string()));
    }
}

TEST_F(RecordStoreTest, RecordOfSomethingElseUnderItsName_Ignored) {
    const auto file = store().save(record_of(key_at(4096), {{"a", {1}}}));
    RecordKey other = key_at(4096);
    other.spec = parse_spec("D=8,V=16").normalized().text();
    test::write_file(file, record_text(record_of(other, {{"b", {1}}})));
    EXPECT_TRUE(store().plans(key_at(4096)).empty());
    const LogCapture log;
    EXPECT_FALSE(store().find(key_at(4096)));
    EXPECT_THAT(log.text(), HasSubstr("something else"));
}

TEST_F(RecordStoreTest, FileThatOthersCanWrite_Refused) {
    const auto file = store().save(record_of(key_at(4096), {{"a", {1}}}));
    std::filesystem::permissions(file, std::filesystem::perms::others_write, std::filesystem::perm_options::add);
    const LogCapture log;
    EXPECT_TRUE(store().plans(key_at(4096)).empty());
    EXPECT_THAT(log.text(), HasSubstr("chmod"));
}

TEST_F(RecordStoreTest, FileThatOthersCanWrite_NotBuiltUpon) {
    const auto file = store().save(record_of(key_at(4096), {{"theirs", {1}}}, "theirs"));
    std::filesystem::permissions(file, std::filesystem::perms::others_write, std::filesystem::perm_options::add);
    EXPECT_FALSE(store().find(key_at(4096)));
    (void)store().save(record_of(key_at(4096), {{"own", {2}}}, "own"));
    EXPECT_FALSE(store().find(key_at(4096))->candidates.contains("theirs"));
}

TEST_F(RecordStoreTest, TextThatNobodyCouldRead_ErrorNamesTheFileAndItStays) {
    const auto file = store().save(record_of(key_at(4096), {{"a", {1}}}));
    const std::string before = test::read_file(file);
    Record bad = record_of(key_at(4096), {{"b", {1}}}, "second");
    bad.runs["second"].commit = std::string(5000, 'c');
    EXPECT_THAT([&] { (void)store().save(bad); }, testing::ThrowsMessage<EnvironmentError>(HasSubstr(file.string())));
    EXPECT_THAT([&] { write_record_file(file, bad); }, testing::ThrowsMessage<EnvironmentError>(HasSubstr("commit")));
    EXPECT_EQ(test::read_file(file), before);
}

TEST_F(RecordStoreTest, MoreThanAFileHolds_OldestRunLeftOutWithAWarning) {
    const auto many = [](const std::string& id) {
        Record record = record_of(key_at(4096), {{"all", {2}}}, id);
        record.runs[id].date = id;
        for (int i = 0; i < 2500; ++i) record.candidates[fmt::format("{} {}", id, i)].times_ms[id] = {1};
        return record;
    };
    (void)store().save(many("2026-01-01"));
    const LogCapture log;
    const auto file = store().save(many("2026-01-02"));
    EXPECT_EQ(log.warnings(), 1);
    EXPECT_THAT(log.text(), HasSubstr(file.string()));
    const auto read = store().find(key_at(4096));
    ASSERT_TRUE(read);
    EXPECT_EQ(read->candidates.size(), 2501U);
    EXPECT_TRUE(read->runs.contains("2026-01-02"));
}

TEST_F(RecordStoreTest, DirectoryInPlaceOfAFile_Ignored) {
    const auto file = store().save(record_of(key_at(4096), {{"a", {1}}}));
    std::filesystem::remove(file);
    std::filesystem::create_directory(file);
    EXPECT_TRUE(store().plans(key_at(4096)).empty());
}

TEST_F(RecordStoreTest, NoDirectory_SaveSaysSo) {
    RecordStore none({.shipped = false});
    EXPECT_THAT([&] { (void)none.save(record_of(key_at(64), {})); },
                testing::ThrowsMessage<EnvironmentError>(HasSubstr("FLCE_RECORDS_DIR")));
}

TEST_F(RecordStoreTest, Save_LeavesNoLocks) {
    RecordStore records = store();
    const Record record = record_of(key_at(64), {{"a", {1.0}}});
    const std::filesystem::path file = records.save(record);
    EXPECT_EQ(records.replace(record), file);
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) EXPECT_EQ(entry.path(), file.parent_path());
    // Somebody else's lock stays, and its folder.
    const std::filesystem::path other = directory_.path() / "locks" / "other";
    std::filesystem::create_directory(other.parent_path());
    std::ofstream(other).close();
    (void)records.save(record);
    for (const auto& entry : std::filesystem::directory_iterator(other.parent_path())) EXPECT_EQ(entry.path(), other);
    EXPECT_TRUE(std::filesystem::exists(other));
}

TEST(ShippedRecords, Each_ReadsHasAWinnerAndIsFoundByItsDevice) {
    RecordStore shipped({.shipped = true});
    for (const ShippedRecord& file : shipped_records()) {
        std::string why;
        const auto record = parse_record(file.text, why);
        ASSERT_TRUE(record) << file.name << ": " << why;
        const std::string best = record->best_plan();
        EXPECT_NE(best, "") << file.name;
        EXPECT_EQ(peek_subject(file.text), record->key.subject());
        const Device device = describe_device(record->key.device.name);
        EXPECT_EQ(tuned_device(device), record->key.device) << file.name;
        const Spec spec = parse_spec(record->key.spec);
        EXPECT_EQ(illegal_reason(spec, device, parse_plan(best)), std::nullopt) << file.name;
        EXPECT_EQ(shipped.plans(record_key(spec, device, record->key.request, record->key.retained)).front().best(), best) << file.name;
        for (const auto& [id, run] : record->runs) {
            EXPECT_FALSE(run.date.empty() || run.driver.empty() || run.commit.empty()) << file.name << " does not say where it comes from";
        }
    }
}

}  // namespace
}  // namespace flce
