// The CPU backend's threads: tasks in order of their number, each worker taking the next one. A task computes equal results whichever
// worker runs it and when, so results do not depend on scheduling.
#pragma once

#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace flce {

/// Treats denormals as 0 while it lives: saturated softmaxes are full of them, and on x86-64 each costs a hundred cycles of microcode.
class DenormalsAreZero {
public:
    DenormalsAreZero() : saved_(control()) { set_control(saved_ | kOfInputsAndResults); }
    ~DenormalsAreZero() { set_control(saved_); }
    DenormalsAreZero(const DenormalsAreZero&) = delete;
    DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;

private:
    // The thread's register of floating-point arithmetic.
#if defined(__SSE__)
    using Control = unsigned;
    static constexpr Control kOfInputsAndResults = 0x8040;  // MXCSR: FTZ and DAZ
    static Control control() { return _mm_getcsr(); }
    static void set_control(Control bits) { _mm_setcsr(bits); }
#elif defined(__aarch64__)
    using Control = std::uint64_t;
    static constexpr Control kOfInputsAndResults = 1 << 24;  // FPCR: FZ
    static Control control() {
        Control bits;
        asm volatile("mrs %0, fpcr" : "=r"(bits));
        return bits;
    }
    static void set_control(Control bits) { asm volatile("msr fpcr, %0" ::"r"(bits)); }
#endif
    Control saved_;
};

/// oneTBB's threads and locks are of the process that first used them. A child has its memory as it was at the fork, without the threads:
/// where one of them was at work, or another of the parent's, waiting for them never ends.
class PoolOwner {
public:
    /// Whether this process may use the pool. The first that asks may.
    [[nodiscard]] static bool is_this_process() {
        const pid_t self = ::getpid();
        pid_t owner = 0;
        return owner_.compare_exchange_strong(owner, self) || owner == self;
    }

private:
    inline static std::atomic<pid_t> owner_{0};
};

class Workers {
public:
    /// More threads than processors would only take turns.
    explicit Workers(int threads)
        : threads_(std::min(threads, tbb::info::default_concurrency())), arena_(std::make_unique<tbb::task_arena>(threads_)) {}
    ~Workers() {
        if (arena_->is_active() && !PoolOwner::is_this_process())
            (void)arena_.release();  // the parent's, and who holds its locks is not here
    }
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;

    /// Runs body(task, worker) for every task in [0, tasks), on at most `workers` workers at a time; no two tasks at a time have the same
    /// worker. In a child of the process that first did so the workers are threads of this call.
    template <class Body>
    void run(std::int64_t tasks, std::int64_t workers, const Body& body) const {
        std::atomic<std::int64_t> next{0};
        const auto work = [&](std::int64_t worker) {
            const DenormalsAreZero guard;
            for (std::int64_t task = next++; task < tasks; task = next++) body(task, worker);
        };
        if (std::min(tasks, workers) <= 1) return work(0);
        if (!PoolOwner::is_this_process()) return on_own_threads(std::min<std::int64_t>({tasks, workers, threads_}), work);
        // Isolated: a thread that waits here must not pick up another call's tasks, which may take long.
        arena_->execute([&] {
            tbb::this_task_arena::isolate(
                [&] { tbb::parallel_for(std::int64_t{0}, std::min(tasks, workers), work, tbb::simple_partitioner{}); });
        });
    }

private:
    /// work(0) … work(count − 1), or as many of them as there can be threads: each takes what tasks are left.
    template <class Work>
    static void on_own_threads(std::int64_t count, const Work& work) {
        std::vector<std::jthread> threads;
        try {
            for (std::int64_t worker = 1; worker < count; ++worker) threads.emplace_back(work, worker);
        } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch): the system has no more of them
        }
        work(0);
    }

    int threads_;
    std::unique_ptr<tbb::task_arena> arena_;
};

}  // namespace flce
