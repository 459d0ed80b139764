#include "cli/tune_records.hpp"

#include <fmt/format.h>

#include <fstream>

#include "records/record_store.hpp"

namespace flce::cli {
namespace {

std::filesystem::path user_directory(const TuneFlags& flags) {
    return flags.records_dir.empty() ? Session({.device = "cpu"}).records_dir() : flags.records_dir;
}

}  // namespace

void write_report(const TuneFlags& flags, const std::vector<NamedRecord>& records, const Device* tuned) {
    if (flags.report.empty()) return;
    const auto write = [](const std::filesystem::path& path, const std::string& text) {
        std::ofstream file(path, std::ios::binary | std::ios::trunc);
        file << text;
        if (!file.flush()) throw EnvironmentError(fmt::format("{} cannot be written", path.string()));
    };
    Json about{{"flce", version()}};
    if (tuned != nullptr) about["device"] = Json::parse(tuned->json());
    write(flags.report, records_report(records, about.dump()));
    write(std::filesystem::path(flags.report).replace_extension(".html"), html_report(records));
}

int show_records(const TuneFlags& flags) {
    std::vector<std::filesystem::path> paths = flags.show;
    const auto directory = paths.empty() ? user_directory(flags) : std::filesystem::path();
    std::error_code error;
    if (paths.empty() && std::filesystem::exists(directory, error)) paths.push_back(directory);  // it is made when something is measured
    const auto records = read_records(paths);
    write_report(flags, records, nullptr);
    if (flags.json) {
        Json list = Json::array();
        for (const NamedRecord& record : records) list.push_back(record_summary(record));
        print_json({{"records", list}});
        return kDone;
    }
    for (const NamedRecord& record : records) fmt::print("{}\n", record_table(record, 0));
    if (records.empty()) fmt::print("no tuning records in {}\n", flags.show.empty() ? directory.string() : flags.show.front().string());
    return kDone;
}

int diff_records(const TuneFlags& flags) {
    const auto records = read_records(flags.diff);
    if (records.size() != 2) throw UsageError("--diff compares two records, each a file");
    if (flags.json) {
        print_json(record_difference_json(records[0], records[1]));
    } else {
        fmt::print("{}", record_difference(records[0], records[1]));
    }
    return kDone;
}

int merge_records(const TuneFlags& flags) {
    std::map<std::string, Record> by_key;
    for (const NamedRecord& named : read_records(flags.merge)) {
        const auto [known, added] = by_key.emplace(named.record.key.digest(), named.record);
        if (!added) known->second = merged(known->second, named.record);
    }
    const bool to_file = flags.out.extension() == ".json";
    if (to_file && by_key.size() != 1)
        throw UsageError(fmt::format("--out {}: there are records of {} keys; name a directory", flags.out.string(), by_key.size()));
    const auto directory = flags.out.empty() ? user_directory(flags) : flags.out;
    RecordStore store({.directory = directory, .shipped = false});
    Json files = Json::array();
    for (const auto& [digest, record] : by_key) {
        if (to_file) {
            write_record_file(flags.out, record);
            files.push_back(flags.out.string());
            continue;
        }
        // A directory that is named may be a team's: every record in it counts.
        const auto there = flags.out.empty() ? std::nullopt : find_record(directory, record.key, Writers::all);
        files.push_back(store.save(there ? merged(*there, record) : record).string());
    }
    if (flags.json) {
        print_json({{"records", files}});
    } else {
        for (const Json& file : files) fmt::print("{}\n", file.get<std::string>());
    }
    return kDone;
}

}  // namespace flce::cli
