#include "runtime/cache_options.hpp"

#include <memory>
#include <utility>

#include "cache/pack_store.hpp"
#include "cache/remote_store.hpp"
#include "cache/signature.hpp"

namespace flce {
namespace {

// Absolute, so that a process that changes its directory keeps its cache.
std::filesystem::path absolute_path(const std::filesystem::path& path) { return path.empty() ? path : std::filesystem::absolute(path); }

const std::vector<std::filesystem::path>& packs_of(const SessionOptions& options, const Environment& environment) {
    return options.cache_packs.empty() ? environment.cache_packs : options.cache_packs;
}

const std::string& remote_of(const SessionOptions& options, const Environment& environment) {
    return options.cache_remote.empty() ? environment.cache_remote : options.cache_remote;
}

}  // namespace

ArtifactCache::Options cache_options(const SessionOptions& options, const Environment& environment) {
    ArtifactCache::Options result;
    if (options.disk_cache && !environment.no_disk_cache) {
        result.directory = absolute_path(options.cache_dir.empty() ? environment.cache_dir : options.cache_dir);
    }
    result.strict = options.strict.value_or(environment.strict);
    result.creates = !result.strict;
    result.counts_on_machine = true;
    result.max_bytes = environment.cache_max_bytes;
    if (!environment.signing_key.empty()) result.signer = SigningKey::read(environment.signing_key);
    const TrustedKeys trusted = TrustedKeys::read(options.trusted_keys.empty() ? environment.trusted_keys : options.trusted_keys);
    std::vector<std::filesystem::path> packs;
    for (const auto& pack : packs_of(options, environment)) packs.push_back(absolute_path(pack));
    if (!packs.empty()) result.further.push_back(std::make_shared<PackStore>(std::move(packs), trusted));
    if (const std::string& url = remote_of(options, environment); !url.empty()) {
        result.further.push_back(std::make_shared<RemoteStore>(RemoteOptions{.url = url,
                                                                             .timeout = environment.cache_remote_timeout,
                                                                             .read_only = environment.cache_remote_read_only,
                                                                             .trusted = trusted,
                                                                             .signs = result.signer != nullptr,
                                                                             .authorities = environment.cache_remote_ca,
                                                                             .s3 = environment.s3}));
    }
    return result;
}

RecordPlaces record_places(const SessionOptions& options, const Environment& environment) {
    if (!options.use_records || environment.no_records) return {.shipped = false};
    RecordPlaces places;
    for (const auto& path : options.records.empty() ? environment.records : options.records) places.extra.push_back(absolute_path(path));
    places.directory = absolute_path(environment.records_dir);
    if (places.directory.empty()) {
        const auto cache = absolute_path(options.cache_dir.empty() ? environment.cache_dir : options.cache_dir);
        if (!cache.empty() && options.disk_cache && !environment.no_disk_cache) places.directory = cache / "records";
    }
    return places;
}

bool holds_kernels_of_others(const SessionOptions& options, const Environment& environment) {
    return !packs_of(options, environment).empty() || !remote_of(options, environment).empty();
}

}  // namespace flce
