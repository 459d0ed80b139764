// flce::prewarm and flce::missing as library calls: workers are the flce command beside the library.
#include "flce/prewarm.hpp"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "flce/error.hpp"
#include "tests/cache/cache_test_support.hpp"

namespace flce {
namespace {

using test::TemporaryDirectory;

class PrewarmCall : public testing::Test {
protected:
    [[nodiscard]] PrewarmOptions options() const {
        return {.wants = {.specs = {parse_spec("D=64,V=500,dtype=fp32")}, .devices = {"x86-64-v3"}}, .cache_dir = folder_.path() / "cache"};
    }
    TemporaryDirectory folder_;
};

TEST_F(PrewarmCall, ForACpu_CompiledOnceAndNotMissingAfterwards) {
    const PrewarmOptions wanted = options();
    const MissingReport before = missing(wanted.wants, wanted.cache_dir);
    EXPECT_EQ(before.sets, 1U);
    ASSERT_EQ(before.missing.size(), 1U);
    EXPECT_EQ(nlohmann::json::parse(before.json()).at("missing").at(0).at("plan"), before.missing.front().plan);

    std::size_t done = 0;
    const PrewarmReport report = prewarm(wanted, {.progress = [&](const PrewarmProgress& at) { done = at.done; }});
    EXPECT_EQ(done, 1U);
    EXPECT_GT(report.compiled, 0);
    EXPECT_EQ(report.failed, 0);
    EXPECT_EQ(report.not_kept, 0U);
    EXPECT_EQ(nlohmann::json::parse(report.json()).at("compiled"), report.compiled);

    EXPECT_TRUE(missing(wanted.wants, wanted.cache_dir).missing.empty());
    EXPECT_EQ(prewarm(wanted).compiled, 0);
}

TEST_F(PrewarmCall, WithAPack_WritesIt) {
    PrewarmOptions wanted = options();
    wanted.pack = folder_.path() / "kernels.flcepack";
    const PrewarmReport report = prewarm(wanted);
    EXPECT_EQ(report.pack, wanted.pack);
    EXPECT_TRUE(std::filesystem::exists(wanted.pack));
}

TEST_F(PrewarmCall, StopIsSaid_EndsWithoutAPack) {
    PrewarmOptions wanted = options();
    wanted.pack = folder_.path() / "kernels.flcepack";
    const PrewarmReport report = prewarm(wanted, {.stop = [] { return true; }});
    EXPECT_TRUE(report.stopped);
    EXPECT_FALSE(std::filesystem::exists(wanted.pack));
}

TEST_F(PrewarmCall, CommandThatIsNone_SaysSo) {
    PrewarmOptions wanted = options();
    wanted.command = "/bin/false";
    EXPECT_THROW(static_cast<void>(prewarm(wanted)), EnvironmentError);
}

TEST_F(PrewarmCall, NothingAskedFor_Refused) {
    EXPECT_THROW(static_cast<void>(prewarm({})), ArgumentError);
    EXPECT_THROW(static_cast<void>(missing({.specs = {parse_spec("D=64,V=500,dtype=fp32")}})), ArgumentError);
}

}  // namespace
}  // namespace flce
