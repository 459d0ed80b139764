// A child process that answers requests, one JSON object a line each way over pipes: work that may hang or crash is done there.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "cli/command.hpp"

namespace flce::cli {

/// What became of a request.
struct Reply {
    enum class Kind : std::uint8_t { answer, died, timed_out, interrupted };
    Kind kind = Kind::answer;
    Json answer;
    std::string why;  ///< not an answer: "ended by signal 11 (Segmentation fault)", "no answer in 3 s"
};

class WorkerProcess {
public:
    /// Starts this program again with `arguments`. The child leads a process group of its own, so that Ctrl-C reaches it through us alone, and the
    /// kernel ends it when we are gone. Throws EnvironmentError.
    explicit WorkerProcess(const std::vector<std::string>& arguments);
    /// Kills it.
    ~WorkerProcess();
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;

    /// Sends a request and waits for its answer. A child that dies, or gives none in time, is killed with its group: it is not alive() then.
    [[nodiscard]] Reply ask(const Json& request, std::chrono::milliseconds timeout);
    /// The two halves of it, for several children at a time.
    void send(const Json& request);
    [[nodiscard]] Reply receive(std::chrono::milliseconds timeout);
    [[nodiscard]] bool alive() const noexcept { return pid_ > 0; }
    /// Ends it now; waits for its end.
    void kill();

private:
    [[nodiscard]] Reply ended(Reply::Kind kind, std::string why);
    [[nodiscard]] std::string how_it_ended();

    pid_t pid_ = -1;
    int to_child_ = -1;
    int from_child_ = -1;
    std::string buffer_;
};

/// The child's side: reads requests from standard input until it ends, and writes what `serve` returns to what was standard output; output of other
/// code goes to standard error meanwhile. An exception of flce's is answered with {"error", "kind"}.
int serve_requests(const std::function<Json(const Json&)>& serve);

}  // namespace flce::cli
