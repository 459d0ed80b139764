#include "demo/text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <unordered_map>

#include "flce/error.hpp"
#include "runtime/text.hpp"

namespace flce::demo {
namespace {

namespace fs = std::filesystem;

bool is_text_file(const fs::path& path) {
    constexpr std::array<std::string_view, 14> kExtensions{".md",  ".txt", ".rst", ".hpp", ".cpp",   ".h",   ".c",
                                                           ".cuh", ".cu",  ".py",  ".sh",  ".cmake", ".tex", ".csv"};
    return std::find(kExtensions.begin(), kExtensions.end(), path.extension().string()) != kExtensions.end();
}

bool is_skipped_folder(const fs::path& path) {
    const std::string name = path.filename().string();
    return name.starts_with(".") || name.starts_with("build") || name == "dist" || name == "__pycache__";
}

std::vector<fs::path> text_files_below(const fs::path& folder) {
    std::vector<fs::path> files;
    std::error_code error;
    auto it = fs::recursive_directory_iterator(folder, fs::directory_options::skip_permission_denied, error);
    for (; it != fs::recursive_directory_iterator(); it.increment(error)) {
        if (error) break;
        if (it->is_directory(error) && is_skipped_folder(it->path())) {
            it.disable_recursion_pending();
        } else if (it->is_regular_file(error) && is_text_file(it->path())) {
            files.push_back(it->path());
        }
    }
    std::sort(files.begin(), files.end());
    return files;
}

/// The source tree, a release tree, or an installation's folder of documentation.
bool holds_documentation(const fs::path& folder) {
    std::error_code error;
    return fs::is_regular_file(folder / "README.md", error) && fs::is_regular_file(folder / "docs" / "numerics.md", error) &&
           fs::is_directory(folder / "examples" / "minimal", error);
}

bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }
bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

/// End of the word that starts at `begin`.
std::size_t word_end(std::string_view text, std::size_t begin) {
    const auto run = [&](std::size_t from, auto matches) {
        while (from < text.size() && matches(text[from])) ++from;
        return from;
    };
    const auto is_space = [](char c) { return c == ' '; };
    if (text[begin] == '\n') return run(begin + 1, is_space);
    std::size_t at = begin;
    if (text[at] == ' ') {
        const std::size_t spaces_end = run(at, is_space);
        if (spaces_end - at > 1) return spaces_end - (spaces_end < text.size() && text[spaces_end] != '\n' ? 1 : 0);
        at = spaces_end;
        if (at == text.size() || text[at] == '\n') return at;
    }
    if (is_letter(text[at])) return run(at, is_letter);
    if (is_digit(text[at])) return run(at, is_digit);
    return run(at + 1, [](char c) { return (c & 0xc0) == 0x80; });  // one character, all of its UTF-8 bytes
}

}  // namespace

Corpus read_corpus(const fs::path& path, std::size_t max_bytes) {
    std::error_code error;
    if (!fs::exists(path, error)) throw ArgumentError(fmt::format("text: {} does not exist", path.string()));
    Corpus corpus;
    corpus.origin = path;
    const auto files = fs::is_directory(path, error) ? text_files_below(path) : std::vector<fs::path>{path};
    for (const fs::path& file : files) {
        if (corpus.text.size() >= max_bytes) break;
        corpus.text += read_text_file(file);
        corpus.text += '\n';
        ++corpus.files;
    }
    if (corpus.text.size() > max_bytes) corpus.text.resize(max_bytes);
    if (corpus.files == 0) throw ArgumentError(fmt::format("text: there are no text files below {}", path.string()));
    return corpus;
}

fs::path default_corpus_path(const fs::path& program) {
    std::error_code error;
    for (fs::path folder : {program.parent_path(), fs::current_path(error)}) {
        for (;; folder = folder.parent_path()) {
            for (const fs::path& found : {folder, folder / "share" / "doc" / "flce"}) {
                if (holds_documentation(found)) return found;
            }
            if (folder == folder.parent_path()) break;
        }
    }
    throw ArgumentError("flce's documentation, which is the default text, does not lie beside this program: name a file or a folder");
}

std::vector<std::string_view> split_words(std::string_view text) {
    std::vector<std::string_view> words;
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = word_end(text, begin);
        words.push_back(text.substr(begin, end - begin));
        begin = end;
    }
    return words;
}

Vocabulary::Vocabulary(std::string_view text, std::size_t max_size) {
    std::array<bool, 256> seen{};
    for (const char c : text) seen[static_cast<unsigned char>(c)] = true;
    std::vector<std::string> bytes;
    for (std::size_t b = 0; b < seen.size(); ++b) {
        if (seen[b]) bytes.emplace_back(1, static_cast<char>(b));
    }
    std::unordered_map<std::string_view, std::int64_t> counts;
    for (const std::string_view word : split_words(text)) {
        if (word.size() > 1) ++counts[word];
    }
    std::vector<std::pair<std::string_view, std::int64_t>> frequent;
    for (const auto& entry : counts) {
        if (entry.second >= 2) frequent.push_back(entry);
    }
    std::sort(frequent.begin(), frequent.end(),
              [](const auto& a, const auto& b) { return a.second != b.second ? a.second > b.second : a.first < b.first; });
    const std::size_t words = std::min(frequent.size(), max_size > bytes.size() ? max_size - bytes.size() : 0);
    for (std::size_t i = 0; i < words; ++i) pieces_.emplace_back(frequent[i].first);
    pieces_.insert(pieces_.end(), bytes.begin(), bytes.end());
    for (std::size_t i = 0; i < pieces_.size(); ++i) sorted_.emplace_back(pieces_[i], static_cast<std::int32_t>(i));
    std::sort(sorted_.begin(), sorted_.end());
}

std::int32_t Vocabulary::find(std::string_view piece) const {
    const auto found =
        std::lower_bound(sorted_.begin(), sorted_.end(), piece, [](const auto& entry, std::string_view p) { return entry.first < p; });
    return found != sorted_.end() && found->first == piece ? found->second : -1;
}

std::vector<std::int32_t> Vocabulary::encode(std::string_view text) const {
    std::vector<std::int32_t> tokens;
    for (const std::string_view word : split_words(text)) {
        const std::int32_t token = find(word);
        if (token >= 0) {
            tokens.push_back(token);
            continue;
        }
        for (std::size_t i = 0; i < word.size(); ++i) {
            const std::int32_t byte = find(word.substr(i, 1));
            if (byte >= 0) tokens.push_back(byte);
        }
    }
    return tokens;
}

}  // namespace flce::demo
