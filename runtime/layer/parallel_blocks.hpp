// A loop over independent blocks on every core, for arithmetic beside the kernels: references, random inputs, the demo's small model.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace flce {

[[nodiscard]] inline int hardware_threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

/// Calls body(begin, end) for consecutive blocks of at most `block` of [0, count). The thread that runs a block varies, the blocks do not:
/// a body that writes only its block's own memory gives an equal result every time. The first exception is rethrown after all threads have
/// ended.
template <class Body>
void parallel_blocks(std::int64_t count, std::int64_t block, const Body& body) {
    const std::int64_t blocks = (count + block - 1) / block;
    std::atomic<std::int64_t> next{0};
    std::exception_ptr failure;
    std::mutex failure_mutex;
    const auto work = [&] {
        try {
            for (std::int64_t i = next++; i < blocks; i = next++) body(i * block, std::min(count, (i + 1) * block));
        } catch (...) {
            next = blocks;
            const std::lock_guard lock(failure_mutex);
            if (!failure) failure = std::current_exception();
        }
    };
    const auto threads = std::min<std::int64_t>(hardware_threads(), blocks);
    {
        std::vector<std::jthread> pool;
        for (std::int64_t t = 1; t < threads; ++t) pool.emplace_back(work);
        work();
    }
    if (failure) std::rethrow_exception(failure);
}

}  // namespace flce
