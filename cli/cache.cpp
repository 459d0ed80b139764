// flce cache: what is in the kernel cache, what it did, and how it gets smaller, out and in.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <ctime>
#include <fstream>

#include "cache/byte_io.hpp"
#include "cache/cleanup.hpp"
#include "cache/disk_store.hpp"
#include "cache/file_io.hpp"
#include "cache/pack_store.hpp"
#include "cache/statistics_file.hpp"
#include "cli/command.hpp"
#include "runtime/environment.hpp"

namespace flce::cli {
namespace {

namespace fs = std::filesystem;

struct CacheFlags {
    fs::path cache_dir;
    std::vector<fs::path> packs;
    std::vector<fs::path> sources;
    fs::path target;
    std::string max_bytes;
    bool pack = false;
    bool json = false;

    [[nodiscard]] fs::path directory() const {
        const fs::path& chosen = cache_dir.empty() ? environment().cache_dir : cache_dir;
        if (chosen.empty()) throw UsageError("there is no cache directory: set FLCE_CACHE_DIR or HOME, or name it with --cache-dir");
        return fs::absolute(chosen);
    }
};

/// The local directory, opened as a session would; missing is empty. Throws EnvironmentError if a session would refuse it.
class LocalCache {
public:
    explicit LocalCache(fs::path directory) : directory_(std::move(directory)), store_(directory_) {
        std::error_code error;
        const fs::file_status status = fs::symlink_status(directory_, error);
        if (status.type() == fs::file_type::none)
            throw EnvironmentError(fmt::format("{} cannot be looked at: {}", directory_.string(), error.message()));
        exists_ = fs::exists(status);
        if (exists_ && !store_.usable(false)) throw EnvironmentError(fmt::format("{} is not used as a cache", directory_.string()));
    }
    /// Throws where it cannot tell whether these are all.
    [[nodiscard]] std::vector<StoredFile> entries() const {
        std::string fault;
        auto found = exists_ ? list_entries(directory_, fault) : std::vector<StoredFile>();
        if (!fault.empty()) throw EnvironmentError(fault);
        return found;
    }
    [[nodiscard]] bool exists() const { return exists_; }
    [[nodiscard]] const fs::path& directory() const { return directory_; }
    [[nodiscard]] DiskStore& store() { return store_; }

private:
    fs::path directory_;
    DiskStore store_;
    bool exists_ = false;
};

/// Another process, cleaning up perhaps, has removed the entry since it was listed.
bool gone(const Lookup& found) { return !found.artifact && !found.fault; }

TrustedKeys trusted_keys() { return TrustedKeys::read(environment().trusted_keys); }

Json metadata_of(const Artifact& artifact) { return parse_json(artifact.metadata); }

std::string text_at(const Json& metadata, const char* key) {
    const auto found = metadata.is_object() ? metadata.find(key) : metadata.end();
    if (!metadata.is_object() || found == metadata.end()) return "";
    return found->is_string() ? found->get<std::string>() : found->dump();
}

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
    std::string pack;
    Json metadata;
    std::string fault;
};

std::vector<Listed> list(const CacheFlags& flags) {
    std::vector<Listed> listed;
    if (flags.packs.empty()) {
        LocalCache local(flags.directory());
        for (const StoredFile& file : local.entries()) {
            Listed row{file.key, file.bytes, file.used, "", nullptr, ""};
            const Lookup found = local.store().inspect(file.key, row.fault);
            if (gone(found)) continue;
            if (found.artifact) row.metadata = metadata_of(*found.artifact);
            listed.push_back(std::move(row));
        }
    }
    for (const fs::path& path : flags.packs) {
        const auto pack = PackFile::open(path, trusted_keys());
        for (const PackedEntry& entry : pack->index()) {
            Listed& row = listed.emplace_back(Listed{entry.key, entry.bytes, 0, path.string(), nullptr, ""});
            if (const Lookup found = pack->get(entry.key, row.fault); found.artifact) row.metadata = metadata_of(*found.artifact);
        }
    }
    return listed;
}

int ls(const CacheFlags& flags) {
    const std::vector<Listed> rows = list(flags);
    std::uint64_t bytes = 0;
    for (const Listed& row : rows) bytes += row.bytes;
    if (flags.json) {
        Json entries = Json::array();
        for (const Listed& row : rows) {
            entries.push_back({{"key", row.key.hex()},
                               {"bytes", row.bytes},
                               {"last_used", row.used == 0 ? Json(nullptr) : Json(row.used)},
                               {"pack", row.pack.empty() ? Json(nullptr) : Json(row.pack)},
                               {"fault", row.fault.empty() ? Json(nullptr) : Json(row.fault)},
                               {"metadata", row.metadata}});
        }
        print_json({{"cache_dir", flags.directory().string()}, {"bytes", bytes}, {"entries", entries}});
        return kDone;
    }
    for (const Listed& row : rows) {
        const std::string used =
            row.used == 0 ? row.pack : fmt::format("{:%Y-%m-%d %H:%M}", fmt::localtime(static_cast<std::time_t>(row.used)));
        fmt::print("{:.16}  {:>10}  {}  {:<20} {}\n", row.key.hex(), human_bytes(static_cast<double>(row.bytes)), used,
                   row.fault.empty() ? kind_of(row.metadata) : "HARMED", row.fault.empty() ? spec_of(row.metadata) : row.fault);
    }
    fmt::print("{} entries, {}\n", rows.size(), human_bytes(static_cast<double>(bytes)));
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

/// What the directory holds and counted; one that is refused nothing, and why.
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
        // Processes that meet it count elsewhere: that is what is asked for then.
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

int verify(const CacheFlags& flags) {
    std::int64_t checked = 0;
    Json bad = Json::array();
    const auto check = [&](const std::string& place, const std::string& fault) {
        ++checked;
        if (!fault.empty()) bad.push_back({{"entry", place}, {"why", fault}});
    };
    LocalCache local(flags.directory());
    for (const StoredFile& file : local.entries()) {
        std::string why;
        if (!gone(local.store().inspect(file.key, why))) check(file.path.string(), why);
    }
    for (const fs::path& path : flags.packs.empty() ? environment().cache_packs : flags.packs) {
        try {
            const auto pack = PackFile::open(path, trusted_keys());
            for (const PackedEntry& entry : pack->index()) {
                std::string why;
                (void)pack->get(entry.key, why);
                check(fmt::format("{}:{}", path.string(), entry.key.hex()), why);
            }
        } catch (const EnvironmentError& error) {
            check(path.string(), error.what());
        }
    }
    if (flags.json) {
        print_json({{"checked", checked}, {"bad", bad}});
    } else {
        for (const Json& entry : bad) {
            fmt::print("{}: {}\n", entry.at("entry").get<std::string>(), entry.at("why").get<std::string>());
        }
        fmt::print("{} checked, {} bad\n", checked, bad.size());
    }
    return bad.empty() ? kDone : kFailedCheck;
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

void write_file(const fs::path& path, std::span<const std::byte> bytes) {
    std::ofstream stream(path, std::ios::binary | std::ios::trunc);
    stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    if (!stream.flush()) throw EnvironmentError(fmt::format("{} cannot be written", path.string()));
}

void export_entry(const fs::path& folder, const CacheKey& key, const Artifact& artifact) {
    const Json metadata = metadata_of(artifact);
    const std::string kind = text_at(metadata, "kind");
    const char* const suffix = kind == "cubin" ? "cubin" : kind == "object" ? "o" : "bin";
    write_file(folder / fmt::format("{}.{}", key.hex(), suffix), artifact.payload);
    const std::string text = metadata.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
    write_file(folder / fmt::format("{}.json", key.hex()), as_byte_span(text));
}

int export_all(const CacheFlags& flags) {
    LocalCache local(flags.directory());
    PackContents contents;
    std::int64_t exported = 0;
    std::int64_t refused = 0;
    if (!flags.pack) fs::create_directories(flags.target);
    for (const StoredFile& file : local.entries()) {
        std::string why;
        Lookup found = local.store().inspect(file.key, why);
        if (gone(found)) continue;
        if (!found.artifact) {
            ++refused;
            fmt::print(stderr, "flce: {}: {}\n", file.path.string(), why);
            continue;
        }
        ++exported;
        if (flags.pack) {
            contents[file.key] = std::move(found.entry);
        } else {
            export_entry(flags.target, file.key, *found.artifact);
        }
    }
    if (flags.pack) {
        const fs::path& key = environment().signing_key;
        write_pack(flags.target, contents, key.empty() ? nullptr : SigningKey::read(key).get());
    }
    if (flags.json) {
        print_json({{"exported", exported}, {"refused", refused}, {flags.pack ? "pack" : "dir", flags.target.string()}});
    } else {
        fmt::print("{} entries to {}{}\n", exported, flags.target.string(), refused == 0 ? "" : fmt::format(", {} refused", refused));
    }
    return refused == 0 ? kDone : kFailedCheck;
}

struct ImportCounts {
    std::int64_t imported = 0;
    std::int64_t present = 0;
    std::int64_t refused = 0;
};

void import_one(DiskStore& store, const CacheKey& key, std::span<const std::byte> entry, const std::string& fault, ImportCounts& counts) {
    if (!fault.empty()) {
        ++counts.refused;
        fmt::print(stderr, "flce: {}: {}\n", key.hex(), fault);
    } else if (store.contains(key)) {
        ++counts.present;
    } else if (store.put(key, entry, Durability::now) == Kept::yes) {
        ++counts.imported;
    } else {
        throw EnvironmentError("the cache directory cannot be written");
    }
}

int import_all(const CacheFlags& flags) {
    LocalCache local(flags.directory());
    ImportCounts counts;
    for (const fs::path& source : flags.sources) {
        std::error_code error;
        if (fs::is_directory(source, error)) {
            LocalCache other(fs::absolute(source));
            for (const StoredFile& file : other.entries()) {
                std::string why;
                const Lookup found = other.store().inspect(file.key, why);
                if (!gone(found)) import_one(local.store(), file.key, found.entry, why, counts);
            }
            continue;
        }
        const auto pack = PackFile::open(source, trusted_keys());
        for (const PackedEntry& packed : pack->index()) {
            std::string why;
            const Lookup found = pack->get(packed.key, why);
            import_one(local.store(), packed.key, found.entry, why, counts);
        }
    }
    if (flags.json) {
        print_json({{"imported", counts.imported}, {"present", counts.present}, {"refused", counts.refused}});
    } else {
        fmt::print("{} imported, {} were there, {} refused\n", counts.imported, counts.present, counts.refused);
    }
    return counts.refused == 0 ? kDone : kFailedCheck;
}

int keygen(const CacheFlags& flags) {
    const fs::path private_key = flags.target.string() + ".pem";
    const fs::path public_key = flags.target.string() + ".pub.pem";
    write_key_pair(private_key, public_key);
    if (flags.json) {
        print_json({{"private_key", private_key.string()}, {"public_key", public_key.string()}});
    } else {
        fmt::print("FLCE_SIGNING_KEY={}    where kernels are compiled; keep it secret\nFLCE_TRUSTED_KEYS={}    where they are used\n",
                   private_key.string(), public_key.string());
    }
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
        "\nExamples:\n  flce cache ls\n  flce cache stats --json\n  flce cache gc --max-bytes 500M\n  flce cache gc --max-bytes 0          "
        "     empty it\n"
        "  flce cache export kernels/                each payload beside its metadata, for a disassembler\n"
        "  flce cache export --pack kernels.flcepack everything in one file, to ship (FLCE_CACHE_PACKS)\n"
        "  flce cache import kernels.flcepack");
    const auto with_directory = [&](CLI::App* part) {
        part->add_option("--cache-dir", flags->cache_dir, "kernel cache (default: FLCE_CACHE_DIR, else the user's cache directory)");
        return part;
    };
    with_directory(add_part(*cache, action, flags, "ls", "every entry: size, last use, what it is", &ls))
        ->add_option("--pack", flags->packs, "the entries of this pack instead");
    with_directory(add_part(*cache, action, flags, "stats", "hits, misses and faults of each tier, over all processes", &stats));
    with_directory(add_part(*cache, action, flags, "verify", "checks every entry, and packs; exit code 1 if one is harmed", &verify))
        ->add_option("--pack", flags->packs, "packs to check (default: FLCE_CACHE_PACKS)");
    with_directory(add_part(*cache, action, flags, "gc", "removes the entries used longest ago", &gc))
        ->add_option("--max-bytes", flags->max_bytes, "how much may stay, e.g. 500M (default: FLCE_CACHE_MAX_BYTES)");
    CLI::App* out =
        with_directory(add_part(*cache, action, flags, "export", "writes every payload beside its metadata, or one pack", &export_all));
    out->add_option("target", flags->target, "folder, or the pack's file")->required();
    out->add_flag("--pack", flags->pack, "one pack, signed with FLCE_SIGNING_KEY if that is set");
    with_directory(add_part(*cache, action, flags, "import", "takes the entries of packs or of other cache directories", &import_all))
        ->add_option("source", flags->sources, "packs, cache directories")
        ->required();
    add_part(*cache, action, flags, "keygen", "makes a key pair to sign packs and remote entries with", &keygen)
        ->add_option("name", flags->target, "NAME.pem is the private key, NAME.pub.pem the public one")
        ->required();
}

}  // namespace flce::cli
