#include "records/record.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <span>
#include <tuple>

#include "cache/artifact_cache.hpp"
#include "flce/error.hpp"
#include "generator/device_tables.hpp"
#include "records/kernel_version.hpp"

namespace flce {
namespace {

void add_device(KeyBuilder& key, const TunedDevice& device) {
    key.add("kind", device.kind)
        .add("name", device.name)
        .add("units", std::to_string(device.units))
        .add("l2", std::to_string(device.l2_bytes))
        .add("features", device.features);
}

/// The product's name in the tables, or what the device says of itself.
std::string product_name(const Device& device) {
    const auto arch = std::ranges::find(kGpuArchs, std::string_view(device.name), &GpuArch::name);
    if (arch != kGpuArchs.end()) return std::string(arch->product);
    try {
        const Device product = describe_device(device.name);
        // A part of a product (MIG) is none.
        const bool whole = product.kind == DeviceKind::cuda && product.gpu.sm_count == device.gpu.sm_count;
        return whole ? product.name : device.name;
    } catch (const EnvironmentError&) {  // a device that is not in the tables
        return device.name;
    }
}

double median(std::vector<double> values) {
    if (values.empty()) return std::numeric_limits<double>::infinity();
    std::ranges::sort(values);
    const std::size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

Candidate merged_candidates(const Candidate& a, const Candidate& b) {
    Candidate result = a;
    result.rank = std::min(a.rank, b.rank);
    // Two equal outcomes may both give a reason, or sizes: the greater one is kept.
    std::tie(result.outcome, result.why) = std::max(std::tie(a.outcome, a.why), std::tie(b.outcome, b.why));
    result.workspace_bytes = std::max(a.workspace_bytes, b.workspace_bytes);
    result.retained_bytes = std::max(a.retained_bytes, b.retained_bytes);
    for (const auto& [run, times] : b.times_ms) {
        std::vector<double>& mine = result.times_ms[run];
        mine = std::max(mine, times, [](const auto& x, const auto& y) { return std::pair(x.size(), x) < std::pair(y.size(), y); });
    }
    return result;
}

/// Ids of the runs that times are of, the oldest first; those of which nothing else is known before all.
std::vector<std::string> runs_by_age(const Record& record) {
    std::map<std::string, std::string> dates;
    for (const auto& [id, run] : record.runs) dates[id] = run.date;
    for (const auto& [plan, candidate] : record.candidates) {
        for (const auto& [id, times] : candidate.times_ms) dates.emplace(id, "");
    }
    std::vector<std::pair<std::string, std::string>> order;
    for (const auto& [id, date] : dates) order.emplace_back(date, id);
    std::ranges::sort(order);
    std::vector<std::string> ids;
    for (auto& [date, id] : order) ids.push_back(std::move(id));
    return ids;
}

Record without_runs(Record record, std::span<const std::string> ids) {
    for (const std::string& id : ids) {
        record.runs.erase(id);
        for (auto& [plan, candidate] : record.candidates) candidate.times_ms.erase(id);
    }
    std::erase_if(record.candidates,
                  [](const auto& entry) { return entry.second.outcome == Outcome::ok && entry.second.times_ms.empty(); });
    return record;
}

bool fits(const Record& record) {
    return record.candidates.size() <= kMaxRecordCandidates && record_text(record).size() <= kMaxRecordBytes;
}

}  // namespace

TunedDevice tuned_device(const Device& device) {
    if (device.kind == DeviceKind::cuda) {
        return {.kind = "cuda", .name = product_name(device), .units = device.gpu.sm_count, .l2_bytes = device.gpu.l2_bytes};
    }
    const CpuProperties& cpu = device.cpu;
    const std::string digest = KeyBuilder("cpu features").add("triple", cpu.triple).add("features", cpu.features).finish().hex();
    return {.kind = "cpu",
            .name = cpu.cpu,
            .units = cpu.cores,
            .l2_bytes = cpu.l2_bytes,
            .features = fmt::format("{} bits{}{} {}", cpu.vector_bits, cpu.fma ? " fma" : "", cpu.bf16_dot ? " bf16_dot" : "",
                                    digest.substr(0, 16))};
}

std::string RecordKey::subject() const {
    KeyBuilder key("tuning subject");
    add_device(key, device);
    return key.add("spec", spec).finish().hex();
}

std::string RecordKey::digest() const {
    KeyBuilder key("tuning record");
    add_device(key, device);
    return key.add("kernels", kernel_version)
        .add("spec", spec)
        .add("tokens", std::to_string(request.num_tokens))
        .add("scratch", std::to_string(request.scratch_bytes))
        .add("limit", std::to_string(request.workspace_limit_bytes))
        .add("retained", retained)
        .add("policy", policy)
        .finish()
        .hex();
}

std::filesystem::path RecordKey::file() const {
    return std::filesystem::path(subject().substr(0, 16)) / fmt::format("{}-{}.json", request.num_tokens, digest().substr(0, 16));
}

RecordKey record_key(const Spec& spec, const Device& device, const PlanRequest& request, std::string_view retained, int threads) {
    TunedDevice tuned = tuned_device(device);
    // More threads than cores would only take turns: there are never more.
    if (device.kind == DeviceKind::cpu && threads > 0) tuned.units = std::min(threads, tuned.units);
    Spec measured = spec.normalized();
    measured.tied = false;  // `tied` says whose the weight is; grad_weight_mode says how it is computed
    for (double* const scale : {&measured.fp8_hidden_scale, &measured.fp8_weight_scale}) {
        if (*scale != 0) *scale = 1;  // all numbers have the same kernels
    }
    return {.device = std::move(tuned),
            .kernel_version = std::string(kernel_version(device.kind)),
            .spec = measured.text(),
            .request = {.scratch_bytes = request.scratch_bytes,
                        .workspace_limit_bytes = request.workspace_limit_bytes,
                        .num_tokens = token_bucket(request.num_tokens)},
            .retained = std::string(retained),
            .policy = std::string(device.kind == DeviceKind::cuda ? kGraphMeasurementPolicy : kLaunchMeasurementPolicy)};
}

std::string_view to_string(Outcome outcome) noexcept {
    switch (outcome) {
        case Outcome::ok: return "ok";
        case Outcome::failed: return "failed";
        case Outcome::faulted: return "faulted";
        case Outcome::hung: return "hung";
        case Outcome::wrong: return "wrong";
    }
    return "";
}

std::size_t Candidate::sample_count() const {
    std::size_t count = 0;
    for (const auto& [run, times] : times_ms) count += times.size();
    return count;
}

double Candidate::median_ms() const {
    std::vector<double> all;
    for (const auto& [run, times] : times_ms) std::ranges::copy(times, std::back_inserter(all));
    return median(std::move(all));
}

std::size_t Record::samples_to_win() const {
    std::size_t most = 0;
    for (const auto& [plan, candidate] : candidates) {
        if (candidate.outcome == Outcome::ok) most = std::max(most, candidate.sample_count());
    }
    return std::max<std::size_t>(1, std::min(most, kEnoughSamples));
}

std::string Record::best_plan() const {
    const std::size_t enough = samples_to_win();
    const auto eligible = [&](const Candidate& c) { return c.outcome == Outcome::ok && c.sample_count() >= enough; };
    double quickest = std::numeric_limits<double>::infinity();
    for (const auto& [plan, candidate] : candidates) {
        if (eligible(candidate)) quickest = std::min(quickest, candidate.median_ms());
    }
    std::string best;
    int best_rank = std::numeric_limits<int>::max();
    for (const auto& [plan, candidate] : candidates) {  // plans in the order of their text
        if (!eligible(candidate) || candidate.median_ms() > quickest * (1 + kTieMargin) || candidate.rank >= best_rank) continue;
        best = plan;
        best_rank = candidate.rank;
    }
    return best;
}

std::vector<std::string> Record::ranked_plans() const {
    const std::string best = best_plan();
    const std::size_t enough = samples_to_win();
    std::vector<std::tuple<bool, bool, double, int, std::string>> order;
    for (const auto& [plan, candidate] : candidates) {
        const std::size_t samples = candidate.sample_count();
        if (candidate.outcome != Outcome::ok || samples == 0) continue;
        order.emplace_back(plan != best, samples < enough, candidate.median_ms(), candidate.rank, plan);
    }
    std::ranges::sort(order);
    std::vector<std::string> plans;
    for (auto& [other, seldom, ms, rank, plan] : order) plans.push_back(std::move(plan));
    return plans;
}

Record merged(const Record& a, const Record& b) {
    Record result = a;
    for (const auto& [id, run] : b.runs) {
        const auto [mine, added] = result.runs.emplace(id, run);
        const auto order = [](const TuningRun& r) {
            return std::tie(r.date, r.version, r.commit, r.device, r.driver, r.clocks, r.searched);
        };
        if (!added && order(mine->second) < order(run)) mine->second = run;
    }
    for (const auto& [plan, candidate] : b.candidates) {
        const auto [mine, added] = result.candidates.emplace(plan, candidate);
        if (!added) mine->second = merged_candidates(mine->second, candidate);
    }
    return result;
}

Record fitted(Record record, std::size_t& dropped_runs) {
    dropped_runs = 0;
    if (fits(record)) return record;
    const std::vector<std::string> ids = runs_by_age(record);
    // The fewest runs that have to go: without more of them a record is only smaller.
    std::size_t few = 0;
    std::size_t most = ids.size();
    while (few + 1 < most) {
        const std::size_t half = few + (most - few) / 2;
        (fits(without_runs(record, std::span(ids).first(half))) ? most : few) = half;
    }
    dropped_runs = most;
    return without_runs(std::move(record), std::span(ids).first(most));
}

std::string provenance_change(const TuningRun& before, const TuningRun& now) {
    std::string text;
    const auto compare = [&](const char* what, const std::string& was, const std::string& is) {
        if (was != is) text += fmt::format("{}{} \"{}\", then \"{}\"", text.empty() ? "" : "; ", what, was, is);
    };
    compare("driver", before.driver, now.driver);
    compare("clocks", before.clocks, now.clocks);
    compare("device", before.device, now.device);
    return text;
}

}  // namespace flce
