// flce cache export, import and keygen: entries of the kernel cache, out and in.
#include <fmt/format.h>

#include <fstream>

#include "cache/byte_io.hpp"
#include "cache/pack_store.hpp"
#include "cli/cache.hpp"
#include "runtime/environment.hpp"

namespace flce::cli {

namespace fs = std::filesystem;

namespace {

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

/// Whether an entry says what was seen on this machine's GPU: no other machine shall believe it.
bool is_outcome(const Artifact& artifact) { return text_at(metadata_of(artifact), "kind") == "check"; }

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

}  // namespace

int export_cache(const CacheFlags& flags) {
    const bool packs = !flags.pack_file.empty();
    if (packs == !flags.target.empty()) throw UsageError("cache export: name either a folder or, with --pack, a pack's file");
    LocalCache local(flags.directory());
    PackContents contents;
    std::int64_t exported = 0;
    std::int64_t refused = 0;
    if (!packs) fs::create_directories(flags.target);
    for (const StoredFile& file : local.entries()) {
        std::string why;
        Lookup found = local.store().inspect(file.key, why);
        if (gone(found)) continue;
        if (!found.artifact) {
            ++refused;
            fmt::print(stderr, "flce: {}: {}\n", file.path.string(), why);
            continue;
        }
        if (packs && is_outcome(*found.artifact)) continue;
        ++exported;
        if (packs) {
            contents[file.key] = std::move(found.entry);
        } else {
            export_entry(flags.target, file.key, *found.artifact);
        }
    }
    if (packs) {
        const fs::path& key = environment().signing_key;
        write_pack(flags.pack_file, contents, key.empty() ? nullptr : SigningKey::read(key).get());
    }
    const fs::path& target = packs ? flags.pack_file : flags.target;
    if (flags.json) {
        print_json({{"exported", exported}, {"refused", refused}, {packs ? "pack" : "dir", target.string()}});
    } else {
        fmt::print("{} entries to {}{}\n", exported, target.string(), refused == 0 ? "" : fmt::format(", {} refused", refused));
    }
    return refused == 0 ? kDone : kFailedCheck;
}

int import_cache(const CacheFlags& flags) {
    LocalCache local(flags.directory());
    ImportCounts counts;
    for (const fs::path& source : flags.sources) {
        std::error_code error;
        if (fs::is_directory(source, error)) {
            LocalCache other(fs::absolute(source));
            for (const StoredFile& file : other.entries()) {
                std::string why;
                const Lookup found = other.store().inspect(file.key, why);
                if (!gone(found) && !(found.artifact && is_outcome(*found.artifact)))
                    import_one(local.store(), file.key, found.entry, why, counts);
            }
            continue;
        }
        const auto pack = PackFile::open(source, trusted_keys());
        for (const PackedEntry& packed : pack->index()) {
            std::string why;
            const Lookup found = pack->get(packed.key, why);
            if (found.artifact && is_outcome(*found.artifact)) continue;
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

int make_keys(const CacheFlags& flags) {
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

}  // namespace flce::cli
