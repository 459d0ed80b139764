// The flags of flce tune, and what they ask the tuner for.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "autotune/tuner.hpp"
#include "cli/command.hpp"

namespace flce::cli {

struct TuneFlags {
    std::vector<std::string> specs;
    std::vector<std::filesystem::path> hf_configs;
    bool all_layers = false;
    std::vector<std::int64_t> num_tokens;
    SessionFlags session;
    std::string limit;
    std::string retain = "auto";
    std::vector<std::string> plans;
    std::filesystem::path candidates_file;
    double budget_s = 60;
    double candidate_timeout_s = 30;
    std::vector<std::string> coordinates;
    std::int64_t exhaustive = 0;
    std::filesystem::path records_dir;
    std::string commit;
    bool fresh = false;
    bool compile_only = false;
    bool json = false;
    bool shows = false;
    std::vector<std::filesystem::path> show, diff, merge;
    std::filesystem::path out, report;
    std::vector<std::string> worker;  ///< a program and its arguments in place of this program's worker; for tests
    bool always_graphs = false;       ///< for tests
    bool always_rates = false;        ///< for tests

    /// Options from --spec, --hf-config, --all-layers and the others, specs normalized. Throws UsageError where there is no spec,
    /// SpecError, PlanError.
    [[nodiscard]] TuneOptions options() const;
    /// Processes of this program, or of the one that --worker names.
    [[nodiscard]] TunerWorkers workers() const;
};

}  // namespace flce::cli
