#include "runtime/environment.hpp"

#include <gmock/gmock.h>

#include <cstdlib>
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
                                           {"FLCE_CUBLASLT", "/b"},
                                           {"FLCE_PATH", "cuda_sm80"},
                                           {"FLCE_NCCL", "/c"},
                                           {"FLCE_LOG", "debug"}});
    EXPECT_TRUE(environment.no_disk_cache);
    EXPECT_EQ(environment.device, "cuda:1");
    EXPECT_EQ(environment.num_threads, 7);
    EXPECT_EQ(environment.nvrtc, "/n");
    EXPECT_EQ(environment.libcuda, "/l");
    EXPECT_EQ(environment.cublaslt, "/b");
    EXPECT_EQ(environment.path, "cuda_sm80");
    EXPECT_EQ(environment.nccl, "/c");
    EXPECT_EQ(environment.log, "debug");
}

TEST(Environment, CacheValues_Read) {
    const Environment environment = parse({{"FLCE_CACHE_MAX_BYTES", "512M"},
                                           {"FLCE_CACHE_PACKS", "/a:b::/c"},
                                           {"FLCE_CACHE_REMOTE", "redis://h"},
                                           {"FLCE_CACHE_REMOTE_TIMEOUT_MS", "250"},
                                           {"FLCE_CACHE_REMOTE_READ_ONLY", "1"},
                                           {"FLCE_TRUSTED_KEYS", "/k"},
                                           {"FLCE_SIGNING_KEY", "/s"},
                                           {"AWS_ACCESS_KEY_ID", "id"},
                                           {"AWS_SECRET_ACCESS_KEY", "secret"},
                                           {"AWS_DEFAULT_REGION", "eu"},
                                           {"AWS_ENDPOINT_URL", "http://e"}});
    EXPECT_EQ(environment.cache_max_bytes, 512u << 20);
    EXPECT_THAT(environment.cache_packs, testing::ElementsAre("/a", "b", "/c"));
    EXPECT_EQ(environment.cache_remote, "redis://h");
    EXPECT_EQ(environment.cache_remote_timeout.count(), 250);
    EXPECT_TRUE(environment.cache_remote_read_only);
    EXPECT_THAT(environment.trusted_keys, testing::ElementsAre("/k"));
    EXPECT_EQ(environment.signing_key, "/s");
    EXPECT_EQ(environment.s3.access_key, "id");
    EXPECT_EQ(environment.s3.secret_key, "secret");
    EXPECT_EQ(environment.s3.region, "eu");
    EXPECT_EQ(environment.s3.endpoint, "http://e");
    EXPECT_EQ(parse({{"AWS_DEFAULT_REGION", "eu"}, {"AWS_REGION", "us"}}).s3.region, "us");
    for (const char* name : {"SSL_CERT_DIR", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "FLCE_CACHE_REMOTE_CA"}) {
        EXPECT_EQ(parse({{name, "/ca"}}).cache_remote_ca, "/ca") << name;
    }
    EXPECT_EQ(parse({{"FLCE_CACHE_REMOTE_CA", "/ours"}, {"SSL_CERT_FILE", "/all"}, {"AWS_CA_BUNDLE", "/s3"}}).cache_remote_ca, "/ours");
    EXPECT_EQ(parse({{"FLCE_CACHE_REMOTE_CA", "/ours"}, {"AWS_CA_BUNDLE", "/s3"}}).s3.authorities, "/ours");
    EXPECT_EQ(parse({{"SSL_CERT_FILE", "/all"}, {"AWS_CA_BUNDLE", "/s3"}}).s3.authorities, "/s3");
    EXPECT_EQ(parse({}).cache_max_bytes, 2ULL << 30);
    EXPECT_EQ(parse({{"FLCE_CACHE_MAX_BYTES", "0"}}).cache_max_bytes, 0u);
    for (const char* size : {"-1", "1X", "1.5G", "G", "1GB", "99999999999T", "99999999999999999999999"}) {
        EXPECT_THAT([&] { (void)parse({{"FLCE_CACHE_MAX_BYTES", size}}); },
                    ThrowsMessage<EnvironmentError>(AllOf(HasSubstr("FLCE_CACHE_MAX_BYTES"), HasSubstr(size))));
    }
}

TEST(Environment, Secrets_NotShown) {
    ::setenv("AWS_SECRET_ACCESS_KEY", "geheim", 1);
    ::setenv("AWS_ENDPOINT_URL_S3", "http://u:geheim@h:1", 1);
    ::setenv("FLCE_RECORDS", "/shared/a@b/records", 1);
    for (const char* remote : {"redis://u:geheim@h:1", "redis://:ge/geheim@localhost:6379", "s3://AKIA:geheim@bucket/x", "u:geheim@h"}) {
        ::setenv("FLCE_CACHE_REMOTE", remote, 1);
        for (const EnvironmentVariable& variable : environment_variables()) {
            EXPECT_THAT(variable.value.value_or(""), testing::Not(HasSubstr("geheim"))) << variable.name;
            if (variable.name == std::string_view("FLCE_RECORDS")) {
                EXPECT_EQ(variable.value, "/shared/a@b/records");
            }
        }
    }
    ::unsetenv("AWS_ENDPOINT_URL_S3");
    ::unsetenv("FLCE_RECORDS");
    ::unsetenv("AWS_SECRET_ACCESS_KEY");
    ::unsetenv("FLCE_CACHE_REMOTE");
}

TEST(Environment, BadValue_NamesVariableValueAndChoices) {
    for (const char* threads : {"0", "-1", "x", "3x", "1e3", "99999999999999"}) {
        EXPECT_THAT([&] { (void)parse({{"FLCE_NUM_THREADS", threads}}); },
                    ThrowsMessage<EnvironmentError>(AllOf(HasSubstr("FLCE_NUM_THREADS"), HasSubstr(threads), HasSubstr("1 to 4096"))));
    }
    EXPECT_THAT([&] { (void)parse({{"FLCE_NO_DISK_CACHE", "yes"}}); }, ThrowsMessage<EnvironmentError>(HasSubstr("0 and 1")));
    EXPECT_THAT([&] { (void)parse({{"FLCE_LOG", "loud"}}); }, ThrowsMessage<EnvironmentError>(HasSubstr("trace, debug")));
    EXPECT_THAT([&] { (void)parse({{"FLCE_PATH", "cpu"}}); }, ThrowsMessage<EnvironmentError>(HasSubstr("cuda_sm80, cuda_sm90a, cuda_lt")));
}

TEST(Environment, SeveralBadValues_AllToldAndTheRestRead) {
    const std::map<std::string, std::string> values{{"FLCE_NUM_THREADS", "many"},
                                                    {"FLCE_LOG", "loud"},
                                                    {"FLCE_STRICT", "yes"},
                                                    {"FLCE_CACHE_DIR", "/c"},
                                                    {"FLCE_CACHE_MAX_BYTES", "1G"}};
    const EnvironmentReading reading = read_environment([&](const char* name) {
        const auto found = values.find(name);
        return found == values.end() ? nullptr : found->second.c_str();
    });
    std::vector<std::string> bad;
    for (const EnvironmentFault& fault : reading.faults) {
        bad.push_back(fault.variable);
        EXPECT_THAT(fault.message, AllOf(HasSubstr(fault.variable), HasSubstr(values.at(fault.variable))));
    }
    EXPECT_THAT(bad, testing::UnorderedElementsAre("FLCE_NUM_THREADS", "FLCE_LOG", "FLCE_STRICT"));
    EXPECT_EQ(reading.environment.num_threads, 0);
    EXPECT_EQ(reading.environment.log, "warn");
    EXPECT_FALSE(reading.environment.strict);
    EXPECT_EQ(reading.environment.cache_dir, "/c");
    EXPECT_EQ(reading.environment.cache_max_bytes, 1ULL << 30);
    EXPECT_THAT([&] { (void)parse(values); },
                ThrowsMessage<EnvironmentError>(AllOf(HasSubstr("FLCE_NUM_THREADS"), HasSubstr("FLCE_LOG"), HasSubstr("FLCE_STRICT"))));
}

TEST(Environment, UnknownVariables_AreThoseThatNothingReads) {
    ::setenv("FLCE_CACHE_DIRR", "/c", 1);
    ::setenv("FLCE_NO_RECORDS", "0", 1);
    ::setenv("FLCE_LIBRARY", "/lib", 1);
    ::setenv("FLCE_TEST_ANYTHING", "1", 1);
    EXPECT_THAT(unknown_environment_variables(), testing::ElementsAre("FLCE_CACHE_DIRR"));
    for (const char* name : {"FLCE_CACHE_DIRR", "FLCE_NO_RECORDS", "FLCE_LIBRARY", "FLCE_TEST_ANYTHING"}) ::unsetenv(name);
}

TEST(Environment, Table_NamesEveryVariableOnce) {
    std::vector<std::string> names;
    for (const EnvironmentVariable& variable : environment_variables()) {
        names.push_back(variable.name);
        EXPECT_FALSE(variable.meaning.empty());
        EXPECT_FALSE(variable.default_value.empty());
    }
    EXPECT_THAT(names, testing::UnorderedElementsAre(
                           "FLCE_CACHE_DIR", "FLCE_NO_DISK_CACHE", "FLCE_DEVICE", "FLCE_NUM_THREADS", "FLCE_NVRTC", "FLCE_LIBCUDA",
                           "FLCE_PATH", "FLCE_CUBLASLT", "FLCE_NCCL", "FLCE_LOG", "FLCE_CACHE_MAX_BYTES", "FLCE_CACHE_PACKS",
                           "FLCE_CACHE_REMOTE", "FLCE_CACHE_REMOTE_TIMEOUT_MS", "FLCE_CACHE_REMOTE_READ_ONLY", "FLCE_CACHE_REMOTE_CA",
                           "FLCE_RECORDS_DIR", "FLCE_RECORDS", "FLCE_NO_RECORDS", "FLCE_STRICT", "FLCE_TRUSTED_KEYS", "FLCE_SIGNING_KEY",
                           "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL_S3"));
}

}  // namespace
}  // namespace flce
