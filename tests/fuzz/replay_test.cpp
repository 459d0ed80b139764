// The corpus and variations of it, through the functions that the fuzzers call: cut short at every byte, every byte changed.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/fuzz/readers.hpp"

namespace flce::fuzz {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> inputs_of(const Reader& reader) {
    std::vector<std::string> inputs = reader.seeds();
    const fs::path folder = fs::path(FLCE_SOURCE_DIR) / "tests/fuzz/corpus" / reader.name;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(folder, none)) {
        std::ifstream file(entry.path(), std::ios::binary);
        inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return inputs;
}

class Replay : public testing::TestWithParam<Reader> {};

TEST_P(Replay, CorpusWholeCutAndChanged_ReadersKeepTheirWord) {
    const Reader& reader = GetParam();
    const auto inputs = inputs_of(reader);
    ASSERT_FALSE(inputs.empty());
    for (const std::string& input : inputs) {
        reader.read(input);
        // Every byte of small inputs, some of larger ones.
        const std::size_t step = 1 + input.size() / 400;
        for (std::size_t i = 0; i < input.size(); i += step) {
            reader.read(std::string_view(input).substr(0, i));
            std::string changed = input;
            for (const int change : {0x01, 0x80, 0xff}) {
                changed[i] = static_cast<char>(input[i] ^ change);
                reader.read(changed);
            }
        }
        reader.read(input + input);
    }
}

INSTANTIATE_TEST_SUITE_P(Readers, Replay, testing::ValuesIn(readers().begin(), readers().end()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace flce::fuzz
