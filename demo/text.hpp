// Text for the demo: files, a vocabulary of words and word pieces, and the text as tokens.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace flce::demo {

struct Corpus {
    std::filesystem::path origin;
    std::size_t files = 0;
    std::string text;
};

/// A file, or every text file below a folder (sources, documentation; build trees and hidden folders are skipped), in the order of their
/// names, up to `max_bytes`. Throws ArgumentError where there is nothing to read.
[[nodiscard]] Corpus read_corpus(const std::filesystem::path& path, std::size_t max_bytes);

/// The source tree, release tree or documentation (share/doc/flce of an installation) that lies nearest above the program, else above the
/// working folder. Throws ArgumentError where there is none.
[[nodiscard]] std::filesystem::path default_corpus_path(const std::filesystem::path& program);

/// Splits text into words (a space in front belongs to the word), runs of digits, single marks and line ends with their indentation.
[[nodiscard]] std::vector<std::string_view> split_words(std::string_view text);

/// The most frequent words, then single bytes, so that every text over those bytes can be written in it.
class Vocabulary {
public:
    /// Vocabulary of at most max_size entries; words seen once are spelled.
    Vocabulary(std::string_view text, std::size_t max_size);
    [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(pieces_.size()); }
    [[nodiscard]] const std::string& piece(std::int32_t token) const { return pieces_[static_cast<std::size_t>(token)]; }
    [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text) const;

private:
    std::vector<std::string> pieces_;
    std::vector<std::pair<std::string, std::int32_t>> sorted_;  // ids by piece
    [[nodiscard]] std::int32_t find(std::string_view piece) const;
};

}  // namespace flce::demo
