// Workers that are a shell: how the pool hands out work, and what becomes of it when they die.
#include "cli/worker_pool.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "cli/jobs.hpp"
#include "cli/progress.hpp"
#include "flce/error.hpp"
#include "tests/cli/process.hpp"

namespace flce::cli {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Answers {
    std::map<std::size_t, std::string> answers;
    std::map<std::size_t, std::string> deaths;
};

Answers run(const std::string& script, int workers, const std::vector<std::string>& pieces) {
    Answers result;
    const WorkerPool pool{.program = "/bin/sh",
                          .arguments = {"-c", script},
                          .workers = workers,
                          .on_done =
                              [&](std::size_t piece, const std::string& answer, const std::string& death) {
                                  EXPECT_EQ(result.answers.count(piece) + result.deaths.count(piece), 0u);
                                  (death.empty() ? result.answers : result.deaths)[piece] = death.empty() ? answer : death;
                              },
                          .on_tick = {}};
    pool.run(pieces);
    return result;
}

TEST(WorkerPool, EveryPieceIsAnsweredOnce) {
    for (const int workers : {1, 3, 20}) {
        const Answers result = run("while read x; do echo \"did $x\"; done", workers, {"a", "b", "c", "d", "e"});
        ASSERT_EQ(result.answers.size(), 5u);
        EXPECT_EQ(result.answers.at(0), "did a");
        EXPECT_EQ(result.answers.at(4), "did e");
    }
    EXPECT_TRUE(run("exit 1", 2, {}).answers.empty());
}

TEST(WorkerPool, WorkerIsKilled_ItsPieceFailsAndTheOthersDoNot) {
    const Answers result = run("while read x; do [ $x = bad ] && kill -9 $$; echo $x; done", 2, {"a", "bad", "b", "bad", "c"});
    EXPECT_EQ(result.answers.size(), 3u);
    ASSERT_EQ(result.deaths.size(), 2u);
    EXPECT_THAT(result.deaths.at(1), AllOf(HasSubstr("signal 9"), HasSubstr("--jobs")));
}

TEST(WorkerPool, WorkersEndAtOnceOrCloseTheirOutput_EveryPieceFails) {
    for (const char* script : {"exit 3", "exec 1>&-; exec sleep 60", "read x; exit 3"}) {
        const Answers result = run(script, 2, {"a", "b", "c"});
        EXPECT_EQ(result.deaths.size(), 3u) << script;
    }
    EXPECT_THAT(run("read x; exit 3", 1, {"a"}).deaths.at(0), HasSubstr("exit code 3"));
}

TEST(WorkerPool, ProgramIsNotThere_Error) {
    const WorkerPool pool{.program = "/nonexistent", .arguments = {}, .workers = 1, .on_done = {}, .on_tick = {}};
    EXPECT_THROW(pool.run({"a"}), EnvironmentError);
}

TEST(WorkerCount, CoresMemoryAndWork_TheLeastOfThem) {
    EXPECT_EQ(worker_count(8, std::int64_t{1} << 40, 100), 8);
    EXPECT_EQ(worker_count(8, 3 * kWorkerBytes + 1, 100), 3);
    EXPECT_EQ(worker_count(8, std::int64_t{1} << 40, 5), 5);
    EXPECT_EQ(worker_count(8, 0, 5), 1);
}

class AvailableMemory : public testing::Test {
protected:
    void write(const std::string& name, const std::string& text) {
        const std::filesystem::path path = root_.path() / name;
        std::filesystem::create_directories(path.parent_path());
        std::ofstream(path) << text;
    }
    test::TemporaryFolder root_;
};

TEST_F(AvailableMemory, NoGroups_WhatTheSystemHas) {
    write("proc/meminfo", "MemTotal:       16000 kB\nMemFree:          100 kB\nMemAvailable:    8000 kB\n");
    EXPECT_EQ(available_memory_bytes(root_.path()), 8000 * 1024);
}

TEST_F(AvailableMemory, GroupsOfVersionTwo_TheTightestOnTheWay) {
    write("proc/meminfo", "MemAvailable:    8000 kB\n");
    write("proc/self/cgroup", "0::/job/step\n");
    write("sys/fs/cgroup/job/step/memory.max", "max\n");
    write("sys/fs/cgroup/job/memory.max", "1000000\n");
    write("sys/fs/cgroup/job/memory.current", "700000\n");
    write("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 100000\nfile 5\n");
    EXPECT_EQ(available_memory_bytes(root_.path()), 400000);
    write("sys/fs/cgroup/job/step/memory.max", "300000\n");
    EXPECT_EQ(available_memory_bytes(root_.path()), 300000);
}

TEST_F(AvailableMemory, GroupsOfVersionOne_TheirLimit) {
    write("proc/meminfo", "MemAvailable:    8000 kB\n");
    write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker\n");
    write("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "500000\n");
    write("sys/fs/cgroup/memory/docker/memory.usage_in_bytes", "600000\n");
    EXPECT_EQ(available_memory_bytes(root_.path()), 0);
}

TEST(RenderPace, RateAndTimeLeft) {
    EXPECT_EQ(render_pace(10, 40, 5), "2/s, 0:15 left");
    EXPECT_EQ(render_pace(1, 101, 60), "0.0167/s, 1:40:00 left");
    EXPECT_EQ(render_pace(0, 40, 5), "");
    EXPECT_EQ(render_pace(40, 40, 5), "");
}

}  // namespace
}  // namespace flce::cli
