#include "autotune/search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>

#include "autotune/search_space.hpp"
#include "cache/artifact_cache.hpp"
#include "flce/error.hpp"

namespace flce {
namespace {

/// A single change must gain more than this to be kept; the last decision has a margin of its own.
constexpr double kStepMargin = 0.005;
constexpr int kRaceRounds = 2;  ///< before the first half leaves, and between halves
constexpr int kMostSweeps = 3;
constexpr std::size_t kCompiledAtOnce = 64;
constexpr double kFarBehind = 1.25;
constexpr int kMostLastRounds = 8;  ///< rounds after which a search ends where noise goes on making others the winner

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
        std::vector<Plan> seeds = seed_plans(spec_, device_, options_.request, options_.seeds, options_.library_version);
        if (options_.default_plan) {
            std::erase(seeds, *options_.default_plan);
            seeds.insert(seeds.begin(), *options_.default_plan);
        }
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
        result.combinations = combinations_;
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
        // this search goes on from the best plan of an earlier one
        if (const std::string before = record_.best_plan(); !before.empty()) firsts = joined(parse_plan(before), firsts);
        best = race("first choices", firsts, best);
        const std::string space = space_digest(seeds.front());
        const bool searched = std::ranges::any_of(record_.runs, [&](const auto& run) { return run.second.searched == space; });
        if (searched && known(best.text())) {
            // Nothing new is the best.
        } else if (options_.exhaustive > 0) {
            const std::vector<Plan> all = all_combinations(spec_, device_, best, options_.only, options_.exhaustive);
            combinations_ = all.size();
            best = race("every combination", all, best);
        } else {
            best = descend(best);
        }
        searched_through_ = !cut_short_;
    }

    [[nodiscard]] bool stop() {
        stopped_ = stopped_ || measure_.stop();
        return stopped_;
    }
    /// Whether the search for others has to end. Until something is timed there is nothing to leave time for.
    [[nodiscard]] bool over() {
        const bool is_over = stop() || (!finishing_ && !timed_.empty() && measure_.nearly_over());
        cut_short_ = cut_short_ || is_over;
        return is_over;
    }
    /// Digest of the plans that a search with these options can reach.
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

    /// Marks a plan of a file that cannot run here: its times were never measured and count for nothing.
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
        paused_ = true;
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
        // The first candidate after a pause would pay for it.
        Measured measured = paused_ ? measure_.resume(plan) : Measured{};
        if (measured.outcome == Outcome::ok) measured = measure_.time(plan);
        paused_ = measured.outcome != Outcome::ok;
        ++measurements_;
        Candidate& candidate = record_.candidates.at(text);
        note(candidate, measured);
        if (paused_) return;
        candidate.times_ms[options_.run].push_back(recorded_ms(measured.ms));
        if (std::ranges::find(timed_, text) != timed_.end()) return;
        timed_.push_back(text);
        measure_.reserve(last_samples());
    }

    /// One sample of each that is new, beginning elsewhere each round so that none always follows the same one.
    void round(const std::string& stage, const std::vector<Plan>& plans) {
        for (std::size_t i = 0; i < plans.size() && !over(); ++i) {
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

    /// Checks plans and returns the correct ones, as many as there is time to check and to time once.
    std::vector<Plan> admitted(const std::string& stage, std::span<const Plan> plans) {
        std::vector<Plan> alive;
        for (std::size_t begin = 0; begin < plans.size() && !over(); begin += kCompiledAtOnce) {
            const auto batch = plans.subspan(begin, std::min(kCompiledAtOnce, plans.size() - begin));
            std::vector<Plan> fresh;
            std::ranges::copy_if(batch, std::back_inserter(fresh),
                                 [&](const Plan& plan) { return !record_.candidates.contains(plan.text()); });
            if (!fresh.empty()) measure_.prepare(fresh);
            for (const Plan& plan : batch) {
                if (over()) break;
                report(stage);
                if (admit(plan)) alive.push_back(plan);
                measure_.reserve(last_samples() + kRaceRounds * alive.size());
            }
        }
        measure_.reserve(last_samples());
        return alive;
    }

    /// The quickest of `plans` by successive halving; `current`, if nothing else gains.
    Plan race(const std::string& stage, const std::vector<Plan>& plans, const Plan& current) {
        std::vector<Plan> alive = admitted(stage, plans);
        while (alive.size() > 1 && !over()) {
            for (int i = 0; i < kRaceRounds && !over(); ++i) {
                round(stage, alive);
                drop_failed(alive);
                drop_slow(alive);
            }
            std::ranges::stable_sort(alive, {}, [&](const Plan& plan) { return median(plan); });
            alive.resize((alive.size() + 1) / 2);
        }
        drop_failed(alive);
        if (alive.size() == 1 && !over() && std::isinf(median(alive.front()))) round(stage, alive);
        if (alive.empty()) return current;
        const Plan& quickest = *std::ranges::min_element(alive, {}, [&](const Plan& plan) { return median(plan); });
        return median(quickest) < median(current) * (1 - kStepMargin) ? quickest : current;
    }

    Plan descend(Plan best) {
        for (int sweep = 0; sweep < kMostSweeps && !over(); ++sweep) {
            const Plan before = best;
            std::vector<std::string> names;
            for (const Coordinate& coordinate : coordinates(spec_, device_, best, options_.only)) names.push_back(coordinate.name);
            for (const std::string& name : names) {
                if (over()) break;
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

    /// The user's candidates that are timed as reliably as the quickest are.
    [[nodiscard]] std::vector<Plan> steady_extras() const {
        return options_.extra.size() <= options_.finalists ? options_.extra : std::vector<Plan>();
    }
    /// Samples that the last rounds would take if they began soon.
    [[nodiscard]] std::size_t last_samples() const {
        constexpr std::size_t kBeside = 2;  // the default, and the winner by the fixed order
        return kEnoughSamples * std::min(timed_.size() + 1, options_.finalists + kBeside + steady_extras().size());
    }
    [[nodiscard]] bool timed(const Plan& plan) const { return !std::isinf(median(plan)); }

    /// The quickest few, the present winner, the default and the user's.
    [[nodiscard]] std::vector<Plan> finalists(const Plan& default_plan) const {
        std::vector<Plan> plans = quickest_plans({}, std::numeric_limits<double>::infinity());
        for (const Plan& plan : beside(steady_extras(), default_plan)) {
            if (std::ranges::find(plans, plan) == plans.end()) plans.push_back(plan);
        }
        return plans;
    }
    /// `more`, those of them that have been timed, with the present winner and the default.
    [[nodiscard]] std::vector<Plan> beside(std::vector<Plan> more, const Plan& default_plan) const {
        more.push_back(default_plan);
        if (const std::string best = record_.best_plan(); !best.empty()) more = joined(parse_plan(best), more);
        std::erase_if(more, [&](const Plan& plan) { return !timed(plan); });
        return more;
    }
    /// The candidates below `ms` that are not in `done`, the quickest first; at most as many as finalists.
    [[nodiscard]] std::vector<Plan> quickest_plans(const std::set<std::string>& done, double ms) const {
        std::vector<std::pair<double, std::string>> ranking;
        for (const auto& [plan, candidate] : record_.candidates) {
            const bool counts = candidate.outcome == Outcome::ok && candidate.sample_count() > 0 && !done.contains(plan);
            if (counts && candidate.median_ms() < ms) ranking.emplace_back(candidate.median_ms(), plan);
        }
        std::ranges::sort(ranking);
        if (ranking.size() > options_.finalists) ranking.resize(options_.finalists);
        std::vector<Plan> plans;
        for (const auto& [median_ms, text] : ranking) plans.push_back(parse_plan(text));
        return plans;
    }

    /// Most milliseconds of a plan that is quicker than the winner by more than noise. A plan within noise does not challenge, or noise
    /// would go on choosing new ones.
    [[nodiscard]] double challenging_ms() const {
        const std::string best = record_.best_plan();
        return best.empty() ? 0 : record_.candidates.at(best).median_ms() * (1 - kTieMargin);
    }

    /// Times finalists in turns as often as a winner must have been timed. These times may make other plans the quickest, or the winner,
    /// which then have to be timed as often too.
    void finish(const Plan& default_plan) {
        finishing_ = true;
        std::set<std::string> settled;  // before this search
        for (const std::string& plan : known_) {
            if (record_.candidates.at(plan).sample_count() >= kEnoughSamples) settled.insert(plan);
        }
        std::vector<Plan> plans = finalists(default_plan);
        if (settled.contains(record_.best_plan())) {
            const auto came_second = [&](const Plan& plan) { return known(plan.text()) && median(plan) >= challenging_ms(); };
            std::erase_if(plans, [&](const Plan& plan) { return plan != default_plan && came_second(plan); });
        }
        std::set<std::string> done = settled;
        for (int i = 0; i < kMostLastRounds; ++i) {
            const auto stands = [&](const Plan& plan) { return done.contains(plan.text()); };
            if (std::ranges::all_of(plans, stands)) return;
            std::erase_if(plans, [&](const Plan& plan) { return settled.contains(plan.text()); });
            for (const Plan& plan : plans) std::erase(known_, plan.text());
            if (!last_rounds(plans, done)) return;
            for (const Plan& plan : plans) done.insert(plan.text());
            // Whom others' times have made the winner since it was timed last has to be timed beside them.
            const std::string best = record_.best_plan();
            const bool was_there =
                settled.contains(best) || std::ranges::any_of(plans, [&](const Plan& plan) { return plan.text() == best; });
            if (!was_there) done.erase(best);
            plans = beside(quickest_plans(done, challenging_ms()), default_plan);
        }
    }

    /// The times of these rounds take the place of all others that this run has of the plans. Returns false where the rounds were stopped:
    /// then earlier ones of the candidates in `done` stay, and all of the others.
    bool last_rounds(std::vector<Plan> plans, const std::set<std::string>& done) {
        std::map<std::string, std::size_t> before;
        for (const Plan& plan : plans) before[plan.text()] = times(plan.text()).size();
        try {
            for (std::size_t i = 0; i < kEnoughSamples && !stop(); ++i) {
                round("final", plans);
                drop_failed(plans);
            }
        } catch (const MeasureStopped&) {
            stopped_ = true;
        }
        for (const auto& [plan, count] : before) {
            std::vector<double> all = times(plan);
            const auto middle = all.begin() + static_cast<std::ptrdiff_t>(count);
            if (!stopped_ && all.size() > count) {
                all.erase(all.begin(), middle);
            } else if (stopped_ && done.contains(plan)) {
                all.erase(middle, all.end());
            }
            if (!all.empty()) record_.candidates.at(plan).times_ms[options_.run] = all;
        }
        return !stopped_;
    }

    /// Times of this run.
    [[nodiscard]] std::vector<double> times(const std::string& plan) const {
        const auto& all = record_.candidates.at(plan).times_ms;
        const auto found = all.find(options_.run);
        return found == all.end() ? std::vector<double>() : found->second;
    }

    const Spec& spec_;
    const Device& device_;
    const SearchOptions& options_;
    Measure& measure_;
    Record& record_;
    PlanOrder order_;
    std::vector<std::string> known_;  ///< before this search
    std::vector<std::string> timed_;
    std::size_t combinations_ = 0;
    std::size_t measurements_ = 0;
    std::size_t rounds_ = 0;
    bool paused_ = true;  ///< the device has done something else than samples
    bool finishing_ = false;
    bool cut_short_ = false;  ///< something was left out for want of time
    bool stopped_ = false;
    bool searched_through_ = false;
};

}  // namespace

SearchResult search(const Spec& spec, const Device& device, const SearchOptions& options, Measure& measure, Record& record) {
    return Search(spec, device, options, measure, record).run();
}

}  // namespace flce
