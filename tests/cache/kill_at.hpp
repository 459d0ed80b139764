// A process that is killed at a chosen system call.
#pragma once

#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

namespace flce::test {

enum class Traced { ended, killed, not_allowed };

/// Runs `body` in a child and kills it at the `stop`th stop: before or after a system call.
inline Traced run_and_kill_at(int stop, const std::function<int()>& body) {
    const pid_t child = ::fork();
    if (child == 0) {
        if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(99);
        ::raise(SIGSTOP);
        ::_exit(body());
    }
    int status = 0;
    if (::waitpid(child, &status, 0) != child) return Traced::not_allowed;
    if (WIFEXITED(status)) return WEXITSTATUS(status) == 99 ? Traced::not_allowed : Traced::ended;
    for (int stops = 0;; ++stops) {
        if (stops == stop) {
            ::kill(child, SIGKILL);
            ::waitpid(child, &status, 0);
            return Traced::killed;
        }
        if (::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr) != 0 || ::waitpid(child, &status, 0) != child) return Traced::not_allowed;
        if (WIFEXITED(status)) return Traced::ended;
        if (WIFSIGNALED(status)) return Traced::killed;
    }
}

}  // namespace flce::test
