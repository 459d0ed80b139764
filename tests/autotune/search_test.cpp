#include "autotune/search.hpp"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "autotune/search_space.hpp"
#include "generator/cuda_program.hpp"
#include "tests/records/record_support.hpp"

namespace flce {
namespace {

using test::h100;
using test::key_at;
using test::tuned_spec;

/// A device in which a plan takes what a function says, with noise that repeats.
class FakeDevice : public Measure {
public:
    std::function<double(const Plan&)> ms = [](const Plan&) { return 10.0; };
    std::function<Measured(const Plan&)> checked = [](const Plan&) { return Measured{}; };
    std::function<Measured(const Plan&, double)> timed = [](const Plan&, double value) { return Measured{.ms = value}; };
    std::size_t budget = 1'000'000;
    double noise = 0;
    std::map<std::string, int> checks, times;
    std::size_t prepared = 0;
    std::vector<std::string> order;

    void prepare(std::span<const Plan> plans) override { prepared += plans.size(); }
    Measured check(const Plan& plan) override {
        ++checks[plan.text()];
        return checked(plan);
    }
    Measured time(const Plan& plan) override {
        order.push_back(plan.text());
        const int count = ++times[plan.text()];
        return timed(plan, ms(plan) * (1 + noise * std::sin(count * 12.9898 + static_cast<double>(order.size()))));
    }
    bool stop() override { return order.size() >= budget; }
};

/// A tile of four stages that warpgroups share.
GemmTile together(int block_m, int block_n) {
    return {.block_m = block_m, .block_n = block_n, .block_k = 64, .stages = 4, .schedule = TileSchedule::together};
}

/// Times that depend on every coordinate; the best tiles are none of the cost model's favourites.
double rugged(const Plan& plan) {
    double ms = 10;
    const auto prefer = [&](bool is_best, double gain) { ms -= is_best ? gain : 0; };
    prefer(plan.cuda.grad_weight == together(128, 256), 0.4);
    prefer(plan.cuda.grad_hidden == together(256, 128), 0.5);
    prefer(plan.cuda.forward == together(128, 128), 0.3);
    prefer(plan.vocab_chunk < 10'000, 0.3);
    prefer(plan.cuda.raster == 16, 0.3);
    prefer(plan.path == PlanPath::cuda_sm90a, 4);
    return ms;
}

class SearchTest : public testing::Test {
protected:
    SearchResult run() { return search(tuned_spec(), h100(), options_, device_, record_); }
    [[nodiscard]] double best_ms() const { return device_.ms(parse_plan(record_.best_plan())); }

    FakeDevice device_;
    SearchOptions options_{.run = "run"};
    Record record_{.key = key_at(4096)};
};

TEST_F(SearchTest, Descent_FindsTheBestOfEveryCoordinate) {
    device_.ms = rugged;
    const SearchResult result = run();
    EXPECT_TRUE(result.complete);
    EXPECT_EQ(result.best_plan, record_.best_plan());
    EXPECT_NEAR(best_ms(), 10 - 0.4 - 0.5 - 0.3 - 0.3 - 0.3 - 4, 1e-9) << result.best_plan;
    EXPECT_GE(device_.prepared, device_.checks.size() - 1);
}

TEST_F(SearchTest, Descent_WithinTwoPercentOfEveryCombination) {
    device_.ms = rugged;
    device_.noise = 0.004;
    options_.only = {"grad_weight", "grad_hidden", "forward"};
    (void)run();
    const double found = best_ms();
    Record all{.key = key_at(4096)};
    options_.exhaustive = 1000;
    FakeDevice other;
    other.ms = rugged;
    (void)search(tuned_spec(), h100(), options_, other, all);
    EXPECT_GT(all.candidates.size(), 150U);
    EXPECT_LE(found, 1.02 * rugged(parse_plan(all.best_plan())));
    EXPECT_LT(device_.order.size(), other.order.size() / 2);
}

TEST_F(SearchTest, Noise_DefaultStaysWhereNothingIsBetter) {
    device_.noise = 0.008;
    const SearchResult result = run();
    EXPECT_EQ(result.best_plan, result.default_plan);
}

// A device with rates of its own begins elsewhere; what it is compared with is what sessions take.
TEST_F(SearchTest, DefaultThatIsGiven_IsMeasuredAndTheOneThatIsComparedWith) {
    const Plan own = choose_plan(tuned_spec(), h100());
    Plan other = own;
    other.cuda.raster = own.cuda.raster == 16 ? 4 : 16;
    options_.default_plan = other;
    device_.ms = [&](const Plan& plan) { return plan == own ? 9.0 : 10.0; };
    const SearchResult result = run();
    EXPECT_EQ(result.default_plan, other.text());
    EXPECT_EQ(device_.order.front(), other.text());
    EXPECT_EQ(result.best_plan, own.text());
    EXPECT_GT(record_.candidates.at(other.text()).sample_count(), 0U);
}

TEST_F(SearchTest, WrongFaultingAndHangingCandidates_RecordedAndNeverBest) {
    // Whatever is quicker than the default is broken in one of four ways.
    device_.ms = rugged;
    const auto broken = [](const Plan& plan) {
        const bool by_check = plan.cuda.raster == 16 || plan.vocab_chunk < 10'000;
        const bool by_time = plan.cuda.grad_weight == together(128, 256);
        return std::pair(by_check, by_time);
    };
    device_.checked = [&](const Plan& plan) {
        if (!broken(plan).first) return Measured{};
        return Measured{.outcome = plan.cuda.raster == 16 ? Outcome::wrong : Outcome::hung, .why = "broken"};
    };
    device_.timed = [&](const Plan& plan, double ms) {
        return broken(plan).second ? Measured{.outcome = Outcome::faulted, .why = "SIGSEGV"} : Measured{.ms = ms};
    };
    (void)run();
    std::map<Outcome, int> outcomes;
    for (const auto& [text, candidate] : record_.candidates) {
        ++outcomes[candidate.outcome];
        const Plan plan = parse_plan(text);
        EXPECT_EQ(candidate.outcome != Outcome::ok, broken(plan).first || broken(plan).second) << text;
        EXPECT_EQ(candidate.outcome != Outcome::ok, !candidate.why.empty());
        const auto [by_check, by_time] = broken(plan);
        EXPECT_TRUE(!by_check || device_.times[text] == 0) << "timed without having passed";
        EXPECT_TRUE(!by_time || device_.times[text] <= 1) << "asked again after its fault";
    }
    EXPECT_GT(outcomes[Outcome::wrong], 0);
    EXPECT_GT(outcomes[Outcome::hung], 0);
    EXPECT_GT(outcomes[Outcome::faulted], 0);
    const Plan best = parse_plan(record_.best_plan());
    EXPECT_FALSE(broken(best).first || broken(best).second);
    EXPECT_EQ(best.cuda.grad_hidden, together(256, 128));
}

TEST_F(SearchTest, BudgetSpent_BestSoFar) {
    for (const std::size_t budget : {1U, 7U, 30U}) {
        record_.candidates.clear();
        device_ = {};
        device_.ms = rugged;
        device_.budget = budget;
        const SearchResult result = run();
        EXPECT_FALSE(result.complete);
        EXPECT_EQ(device_.order.size(), budget);
        EXPECT_NE(result.best_plan, "");
    }
    device_ = {};
    record_.candidates.clear();
    device_.budget = 0;
    EXPECT_EQ(run().best_plan, "");
}

TEST_F(SearchTest, Again_MeasuresNothing) {
    device_.ms = rugged;
    device_.noise = 0.01;
    const std::string best = run().best_plan;
    device_.checks.clear();
    device_.order.clear();
    options_.run = "second";
    const SearchResult again = run();
    EXPECT_EQ(again.best_plan, best);
    EXPECT_EQ(again.measured, 0U);
    EXPECT_TRUE(device_.order.empty());
    EXPECT_TRUE(device_.checks.empty());
}

TEST_F(SearchTest, NewCandidate_MeasuresOnlyItself) {
    device_.ms = rugged;
    (void)run();
    Plan own = parse_plan(record_.best_plan());
    own.scratch_bytes = 65 << 20;
    device_.ms = [&](const Plan& plan) { return rugged(plan) + (plan == own ? 1 : 0); };  // slower than the record's best
    device_.checks.clear();
    device_.times.clear();
    options_.extra = {own};
    options_.run = "second";
    const SearchResult result = run();
    EXPECT_EQ(result.measured, 1U);
    ASSERT_EQ(device_.times.size(), 1U);
    EXPECT_EQ(device_.times.begin()->first, own.text());
    EXPECT_EQ(device_.checks.size(), 1U);
    EXPECT_NE(record_.best_plan(), own.text());
}

TEST_F(SearchTest, RecordThatLies_ItsPlansFailAndTheSearchGoesOn) {
    device_.ms = rugged;
    const std::string best = run().best_plan;
    Plan illegal = parse_plan(best);
    illegal.cuda.forward.block_m = 1000;
    const std::string untidy = " " + best;
    for (const std::string& plan : {std::string("garbage"), illegal.text(), untidy}) {
        record_.candidates[plan].times_ms["run"] = std::vector<double>(kEnoughSamples, 0.0001);
    }
    ASSERT_NE(record_.best_plan(), best);
    options_.run = "second";
    EXPECT_EQ(run().best_plan, best);
    for (const std::string& plan : {std::string("garbage"), illegal.text(), untidy}) {
        EXPECT_EQ(record_.candidates.at(plan).outcome, Outcome::failed) << plan;
        EXPECT_NE(record_.candidates.at(plan).why, "") << plan;
        EXPECT_EQ(device_.times[plan], 0) << plan;
    }
}

TEST_F(SearchTest, LongReason_ClippedToWhatReadersTake) {
    device_.checked = [](const Plan&) { return Measured{.outcome = Outcome::failed, .why = std::string(100'000, '\xff')}; };
    (void)run();
    std::string why;
    EXPECT_TRUE(parse_record(record_text(record_), why)) << why;
}

TEST_F(SearchTest, Race_CandidatesTakeTurns) {
    (void)run();
    int repeated = 0;
    for (std::size_t i = 1; i < device_.order.size(); ++i) repeated += device_.order[i] == device_.order[i - 1] ? 1 : 0;
    EXPECT_LT(repeated, static_cast<int>(device_.order.size() / 10));
}

/// One whose work takes time, and that is slow for a moment after everything that is no sample.
class SlowDevice : public FakeDevice {
public:
    static constexpr double kEarly_s = 30;
    double budget_s = 12;
    double sample_s = 0.1;
    double check_s = 0.3;
    double cold = 0;   ///< time that a sample takes longer after a pause
    double early = 0;  ///< time that a sample takes longer in the first kEarly_s seconds
    double clock_s = 0;
    std::size_t reserved = 0;

    void prepare(std::span<const Plan> plans) override {
        for (std::size_t i = 0; i < plans.size() && !nearly_over(); ++i) clock_s += 0.2;
        paused_ = true;
    }
    void reserve(std::size_t samples) override { reserved = samples; }
    Measured check(const Plan& plan) override {
        clock_s += check_s;
        paused_ = true;
        return FakeDevice::check(plan);
    }
    Measured resume(const Plan&) override {
        clock_s += sample_s;
        paused_ = false;
        return {};
    }
    Measured time(const Plan& plan) override {
        clock_s += sample_s;
        Measured measured = FakeDevice::time(plan);
        if (clock_s < kEarly_s) measured.ms *= 1 + early;
        if (std::exchange(paused_, false)) measured.ms *= 1 + cold;
        return measured;
    }
    bool stop() override { return clock_s >= budget_s; }
    bool nearly_over() override { return clock_s + check_s + static_cast<double>(reserved + 1) * sample_s >= budget_s; }

private:
    bool paused_ = true;
};

class SlowSearchTest : public testing::Test {
protected:
    SearchResult run() { return search(tuned_spec(), h100(), options_, device_, record_); }
    [[nodiscard]] const std::vector<double>& times(const std::string& plan) const { return record_.candidates.at(plan).times_ms.at("run"); }
    /// Plans of the last `kEnoughSamples` rounds of the run.
    [[nodiscard]] std::map<std::string, std::size_t> last_rounds() const {
        std::map<std::string, std::size_t> count;
        const auto& order = device_.order;
        // Going back, a round ends where its first plan is met again.
        std::set<std::string> round;
        for (std::size_t i = order.size(); i > 0 && round.insert(order[i - 1]).second;) --i;
        const std::size_t size = round.size();
        for (std::size_t i = order.size() - std::min(order.size(), kEnoughSamples * size); i < order.size(); ++i) ++count[order[i]];
        return count;
    }

    SlowDevice device_;
    SearchOptions options_{.run = "run"};
    Record record_{.key = key_at(4096)};
};

TEST_F(SlowSearchTest, BudgetOfALargeLayer_WinnerAndDefaultTimedInTheSameRounds) {
    device_.ms = rugged;
    device_.noise = 0.05;
    for (const double budget_s : {8.0, 9.0, 10.0, 12.0, 15.0, 20.0, 40.0, 1000.0}) {
        record_.candidates.clear();
        device_.order.clear();
        device_.clock_s = 0;
        device_.budget_s = budget_s;
        const SearchResult result = run();
        EXPECT_LE(device_.clock_s, budget_s);
        EXPECT_EQ(times(result.default_plan).size(), kEnoughSamples) << budget_s;
        EXPECT_EQ(times(result.best_plan).size(), kEnoughSamples) << budget_s;
        const auto last = last_rounds();
        EXPECT_GE(last.size(), 2U);
        for (const auto& [plan, count] : last) EXPECT_EQ(count, kEnoughSamples) << plan;
        EXPECT_TRUE(last.contains(result.default_plan)) << budget_s;
        EXPECT_TRUE(last.contains(result.best_plan)) << budget_s;
        EXPECT_EQ(result.complete, budget_s > 100) << budget_s;
    }
}

TEST_F(SlowSearchTest, DeviceThatIsColdAfterAPause_NobodyPaysForIt) {
    device_.cold = 0.3;
    device_.budget_s = 1e9;
    const SearchResult result = run();
    for (const auto& [plan, candidate] : record_.candidates) {
        for (const double ms : candidate.times_ms.at("run")) EXPECT_EQ(ms, 10.0) << plan;
    }
    EXPECT_EQ(result.best_plan, result.default_plan);
}

TEST_F(SlowSearchTest, SlowAtFirst_RatioIsThatOfTheLastRounds) {
    // The order of tiles is varied last: the best plan is not there yet when the cost model's choice is timed first and most often.
    device_.ms = [](const Plan& plan) { return plan.cuda.raster == 16 ? 9.5 : 10.0; };
    device_.early = 0.1;
    device_.budget_s = 1e9;
    const SearchResult result = run();
    ASSERT_GT(device_.clock_s, 1.5 * SlowDevice::kEarly_s);
    EXPECT_EQ(parse_plan(result.best_plan).cuda.raster, 16);
    EXPECT_EQ(record_.candidates.at(result.default_plan).median_ms() / record_.candidates.at(result.best_plan).median_ms(), 10.0 / 9.5);
}

TEST_F(SlowSearchTest, EveryCombinationInTooLittleTime_WhatIsCheckedIsTimedToo) {
    device_.ms = rugged;
    device_.sample_s = 0.02;
    device_.check_s = 0.05;
    options_.only = {"grad_weight", "grad_hidden", "forward"};
    options_.exhaustive = 4000;
    std::size_t all = 0;
    for (const double budget_s : {1e9, 60.0, 30.0}) {
        record_.candidates.clear();
        device_.clock_s = 0;
        device_.budget_s = budget_s;
        const SearchResult result = run();
        if (all == 0) all = result.combinations;
        EXPECT_GT(all, 200U);
        EXPECT_EQ(result.combinations, all);
        EXPECT_EQ(result.complete, budget_s > 60);
        EXPECT_LE(device_.clock_s, budget_s);
        EXPECT_GE(record_.candidates.size(), result.complete ? all : 60U);
        for (const auto& [plan, candidate] : record_.candidates) EXPECT_GT(candidate.sample_count(), 0U) << plan;
    }
}

TEST_F(SlowSearchTest, CandidateOfTheUsers_TimedAsOftenAsTheBest) {
    device_.ms = rugged;
    device_.budget_s = 1e9;
    Plan own = choose_plan(tuned_spec(), h100());
    own.scratch_bytes = 65 << 20;
    device_.ms = [&](const Plan& plan) { return rugged(plan) + (plan == own ? 5 : 0); };
    options_.extra = {own};
    const SearchResult result = run();
    EXPECT_EQ(times(own.text()).size(), kEnoughSamples);
    EXPECT_TRUE(last_rounds().contains(own.text()));
}

TEST(SearchSpace, Coordinates_OnlyLegalPlansOneOfThemTheGiven) {
    for (const auto& [spec_text, device_name] : {std::pair{"D=2048,V=151936,dtype=bf16", "h100"},
                                                 {"D=768,V=50257,dtype=fp32", "a100"},
                                                 {"D=2304,V=256000,dtype=bf16,softcap=30", "h200"},
                                                 {"D=768,V=50257,dtype=bf16", "znver4"}}) {
        const Spec spec = parse_spec(spec_text).normalized();
        const Device device = describe_device(device_name);
        const Plan plan = choose_plan(spec, device);
        const auto all = coordinates(spec, device, plan);
        EXPECT_GE(all.size(), 4U) << device_name;
        for (const Coordinate& coordinate : all) {
            EXPECT_EQ(coordinate.plans.front(), plan);
            EXPECT_GE(coordinate.plans.size(), 2U);
            for (const Plan& other : coordinate.plans) EXPECT_EQ(illegal_reason(spec, device, other), std::nullopt) << other.text();
        }
        EXPECT_EQ(coordinates(spec, device, plan, {"chunk"}).size(), 1U);
    }
}

TEST(SearchSpace, Covering_EveryKernelThatCombinationsHave) {
    const Spec spec = tuned_spec();
    const Device device = h100();
    const Plan plan = choose_plan(spec, device);
    std::set<std::string> kernels;
    const auto covering = covering_plans(spec, device, plan, {});
    EXPECT_EQ(covering.front(), plan);
    for (const Plan& each : covering) {
        EXPECT_EQ(illegal_reason(spec, device, each), std::nullopt) << each.text();
        const std::size_t before = kernels.size();
        for (const CudaUnit& unit : generate_cuda(spec, device, each).units) kernels.insert(unit.source);
        EXPECT_GT(kernels.size(), before) << each.text();
    }
    constexpr std::size_t kMany = 400;
    const auto all = all_combinations(spec, device, plan, {}, kMany);
    ASSERT_EQ(all.size(), kMany);
    for (const Plan& each : all) {
        for (const CudaUnit& unit : generate_cuda(spec, device, each).units) EXPECT_TRUE(kernels.contains(unit.source)) << each.text();
    }
}

}  // namespace
}  // namespace flce
