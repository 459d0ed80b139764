#include "autotune/tune_json.hpp"

#include <map>
#include <string>
#include <utility>

namespace flce {

NamedRecord named(const Tuned& tuned) { return {tuned.file.string(), tuned.record, tuned.spec.text()}; }

Json record_summary(const NamedRecord& named) {
    const Record& record = named.record;
    const std::string best = record.best_plan();
    return {{"record", named.name},
            {"spec", named.spec_text()},
            {"device", record.key.device.name},
            {"num_tokens", record.key.request.num_tokens},
            {"policy", record.key.policy},
            {"candidates", record.candidates.size()},
            {"best_plan", best.empty() ? Json(nullptr) : Json(best)},
            {"best_ms", best.empty() ? Json(nullptr) : Json(record.candidates.at(best).median_ms())}};
}

Json tune_report_json(const Tuner& tuner) {
    Json items = Json::array();
    std::size_t candidates = 0;
    std::size_t measured = 0;
    for (const Tuned& tuned : tuner.tuned()) {
        Json item = record_summary(named(tuned));
        const auto& all = tuned.record.candidates;
        item["measured"] = tuned.result.measured;
        item["complete"] = tuned.result.complete;
        item["combinations"] = tuned.result.combinations;
        item["seconds"] = tuned.seconds;
        item["processes"] = tuned.processes;
        item["compiled"] = tuned.compiled;
        item["default_plan"] = tuned.result.default_plan;
        const auto first = all.find(tuned.result.default_plan);
        const bool timed = first != all.end() && first->second.sample_count() > 0;
        item["default_ms"] = timed ? Json(first->second.median_ms()) : Json(nullptr);
        std::map<std::string, int> outcomes;
        for (const auto& [plan, candidate] : all) ++outcomes[std::string(to_string(candidate.outcome))];
        item["outcomes"] = outcomes;
        candidates += all.size();
        measured += tuned.result.measured;
        items.push_back(std::move(item));
    }
    Json json = Json::object();
    if (items.size() == 1) {
        json = items.front();
    } else {
        json = {{"candidates", candidates}, {"measured", measured}, {"best_plan", nullptr}, {"best_ms", nullptr}, {"record", nullptr}};
    }
    json["items"] = std::move(items);
    if (!tuner.untuned().empty()) {
        Json& list = json["errors"] = Json::array();
        for (const UntunedLayer& item : tuner.untuned()) {
            list.push_back({{"spec", item.spec.text()}, {"num_tokens", item.num_tokens}, {"error", item.why}});
        }
    }
    return json;
}

}  // namespace flce
