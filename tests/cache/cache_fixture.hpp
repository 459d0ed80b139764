// A cache directory, its contents, and messages about it.
#pragma once

#include <filesystem>
#include <string>

#include "cache/disk_store.hpp"
#include "tests/cache/cache_test_support.hpp"
#include "tests/cache/log_capture.hpp"

namespace flce::test {

class ArtifactCacheTest : public testing::Test {
protected:
    [[nodiscard]] int warnings() const { return log_.warnings(); }
    [[nodiscard]] std::filesystem::path entry_path(const CacheKey& key) const { return DiskStore(directory_.path()).path_of(key); }

    /// Payload that a process that starts now gets for `key`; counts whether it had to create it.
    std::string fresh_get(const CacheKey& key, int& created) {
        ArtifactCache cache({.directory = directory_.path()});
        const auto artifact = cache.get_or_create(key, [&] { return ++created, artifact_of("made again"); });
        return payload_text(*artifact);
    }

    TemporaryDirectory directory_;
    test::LogCapture log_;
};

}  // namespace flce::test
