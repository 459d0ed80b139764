#include "runtime/workers/worker_pool.hpp"

#include <poll.h>

namespace flce {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kTickMs = 100;

}  // namespace

bool WorkerPool::hand_out(const std::vector<Json>& requests, std::size_t& next) {
    bool busy = false;
    const std::size_t wanted = std::min(options_.workers, requests.size());
    if (workers_.size() < wanted) workers_.resize(wanted);
    for (Worker& worker : workers_) {
        if (!worker.request && next < requests.size()) {
            if (worker.process == nullptr || !worker.process->alive()) {
                worker.process = std::make_unique<WorkerProcess>(options_.command);
            }
            worker.process->send(requests[next]);
            worker.request = next++;
            worker.begin = Clock::now();
        }
        busy = busy || worker.request;
    }
    return busy;
}

void WorkerPool::wait() const {
    std::vector<pollfd> inputs;
    for (const Worker& worker : workers_) {
        if (worker.request) inputs.push_back({.fd = worker.process->input(), .events = POLLIN, .revents = 0});
    }
    ::poll(inputs.data(), inputs.size(), kTickMs);
}

std::optional<Reply> WorkerPool::reply_of(Worker& worker) const {
    if (auto reply = worker.process->read()) return reply;
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - worker.begin);
    if (waited >= options_.timeout) return worker.process->give_up(waited);
    return std::nullopt;
}

bool WorkerPool::run(const std::vector<Json>& requests, const PoolListener& listener) {
    const auto stopped = [&] { return listener.stop && listener.stop(); };
    std::size_t next = 0;
    while (!stopped()) {
        if (!hand_out(requests, next)) return true;
        wait();
        if (stopped()) break;  // before a worker's end is taken for its death
        if (listener.tick) listener.tick();
        for (Worker& worker : workers_) {
            const auto reply = worker.request ? reply_of(worker) : std::nullopt;
            if (!reply) continue;
            const std::size_t request = *worker.request;
            worker.request.reset();
            if (listener.done) listener.done(request, *reply);
        }
    }
    std::erase_if(workers_, [](const Worker& worker) { return worker.request.has_value(); });  // erasing a worker kills it
    return false;
}

}  // namespace flce
