// Requests answered side by side in worker processes: for compilers that take a lock of their process, and so that a worker that crashes,
// hangs or is killed for its memory costs its request and nothing else.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/workers/worker_process.hpp"

namespace flce {

/// Functions by which a pool tells of its work and asks about it, in the thread that runs it.
struct PoolListener {
    std::function<void(std::size_t request, const Reply& reply)> done = {};  ///< hears of each request once
    std::function<void()> tick = {};                                         ///< several times a second
    std::function<bool()> stop = {};                                         ///< whether to end before every request is answered
};

class WorkerPool {
public:
    struct Options {
        WorkerCommand command;
        std::size_t workers = 1;                                               ///< the most processes at a time
        std::chrono::milliseconds timeout = std::chrono::milliseconds::max();  ///< most time for a request
    };
    explicit WorkerPool(Options options) : options_(std::move(options)) {}

    /// Returns true when every request is done. A worker that dies is replaced while there is work; the others stay for the next run. Where
    /// `stop` says so those at work are killed, what they were at is not heard of, and it returns false. Throws EnvironmentError when no
    /// process can be started.
    [[nodiscard]] bool run(const std::vector<Json>& requests, const PoolListener& listener);

private:
    struct Worker {
        std::unique_ptr<WorkerProcess> process;
        std::optional<std::size_t> request;
        std::chrono::steady_clock::time_point begin;
    };
    /// Gives requests from `next` on to those without one. Whether anybody is at work.
    bool hand_out(const std::vector<Json>& requests, std::size_t& next);
    void wait() const;
    [[nodiscard]] std::optional<Reply> reply_of(Worker& worker) const;

    Options options_;
    std::vector<Worker> workers_;
};

}  // namespace flce
