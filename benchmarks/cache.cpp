// Time to find an artifact of a cubin's size in each tier: with a new cache for each lookup, as in a process that starts, everything
// verified. The goals are 5 ms from the directory and from a pack, 10 ms from redis on this machine. The servers that tests start (redis,
// nginx with dav, moto's S3: tools/setup.sh --servers) are started here too; FLCE_BENCH_REMOTE names the URL of another, e.g.
// redis://10.0.0.1:6379.
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
#include "runtime/environment.hpp"
#ifdef FLCE_HAVE_TEST_SERVERS
#include "tests/cache/servers.hpp"
#endif

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
void look_up_remote(benchmark::State& state, const flce::RemoteOptions& remote) {
    const auto options = [&] {
        flce::ArtifactCache::Options made;
        made.further.push_back(std::make_shared<flce::RemoteStore>(remote));
        return made;
    };
    flce::ArtifactCache(options()).keep(key_of(0), artifact(), flce::ArtifactCache::Replace::always);
    look_up(state, options);
}

void Hit_Remote(benchmark::State& state) {
    const char* url = std::getenv("FLCE_BENCH_REMOTE");
    if (url == nullptr) return state.SkipWithError("FLCE_BENCH_REMOTE is not set");
    look_up_remote(state, {.url = url, .s3 = flce::environment().s3});
}
BENCHMARK(Hit_Remote)->Unit(benchmark::kMicrosecond);

#ifdef FLCE_HAVE_TEST_SERVERS
void Hit_Redis(benchmark::State& state) {
    std::string why;
    const auto server = flce::test::start_redis(why);
    if (server == nullptr) return state.SkipWithError(why.c_str());
    look_up_remote(state, {.url = server->url});
}
BENCHMARK(Hit_Redis)->Unit(benchmark::kMicrosecond);

void Hit_NginxDav(benchmark::State& state) {
    std::string why;
    const auto server = flce::test::start_nginx(why);
    if (server == nullptr) return state.SkipWithError(why.c_str());
    look_up_remote(state, {.url = server->url});
}
BENCHMARK(Hit_NginxDav)->Unit(benchmark::kMicrosecond);

/// Most of it is the server's time: moto is a mock in Python.
void Hit_S3Moto(benchmark::State& state) {
    std::string why;
    const auto server = flce::test::start_s3(why);
    if (server == nullptr) return state.SkipWithError(why.c_str());
    look_up_remote(state, {.url = server->url,
                           .s3 = {.access_key = server->access_key,
                                  .secret_key = server->secret_key,
                                  .endpoint = "http://127.0.0.1:" + std::to_string(server->port)}});
}
BENCHMARK(Hit_S3Moto)->Unit(benchmark::kMicrosecond);
#endif

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
