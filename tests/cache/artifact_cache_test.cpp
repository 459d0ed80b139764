#include "cache/artifact_cache.hpp"

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <barrier>
#include <csignal>
#include <thread>

#include "cache/artifact_format.hpp"
#include "cache/disk_store.hpp"
#include "cache/key_lock.hpp"
#include "tests/cache/cache_fixture.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::artifact_of;
using test::ArtifactCacheTest;
using test::key_of;
using test::payload_text;
using testing::HasSubstr;

TEST_F(ArtifactCacheTest, FirstCall_CreatesThenMemoryThenDisk) {
    bool created = false;
    {
        ArtifactCache cache({.directory = directory_.path()});
        const auto first = cache.get_or_create(key_of("k"), [] { return artifact_of("payload"); }, &created);
        EXPECT_TRUE(created);
        const auto second = cache.get_or_create(key_of("k"), []() -> Artifact { throw std::logic_error("not again"); }, &created);
        EXPECT_FALSE(created);
        EXPECT_EQ(first, second);
        EXPECT_EQ(cache.statistics().created, 1);
        EXPECT_EQ(cache.statistics().memory_hits, 1);
    }
    ArtifactCache cache({.directory = directory_.path()});
    const auto third = cache.get_or_create(key_of("k"), []() -> Artifact { throw std::logic_error("not again"); }, &created);
    EXPECT_EQ(payload_text(*third), "payload");
    EXPECT_EQ(third->metadata, R"({"kind":"test"})");
    EXPECT_FALSE(created);
    EXPECT_EQ(cache.statistics().disk_hits, 1);
    EXPECT_EQ(cache.statistics().disk_faults, 0);
    EXPECT_EQ(warnings(), 0);
}

TEST_F(ArtifactCacheTest, NobodyHoldsTheArtifact_MemoryForgetsIt) {
    ArtifactCache cache({});
    int created = 0;
    for (int i = 0; i < 2; ++i) (void)cache.get_or_create(key_of("k"), [&] { return ++created, artifact_of("p"); });
    EXPECT_EQ(created, 2);
}

TEST_F(ArtifactCacheTest, Failure_ReachesAllWaitersAndIsNotRemembered) {
    ArtifactCache cache({.directory = directory_.path()});
    std::atomic<int> attempts{0};
    std::atomic<int> failures{0};
    std::barrier start(8);
    std::vector<std::jthread> threads;
    for (int i = 0; i < 8; ++i) {
        threads.emplace_back([&] {
            start.arrive_and_wait();
            try {
                (void)cache.get_or_create(key_of("k"), [&]() -> Artifact {
                    ++attempts;
                    std::this_thread::sleep_for(std::chrono::milliseconds(200));
                    throw std::runtime_error("compiler is ill");
                });
            } catch (const std::runtime_error& error) {
                if (std::string(error.what()) == "compiler is ill") ++failures;
            }
        });
    }
    threads.clear();
    EXPECT_EQ(failures, 8);
    EXPECT_LT(attempts, 8);
    EXPECT_EQ(payload_text(*cache.get_or_create(key_of("k"), [] { return artifact_of("well again"); })), "well again");
    EXPECT_EQ(cache.statistics().created, 1);
}

TEST_F(ArtifactCacheTest, SixteenThreads_OneCreate) {
    ArtifactCache cache({.directory = directory_.path()});
    std::atomic<int> creates{0};
    std::atomic<int> told_created{0};
    std::barrier start(16);
    std::vector<std::shared_ptr<const Artifact>> results(16);
    std::vector<std::jthread> threads;
    for (int i = 0; i < 16; ++i) {
        threads.emplace_back([&, i] {
            start.arrive_and_wait();
            bool created = false;
            results[i] = cache.get_or_create(
                key_of("k"),
                [&] {
                    ++creates;
                    std::this_thread::sleep_for(std::chrono::milliseconds(50));
                    return artifact_of("p");
                },
                &created);
            told_created += created ? 1 : 0;
        });
    }
    threads.clear();
    EXPECT_EQ(creates, 1);
    EXPECT_GE(told_created, 1);
    for (const auto& result : results) EXPECT_EQ(result, results[0]);
}

TEST_F(ArtifactCacheTest, CreateAsksForAnotherKey_Works) {
    ArtifactCache cache({.directory = directory_.path()});
    const auto outer = cache.get_or_create(key_of("outer"), [&] {
        return artifact_of("outer of " + payload_text(*cache.get_or_create(key_of("inner"), [] { return artifact_of("inner"); })));
    });
    EXPECT_EQ(payload_text(*outer), "outer of inner");
}

TEST_F(ArtifactCacheTest, ManyThreadsManyKeys_EachGetsItsOwn) {
    ArtifactCache cache({.directory = directory_.path()});
    std::vector<std::jthread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 8; ++t) {
        threads.emplace_back([&, t] {
            for (int i = 0; i < 200; ++i) {
                const std::string name = std::to_string((i * 7 + t) % 40);
                if (payload_text(*cache.get_or_create(key_of(name), [&] { return artifact_of(name); })) != name) ++wrong;
            }
        });
    }
    threads.clear();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(cache.statistics().disk_faults, 0);
}

TEST_F(ArtifactCacheTest, EntryTruncatedAtEveryByte_QuarantinedAndMadeAgain) {
    int created = 0;
    const CacheKey key = key_of("k");
    (void)fresh_get(key, created);
    const std::string whole = test::read_file(entry_path(key));
    ASSERT_GT(whole.size(), 80u);
    for (std::size_t size = 0; size < whole.size(); ++size) {
        test::write_file(entry_path(key), whole.substr(0, size));
        created = 0;
        EXPECT_EQ(fresh_get(key, created), "made again");
        EXPECT_EQ(created, 1) << "truncated to " << size;
        EXPECT_EQ(fs::file_size(entry_path(key).string() + ".corrupt"), size);
        EXPECT_EQ(test::read_file(entry_path(key)), whole);
    }
    EXPECT_EQ(warnings(), static_cast<int>(whole.size()));
}

TEST_F(ArtifactCacheTest, EntryWithAnyByteChanged_QuarantinedAndMadeAgain) {
    int created = 0;
    const CacheKey key = key_of("k");
    (void)fresh_get(key, created);
    const std::string whole = test::read_file(entry_path(key));
    for (std::size_t i = 0; i < whole.size(); ++i) {
        std::string harmed = whole;
        harmed[i] = static_cast<char>(harmed[i] ^ (1 << (i % 8)));
        test::write_file(entry_path(key), harmed);
        created = 0;
        EXPECT_EQ(fresh_get(key, created), "made again");
        EXPECT_EQ(created, 1) << "byte " << i;
    }
}

TEST_F(ArtifactCacheTest, EntryOfAnotherKeyUnderThisName_NeverUsed) {
    int created = 0;
    (void)fresh_get(key_of("a"), created);
    fs::create_directories(entry_path(key_of("b")).parent_path());
    fs::copy_file(entry_path(key_of("a")), entry_path(key_of("b")));
    created = 0;
    ArtifactCache cache({.directory = directory_.path()});
    EXPECT_EQ(payload_text(*cache.get_or_create(key_of("b"), [&] { return ++created, artifact_of("b"); })), "b");
    EXPECT_EQ(created, 1);
    EXPECT_EQ(cache.statistics().disk_faults, 1);
    EXPECT_THAT(log_.text(), HasSubstr("another key"));
}

TEST_F(ArtifactCacheTest, EntryIsAHugeSparseFileFifoOrDirectory_MadeAgain) {
    const CacheKey key = key_of("k");
    const fs::path path = entry_path(key);
    const std::vector<std::function<void()>> harms = {
        [&] { test::write_file(path, ""), fs::resize_file(path, kMaxEntryBytes + 1); },
        [&] { ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0); },
        [&] { fs::create_directory(path), test::write_file(path / "x", "y"); },
        [&] { fs::create_symlink(path, path); },
    };
    for (const auto& harm : harms) {
        fs::remove_all(path);
        fs::remove_all(path.string() + ".corrupt");
        fs::create_directories(path.parent_path());
        harm();
        int created = 0;
        EXPECT_EQ(fresh_get(key, created), "made again");
        EXPECT_EQ(created, 1);
    }
}

TEST_F(ArtifactCacheTest, DirectoryMissing_MadePrivate) {
    const fs::path nested = directory_.path() / "a" / "b";
    ArtifactCache cache({.directory = nested});
    (void)cache.get_or_create(key_of("k"), [] { return artifact_of("p"); });
    EXPECT_EQ(fs::status(nested).permissions() & fs::perms::mask, fs::perms::owner_all);
    EXPECT_TRUE(fs::exists(DiskStore(nested).path_of(key_of("k"))));
    // No temporary is left behind.
    for (const auto& file : fs::directory_iterator(DiskStore(nested).path_of(key_of("k")).parent_path())) {
        EXPECT_EQ(file.path().extension(), ".art");
    }
}

TEST_F(ArtifactCacheTest, DirectoryRemovedWhileInUse_WrittenAgain) {
    ArtifactCache cache({.directory = directory_.path() / "cache"});
    (void)cache.get_or_create(key_of("a"), [] { return artifact_of("p"); });
    fs::remove_all(directory_.path() / "cache");
    (void)cache.get_or_create(key_of("b"), [] { return artifact_of("p"); });
    EXPECT_TRUE(fs::exists(DiskStore(directory_.path() / "cache").path_of(key_of("b"))));
    EXPECT_EQ(cache.statistics().disk_faults, 0);
}

TEST_F(ArtifactCacheTest, DirectoryIsAFile_SkippedWithOneWarning) {
    test::write_file(directory_.path() / "file", "x");
    ArtifactCache cache({.directory = directory_.path() / "file"});
    for (const char* name : {"a", "b", "c"}) (void)cache.get_or_create(key_of(name), [] { return artifact_of("p"); });
    EXPECT_EQ(warnings(), 1);
    EXPECT_EQ(cache.statistics().created, 3);
    EXPECT_GE(cache.statistics().disk_faults, 1);
}

TEST_F(ArtifactCacheTest, DirectoryOthersMayWrite_RefusedWithOneWarning) {
    int created = 0;
    (void)fresh_get(key_of("k"), created);
    for (const auto loose : {fs::perms::group_write, fs::perms::others_write}) {
        fs::permissions(directory_.path(), fs::perms::owner_all | loose);
        log_.clear();
        ArtifactCache cache({.directory = directory_.path()});
        EXPECT_EQ(payload_text(*cache.get_or_create(key_of("k"), [] { return artifact_of("mine"); })), "mine");
        (void)cache.get_or_create(key_of("l"), [] { return artifact_of("mine"); });
        EXPECT_FALSE(fs::exists(entry_path(key_of("l"))));
        EXPECT_EQ(warnings(), 1);
        EXPECT_THAT(log_.text(), HasSubstr("chmod go-w"));
    }
}

TEST_F(ArtifactCacheTest, DirectoryInItThatOthersMayWrite_NotUsedWithOneWarning) {
    int created = 0;
    (void)fresh_get(key_of("k"), created);
    const fs::path shard = entry_path(key_of("k")).parent_path();
    for (const fs::path& folder : {shard, shard.parent_path()}) {
        fs::permissions(folder, fs::perms::others_write, fs::perm_options::add);
        log_.clear();
        ArtifactCache cache({.directory = directory_.path()});
        for (int i = 0; i < 2; ++i) {
            EXPECT_EQ(payload_text(*cache.get_or_create(key_of("k"), [] { return artifact_of("mine"); })), "mine");
        }
        EXPECT_EQ(warnings(), 1) << log_.text();
        EXPECT_THAT(log_.text(), AllOf(HasSubstr(folder.string() + " is not used"), HasSubstr("chmod go-w")));
        std::string why;
        EXPECT_TRUE(DiskStore(directory_.path()).inspect(key_of("k"), why).fault);
        EXPECT_THAT(why, HasSubstr("chmod go-w"));
        fs::permissions(folder, fs::perms::owner_all);
        created = 0;
        EXPECT_EQ(fresh_get(key_of("k"), created), "made again");
        EXPECT_EQ(created, 0) << "what was there has been touched";
    }
}

TEST_F(ArtifactCacheTest, LocksThatOthersMayWrite_NoneIsTakenWithOneWarning) {
    // Somebody who has taken one for good, as anybody may who can write there.
    const KeyLock theirs(directory_.path(), key_of("k"), std::chrono::milliseconds(200));
    ASSERT_TRUE(theirs.held());
    fs::permissions(directory_.path() / "locks", fs::perms::others_write, fs::perm_options::add);
    for (const char* name : {"k", "l"}) {
        ArtifactCache cache({.directory = directory_.path(), .lock_wait = std::chrono::milliseconds(200)});
        EXPECT_EQ(payload_text(*cache.get_or_create(key_of(name), [] { return artifact_of("mine"); })), "mine");
        EXPECT_FALSE(KeyLock(directory_.path(), key_of(name), std::chrono::milliseconds(200)).held());
    }
    EXPECT_EQ(warnings(), 1) << log_.text();
    EXPECT_THAT(log_.text(), HasSubstr("no locks are taken"));
    int created = 0;
    EXPECT_EQ(fresh_get(key_of("l"), created), "mine");
}

TEST_F(ArtifactCacheTest, RefusedDirectoryOpenedManyTimes_OneWarning) {
    fs::permissions(directory_.path(), fs::perms::all);
    int created = 0;
    for (int i = 0; i < 3; ++i) (void)fresh_get(key_of("k"), created);
    EXPECT_EQ(created, 3);
    EXPECT_EQ(warnings(), 1) << log_.text();
}

TEST_F(ArtifactCacheTest, DirectoryOfAnotherUser_RefusedWithOneWarning) {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root to give a directory away";
    ASSERT_EQ(::chown(directory_.path().c_str(), 12345, 12345), 0);
    ArtifactCache cache({.directory = directory_.path()});
    (void)cache.get_or_create(key_of("k"), [] { return artifact_of("p"); });
    EXPECT_EQ(warnings(), 1);
    EXPECT_THAT(log_.text(), HasSubstr("owned by user 12345"));
    EXPECT_FALSE(fs::exists(entry_path(key_of("k"))));
}

// Runs `body` in a child as an ordinary user where the tests run as root, to whom no directory is read-only.
int in_ordinary_process(const fs::path& directory, const std::function<int()>& body) {
    const pid_t child = ::fork();
    if (child == 0) {
        if (::geteuid() == 0 && (::chown(directory.c_str(), 65534, 65534) != 0 || ::setuid(65534) != 0)) ::_exit(100);
        ::_exit(body());
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 200;
}

TEST_F(ArtifactCacheTest, DirectoryReadOnly_SkippedNeverAnError) {
    fs::permissions(directory_.path(), fs::perms::owner_read | fs::perms::owner_exec);
    EXPECT_EQ(in_ordinary_process(directory_.path(),
                                  [&] {
                                      ArtifactCache cache({.directory = directory_.path()});
                                      for (const char* name : {"a", "b"}) {
                                          if (payload_text(*cache.get_or_create(key_of(name), [&] { return artifact_of(name); })) != name)
                                              return 1;
                                      }
                                      if (warnings() != 1) return 2;
                                      return cache.statistics().disk_faults >= 1 ? 0 : 3;
                                  }),
              0);
}

TEST_F(ArtifactCacheTest, DirectoryFull_SkippedWithOneWarning) {
    // A file-size limit stands in for a full disk: write fails after a few bytes, as with ENOSPC.
    EXPECT_EQ(in_ordinary_process(directory_.path(),
                                  [&] {
                                      ::signal(SIGXFSZ, SIG_IGN);
                                      const rlimit limit{64, 64};
                                      if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
                                      ArtifactCache cache({.directory = directory_.path()});
                                      for (const char* name : {"a", "b"}) {
                                          if (payload_text(*cache.get_or_create(key_of(name), [&] { return artifact_of(name); })) != name)
                                              return 2;
                                          for (const auto& file : fs::directory_iterator(entry_path(key_of(name)).parent_path()))
                                              return file.exists() ? 3 : 4;
                                      }
                                      if (warnings() != 1) return 5;
                                      return cache.statistics().disk_faults == 2 ? 0 : 6;
                                  }),
              0);
}

TEST_F(ArtifactCacheTest, TwoProcesses_OneCompileBothRight) {
    const fs::path counter = directory_.path() / "creates";
    std::vector<pid_t> children;
    for (int i = 0; i < 4; ++i) {
        const pid_t child = ::fork();
        if (child == 0) {
            ArtifactCache cache({.directory = directory_.path()});
            const auto artifact = cache.get_or_create(key_of("k"), [&] {
                std::ofstream(counter, std::ios::app) << "x" << std::flush;
                std::this_thread::sleep_for(std::chrono::milliseconds(300));
                return artifact_of("p");
            });
            ::_exit(payload_text(*artifact) == "p" && cache.statistics().disk_faults == 0 ? 0 : 1);
        }
        children.push_back(child);
    }
    for (const pid_t child : children) {
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    EXPECT_EQ(test::read_file(counter), "x");
}

TEST_F(ArtifactCacheTest, OtherProcessHoldsTheLockTooLong_CompilesPrivately) {
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const pid_t child = ::fork();
    if (child == 0) {
        ArtifactCache cache({.directory = directory_.path()});
        (void)cache.get_or_create(key_of("k"), [&]() -> Artifact {
            (void)!::write(ready[1], "r", 1);
            std::this_thread::sleep_for(std::chrono::seconds(60));
            return {};
        });
        ::_exit(0);
    }
    char byte = 0;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
    ArtifactCache cache({.directory = directory_.path(), .lock_wait = std::chrono::milliseconds(100)});
    EXPECT_EQ(payload_text(*cache.get_or_create(key_of("k"), [] { return artifact_of("mine"); })), "mine");
    // A killed builder leaves no lock behind.
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    fs::remove(entry_path(key_of("k")));
    ArtifactCache next({.directory = directory_.path(), .lock_wait = std::chrono::seconds(20)});
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(payload_text(*next.get_or_create(key_of("k"), [] { return artifact_of("next"); })), "next");
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    ::close(ready[0]);
    ::close(ready[1]);
}

TEST_F(ArtifactCacheTest, EntryThatOthersMayWriteOrOwn_NotUsed) {
    const CacheKey key = key_of("k");
    const auto expect_made_again = [&] {
        int created = 0;
        EXPECT_EQ(fresh_get(key, created), "made again");
        EXPECT_EQ(created, 1);
        created = 0;
        (void)fresh_get(key, created);
        EXPECT_EQ(created, 0);
    };
    expect_made_again();
    fs::permissions(entry_path(key), fs::perms::group_write, fs::perm_options::add);
    expect_made_again();
    if (::geteuid() == 0) {
        ASSERT_EQ(::chown(entry_path(key).c_str(), 12345, 12345), 0);
        expect_made_again();
        EXPECT_THAT(log_.text(), HasSubstr("owned by user 12345"));
    }
    EXPECT_THAT(log_.text(), HasSubstr("lets group or others write"));
}

}  // namespace
}  // namespace flce
