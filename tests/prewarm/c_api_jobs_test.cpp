// The C ABI's long calls: options and results are JSON, callbacks are C functions.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <string>

#include "flce/flce.h"
#include "tests/cache/cache_test_support.hpp"

namespace flce {
namespace {

using nlohmann::json;
using testing::HasSubstr;

struct Told {
    std::string report;
    int progress = 0;
    bool stop = false;

    [[nodiscard]] flce_job job() {
        flce_job job = FLCE_JOB_INIT;
        job.user = this;
        job.progress = [](void* user, const char* text) {
            EXPECT_TRUE(json::parse(text).is_object());
            ++static_cast<Told*>(user)->progress;
        };
        job.stop = [](void* user) { return static_cast<std::int32_t>(static_cast<Told*>(user)->stop); };
        job.report = [](void* user, const char* text) { static_cast<Told*>(user)->report = text; };
        return job;
    }
};

class CApiJobs : public testing::Test {
protected:
    [[nodiscard]] std::string options(json more) const {
        more["cache_dir"] = (folder_.path() / "cache").string();
        return more.dump();
    }
    test::TemporaryDirectory folder_;
};

TEST_F(CApiJobs, Prewarm_ReportsAndNothingIsMissingAfterwards) {
    const std::string wanted = options({{"specs", {"D=64,V=500,dtype=fp32", {{"D", 32}, {"V", 300}}}}, {"devices", {"x86-64-v3"}}});
    Told before;
    flce_job job = before.job();
    ASSERT_EQ(flce_missing_sets(wanted.c_str(), &job), FLCE_OK) << flce_last_error();
    EXPECT_EQ(json::parse(before.report).at("missing").size(), 2U);
    Told told;
    job = told.job();
    ASSERT_EQ(flce_prewarm_sets(wanted.c_str(), &job), FLCE_OK) << flce_last_error();
    EXPECT_GT(told.progress, 0);
    EXPECT_EQ(json::parse(told.report).at("failed"), 0);
    Told after;
    job = after.job();
    ASSERT_EQ(flce_missing_sets(wanted.c_str(), &job), FLCE_OK) << flce_last_error();
    EXPECT_TRUE(json::parse(after.report).at("missing").empty());
}

TEST_F(CApiJobs, Tune_StopsWhenAskedToAndReports) {
    const std::string wanted = options({{"specs", {"D=32,V=300,dtype=fp32"}}, {"device", "cpu"}, {"records_dir", folder_.path().string()}});
    Told told{.stop = true};
    const flce_job job = told.job();
    ASSERT_EQ(flce_tune(wanted.c_str(), &job), FLCE_OK) << flce_last_error();
    EXPECT_TRUE(json::parse(told.report).at("items").empty());
}

TEST_F(CApiJobs, BadOptions_NamedAndNothingIsReported) {
    const auto refused = [](flce_status status, flce_status expected, const char* text) {
        EXPECT_EQ(status, expected);
        EXPECT_THAT(flce_last_error(), HasSubstr(text));
    };
    refused(flce_tune("{", nullptr), FLCE_ERROR_ARGUMENT, "JSON");
    refused(flce_tune(R"({"colour": 1, "specs": []})", nullptr), FLCE_ERROR_ARGUMENT, "colour");
    refused(flce_tune(R"({"budget_s": "long"})", nullptr), FLCE_ERROR_ARGUMENT, "budget_s");
    refused(flce_tune(R"({"specs": ["D=banana"]})", nullptr), FLCE_ERROR_SPEC, "banana");
    refused(flce_prewarm_sets(R"({"specs": ["D=64,V=500"]})", nullptr), FLCE_ERROR_ARGUMENT, "device");
    flce_job job = FLCE_JOB_INIT;
    job.struct_size = 0;
    refused(flce_missing_sets(nullptr, &job), FLCE_ERROR_ARGUMENT, "struct_size");
}

}  // namespace
}  // namespace flce
