// The tuner: measures plans of layers on this machine's device and keeps what it has measured in records.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "autotune/process_measure.hpp"
#include "autotune/search.hpp"
#include "flce/flce.hpp"
#include "records/record_store.hpp"

namespace flce {

/// What is tuned, and how. Every spec is tuned for every number of tokens.
struct TuneOptions {
    std::vector<Spec> specs;
    std::vector<std::int64_t> num_tokens;  ///< rows of hidden; each stands for its token bucket. Empty: kTypicalTokens
    SessionOptions session;                ///< device, cache, threads, scratch_bytes
    std::int64_t workspace_limit_bytes = 0;
    bool retain = true;                    ///< forward leaves to backward what grad_weight's memory or the limit has room for
    std::vector<Plan> plans;               ///< further candidates
    double budget_s = 60;                  ///< seconds for each spec and number of tokens
    double candidate_timeout_s = 30;       ///< until a candidate that gives no answer hangs; at most a quarter of the budget
    std::vector<std::string> coordinates;  ///< what to vary (coordinate_names); empty: everything
    std::size_t exhaustive = 0;            ///< > 0: measure that many combinations instead of descending
    std::filesystem::path records_dir;     ///< where records are kept; empty: the session's
    std::string commit;                    ///< kept with the measurements
    bool fresh = false;                    ///< measure everything again and replace the records
    WorkerCommand worker;                  ///< runs serve_tuning()
    bool always_graphs = false;            ///< for tests: samples are graphs on a CPU too
};

/// A spec and number of tokens that has been tuned.
struct Tuned {
    Spec spec;
    std::filesystem::path file;  ///< of the record
    Record record;
    SearchResult result;
    double seconds = 0;
    std::size_t processes = 0;  ///< that candidates ran in
    std::int64_t compiled = 0;  ///< kernels and launchers that no cache had
};

/// A spec and number of tokens that could not be tuned.
struct Untuned {
    Spec spec;
    std::int64_t num_tokens = 0;
    std::string why;
    ErrorKind kind = ErrorKind::environment;
};

/// What a tuner tells its caller, in the thread that runs it, and asks it. Each may be empty.
struct TuneListener {
    std::function<void(const Spec&, std::int64_t num_tokens, const SearchProgress&)> progress{};
    std::function<void(const std::string&)> warning{};
    std::function<void(const Tuned&)> tuned{};  ///< when a layer is done
    std::function<bool()> stop{};               ///< whether to end; what has been measured is kept
};

class Tuner {
public:
    /// Throws ArgumentError for options that cannot be met, and what Session does.
    Tuner(TuneOptions options, TuneListener listener);

    /// Tunes layer after layer. An error of one layer does not keep the others from it.
    void run();
    [[nodiscard]] const std::vector<Tuned>& tuned() const { return tuned_; }
    [[nodiscard]] const std::vector<Untuned>& untuned() const { return untuned_; }

private:
    void tune_or_note(const Spec& spec, std::int64_t num_tokens);
    [[nodiscard]] Tuned tune(const Spec& spec, std::int64_t num_tokens);
    [[nodiscard]] TuneTarget target(const Spec& spec, std::int64_t num_tokens, std::int64_t scratch_bytes) const;
    [[nodiscard]] Record begin_record(const RecordKey& key, const TuningRun& run, const std::string& id);
    void keep(const std::string& run, Tuned& tuned);
    [[nodiscard]] bool stopped() const { return listener_.stop && listener_.stop(); }

    TuneOptions options_;
    TuneListener listener_;
    Session session_;
    RecordStore store_;
    std::vector<Tuned> tuned_;
    std::vector<Untuned> untuned_;
};

/// The buckets of options.num_tokens, each once.
[[nodiscard]] std::vector<std::int64_t> tuned_tokens(const TuneOptions& options);
/// What plans are compared for: a call with these options, with the scratch that a session would give it.
[[nodiscard]] PlanRequest tuned_request(const TuneOptions& options, Session& session, const Spec& spec, const Device& device,
                                        std::int64_t num_tokens);
/// Throws ArgumentError for a name in options.coordinates that plans for such a device do not have.
void check_coordinates(const TuneOptions& options, DeviceKind kind);

}  // namespace flce
