// Parts that every subcommand shares: exit codes, the way errors and results leave the program, and common options.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "flce/flce.hpp"
#include "runtime/json.hpp"
#include "runtime/text.hpp"

// CLI11 takes every file that includes it seconds to compile: only those that declare arguments do.
namespace CLI {
class App;
}

namespace flce::cli {

enum ExitCode : int {
    kDone = 0,
    kFailedCheck = 1,
    kUsage = 2,        ///< arguments, specs, plans and input files
    kEnvironment = 3,  ///< devices, libraries, compilers, disks
    kInterrupted = 130,
};

/// Something the user handed in is wrong: exit code 2.
class UsageError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// The program that workers are started from: the running one, with a hidden subcommand.
inline constexpr const char* kThisProgram = "/proc/self/exe";

/// Exit code for an error of that kind.
[[nodiscard]] int exit_code(ErrorKind kind);

/// A subcommand registers itself on `app`; when it is the one asked for, it stores what has to run in `action`.
using Action = std::function<int()>;
void add_demo(CLI::App& app, Action& action);
void add_run(CLI::App& app, Action& action);
void add_check(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_explain(CLI::App& app, Action& action);
void add_prewarm(CLI::App& app, Action& action);
void add_prewarm_worker(CLI::App& app, Action& action);
void add_tune(CLI::App& app, Action& action);
void add_tune_worker(CLI::App& app, Action& action);
void add_cache(CLI::App& app, Action& action);
void add_info(CLI::App& app, Action& action);

/// Runs the command line; returns the process's exit code. Errors are one line on stderr.
int main(int argc, char** argv);

/// File that --out's contents go to, through symbolic links. Throws UsageError for something that is there and not a file, which a file
/// must not replace.
[[nodiscard]] std::filesystem::path output_file(std::string_view option, const std::filesystem::path& path);

/// --workspace-limit and --retain: the memory of a call beyond inputs and gradients, and what forward may leave to backward.
struct MemoryFlags {
    std::string limit;
    std::string retain;

    /// `default_choice`: help text of --retain about its default.
    void add_to(CLI::App& app, std::string_view default_choice = "auto with a limit, none without");
    /// 0: none.
    [[nodiscard]] std::int64_t workspace_limit_bytes() const;
    /// Limit that the plan is chosen for: --retain all by itself has all the memory that there is a use for.
    [[nodiscard]] std::int64_t plan_workspace_limit_bytes() const;
    /// none, auto, all, grad_weight, or a number of bytes.
    [[nodiscard]] std::string choice() const;
    /// Throws UsageError where there is a limit and `bytes`, workspace and retained together, are over it.
    void check_limit(std::int64_t bytes) const;
};

/// --device, --cache-dir, --threads and --workspace of the subcommands that own a session.
struct SessionFlags {
    std::string device;
    std::filesystem::path cache_dir;
    int threads = 0;
    std::string workspace;

    void add_to(CLI::App& app);
    [[nodiscard]] SessionOptions options() const;
};

/// The one JSON object of a --json run, on stdout.
void print_json(const Json& object);

/// --help of --spec.
inline constexpr const char* kSpecHelp = "what is computed: key=value,flag,…, a JSON object, or @file.json";

/// parse_spec for --spec: a file that cannot be read is the user's mistake too. Throws SpecError, UsageError.
[[nodiscard]] Spec read_spec(const std::string& text);

[[nodiscard]] Reduction parse_reduction(std::string_view text);

/// Path of the running program; empty where the system does not say.
[[nodiscard]] std::filesystem::path executable_path();

}  // namespace flce::cli
