// Records of named files and directories, for people who look at them.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "records/record.hpp"

namespace flce {

struct NamedRecord {
    std::string name;  ///< its file
    Record record;
    std::string spec{};  ///< the caller's spec text; empty: the record's, which every layer with the same kernels shares
    [[nodiscard]] const std::string& spec_text() const { return spec.empty() ? record.key.spec : spec; }
};

/// One file of many records, to send to somebody. A JSON object: `report` (1), `about` (an object that says of the machine what people want
/// to know) and `records`, a list of records as they lie in files.
[[nodiscard]] std::string records_report(const std::vector<NamedRecord>& records, std::string_view about);

/// Records of files, reports among them, and of all *.json below directories. Throws ArgumentError for a path that is neither, or a named
/// file that is no record; one found in a directory is left out with a warning.
[[nodiscard]] std::vector<NamedRecord> read_records(const std::vector<std::filesystem::path>& paths);

}  // namespace flce
