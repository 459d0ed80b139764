#include "cli/safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <set>

namespace flce::cli {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little endian");

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr std::size_t kMaxHeaderDepth = 3;

struct ElementType {
    std::string_view name;
    std::uint64_t bytes;
};
constexpr std::array<ElementType, 15> kElementTypes{{{"F64", 8},
                                                     {"F32", 4},
                                                     {"F16", 2},
                                                     {"BF16", 2},
                                                     {"F8_E4M3", 1},
                                                     {"F8_E5M2", 1},
                                                     {"I64", 8},
                                                     {"I32", 4},
                                                     {"I16", 2},
                                                     {"I8", 1},
                                                     {"U64", 8},
                                                     {"U32", 4},
                                                     {"U16", 2},
                                                     {"U8", 1},
                                                     {"BOOL", 1}}};

/// One header's worth of checks, with the file's name for its messages.
class HeaderParser {
public:
    explicit HeaderParser(const std::string& origin) : origin_(origin) {}

    std::vector<TensorEntry> parse(std::string_view text, std::uint64_t data_bytes) const {
        const Json header = parse_json(text);
        if (!header.is_object()) fail("the header is not a JSON object");
        std::vector<TensorEntry> tensors;
        for (const auto& [name, value] : header.items()) {
            if (name == "__metadata__") continue;
            tensors.push_back(entry(name, value, data_bytes));
        }
        check_coverage(tensors, data_bytes);
        return tensors;
    }

    [[noreturn]] void fail(const std::string& message) const {
        throw UsageError(fmt::format("{}: not a valid safetensors file: {}", origin_, message));
    }

private:
    Json parse_json(std::string_view text) const {
        // The parser keeps the last of two equal keys without a word; a tensor named twice must not pass.
        std::vector<std::set<std::string>> keys;
        std::string repeated;
        bool too_deep = false;
        const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
            const auto level = static_cast<std::size_t>(depth);
            too_deep = too_deep || level > kMaxHeaderDepth;
            if (too_deep) return false;  // refused input takes no memory
            if (event == Json::parse_event_t::object_start) {
                keys.resize(std::max(keys.size(), level + 2));
                keys[level + 1].clear();
            } else if (event == Json::parse_event_t::key) {
                const auto key = parsed.get<std::string>();
                if (level < keys.size() && !keys[level].insert(key).second && repeated.empty()) repeated = key;
            }
            return true;
        };
        Json header;
        try {
            header = Json::parse(text, watch);
        } catch (const nlohmann::json::exception&) {
            fail("the header is not valid JSON");
        }
        if (too_deep) fail("the header is nested too deeply");
        if (!repeated.empty()) fail(fmt::format("the header names \"{}\" twice", repeated));
        return header;
    }

    TensorEntry entry(const std::string& name, const Json& value, std::uint64_t data_bytes) const {
        const auto bad = [&](const std::string& what) { fail(fmt::format("tensor \"{}\": {}", name, what)); };
        if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
            !value.contains("data_offsets")) {
            bad("its header entry does not hold dtype, shape and data_offsets");
        }
        TensorEntry entry;
        entry.name = name;
        const Json& dtype = value.at("dtype");
        if (!dtype.is_string()) bad("dtype is not a string");
        entry.dtype = dtype.get<std::string>();
        const Json& shape = value.at("shape");
        if (!shape.is_array()) bad("shape is not a list");
        for (const Json& size : shape) {
            if (!size.is_number_unsigned() || size.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) {
                bad("shape holds something that is not a size");
            }
            entry.shape.push_back(size.get<std::int64_t>());
        }
        const Json& offsets = value.at("data_offsets");
        if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned()) {
            bad("data_offsets is not a pair of offsets");
        }
        entry.begin = offsets[0].get<std::uint64_t>();
        entry.end = offsets[1].get<std::uint64_t>();
        if (entry.begin > entry.end) bad(fmt::format("data_offsets [{}, {}] end before they begin", entry.begin, entry.end));
        if (entry.end > data_bytes) {
            bad(fmt::format("data_offsets [{}, {}] reach past the {} data bytes of the file (truncated?)", entry.begin, entry.end,
                            data_bytes));
        }
        check_size(entry, bad);
        return entry;
    }

    template <class Bad>
    static void check_size(const TensorEntry& entry, const Bad& bad) {
        const std::uint64_t element = safetensors_element_bytes(entry.dtype);
        if (element == 0) return;
        std::uint64_t bytes = element;
        for (const std::int64_t size : entry.shape) {
            if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes)) bad("its shape overflows 64 bits");
        }
        if (bytes != entry.end - entry.begin) {
            bad(fmt::format("{} takes {} bytes, its data_offsets span {}", describe(entry), bytes, entry.end - entry.begin));
        }
    }

    void check_coverage(const std::vector<TensorEntry>& tensors, std::uint64_t data_bytes) const {
        std::vector<const TensorEntry*> sorted;
        for (const TensorEntry& tensor : tensors) sorted.push_back(&tensor);
        std::sort(sorted.begin(), sorted.end(),
                  [](const auto* a, const auto* b) { return std::pair(a->begin, a->end) < std::pair(b->begin, b->end); });
        std::uint64_t reached = 0;
        for (const TensorEntry* tensor : sorted) {
            if (tensor->begin < reached) fail(fmt::format("tensor \"{}\" overlaps the one before it", tensor->name));
            if (tensor->begin > reached) fail(fmt::format("there is a hole before tensor \"{}\"", tensor->name));
            reached = tensor->end;
        }
        if (reached != data_bytes) fail(fmt::format("{} bytes follow the last tensor", data_bytes - reached));
    }

    const std::string& origin_;
};

/// A file being written under a temporary name; removed unless committed.
class AtomicFile {
public:
    explicit AtomicFile(const std::filesystem::path& path) : path_(path), temporary_(path.string() + fmt::format(".tmp{}", ::getpid())) {
        fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (fd_ < 0) fail("cannot be created");
    }
    ~AtomicFile() {
        if (fd_ >= 0) ::close(fd_);
        if (!committed_) ::unlink(temporary_.c_str());
    }
    AtomicFile(const AtomicFile&) = delete;
    AtomicFile& operator=(const AtomicFile&) = delete;

    void write(const void* data, std::size_t bytes) {
        const auto* from = static_cast<const std::byte*>(data);
        while (bytes > 0) {
            const ssize_t written = ::write(fd_, from, std::min<std::size_t>(bytes, 1U << 30));
            if (written < 0 && errno == EINTR) continue;
            if (written < 0) fail("cannot be written");
            from += written;
            bytes -= static_cast<std::size_t>(written);
        }
    }
    void commit() {
        const int fd = fd_;
        fd_ = -1;
        if (::close(fd) != 0) fail("cannot be written");
        if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be put in place");
        committed_ = true;
    }

private:
    [[noreturn]] void fail(const char* what) {
        const std::string reason = std::strerror(errno);
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
        ::unlink(temporary_.c_str());
        throw EnvironmentError(fmt::format("{} {}: {}", path_.string(), what, reason));
    }

    std::filesystem::path path_;
    std::string temporary_;
    int fd_ = -1;
    bool committed_ = false;
};

}  // namespace

std::string describe(const TensorEntry& entry) { return fmt::format("{} [{}]", entry.dtype, fmt::join(entry.shape, ", ")); }

std::uint64_t safetensors_element_bytes(std::string_view dtype) {
    for (const ElementType& type : kElementTypes) {
        if (type.name == dtype) return type.bytes;
    }
    return 0;
}

std::vector<TensorEntry> parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_bytes, const std::string& origin) {
    const HeaderParser parser(origin);
    if (file_bytes < 8 || head.size() < 8) parser.fail(fmt::format("{} bytes are too few", file_bytes));
    std::uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, head.data(), 8);
    if (header_bytes > kMaxHeaderBytes) parser.fail(fmt::format("a header of {} bytes is more than the format allows", header_bytes));
    if (header_bytes > file_bytes - 8 || header_bytes > head.size() - 8) {
        parser.fail(fmt::format("the header of {} bytes reaches past the file's {} (truncated?)", header_bytes, file_bytes));
    }
    const std::string_view text(reinterpret_cast<const char*>(head.data()) + 8, header_bytes);
    if (text.empty() || text.front() != '{') parser.fail("the header does not start with '{'");
    return parser.parse(text, file_bytes - 8 - header_bytes);
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : path_(path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw UsageError(fmt::format("{}: cannot be opened: {}", path.string(), std::strerror(errno)));
    struct stat status{};
    const bool regular = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
    bytes_ = regular ? static_cast<std::size_t>(status.st_size) : 0;
    void* address = bytes_ > 0 ? ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
    const int error = errno;
    ::close(fd);
    if (!regular) throw UsageError(fmt::format("{}: not a regular file", path.string()));
    if (bytes_ == 0) throw UsageError(fmt::format("{}: not a valid safetensors file: it is empty", path.string()));
    if (address == MAP_FAILED) throw EnvironmentError(fmt::format("{}: cannot be mapped: {}", path.string(), std::strerror(error)));
    mapping_ = std::shared_ptr<const std::byte>(static_cast<const std::byte*>(address),
                                                [bytes = bytes_](const std::byte* p) { ::munmap(const_cast<std::byte*>(p), bytes); });
    tensors_ = parse_safetensors_header({mapping_.get(), bytes_}, bytes_, path.string());
    std::uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, mapping_.get(), 8);
    data_begin_ = 8 + header_bytes;
}

std::span<const std::byte> SafetensorsFile::bytes(const TensorEntry& entry) const {
    return {mapping_.get() + data_begin_ + entry.begin, static_cast<std::size_t>(entry.end - entry.begin)};
}

SafetensorsSet::SafetensorsSet(const std::vector<std::filesystem::path>& paths) {
    files_.reserve(paths.size());
    for (const auto& path : paths) files_.emplace_back(path);
    for (const SafetensorsFile& file : files_) {
        for (const TensorEntry& entry : file.tensors()) {
            const auto [found, inserted] = by_name_.try_emplace(entry.name, &file, &entry);
            if (!inserted) {
                throw UsageError(fmt::format("tensor \"{}\" is in {} and in {}", entry.name, found->second.first->path().string(),
                                             file.path().string()));
            }
        }
    }
}

SafetensorsSet::Found SafetensorsSet::find(const std::string& name) const {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return {};
    const auto [file, entry] = found->second;
    return {entry, file->bytes(*entry), file->path().string()};
}

SafetensorsSet::Found SafetensorsSet::get(const std::string& name) const {
    if (Found found = find(name)) return found;
    std::vector<std::string> names;
    for (const auto& [known, where] : by_name_) {
        if (names.size() < 20) names.push_back(known);
    }
    throw UsageError(fmt::format("tensor \"{}\" is missing; the input holds: {}{}", name, fmt::join(names, ", "),
                                 by_name_.size() > names.size() ? ", …" : ""));
}

void write_safetensors(const std::filesystem::path& path, const std::vector<TensorToWrite>& tensors) {
    std::vector<const TensorToWrite*> order;
    for (const TensorToWrite& tensor : tensors) order.push_back(&tensor);
    // Wide elements first, so that every tensor is aligned to its element (the data begins at a multiple of 8).
    std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
        return safetensors_element_bytes(a->dtype) > safetensors_element_bytes(b->dtype);
    });
    Json header = Json::object();
    std::uint64_t offset = 0;
    for (const TensorToWrite* tensor : order) {
        header[tensor->name] = {
            {"dtype", tensor->dtype}, {"shape", tensor->shape}, {"data_offsets", {offset, offset + tensor->bytes.size()}}};
        offset += tensor->bytes.size();
    }
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');
    const std::uint64_t header_bytes = text.size();
    AtomicFile file(path);
    file.write(&header_bytes, 8);
    file.write(text.data(), text.size());
    for (const TensorToWrite* tensor : order) file.write(tensor->bytes.data(), tensor->bytes.size());
    file.commit();
}

}  // namespace flce::cli
