// The tuner: measures plans of output layers on a device of this machine, and keeps what it has measured in records that sessions read.
// `flce tune` runs the tuner; docs/tuning.md describes it.
//
//     flce::TuneReport report = flce::tune({.specs = {flce::parse_spec("D=2048,V=151936,dtype=bf16")}, .num_tokens = {4096}},
//                                          {.stop = [] { return shutting_down(); }});
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "flce/flce.hpp"

namespace flce {

/// Layers that are tuned, and how. Every spec is tuned for every number of tokens.
struct TuneOptions {
    std::vector<Spec> specs{};
    std::vector<std::int64_t> num_tokens{};  ///< rows of hidden; each stands for its token_bucket. Empty: kTypicalTokens
    SessionOptions session{};                ///< device, cache_dir, threads and scratch_bytes count
    std::int64_t workspace_limit_bytes = 0;  ///< tune for calls with this limit; 0: none
    bool retain = true;                      ///< forward leaves to backward as much as grad_weight's memory or the limit has room for
    std::vector<Plan> plans{};               ///< further candidates
    double budget_s = 60;                    ///< seconds for each spec and number of tokens
    double candidate_timeout_s = 30;         ///< a candidate without an answer for this time hangs; at most a quarter of the budget counts
    std::vector<std::string> coordinates{};  ///< coordinates to vary, as --coordinates names them; empty: all
    std::size_t exhaustive = 0;              ///< > 0: measure that many combinations instead of descending
    std::filesystem::path records_dir{};     ///< directory for the records; empty: the session's
    std::string commit{};                    ///< commit kept with the measurements, so that later readers know the code that was measured
    bool fresh = false;                      ///< measure everything again and replace the records
    /// The flce command, of this library's build: candidates run in processes of it. Empty: bin/flce beside the folder of libflce, as it is
    /// in the build tree, an install and the Python package.
    std::filesystem::path command{};
};

/// Output layers in bf16 of the eight models whose records ship with the library, gradient written: a tour of a GPU that nobody has
/// measured.
[[nodiscard]] std::vector<Spec> well_known_layers();

/// How far the search of one layer is.
struct TuneProgress {
    std::string spec{};
    std::int64_t num_tokens = 0;
    double elapsed_s = 0;
    double budget_s = 0;
    std::size_t candidates = 0;
    double best_ms = 0;  ///< milliseconds of forward and backward; 0: nothing is timed yet
};

/// Functions by which tune() tells its caller of its progress, in the calling thread, and asks whether to stop. Each may be empty.
struct TuneListener {
    std::function<void(const TuneProgress&)> progress{};  ///< called before each measurement; candidates is 0 when a search begins
    std::function<void(const std::string&)> warning{};
    std::function<bool()> stop{};  ///< whether to end; what has been measured is kept
};

/// A spec and number of tokens that has been tuned.
struct TunedLayer {
    Spec spec{};
    std::int64_t num_tokens = 0;     ///< the bucket
    std::filesystem::path record{};  ///< the file
    std::string best_plan{};         ///< canonical text; empty: no candidate is right
    double best_ms = 0;
    std::string default_plan{};  ///< the cost model's first choice
    std::size_t candidates = 0;  ///< candidates in the record
    std::size_t measured = 0;    ///< candidates measured by this call
    bool complete = false;       ///< whether the search was not stopped and not cut short
    double seconds = 0;
    std::int64_t compiled = 0;  ///< kernels and launchers that no cache had
};

/// A spec and number of tokens that could not be tuned.
struct UntunedLayer {
    Spec spec{};
    std::int64_t num_tokens = 0;
    std::string why{};
    ErrorKind kind = ErrorKind::environment;
};

struct TuneReport {
    std::vector<TunedLayer> layers{};
    std::vector<UntunedLayer> errors{};
    bool stopped = false;  ///< whether the listener stopped the call
    std::string json{};    ///< the object that `flce tune --json` prints
};

/// Tunes layer after layer; an error of one does not keep the others from it. Throws ArgumentError for options that cannot be met, and
/// EnvironmentError where there is no device or no flce command.
[[nodiscard]] TuneReport tune(const TuneOptions& options, const TuneListener& listener = {});

}  // namespace flce
