#include "autotune/search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "autotune/search_space.hpp"
#include "cache/artifact_cache.hpp"
#include "flce/error.hpp"

namespace flce {
namespace {

/// A single change must gain more than this to be kept; the last decision has a margin of its own.
constexpr double kStepMargin = 0.005;
constexpr int kRaceRounds = 2;  ///< before the first half leaves, and between halves
constexpr int kMostSweeps = 3;
constexpr double kFarBehind = 1.25;

class Search {
public:
    Search(const Spec& spec, const Device& device, const SearchOptions& options, Measure& measure, Record& record)
        : spec_(spec), device_(device), options_(options), measure_(measure), record_(record), order_(spec, device, options.request) {
        for (auto& [plan, candidate] : record.candidates) {
            distrust(plan, candidate);
            if (candidate.outcome != Outcome::ok || candidate.sample_count() > 0) known_.push_back(plan);
        }
    }

    SearchResult run() {
        SearchResult result;
        const std::vector<Plan> seeds = seed_plans(spec_, device_, options_.request, options_.seeds);
        result.default_plan = seeds.front().text();
        try {
            explore(seeds);
            finish(seeds.front());
        } catch (const MeasureStopped&) {
            stopped_ = true;
        }
        if (!stopped_ && searched_through_ && !timed_.empty()) record_.runs[options_.run].searched = space_digest(seeds.front());
        result.best_plan = record_.best_plan();
        result.measured = timed_.size();
        result.complete = !stopped_ && searched_through_;
        return result;
    }

private:
    void explore(const std::vector<Plan>& seeds) {
        // Whatever else there is time for: without the default there is nothing to compare with.
        std::vector<Plan> first{seeds.front()};
        std::ranges::copy(options_.extra, std::back_inserter(first));
        Plan best = race("given", first, seeds.front());
        std::vector<Plan> firsts = joined(best, seeds);
        // What an earlier search found is where this one goes on.
        if (const std::string before = record_.best_plan(); !before.empty()) firsts = joined(parse_plan(before), firsts);
        best = race("first choices", firsts, best);
        const std::string space = space_digest(seeds.front());
        const bool searched = std::ranges::any_of(record_.runs, [&](const auto& run) { return run.second.searched == space; });
        if (searched && known(best.text())) {
            // Nothing new is the best.
        } else if (options_.exhaustive > 0) {
            best = race("every combination", all_combinations(spec_, device_, best, options_.only, options_.exhaustive), best);
        } else {
            best = descend(best);
        }
        searched_through_ = !measure_.nearly_over();
    }

    [[nodiscard]] bool stop() {
        stopped_ = stopped_ || measure_.stop();
        return stopped_;
    }
    /// What a search with these options can reach.
    [[nodiscard]] std::string space_digest(const Plan& from) const {
        KeyBuilder key("tuning space");
        key.add("exhaustive", std::to_string(options_.exhaustive));
        for (const Coordinate& coordinate : coordinates(spec_, device_, from, options_.only)) {
            for (const Plan& plan : coordinate.plans) key.add(coordinate.name, plan.text());
        }
        constexpr std::size_t kDigits = 16;
        return key.finish().hex().substr(0, kDigits);
    }
    [[nodiscard]] bool known(const std::string& plan) const { return std::ranges::find(known_, plan) != known_.end(); }
    [[nodiscard]] static std::vector<Plan> joined(const Plan& first, const std::vector<Plan>& more) {
        std::vector<Plan> all{first};
        for (const Plan& plan : more) {
            if (std::ranges::find(all, plan) == all.end()) all.push_back(plan);
        }
        return all;
    }
    [[nodiscard]] double median(const Plan& plan) const {
        const auto found = record_.candidates.find(plan.text());
        const bool counts = found != record_.candidates.end() && found->second.outcome == Outcome::ok;
        return counts ? found->second.median_ms() : std::numeric_limits<double>::infinity();
    }

    void report(const std::string& stage) {
        const std::string best = record_.best_plan();
        measure_.progress(stage, record_.candidates.size(), measurements_, best.empty() ? 0 : record_.candidates.at(best).median_ms());
    }

    /// Outcomes only get worse.
    static void note(Candidate& candidate, const Measured& measured) {
        if (measured.outcome <= candidate.outcome) return;
        candidate.outcome = measured.outcome;
        candidate.why = measured.why.substr(0, kMaxGivenTextBytes);
    }

    /// What a file says of a plan that cannot run here was never measured: its times count for nothing.
    void distrust(const std::string& text, Candidate& candidate) const {
        if (candidate.outcome != Outcome::ok) return;
        std::optional<std::string> why;
        try {
            const Plan plan = parse_plan(text);
            why = plan.text() == text ? illegal_reason(spec_, device_, plan) : "not a plan's canonical text";
        } catch (const PlanError& error) {
            why = error.what();
        }
        if (why) note(candidate, {.outcome = Outcome::failed, .why = *why});
    }

    /// Whether the plan is in the record and correct, checking it where it is new.
    bool admit(const Plan& plan) {
        const std::string text = plan.text();
        const auto found = record_.candidates.find(text);
        if (found != record_.candidates.end()) return found->second.outcome == Outcome::ok;
        if (record_.candidates.size() >= kMaxRecordCandidates) return false;
        const Measured measured = measure_.check(plan);
        ++measurements_;
        Candidate& candidate = record_.candidates[text];
        candidate.rank = order_.rank(plan);
        candidate.workspace_bytes = measured.workspace_bytes;
        candidate.retained_bytes = measured.retained_bytes;
        note(candidate, measured);
        return candidate.outcome == Outcome::ok;
    }

    void time(const Plan& plan) {
        const std::string text = plan.text();
        const Measured measured = measure_.time(plan);
        ++measurements_;
        Candidate& candidate = record_.candidates.at(text);
        note(candidate, measured);
        if (measured.outcome != Outcome::ok) return;
        candidate.times_ms[options_.run].push_back(recorded_ms(measured.ms));
        if (std::ranges::find(timed_, text) == timed_.end()) timed_.push_back(text);
    }

    /// One sample of each that is new, beginning elsewhere each round so that none always follows the same one.
    void round(const std::string& stage, const std::vector<Plan>& plans) {
        for (std::size_t i = 0; i < plans.size() && !stop(); ++i) {
            const Plan& plan = plans[(i + rounds_) % plans.size()];
            report(stage);
            if (!known(plan.text())) time(plan);
        }
        ++rounds_;
    }

    void drop_failed(std::vector<Plan>& plans) {
        std::erase_if(plans, [&](const Plan& plan) {
            const auto found = record_.candidates.find(plan.text());
            return found == record_.candidates.end() || found->second.outcome != Outcome::ok;
        });
    }

    void drop_slow(std::vector<Plan>& plans) {
        double quickest = std::numeric_limits<double>::infinity();
        for (const Plan& plan : plans) quickest = std::min(quickest, median(plan));
        std::erase_if(plans, [&](const Plan& plan) { return median(plan) > quickest * kFarBehind; });
    }

    /// The quickest of `plans` by successive halving; `current`, if nothing else gains.
    Plan race(const std::string& stage, const std::vector<Plan>& plans, const Plan& current) {
        std::vector<Plan> fresh;
        for (const Plan& plan : plans) {
            if (!record_.candidates.contains(plan.text())) fresh.push_back(plan);
        }
        if (!stop() && !fresh.empty()) measure_.prepare(fresh);
        std::vector<Plan> alive;
        for (const Plan& plan : plans) {
            if (stop()) break;
            report(stage);
            if (admit(plan)) alive.push_back(plan);
        }
        while (alive.size() > 1 && !stop()) {
            for (int i = 0; i < kRaceRounds && !stop(); ++i) {
                round(stage, alive);
                drop_failed(alive);
                drop_slow(alive);
            }
            std::ranges::stable_sort(alive, {}, [&](const Plan& plan) { return median(plan); });
            alive.resize((alive.size() + 1) / 2);
        }
        drop_failed(alive);
        if (alive.size() == 1 && !stop() && std::isinf(median(alive.front()))) round(stage, alive);
        if (alive.empty()) return current;
        const Plan& quickest = *std::ranges::min_element(alive, {}, [&](const Plan& plan) { return median(plan); });
        return median(quickest) < median(current) * (1 - kStepMargin) ? quickest : current;
    }

    Plan descend(Plan best) {
        for (int sweep = 0; sweep < kMostSweeps && !measure_.nearly_over(); ++sweep) {
            const Plan before = best;
            std::vector<std::string> names;
            for (const Coordinate& coordinate : coordinates(spec_, device_, best, options_.only)) names.push_back(coordinate.name);
            for (const std::string& name : names) {
                if (measure_.nearly_over()) break;
                for (const Coordinate& coordinate : coordinates(spec_, device_, best, options_.only)) {
                    if (coordinate.name != name) continue;
                    best = race(name, coordinate.plans, best);
                    break;
                }
            }
            if (best == before) break;
        }
        return best;
    }

    /// The quickest few, and the default.
    [[nodiscard]] std::vector<Plan> finalists(const Plan& default_plan) const {
        std::vector<std::pair<double, std::string>> ranking;
        for (const auto& [plan, candidate] : record_.candidates) {
            if (candidate.outcome == Outcome::ok && candidate.sample_count() > 0) ranking.emplace_back(candidate.median_ms(), plan);
        }
        std::ranges::sort(ranking);
        if (ranking.size() > options_.finalists) ranking.resize(options_.finalists);
        std::vector<Plan> plans;
        for (const auto& [ms, text] : ranking) plans.push_back(parse_plan(text));
        if (!std::isinf(median(default_plan)) && std::ranges::find(plans, default_plan) == plans.end()) plans.push_back(default_plan);
        return plans;
    }

    /// Finalists are timed in turns until each has been as often as a winner must have been; that may make others the quickest.
    void finish(const Plan& default_plan) {
        std::vector<std::string> done = known_;
        std::erase_if(done, [&](const std::string& plan) { return record_.candidates.at(plan).sample_count() < kEnoughSamples; });
        while (!stop()) {
            std::vector<Plan> plans = finalists(default_plan);
            std::erase_if(plans, [&](const Plan& plan) { return std::ranges::find(done, plan.text()) != done.end(); });
            if (plans.empty()) return;
            for (const Plan& plan : plans) {
                done.push_back(plan.text());
                std::erase(known_, plan.text());
            }
            for (std::size_t i = 0; i < kEnoughSamples && !stop(); ++i) {
                round("final", plans);
                drop_failed(plans);
            }
        }
    }

    const Spec& spec_;
    const Device& device_;
    const SearchOptions& options_;
    Measure& measure_;
    Record& record_;
    PlanOrder order_;
    std::vector<std::string> known_;  ///< before this search
    std::vector<std::string> timed_;
    std::size_t measurements_ = 0;
    std::size_t rounds_ = 0;
    bool stopped_ = false;
    bool searched_through_ = false;
};

}  // namespace

SearchResult search(const Spec& spec, const Device& device, const SearchOptions& options, Measure& measure, Record& record) {
    return Search(spec, device, options, measure, record).run();
}

}  // namespace flce
