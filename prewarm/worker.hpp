// The process that compiles for prewarm: `flce prewarm-worker`. prewarm/prewarm.cpp is the other side.
#pragma once

#include <filesystem>

namespace flce {

/// The word after the command's name that makes it this worker. The worker takes --cache-dir and --entries.
inline constexpr const char* kPrewarmWorker = "prewarm-worker";

/// Serves requests, a kernel set each, from standard input until it ends. `entries`: a folder in which the cache entries that were used are
/// left; empty: nowhere. Returns false where an answer could not be written.
[[nodiscard]] bool serve_prewarm(const std::filesystem::path& cache_dir, const std::filesystem::path& entries);

}  // namespace flce
