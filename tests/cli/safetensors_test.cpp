#include "cli/safetensors.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <random>

#include "tests/cli/process.hpp"

namespace flce::cli {
namespace {

using test::TemporaryFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
    return std::as_bytes(std::span(values));
}

std::string file_with(const std::string& header, std::size_t data_bytes) {
    const std::uint64_t length = header.size();
    std::string file(8, '\0');
    std::memcpy(file.data(), &length, 8);
    return file + header + std::string(data_bytes, '\1');
}

/// The message of the UsageError that parsing throws; "" where it throws nothing.
std::string refusal(const std::string& file) {
    try {
        static_cast<void>(parse_safetensors_header(std::as_bytes(std::span(file)), file.size(), "x"));
    } catch (const UsageError& e) {
        return e.what();
    }
    return "";
}

TEST(Safetensors_WriteThenRead, GivesTheSameTensors) {
    const TemporaryFolder folder;
    const std::vector<float> hidden{1, 2, 3, 4, 5, 6};
    const std::vector<std::uint16_t> weight{7, 8, 9};
    const std::vector<std::int64_t> target{-100, 1};
    const float loss = 0.5F;
    write_safetensors(folder / "t", {{"weight", "BF16", {3, 1}, bytes_of(weight)},
                                     {"hidden", "F32", {2, 3}, bytes_of(hidden)},
                                     {"loss", "F32", {}, std::as_bytes(std::span(&loss, 1))},
                                     {"target", "I64", {2}, bytes_of(target)},
                                     {"empty", "F32", {0, 3}, {}}});
    const SafetensorsSet set({folder / "t"});
    const auto found = set.get("hidden");
    EXPECT_EQ(found.entry->dtype, "F32");
    EXPECT_THAT(found.entry->shape, ElementsAre(2, 3));
    EXPECT_EQ(std::memcmp(found.bytes.data(), hidden.data(), 24), 0);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(found.bytes.data()) % 4, 0U);
    EXPECT_EQ(std::memcmp(set.get("weight").bytes.data(), weight.data(), 6), 0);
    EXPECT_EQ(std::memcmp(set.get("target").bytes.data(), target.data(), 16), 0);
    EXPECT_THAT(set.get("loss").entry->shape, ElementsAre());
    EXPECT_EQ(set.get("empty").bytes.size(), 0U);
    EXPECT_FALSE(set.find("bias"));
}

TEST(Safetensors_Write, LeavesNothingBehindWhenTheDiskRefuses) {
    const TemporaryFolder folder;
    std::filesystem::create_directory(folder / "taken");
    const std::vector<float> values{1};
    EXPECT_THROW(write_safetensors(folder / "taken", {{"a", "F32", {1}, bytes_of(values)}}), EnvironmentError);
    EXPECT_THROW(write_safetensors(folder / "no/such", {{"a", "F32", {1}, bytes_of(values)}}), EnvironmentError);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(Safetensors_MissingOrRepeatedTensor, IsNamed) {
    const TemporaryFolder folder;
    const std::vector<float> values{1};
    write_safetensors(folder / "a", {{"x", "F32", {1}, bytes_of(values)}});
    write_safetensors(folder / "b", {{"x", "F32", {1}, bytes_of(values)}});
    try {
        const SafetensorsSet set({folder / "a", folder / "b"});
        FAIL() << "a tensor in two files must be refused";
    } catch (const UsageError& e) {
        EXPECT_THAT(e.what(), HasSubstr("\"x\""));
        EXPECT_THAT(e.what(), HasSubstr(folder / "a"));
        EXPECT_THAT(e.what(), HasSubstr(folder / "b"));
    }
    const SafetensorsSet set({folder / "a"});
    EXPECT_THROW(static_cast<void>(set.get("y")), UsageError);
}

TEST(Safetensors_MalformedHeader, IsRefusedWithTheReason) {
    const struct {
        std::string header;
        std::size_t data;
        std::string reason;
    } cases[] = {
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 4, "truncated"},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 12, "follow the last tensor"},
        {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, "takes 12 bytes"},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "before they begin"},
        {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "not a size"},
        {R"({"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", 8, "not a size"},
        {R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8, "shape is not a list"},
        {R"({"a":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})", 8, "dtype is not a string"},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8, "pair of offsets"},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 8, "pair of offsets"},
        {R"({"a":{"dtype":"F32","shape":[2]}})", 8, "does not hold"},
        {R"({"a":[1]})", 8, "does not hold"},
        {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]}})", 8, "overflows"},
        {R"({"a":{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,8]}})", 8, "overflows"},
        {R"({"a":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8]}})", 8, "not a size"},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, "overlaps"},
        {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})", 12, "hole"},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8, "twice"},
        {R"([1,2])", 0, "does not start with"},
        {R"({"a":)", 0, "not valid JSON"},
        {R"({"a":{"b":{"c":{"d":{"e":{}}}}}})", 0, "nested"},
        {"", 0, "does not start with"},
    };
    for (const auto& c : cases) EXPECT_THAT(refusal(file_with(c.header, c.data)), HasSubstr(c.reason)) << c.header;
    EXPECT_EQ(refusal(file_with(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  )", 8)), "");
    EXPECT_EQ(refusal(file_with("{}", 0)), "");
}

TEST(Safetensors_HeaderLengthPastTheFile, IsRefusedBeforeAnythingIsAllocated) {
    for (const std::uint64_t length :
         {std::uint64_t{3}, std::uint64_t{1} << 20, std::uint64_t{1} << 40, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
        std::string file = file_with("{}", 0);
        std::memcpy(file.data(), &length, 8);
        EXPECT_NE(refusal(file), "") << length;
    }
    for (std::size_t bytes = 0; bytes < 9; ++bytes) EXPECT_NE(refusal(std::string(bytes, '\0')), "") << bytes;
}

TEST(Safetensors_EveryTruncation, IsRefused) {
    const std::string file = file_with(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
    ASSERT_EQ(refusal(file), "");
    for (std::size_t bytes = 0; bytes < file.size(); ++bytes) EXPECT_NE(refusal(file.substr(0, bytes)), "") << bytes;
}

TEST(Safetensors_RandomMutations, NeverReachOutsideTheFile) {
    const std::string good =
        file_with(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"I64","shape":[1,1],"data_offsets":[8,16]}})", 16);
    std::mt19937 random(7);
    int refused = 0;
    for (int i = 0; i < 20000; ++i) {
        std::string file = good;
        const auto mutations = 1 + random() % 3;
        for (unsigned m = 0; m < mutations; ++m) file[random() % (file.size() - 16)] = static_cast<char>(random());
        try {
            for (const TensorEntry& entry : parse_safetensors_header(std::as_bytes(std::span(file)), file.size(), "x")) {
                std::uint64_t header = 0;
                std::memcpy(&header, file.data(), 8);
                ASSERT_LE(entry.begin, entry.end);
                ASSERT_LE(8 + header + entry.end, file.size());
            }
        } catch (const UsageError&) {
            ++refused;
        }
    }
    EXPECT_GT(refused, 10000);
}

TEST(Safetensors_NotAFile, IsRefused) {
    const TemporaryFolder folder;
    EXPECT_THROW(SafetensorsFile(folder.path()), UsageError);
    EXPECT_THROW(SafetensorsFile(folder / "missing"), UsageError);
    std::ofstream(folder / "empty").close();
    EXPECT_THROW(SafetensorsFile(folder / "empty"), UsageError);
}

}  // namespace
}  // namespace flce::cli
