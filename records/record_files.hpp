// Files of a directory of records:
//
//     <directory>/<subject's first 16>/<num_tokens>-<digest's first 16>.json                all that is known of a key,
//     <directory>/<subject's first 16>/<num_tokens>-<digest's first 16>.<32 digits>.json    and more, by publishers that cannot take turns
//
// Names serve to find files and say nothing more; a reader merges all files of one key, in any order, for merging is commutative,
// associative and idempotent.
//
// Publishing has to be safe without locks: on a network file system flock may lie or hang, and where two nodes each read a file, merge and
// rename over it, the first node's times are lost. So nothing is ever renamed over a file that others may be adding to:
//
//   1. A publisher reads all files of the key, merges them with its own measurements, and writes the result as a file whose name is the
//      SHA-256 of its contents (complete or not at all: a temporary, synced and renamed). Two files of one name are therefore equal.
//   2. Then, and only if it read them whole, the publisher removes the files that it has merged, except one of the name that it has just
//      written, and except the file of step 3.
//   3. The file without digits is written in the place of one with digits, and over the file that is there, by a process that has read all
//      files and holds a lock in the directory (KeyLock::excludes_all), which is on a local file system. Locks work there, and every
//      process that writes this file holds the same lock: so the file only grows. Processes to which the directory is remote never write or
//      remove it.
//
// No published time is ever lost. If the file of step 3 ever held the time, it still does: that file never loses anything. Otherwise take,
// among all files that ever held the time, one whose contents are greatest in the order of merging. A process that removed it would have
// written one with all of its contents and another name before, whose contents would be strictly greater. There is no such file, so the
// greatest one is still there. The argument needs no clock: it holds for any interleaving of any number of nodes, and for a node that
// sleeps between any two steps. A crash at any point leaves files that hold some times twice at worst. Times that are left out on purpose
// are the exception: those of the oldest runs, where a file would not hold all (fitted), and those that `flce tune --fresh` throws away.
//
// A reader lists the folder again after it has read all files, and starts again if one has vanished or come meanwhile. So a reader sees
// everything that was published before it began, unless others replace files during both of its listings, and again whenever it starts
// again (bounded: a folder that never rests is read as it was last). A node whose file system shows it an old listing sees an old state.
// Publishing from either state loses nothing.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "records/record.hpp"

namespace flce {

/// Files that count: everybody's, or only those that nobody but the user and root can have written.
enum class Writers { all, own };

struct RecordFile {
    std::filesystem::path path;
    Record record;
};

struct RecordFolder {
    std::vector<RecordFile> files;  ///< files by name
    bool complete = true;  ///< whether everything could be listed and read; files that are not records, or not to be trusted, are left out
                           ///< all the same
};

/// The records of a subject's folder; none where there is no such folder. `stem`: only records of this key, "" for all. Files that are left
/// out are reported. Never throws for faults of a file system.
[[nodiscard]] RecordFolder read_record_folder(const std::filesystem::path& folder, std::string_view stem, Writers writers);

/// Merged record of `key` in all files; std::nullopt: none. Files of another key under its name are reported.
[[nodiscard]] std::optional<Record> merged_record(const RecordFolder& folder, const RecordKey& key);

/// Whether a record under `stem` may have a file of this name.
[[nodiscard]] bool is_file_of(const std::filesystem::path& file, std::string_view stem);

/// Reports a record, a file or the library's, that cannot be read or does not belong where it lies.
void say_unused(const std::string& origin, const std::string& why);

/// The bytes of a regular file of sensible size. std::nullopt with a reason in `why` where it is not to be used, without one where there is
/// none; `unreadable`: it may be there and good.
[[nodiscard]] std::optional<std::string> read_record_text(const std::filesystem::path& path, Writers writers, std::string& why,
                                                          bool& unreadable);

}  // namespace flce
