// Many publishers of one record: of nodes that share the directory over a network file system, of one machine, and such that die or fail
// half-way.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "flce/error.hpp"
#include "records/record_store.hpp"
#include "tests/cache/fault_fixture.hpp"
#include "tests/cache/kill_at.hpp"
#include "tests/records/record_support.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::key_at;
using test::record_of;
using test::TemporaryDirectory;
using testing::Contains;
using testing::IsSupersetOf;
using testing::UnorderedElementsAre;

/// Makes this process one of another node for a while: with a temporary directory of its own, where its locks are, and NFS between it and
/// the records.
class Node {
public:
    /// `shared`: folder on NFS; empty: none, this is the node whose disk it is.
    Node(int (*nfs)(const char*), std::string shared) : nfs_(nfs), shared_(std::move(shared)), outer_(std::exchange(current(), this)) {
        if (const char* set = std::getenv("TMPDIR")) outer_temporary_ = set;
        ::setenv("TMPDIR", temporary_.path().c_str(), 1);
        enter();
    }
    ~Node() {
        current() = outer_;
        outer_temporary_ ? ::setenv("TMPDIR", outer_temporary_->c_str(), 1) : ::unsetenv("TMPDIR");
        outer_ != nullptr ? outer_->enter() : (void)nfs_(nullptr);
    }
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;

private:
    static Node*& current() {
        static Node* node = nullptr;
        return node;
    }
    void enter() const { (void)nfs_(shared_.empty() ? nullptr : shared_.c_str()); }

    int (*nfs_)(const char*);
    std::string shared_;
    Node* outer_;
    TemporaryDirectory temporary_;
    std::optional<std::string> outer_temporary_;
};

class RecordPublishers : public test::FaultFixture {
protected:
    void SetUp() override {
        FaultFixture::SetUp();
        most_warnings_ = 3;  // warnings of the folder and of files in it
    }
    [[nodiscard]] RecordStore store() const { return RecordStore({.directory = directory_.path(), .shipped = false}); }
    [[nodiscard]] Node another_node() const { return {nfs_, fs::canonical(directory_.path())}; }
    [[nodiscard]] Node server() const { return {nfs_, ""}; }

    /// One plan's times, in a run of that name.
    fs::path publish(const std::string& plan) const { return store().save(record_of(key_at(4096), {{plan, {1}}}, "of " + plan)); }
    /// The plans that have times, as a process that starts now reads them.
    [[nodiscard]] std::set<std::string> published() const {
        std::set<std::string> plans;
        const auto record = store().find(key_at(4096));
        if (!record) return plans;
        for (const auto& [plan, candidate] : record->candidates) {
            if (candidate.times_ms.contains("of " + plan) && record->runs.contains("of " + plan)) plans.insert(plan);
        }
        return plans;
    }
    [[nodiscard]] fs::path record_file() const { return directory_.path() / key_at(4096).file(); }
    [[nodiscard]] std::vector<fs::path> files() const {
        std::vector<fs::path> found;
        for (const auto& file : fs::directory_iterator(record_file().parent_path())) {
            if (!file.path().filename().string().starts_with('.')) found.push_back(file.path());
        }
        return found;
    }
};

TEST_F(RecordPublishers, ManyNodesManyTimes_EveryTimeIsThere) {
    if (!here()) return;
    constexpr int kNodes = 6;
    constexpr int kTimes = 20;
    std::vector<pid_t> children;
    for (int node = 0; node < kNodes; ++node) {
        const pid_t child = ::fork();
        if (child == 0) {
            {
                const Node other = another_node();
                for (int i = 0; i < kTimes; ++i) (void)publish(fmt::format("plan {} of node {}", i, node));
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
    EXPECT_EQ(published().size(), static_cast<std::size_t>(kNodes * kTimes));
    EXPECT_LE(files().size(), static_cast<std::size_t>(kNodes));  // files that were written at one time
    // A process that publishes alone leaves one file, and sessions read the same.
    const Node other = another_node();
    const fs::path last = publish("last");
    EXPECT_THAT(files(), UnorderedElementsAre(last));
    EXPECT_EQ(published().size(), static_cast<std::size_t>(kNodes * kTimes + 1));
    RecordStore session = store();
    ASSERT_EQ(session.plans(key_at(4096)).size(), 1U);
    EXPECT_EQ(session.plans(key_at(4096)).front().candidates, static_cast<std::size_t>(kNodes * kTimes + 1));
}

TEST_F(RecordPublishers, OthersPublishBetweenReadingAndRenaming_AllAreKept) {
    if (!here()) return;
    {
        const Node one = another_node();
        (void)publish("first");
        before_call("to:.json", [&] {
            const Node two = another_node();
            before_call("to:.json", [&] {
                const Node three = another_node();
                (void)publish("third");
            });
            (void)publish("second");
        });
        (void)publish("fourth");
    }
    EXPECT_THAT(published(), UnorderedElementsAre("first", "second", "third", "fourth"));
}

// The machine whose disk it is, under its lock, and another to which it is NFS.
TEST_F(RecordPublishers, OnTheServerItself_GrowsOneFileAndKeepsWhatClientsPublish) {
    if (!here()) return;
    EXPECT_EQ(publish("first"), record_file());
    before_call("to:.json", [&] {
        const Node client = another_node();
        EXPECT_NE(publish("a client's"), record_file());
    });
    EXPECT_EQ(publish("second"), record_file());
    EXPECT_THAT(published(), UnorderedElementsAre("first", "second", "a client's"));
    EXPECT_EQ(files().size(), 2U);
    // The other way round; clients leave the server's file as it is.
    before_call("to:.json", [&] {
        const Node itself = server();
        EXPECT_EQ(publish("third"), record_file());
    });
    {
        const Node client = another_node();
        (void)publish("another client's");
    }
    EXPECT_THAT(published(), UnorderedElementsAre("first", "second", "third", "a client's", "another client's"));
    EXPECT_EQ(publish("last"), record_file());
    EXPECT_THAT(files(), UnorderedElementsAre(record_file()));
    EXPECT_EQ(published().size(), 6U);
}

TEST_F(RecordPublishers, FileVanishesUnderAReader_WhatTookItsPlaceIsRead) {
    if (!here()) return;
    const Node node = another_node();
    const std::string first = "open:" + publish("first").filename().string();
    before_call(first.c_str(), [&] {
        const Node other = another_node();
        (void)publish("second");
    });
    EXPECT_THAT(published(), UnorderedElementsAre("first", "second"));
}

// Not overwritten as if it were not there.
TEST_F(RecordPublishers, RecordThatCannotBeReadJustNow_StaysBesideTheNewOne) {
    if (!here()) return;
    for (const char* function : {"pread", "readdir"}) {
        SCOPED_TRACE(function);
        fs::remove_all(record_file().parent_path());
        EXPECT_EQ(publish("first"), record_file());
        ::setenv("FLCE_FAULT_STALE", function, 1);
        EXPECT_NE(publish("second"), record_file());
        EXPECT_THAT(published(), testing::IsEmpty());
        ::unsetenv("FLCE_FAULT_STALE");
        EXPECT_THAT(published(), UnorderedElementsAre("first", "second"));
        EXPECT_EQ(publish("third"), record_file());
        EXPECT_THAT(files(), UnorderedElementsAre(record_file()));
        EXPECT_THAT(published(), UnorderedElementsAre("first", "second", "third"));
    }
}

TEST_F(RecordPublishers, ReplacedRecord_OnlyWhatComesAfterIsThere) {
    if (!here()) return;
    (void)publish("old");
    {
        const Node node = another_node();
        (void)publish("older");
        RecordStore fresh = store();
        (void)fresh.replace(record_of(key_at(4096), {{"new", {1}}}, "of new"));
        EXPECT_THAT(published(), UnorderedElementsAre("new"));
        (void)publish("newer");
    }
    EXPECT_THAT(published(), UnorderedElementsAre("new", "newer"));
}

TEST_F(RecordPublishers, FileThatIsNotTrusted_NeitherMergedNorRemoved) {
    if (!here()) return;
    const Node node = another_node();
    const fs::path theirs = publish("theirs");
    fs::permissions(theirs, fs::perms::others_write, fs::perm_options::add);
    const fs::path own = publish("own");
    EXPECT_THAT(published(), UnorderedElementsAre("own"));
    EXPECT_THAT(files(), UnorderedElementsAre(theirs, own));
}

/// Everything that has to hold of a publication that goes wrong somewhere, on a local file system and on NFS.
class FailingPublication : public RecordPublishers, public testing::WithParamInterface<bool> {
protected:
    void prepare() const {
        fs::remove_all(directory_.path() / key_at(4096).file().parent_path());
        fs::remove_all(directory_.path() / "locks");
        (void)publish("server's");
        const Node node = another_node();
        (void)publish("client's");
    }
    /// A node of this file system.
    [[nodiscard]] std::unique_ptr<Node> node() const {
        return std::make_unique<Node>(nfs_, GetParam() ? fs::canonical(directory_.path()).string() : "");
    }
    void expect_nothing_is_lost() const {
        EXPECT_THAT(published(), IsSupersetOf({"server's", "client's"}));
        EXPECT_EQ(store().plans(key_at(4096)).size(), 1U);
    }
};

INSTANTIATE_TEST_SUITE_P(FileSystems, FailingPublication, testing::Bool(),
                         [](const auto& instance) { return instance.param ? "Nfs" : "Local"; });

TEST_P(FailingPublication, AtEveryCall_NothingPublishedIsLost) {
    if (!here()) return;
    std::unique_ptr<Node> on;
    bool saved = false;
    at_every_call(
        [&] {
            prepare();
            on = node();
        },
        [&] {
            try {
                saved = !publish("new").empty();
            } catch (const EnvironmentError&) {
                saved = false;
            }
        },
        [&] {
            expect_nothing_is_lost();
            if (saved) {
                EXPECT_THAT(published(), Contains("new"));
            }
            on.reset();
        });
}

TEST_P(FailingPublication, LookedUpMeanwhile_NeverThrowsAndLosesNothing) {
    if (!here()) return;
    prepare();
    const auto on = node();
    std::set<std::string> found;
    std::size_t plans = 0;
    at_every_call([] {},
                  [&] {
                      EXPECT_NO_THROW(found = published());
                      EXPECT_NO_THROW(plans = store().plans(key_at(4096)).size());
                  },
                  [&] {
                      EXPECT_LE(plans, 1U);
                      EXPECT_THAT((std::set<std::string>{"server's", "client's"}), IsSupersetOf(found));
                      expect_nothing_is_lost();
                  });
}

TEST_P(FailingPublication, KilledAtEverySystemCall_NothingPublishedIsLost) {
    if (!here()) return;
    int stop = 0;
    for (test::Traced result = test::Traced::killed; result == test::Traced::killed; ++stop) {
        prepare();
        result = test::run_and_kill_at(stop, [&] {
            const auto on = node();
            return publish("killed").empty() ? 1 : 0;
        });
        if (result == test::Traced::not_allowed) GTEST_SKIP() << "this machine allows no ptrace";
        SCOPED_TRACE(fmt::format("killed at stop {}", stop));
        expect_nothing_is_lost();
        {
            const auto on = node();
            (void)publish("next");
        }
        EXPECT_THAT(published(), IsSupersetOf({"server's", "client's", "next"}));
    }
    EXPECT_THAT(published(), Contains("killed"));  // the last came to its end
    EXPECT_GT(stop, 20);
}

}  // namespace
}  // namespace flce
