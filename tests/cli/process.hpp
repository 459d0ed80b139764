// Runs the flce program and collects its output.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace flce::test {

struct ProcessResult {
    int exit_code = -1;  ///< −signal where a signal ended it
    std::string out;
    std::string err;
    [[nodiscard]] nlohmann::json json() const;  ///< JSON of out; a discarded value where out is not exactly one JSON value
};

struct ProcessOptions {
    std::map<std::string, std::string> environment;  ///< added to or replacing the parent's
    int interrupt_after_ms = 0;                      ///< > 0: sends SIGINT then
    std::filesystem::path program;                   ///< empty: the flce that was built
    std::filesystem::path directory;                 ///< where it runs; empty: here
    std::filesystem::path out;                       ///< file in the place of ProcessResult::out
    bool out_closed = false;                         ///< there is no standard output
};

/// The program that run_flce runs.
[[nodiscard]] std::filesystem::path flce_program();

/// Arguments of flce tune with which its workers misbehave: KIND@TEXT does KIND with plans that hold TEXT (tests/cli/faulty_worker.cc).
[[nodiscard]] std::vector<std::string> with_faults(const std::vector<std::string>& faults);

/// Runs `flce arguments…`. FLCE_* variables of the parent are not handed on, the cache is the test's own.
[[nodiscard]] ProcessResult run_flce(const std::vector<std::string>& arguments, const ProcessOptions& options = {});

/// A folder that lives as long as this object.
class TemporaryFolder {
public:
    TemporaryFolder();
    ~TemporaryFolder();
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    [[nodiscard]] const std::filesystem::path& path() const { return path_; }
    [[nodiscard]] std::string operator/(const std::string& name) const { return (path_ / name).string(); }

private:
    std::filesystem::path path_;
};

/// One cache for all tests of this process, so that equal kernels are compiled once.
[[nodiscard]] const std::filesystem::path& shared_cache();

}  // namespace flce::test
