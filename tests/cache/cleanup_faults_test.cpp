// Cleaning up on a file system that fails at any one system call, or from one of them on.
#include <fcntl.h>
#include <sys/stat.h>

#include <array>
#include <ctime>

#include "cache/artifact_format.hpp"
#include "cache/cleanup.hpp"
#include "tests/cache/fault_fixture.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::artifact_of;
using test::key_of;

/// A directory with entries used long ago and lately, and what dead processes leave.
class CleanupFaults : public test::FaultFixture {
protected:
    static constexpr std::array kWithin{"new", "newest", "reference"};
    static constexpr std::array kBeyond{"oldest", "old"};

    void put(const char* name, std::int64_t used_from_now, std::size_t bytes = 3000) const {
        std::string payload(bytes, '\0');
        unsigned state = 1;
        for (char& byte : payload) byte = static_cast<char>((state = state * 1664525u + 1013904223u) >> 24);  // does not compress
        const auto entry = encode_artifact(key_of(name), artifact_of(payload));
        EXPECT_EQ(DiskStore(directory_.path()).put(key_of(name), entry, Durability::whenever), Kept::yes);
        set_time(entry_path(key_of(name)), used_from_now);
    }
    static void set_time(const fs::path& path, std::int64_t from_now) {
        const timespec time{std::time(nullptr) + from_now, 0};
        EXPECT_EQ(::utimensat(AT_FDCWD, path.c_str(), std::array{time, time}.data(), 0), 0);
    }
    void leave(const fs::path& path) const {
        fs::create_directories(path.parent_path());
        test::write_file(path, "left");
        set_time(path, -3 * 86400);
    }
    [[nodiscard]] fs::path shard() const { return entry_path(key_of("new")).parent_path(); }

    void fill() {
        fs::remove_all(directory_.path() / "artifacts");
        fs::remove_all(directory_.path() / "locks");
        put("oldest", -9000);
        put("old", -8000);
        put("reference", -7000, 10);
        put("new", -100);
        put("newest", -50);
        leave(shard() / ".temporary.abc");
        leave(shard() / "x.art.corrupt");
        leave(shard() / ".moved.abc" / "entry");
        set_time(shard() / ".moved.abc", -3 * 86400);
        leave(directory_.path() / "locks" / key_of("old").hex());
        limit_ = 2 * fs::file_size(entry_path(key_of("new"))) + fs::file_size(entry_path(key_of("reference")));
    }
    /// Without reading it, which would count as use.
    [[nodiscard]] bool has(const char* name) const { return fs::exists(entry_path(key_of(name))); }
    void expect_what_is_within_the_limit() const {
        for (const char* name : kWithin) EXPECT_TRUE(has(name)) << name;
    }
    void expect_mended() {
        const CleanupResult mended = clean_up(directory_.path(), limit_);
        EXPECT_EQ(mended.fault, "");
        EXPECT_EQ(mended.kept_entries, 3);
        EXPECT_EQ(mended.kept_bytes, limit_);
        for (const char* name : kBeyond) EXPECT_FALSE(has(name)) << name;
        EXPECT_FALSE(fs::exists(shard() / ".temporary.abc"));
        EXPECT_FALSE(fs::exists(directory_.path() / "locks" / key_of("old").hex()));
        for (const char* name : kWithin) {
            std::string why;
            EXPECT_TRUE(DiskStore(directory_.path()).inspect(key_of(name), why).artifact) << name << ": " << why;
        }
    }

    std::uint64_t limit_ = 0;
};

TEST_F(CleanupFaults, AtEveryCall_NothingWithinTheLimitIsLostAndTheNextMends) {
    if (!here()) return;
    CleanupResult result;
    at_every_call([&] { fill(); }, [&] { result = clean_up(directory_.path(), limit_); },
                  [&] {
                      expect_what_is_within_the_limit();
                      EXPECT_FALSE(result.busy);
                      // The result's counts are right, or the result says that it does not know.
                      std::int64_t there = 3;
                      for (const char* name : kBeyond) there += has(name) ? 1 : 0;
                      // ENOENT alone: a file that is not there is not missing.
                      if (result.fault.empty() && injected_ != ENOENT) {
                          EXPECT_EQ(result.kept_entries, there);
                          EXPECT_EQ(result.removed_entries, 5 - there);
                      }
                      expect_mended();
                  });
}

TEST_F(CleanupFaults, OnNfs_NothingWithinTheLimitIsLost) {
    if (!here()) return;
    const std::string shared = fs::canonical(directory_.path());
    at_every_call(
        [&] {
            fill();
            (void)nfs_(shared.c_str());
        },
        [&] { (void)clean_up(directory_.path(), limit_); },
        [&] {
            EXPECT_EQ(nfs_(nullptr), 0);
            expect_what_is_within_the_limit();
            expect_mended();
        });
}

// An entry that an open file keeps from going must not cost a newer one its place.
TEST_F(CleanupFaults, OldestCannotBeRemoved_NewerOnesStay) {
    if (!here()) return;
    fill();
    EXPECT_EQ(clean_up(directory_.path(), ~0ULL).fault, "");  // removes files of dead processes
    arm_(-1, 0, 0);
    (void)clean_up(directory_.path(), ~0ULL);
    const int before_removing = disarm_() - 1;  // the last call lets go of the turn
    arm_(before_removing, EBUSY, 0);
    const CleanupResult result = clean_up(directory_.path(), limit_);
    (void)disarm_();
    EXPECT_TRUE(has("oldest"));
    EXPECT_FALSE(has("old"));
    expect_what_is_within_the_limit();
    EXPECT_NE(result.fault.find("cannot be removed"), std::string::npos) << result.fault;
    EXPECT_EQ(result.removed_entries, 1);
    EXPECT_EQ(result.kept_entries, 4);
    EXPECT_GT(result.kept_bytes, limit_);
}

TEST_F(CleanupFaults, Listing_AllEntriesOrAFault) {
    if (!here()) return;
    std::vector<StoredFile> listed;
    std::string fault;
    at_every_call([&] { fill(); }, [&] { listed = list_entries(directory_.path(), fault); },
                  [&] {
                      if (injected_ != ENOENT) {
                          EXPECT_TRUE(listed.size() == 5 || !fault.empty()) << listed.size();
                      }
                  });
}

}  // namespace
}  // namespace flce
