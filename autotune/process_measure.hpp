// How the tuner measures: candidates are compiled, checked and timed in child processes.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "autotune/search.hpp"
#include "flce/flce.hpp"
#include "flce/tune.hpp"
#include "runtime/workers/worker_pool.hpp"

namespace flce {

/// Layer that is measured, and how.
struct TuneTarget {
    Spec spec;
    Device device;
    SessionOptions session;
    WorkerCommand worker;  ///< runs serve_tuning()
    std::int64_t num_tokens = kTypicalTokens;
    std::int64_t workspace_limit_bytes = 0;
    bool retain = true;
    bool graphs = false;  ///< a sample is one CUDA graph
    double budget_s = 60;
    double candidate_timeout_s = 30;  ///< most time of one check or one sample, within a share of the budget
    double warm_up_s = 0;             ///< time for which a GPU is warmed up
};

/// The request by which a tuning worker compiles a plan's kernels into the cache. A plan that does not compile fails again, with the
/// reason, when it is run.
[[nodiscard]] Json compile_request(const Spec& spec, const Device& device, const Plan& plan, const std::filesystem::path& cache_dir);

/// Processes that compile: one for every two cores, since a set of kernels is compiled by several threads, and no more than memory has room
/// for.
[[nodiscard]] WorkerPool make_compile_pool(const WorkerCommand& worker, std::chrono::milliseconds patience);

/// Thrown by a measurement whose sample should have been a graph, and is not: it does not belong to the others.
class GraphsRefused : public std::exception {
public:
    explicit GraphsRefused(std::string why) : why_(std::move(why)) {}
    [[nodiscard]] const char* what() const noexcept override { return why_.c_str(); }

private:
    std::string why_;
};

class ProcessMeasure : public Measure {
public:
    /// Both must outlive it.
    ProcessMeasure(const TuneTarget& target, const TuneListener& listener);

    void prepare(std::span<const Plan> plans) override;
    void reserve(std::size_t samples) override { reserved_samples_ = samples; }
    [[nodiscard]] Measured check(const Plan& plan) override;
    /// Throws GraphsRefused where the target's samples are to be graphs and the driver cannot have one; so does time().
    [[nodiscard]] Measured resume(const Plan& plan) override;
    [[nodiscard]] Measured time(const Plan& plan) override;
    [[nodiscard]] bool stop() override;
    [[nodiscard]] bool nearly_over() override;
    void progress(const std::string& stage, std::size_t candidates, std::size_t measurements, double best_ms) override;

    [[nodiscard]] double elapsed_s() const;
    /// Number of processes that candidates have run in so far: one, and one more for each candidate that took its process with it.
    [[nodiscard]] std::size_t processes() const { return processes_; }
    /// Kernels and launchers that no cache had.
    [[nodiscard]] std::int64_t compiled() const { return compiled_; }

private:
    [[nodiscard]] Json open_request() const;
    /// A worker with the layer. Throws EnvironmentError where there was none before, else MeasureStopped: what has been measured stays.
    void start();
    /// Seconds until a check or a sample counts as hanging: a hanging one must leave time for others.
    [[nodiscard]] double patience_s() const;
    [[nodiscard]] double sample_s() const { return samples_ == 0 ? first_sample_s_ : sampling_s_ / static_cast<double>(samples_); }
    /// Result of a request; throws MeasureStopped where the budget or the user ended it.
    [[nodiscard]] Measured ask(const Json& request, Json& answer);
    void expect_graphs(const Json& answer) const;

    void warn(const std::string& text) const;
    /// Tells the listener, and of which layer.
    void report(TuneProgress progress) const;

    const TuneTarget& target_;
    const TuneListener& listener_;
    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
    std::unique_ptr<WorkerProcess> worker_;
    WorkerPool compilers_;
    std::map<std::string, Measured> uncompiled_;  ///< plans whose compiler hung or died
    std::size_t processes_ = 0;
    std::int64_t compiled_ = 0;
    std::size_t reserved_samples_ = 0;  ///< samples for which time is left
    std::set<std::string> sampled_;     ///< plans; the first sample of each takes longer than the others
    std::size_t samples_ = 0;           ///< others
    double sampling_s_ = 0;             ///< seconds that these samples took
    double first_sample_s_ = 0;         ///< seconds that a new plan's first sample took
    bool started_ = false;
    bool warm_ = false;     ///< the worker's device has been warmed up
    bool stopped_ = false;  ///< whether the listener stopped the search
};

struct MeasuredSearch {
    Record record;
    SearchResult result;
    double seconds = 0;
    std::size_t processes = 0;  ///< processes that candidates ran in
    std::int64_t compiled = 0;  ///< kernels and launchers that no cache had
};
/// search() of one record, whose times are all measured in one way: as graphs where the target asks for graphs. Where the driver refuses a
/// graph, the search begins again without graphs, in the rest of the budget. `begin` returns the record of a policy, with all that is
/// known.
[[nodiscard]] MeasuredSearch measured_search(TuneTarget target, const SearchOptions& options, const TuneListener& listener,
                                             const std::function<Record(std::string_view policy)>& begin);

}  // namespace flce
