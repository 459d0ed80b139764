// flce tune --show, --diff, --merge: what has been measured, wherever it lies.
#include <fmt/format.h>

#include <fstream>

#include "cli/tune_options.hpp"
#include "records/record_store.hpp"

namespace flce::cli {
namespace {

std::filesystem::path user_directory(const TuneOptions& options) {
    return options.records_dir.empty() ? Session({.device = "cpu"}).records_dir() : options.records_dir;
}

}  // namespace

void write_html(const TuneOptions& options, const std::vector<NamedRecord>& records) {
    if (options.html.empty()) return;
    std::ofstream file(options.html, std::ios::binary | std::ios::trunc);
    file << html_report(records);
    if (!file.flush()) throw EnvironmentError(fmt::format("{} cannot be written", options.html.string()));
}

int show_records(const TuneOptions& options) {
    std::vector<std::filesystem::path> paths = options.show;
    const auto directory = paths.empty() ? user_directory(options) : std::filesystem::path();
    std::error_code error;
    if (paths.empty() && std::filesystem::exists(directory, error)) paths.push_back(directory);  // it is made when something is measured
    const auto records = read_records(paths);
    write_html(options, records);
    if (options.json) {
        Json list = Json::array();
        for (const NamedRecord& record : records) list.push_back(record_summary(record));
        print_json({{"records", list}});
        return kDone;
    }
    for (const NamedRecord& record : records) fmt::print("{}\n", record_table(record, 0));
    if (records.empty()) fmt::print("no tuning records in {}\n", options.show.empty() ? directory.string() : options.show.front().string());
    return kDone;
}

int diff_records(const TuneOptions& options) {
    const auto records = read_records(options.diff);
    if (records.size() != 2) throw UsageError("--diff compares two records, each a file");
    if (options.json) {
        print_json(record_difference_json(records[0], records[1]));
    } else {
        fmt::print("{}", record_difference(records[0], records[1]));
    }
    return kDone;
}

int merge_records(const TuneOptions& options) {
    std::map<std::string, Record> by_key;
    for (const NamedRecord& named : read_records(options.merge)) {
        const auto [known, added] = by_key.emplace(named.record.key.digest(), named.record);
        if (!added) known->second = merged(known->second, named.record);
    }
    const bool to_file = options.out.extension() == ".json";
    if (to_file && by_key.size() != 1)
        throw UsageError(fmt::format("--out {}: there are records of {} keys; name a directory", options.out.string(), by_key.size()));
    const auto directory = options.out.empty() ? user_directory(options) : options.out;
    RecordStore store({.directory = directory, .shipped = false});
    Json files = Json::array();
    for (const auto& [digest, record] : by_key) {
        if (to_file) {
            write_record_file(options.out, record);
            files.push_back(options.out.string());
            continue;
        }
        // A directory that is named may be a team's: what is there counts whoever has written it.
        const auto there = options.out.empty() ? std::nullopt : find_record(directory, record.key, Writers::all);
        files.push_back(store.save(there ? merged(*there, record) : record).string());
    }
    if (options.json) {
        print_json({{"records", files}});
    } else {
        for (const Json& file : files) fmt::print("{}\n", file.get<std::string>());
    }
    return kDone;
}

}  // namespace flce::cli
