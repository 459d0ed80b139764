// The files of records/shipped, embedded in the library at build time.
#pragma once

#include <span>
#include <string_view>

namespace flce {

struct ShippedRecord {
    std::string_view name;  ///< name of the file, without ".json"
    std::string_view text;
};
[[nodiscard]] std::span<const ShippedRecord> shipped_records();

}  // namespace flce
