#include "runtime/workers/worker_process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <iostream>
#include <span>
#include <thread>

#include "cache/sha256.hpp"
#include "flce/error.hpp"
#include "runtime/workers/worker_command.hpp"

extern char** environ;

namespace flce {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const char* call, int error) {
    throw EnvironmentError(fmt::format("no worker process: {}: {}", call, std::strerror(error)));
}

/// Both ends are closed by an exec: a worker that held another's input would keep it from ending.
std::pair<FileDescriptor, FileDescriptor> make_pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("pipe2", errno);
    return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

/// Settings that a child is started with: pipes, a process group, and signals as they were before anybody handled them.
class SpawnSettings {
public:
    SpawnSettings(int in, int out) {
        ::posix_spawn_file_actions_init(&actions);
        ::posix_spawn_file_actions_adddup2(&actions, in, STDIN_FILENO);
        ::posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
        ::posix_spawnattr_init(&attributes);
        ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
        sigset_t defaults;
        sigemptyset(&defaults);
        for (const int signal : {SIGINT, SIGTERM, SIGPIPE}) sigaddset(&defaults, signal);
        ::posix_spawnattr_setsigdefault(&attributes, &defaults);
    }
    ~SpawnSettings() {
        ::posix_spawnattr_destroy(&attributes);
        ::posix_spawn_file_actions_destroy(&actions);
    }
    SpawnSettings(const SpawnSettings&) = delete;
    SpawnSettings& operator=(const SpawnSettings&) = delete;

    posix_spawn_file_actions_t actions{};
    posix_spawnattr_t attributes{};
};

/// A write to a dead child is an error of the write, not a signal.
class IgnoredBrokenPipes {
public:
    IgnoredBrokenPipes() : before_(::signal(SIGPIPE, SIG_IGN)) {}
    ~IgnoredBrokenPipes() { ::signal(SIGPIPE, before_); }
    IgnoredBrokenPipes(const IgnoredBrokenPipes&) = delete;
    IgnoredBrokenPipes& operator=(const IgnoredBrokenPipes&) = delete;

private:
    void (*before_)(int);
};

/// Whether all of it could be written.
bool write_line(int file, std::string line) {
    line += '\n';
    for (std::size_t done = 0; done < line.size();) {
        const ssize_t count = ::write(file, line.data() + done, line.size() - done);
        if (count < 0 && errno != EINTR) return false;
        if (count > 0) done += static_cast<std::size_t>(count);
    }
    return true;
}

/// Waits until `file` can be read, or a signal or the time ends that.
bool readable(int file, int timeout_ms) {
    pollfd waiting{.fd = file, .events = POLLIN};
    return ::poll(&waiting, 1, timeout_ms) > 0;
}

}  // namespace

WorkerProcess::WorkerProcess(const WorkerCommand& command) {
    auto [their_input, my_output] = make_pipe();
    auto [my_input, their_output] = make_pipe();
    std::vector<std::string> words{"flce"};
    words.insert(words.end(), command.arguments.begin(), command.arguments.end());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    const SpawnSettings settings(their_input.get(), their_output.get());
    const int error = ::posix_spawn(&pid_, command.program.c_str(), &settings.actions, &settings.attributes, pointers.data(), environ);
    if (error != 0) {
        pid_ = -1;
        fail("posix_spawn", error);
    }
    to_child_ = std::move(my_output);
    from_child_ = std::move(my_input);
}

WorkerProcess::~WorkerProcess() { kill(); }

void WorkerProcess::kill() {
    if (alive()) (void)end(Reply::Kind::died);
}

Reply WorkerProcess::end(Reply::Kind kind) {
    Reply reply{.kind = kind, .answer = {}, .why = "does not end when it is killed"};
    ::kill(-pid_, SIGKILL);
    ::kill(pid_, SIGKILL);
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
    to_child_ = {};
    from_child_ = {};
    buffer_.clear();
    if (ended <= 0) return reply;
    reply.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    reply.why = reply.signal != 0 ? fmt::format("ended by signal {} ({})", reply.signal, ::strsignal(reply.signal))
                                  : fmt::format("ended with exit code {}", WEXITSTATUS(status));
    return reply;
}

Reply WorkerProcess::give_up(std::chrono::milliseconds waited) {
    Reply reply = end(Reply::Kind::timed_out);
    reply.why = fmt::format("no answer in {:.3g} s", std::chrono::duration<double>(waited).count());
    return reply;
}

void WorkerProcess::send(const Json& request) {
    const IgnoredBrokenPipes ignored;
    if (alive()) (void)write_line(to_child_.get(), request.dump());  // read() says how one ended that does not take it
}

std::optional<Reply> WorkerProcess::take_answer() {
    const std::size_t end = buffer_.find('\n');
    if (end == std::string::npos) return std::nullopt;
    Reply reply{.answer = Json::parse(buffer_.substr(0, end), nullptr, false)};
    buffer_.erase(0, end + 1);
    return reply;
}

std::optional<Reply> WorkerProcess::read() {
    if (auto answer = take_answer()) return answer;
    if (!alive()) return Reply{.kind = Reply::Kind::died, .answer = {}, .why = "there is no process"};
    if (!readable(from_child_.get(), 0)) return std::nullopt;
    std::array<char, 1 << 16> bytes;
    const ssize_t count = ::read(from_child_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) return std::nullopt;
    if (count <= 0) return end(Reply::Kind::died);
    buffer_.append(bytes.data(), static_cast<std::size_t>(count));
    return take_answer();
}

Reply WorkerProcess::ask(const Json& request, std::chrono::milliseconds timeout, const std::function<bool()>& stop) {
    const auto deadline = Clock::now() + timeout;
    send(request);
    while (true) {
        if (stop && stop()) {
            kill();
            return {.kind = Reply::Kind::stopped, .answer = {}, .why = "stopped"};
        }
        if (auto reply = read()) return *std::move(reply);
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
        if (left.count() <= 0) return give_up(timeout);
        constexpr std::int64_t kLongestMs = 100;  // between two questions whether to stop
        (void)readable(from_child_.get(), static_cast<int>(std::min(left.count(), kLongestMs)));
    }
}

Json path_in_request(const std::filesystem::path& path) { return hex_of(std::as_bytes(std::span(path.native()))); }

std::filesystem::path path_of_request(const Json& given) {
    const auto digits = given.get<std::string>();
    std::string bytes(digits.size() / 2, '\0');
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        unsigned char byte = 0;
        std::from_chars(digits.data() + 2 * i, digits.data() + 2 * i + 2, byte, 16);
        bytes[i] = static_cast<char>(byte);
    }
    return bytes;
}

bool serve_requests(const std::function<Json(const Json&)>& serve) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a parent that is dead already has closed the input
    // Answers have the pipe for themselves: whatever a library prints goes elsewhere.
    const FileDescriptor answers(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
    if (!answers || ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) return false;
    std::string line;
    while (std::getline(std::cin, line)) {
        Json answer;
        try {
            const Json request = Json::parse(line);
            answer = request.contains(kHello) ? Json{{kHello, build_identity()}} : serve(request);
        } catch (const Error& error) {
            answer = {{"error", error.what()}, {"kind", static_cast<int>(error.kind())}};
        } catch (const std::exception& error) {
            answer = {{"error", error.what()}, {"kind", static_cast<int>(ErrorKind::environment)}};
        }
        if (!write_line(answers.get(), answer.dump(-1, ' ', false, Json::error_handler_t::replace))) return false;
    }
    return true;
}

}  // namespace flce
