// The CPU backend's threads: tasks in order of their number, each worker taking the next one. What a task computes does not depend on who
// runs it or when, so results do not depend on scheduling.
#pragma once

#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace flce {

/// Treats denormals as 0 while it lives: saturated softmaxes are full of them, and each costs a hundred cycles of microcode.
class DenormalsAreZero {
public:
#if defined(__SSE__)
    DenormalsAreZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
    ~DenormalsAreZero() { _mm_setcsr(saved_); }

private:
    static constexpr unsigned kFlushToZero = 0x8000;
    static constexpr unsigned kDenormalsAreZero = 0x0040;
    unsigned saved_;
#else
    DenormalsAreZero() = default;
#endif
public:
    DenormalsAreZero(const DenormalsAreZero&) = delete;
    DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;
};

class Workers {
public:
    /// More threads than processors would only take turns.
    explicit Workers(int threads) : arena_(std::min(threads, tbb::info::default_concurrency())) {}

    /// Runs body(task, worker) for every task in [0, tasks), on at most `workers` workers at a time; no two tasks at a time have the same worker.
    template <class Body>
    void run(std::int64_t tasks, std::int64_t workers, const Body& body) const {
        std::atomic<std::int64_t> next{0};
        const auto work = [&](std::int64_t worker) {
            const DenormalsAreZero guard;
            for (std::int64_t task = next++; task < tasks; task = next++) body(task, worker);
        };
        if (std::min(tasks, workers) <= 1) return work(0);
        // Isolated: a thread that waits here must not pick up another call's tasks, which may take long.
        arena_.execute([&] {
            tbb::this_task_arena::isolate(
                [&] { tbb::parallel_for(std::int64_t{0}, std::min(tasks, workers), work, tbb::simple_partitioner{}); });
        });
    }

private:
    mutable tbb::task_arena arena_;
};

}  // namespace flce
