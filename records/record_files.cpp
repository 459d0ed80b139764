#include "records/record_files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "cache/file_descriptor.hpp"
#include "cache/file_io.hpp"
#include "cache/log.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostFilesOfASubject = 512;
constexpr int kMostReadings = 5;

struct Listing {
    std::vector<fs::path> files;
    std::string fault;  // why these are not all
};

Listing list_folder(const fs::path& folder, std::string_view stem) {
    Listing listing;
    std::error_code error;
    for (fs::directory_iterator it(folder, error); !error && it != fs::directory_iterator(); it.increment(error)) {
        const fs::path& file = it->path();
        const bool wanted =
            stem.empty() ? file.extension() == ".json" && !file.filename().native().starts_with('.') : is_file_of(file, stem);
        if (wanted) listing.files.push_back(file);
    }
    if (error && error.value() != ENOENT && error.value() != ENOTDIR) listing.fault = fmt::format("cannot be listed: {}", error.message());
    std::ranges::sort(listing.files);
    if (listing.files.size() > kMostFilesOfASubject) {
        listing.fault = fmt::format("{} files; the first {} are read", listing.files.size(), kMostFilesOfASubject);
        listing.files.resize(kMostFilesOfASubject);
    }
    return listing;
}

// Files with their faults.
using Complaints = std::vector<std::pair<fs::path, std::string>>;

RecordFolder read_listed(const Listing& listing, Writers writers, Complaints& complaints) {
    RecordFolder folder{.complete = listing.fault.empty()};
    for (const fs::path& file : listing.files) {
        std::string why;
        bool unreadable = false;
        const auto text = read_record_text(file, writers, why, unreadable);
        auto record = text ? parse_record(*text, why) : std::nullopt;
        if (record) {
            folder.files.push_back({file, std::move(*record)});
        } else if (!why.empty()) {
            complaints.emplace_back(file, why);
        }
        // The file is gone: somebody has merged it into another.
        folder.complete = folder.complete && !unreadable && (record || !why.empty());
    }
    return folder;
}

}  // namespace

void say_unused(const std::string& origin, const std::string& why) { logger().warn("tuning record {} is not used: {}", origin, why); }

std::optional<std::string> read_record_text(const fs::path& path, Writers writers, std::string& why, bool& unreadable) {
    why.clear();
    unreadable = false;
    const auto cannot = [&](int error) {
        unreadable = error != ENOENT;
        if (unreadable) why = std::strerror(error);
        return std::nullopt;
    };
    const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status{};
    if (!file || ::fstat(file.get(), &status) != 0) return cannot(errno);
    if (!S_ISREG(status.st_mode)) {
        why = "not a regular file";
    } else if (static_cast<std::uint64_t>(status.st_size) > kMaxRecordBytes) {
        why = fmt::format("{} bytes long; at most {} are read", status.st_size, kMaxRecordBytes);
    } else if (writers == Writers::own) {
        why = ownership_fault(status, Owner::user_or_root);
    }
    if (!why.empty()) return std::nullopt;
    std::string text(static_cast<std::size_t>(status.st_size), '\0');
    if (const int error = read_at(file.get(), 0, std::as_writable_bytes(std::span(text)))) return cannot(error);
    return text;
}

bool is_file_of(const fs::path& file, std::string_view stem) {
    const std::string name = file.filename().string();
    return name.starts_with(stem) && name.ends_with(".json") && name.find('.') == stem.size();
}

RecordFolder read_record_folder(const fs::path& folder, std::string_view stem, Writers writers) {
    Listing listing = list_folder(folder, stem);
    for (int reading = 1;; ++reading) {
        Complaints complaints;
        RecordFolder found = read_listed(listing, writers, complaints);
        Listing again = list_folder(folder, stem);
        found.complete = found.complete && again.fault.empty() && again.files == listing.files;
        if (!found.complete && reading < kMostReadings) {
            listing = std::move(again);
            continue;
        }
        if (!again.fault.empty()) say_unused(folder.string(), again.fault);
        for (const auto& [file, why] : complaints) say_unused(file.string(), why);
        return found;
    }
}

std::optional<Record> merged_record(const RecordFolder& folder, const RecordKey& key) {
    std::optional<Record> all;
    for (const RecordFile& file : folder.files) {
        if (!(file.record.key == key)) {
            say_unused(file.path.string(), "it is a record of something else");
        } else {
            all = all ? merged(*all, file.record) : file.record;
        }
    }
    return all;
}

}  // namespace flce
