// A tuning record: measurements of a layer's plans on one kind of device, and the best plan. docs/tuning.md describes the file.
//
// Grammar, schema 2: one JSON object, UTF-8, at most kMaxRecordBytes:
//   schema          2
//   subject         64 hexadecimal digits: SHA-256 of device and spec, by which readers find records without reading all of them
//   device          kind ("cuda", "cpu"), name, units (SMs, threads in use), l2_bytes
//                   and features (CPUs: vectors, a digest of LLVM's feature string)
//   kernel_version  digest of the generator of the kernels, see records/kernel_version.hpp
//   spec            canonical text, normalized, without tied: kernels are those of its grad_weight_mode
//   num_tokens      one of token_buckets()
//   memory          scratch_bytes, workspace_limit_bytes (0: none), retained ("auto", "none")
//   policy          kGraphMeasurementPolicy or kLaunchMeasurementPolicy
//   runs            {id: {date, version, commit, device, driver, clocks, searched}}: each call of the tuner that measured something
//   candidates      [{plan, rank, outcome, why, workspace_bytes, retained_bytes, times_ms: {run id: [milliseconds, …]}}]
//   best            {plan, median_ms}, or null: for people, readers decide again
// History: 2: workspace_limit_bytes has the name that it has elsewhere.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"

namespace flce {

inline constexpr std::size_t kMaxRecordBytes = 4U << 20;
inline constexpr std::size_t kMaxRecordCandidates = 4096;
inline constexpr std::size_t kMaxRecordTextBytes = 4096;  ///< most bytes of a plan, a spec, a reason, a run's id
/// Most bytes that a writer keeps of a text that others make: bytes that are not UTF-8 take three each in the file.
inline constexpr std::size_t kMaxGivenTextBytes = 1024;

/// Forward and backward together, candidates in turns, buffers beyond the last cache, medians; changes when times stop being comparable. A
/// sample is one CUDA graph, or launches one after another: of CPUs, and of GPUs whose driver refuses graphs (or that were measured before
/// there were any here).
inline constexpr std::string_view kGraphMeasurementPolicy = "forward+backward, interleaved, graph, median 2";
inline constexpr std::string_view kLaunchMeasurementPolicy = "forward+backward, interleaved, median 1";

/// Candidates so close to the best are as good as it: the first of them in a fixed order wins, so that noise does not choose.
inline constexpr double kTieMargin = 0.02;
/// Samples without which a candidate does not win against one that has them.
inline constexpr std::size_t kEnoughSamples = 5;

/// Properties that two devices must share for times of one to hold on the other.
struct TunedDevice {
    std::string kind;
    std::string name;  ///< name of the product, as the tables have it; the driver's name where they do not know it
    int units = 0;     ///< SMs, or a CPU's threads in use
    std::int64_t l2_bytes = 0;
    std::string features;  ///< features of a CPU
    friend bool operator==(const TunedDevice&, const TunedDevice&) = default;
};
/// One text for a device that is here and for one described by its product's name. An architecture's name stands for the product whose
/// figures it has.
[[nodiscard]] TunedDevice tuned_device(const Device& device);

/// RecordKey::retained: as much as grad_weight's memory holds or the limit leaves; or nothing.
inline constexpr std::string_view kRetainedAutomatically = "auto";
inline constexpr std::string_view kNothingRetained = "none";

struct RecordKey {
    TunedDevice device;
    std::string kernel_version;
    std::string spec;
    PlanRequest request{};                         ///< num_tokens is one of token_buckets()
    std::string retained{kRetainedAutomatically};  ///< kind of memory that forward left to backward
    std::string policy{kGraphMeasurementPolicy};
    friend bool operator==(const RecordKey&, const RecordKey&) = default;

    /// 64 hexadecimal digits: a digest of device and spec, and one of everything.
    [[nodiscard]] std::string subject() const;
    [[nodiscard]] std::string digest() const;
    /// "<subject's first 16>/<num_tokens>-<digest's first 16>.json", below a directory of records.
    [[nodiscard]] std::filesystem::path file() const;
};
/// The key of the request's token bucket. `threads`: threads that kernels of a CPU run on, 0: one on each core. The policy is the one of
/// measurements on such a device where nothing hinders them.
[[nodiscard]] RecordKey record_key(const Spec& spec, const Device& device, const PlanRequest& request,
                                   std::string_view retained = kRetainedAutomatically, int threads = 0);

/// Result of a candidate, better ones first. `failed`: it could not be compiled or launched; `faulted`: it took its process with it.
enum class Outcome : std::uint8_t { ok, failed, faulted, hung, wrong };
[[nodiscard]] std::string_view to_string(Outcome outcome) noexcept;

struct Candidate {
    int rank = 0;  ///< place in the fixed order: the cost model's, then whatever it does not list
    Outcome outcome = Outcome::ok;
    std::string why;  ///< reason why the candidate is not ok
    std::int64_t workspace_bytes = 0;
    std::int64_t retained_bytes = 0;                      ///< bytes beside grad_weight's memory
    std::map<std::string, std::vector<double>> times_ms;  ///< times by run
    friend bool operator==(const Candidate&, const Candidate&) = default;

    [[nodiscard]] std::size_t sample_count() const;
    /// Median of all runs' samples; infinity where there is none.
    [[nodiscard]] double median_ms() const;
};

/// Origin of times, for people: conditions that times depend on and that the key does not hold.
struct TuningRun {
    std::string date;
    std::string version;  ///< version of flce
    std::string commit;
    std::string device;  ///< device's name by the driver
    std::string driver;
    std::string clocks;
    std::string searched;  ///< the space that its search went through to the end; empty: it was stopped
    friend bool operator==(const TuningRun&, const TuningRun&) = default;
};

struct Record {
    RecordKey key;
    std::map<std::string, TuningRun> runs;        ///< runs by id
    std::map<std::string, Candidate> candidates;  ///< candidates by plan text
    friend bool operator==(const Record&, const Record&) = default;

    /// Plan text of the best candidate: the correct candidates that have been timed as often as kEnoughSamples asks (or as often as any has
    /// been), among them those within kTieMargin of the quickest, and among these the first by rank and plan text. Empty where none is
    /// left.
    [[nodiscard]] std::string best_plan() const;
    /// Samples without which a candidate is not the best: kEnoughSamples, or as many as any has.
    [[nodiscard]] std::size_t samples_to_win() const;
    /// All correct candidates that have been timed: the best, then the others, those timed often enough first, the quickest of them first.
    [[nodiscard]] std::vector<std::string> ranked_plans() const;
};

/// Milliseconds as records keep them: four digits are more than times repeat to.
[[nodiscard]] double recorded_ms(double ms);
[[nodiscard]] std::string record_text(const Record& record);
/// std::nullopt, and the reason in `why`, for text that is not a record of this schema. Nothing in it is trusted: sizes are bounded, the
/// subject is computed again, plans are only text.
[[nodiscard]] std::optional<Record> parse_record(std::string_view text, std::string& why);
/// The subject that a record says it has, without reading the rest; empty where there is none. Only parse_record knows whether it is true.
[[nodiscard]] std::string_view peek_subject(std::string_view text) noexcept;

/// Everything that either record knows. For one run's times of a candidate the longer list counts (then the greater one), for outcomes the
/// worse, for ranks the smaller; so merging is commutative, associative and idempotent. Precondition: equal keys.
[[nodiscard]] Record merged(const Record& a, const Record& b);

/// Part of a record that a file has room for: all of it, or else without the times of its oldest runs (by date, then id), as many as it
/// takes, and without the correct candidates that have no other times. Bad outcomes stay. `dropped_runs`: number of runs left out.
[[nodiscard]] Record fitted(Record record, std::size_t& dropped_runs);

/// Change that makes times of the two runs hard to compare ("driver 580.1, then 590.2"); empty: none.
[[nodiscard]] std::string provenance_change(const TuningRun& before, const TuningRun& now);

}  // namespace flce
