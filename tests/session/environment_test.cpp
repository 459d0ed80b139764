#include "runtime/environment.hpp"

#include <gmock/gmock.h>

#include <map>

namespace flce {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

Environment parse(const std::map<std::string, std::string>& values) {
    return parse_environment([&](const char* name) {
        const auto found = values.find(name);
        return found == values.end() ? nullptr : found->second.c_str();
    });
}

TEST(Environment, NothingSet_Defaults) {
    const Environment environment = parse({{"HOME", "/home/u"}});
    EXPECT_EQ(environment.cache_dir, "/home/u/.cache/flce");
    EXPECT_FALSE(environment.no_disk_cache);
    EXPECT_EQ(environment.num_threads, 0);
    EXPECT_EQ(environment.device, "");
    EXPECT_EQ(environment.log, "warn");
}

TEST(Environment, CacheDirectory_MostSpecificWins) {
    EXPECT_EQ(parse({{"HOME", "/home/u"}, {"XDG_CACHE_HOME", "/x"}}).cache_dir, "/x/flce");
    EXPECT_EQ(parse({{"HOME", "/home/u"}, {"XDG_CACHE_HOME", "relative"}}).cache_dir, "/home/u/.cache/flce");
    EXPECT_EQ(parse({{"HOME", "/home/u"}, {"XDG_CACHE_HOME", "/x"}, {"FLCE_CACHE_DIR", "/c"}}).cache_dir, "/c");
}

TEST(Environment, EmptyValue_NotSet) {
    EXPECT_EQ(parse({{"HOME", "/home/u"}, {"FLCE_CACHE_DIR", ""}, {"FLCE_NUM_THREADS", ""}}).cache_dir, "/home/u/.cache/flce");
}

TEST(Environment, Values_Read) {
    const Environment environment = parse({{"FLCE_NO_DISK_CACHE", "1"},
                                           {"FLCE_DEVICE", "cuda:1"},
                                           {"FLCE_NUM_THREADS", "7"},
                                           {"FLCE_NVRTC", "/n"},
                                           {"FLCE_LIBCUDA", "/l"},
                                           {"FLCE_LOG", "debug"}});
    EXPECT_TRUE(environment.no_disk_cache);
    EXPECT_EQ(environment.device, "cuda:1");
    EXPECT_EQ(environment.num_threads, 7);
    EXPECT_EQ(environment.nvrtc, "/n");
    EXPECT_EQ(environment.libcuda, "/l");
    EXPECT_EQ(environment.log, "debug");
}

TEST(Environment, BadValue_NamesVariableValueAndChoices) {
    for (const char* threads : {"0", "-1", "x", "3x", "1e3", "99999999999999"}) {
        EXPECT_THAT([&] { (void)parse({{"FLCE_NUM_THREADS", threads}}); },
                    ThrowsMessage<EnvironmentError>(AllOf(HasSubstr("FLCE_NUM_THREADS"), HasSubstr(threads), HasSubstr("1 to 4096"))));
    }
    EXPECT_THAT([&] { (void)parse({{"FLCE_NO_DISK_CACHE", "yes"}}); }, ThrowsMessage<EnvironmentError>(HasSubstr("0 and 1")));
    EXPECT_THAT([&] { (void)parse({{"FLCE_LOG", "loud"}}); }, ThrowsMessage<EnvironmentError>(HasSubstr("trace, debug")));
}

TEST(Environment, Table_NamesEveryVariableOnce) {
    std::vector<std::string> names;
    for (const EnvironmentVariable& variable : environment_variables()) {
        names.push_back(variable.name);
        EXPECT_FALSE(variable.meaning.empty());
        EXPECT_FALSE(variable.default_value.empty());
    }
    EXPECT_THAT(names, testing::UnorderedElementsAre("FLCE_CACHE_DIR", "FLCE_NO_DISK_CACHE", "FLCE_DEVICE", "FLCE_NUM_THREADS",
                                                     "FLCE_NVRTC", "FLCE_LIBCUDA", "FLCE_LOG"));
}

}  // namespace
}  // namespace flce
