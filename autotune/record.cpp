#include "autotune/record.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <tuple>

#include "autotune/kernel_version.hpp"
#include "cache/artifact_cache.hpp"
#include "flce/error.hpp"
#include "generator/device_tables.hpp"

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
    } catch (const EnvironmentError&) {  // not in the tables
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
    // Both of an equal outcome may give a reason, or sizes: the greater ones, whoever has them.
    std::tie(result.outcome, result.why) = std::max(std::tie(a.outcome, a.why), std::tie(b.outcome, b.why));
    result.workspace_bytes = std::max(a.workspace_bytes, b.workspace_bytes);
    result.retained_bytes = std::max(a.retained_bytes, b.retained_bytes);
    for (const auto& [run, times] : b.times_ms) {
        std::vector<double>& mine = result.times_ms[run];
        mine = std::max(mine, times, [](const auto& x, const auto& y) { return std::pair(x.size(), x) < std::pair(y.size(), y); });
    }
    return result;
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
        .add("tokens", std::to_string(num_tokens))
        .add("scratch", std::to_string(memory.scratch_bytes))
        .add("limit", std::to_string(memory.limit_bytes))
        .add("retained", memory.retained)
        .add("policy", policy)
        .finish()
        .hex();
}

std::filesystem::path RecordKey::file() const {
    return std::filesystem::path(subject().substr(0, 16)) / fmt::format("{}-{}.json", num_tokens, digest().substr(0, 16));
}

RecordKey record_key(const Spec& spec, const Device& device, std::int64_t num_tokens, const TunedMemory& memory) {
    Spec measured = spec.normalized();
    measured.tied = false;  // says whose the weight is; what is computed, grad_weight_mode says
    return {.device = tuned_device(device),
            .kernel_version = std::string(kernel_version(device.kind)),
            .spec = measured.text(),
            .num_tokens = token_bucket(num_tokens),
            .memory = memory,
            .policy = std::string(device.kind == DeviceKind::cuda ? kGpuMeasurementPolicy : kCpuMeasurementPolicy)};
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

std::string Record::best_plan() const {
    std::size_t most = 0;
    for (const auto& [plan, candidate] : candidates) {
        if (candidate.outcome == Outcome::ok) most = std::max(most, candidate.sample_count());
    }
    const std::size_t enough = std::max<std::size_t>(1, std::min(most, kEnoughSamples));
    const auto eligible = [&](const Candidate& c) { return c.outcome == Outcome::ok && c.sample_count() >= enough; };
    double quickest = std::numeric_limits<double>::infinity();
    for (const auto& [plan, candidate] : candidates) {
        if (eligible(candidate)) quickest = std::min(quickest, candidate.median_ms());
    }
    std::string best;
    int best_rank = std::numeric_limits<int>::max();
    for (const auto& [plan, candidate] : candidates) {  // in the order of their text
        if (!eligible(candidate) || candidate.median_ms() > quickest * (1 + kTieMargin) || candidate.rank >= best_rank) continue;
        best = plan;
        best_rank = candidate.rank;
    }
    return best;
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
