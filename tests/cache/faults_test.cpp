// Faults of real machines: kills at any moment, many processes, dead ones' locks, clocks that jump, file systems that fail.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "cache/cleanup.hpp"
#include "cache/statistics_file.hpp"
#include "tests/cache/cache_fixture.hpp"
#include "tests/cache/kill_at.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::artifact_of;
using test::ArtifactCacheTest;
using test::key_of;
using test::payload_text;
using testing::HasSubstr;

using FaultsTest = ArtifactCacheTest;

/// A process that needs `key` and finds nothing.
int publish_one(const fs::path& directory, const char* name) {
    ArtifactCache cache({.directory = directory});
    return payload_text(*cache.get_or_create(key_of(name), [&] { return artifact_of(name); })) == name ? 0 : 1;
}

TEST_F(FaultsTest, KilledAtEverySystemCallOfAPublication_NothingIsHarmed) {
    ASSERT_EQ(publish_one(directory_.path(), "earlier"), 0);
    int stop = 0;
    for (test::Traced result = test::Traced::killed; result == test::Traced::killed; ++stop) {
        result = test::run_and_kill_at(stop, [&] { return publish_one(directory_.path(), "k"); });
        if (result == test::Traced::not_allowed) GTEST_SKIP() << "this machine allows no ptrace";
        SCOPED_TRACE(fmt::format("killed at stop {}", stop));
        // The next process has the right kernel after one compile at most, waits for nobody, and finds the entries of before.
        int created = 0;
        ArtifactCache next({.directory = directory_.path(), .lock_wait = std::chrono::hours(1)});
        EXPECT_EQ(payload_text(*next.get_or_create(key_of("k"), [&] { return ++created, artifact_of("k"); })), "k");
        EXPECT_LE(created, 1);
        EXPECT_EQ(next.statistics().disk_faults, 0);
        created = 0;
        EXPECT_EQ(fresh_get(key_of("k"), created), "k");
        EXPECT_EQ(fresh_get(key_of("earlier"), created), "earlier");
        EXPECT_EQ(created, 0);
        fs::remove(entry_path(key_of("k")));
        (void)clean_up(directory_.path(), ~0ULL);
    }
    EXPECT_GT(stop, 20);  // it did see the system calls
    EXPECT_EQ(warnings(), 0);
}

TEST_F(FaultsTest, SixtyFourProcessesOnOneKey_OneCompile) {
    const fs::path counter = directory_.path() / "creates";
    int gate[2];
    ASSERT_EQ(::pipe(gate), 0);
    std::vector<pid_t> children;
    for (int i = 0; i < 64; ++i) {
        const pid_t child = ::fork();
        if (child == 0) {
            char byte = 0;
            ::close(gate[1]);
            (void)!::read(gate[0], &byte, 1);  // all start when it closes
            ArtifactCache cache({.directory = directory_.path(), .lock_wait = std::chrono::minutes(10)});
            const auto artifact = cache.get_or_create(key_of("k"), [&] {
                std::ofstream(counter, std::ios::app) << "x" << std::flush;
                std::this_thread::sleep_for(std::chrono::milliseconds(100));
                return artifact_of("p");
            });
            ::_exit(payload_text(*artifact) == "p" && cache.statistics().disk_faults == 0 ? 0 : 1);
        }
        children.push_back(child);
    }
    ::close(gate[0]);
    ::close(gate[1]);
    for (const pid_t child : children) {
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    EXPECT_EQ(test::read_file(counter), "x");
    EXPECT_EQ(read_statistics(directory_.path()).created, 1);
}

TEST_F(FaultsTest, ProcessesOnManyKeysWhileOthersCleanUp_AlwaysTheRightKernel) {
    std::vector<pid_t> children;
    for (int i = 0; i < 6; ++i) {
        const pid_t child = ::fork();
        if (child == 0) {
            for (int round = 0; round < 60; ++round) {
                if (i == 0) {
                    (void)clean_up(directory_.path(), round % 3 == 0 ? 0 : 600);
                    continue;
                }
                const std::string name = std::to_string((round * 7 + i) % 8);
                ArtifactCache cache({.directory = directory_.path()});
                if (payload_text(*cache.get_or_create(key_of(name), [&] { return artifact_of(name); })) != name) ::_exit(1);
                if (cache.statistics().disk_faults != 0) ::_exit(2);
            }
            ::_exit(0);
        }
        children.push_back(child);
    }
    for (const pid_t child : children) {
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_TRUE(WIFEXITED(status));
        EXPECT_EQ(WEXITSTATUS(status), 0);
    }
}

TEST_F(FaultsTest, PublishedAtOnceWithoutLocks_LosersOfTheRaceAreRightToo) {
    constexpr int kProcesses = 16;
    int gate[2];
    ASSERT_EQ(::pipe(gate), 0);
    std::vector<pid_t> children;
    for (int i = 0; i < kProcesses; ++i) {
        const pid_t child = ::fork();
        if (child == 0) {
            char byte = 0;
            ::close(gate[1]);
            ArtifactCache cache({.directory = directory_.path(), .lock_wait = std::chrono::milliseconds(0)});
            const auto artifact = cache.get_or_create(key_of("k"), [&] {
                (void)!::read(gate[0], &byte, 1);  // every one is here before the first is published
                return artifact_of("p");
            });
            ::_exit(payload_text(*artifact) == "p" && cache.statistics().disk_faults == 0 && cache.statistics().created == 1 ? 0 : 1);
        }
        children.push_back(child);
    }
    ::close(gate[0]);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ::close(gate[1]);
    for (const pid_t child : children) {
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    ArtifactCache next({.directory = directory_.path()});
    EXPECT_EQ(payload_text(*next.get_or_create(key_of("k"), []() -> Artifact { throw std::runtime_error("it is there"); })), "p");
}

TEST_F(FaultsTest, LockFileOfADeadProcess_IsNobodys) {
    const fs::path lock = directory_.path() / "locks" / key_of("k").hex();
    fs::create_directories(lock.parent_path());
    test::write_file(lock, "");
    ArtifactCache cache({.directory = directory_.path(), .lock_wait = std::chrono::hours(1)});
    EXPECT_EQ(payload_text(*cache.get_or_create(key_of("k"), [] { return artifact_of("p"); })), "p");
    (void)clean_up(directory_.path(), 0);
    EXPECT_FALSE(fs::exists(lock));
}

TEST_F(FaultsTest, LockIsALinkOrAFolder_CompilesHere) {
    const fs::path lock = directory_.path() / "locks" / key_of("k").hex();
    fs::create_directories(lock.parent_path());
    fs::create_symlink("/dev/null", lock);
    int created = 0;
    EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
    fs::remove(lock);
    fs::create_directories(lock);
    fs::remove(entry_path(key_of("k")));
    EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
    EXPECT_EQ(created, 2);
}

void set_times(const fs::path& path, std::int64_t from_now) {
    const timespec at{std::time(nullptr) + from_now, 0};
    const timespec times[2] = {at, at};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW), 0);
}

std::int64_t access_time(const fs::path& path) {
    struct stat status{};
    return ::stat(path.c_str(), &status) == 0 ? status.st_atim.tv_sec : -1;
}

TEST_F(FaultsTest, ClockJumps_EntriesAreUsedAndTimesMended) {
    int created = 0;
    (void)fresh_get(key_of("k"), created);
    const std::int64_t now = std::time(nullptr);
    for (const std::int64_t jump : {-400LL * 86400, -2LL * 3600, 2LL * 3600, 400LL * 86400}) {
        set_times(entry_path(key_of("k")), jump);
        created = 0;
        EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
        EXPECT_EQ(created, 0);
        EXPECT_LT(std::abs(access_time(entry_path(key_of("k"))) - now), 1000) << jump;
    }
    EXPECT_EQ(warnings(), 0);
}

// ── Size ─────────────────────────────────────────

class CleanupTest : public ArtifactCacheTest {
protected:
    void put(const std::string& name, std::int64_t used_from_now, std::size_t bytes = 3000) {
        std::string payload(bytes, '\0');
        unsigned state = 1;
        for (char& byte : payload) byte = static_cast<char>((state = state * 1664525u + 1013904223u) >> 24);  // does not compress
        ArtifactCache cache({.directory = directory_.path()});
        (void)cache.get_or_create(key_of(name), [&] { return artifact_of(payload); });
        set_times(entry_path(key_of(name)), used_from_now);
    }
    [[nodiscard]] bool exists_after_cleanup(const fs::path& path) const {
        (void)clean_up(directory_.path(), ~0ULL);
        return fs::exists(path);
    }
    [[nodiscard]] bool has(const std::string& name) const { return fs::exists(entry_path(key_of(name))); }
};

TEST_F(CleanupTest, BeyondTheLimit_UsedLongestAgoGoFirst) {
    put("oldest", -9000);
    put("old", -8000);
    put("new", -100);
    put("from a wrong clock", 400L * 86400);
    const std::uint64_t each = fs::file_size(entry_path(key_of("old")));
    const CleanupResult nothing = clean_up(directory_.path(), 4 * each);
    EXPECT_EQ(nothing.removed_entries, 0);
    EXPECT_EQ(nothing.kept_bytes, 4 * each);
    const CleanupResult some = clean_up(directory_.path(), 2 * each);
    EXPECT_EQ(some.removed_entries, 2);
    EXPECT_EQ(some.kept_entries, 2);
    EXPECT_EQ(some.removed_bytes, 2 * each);
    EXPECT_FALSE(has("oldest"));
    EXPECT_FALSE(has("old"));
    EXPECT_TRUE(has("new"));
    EXPECT_EQ(clean_up(directory_.path(), 0).kept_entries, 0);
}

TEST_F(CleanupTest, EntryThatIsRead_CountsAsUsed) {
    put("a", -9000);
    put("b", -8000);
    int created = 0;
    (void)fresh_get(key_of("a"), created);
    (void)clean_up(directory_.path(), fs::file_size(entry_path(key_of("a"))));
    EXPECT_TRUE(has("a"));
    EXPECT_FALSE(has("b"));
}

TEST_F(CleanupTest, SmallReferences_GoLast) {
    put("reference", -9000, 10);
    put("a", -100);
    (void)clean_up(directory_.path(), 1000);
    EXPECT_TRUE(has("reference"));
    EXPECT_FALSE(has("a"));
}

TEST_F(CleanupTest, OpenEntry_StaysReadable) {
    put("a", -100);
    const std::string whole = test::read_file(entry_path(key_of("a")));
    std::ifstream reader(entry_path(key_of("a")), std::ios::binary);
    ASSERT_EQ(reader.get(), whole[0]);
    (void)clean_up(directory_.path(), 0);
    EXPECT_FALSE(has("a"));
    std::string rest(std::istreambuf_iterator<char>(reader), {});
    EXPECT_EQ(rest, whole.substr(1));
}

TEST_F(CleanupTest, LeftByDeadProcesses_RemovedWhenOld) {
    put("a", -100);
    const fs::path folder = entry_path(key_of("a")).parent_path();
    for (const char* name : {".temporary.abc", "x.art.corrupt"}) {
        test::write_file(folder / name, "left");
        EXPECT_TRUE(exists_after_cleanup(folder / name)) << "somebody may be at it";
        set_times(folder / name, -3 * 86400);
        EXPECT_FALSE(exists_after_cleanup(folder / name));
        test::write_file(folder / name, "left");
        set_times(folder / name, 3 * 86400);
        EXPECT_FALSE(exists_after_cleanup(folder / name));
    }
    EXPECT_TRUE(has("a"));
}

TEST_F(CleanupTest, LockThatIsHeld_Stays) {
    const fs::path lock = directory_.path() / "locks" / key_of("k").hex();
    ArtifactCache cache({.directory = directory_.path()});
    (void)cache.get_or_create(key_of("k"), [&] {
        EXPECT_TRUE(fs::exists(lock));
        (void)clean_up(directory_.path(), 0);
        EXPECT_TRUE(fs::exists(lock));
        return artifact_of("p");
    });
    (void)clean_up(directory_.path(), 0);
    EXPECT_FALSE(fs::exists(lock));
}

TEST_F(CleanupTest, DirectoryWithALimit_StaysUnderItByItself) {
    ArtifactCache cache({.directory = directory_.path(), .max_bytes = 10'000});
    for (int i = 0; i < 100; ++i) {
        (void)cache.get_or_create(key_of(std::to_string(i)),
                                  [&] { return artifact_of(std::string(900, static_cast<char>('a' + i % 20))); });
    }
    std::uint64_t bytes = 0;
    std::string fault;
    for (const StoredFile& entry : list_entries(directory_.path(), fault)) bytes += entry.bytes;
    EXPECT_GT(bytes, 0u);
    EXPECT_LT(bytes, 20'000u);
}

// ── Statistics of all processes ──────────────────────────────────

TEST_F(ArtifactCacheTest, StatisticsFile_SumsOverProcesses) {
    int created = 0;
    for (int i = 0; i < 3; ++i) (void)fresh_get(key_of("k"), created);
    const CacheStatistics sums = read_statistics(directory_.path());
    EXPECT_EQ(sums.created, 1);
    ASSERT_EQ(sums.tiers.size(), 4u);
    EXPECT_EQ(sums.tiers[0].misses, 3);
    EXPECT_EQ(sums.tiers[1].name, "local");
    EXPECT_EQ(sums.tiers[1].hits, 2);
    EXPECT_EQ(sums.tiers[1].misses, 1);
    EXPECT_EQ(sums.tiers[1].stored, 1);
    EXPECT_EQ(sums.tiers[1].faults, 0);
}

TEST_F(ArtifactCacheTest, StatisticsFileHarmed_BeginsAgain) {
    int created = 0;
    (void)fresh_get(key_of("k"), created);
    for (const std::string& junk :
         {std::string(10'000, '9'), std::string("local.hits -5\ncreated 99999999999999999999999\n"), std::string("\0\0", 2)}) {
        test::write_file(directory_.path() / "statistics", junk);
        (void)fresh_get(key_of("k"), created);
        EXPECT_EQ(read_statistics(directory_.path()).tiers[1].hits, 1);
    }
    EXPECT_EQ(created, 1);
}

}  // namespace
}  // namespace flce
