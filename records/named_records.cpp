#include "records/named_records.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "flce/error.hpp"
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

}  // namespace

std::vector<NamedRecord> read_records(const std::vector<std::filesystem::path>& paths) {
    namespace fs = std::filesystem;
    std::vector<NamedRecord> records;
    std::string why;
    for (const fs::path& path : paths) {
        std::error_code error;
        if (!fs::is_directory(path, error)) {
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
