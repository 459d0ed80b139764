// The safetensors file format: eight bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, the data.
// Reading trusts nothing: every number in the header is checked against the file before anything is allocated or touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command.hpp"

namespace flce::cli {

/// Header entry of one tensor; offsets count from the start of the data.
struct TensorEntry {
    std::string name;
    std::string dtype;  ///< "F32", "BF16", "F16", "I32", "I64", …
    std::vector<std::int64_t> shape;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
};

/// "BF16 [4096, 2048]".
[[nodiscard]] std::string describe(const TensorEntry& entry);

/// Bytes of one element; 0 for a dtype that is not known (such tensors may lie in a file, they cannot be used).
[[nodiscard]] std::uint64_t safetensors_element_bytes(std::string_view dtype);

/// Parses and checks the first bytes of a file of `file_bytes` bytes. `head` must hold the header (or the whole file if that is shorter).
/// The format's own rules: offsets inside the file, in agreement with dtype and shape, no overlap, no hole, no byte left over. Throws
/// UsageError naming the fault, with `origin` (the file's name) in front.
[[nodiscard]] std::vector<TensorEntry> parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_bytes,
                                                                const std::string& origin);

/// A file mapped into memory; the tensors' bytes are views of it (aligned to nothing in particular).
class SafetensorsFile {
public:
    /// Throws UsageError when the file cannot be read or is not a safetensors file.
    explicit SafetensorsFile(const std::filesystem::path& path);

    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
    [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept { return tensors_; }
    [[nodiscard]] std::span<const std::byte> bytes(const TensorEntry& entry) const;

private:
    std::filesystem::path path_;
    std::shared_ptr<const std::byte> mapping_;
    std::size_t bytes_ = 0;
    std::uint64_t data_begin_ = 0;
    std::vector<TensorEntry> tensors_;
};

/// Several files as one set of tensors. A name that two files hold is an error that names both.
class SafetensorsSet {
public:
    explicit SafetensorsSet(const std::vector<std::filesystem::path>& paths);

    struct Found {
        const TensorEntry* entry = nullptr;
        std::span<const std::byte> bytes;
        std::string file;
        explicit operator bool() const { return entry != nullptr; }
    };
    [[nodiscard]] Found find(const std::string& name) const;
    /// Like find, but a missing tensor is a UsageError that lists the tensors there are.
    [[nodiscard]] Found get(const std::string& name) const;

private:
    std::vector<SafetensorsFile> files_;
    std::map<std::string, std::pair<const SafetensorsFile*, const TensorEntry*>> by_name_;
};

struct TensorToWrite {
    std::string name;
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::span<const std::byte> bytes;
};

/// Writes beside `path` and renames, so that readers see the old file or the whole new one. Throws EnvironmentError when the disk refuses.
void write_safetensors(const std::filesystem::path& path, const std::vector<TensorToWrite>& tensors);

}  // namespace flce::cli
