// Places of results: a standard output that fails, errors as JSON, file names that are no UTF-8; and flce info, which has to outlive the
// faults that it diagnoses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "runtime/utf8.hpp"
#include "tests/cli/process.hpp"

namespace flce::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr const char* kLayer = "D=16,V=50,dtype=fp32";

/// One call of each subcommand that succeeds, and prints.
std::vector<std::vector<std::string>> calls(const TemporaryFolder& folder) {
    const std::string cache = folder / "cache";
    fs::create_directories(cache);
    fs::permissions(cache, fs::perms::owner_all);
    std::vector<std::vector<std::string>> all = {
        {"explain", "--spec", kLayer, "--device", "cpu"},
        {"info"},
        {"check", "--spec", kLayer, "--device", "cpu", "--num-tokens", "4"},
        {"bench", "--spec", kLayer, "--device", "cpu", "--num-tokens", "4", "--rounds", "1", "--no-floor"},
        {"prewarm", "--spec", kLayer, "--device", "x86-64-v3"},
        {"tune", "--spec", kLayer, "--device", "cpu", "--num-tokens", "16", "--budget-s", "1", "--cache-dir", cache},
        {"cache", "ls", "--cache-dir", cache},
        {"cache", "stats", "--cache-dir", cache},
        {"cache", "verify", "--cache-dir", cache},
        {"cache", "gc", "--cache-dir", cache},
        {"cache", "export", folder / "exported", "--cache-dir", cache},
        {"cache", "import", cache, "--cache-dir", cache},
    };
    const std::size_t count = all.size();
    for (std::size_t i = 0; i < count; ++i) {
        all.push_back(all[i]);
        all.back().emplace_back("--json");
    }
    all.push_back({"cache", "keygen", folder / "key"});
    all.push_back({"--help"});
    all.push_back({"--version"});
    all.push_back({"explain", "--help"});
    return all;
}

TEST(Flce_StandardOutputIsFull, EveryCommandFailsAndSaysSo) {
    if (!fs::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
    const TemporaryFolder folder;
    for (const auto& arguments : calls(folder)) {
        const ProcessResult result = run_flce(arguments, {.out = "/dev/full"});
        EXPECT_EQ(result.exit_code, 3) << testing::PrintToString(arguments) << result.err;
        EXPECT_THAT(result.err, HasSubstr("standard output cannot be written: No space left on device"))
            << testing::PrintToString(arguments);
        EXPECT_EQ(result.err.find("error: "), result.err.rfind("error: ")) << result.err;
    }
}

TEST(Flce_StandardOutputIsClosed, FailsAndNoFileTakesItsPlace) {
    const TemporaryFolder folder;
    for (const char* json : {"", "--json"}) {
        std::vector<std::string> arguments{"check",        "--spec", kLayer,        "--device",      "cpu",
                                           "--num-tokens", "4",      "--cache-dir", folder / "cache"};
        if (*json != '\0') arguments.emplace_back(json);
        const ProcessResult result = run_flce(arguments, {.out_closed = true});
        EXPECT_EQ(result.exit_code, 3) << result.err;
        EXPECT_THAT(result.err, HasSubstr("standard output cannot be written"));
    }
    EXPECT_EQ(run_flce({"cache", "verify", "--load", "--cache-dir", folder / "cache"}).exit_code, 0);
}

TEST(Flce_StandardOutputIsFull, AnotherErrorKeepsItsExitCode) {
    EXPECT_EQ(run_flce({"nonsense", "--json"}, {.out = "/dev/full"}).exit_code, 2);
    EXPECT_EQ(run_flce({"explain", "--spec", "D=16", "--json"}, {.out = "/dev/full"}).exit_code, 2);
}

TEST(Flce_JsonOfAFailedCommand, IsAnObjectWithTheError) {
    const TemporaryFolder folder;
    const struct {
        std::vector<std::string> arguments;
        int exit_code;
        const char* reason;
    } cases[] = {
        {{"nonsense", "--json"}, 2, "nonsense"},
        {{"--json"}, 2, "--json is not an option"},
        {{"explain", "--json"}, 2, "--spec"},
        {{"explain", "--spec", "D=16", "--json"}, 2, "V"},
        {{"explain", "--spec", kLayer, "--device", "abacus", "--json"}, 3, "abacus"},
        {{"check", "--spec", kLayer, "--device", "cuda:99", "--json"}, 3, "cuda"},
        {{"bench", "--spec", kLayer, "--device", "cpu", "--plan", "none", "--json"}, 2, "plan"},
        {{"run", "--spec", kLayer, "--input", folder / "missing", "--json"}, 2, "missing"},
        {{"prewarm", "--manifest", folder / "missing", "--device", "sm_80", "--json"}, 2, "missing"},
        {{"tune", "--spec", kLayer, "--device", "cuda:99", "--json"}, 3, "cuda"},
        {{"demo", "--text", folder / "missing", "--json"}, 2, "missing"},
        {{"cache", "ls", "--pack", folder / "missing", "--json"}, 3, "missing"},
        {{"cache", "gc", "--max-bytes", "much", "--json"}, 2, "much"},
        {{"cache", "export", "--json"}, 2, "--pack"},
        {{"cache", "import", folder / "missing", "--json"}, 3, "missing"},
    };
    for (const auto& c : cases) {
        const ProcessResult result = run_flce(c.arguments);
        const std::string command = testing::PrintToString(c.arguments);
        EXPECT_EQ(result.exit_code, c.exit_code) << command << result.err;
        EXPECT_THAT(result.err, AllOf(StartsWith("flce: error: "), HasSubstr(c.reason))) << command;
        const nlohmann::json json = result.json();
        ASSERT_TRUE(json.is_object()) << command << result.out;
        ASSERT_TRUE(json.contains("error")) << command << result.out;
        EXPECT_EQ(json["error"]["exit_code"], c.exit_code) << command;
        EXPECT_THAT(json["error"]["message"].get<std::string>(), HasSubstr(c.reason)) << command;
    }
    EXPECT_EQ(run_flce({"nonsense"}).out, "");
}

TEST(Flce_PathsThatAreNoUtf8, ResultsAndErrorsAreJsonAllTheSame) {
    const TemporaryFolder folder;
    const std::string odd = folder / "caf\xe9 \xff";
    const std::vector<std::string> there{"--cache-dir", odd, "--json"};
    const auto run = [&](std::vector<std::string> arguments, int exit_code) {
        arguments.insert(arguments.end(), there.begin(), there.end());
        const ProcessResult result = run_flce(arguments);
        EXPECT_EQ(result.exit_code, exit_code) << testing::PrintToString(arguments) << result.err;
        EXPECT_TRUE(result.json().is_object()) << result.out;
        return result.json();
    };
    EXPECT_EQ(run({"prewarm", "--spec", kLayer, "--device", "x86-64-v3", "--out", odd + ".flcepack"}, 0).at("compiled"), 1);
    EXPECT_EQ(run({"prewarm", "--spec", kLayer, "--device", "x86-64-v3"}, 0).at("compiled"), 0);
    EXPECT_EQ(run({"cache", "ls"}, 0).at("entries").size(), 1u);
    EXPECT_EQ(run({"cache", "ls", "--pack", odd + ".flcepack"}, 0).at("entries").size(), 1u);
    EXPECT_EQ(run({"cache", "verify", "--load"}, 0).at("checked"), 1);
    EXPECT_EQ(run({"check", "--spec", kLayer, "--device", "cpu", "--num-tokens", "4"}, 0).at("passed"), true);
    (void)run({"tune", "--spec", kLayer, "--device", "cpu", "--num-tokens", "16", "--budget-s", "1"}, 0);
    EXPECT_TRUE(fs::exists(odd + "/records"));
    EXPECT_THAT(run({"cache", "import", odd + ".missing"}, 3).at("error").at("message").get<std::string>(), HasSubstr("missing"));
    const ProcessResult info =
        run_flce({"info", "--json"}, {.environment = {{"FLCE_CACHE_DIR", odd}, {"FLCE_CACHE_PACKS", odd + ".flcepack"}}});
    ASSERT_TRUE(info.json().is_object()) << info.out;
    EXPECT_EQ(info.json().at("cache").at("packs").at(0).at("entries"), 1);
}

TEST(Flce_Info, OutlivesWhatItDiagnoses) {
    const TemporaryFolder folder;
    std::ofstream(folder / "pack") << "no pack";
    const std::map<std::string, std::string> ill{
        {"FLCE_NUM_THREADS", "many"},
        {"FLCE_LOG", "loud"},
        {"FLCE_STRICT", "yes"},
        {"FLCE_NO_RECORDS", "maybe"},
        {"FLCE_CACHE_MAX_BYTES", "much"},
        {"FLCE_DEVICE", "abacus"},
        {"FLCE_CACHE_REMOTE", "gopher://host"},
        {"FLCE_TRUSTED_KEYS", folder / "no key"},
        {"FLCE_SIGNING_KEY", folder / "no key"},
        {"FLCE_CACHE_PACKS", (folder / "pack") + ":" + (folder / "missing")},
        {"FLCE_CACHE_DIRR", "/tmp"},
    };
    const ProcessResult result = run_flce({"info", "--json"}, {.environment = ill});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const nlohmann::json json = result.json();
    std::map<std::string, std::string> told;
    for (const auto& fault : json.at("faults")) told[fault.at("variable")] += fault.at("message").get<std::string>();
    for (const auto& [name, value] : ill) EXPECT_EQ(told.contains(name), name != "FLCE_CACHE_DIRR") << name << json.at("faults").dump(1);
    EXPECT_THAT(json.at("unknown_variables"), testing::ElementsAre("FLCE_CACHE_DIRR"));
    EXPECT_THAT(told["FLCE_CACHE_PACKS"], AllOf(HasSubstr("pack"), HasSubstr("No such file")));
    EXPECT_EQ(json.at("cache").at("packs").size(), 2u);
    EXPECT_EQ(json.at("devices").back().at("device"), "cpu");
    const ProcessResult text = run_flce({"info"}, {.environment = ill});
    EXPECT_EQ(text.exit_code, 0);
    EXPECT_THAT(text.out, AllOf(HasSubstr("FLCE_NUM_THREADS is \"many\""), HasSubstr("FLCE_LOG is \"loud\""), HasSubstr("FLCE_CACHE_DIRR"),
                                HasSubstr((folder / "missing") + ": not used"), HasSubstr("environment variables")));
    // Everything else refuses to guess, and names each.
    const ProcessResult other = run_flce({"explain", "--spec", kLayer, "--device", "cpu"}, {.environment = ill});
    EXPECT_EQ(other.exit_code, 3);
    EXPECT_THAT(other.err, AllOf(HasSubstr("FLCE_NUM_THREADS"), HasSubstr("FLCE_LOG"), HasSubstr("FLCE_STRICT")));
}

TEST(Flce_Info, SaysWhenThereIsNoCacheDirectory) {
    const TemporaryFolder folder;
    const auto fault = [](std::map<std::string, std::string> environment) {
        const nlohmann::json json = run_flce({"info", "--json"}, {.environment = std::move(environment)}).json();
        const nlohmann::json& found = json.at("cache").at("disk_fault");
        return found.is_null() ? std::string() : found.get<std::string>();
    };
    EXPECT_EQ(fault({}), "");
    EXPECT_EQ(fault({{"FLCE_CACHE_DIR", folder / "not there yet"}}), "");
    EXPECT_THAT(fault({{"FLCE_NO_DISK_CACHE", "1"}}), HasSubstr("FLCE_NO_DISK_CACHE"));
    std::ofstream(folder / "file") << "x";
    EXPECT_THAT(fault({{"FLCE_CACHE_DIR", folder / "file"}}), HasSubstr("not a directory"));
    EXPECT_THAT(fault({{"FLCE_CACHE_DIR", folder / "file/below"}}), HasSubstr("is not"));
    fs::create_directory(folder / "open");
    fs::permissions(folder / "open", fs::perms::all);
    EXPECT_THAT(fault({{"FLCE_CACHE_DIR", folder / "open"}}), HasSubstr("chmod go-w"));
    const ProcessResult text = run_flce({"info"}, {.environment = {{"FLCE_CACHE_DIR", folder / "open"}}});
    EXPECT_THAT(text.out, HasSubstr("is not used"));
}

TEST(Flce_UnknownVariable, IsMentioned) {
    const ProcessResult result =
        run_flce({"check", "--spec", kLayer, "--device", "cpu", "--num-tokens", "4"}, {.environment = {{"FLCE_STRCT", "1"}}});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_THAT(result.err, HasSubstr("FLCE_STRCT"));
    EXPECT_THAT(run_flce({"check", "--spec", kLayer, "--device", "cpu", "--num-tokens", "4"}).err, Not(HasSubstr("FLCE_")));
}

TEST(Utf8, BytesThatAreNone_AreWrittenAsNumbers) {
    EXPECT_EQ(as_utf8("plain caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"), "plain caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
    EXPECT_EQ(as_utf8("caf\xe9"), "caf\\xe9");
    EXPECT_EQ(as_utf8("\xff/x"), "\\xff/x");
    EXPECT_EQ(as_utf8("\xc0\x80"), "\\xc0\\x80");           // overlong
    EXPECT_EQ(as_utf8("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
    EXPECT_EQ(as_utf8("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
    EXPECT_EQ(as_utf8("\xe2\x82"), "\\xe2\\x82");  // cut off
}

}  // namespace
}  // namespace flce::test
