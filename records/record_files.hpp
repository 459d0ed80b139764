// Files of a directory of records:
//
//     <directory>/<subject's first 16>/<num_tokens>-<digest's first 16>.json                what is known of a key,
//     <directory>/<subject's first 16>/<num_tokens>-<digest's first 16>.<32 digits>.json    and this: of publishers that cannot take turns
//
// Names serve to find files and say nothing more; a reader merges all that are of one key, in any order, for merging is commutative,
// associative and idempotent.
//
// Publishing has to be safe without locks: on a network file system flock may lie or hang, and of two nodes that each read a file, merge
// and rename over it the one that was first loses its times. So nothing is ever renamed over what others may be adding to:
//
//   1. A publisher reads all files of the key, merges them and what it has measured, and writes that as a file whose name is the SHA-256 of
//   its
//      contents (complete or not at all: a temporary, synced and renamed). Two files of one name are therefore the same file.
//   2. Then, and only if it read them whole, it removes the files that it has merged, except one of the name that it has just written, and
//   except the
//      file of step 3.
//   3. The file without digits is written in the place of one with, and over the one that is there, by a process that has read all and
//   holds a lock in the
//      directory (KeyLock::excludes_all), which is on a local file system. There locks work, and every process that writes this file holds
//      the same one: so it only grows. To whom the directory is remote never writes or removes it.
//
// No published time is ever lost. Of all files that ever held it, take the file of step 3 if it did: that one never loses anything.
// Otherwise take one whose contents are greatest in the order of merging. Who removed that had written one with all of its contents and
// another name before, whose contents are hence strictly greater: there is none, so it is there. The argument knows no time: it holds for
// any interleaving of any number of nodes, and for a node that sleeps between any two steps. A crash at any point leaves files that say the
// same twice at worst. What is left out on purpose is the exception: the oldest runs, where a file would not hold all (fitted), and what
// `flce tune --fresh` throws away.
//
// A reader lists the folder again after it has read all files, and starts again if one has vanished or come meanwhile. So what was
// published before it began it sees, unless others replace files during both of its listings, and again whenever it starts again (bounded:
// a folder that never rests is read as it was last). A node whose file system shows it an old listing sees an old state. Publishing from
// either loses nothing.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "records/record.hpp"

namespace flce {

/// Whose files count: everybody's, or only those that nobody but the user and root can have written.
enum class Writers { all, own };

struct RecordFile {
    std::filesystem::path path;
    Record record;
};

struct RecordFolder {
    std::vector<RecordFile> files;  ///< by name
    bool complete = true;  ///< nothing could not be listed or read; what is no record, or not to be trusted, is left out all the same
};

/// The records of a subject's folder; none where there is no such folder. `stem`: only those of this key, "" for all. What is left out is
/// said. Never throws for what a file system does.
[[nodiscard]] RecordFolder read_record_folder(const std::filesystem::path& folder, std::string_view stem, Writers writers);

/// What all of them know of `key`; std::nullopt: nothing. Files of another key under its name are said.
[[nodiscard]] std::optional<Record> merged_record(const RecordFolder& folder, const RecordKey& key);

/// Whether a record under `stem` may have a file of this name.
[[nodiscard]] bool is_file_of(const std::filesystem::path& file, std::string_view stem);

/// A record, a file or the library's, that cannot be read or does not belong where it lies.
void say_unused(const std::string& origin, const std::string& why);

/// The bytes of a regular file of sensible size. std::nullopt with a reason in `why` where it is not to be used, without one where there is
/// none; `unreadable`: it may be there and good.
[[nodiscard]] std::optional<std::string> read_record_text(const std::filesystem::path& path, Writers writers, std::string& why,
                                                          bool& unreadable);

}  // namespace flce
