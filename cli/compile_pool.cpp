#include "cli/compile_pool.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "cli/tune_measure.hpp"

namespace flce::cli {

std::size_t default_compile_processes() {
    constexpr std::size_t kMost = 8;
    return std::clamp<std::size_t>(std::thread::hardware_concurrency() / 2, 1, kMost);
}

bool CompilePool::compile(const std::vector<CompileJob>& jobs, const std::function<bool()>& stop,
                          const std::function<double()>& seconds_left, const std::function<void(std::size_t, bool)>& done) {
    const std::size_t count = std::min(most_, jobs.size());
    std::erase_if(processes_, [](const auto& process) { return !process->alive(); });
    while (processes_.size() < count) processes_.push_back(std::make_unique<WorkerProcess>(std::vector<std::string>{kTuneWorker}));
    std::atomic<std::size_t> next{0};
    std::mutex mutex;
    std::size_t finished = 0;
    const auto work = [&](WorkerProcess& process) {
        for (std::size_t i = next++; i < jobs.size() && process.alive(); i = next++) {
            {
                const std::lock_guard lock(mutex);
                if (stop()) return;
            }
            const Reply reply = process.ask({{"op", "compile"},
                                             {"spec", jobs[i].spec.text()},
                                             {"device", jobs[i].device_json},
                                             {"cache_dir", cache_dir_},
                                             {"plan", jobs[i].plan}},
                                            std::chrono::milliseconds(static_cast<std::int64_t>(std::max(0.0, seconds_left()) * 1e3)));
            const std::lock_guard lock(mutex);
            if (done) done(++finished, reply.kind != Reply::Kind::answer || reply.answer.contains("error"));
        }
    };
    {
        std::vector<std::jthread> threads;
        for (std::size_t i = 0; i < count; ++i) threads.emplace_back([&, i] { work(*processes_[i]); });
    }
    return !stop();
}

}  // namespace flce::cli
