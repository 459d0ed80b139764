// A file system that fails at any one of a lookup's or a publication's system calls, or from one of them on.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <ctime>

#include "cache/artifact_format.hpp"
#include "cache/key_lock.hpp"
#include "cache/pack_store.hpp"
#include "cache/statistics_file.hpp"
#include "tests/cache/fault_fixture.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::artifact_of;
using test::key_of;
using test::payload_text;

class NetworkFaults : public test::FaultFixture {
protected:
    void publish(const char* name, std::string_view payload) const {
        const auto entry = encode_artifact(key_of(name), artifact_of(payload));
        EXPECT_EQ(DiskStore(directory_.path()).put(key_of(name), entry, Durability::whenever), Kept::yes);
    }
};

TEST_F(NetworkFaults, Publication_RightKernelAndNothingEarlierIsLost) {
    if (!here()) return;
    int created = 0;
    (void)fresh_get(key_of("earlier"), created);
    at_every_call(
        [&] {
            std::error_code ignored;
            fs::remove(entry_path(key_of("k")), ignored);
            created = 0;
        },
        [&] { EXPECT_EQ(fresh_get(key_of("k"), created), "made again"); },
        [&] {
            EXPECT_EQ(created, 1);
            EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
            EXPECT_LE(created, 2);
            created = 0;
            EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
            EXPECT_EQ(fresh_get(key_of("earlier"), created), "made again");
            EXPECT_EQ(created, 0);
        });
}

TEST_F(NetworkFaults, FirstPublicationOfADirectory_RightKernel) {
    if (!here()) return;
    int created = 0;
    at_every_call(
        [&] {
            fs::remove_all(directory_.path());
            created = 0;
        },
        [&] { EXPECT_EQ(fresh_get(key_of("k"), created), "made again"); },
        [&] {
            EXPECT_EQ(created, 1);
            EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
            EXPECT_LE(created, 2);
        });
}

TEST_F(NetworkFaults, Hit_RightKernelWhichStaysPublished) {
    if (!here()) return;
    int created = 0;
    (void)fresh_get(key_of("k"), created);
    at_every_call([&] { created = 0; }, [&] { EXPECT_EQ(fresh_get(key_of("k"), created), "made again"); },
                  [&] {
                      EXPECT_LE(created, 1);
                      created = 0;
                      EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
                      EXPECT_EQ(created, 0);
                  });
}

TEST_F(NetworkFaults, HitThatCountsAsUse_RightKernelWhichStaysPublished) {
    if (!here()) return;
    publish("k", "p");
    std::string got;
    at_every_call(
        [&] {
            const timespec time{std::time(nullptr) - 3 * 3600, 0};
            EXPECT_EQ(::utimensat(AT_FDCWD, entry_path(key_of("k")).c_str(), std::array{time, time}.data(), 0), 0);
        },
        [&] {
            const Lookup found = DiskStore(directory_.path()).get(key_of("k"));
            got = found.artifact ? payload_text(*found.artifact) : "none";
        },
        [&] {
            EXPECT_THAT(got, testing::AnyOf("p", "none"));
            EXPECT_TRUE(DiskStore(directory_.path()).get(key_of("k")).artifact);
        });
}

TEST_F(NetworkFaults, HarmedEntryMovedAside_RightKernelAndNoOtherIsLost) {
    if (!here()) return;
    publish("other", "p");
    most_warnings_ = 3;  // warnings of the harmed entry, which may be looked at twice, and of the file system
    int created = 0;
    at_every_call(
        [&] {
            publish("k", "harmed");
            fs::resize_file(entry_path(key_of("k")), fs::file_size(entry_path(key_of("k"))) - 1);
        },
        [&] { EXPECT_EQ(fresh_get(key_of("k"), created), "made again"); },
        [&] {
            EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
            created = 0;
            EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
            EXPECT_EQ(fresh_get(key_of("other"), created), "p");
            EXPECT_EQ(created, 0);
        });
}

TEST_F(NetworkFaults, PublishedBetweenLookingAndLocking_NotMadeAgain) {
    if (!here()) return;
    before_call("/locks", [&] { publish("k", "theirs"); });
    int created = 0;
    EXPECT_EQ(fresh_get(key_of("k"), created), "theirs");
    EXPECT_EQ(created, 0);
    const TierStatistics local = read_statistics(directory_.path()).tiers.at(1);
    EXPECT_EQ(local.misses, 1);
    EXPECT_EQ(local.hits, 1);
}

TEST_F(NetworkFaults, PublishedWhileAHarmedEntryIsMovedAside_Stays) {
    if (!here()) return;
    const fs::path path = entry_path(key_of("k"));
    const auto get = [&] {
        const Lookup found = DiskStore(directory_.path()).get(key_of("k"));
        return found.artifact ? payload_text(*found.artifact) : "none";
    };
    publish("k", "harmed");
    fs::resize_file(path, fs::file_size(path) - 1);
    before_call(".art", [&] { publish("k", "theirs"); });
    EXPECT_EQ(get(), "none");
    EXPECT_FALSE(fs::exists(path.string() + ".corrupt"));
    EXPECT_EQ(get(), "theirs");

    // And again while that one is on its way back.
    fs::resize_file(path, fs::file_size(path) - 1);
    before_call(".art", [&] {
        publish("k", "theirs");
        before_call("/entry", [&] { publish("k", "the newest"); });
    });
    EXPECT_EQ(get(), "none");
    EXPECT_EQ(get(), "the newest");
    for (const auto& file : fs::directory_iterator(path.parent_path())) EXPECT_EQ(file.path(), path);
}

TEST_F(NetworkFaults, DirectoryOnNfs_NoLockIsAskedForThereSoThatNoneHangs) {
    if (!here()) return;
    const std::string shared = fs::canonical(directory_.path());
    int created = 0;
    (void)fresh_get(key_of("local"), created);
    EXPECT_GT(nfs_(shared.c_str()), 0);
    EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
    EXPECT_EQ(nfs_(nullptr), 0);
    EXPECT_EQ(created, 2);
    EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
    EXPECT_EQ(created, 2);
    EXPECT_EQ(warnings(), 0);
}

// Ranks of one machine compile once, wherever their cache lies.
TEST_F(NetworkFaults, DirectoryOnNfs_OneBuilderOnThisMachine) {
    if (!here()) return;
    const std::string shared = fs::canonical(directory_.path());
    nfs_(shared.c_str());
    const auto lock = [&](const char* name, int wait) { return KeyLock(directory_.path(), key_of(name), std::chrono::milliseconds(wait)); };
    {
        const KeyLock theirs = lock("k", 1000);
        EXPECT_TRUE(theirs.held());
        const KeyLock mine = lock("k", 50);
        EXPECT_FALSE(mine.held());
        EXPECT_TRUE(mine.waited());
        EXPECT_TRUE(lock("another", 50).held());
    }
    EXPECT_TRUE(lock("k", 50).held());
    // A process that has died holds nothing, and nothing is left lying about.
    const pid_t child = ::fork();
    if (child == 0) {
        const KeyLock killed = lock("k", 1000);
        ::kill(::getpid(), SIGKILL);
    }
    ::waitpid(child, nullptr, 0);
    EXPECT_TRUE(lock("k", 50).held());
    for (const auto& file : fs::directory_iterator(fs::temp_directory_path() / fmt::format("flce-locks-{}", ::geteuid()))) {
        EXPECT_FALSE(file.path().filename().string().starts_with(key_of("k").hex())) << file.path();
    }
    // Nothing is locked either where others could hold the lock for ever.
    const fs::path locks = fs::temp_directory_path() / fmt::format("flce-locks-{}", ::geteuid());
    fs::permissions(locks, fs::perms::all);
    EXPECT_FALSE(lock("k", 50).held());
    fs::permissions(locks, fs::perms::owner_all);
    EXPECT_EQ(nfs_(nullptr), 0);
}

TEST_F(NetworkFaults, DirectoryOnNfs_CountedOnThisMachine) {
    if (!here()) return;
    const test::TemporaryDirectory machine;
    ::setenv("TMPDIR", machine.path().c_str(), 1);
    const std::string shared = fs::canonical(directory_.path());
    (void)nfs_(shared.c_str());
    int created = 0;
    const auto get = [&] {
        ArtifactCache cache({.directory = directory_.path(), .counts_on_machine = true});
        return payload_text(*cache.get_or_create(key_of("k"), [&] { return ++created, artifact_of("p"); }));
    };
    for (int i = 0; i < 2; ++i) EXPECT_EQ(get(), "p");
    EXPECT_EQ(nfs_(nullptr), 0);
    EXPECT_EQ(created, 1);
    EXPECT_EQ(read_machine_statistics().sums.created, 1);
    EXPECT_EQ(read_machine_statistics().sums.tiers.at(1).hits, 1);
    // Whatever fails there, nobody notices, and nothing is counted twice.
    at_every_call([&] { fs::remove_all(read_machine_statistics().folder); },
                  [&] {
                      ArtifactCache cache({.counts_on_machine = true});
                      EXPECT_EQ(payload_text(*cache.get_or_create(key_of("k"), [] { return artifact_of("p"); })), "p");
                  },
                  [&] {
                      EXPECT_LE(read_machine_statistics().sums.created, 1);
                      EXPECT_EQ(warnings(), 0) << log_.text();
                  });
}

TEST_F(NetworkFaults, PackHit_RightKernel) {
    if (!here()) return;
    const fs::path pack = directory_.path() / "kernels.flcepack";
    write_pack(pack, {{key_of("k"), encode_artifact(key_of("k"), artifact_of("packed"))}});
    std::string payload;
    int created = 0;
    at_every_call([&] { created = 0; },
                  [&] {
                      ArtifactCache cache({.further = {std::make_shared<PackStore>(std::vector{pack}, TrustedKeys())}});
                      payload = payload_text(*cache.get_or_create(key_of("k"), [&] { return ++created, artifact_of("packed"); }));
                  },
                  [&] {
                      EXPECT_EQ(payload, "packed");
                      EXPECT_LE(created, 1);
                      EXPECT_EQ(PackFile::open(pack, {})->index().size(), 1u);
                  });
}

}  // namespace
}  // namespace flce
