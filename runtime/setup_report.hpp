// How flce is set up on this machine, told even where parts of that are wrong.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace flce {

/// A setting that sessions refuse, or do without.
struct SettingFault {
    std::string variable;  ///< variable of the environment
    std::string message;
};

struct DirectoryReport {
    std::filesystem::path path;  ///< empty: there is none
    std::string fault;           ///< why it is not used, or of less use than it should be; empty: it is used
    bool exists = false;
    std::int64_t files = 0;
    std::int64_t bytes = 0;
};

struct PackReport {
    std::filesystem::path path;
    std::string fault;  ///< why it is not used; empty: it is
    std::int64_t entries = 0;
    std::int64_t bytes = 0;  ///< bytes of the entries
};

struct SetupReport {
    DirectoryReport cache;
    std::vector<PackReport> packs;
    std::string remote;  ///< its URL without a login; empty: none
    std::filesystem::path records_dir;
    std::vector<SettingFault> faults;
    std::vector<std::string> unknown_variables;  ///< FLCE_ variables that are set and that nothing reads
};

/// Reads the environment and looks at the files that it names. From now on this process takes defaults for variables that are not
/// understood. Asks no network.
[[nodiscard]] SetupReport report_setup();

}  // namespace flce
