// A file system that fails at any one of a lookup's or a publication's system calls, or from one of them on: tests/support/fault_shim.c, preloaded.
#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <functional>

#include "cache/artifact_format.hpp"
#include "cache/key_lock.hpp"
#include "cache/pack_store.hpp"
#include "cache/statistics_file.hpp"
#include "tests/cache/cache_fixture.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::artifact_of;
using test::key_of;
using test::payload_text;

/// ESTALE and EBUSY are NFS's, ENOENT is what another client's rename looks like, ENOSPC a full disk, EIO a broken one.
constexpr std::array kErrors{ESTALE, EBUSY, ENOENT, ENOSPC, EIO};

class NetworkFaults : public test::ArtifactCacheTest {
protected:
    void SetUp() override {
        if (*FLCE_SANITIZE != '\0') GTEST_SKIP() << "sanitizers stand between the same calls";
        arm_ = reinterpret_cast<void (*)(int, int, int)>(::dlsym(RTLD_DEFAULT, "flce_fault_arm"));
        disarm_ = reinterpret_cast<int (*)()>(::dlsym(RTLD_DEFAULT, "flce_fault_disarm"));
        before_ = reinterpret_cast<void (*)(const char*, void (*)())>(::dlsym(RTLD_DEFAULT, "flce_fault_before"));
        nfs_ = reinterpret_cast<int (*)(const char*)>(::dlsym(RTLD_DEFAULT, "flce_fault_nfs"));
        if (arm_ == nullptr && !fs::exists(FLCE_FAULT_SHIM)) GTEST_SKIP() << "there is no " << FLCE_FAULT_SHIM;
    }

    /// Whether this is the process with the shim. Elsewhere: runs the same test in one, and its result is this one's.
    bool here() {
        if (arm_ != nullptr && disarm_ != nullptr) return true;
        const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
        const std::string filter = fmt::format("--gtest_filter={}.{}", test->test_suite_name(), test->name());
        const pid_t child = ::fork();
        if (child == 0) {
            ::setenv("LD_PRELOAD", FLCE_FAULT_SHIM, 1);
            if (::access("/dev/shm", W_OK) == 0) ::setenv("TMPDIR", "/dev/shm", 1);  // where syncing thousands of times takes no time
            ::execl("/proc/self/exe", "test_cache", filter.c_str(), nullptr);
            ::_exit(127);
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the test failed with the shim; what it says is above";
        return false;
    }

    /// Calls `attempt` with a failure at its first, second, … and last system call, for every error, once and for good; `after` each time.
    void at_every_call(const std::function<void()>& before, const std::function<void()>& attempt, const std::function<void()>& after) {
        before();
        arm_(-1, 0, 0);
        attempt();
        const int calls = disarm_();
        ASSERT_GT(calls, 3);  // the shim is between
        after();
        for (const int error : kErrors) {
            for (const bool sticky : {false, true}) {
                for (int nth = 0; nth < calls; ++nth) {
                    SCOPED_TRACE(fmt::format("{} at call {}{}", ::strerrorname_np(error), nth, sticky ? " and later" : ""));
                    before();
                    log_.clear();
                    arm_(nth, error, sticky ? 1 : 0);
                    attempt();
                    (void)disarm_();
                    EXPECT_LE(warnings(), 1) << log_.text();
                    after();
                }
            }
        }
    }

    /// Does `then` in this thread right before its next mkdir, rename or link of a path that ends so.
    void before_call(const char* end_of_path, std::function<void()> then) {
        then_ = std::move(then);
        before_(end_of_path, [] {
            const auto now = std::move(then_);  // which may name what is to be done before a later call
            now();
        });
    }
    void publish(const char* name, std::string_view payload) const {
        const auto entry = encode_artifact(key_of(name), artifact_of(payload));
        EXPECT_EQ(DiskStore(directory_.path()).put(key_of(name), entry, Durability::whenever), Kept::yes);
    }

    static inline std::function<void()> then_;
    void (*before_)(const char*, void (*)()) = nullptr;
    void (*arm_)(int, int, int) = nullptr;
    int (*disarm_)() = nullptr;
    int (*nfs_)(const char*) = nullptr;
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
    // Nor is anything locked where others could hold it for ever.
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
