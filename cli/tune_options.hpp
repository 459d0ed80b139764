// What flce tune was asked for, and the commands beside the tuning itself.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "cli/tune_report.hpp"

namespace flce::cli {

struct TuneOptions {
    std::vector<std::string> specs;
    std::vector<std::filesystem::path> hf_configs;
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
    std::filesystem::path out, html;
    std::vector<std::string> inject;
};

/// Of --spec and --hf-config, normalized. Throws UsageError where there is none.
[[nodiscard]] std::vector<Spec> specs_of(const TuneOptions& options);
/// The buckets of --num-tokens, each once.
[[nodiscard]] std::vector<std::int64_t> tokens_of(const TuneOptions& options);
/// --workspace-limit; 0: none.
[[nodiscard]] std::int64_t limit_bytes_of(const TuneOptions& options);
/// What plans are compared for: such a call, with the scratch that a session would give it.
[[nodiscard]] PlanRequest plan_request(const TuneOptions& options, Session& session, const Spec& spec, const Device& device,
                                       std::int64_t num_tokens);
/// Throws UsageError for a name that plans for such a device know nothing of.
void check_coordinates(const TuneOptions& options, DeviceKind kind);

/// --html, where it was asked for.
void write_html(const TuneOptions& options, const std::vector<NamedRecord>& records);

// Each returns an exit code.
[[nodiscard]] int show_records(const TuneOptions& options);
[[nodiscard]] int diff_records(const TuneOptions& options);
/// Records of one key become one; with --out they are written there (a directory where there are several keys), else into the user's directory.
[[nodiscard]] int merge_records(const TuneOptions& options);
/// What a search asks for first, every single change of the cost model's choice, and every kernel that it can come to from there: tuning compiles no
/// kernel then, unless another path or strategy than the cost model's wins. (What launches a GPU's kernels is a plan's own.) The device need not be here.
[[nodiscard]] int compile_candidates(const TuneOptions& options);

}  // namespace flce::cli
