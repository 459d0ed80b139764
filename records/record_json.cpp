// Records as JSON text, and back without trusting it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "generator/json_object.hpp"
#include "records/record.hpp"

namespace flce {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSchema = 2;
constexpr std::size_t kMaxTextBytes = kMaxRecordTextBytes;
constexpr std::size_t kMaxSamples = 100'000;  // samples of a candidate in a run; the text's size bounds the number of runs
constexpr Outcome kOutcomes[] = {Outcome::ok, Outcome::failed, Outcome::faulted, Outcome::hung, Outcome::wrong};

Json to_json(const Candidate& candidate, const std::string& plan) {
    Json times = Json::object();
    for (const auto& [run, samples] : candidate.times_ms) {
        Json& list = times[run] = Json::array();
        for (const double ms : samples) list.push_back(recorded_ms(ms));
    }
    Json json{{"plan", plan}, {"rank", candidate.rank}, {"outcome", to_string(candidate.outcome)}};
    if (!candidate.why.empty()) json["why"] = candidate.why;
    json["workspace_bytes"] = candidate.workspace_bytes;
    json["retained_bytes"] = candidate.retained_bytes;
    json["times_ms"] = std::move(times);
    return json;
}

/// Reads fields of one JSON object; throws std::runtime_error naming the fault.
class Fields {
public:
    Fields(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {
        if (!object.is_object()) throw std::runtime_error(where_ + " is not an object");
    }
    [[nodiscard]] const nlohmann::json& at(const char* key) const {
        const auto found = object_.find(key);
        if (found == object_.end()) throw std::runtime_error(fmt::format("{} has no \"{}\"", where_, key));
        return *found;
    }
    [[nodiscard]] std::string text(const char* key) const {
        const nlohmann::json& value = at(key);
        if (!value.is_string()) throw std::runtime_error(fmt::format("{}'s \"{}\" is no string", where_, key));
        const auto& result = value.get_ref<const std::string&>();
        if (result.size() > kMaxTextBytes) throw std::runtime_error(fmt::format("{}'s \"{}\" has {} bytes", where_, key, result.size()));
        return result;
    }
    [[nodiscard]] std::string text_or_empty(const char* key) const { return object_.contains(key) ? text(key) : std::string(); }
    [[nodiscard]] std::int64_t number(const char* key, std::int64_t most) const {
        const nlohmann::json& value = at(key);
        if (!value.is_number_integer()) throw std::runtime_error(fmt::format("{}'s \"{}\" is no integer", where_, key));
        const bool huge = value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(most);
        const std::int64_t result = huge ? -1 : value.get<std::int64_t>();
        if (result < 0 || result > most) throw std::runtime_error(fmt::format("{}'s \"{}\" is not from 0 to {}", where_, key, most));
        return result;
    }

private:
    const nlohmann::json& object_;
    std::string where_;
};

constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;
constexpr std::int64_t kMostCount = 1 << 30;

RecordKey read_key(const nlohmann::json& object) {
    const Fields record(object, "the record");
    const Fields device(record.at("device"), "device");
    const Fields memory(record.at("memory"), "memory");
    return {.device = {.kind = device.text("kind"),
                       .name = device.text("name"),
                       .units = static_cast<int>(device.number("units", kMostCount)),
                       .l2_bytes = device.number("l2_bytes", kMostBytes),
                       .features = device.text("features")},
            .kernel_version = record.text("kernel_version"),
            .spec = record.text("spec"),
            .request = {.scratch_bytes = memory.number("scratch_bytes", kMostBytes),
                        .workspace_limit_bytes = memory.number("workspace_limit_bytes", kMostBytes),
                        .num_tokens = record.number("num_tokens", kMostBytes)},
            .retained = memory.text("retained"),
            .policy = record.text("policy")};
}

Candidate read_candidate(const nlohmann::json& json, std::string& plan) {
    const Fields fields(json, "a candidate");
    plan = fields.text("plan");
    Candidate candidate{.rank = static_cast<int>(fields.number("rank", kMostCount)),
                        .why = fields.text_or_empty("why"),
                        .workspace_bytes = fields.number("workspace_bytes", kMostBytes),
                        .retained_bytes = fields.number("retained_bytes", kMostBytes)};
    const std::string outcome = fields.text("outcome");
    const auto* found = std::ranges::find(kOutcomes, std::string_view(outcome), [](Outcome o) { return to_string(o); });
    if (found == std::end(kOutcomes)) throw std::runtime_error(fmt::format("outcome \"{}\" is not known", outcome));
    candidate.outcome = *found;
    const nlohmann::json& times = fields.at("times_ms");
    if (!times.is_object()) throw std::runtime_error("times_ms is not an object of runs");
    for (const auto& [run, samples] : times.items()) {
        if (!samples.is_array() || samples.size() > kMaxSamples || run.size() > kMaxTextBytes) {
            throw std::runtime_error("times_ms has something else than lists");
        }
        std::vector<double>& list = candidate.times_ms[run];
        for (const nlohmann::json& sample : samples) {
            const double ms = sample.is_number() ? sample.get<double>() : -1.0;
            if (!(ms >= 0) || !std::isfinite(ms)) throw std::runtime_error("a time is no number of milliseconds");
            list.push_back(ms);
        }
    }
    return candidate;
}

Record read_record(const nlohmann::json& object) {
    const Fields fields(object, "the record");
    if (fields.number("schema", kMostCount) != kSchema) throw std::runtime_error(fmt::format("its schema is not {}", kSchema));
    Record record{.key = read_key(object)};
    if (fields.text("subject") != record.key.subject()) throw std::runtime_error("its subject is not that of its device and spec");
    const nlohmann::json& runs = fields.at("runs");
    if (!runs.is_object()) throw std::runtime_error("\"runs\" is not an object of runs");
    for (const auto& [id, json] : runs.items()) {
        const Fields run(json, "a run");
        record.runs[id] = {.date = run.text("date"),
                           .version = run.text("version"),
                           .commit = run.text("commit"),
                           .device = run.text("device"),
                           .driver = run.text("driver"),
                           .clocks = run.text("clocks"),
                           .searched = run.text("searched")};
    }
    const nlohmann::json& candidates = fields.at("candidates");
    if (!candidates.is_array() || candidates.size() > kMaxRecordCandidates)
        throw std::runtime_error("\"candidates\" is not a list of them");
    for (const nlohmann::json& json : candidates) {
        std::string plan;
        Candidate candidate = read_candidate(json, plan);
        if (!record.candidates.emplace(std::move(plan), std::move(candidate)).second) throw std::runtime_error("a plan is there twice");
    }
    return record;
}

}  // namespace

double recorded_ms(double ms) { return std::stod(fmt::format("{:.4g}", ms)); }

std::string record_text(const Record& record) {
    const RecordKey& key = record.key;
    Json runs = Json::object();
    for (const auto& [id, run] : record.runs) {
        runs[id] = {{"date", run.date},     {"version", run.version}, {"commit", run.commit},    {"device", run.device},
                    {"driver", run.driver}, {"clocks", run.clocks},   {"searched", run.searched}};
    }
    // One line each keeps differences readable and files small.
    std::string candidates;
    for (const auto& [plan, candidate] : record.candidates) {
        candidates += fmt::format("{}\n    {}", candidates.empty() ? "" : ",",
                                  to_json(candidate, plan).dump(-1, ' ', false, Json::error_handler_t::replace));
    }
    const std::string best = record.best_plan();
    const Json best_json =
        best.empty() ? Json(nullptr) : Json{{"plan", best}, {"median_ms", recorded_ms(record.candidates.at(best).median_ms())}};
    const Json device{{"kind", key.device.kind},
                      {"name", key.device.name},
                      {"units", key.device.units},
                      {"l2_bytes", key.device.l2_bytes},
                      {"features", key.device.features}};
    const Json memory{{"scratch_bytes", key.request.scratch_bytes},
                      {"workspace_limit_bytes", key.request.workspace_limit_bytes},
                      {"retained", key.retained}};
    const auto line = [](const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); };
    std::string text = "{\n";
    text += fmt::format("  \"schema\": {},\n  \"subject\": \"{}\",\n", kSchema, key.subject());
    text += fmt::format("  \"device\": {},\n  \"kernel_version\": {},\n", line(device), line(key.kernel_version));
    text += fmt::format("  \"spec\": {},\n  \"num_tokens\": {},\n", line(key.spec), key.request.num_tokens);
    text += fmt::format("  \"memory\": {},\n  \"policy\": {},\n", line(memory), line(key.policy));
    text += fmt::format("  \"runs\": {},\n  \"best\": {},\n", line(runs), line(best_json));
    return text + fmt::format("  \"candidates\": [{}\n  ]\n}}\n", candidates);
}

std::optional<Record> parse_record(std::string_view text, std::string& why) try {
    if (text.size() > kMaxRecordBytes) {
        why = fmt::format("{} bytes long; at most {} are read", text.size(), kMaxRecordBytes);
        return std::nullopt;
    }
    nlohmann::json object;
    why = read_json_object(text, object);
    if (!why.empty()) return std::nullopt;
    return read_record(object);
} catch (const std::exception& error) {
    why = error.what();
    return std::nullopt;
}

std::string_view peek_subject(std::string_view text) noexcept {
    constexpr std::string_view kField = "\"subject\": \"";
    constexpr std::size_t kDigits = 64;
    const std::size_t at = text.substr(0, 512).find(kField);
    if (at == std::string_view::npos || at + kField.size() + kDigits > text.size()) return {};
    return text.substr(at + kField.size(), kDigits);
}

}  // namespace flce
