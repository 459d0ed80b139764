// flce::tune as a library call: workers are the flce command beside the library.
#include "flce/tune.hpp"

#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "flce/error.hpp"
#include "tests/cache/cache_test_support.hpp"

namespace flce {
namespace {

using test::TemporaryDirectory;

constexpr const char* kSmallLayer = "D=32,V=300,dtype=fp32";

class TuneCall : public testing::Test {
protected:
    [[nodiscard]] TuneOptions options() const {
        return {.specs = {parse_spec(kSmallLayer)},
                .num_tokens = {60},
                .session = {.device = "cpu", .cache_dir = folder_.path() / "cache", .threads = 1},
                .budget_s = 20,
                .coordinates = {"chunk"},
                .records_dir = folder_.path() / "records"};
    }
    TemporaryDirectory folder_;
};

TEST_F(TuneCall, SmallLayer_MeasuredKeptAndSaidAsTheCommandSaysIt) {
    std::size_t told = 0;
    const TuneReport report = tune(options(), {.progress = [&](const TuneProgress& at) {
                                       EXPECT_EQ(at.spec, parse_spec(kSmallLayer).normalized().text());
                                       EXPECT_EQ(at.num_tokens, 64);
                                       ++told;
                                   }});
    EXPECT_GT(told, 2U);
    EXPECT_FALSE(report.stopped);
    EXPECT_TRUE(report.errors.empty());
    ASSERT_EQ(report.layers.size(), 1U);
    const TunedLayer& layer = report.layers.front();
    EXPECT_TRUE(layer.complete);
    EXPECT_GT(layer.measured, 1U);
    EXPECT_GT(layer.best_ms, 0);
    EXPECT_TRUE(std::filesystem::exists(layer.record));
    const auto json = nlohmann::json::parse(report.json);
    EXPECT_EQ(json.at("best_plan"), layer.best_plan);
    EXPECT_EQ(json.at("record"), layer.record.string());
    EXPECT_EQ(json.at("measured"), layer.measured);
    EXPECT_EQ(json.at("items").size(), 1U);
    // Measurements are found again.
    EXPECT_EQ(tune(options()).layers.at(0).measured, 0U);
}

TEST_F(TuneCall, StopIsSaid_EndsWithWhatThereIs) {
    const TuneReport report = tune(options(), {.stop = [] { return true; }});
    EXPECT_TRUE(report.stopped);
    EXPECT_TRUE(report.layers.empty());
}

TEST_F(TuneCall, OptionsThatCannotBeMet_Refused) {
    const auto refused = [&](auto&& change) {
        TuneOptions given = options();
        change(given);
        EXPECT_THROW(static_cast<void>(tune(given)), ArgumentError);
    };
    refused([](TuneOptions& given) { given.specs.clear(); });
    refused([](TuneOptions& given) { given.coordinates = {"colour"}; });
    refused([](TuneOptions& given) { given.budget_s = 0; });
    refused([](TuneOptions& given) { given.exhaustive = 1'000'000; });
}

TEST_F(TuneCall, RecordsThatCannotBeWritten_SaidBeforeAnythingIsMeasured) {
    TuneOptions given = options();
    std::ofstream(folder_.path() / "file").close();
    given.records_dir = folder_.path() / "file" / "records";
    bool begun = false;
    EXPECT_THAT([&] { (void)tune(given, {.progress = [&](const TuneProgress&) { begun = true; }}); },
                testing::ThrowsMessage<EnvironmentError>(testing::HasSubstr(given.records_dir.string())));
    EXPECT_FALSE(begun);
}

TEST_F(TuneCall, CommandThatIsNoneOrAnother_SaysSo) {
    TuneOptions given = options();
    given.command = folder_.path() / "flce";
    EXPECT_THROW(static_cast<void>(tune(given)), EnvironmentError);
    given.command = "/bin/false";
    EXPECT_THROW(static_cast<void>(tune(given)), EnvironmentError);
    EXPECT_FALSE(std::filesystem::exists(options().records_dir));
}

// The layers whose records ship, in the order of tools/tune_models.sh, which measures them.
TEST(WellKnownLayers, AreThoseThatTheScriptMeasures) {
    std::ifstream file(FLCE_SOURCE_DIR "/tools/tune_models.sh");
    std::vector<Spec> measured;
    for (std::string line; std::getline(file, line);) {
        const std::size_t at = line.find(" D=");
        if (at != std::string::npos) measured.push_back(parse_spec(line.substr(at + 1)).normalized());
    }
    EXPECT_EQ(well_known_layers(), measured);
}

}  // namespace
}  // namespace flce
