#include "prewarm/pack.hpp"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <system_error>

#include "cache/artifact_format.hpp"
#include "cache/file_io.hpp"
#include "cache/pack_store.hpp"
#include "runtime/environment.hpp"
#include "runtime/json.hpp"
#include "runtime/text.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

fs::path entry_path(const fs::path& folder, const CacheKey& key) { return folder / (key.hex() + ".art"); }

/// The metadata as it is when `item` is the one that has the artifact made, by this version.
std::string described_by(const std::string& metadata, const PrewarmItem& item) {
    Json object = parse_json(metadata);
    if (!object.is_object()) return metadata;
    const Plan plan = parse_plan(item.plan);
    if (const auto spec = object.find("spec"); spec != object.end()) {
        *spec = spec->is_string() ? Json(item.spec.text()) : Json::parse(item.spec.json());
    }
    if (const auto made = object.find("plan"); made != object.end()) {
        *made = made->is_string() ? Json(plan.text()) : Json::parse(plan.json());
    }
    if (const auto by = object.find("created_by"); by != object.end()) *by = fmt::format("flce {}", version());
    return object.dump();
}

Artifact read_entry(const fs::path& folder, const CacheKey& key) {
    const std::string text = read_text_file(entry_path(folder, key));
    std::string why;
    auto artifact = decode_artifact(key, as_byte_span(text), why);
    if (!artifact) throw EnvironmentError(fmt::format("the entry {} of the pack is harmed: {}", key.hex(), why));
    return std::move(*artifact);
}

}  // namespace

void leave_entry(const fs::path& folder, const CacheKey& key, std::span<const std::byte> entry) {
    const fs::path path = entry_path(folder, key);
    std::error_code ignored;
    if (fs::exists(path, ignored)) return;
    const std::array pieces{entry};
    if (const int error = write_atomically(path, pieces, Durability::whenever)) {
        throw EnvironmentError(fmt::format("{} cannot be written: {}", path.string(), std::strerror(error)));
    }
}

std::size_t write_prewarm_pack(const fs::path& pack, const fs::path& folder, const std::vector<PrewarmItem>& items,
                               const std::vector<std::vector<std::string>>& used) {
    const fs::path& key_file = environment().signing_key;
    const auto signer = key_file.empty() ? nullptr : SigningKey::read(key_file);
    PackContents contents;
    for (std::size_t i = 0; i < items.size(); ++i) {
        for (const std::string& hex : used[i]) {
            const auto key = CacheKey::parse(hex);
            if (!key || contents.contains(*key)) continue;
            Artifact artifact = read_entry(folder, *key);
            artifact.metadata = described_by(artifact.metadata, items[i]);
            contents[*key] = encode_artifact(*key, artifact, signer.get());
        }
    }
    write_pack(pack, contents, signer.get());
    return contents.size();
}

}  // namespace flce
