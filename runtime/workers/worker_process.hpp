// A child process that answers requests, one JSON object a line each way over pipes: work that may hang, crash or be killed for its memory
// is done there.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cache/file_descriptor.hpp"
#include "runtime/json.hpp"

namespace flce {

/// A program and the words after its name that make it a worker: one that calls serve_requests.
struct WorkerCommand {
    std::filesystem::path program;
    std::vector<std::string> arguments;
};

/// Reply to a request, or the reason why there is none.
struct Reply {
    enum class Kind : std::uint8_t { answer, died, timed_out, stopped };
    Kind kind = Kind::answer;
    Json answer;      ///< discarded where it is no JSON
    std::string why;  ///< not an answer: "ended by signal 11 (Segmentation fault)", "no answer in 3 s"
    int signal = 0;   ///< signal that ended the worker, if one did
};

class WorkerProcess {
public:
    /// The child leads a process group of its own: a Ctrl-C of the terminal reaches this process alone, which decides. Throws
    /// EnvironmentError.
    explicit WorkerProcess(const WorkerCommand& command);
    /// Kills it.
    ~WorkerProcess();
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;

    /// Sends a request and waits for its answer. A child that dies, gives none in time, or is working when `stop` says to end, is killed
    /// with its group: it is not alive() then.
    [[nodiscard]] Reply ask(const Json& request, std::chrono::milliseconds timeout, const std::function<bool()>& stop = {});

    // The parts of ask(), for an owner of several children.
    /// Sends a request; read() gives the reply.
    void send(const Json& request);
    /// The request's reply, if there is one yet; does not wait.
    [[nodiscard]] std::optional<Reply> read();
    /// A descriptor that is readable when read() has something to say.
    [[nodiscard]] int input() const noexcept { return from_child_.get(); }
    /// Kills the child, whose reply has been waited for long enough.
    [[nodiscard]] Reply give_up(std::chrono::milliseconds waited);

    [[nodiscard]] bool alive() const noexcept { return pid_ > 0; }
    /// Ends it now; waits for its end.
    void kill();

private:
    [[nodiscard]] std::optional<Reply> take_answer();
    /// Kills the rest of the child's group, which must not outlive this process, and returns how the child ended.
    [[nodiscard]] Reply end(Reply::Kind kind);

    pid_t pid_ = -1;
    FileDescriptor to_child_;
    FileDescriptor from_child_;
    std::string buffer_;
};

/// The key of the one request that every worker answers by itself, with its build_identity().
inline constexpr const char* kHello = "hello";

/// A path in a request, and back. JSON is UTF-8, which paths need not be: its bytes, as hexadecimal digits.
[[nodiscard]] Json path_in_request(const std::filesystem::path& path);
[[nodiscard]] std::filesystem::path path_of_request(const Json& given);

/// The child's side: reads requests from standard input until it ends, and writes replies of `serve` to the standard output that the child
/// was started with; output of other code goes to standard error meanwhile. An exception is answered with {"error", "kind"}. From here on
/// the child dies with its parent. Returns false where an answer could not be written: nobody listens.
[[nodiscard]] bool serve_requests(const std::function<Json(const Json&)>& serve);

}  // namespace flce
