#include "cli/tune_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace flce::cli {
namespace {

struct Row {
    std::string plan;
    const Candidate* candidate;
    double median_ms;
    bool best;
    bool default_choice;  ///< the cost model's first
};

/// The quickest first; what has no times or is not correct last.
std::vector<Row> ranking(const Record& record) {
    const std::string best = record.best_plan();
    std::vector<Row> rows;
    for (const auto& [plan, candidate] : record.candidates) {
        const bool counts = candidate.outcome == Outcome::ok;
        rows.push_back({plan, &candidate, counts ? candidate.median_ms() : std::numeric_limits<double>::infinity(), plan == best,
                        candidate.rank == 0});
    }
    std::ranges::stable_sort(rows, {}, &Row::median_ms);
    return rows;
}

std::string memory_text(const RecordKey& key) {
    std::string text = fmt::format("scratch {}", human_bytes(static_cast<double>(key.request.scratch_bytes)));
    if (key.request.workspace_limit_bytes > 0)
        text += fmt::format(", limit {}", human_bytes(static_cast<double>(key.request.workspace_limit_bytes)));
    return text + (key.retained == kNothingRetained ? ", nothing retained" : "");
}

std::string run_text(const std::string& id, const TuningRun& run) {
    return fmt::format("{}: {}, flce {}{}, {}{}{}{}", id, run.date, run.version, run.commit.empty() ? "" : " (" + run.commit + ")",
                       run.device, run.driver.empty() ? "" : ", driver " + run.driver, run.clocks.empty() ? "" : ", " + run.clocks,
                       run.searched.empty() ? ", stopped before its end" : "");
}

std::string time_text(const Row& row) { return std::isinf(row.median_ms) ? "" : fmt::format("{:.4g} ms", row.median_ms); }

std::string result_text(const Row& row, double best_ms) {
    if (row.candidate->outcome != Outcome::ok) return fmt::format("{}: {}", to_string(row.candidate->outcome), row.candidate->why);
    if (std::isinf(row.median_ms)) return "not timed";
    return best_ms > 0 ? fmt::format("{:+.1f} %", 100 * (row.median_ms / best_ms - 1)) : "";
}

/// Why the best is it though some have a smaller median; empty where none has.
std::string why_not_the_least(const Record& record, const std::vector<Row>& rows, double best_ms) {
    std::size_t ties = 0;
    std::size_t seldom = 0;
    const std::size_t enough = record.samples_to_win();
    for (const Row& row : rows) {
        if (row.best || std::isinf(row.median_ms) || row.median_ms >= best_ms) continue;
        ++(row.candidate->sample_count() < enough ? seldom : ties);
    }
    std::string text;
    if (ties > 0) {
        text = fmt::format("Medians within {:.0f} % of the least are a tie: the cost model's order decides.", 100 * kTieMargin);
    }
    if (seldom > 0) text += fmt::format("{}A plan with fewer than {} samples does not win.", text.empty() ? "" : " ", enough);
    return text;
}

double best_ms_of(const Record& record) {
    const std::string best = record.best_plan();
    return best.empty() ? 0 : record.candidates.at(best).median_ms();
}

std::string escaped(std::string_view text) {
    std::string result;
    for (const char c : text) {
        switch (c) {
            case '&': result += "&amp;"; break;
            case '<': result += "&lt;"; break;
            case '>': result += "&gt;"; break;
            case '"': result += "&quot;"; break;
            default: result += c;
        }
    }
    return result;
}

/// Text with a place to break a line behind every `separator`, and nowhere else: not in numbers, not in a tile.
std::string breakable(std::string_view text, char separator = ',') {
    std::string result;
    for (const char c : text) {
        result += escaped({&c, 1});
        if (c == separator) result += "<wbr>";
    }
    return result;
}

/// A point for each candidate: bytes beyond inputs and gradients across, time up; the winner filled.
std::string scatter_svg(const std::vector<Row>& rows) {
    std::vector<const Row*> points;
    for (const Row& row : rows) {
        if (!std::isinf(row.median_ms)) points.push_back(&row);
    }
    if (points.empty()) return "<p>No candidate has been timed.</p>";
    const auto bytes = [](const Row& row) { return static_cast<double>(row.candidate->workspace_bytes + row.candidate->retained_bytes); };
    double most_bytes = 1;
    double most_ms = 0;
    double least_ms = std::numeric_limits<double>::infinity();
    for (const Row* row : points) {
        most_bytes = std::max(most_bytes, bytes(*row));
        most_ms = std::max(most_ms, row->median_ms);
        least_ms = std::min(least_ms, row->median_ms);
    }
    constexpr double kLeft = 70;
    constexpr double kWidth = 560;
    constexpr double kTop = 15;
    constexpr double kHeight = 260;
    const double low = least_ms - 0.1 * (most_ms - least_ms) - 1e-9;
    const double high = most_ms + 0.1 * (most_ms - least_ms) + 1e-9;
    const auto x = [&](double value) { return kLeft + kWidth * value / (1.05 * most_bytes); };
    const auto y = [&](double value) { return kTop + kHeight * (high - value) / (high - low); };
    std::string svg = "<svg viewBox=\"0 0 660 330\" role=\"img\" aria-label=\"memory against time\">\n";
    constexpr int kTicks = 4;
    for (int i = 0; i <= kTicks; ++i) {
        const double ms = low + (high - low) * i / kTicks;
        svg += fmt::format(
            "<line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" class=\"grid\"/><text x=\"{3}\" y=\"{4:.1f}\" "
            "class=\"y\">{5:.4g}</text>\n",
            kLeft, kLeft + kWidth, y(ms), kLeft - 6, y(ms) + 4, ms);
        const double at = 1.05 * most_bytes * i / kTicks;
        svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" class=\"x\">{}</text>\n", x(at), kTop + kHeight + 18, human_bytes(at));
    }
    svg += fmt::format(
        "<text x=\"{}\" y=\"325\" class=\"x\">memory beyond inputs and gradients</text><text x=\"12\" y=\"{}\" class=\"x\" "
        "transform=\"rotate(-90 12 {})\">ms</text>\n",
        kLeft + kWidth / 2, kTop + kHeight / 2, kTop + kHeight / 2);
    for (const Row* row : points) {
        svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" class=\"{}\"><title>{}\n{}, {}</title></circle>\n", x(bytes(*row)),
                           y(row->median_ms),
                           row->best             ? "best"
                           : row->default_choice ? "other default"
                                                 : "other",
                           escaped(row->plan), time_text(*row), human_bytes(bytes(*row)));
    }
    return svg + "</svg>\n";
}

std::string html_section(const NamedRecord& named) {
    const Record& record = named.record;
    const RecordKey& key = record.key;
    const std::string best = record.best_plan();
    const double best_ms = best_ms_of(record);
    const auto rows = ranking(record);
    double slowest = best_ms;
    for (const Row& row : rows) slowest = std::isinf(row.median_ms) ? slowest : std::max(slowest, row.median_ms);
    std::string html = fmt::format("<section><h2>{}</h2><p>{}, {} tokens; {}; kernels {}; {}</p>\n", breakable(named.spec_text()),
                                   escaped(key.device.name), key.request.num_tokens, memory_text(key), escaped(key.kernel_version),
                                   breakable(named.name, '/'));
    html += best.empty() ? "<p>No candidate is left.</p>\n"
                         : fmt::format("<p>The best: <code>{}</code>, {:.4g} ms forward and backward. {}</p>\n", breakable(best), best_ms,
                                       escaped(why_not_the_least(record, rows, best_ms)));
    html += "<ul>\n";
    for (const auto& [id, run] : record.runs) html += fmt::format("<li>{}</li>\n", escaped(run_text(id, run)));
    html += "</ul>\n" + scatter_svg(rows);
    html += "<table><tr><th></th><th>plan</th><th>median</th><th></th><th>samples</th><th>memory</th><th>to the best</th></tr>\n";
    for (const Row& row : rows) {
        const double share = std::isinf(row.median_ms) || slowest <= 0 ? 0 : row.median_ms / slowest;
        const char* const mark = row.best && row.default_choice ? "the best, and the cost model's choice"
                                 : row.best                     ? "the best"
                                 : row.default_choice           ? "the cost model's choice"
                                                                : "";
        html += fmt::format(
            "<tr class=\"{}{}\"><td class=\"mark\">{}</td><td class=\"plan\"><code>{}</code></td><td>{}</td><td><svg class=\"bar\" "
            "viewBox=\"0 0 100 8\"><rect "
            "width=\"{:.1f}\" height=\"8\"/></svg></td><td>{}</td><td>{}</td><td{}>{}</td></tr>\n",
            row.best ? "best" : to_string(row.candidate->outcome), row.default_choice ? " default" : "", escaped(mark), breakable(row.plan),
            time_text(row), 100 * share, row.candidate->sample_count(),
            human_bytes(static_cast<double>(row.candidate->workspace_bytes + row.candidate->retained_bytes)),
            row.candidate->outcome == Outcome::ok ? "" : " class=\"why\"", escaped(result_text(row, best_ms)));
    }
    return html + "</table></section>\n";
}

/// Numbers and their units stay on one line; plans break behind commas, reasons between words.
constexpr const char* kStyle =
    R"(body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222;background:#fff}
code{font-size:12px}table{border-collapse:collapse;width:100%}td,th{padding:3px 8px;text-align:left}
td,th{border-bottom:1px solid #ddd;white-space:nowrap}
td.plan,td.why,td.mark{white-space:normal}td.mark{font-size:12px;min-width:6em}
svg{max-width:44em;display:block}.bar{width:100px;height:8px}.bar rect{fill:#8ab}.grid{stroke:#ddd}.x{text-anchor:middle;font-size:11px}
.y{text-anchor:end;font-size:11px}circle.other{fill:none;stroke:#467}circle.default{fill:#467}circle.best{fill:#d33;stroke:#d33}
tr.best{background:#fee}tr.default{font-weight:bold}tr.wrong,tr.hung,tr.faulted,tr.failed{color:#a00}
section{margin-bottom:3em;overflow-x:auto})";

}  // namespace

std::string tuning_note(std::size_t candidates, double best_ms) {
    return fmt::format("{} candidates{}", candidates, best_ms > 0 ? fmt::format(", best {:.4g} ms", best_ms) : "");
}

std::string record_table(const NamedRecord& named, std::size_t most) {
    const Record& record = named.record;
    const double best_ms = best_ms_of(record);
    std::string text =
        fmt::format("{}\n  {}, {} tokens; {}; kernels {}\n  {}\n  {}\n", named.spec_text(), record.key.device.name,
                    record.key.request.num_tokens, memory_text(record.key), record.key.kernel_version, record.key.policy, named.name);
    for (const auto& [id, run] : record.runs) text += fmt::format("  run {}\n", run_text(id, run));
    text += fmt::format("\n     {:>11} {:>8} {:>11}  {}\n", "median", "samples", "memory", "plan");
    std::size_t shown = 0;
    const auto rows = ranking(record);
    for (const Row& row : rows) {
        if (most > 0 && shown++ == most) {
            text += fmt::format("     … and {} more\n", rows.size() - most);
            break;
        }
        text += fmt::format("  {}{} {:>11} {:>8} {:>11}  {}  {}\n", row.best ? '*' : ' ', row.default_choice ? 'm' : ' ', time_text(row),
                            row.candidate->sample_count(),
                            human_bytes(static_cast<double>(row.candidate->workspace_bytes + row.candidate->retained_bytes)), row.plan,
                            result_text(row, best_ms));
    }
    const std::string why = why_not_the_least(record, rows, best_ms);
    return text +
           fmt::format("  *: the best, m: the cost model's first choice\n{}{}", why.empty() ? "" : "  " + why, why.empty() ? "" : "\n");
}

Json record_difference_json(const NamedRecord& a, const NamedRecord& b) {
    Json json{{"a", record_summary(a)}, {"b", record_summary(b)}, {"same_key", a.record.key == b.record.key}};
    Json both = Json::array();
    Json only_a = Json::array();
    Json only_b = Json::array();
    for (const auto& [plan, candidate] : a.record.candidates) {
        const auto other = b.record.candidates.find(plan);
        if (other == b.record.candidates.end()) {
            only_a.push_back(plan);
            continue;
        }
        const double before = candidate.median_ms();
        const double after = other->second.median_ms();
        const auto number = [](double ms) { return std::isfinite(ms) ? Json(ms) : Json(nullptr); };
        both.push_back({{"plan", plan},
                        {"a_ms", number(before)},
                        {"b_ms", number(after)},
                        {"ratio", number(after / before)},
                        {"a_outcome", to_string(candidate.outcome)},
                        {"b_outcome", to_string(other->second.outcome)}});
    }
    for (const auto& [plan, candidate] : b.record.candidates) {
        if (!a.record.candidates.contains(plan)) only_b.push_back(plan);
    }
    json["both"] = std::move(both);
    json["only_a"] = std::move(only_a);
    json["only_b"] = std::move(only_b);
    json["provenance"] = a.record.runs.empty() || b.record.runs.empty()
                             ? ""
                             : provenance_change(a.record.runs.rbegin()->second, b.record.runs.rbegin()->second);
    return json;
}

std::string record_difference(const NamedRecord& a, const NamedRecord& b) {
    const Json json = record_difference_json(a, b);
    std::string text =
        fmt::format("a  {}\n   {} on {}, {} tokens\nb  {}\n   {} on {}, {} tokens\n", a.name, a.spec_text(), a.record.key.device.name,
                    a.record.key.request.num_tokens, b.name, b.spec_text(), b.record.key.device.name, b.record.key.request.num_tokens);
    if (!(a.record.key == b.record.key)) text += "they are not of the same thing: device, kernels, spec, tokens, memory or policy differ\n";
    const std::string provenance = json["provenance"].get<std::string>();
    if (!provenance.empty()) text += fmt::format("{}\n", provenance);
    text += fmt::format("best of a  {}\nbest of b  {}\n\n  {:>11} {:>11} {:>8}  plan\n", a.record.best_plan(), b.record.best_plan(), "a",
                        "b", "b to a");
    for (const Json& row : json["both"]) {
        const auto ms = [&](const char* key, const char* outcome) {
            if (row[outcome] != "ok") return row[outcome].get<std::string>();
            return row[key].is_null() ? std::string("-") : fmt::format("{:.4g} ms", row[key].get<double>());
        };
        text +=
            fmt::format("  {:>11} {:>11} {:>8}  {}\n", ms("a_ms", "a_outcome"), ms("b_ms", "b_outcome"),
                        row["ratio"].is_null() ? "" : fmt::format("{:.3f}", row["ratio"].get<double>()), row["plan"].get<std::string>());
    }
    text += fmt::format("\n{} candidates in both, {} in a alone, {} in b alone\n", json["both"].size(), json["only_a"].size(),
                        json["only_b"].size());
    return text;
}

std::string html_report(const std::vector<NamedRecord>& records) {
    std::string html = fmt::format(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>flce tuning "
        "records</title><style>{}</style></head><body>\n<h1>flce tuning records</h1>\n",
        kStyle);
    for (const NamedRecord& record : records) html += html_section(record);
    return html + "</body></html>\n";
}

}  // namespace flce::cli
