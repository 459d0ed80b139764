// What finding an artifact of a cubin's size costs in each tier: with a new cache for each lookup, as in a process that starts, everything verified.
// The goals are 5 ms from the directory and from a pack, 10 ms from redis on this machine. Remote tiers run with the URL of a server to use in
// FLCE_BENCH_REMOTE, e.g. redis://127.0.0.1:6379.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/temporary_folder.hpp"
#include "cache/artifact_cache.hpp"
#include "cache/artifact_format.hpp"
#include "cache/pack_store.hpp"
#include "cache/remote_store.hpp"

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kPayloadBytes = 100 << 10;
constexpr int kPackEntries = 1000;

using Folder = flce::bench::TemporaryFolder;

flce::CacheKey key_of(int i) { return flce::KeyBuilder("benchmark").add("i", std::to_string(i)).finish(); }

/// Half of it compresses.
flce::Artifact artifact() {
    flce::Artifact made{R"({"kind":"benchmark"})", std::vector<std::byte>(kPayloadBytes)};
    std::mt19937 random(1);
    for (std::size_t i = 0; i < kPayloadBytes / 2; ++i) made.payload[i] = static_cast<std::byte>(random());
    return made;
}

void look_up(benchmark::State& state, const std::function<flce::ArtifactCache::Options()>& options) {
    for (auto _ : state) {
        flce::ArtifactCache cache(options());
        if (cache.find(key_of(0)) == nullptr) return state.SkipWithError("not found");
    }
}

void Hit_Local(benchmark::State& state) {
    const Folder folder;
    flce::ArtifactCache({.directory = folder.path()}).keep(key_of(0), artifact(), flce::ArtifactCache::Replace::always);
    look_up(state, [&] { return flce::ArtifactCache::Options{.directory = folder.path()}; });
}
BENCHMARK(Hit_Local)->Unit(benchmark::kMicrosecond);

/// Opening the pack, with the check of its index, included.
void Hit_PackOf1000(benchmark::State& state) {
    const Folder folder;
    flce::PackContents contents;
    for (int i = 0; i < kPackEntries; ++i) contents[key_of(i)] = flce::encode_artifact(key_of(i), artifact());
    const fs::path path = folder.path() / "kernels.flcepack";
    flce::write_pack(path, contents);
    look_up(state, [&] {
        flce::ArtifactCache::Options options;
        options.further.push_back(std::make_shared<flce::PackStore>(std::vector{path}, flce::TrustedKeys()));
        return options;
    });
}
BENCHMARK(Hit_PackOf1000)->Unit(benchmark::kMicrosecond);

/// Connecting included, as the first lookup of a process.
void Hit_Remote(benchmark::State& state) {
    const char* url = std::getenv("FLCE_BENCH_REMOTE");
    if (url == nullptr) return state.SkipWithError("FLCE_BENCH_REMOTE is not set");
    const auto options = [&] {
        flce::ArtifactCache::Options made;
        made.further.push_back(std::make_shared<flce::RemoteStore>(flce::RemoteOptions{.url = url}));
        return made;
    };
    flce::ArtifactCache(options()).keep(key_of(0), artifact(), flce::ArtifactCache::Replace::always);
    look_up(state, options);
}
BENCHMARK(Hit_Remote)->Unit(benchmark::kMicrosecond);

/// Written, synced and told to the statistics: what a compile pays beside itself.
void Keep_Local(benchmark::State& state) {
    const Folder folder;
    flce::ArtifactCache cache({.directory = folder.path()});
    int i = 0;
    for (auto _ : state) cache.keep(key_of(i++), artifact(), flce::ArtifactCache::Replace::always);
}
BENCHMARK(Keep_Local)->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
