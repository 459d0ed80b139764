// Workers that are a shell: how the pool hands out requests, and what becomes of it when they die.
#include "runtime/workers/worker_pool.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <map>

#include "cli/progress.hpp"
#include "flce/error.hpp"
#include "runtime/workers/worker_room.hpp"
#include "tests/cli/process.hpp"

namespace flce::cli {
namespace {

using test::TemporaryFolder;
using ::testing::HasSubstr;

struct Answers {
    std::map<std::size_t, Json> answers;
    std::map<std::size_t, Reply> deaths;
    bool complete = false;
};

WorkerPool shell_pool(const std::string& script, std::size_t workers, std::chrono::milliseconds timeout = std::chrono::hours(1)) {
    return WorkerPool({.command = {"/bin/sh", {"-c", script}}, .workers = workers, .timeout = timeout});
}

Answers run(WorkerPool& pool, const std::vector<Json>& requests, std::function<bool()> stop = {}) {
    Answers result;
    const auto done = [&](std::size_t request, const Reply& reply) {
        EXPECT_EQ(result.answers.count(request) + result.deaths.count(request), 0u);
        if (reply.kind == Reply::Kind::answer) {
            result.answers[request] = reply.answer;
        } else {
            result.deaths[request] = reply;
        }
    };
    result.complete = pool.run(requests, {.done = done, .stop = std::move(stop)});
    return result;
}

Answers run(const std::string& script, std::size_t workers, const std::vector<Json>& requests) {
    WorkerPool pool = shell_pool(script, workers);
    Answers result = run(pool, requests);
    EXPECT_TRUE(result.complete);
    return result;
}

constexpr const char* kEcho = "while read x; do echo \"[$$, $x]\"; done";

TEST(WorkerPool, EveryRequestIsAnsweredOnce) {
    for (const std::size_t workers : {1U, 3U, 20U}) {
        const Answers result = run(kEcho, workers, {"a", "b", "c", "d", 5});
        ASSERT_EQ(result.answers.size(), 5u);
        EXPECT_EQ(result.answers.at(0)[1], "a");
        EXPECT_EQ(result.answers.at(4)[1], 5);
    }
    EXPECT_TRUE(run("exit 1", 2, {}).answers.empty());
}

TEST(WorkerPool, SecondRun_SameProcesses) {
    WorkerPool pool = shell_pool(kEcho, 1);
    const auto first = run(pool, {1, 2}).answers;
    const auto second = run(pool, {3}).answers;
    EXPECT_EQ(second.at(0)[1], 3);
    EXPECT_EQ(second.at(0)[0], first.at(0)[0]);
}

TEST(WorkerPool, WorkerIsKilled_ItsRequestFailsAndTheOthersDoNot) {
    const Answers result = run("while read x; do [ $x = 666 ] && kill -9 $$; echo $x; done", 2, {1, 666, 2, 666, 3});
    EXPECT_EQ(result.answers.size(), 3u);
    ASSERT_EQ(result.deaths.size(), 2u);
    EXPECT_EQ(result.deaths.at(1).signal, SIGKILL);
    EXPECT_THAT(result.deaths.at(1).why, HasSubstr("signal 9"));
}

TEST(WorkerPool, WorkersEndAtOnceOrCloseTheirOutput_EveryRequestFails) {
    for (const char* script : {"exit 3", "exec 1>&-; exec sleep 60", "read x; exit 3"}) {
        const Answers result = run(script, 2, {"a", "b", "c"});
        EXPECT_EQ(result.deaths.size(), 3u) << script;
    }
    EXPECT_THAT(run("read x; exit 3", 1, {"a"}).deaths.at(0).why, HasSubstr("exit code 3"));
}

TEST(WorkerPool, AnswerIsNoJson_Discarded) { EXPECT_TRUE(run("read x; echo x; read x", 1, {"a"}).answers.at(0).is_discarded()); }

TEST(WorkerPool, WorkerThatHangs_GivenUpWithWhatItStarted) {
    WorkerPool pool = shell_pool("while read x; do [ $x = 666 ] && sleep 3600; echo $x; done", 1, std::chrono::milliseconds(300));
    const Answers result = run(pool, {1, 666, 2});
    EXPECT_EQ(result.answers.size(), 2u);
    EXPECT_EQ(result.deaths.at(1).kind, Reply::Kind::timed_out);
    EXPECT_THAT(result.deaths.at(1).why, HasSubstr("no answer in"));
}

TEST(WorkerPool, Stopped_ThoseAtWorkAreKilledAndTheRestIsNotBegun) {
    const TemporaryFolder folder;
    WorkerPool pool = shell_pool("echo $$ >>" + folder / "pids" + "; read x; exec sleep 3600", 2);
    const auto pids = [&] {
        std::ifstream file(folder / "pids");
        return std::vector<pid_t>(std::istream_iterator<pid_t>(file), {});
    };
    const Answers result = run(pool, {1, 2, 3}, [&] { return pids().size() == 2; });
    EXPECT_FALSE(result.complete);
    EXPECT_TRUE(result.answers.empty() && result.deaths.empty());
    ASSERT_EQ(pids().size(), 2u);
    for (const pid_t pid : pids()) EXPECT_EQ(::kill(pid, 0), -1);
}

TEST(WorkerPool, ProgramIsNotThere_Error) {
    WorkerPool pool({.command = {"/nonexistent", {}}});
    EXPECT_THROW((void)pool.run({"a"}, {}), EnvironmentError);
}

TEST(WorkerCount, CoresMemoryAndWork_TheLeastOfThem) {
    EXPECT_EQ(worker_count(8, std::int64_t{1} << 40, 100), 8u);
    EXPECT_EQ(worker_count(8, 3 * kWorkerBytes + 1, 100), 3u);
    EXPECT_EQ(worker_count(8, std::int64_t{1} << 40, 5), 5u);
    EXPECT_EQ(worker_count(8, 0, 5), 1u);
}

class AvailableMemory : public testing::Test {
protected:
    void write(const std::string& name, const std::string& text) {
        const std::filesystem::path path = root_.path() / name;
        std::filesystem::create_directories(path.parent_path());
        std::ofstream(path) << text;
    }
    TemporaryFolder root_;
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
