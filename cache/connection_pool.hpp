// Open connections of a remote transport, lent to one thread at a time.
#pragma once

#include <unistd.h>

#include <mutex>
#include <utility>
#include <vector>

namespace flce {

/// `Connection` is a movable owner, false when it holds none.
template <class Connection>
class ConnectionPool {
public:
    /// One that was given back, or an empty one.
    [[nodiscard]] Connection take() {
        const std::lock_guard lock(mutex_);
        forget_the_parents();
        if (idle_.empty()) return {};
        Connection connection = std::move(idle_.back());
        idle_.pop_back();
        return connection;
    }
    void give_back(Connection connection) {
        const std::lock_guard lock(mutex_);
        forget_the_parents();
        if (idle_.size() < kMostIdle) idle_.push_back(std::move(connection));
    }

private:
    static constexpr std::size_t kMostIdle = 8;

    // After a fork both processes hold the same sockets. The child lets go of them without a word on the wire, and does not close what
    // libraries keep beside them: that is the parent's.
    void forget_the_parents() {
        if (owner_ == ::getpid()) return;
        owner_ = ::getpid();
        (void)new std::vector<Connection>(std::exchange(idle_, {}));
    }

    std::mutex mutex_;
    std::vector<Connection> idle_;
    pid_t owner_ = ::getpid();
};

}  // namespace flce
