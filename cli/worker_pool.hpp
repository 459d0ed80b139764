// Work in processes of this program: for compilers that take a lock of their process, and so that one that crashes, hangs up or is killed for its memory
// costs its piece of work and nothing else.
//
// A worker reads one line from its standard input, answers with one line on standard output, and ends with its input. What it prints otherwise goes to
// standard error.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace flce::cli {

struct WorkerPool {
    std::string program = "/proc/self/exe";
    std::vector<std::string> arguments;  ///< that make it a worker
    int workers = 1;
    /// Hears of each piece of work once: its answer, or how its worker ended without one.
    std::function<void(std::size_t piece, const std::string& answer, const std::string& death)> on_done;
    std::function<void()> on_tick;  ///< several times a second

    /// Returns when every piece is done. Throws Interrupted at Ctrl-C, EnvironmentError when no process can be started; no worker is left in either case.
    void run(const std::vector<std::string>& pieces) const;
};

/// Runs `work` on each line of standard input until that ends. The first thing a worker does: from here on it dies with its parent, and leaves Ctrl-C to it.
int serve_as_worker(const std::function<std::string(const std::string& piece)>& work);

}  // namespace flce::cli
