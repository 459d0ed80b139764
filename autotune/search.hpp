// The search for the best plan. The search knows nothing of devices and clocks: measuring is a callback, which may be a process of its own.
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "records/record.hpp"

namespace flce {

/// Result of a measurement.
struct Measured {
    Outcome outcome = Outcome::ok;
    std::string why;                   ///< reason why the outcome is not ok
    double ms = 0;                     ///< milliseconds of time()
    std::int64_t workspace_bytes = 0;  ///< bytes of check()
    std::int64_t retained_bytes = 0;
};

/// Thrown by a measurement that was given up, with no result: the search ends with the results that it has.
class MeasureStopped : public std::exception {
public:
    [[nodiscard]] const char* what() const noexcept override { return "measuring was stopped"; }
};

class Measure {
public:
    virtual ~Measure() = default;
    /// Told of plans before they are asked for, so that they may be compiled side by side.
    virtual void prepare(std::span<const Plan> /*plans*/) {}
    /// Tells how many samples have to be taken in any case: nearly_over() leaves time for them.
    virtual void reserve(std::size_t /*samples*/) {}
    /// Runs the plan once and compares every output. Nothing is timed that has not passed.
    [[nodiscard]] virtual Measured check(const Plan& plan) = 0;
    /// Brings the device to the state that it has between samples, by running this plan. Called before the first sample after anything
    /// else.
    [[nodiscard]] virtual Measured resume(const Plan& /*plan*/) { return {}; }
    /// Forward and backward, once (or as often as makes one reliable sample), warm.
    [[nodiscard]] virtual Measured time(const Plan& plan) = 0;
    /// Whether the budget is spent, or the user has had enough: the search ends with the results that it has.
    [[nodiscard]] virtual bool stop() = 0;
    /// Whether only so much time is left that the last rounds should begin. Work that prepare() has begun is given up then.
    [[nodiscard]] virtual bool nearly_over() { return stop(); }
    /// Told of the search's place before every measurement.
    virtual void progress(const std::string& /*stage*/, std::size_t /*candidates*/, std::size_t /*measurements*/, double /*best_ms*/) {}
};

struct SearchOptions {
    std::string run;  ///< id of this run, under which its times are kept
    PlanRequest request;
    std::vector<Plan> extra;  ///< candidates of the user's, measured before all others
    /// Plan that a session without records takes, where it is another than the first by rates that the search's device has alone.
    std::optional<Plan> default_plan{};
    int library_version = 0;        ///< seed_plans'
    std::size_t seeds = 3;          ///< first candidates of the favourite path and strategy, beside one of each other
    std::vector<std::string> only;  ///< names of the coordinates to vary; empty: all
    std::size_t finalists = 4;      ///< the quickest few; the cost model's choice, and at most as many of the user's are timed with them
    std::size_t exhaustive = 0;     ///< > 0: the most combinations of everything, which are measured in place of the descent
};

struct SearchResult {
    std::string best_plan;         ///< best plan of the record; empty: no candidate is left
    std::string default_plan;      ///< the cost model's first choice
    std::size_t measured = 0;      ///< candidates that this search has timed
    std::size_t combinations = 0;  ///< combinations in an exhaustive search, or options.exhaustive where there are more
    bool complete = false;         ///< whether the search was not stopped and not cut short
};

/// Adds all measurements to `record`, whose key names the layer, the device and the way of measuring.
///
/// 1. The cost model's first plans of every path race each other.
/// 2. From the best plan the search varies one coordinate at a time (each GEMM's tile, chunk, order of tiles) until nothing gains.
/// 3. The best few and the cost model's first choice are timed in turns once more. Only the times of these rounds are kept for them, so
///    that they compare plans and not the machine's states at different times. The winner has been in such rounds.
///
/// A race is successive halving: every candidate in it is timed once a round, then the slower half leaves. A candidate that is far behind
/// leaves at once.
///
/// Candidates with times in the record are not measured again: they take part with these times. A candidate that is no plan, or not legal
/// here, becomes `failed`. Where an earlier search has been through the same space, this one goes on from a new candidate only where that
/// is the best.
[[nodiscard]] SearchResult search(const Spec& spec, const Device& device, const SearchOptions& options, Measure& measure, Record& record);

}  // namespace flce
