// flce cache verify: are the entries sound, and, asked for it, does what they hold load.
#include <fmt/format.h>

#include <optional>

#include "cache/pack_store.hpp"
#include "cli/cache.hpp"
#include "runtime/payload_check.hpp"

namespace flce::cli {
namespace {

namespace fs = std::filesystem;

/// Entries that have been looked at, and their faults.
class Findings {
public:
    /// `loads`: payloads are loaded, or read where this machine cannot load them.
    explicit Findings(bool loads) {
        if (loads) payloads_.emplace();
    }

    void add(const std::string& place, std::string fault, const std::optional<Artifact>& artifact = std::nullopt) {
        ++checked_;
        if (fault.empty() && artifact && payloads_) {
            PayloadCheck::Result result = payloads_->check(*artifact);
            fault = std::move(result.fault);
            if (fault.empty()) ++(result.loaded ? loaded_ : read_);
        }
        if (!fault.empty()) bad_.push_back({{"entry", place}, {"why", fault}});
    }

    int report(bool json) const {
        if (json) {
            Json object{{"checked", checked_}, {"bad", bad_}};
            if (payloads_) object.update({{"loaded", loaded_}, {"read", read_}});
            print_json(object);
            return bad_.empty() ? kDone : kFailedCheck;
        }
        for (const Json& entry : bad_) {
            fmt::print("{}: {}\n", entry.at("entry").get<std::string>(), entry.at("why").get<std::string>());
        }
        fmt::print("{} checked, {} bad\n", checked_, bad_.size());
        if (payloads_) fmt::print("payloads: {} loaded, {} read only (for GPUs or CPUs that are not here)\n", loaded_, read_);
        return bad_.empty() ? kDone : kFailedCheck;
    }

private:
    std::int64_t checked_ = 0;
    std::int64_t loaded_ = 0;
    std::int64_t read_ = 0;
    Json bad_ = Json::array();
    std::optional<PayloadCheck> payloads_;
};

void verify_pack(const fs::path& path, Findings& findings) {
    std::unique_ptr<PackFile> pack;
    try {
        pack = PackFile::open(path, trusted_keys());
    } catch (const EnvironmentError& error) {
        return findings.add(path.string(), error.what());
    }
    for (const PackedEntry& entry : pack->index()) {
        std::string why;
        const Lookup found = pack->get(entry.key, why);
        findings.add(fmt::format("{}:{}", path.string(), entry.key.hex()), why, found.artifact);
    }
}

}  // namespace

int verify_cache(const CacheFlags& flags) {
    Findings findings(flags.load);
    if (flags.looks_at_directory()) {
        LocalCache local(flags.directory());
        for (const StoredFile& file : local.entries()) {
            std::string why;
            const Lookup found = local.store().inspect(file.key, why);
            if (!gone(found)) findings.add(file.path.string(), why, found.artifact);
        }
    }
    for (const fs::path& path : flags.packs_to_look_at()) verify_pack(path, findings);
    return findings.report(flags.json);
}

}  // namespace flce::cli
