#include "cli/worker_process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>
#include <thread>

#include "cli/interrupt.hpp"

namespace flce::cli {
namespace {

using Clock = std::chrono::steady_clock;

void close_fd(int& file) {
    if (file >= 0) ::close(file);
    file = -1;
}

/// Between fork and exec: only what is safe there.
[[noreturn]] void become_child(char* const* arguments, int in, int out, pid_t parent) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);  // it died before that was set
    ::dup2(in, STDIN_FILENO);
    ::dup2(out, STDOUT_FILENO);
    for (const int signal : {SIGINT, SIGTERM, SIGPIPE}) ::signal(signal, SIG_DFL);
    ::execv("/proc/self/exe", arguments);
    ::_exit(127);
}

}  // namespace

WorkerProcess::WorkerProcess(const std::vector<std::string>& arguments) {
    std::array<int, 2> requests{-1, -1};
    std::array<int, 2> answers{-1, -1};
    if (::pipe2(requests.data(), O_CLOEXEC) != 0 || ::pipe2(answers.data(), O_CLOEXEC) != 0) {
        throw EnvironmentError(fmt::format("no pipe to a worker process: {}", std::strerror(errno)));
    }
    std::vector<std::string> words{"flce"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    ::signal(SIGPIPE, SIG_IGN);  // a dead child is an answer, not the end of us
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ == 0) become_child(pointers.data(), requests[0], answers[1], parent);
    const int error = errno;
    close_fd(requests[0]);
    close_fd(answers[1]);
    to_child_ = requests[1];
    from_child_ = answers[0];
    if (pid_ < 0) {
        close_fd(to_child_);
        close_fd(from_child_);
        throw EnvironmentError(fmt::format("no worker process: {}", std::strerror(error)));
    }
    ::setpgid(pid_, pid_);
}

WorkerProcess::~WorkerProcess() { kill(); }

void WorkerProcess::kill() {
    if (pid_ > 0) {
        ::kill(-pid_, SIGKILL);
        ::kill(pid_, SIGKILL);
        (void)how_it_ended();
    }
    close_fd(to_child_);
    close_fd(from_child_);
}

std::string WorkerProcess::how_it_ended() {
    // A driver may keep a killed process for a while; one that it keeps for ever must not keep us.
    constexpr std::chrono::seconds kPatience{20};
    const auto deadline = Clock::now() + kPatience;
    int status = 0;
    pid_t ended = 0;
    while ((ended = ::waitpid(pid_, &status, WNOHANG)) == 0 || (ended < 0 && errno == EINTR)) {
        if (Clock::now() >= deadline) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    pid_ = -1;
    if (ended <= 0) return "does not end when it is killed";
    if (WIFSIGNALED(status)) return fmt::format("ended by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
    return fmt::format("ended with exit code {}", WEXITSTATUS(status));
}

Reply WorkerProcess::ended(Reply::Kind kind, std::string why) {
    if (kind == Reply::Kind::died && pid_ > 0) {
        // It has closed its end; whatever is left of it must not outlive this.
        ::kill(-pid_, SIGKILL);
        why = how_it_ended();
    }
    kill();
    return {.kind = kind, .why = std::move(why)};
}

void WorkerProcess::send(const Json& request) {
    const std::string line = request.dump() + "\n";
    std::size_t sent = 0;
    while (alive() && sent < line.size()) {
        const ssize_t count = ::write(to_child_, line.data() + sent, line.size() - sent);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return;  // receive() says how it ended
        sent += static_cast<std::size_t>(count);
    }
}

Reply WorkerProcess::receive(std::chrono::milliseconds timeout) {
    const auto deadline = Clock::now() + timeout;
    while (true) {
        if (const std::size_t end = buffer_.find('\n'); end != std::string::npos) {
            Json answer = Json::parse(buffer_.substr(0, end), nullptr, false);
            buffer_.erase(0, end + 1);
            return {.answer = std::move(answer)};
        }
        if (interrupted()) return ended(Reply::Kind::interrupted, "interrupted");
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
        if (left.count() <= 0) {
            return ended(Reply::Kind::timed_out, fmt::format("no answer in {:.3g} s", std::chrono::duration<double>(timeout).count()));
        }
        if (!alive()) return {.kind = Reply::Kind::died, .why = "there is no process"};
        pollfd waiting{.fd = from_child_, .events = POLLIN};
        constexpr int kLongestMs = 100;  // a signal may arrive between the question above and poll
        if (::poll(&waiting, 1, static_cast<int>(std::min<std::int64_t>(left.count(), kLongestMs))) <= 0) continue;
        std::array<char, 1 << 16> bytes;
        const ssize_t count = ::read(from_child_, bytes.data(), bytes.size());
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return ended(Reply::Kind::died, "");
        buffer_.append(bytes.data(), static_cast<std::size_t>(count));
    }
}

Reply WorkerProcess::ask(const Json& request, std::chrono::milliseconds timeout) {
    send(request);
    return receive(timeout);
}

int serve_requests(const std::function<Json(const Json&)>& serve) {
    const int out = ::dup(STDOUT_FILENO);
    ::dup2(STDERR_FILENO, STDOUT_FILENO);
    std::string line;
    while (std::getline(std::cin, line)) {
        Json answer;
        try {
            answer = serve(Json::parse(line));
        } catch (const Error& error) {
            answer = {{"error", first_line(error.what())}, {"kind", static_cast<int>(error.kind())}};
        } catch (const std::exception& error) {
            answer = {{"error", error.what()}, {"kind", static_cast<int>(ErrorKind::environment)}};
        }
        const std::string text = answer.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
        for (std::size_t sent = 0; sent < text.size();) {
            const ssize_t count = ::write(out, text.data() + sent, text.size() - sent);
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) return kEnvironment;  // nobody listens
            sent += static_cast<std::size_t>(count);
        }
    }
    return kDone;
}

}  // namespace flce::cli
