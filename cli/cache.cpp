// flce cache: contents of the kernel cache, its counts, and ways to make it smaller; the command's other parts are declared in cache.hpp.
#include "cli/cache.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <ctime>

#include "cache/pack_store.hpp"
#include "cache/statistics_file.hpp"
#include "runtime/environment.hpp"

namespace flce::cli {

namespace fs = std::filesystem;

fs::path CacheFlags::directory() const {
    const fs::path& chosen = cache_dir.empty() ? environment().cache_dir : cache_dir;
    if (chosen.empty()) throw UsageError("there is no cache directory: set FLCE_CACHE_DIR or HOME, or name it with --cache-dir");
    return fs::absolute(chosen);
}

const std::vector<fs::path>& CacheFlags::packs_to_look_at() const { return packs.empty() ? environment().cache_packs : packs; }

LocalCache::LocalCache(fs::path directory) : directory_(std::move(directory)), store_(directory_) {
    std::error_code error;
    const fs::file_status status = fs::symlink_status(directory_, error);
    if (status.type() == fs::file_type::none)
        throw EnvironmentError(fmt::format("{} cannot be looked at: {}", directory_.string(), error.message()));
    exists_ = fs::exists(status);
    if (exists_ && !store_.usable(false)) throw EnvironmentError(fmt::format("{} is not used as a cache", directory_.string()));
}

std::vector<StoredFile> LocalCache::entries() const {
    std::string fault;
    auto found = exists_ ? list_entries(directory_, fault) : std::vector<StoredFile>();
    if (!fault.empty()) throw EnvironmentError(fault);
    return found;
}

bool gone(const Lookup& found) { return !found.artifact && !found.fault; }

TrustedKeys trusted_keys() { return TrustedKeys::read(environment().trusted_keys); }

Json metadata_of(const Artifact& artifact) { return parse_json(artifact.metadata); }

std::string text_at(const Json& metadata, const char* key) {
    const auto found = metadata.is_object() ? metadata.find(key) : metadata.end();
    if (!metadata.is_object() || found == metadata.end()) return "";
    return found->is_string() ? found->get<std::string>() : found->dump();
}

namespace {

/// "cubin sm_90a", "object x86-64-v3", "compiler sm_90a".
std::string kind_of(const Json& metadata) {
    const std::string arch = text_at(metadata, "arch");
    return fmt::format("{} {}", text_at(metadata, "kind"), arch.empty() ? text_at(metadata, "cpu") : arch);
}

// The spec as JSON, in metadata of kernels, back to the text that people write.
std::string spec_of(const Json& metadata) {
    std::string spec = text_at(metadata, "spec");
    if (!spec.starts_with('{')) return spec;
    try {
        return parse_spec(spec).text();
    } catch (const Error&) {
        return spec;
    }
}

struct Listed {
    CacheKey key;
    std::uint64_t bytes = 0;
    std::int64_t used = 0;
    fs::path pack;  ///< empty: of the local directory
    Json metadata = nullptr;
    std::string fault;

    Listed(const CacheKey& of, std::uint64_t size) : key(of), bytes(size) {}
    void describe(const Lookup& found) {
        if (found.artifact) metadata = metadata_of(*found.artifact);
    }
};

/// A pack that is looked at.
struct ListedPack {
    fs::path path;
    std::string fault;  ///< why it is not used; empty: it is
};

struct Listing {
    std::vector<Listed> rows;
    std::vector<ListedPack> packs;

    void add_directory(const CacheFlags& flags) {
        LocalCache local(flags.directory());
        for (const StoredFile& file : local.entries()) {
            Listed row(file.key, file.bytes);
            row.used = file.used;
            const Lookup found = local.store().inspect(file.key, row.fault);
            if (gone(found)) continue;
            row.describe(found);
            rows.push_back(std::move(row));
        }
    }

    void add_pack(const fs::path& path) {
        const auto pack = PackFile::open(path, trusted_keys());
        for (const PackedEntry& entry : pack->index()) {
            Listed row(entry.key, entry.bytes);
            row.pack = path;
            row.describe(pack->get(entry.key, row.fault));
            rows.push_back(std::move(row));
        }
    }

    explicit Listing(const CacheFlags& flags) {
        if (flags.looks_at_directory()) add_directory(flags);
        for (const fs::path& path : flags.packs_to_look_at()) {
            ListedPack& pack = packs.emplace_back(ListedPack{path, ""});
            try {
                add_pack(path);
            } catch (const EnvironmentError& error) {
                if (!flags.packs.empty()) throw;  // a pack that is asked for by name must be readable
                pack.fault = error.what();        // a session does without it
            }
        }
    }
};

void print_listing_json(const CacheFlags& flags, const Listing& listing, std::uint64_t bytes) {
    const auto or_null = [](const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); };
    Json entries = Json::array();
    for (const Listed& row : listing.rows) {
        entries.push_back({{"key", row.key.hex()},
                           {"bytes", row.bytes},
                           {"last_used", row.used == 0 ? Json(nullptr) : Json(row.used)},
                           {"pack", or_null(row.pack.string())},
                           {"fault", or_null(row.fault)},
                           {"metadata", row.metadata}});
    }
    Json packs = Json::array();
    for (const ListedPack& pack : listing.packs) packs.push_back({{"path", pack.path.string()}, {"fault", or_null(pack.fault)}});
    print_json({{"cache_dir", flags.looks_at_directory() ? Json(flags.directory().string()) : Json(nullptr)},
                {"bytes", bytes},
                {"entries", entries},
                {"packs", packs}});
}

int ls(const CacheFlags& flags) {
    const Listing listing(flags);
    std::uint64_t bytes = 0;
    for (const Listed& row : listing.rows) bytes += row.bytes;
    if (flags.json) {
        print_listing_json(flags, listing, bytes);
        return kDone;
    }
    for (const Listed& row : listing.rows) {
        const std::string used =
            row.used == 0 ? row.pack.string() : fmt::format("{:%Y-%m-%d %H:%M}", fmt::localtime(static_cast<std::time_t>(row.used)));
        fmt::print("{:.16}  {:>10}  {}  {:<20} {}\n", row.key.hex(), human_bytes(static_cast<double>(row.bytes)), used,
                   row.fault.empty() ? kind_of(row.metadata) : "HARMED", row.fault.empty() ? spec_of(row.metadata) : row.fault);
    }
    const auto packed = std::ranges::count_if(listing.rows, [](const Listed& row) { return !row.pack.empty(); });
    fmt::print("{} entries, {}{}\n", listing.rows.size(), human_bytes(static_cast<double>(bytes)),
               packed == 0 ? "" : fmt::format("; {} of them in packs", packed));
    for (const ListedPack& pack : listing.packs) {
        if (!pack.fault.empty()) fmt::print("not used: {}\n", pack.fault);
    }
    return kDone;
}

Json counted(const CacheStatistics& sums) {
    Json tiers = Json::object();
    for (const TierStatistics& tier : sums.tiers) {
        tiers[tier.name] = {{"hits", tier.hits}, {"misses", tier.misses}, {"faults", tier.faults}, {"stored", tier.stored}};
    }
    return {{"compiled", sums.created}, {"tiers", tiers}};
}

void print_counted(const CacheStatistics& sums) {
    fmt::print("{} compiled\n\n{:<8} {:>10} {:>10} {:>10} {:>10}\n", sums.created, "tier", "hits", "misses", "faults", "stored");
    for (const TierStatistics& tier : sums.tiers) {
        fmt::print("{:<8} {:>10} {:>10} {:>10} {:>10}\n", tier.name, tier.hits, tier.misses, tier.faults, tier.stored);
    }
}

bool counts_anything(const CacheStatistics& sums) {
    return sums.created != 0 || std::ranges::any_of(sums.tiers, [](const TierStatistics& tier) {
               return tier.hits != 0 || tier.misses != 0 || tier.faults != 0 || tier.stored != 0;
           });
}

/// Contents and counts of the directory; a directory that is refused has neither, but a reason.
struct DirectoryStatistics {
    fs::path directory;
    std::string refusal;
    std::size_t entries = 0;
    std::uint64_t bytes = 0;
    CacheStatistics sums;
};

DirectoryStatistics directory_statistics(const CacheFlags& flags) {
    (void)environment();                                     // a variable that is not understood is another error
    DirectoryStatistics found{.sums = read_statistics({})};  // zeros
    try {
        found.directory = flags.directory();
        const LocalCache local(found.directory);
        const auto entries = local.entries();
        found.entries = entries.size();
        for (const StoredFile& file : entries) found.bytes += file.bytes;
        found.sums = read_statistics(found.directory);
    } catch (const std::exception& error) {
        // Processes that meet this directory count elsewhere, so the answer is about them.
        found.refusal = found.directory.empty() ? "" : DiskStore(found.directory).out_of_use();
        if (found.refusal.empty()) found.refusal = error.what();
    }
    return found;
}

int stats(const CacheFlags& flags) {
    const DirectoryStatistics local = directory_statistics(flags);
    const MachineStatistics elsewhere = read_machine_statistics();
    if (flags.json) {
        Json object{{"cache_dir", local.directory.empty() ? Json(nullptr) : Json(local.directory.string())},
                    {"refusal", local.refusal.empty() ? Json(nullptr) : Json(local.refusal)},
                    {"entries", local.entries},
                    {"bytes", local.bytes},
                    {"max_bytes", environment().cache_max_bytes}};
        object.update(counted(local.sums));
        object["elsewhere"] = counted(elsewhere.sums);
        object["elsewhere"]["dir"] = elsewhere.folder.empty() ? Json(nullptr) : Json(elsewhere.folder.string());
        object["elsewhere"]["refusal"] = elsewhere.why.empty() ? Json(nullptr) : Json(elsewhere.why);
        print_json(object);
        return kDone;
    }
    if (local.refusal.empty()) {
        fmt::print("{}: {} entries, {}\n", local.directory.string(), local.entries, human_bytes(static_cast<double>(local.bytes)));
        print_counted(local.sums);
    } else {
        fmt::print("{}\n", local.refusal);
    }
    if (counts_anything(elsewhere.sums)) {
        fmt::print(
            "\n{}: counted on this machine by processes that could not count in a cache directory (none, refused, not writable, on NFS)\n",
            elsewhere.folder.string());
        print_counted(elsewhere.sums);
    } else if (!elsewhere.why.empty()) {
        fmt::print("\nprocesses that cannot count in the cache directory are not counted: {}\n", elsewhere.why);
    }
    return kDone;
}

int gc(const CacheFlags& flags) {
    const std::uint64_t limit =
        flags.max_bytes.empty() ? environment().cache_max_bytes : static_cast<std::uint64_t>(parse_bytes("--max-bytes", flags.max_bytes));
    const LocalCache local(flags.directory());
    CleanupResult result;
    if (local.exists()) result = clean_up(local.directory(), limit == 0 && flags.max_bytes.empty() ? ~0ULL : limit);
    if (result.busy) throw EnvironmentError(fmt::format("another process is cleaning {} up", local.directory().string()));
    if (flags.json) {
        print_json({{"removed_entries", result.removed_entries},
                    {"removed_bytes", result.removed_bytes},
                    {"kept_entries", result.kept_entries},
                    {"kept_bytes", result.kept_bytes},
                    {"fault", result.fault.empty() ? Json(nullptr) : Json(result.fault)}});
    } else {
        fmt::print("removed {} entries, {}; {} entries, {} stay\n", result.removed_entries,
                   human_bytes(static_cast<double>(result.removed_bytes)), result.kept_entries,
                   human_bytes(static_cast<double>(result.kept_bytes)));
    }
    if (!result.fault.empty()) throw EnvironmentError(result.fault + "; what could not be listed or removed stays");
    return kDone;
}

using Run = int (*)(const CacheFlags&);

CLI::App* add_part(CLI::App& cache, Action& action, const std::shared_ptr<CacheFlags>& flags, const char* name, const char* what, Run run) {
    CLI::App* part = cache.add_subcommand(name, what);
    part->add_flag("--json", flags->json, "one JSON object on stdout");
    part->callback([flags, run, &action] { action = [flags, run] { return run(*flags); }; });
    return part;
}

}  // namespace

void add_cache(CLI::App& app, Action& action) {
    auto flags = std::make_shared<CacheFlags>();
    CLI::App* cache = app.add_subcommand("cache", "What is in the kernel cache; verify, shrink, export and import it");
    cache->require_subcommand(1);
    cache->footer(
        "\nExamples:\n  flce cache ls\n  flce cache stats --json\n  flce cache verify --load\n  flce cache gc --max-bytes 500M\n  flce "
        "cache gc --max-bytes 0          "
        "     empty it\n"
        "  flce cache export kernels/                each payload beside its metadata, for a disassembler\n"
        "  flce cache export --pack kernels.flcepack everything in one file, to ship (FLCE_CACHE_PACKS)\n"
        "  flce cache import kernels.flcepack");
    const auto with_directory = [&](CLI::App* part) {
        part->add_option("--cache-dir", flags->cache_dir, "kernel cache (default: FLCE_CACHE_DIR, else the user's cache directory)");
        return part;
    };
    with_directory(add_part(*cache, action, flags, "ls", "every entry: size, last use, what it is", &ls))
        ->add_option("--pack", flags->packs, "this pack alone (default: the cache directory and FLCE_CACHE_PACKS)");
    with_directory(add_part(*cache, action, flags, "stats", "hits, misses and faults of each tier, over all processes", &stats));
    CLI::App* check =
        with_directory(add_part(*cache, action, flags, "verify", "checks every entry; exit code 1 if one is harmed", &verify_cache));
    check->add_option("--pack", flags->packs, "this pack alone (default: the cache directory and FLCE_CACHE_PACKS)");
    check->add_flag("--load", flags->load, "loads what the entries hold, too; what is for a GPU or CPU that is not here is read only");
    with_directory(add_part(*cache, action, flags, "gc", "removes the entries used longest ago", &gc))
        ->add_option("--max-bytes", flags->max_bytes, "how much may stay, e.g. 500M (default: FLCE_CACHE_MAX_BYTES)");
    CLI::App* out =
        with_directory(add_part(*cache, action, flags, "export", "writes every payload beside its metadata, or one pack", &export_cache));
    out->add_option("folder", flags->target, "where payloads and metadata go");
    out->add_option("--pack", flags->pack_file, "this pack instead, signed with FLCE_SIGNING_KEY if that is set");
    with_directory(add_part(*cache, action, flags, "import", "takes the entries of packs or of other cache directories", &import_cache))
        ->add_option("source", flags->sources, "packs, cache directories")
        ->required();
    add_part(*cache, action, flags, "keygen", "makes a key pair to sign packs and remote entries with", &make_keys)
        ->add_option("name", flags->target, "NAME.pem is the private key, NAME.pub.pem the public one")
        ->required();
}

}  // namespace flce::cli
