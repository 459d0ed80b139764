#include "cli/worker_pool.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>

#include "cache/file_descriptor.hpp"
#include "cli/command.hpp"
#include "cli/interrupt.hpp"

extern char** environ;

namespace flce::cli {
namespace {

constexpr int kTickMs = 200;

[[noreturn]] void fail(const char* call, int error) {
    throw EnvironmentError(fmt::format("a worker cannot be started: {}: {}", call, std::strerror(error)));
}

/// Both ends are closed by an exec: a worker that held another's input would keep it from ending.
std::pair<FileDescriptor, FileDescriptor> make_pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("pipe2", errno);
    return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

class Worker {
public:
    Worker(const std::string& program, const std::vector<std::string>& arguments) {
        auto [their_input, my_output] = make_pipe();
        auto [my_input, their_output] = make_pipe();
        std::vector<std::string> command{"flce"};
        command.insert(command.end(), arguments.begin(), arguments.end());
        std::vector<char*> argv;
        for (std::string& argument : command) argv.push_back(argument.data());
        argv.push_back(nullptr);
        posix_spawn_file_actions_t actions;
        ::posix_spawn_file_actions_init(&actions);
        ::posix_spawn_file_actions_adddup2(&actions, their_input.get(), STDIN_FILENO);
        ::posix_spawn_file_actions_adddup2(&actions, their_output.get(), STDOUT_FILENO);
        const int error = ::posix_spawn(&process_, program.c_str(), &actions, nullptr, argv.data(), environ);
        ::posix_spawn_file_actions_destroy(&actions);
        if (error != 0) fail("posix_spawn", error);
        in_ = std::move(my_input);
        out_ = std::move(my_output);
    }
    ~Worker() {
        if (process_ <= 0) return;
        ::kill(process_, SIGKILL);
        (void)reap();
    }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    std::optional<std::size_t> piece;  // what it is doing

    [[nodiscard]] int input() const { return in_.get(); }

    /// Whether it took it; one that is dead does not.
    [[nodiscard]] bool give(std::size_t number, const std::string& text) {
        piece = number;
        const std::string line = text + "\n";
        for (std::size_t done = 0; done < line.size();) {
            const ssize_t count = ::write(out_.get(), line.data() + done, line.size() - done);
            if (count < 0 && errno != EINTR) return false;
            if (count > 0) done += static_cast<std::size_t>(count);
        }
        return true;
    }

    enum class Read { nothing, answer, end };
    [[nodiscard]] Read read(std::string& answer) {
        std::array<char, 65536> buffer{};
        const ssize_t count = ::read(in_.get(), buffer.data(), buffer.size());
        if (count < 0) return errno == EINTR ? Read::nothing : Read::end;
        if (count == 0) return Read::end;
        unread_.append(buffer.data(), static_cast<std::size_t>(count));
        const std::size_t end = unread_.find('\n');
        if (end == std::string::npos) return Read::nothing;
        answer = unread_.substr(0, end);
        unread_.erase(0, end + 1);
        return Read::answer;
    }

    /// Waits for a worker whose output has ended, and says what became of it.
    [[nodiscard]] std::string death() {
        ::kill(process_, SIGKILL);  // one that only closed its output
        const int status = reap();
        if (WIFEXITED(status)) return fmt::format("its worker ended with exit code {}", WEXITSTATUS(status));
        const int signal = WTERMSIG(status);
        return fmt::format("its worker was ended by signal {} ({}){}", signal, ::strsignal(signal),
                           signal == SIGKILL ? ": out of memory? --jobs makes fewer at a time" : "");
    }

private:
    int reap() {
        int status = 0;
        while (::waitpid(process_, &status, 0) < 0 && errno == EINTR) {
        }
        process_ = -1;
        return status;
    }

    pid_t process_ = -1;
    FileDescriptor in_;
    FileDescriptor out_;
    std::string unread_;
};

/// A write to a dead worker is an error of the write, not a signal.
class IgnoredBrokenPipes {
public:
    IgnoredBrokenPipes() : before_(::signal(SIGPIPE, SIG_IGN)) {}
    ~IgnoredBrokenPipes() { ::signal(SIGPIPE, before_); }
    IgnoredBrokenPipes(const IgnoredBrokenPipes&) = delete;
    IgnoredBrokenPipes& operator=(const IgnoredBrokenPipes&) = delete;

private:
    void (*before_)(int);
};

}  // namespace

void WorkerPool::run(const std::vector<std::string>& pieces) const {
    const IgnoredBrokenPipes ignored;
    std::vector<std::unique_ptr<Worker>> pool;
    std::size_t next = 0;
    // The next piece to a worker that has none. One that dies of it is replaced while there is work.
    const auto give_next = [&](std::unique_ptr<Worker>& worker) {
        worker->piece.reset();
        while (next < pieces.size()) {
            const std::size_t piece = next++;
            if (worker->give(piece, pieces[piece])) return;
            on_done(piece, "", worker->death());
            worker = std::make_unique<Worker>(program, arguments);
        }
        worker.reset();
    };
    while (static_cast<int>(pool.size()) < workers && next < pieces.size()) {
        give_next(pool.emplace_back(std::make_unique<Worker>(program, arguments)));
    }
    std::erase(pool, nullptr);
    while (!pool.empty()) {
        stop_if_interrupted();
        std::vector<pollfd> inputs;
        for (const auto& worker : pool) inputs.push_back({worker->input(), POLLIN, 0});
        ::poll(inputs.data(), inputs.size(), kTickMs);
        stop_if_interrupted();  // before a worker's end is taken for its death
        if (on_tick) on_tick();
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            if ((inputs[i].revents & (POLLIN | POLLHUP | POLLERR)) == 0) continue;
            std::string answer;
            const Worker::Read read = pool[i]->read(answer);
            if (read == Worker::Read::nothing) continue;
            const std::size_t piece = *pool[i]->piece;
            if (read == Worker::Read::end) {
                on_done(piece, "", pool[i]->death());
                pool[i] = next < pieces.size() ? std::make_unique<Worker>(program, arguments) : nullptr;
            } else {
                on_done(piece, answer, "");
            }
            if (pool[i]) give_next(pool[i]);
        }
        std::erase(pool, nullptr);
    }
}

int serve_as_worker(const std::function<std::string(const std::string& piece)>& work) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::signal(SIGINT, SIG_IGN);  // the terminal sends it to every process; the parent decides
    ::signal(SIGTERM, SIG_DFL);
    // Answers have the pipe for themselves: whatever a library prints goes elsewhere.
    const FileDescriptor answers(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
    if (!answers || ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) return kEnvironment;
    std::string piece;
    while (std::getline(std::cin, piece)) {
        const std::string line = work(piece) + "\n";
        for (std::size_t done = 0; done < line.size();) {
            const ssize_t count = ::write(answers.get(), line.data() + done, line.size() - done);
            if (count < 0 && errno != EINTR) return kEnvironment;
            if (count > 0) done += static_cast<std::size_t>(count);
        }
    }
    return kDone;
}

}  // namespace flce::cli
