// The tuner behind flce/tune.hpp, with the records that it writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "autotune/process_measure.hpp"
#include "autotune/search.hpp"
#include "flce/tune.hpp"
#include "records/record_store.hpp"

namespace flce {

/// A spec and number of tokens that has been tuned.
struct Tuned {
    Spec spec;
    std::filesystem::path file;  ///< file of the record
    Record record;
    SearchResult result;
    double seconds = 0;
    std::size_t processes = 0;  ///< processes that candidates ran in
    std::int64_t compiled = 0;  ///< kernels and launchers that no cache had
};

/// Functions by which a tuner tells its caller of its progress, in the thread that runs it, and asks whether to stop. Each may be empty.
struct TunerListener {
    std::function<void(const TuneProgress&)> progress{};  ///< hears of progress like a TuneListener's
    std::function<void(const std::string&)> warning{};
    std::function<void(const Tuned&)> tuned{};  ///< hears of each layer that is done
    std::function<bool()> stop{};               ///< whether to end; what has been measured is kept
};

/// The processes that a tuner measures in.
struct TunerWorkers {
    WorkerCommand command;       ///< runs a TuneWorker
    bool always_graphs = false;  ///< samples are graphs on a CPU too; for tests
    bool always_rates = false;   ///< a GPU's rates are measured even where the cost model has them; for tests
};

class Tuner {
public:
    /// Throws ArgumentError for options that cannot be met, and what Session does.
    Tuner(TuneOptions options, TunerWorkers workers, TunerListener listener);

    /// Tunes layer after layer. An error of one layer does not keep the others from it.
    void run();
    /// The session's device, after run() with rates that were measured on it, where the cost model has none of such a GPU.
    [[nodiscard]] const Device& device() const noexcept { return device_; }
    [[nodiscard]] const std::vector<Tuned>& tuned() const { return tuned_; }
    [[nodiscard]] const std::vector<UntunedLayer>& untuned() const { return untuned_; }

private:
    void measure_device();
    void tune_or_note(const Spec& spec, std::int64_t num_tokens);
    [[nodiscard]] Tuned tune(const Spec& spec, std::int64_t num_tokens);
    [[nodiscard]] TuneTarget target(const Spec& spec, std::int64_t num_tokens, std::int64_t scratch_bytes) const;
    [[nodiscard]] Record begin_record(const RecordKey& key, const TuningRun& run, const std::string& id);
    void keep(const std::string& run, Tuned& tuned);
    [[nodiscard]] bool stopped() const { return listener_.stop && listener_.stop(); }

    TuneOptions options_;
    TunerWorkers workers_;
    TunerListener listener_;
    Session session_;
    Device device_;
    RecordStore store_;
    std::vector<Tuned> tuned_;
    std::vector<UntunedLayer> untuned_;
};

/// The buckets of options.num_tokens, each once.
[[nodiscard]] std::vector<std::int64_t> tuned_tokens(const TuneOptions& options);
/// Request that plans are compared for: a call with these options, with the scratch that a session would give it.
[[nodiscard]] PlanRequest tuned_request(const TuneOptions& options, Session& session, const Spec& spec, const Device& device,
                                        std::int64_t num_tokens);
/// Throws ArgumentError for a name in options.coordinates that plans for such a device do not have.
void check_coordinates(const TuneOptions& options, DeviceKind kind);

}  // namespace flce
