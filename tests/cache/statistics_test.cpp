// Counts where the cache directory cannot take them: a file of the user's own on this machine.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <optional>

#include "cache/pack_store.hpp"
#include "cache/statistics_file.hpp"
#include "tests/cache/cache_fixture.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::artifact_of;
using test::key_of;
using testing::HasSubstr;

/// With a temporary directory of its own, so that nothing else is counted there.
class MachineStatisticsTest : public test::ArtifactCacheTest {
protected:
    void SetUp() override {
        if (const char* set = std::getenv("TMPDIR")) outer_ = set;
        ::setenv("TMPDIR", temporary_.path().c_str(), 1);
    }
    void TearDown() override { outer_ ? ::setenv("TMPDIR", outer_->c_str(), 1) : ::unsetenv("TMPDIR"); }

    [[nodiscard]] fs::path folder() const { return temporary_.path() / fmt::format("flce-statistics-{}", ::geteuid()); }

    /// One kernel that no tier has.
    void need(const char* name, ArtifactCache::Options options) const {
        options.counts_on_machine = true;
        ArtifactCache cache(std::move(options));
        EXPECT_EQ(test::payload_text(*cache.get_or_create(key_of(name), [&] { return artifact_of(name); })), name);
    }

    test::TemporaryDirectory temporary_;
    std::optional<std::string> outer_;
};

TEST_F(MachineStatisticsTest, NoDirectory_EveryTierIsCounted) {
    const fs::path harmed = directory_.path() / "harmed.flcepack";
    test::write_file(harmed, "no pack");
    for (const char* name : {"a", "b"}) need(name, {.further = {std::make_shared<PackStore>(std::vector{harmed}, TrustedKeys())}});
    const MachineStatistics counted = read_machine_statistics();
    EXPECT_EQ(counted.folder, folder());
    EXPECT_EQ(counted.sums.created, 2);
    EXPECT_EQ(counted.sums.tiers.at(0).misses, 2);
    EXPECT_EQ(counted.sums.tiers.at(2).name, "packs");
    EXPECT_EQ(counted.sums.tiers.at(2).misses, 2);
    EXPECT_EQ(counted.sums.tiers.at(2).faults, 2);
}

TEST_F(MachineStatisticsTest, DirectoryThatOthersMayWriteOrOwn_ItsFaultsAreCounted) {
    fs::permissions(directory_.path(), fs::perms::all);
    need("k", {.directory = directory_.path()});
    // Looked for twice, and not kept.
    EXPECT_EQ(read_machine_statistics().sums.tiers.at(1).faults, 2);
    EXPECT_EQ(read_statistics(directory_.path()).tiers.at(1).faults, 0);
    if (::geteuid() != 0) return;
    fs::permissions(directory_.path(), fs::perms::owner_all);
    ASSERT_EQ(::chown(directory_.path().c_str(), 12345, 12345), 0);
    need("k", {.directory = directory_.path()});
    EXPECT_EQ(read_machine_statistics().sums.tiers.at(1).faults, 4);
    EXPECT_EQ(read_machine_statistics().sums.created, 2);
}

TEST_F(MachineStatisticsTest, DirectoryThatCannotBeMadeOrWritten_IsCounted) {
    test::write_file(directory_.path() / "file", "");
    need("k", {.directory = directory_.path() / "file" / "below"});
    EXPECT_EQ(read_machine_statistics().sums.created, 1);
    EXPECT_GE(read_machine_statistics().sums.tiers.at(1).faults, 1);
    // A file that not even root can write: the tests may run as root.
    fs::create_directory(directory_.path() / "statistics");
    need("k", {.directory = directory_.path()});
    EXPECT_EQ(read_machine_statistics().sums.created, 2);
}

TEST_F(MachineStatisticsTest, DirectoryThatTakesThem_NothingElsewhere) {
    need("k", {.directory = directory_.path()});
    EXPECT_EQ(read_statistics(directory_.path()).created, 1);
    EXPECT_FALSE(fs::exists(folder()));
    // There is no file either where there is nothing to count.
    {
        const ArtifactCache unused({.counts_on_machine = true});
    }
    EXPECT_FALSE(fs::exists(folder()));
    EXPECT_TRUE(read_machine_statistics().folder.empty());
    EXPECT_FALSE(fs::exists(folder()));
}

TEST_F(MachineStatisticsTest, ManyProcesses_SumOfAll) {
    constexpr int kTimes = 50;
    std::vector<pid_t> children;
    for (int i = 0; i < 8; ++i) {
        const pid_t child = ::fork();
        if (child == 0) {
            for (int told = 0; told < kTimes;) {
                const Counted counted = add_machine_statistics({.created = 1});
                if (counted == Counted::no) ::_exit(1);
                told += counted == Counted::yes ? 1 : 0;
            }
            ::_exit(0);
        }
        children.push_back(child);
    }
    for (const pid_t child : children) {
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    EXPECT_EQ(read_machine_statistics().sums.created, 8 * kTimes);
}

TEST_F(MachineStatisticsTest, BusyFile_ToldWithTheNext) {
    fs::create_directory(folder());
    fs::permissions(folder(), fs::perms::owner_all);
    const int file = ::open((folder() / "statistics").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_EQ(::flock(file, LOCK_EX), 0);
    ArtifactCache cache({.counts_on_machine = true});
    (void)cache.get_or_create(key_of("a"), [] { return artifact_of("p"); });
    EXPECT_EQ(read_machine_statistics().sums.created, 0);
    ::close(file);
    (void)cache.get_or_create(key_of("b"), [] { return artifact_of("p"); });
    EXPECT_EQ(read_machine_statistics().sums.created, 2);
}

TEST_F(MachineStatisticsTest, FolderThatSomebodyElsePrepared_NotUsedAndNotNoticed) {
    const auto expect_unused = [&](const char* why) {
        need("k", {});
        EXPECT_TRUE(read_machine_statistics().folder.empty());
        EXPECT_THAT(read_machine_statistics().why, HasSubstr(why));
        EXPECT_EQ(read_machine_statistics().sums.created, 0);
        EXPECT_EQ(warnings(), 0) << log_.text();
    };
    fs::create_directory(folder());
    fs::permissions(folder(), fs::perms::all);
    expect_unused("lets group or others write");
    fs::remove_all(folder());
    if (::geteuid() == 0) {
        fs::create_directory(folder());
        ASSERT_EQ(::chown(folder().c_str(), 12345, 12345), 0);
        expect_unused("owned by user 12345");
        fs::remove_all(folder());
    }
    // A link to a folder of the user's own: the temporary directory is everybody's, so that another may have made the link.
    fs::create_directory(directory_.path() / "own");
    fs::permissions(directory_.path() / "own", fs::perms::owner_all);
    test::write_file(directory_.path() / "own" / "statistics", "precious");
    fs::create_directory_symlink(directory_.path() / "own", folder());
    expect_unused("not a directory");
    EXPECT_EQ(test::read_file(directory_.path() / "own" / "statistics"), "precious");
}

TEST_F(MachineStatisticsTest, NoTemporaryDirectory_NotNoticed) {
    ::setenv("TMPDIR", (temporary_.path() / "none").c_str(), 1);
    need("k", {});
    EXPECT_TRUE(read_machine_statistics().folder.empty());
    EXPECT_EQ(read_machine_statistics().why, "");
    EXPECT_EQ(warnings(), 0) << log_.text();
}

}  // namespace
}  // namespace flce
