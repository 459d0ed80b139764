#include "records/named_records.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "flce/error.hpp"
#include "generator/json_object.hpp"
#include "records/record_files.hpp"
#include "records/record_store.hpp"

namespace flce {
namespace {

/// Files that several nodes have published one record as are one, under the first one's name.
void add_file(std::vector<NamedRecord>& records, const std::filesystem::path& file, Record record) {
    const std::string stem = record.key.file().stem().string();
    const auto is_part = [&](const std::filesystem::path& path) { return is_file_of(path, stem); };
    const auto other = std::ranges::find_if(records, [&](const NamedRecord& known) {
        const std::filesystem::path path = known.name;
        return is_part(path) && path.parent_path() == file.parent_path() && known.record.key == record.key;
    });
    if (other != records.end() && is_part(file)) {
        other->record = merged(other->record, record);
    } else {
        records.push_back({file.string(), std::move(record)});
    }
}

constexpr int kReport = 1;
constexpr std::size_t kMaxReportBytes = std::size_t{64} << 20;

/// The records of a report; std::nullopt for a text that is none. Throws ArgumentError for one that holds something else than records.
std::optional<std::vector<NamedRecord>> read_report(const std::filesystem::path& path) {
    std::error_code error;
    const std::uintmax_t bytes = std::filesystem::is_regular_file(path, error) ? std::filesystem::file_size(path, error) : 0;
    if (error || bytes == 0 || bytes > kMaxReportBytes) return std::nullopt;
    std::ifstream file(path, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    nlohmann::json report;
    if (!read_json_object(text, report).empty() || !report.contains("report")) return std::nullopt;
    const auto fail = [&](const std::string& why) { return ArgumentError(fmt::format("{}: {}", path.string(), why)); };
    if (report.at("report") != kReport) throw fail(fmt::format("a report of another kind than {}", kReport));
    if (!report.contains("records") || !report.at("records").is_array()) throw fail("a report without a list of records");
    std::vector<NamedRecord> records;
    for (const nlohmann::json& each : report.at("records")) {
        std::string why;
        auto record = parse_record(each.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), why);
        if (!record) throw fail(fmt::format("record {}: {}", records.size() + 1, why));
        records.push_back({path.string(), std::move(*record)});
    }
    return records;
}

}  // namespace

std::string records_report(const std::vector<NamedRecord>& records, std::string_view about) {
    std::string list;
    for (const NamedRecord& named : records) list += (list.empty() ? "" : ",\n") + record_text(named.record);
    return fmt::format("{{\"report\": {}, \"about\": {},\n\"records\": [\n{}]}}\n", kReport, about, list);
}

std::vector<NamedRecord> read_records(const std::vector<std::filesystem::path>& paths) {
    namespace fs = std::filesystem;
    std::vector<NamedRecord> records;
    std::string why;
    for (const fs::path& path : paths) {
        std::error_code error;
        if (!fs::is_directory(path, error)) {
            if (auto report = read_report(path)) {
                std::ranges::move(*report, std::back_inserter(records));
                continue;
            }
            auto record = read_record_file(path, why);
            if (!record) throw ArgumentError(fmt::format("{}: {}", path.string(), why.empty() ? "there is no such file" : why));
            records.push_back({path.string(), std::move(*record)});
            continue;
        }
        std::vector<fs::path> inside;
        for (fs::recursive_directory_iterator it(path, error); !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
            if (it->path().extension() == ".json" && it->is_regular_file(error)) inside.push_back(it->path());
        }
        std::ranges::sort(inside);
        for (const fs::path& file : inside) {
            if (auto record = read_record_file(file, why)) {
                add_file(records, file, std::move(*record));
            } else if (!why.empty()) {  // one bad file among many is no reason to show none
                fmt::print(stderr, "flce: warning: {} is left out: {}\n", file.string(), why);
            }
        }
    }
    return records;
}

}  // namespace flce
