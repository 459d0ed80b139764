// Consistency of flce explain: over specs, devices, limits, numbers of tokens and threads.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <regex>

#include "runtime/explained_call.hpp"
#include "tests/cli/process.hpp"

namespace flce::cli {
namespace {

using test::run_flce;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kTokens[] = {0, 60, 1000, 4096, 5000, 100'000};

const std::vector<const char*>& specs() {
    static const std::vector<const char*> all = {"D=4096,V=128256,dtype=bf16", "D=2048,V=151936,dtype=bf16,tied",
                                                 "D=768,V=50257,dtype=fp32", "D=2304,V=32000,dtype=fp16,softcap=30,bias",
                                                 "D=64,V=500,dtype=bf16,layout=hidden_major"};
    return all;
}

void expect_consistent(const CallQuestion& question, const ExplainedCall& call) {
    EXPECT_EQ(call.point.seconds(), call.point.forward.seconds + call.point.backward.seconds);
    EXPECT_TRUE(question.workspace_limit_bytes == 0 || call.point.workspace_bytes <= question.workspace_limit_bytes);
    ASSERT_FALSE(call.curve.empty());
    for (std::size_t i = 1; i < call.curve.size(); ++i) {
        EXPECT_LE(call.curve[i - 1].workspace_bytes, call.curve[i].workspace_bytes);
        EXPECT_GE(call.curve[i - 1].seconds(), call.curve[i].seconds()) << "less memory is never quicker: row " << i;
    }
    if (call.place) {
        EXPECT_EQ(call.curve.at(*call.place).plan, call.choice.plan);
        EXPECT_EQ(call.curve[*call.place].seconds(), call.point.seconds());
        EXPECT_EQ(call.curve[*call.place].workspace_bytes, call.point.workspace_bytes);
    } else {
        const auto better = [&](const CallPoint& p) {
            return p.workspace_bytes <= call.point.workspace_bytes && p.seconds() < call.point.seconds();
        };
        EXPECT_TRUE(std::ranges::any_of(call.curve, better)) << "why it has no place";
    }
}

TEST(ExplainedCall_AnySpecDeviceLimitAndTokens, IsConsistent) {
    for (const char* text : specs()) {
        for (const char* device : {"h100", "a100", "rtx4090", "b200", "znver4"}) {
            for (const auto& [limit, keep] :
                 {std::pair{std::int64_t{0}, Keep::automatic}, {0, Keep::nothing}, {2LL << 30, Keep::automatic}, {8LL << 30, Keep::all}}) {
                if (limit == 8LL << 30 && std::string_view(device) != "h100") continue;
                double last = 0;
                for (const std::int64_t tokens : kTokens) {
                    SCOPED_TRACE(
                        fmt::format("{} on {}, limit {}, keep {}, {} tokens", text, device, limit, static_cast<int>(keep), tokens));
                    const CallQuestion question{.spec = parse_spec(text),
                                                .device = describe_device(device),
                                                .num_tokens = keep == Keep::all ? std::min<std::int64_t>(tokens, 4096) : tokens,
                                                .workspace_limit_bytes = limit,
                                                .keep = keep};
                    const ExplainedCall call = explained_call(question);
                    expect_consistent(question, call);
                    EXPECT_GE(call.point.seconds(), last) << "more tokens take no less";
                    last = call.point.seconds();
                }
                EXPECT_GT(last, 0);
            }
        }
    }
}

TEST(ExplainedCall_FewerThreads, TakeLonger) {
    for (const char* text : specs()) {
        double last = 0;
        for (const int threads : {64, 16, 4, 1}) {
            const ExplainedCall call = explained_call({.spec = parse_spec(text), .device = describe_device("znver4"), .threads = threads});
            EXPECT_GE(call.point.seconds(), last) << text << ' ' << threads;
            last = call.point.seconds();
        }
        const ExplainedCall all = explained_call({.spec = parse_spec(text), .device = describe_device("znver4")});
        const ExplainedCall more = explained_call({.spec = parse_spec(text), .device = describe_device("znver4"), .threads = 4096});
        EXPECT_EQ(all.point.seconds(), more.point.seconds()) << "more threads than cores take turns";
    }
}

TEST(ExplainedCall_Measured, OnlyOfExactlyThisCall) {
    const auto at = [](std::int64_t tokens, std::int64_t limit = 0, Keep keep = Keep::automatic, const char* device = "h100") {
        return explained_call({.spec = parse_spec("D=4096,V=128256,dtype=bf16"),
                               .device = describe_device(device),
                               .num_tokens = tokens,
                               .workspace_limit_bytes = limit,
                               .keep = keep});
    };
    for (const std::int64_t tokens : {4096, 8192}) {
        const ExplainedCall call = at(tokens);
        ASSERT_TRUE(call.measured) << "the library brings that record";
        EXPECT_EQ(call.measured->num_tokens, tokens);
        EXPECT_GT(call.measured->ms, 0);
        EXPECT_THAT(call.choice.source, AllOf(HasSubstr("measured"), HasSubstr(call.measured->origin)));
    }
    for (const std::int64_t tokens : {1, 4095, 5000, 6000, 16384}) EXPECT_FALSE(at(tokens).measured) << tokens;
    EXPECT_FALSE(at(4096, 4LL << 30).measured) << "with such a limit nothing was measured";
    EXPECT_FALSE(at(4096, 0, Keep::nothing).measured) << "what was measured retained";
    EXPECT_FALSE(at(4096, 0, Keep::automatic, "a100").measured);
}

TEST(ExplainedCall_Divergence, IsLentTheGradientsMemory) {
    const auto of = [](const char* spec, Keep keep = Keep::automatic, std::int64_t limit = 0) {
        return explained_call({.spec = parse_spec(spec), .device = describe_device("h200"), .workspace_limit_bytes = limit, .keep = keep});
    };
    const ExplainedCall plain = of("D=2048,V=151936,teacher_hidden_size=4096");
    EXPECT_EQ(plain.point.kept.bytes, 0);
    EXPECT_NEAR(plain.point.kept.part, 0.25, 0.005) << "2 · 2048 bytes of a class, of 4 for each of 4096 tokens";
    EXPECT_EQ(plain.point.workspace_bytes, (64 << 20) + 4 * 4096 * 2048);
    const ExplainedCall mixture = of("D=2048,V=151936,teacher_hidden_size=4096,divergence_beta=0.5");
    EXPECT_LT(mixture.point.kept.part, plain.point.kept.part) << "its second walk needs sums beside them";
    EXPECT_GT(mixture.point.kept.part, 0.15);
    EXPECT_EQ(of("D=2048,V=151936,teacher_hidden_size=4096", Keep::nothing).point.kept.part, 0);
    EXPECT_GT(of("D=2048,V=151936,teacher_hidden_size=4096", Keep::automatic, 4LL << 30).point.kept.bytes, 0) << "memory of its own";
    for (const char* other : {"D=2048,V=151936,teacher_hidden_size=4096,grad_weight_mode=accumulate",
                              "D=2048,V=151936,teacher_hidden_size=4096,layout=hidden_major"}) {
        EXPECT_EQ(of(other).point.kept.part, 0) << other;
        EXPECT_THROW((void)of(other, Keep::grad_weight), ArgumentError) << other;
    }
}

/// Milliseconds of "3.42 ms", "812 µs", "1.25 s".
double milliseconds_of(const std::string& number, const std::string& unit) {
    const double factor = unit == "s" ? 1e3 : unit == "ms" ? 1 : unit == "µs" ? 1e-3 : 1e-6;
    return std::stod(number) * factor;
}

TEST(FlceExplain_Times, AreOneSourcesAndAddUp) {
    const std::regex modelled(R"(modelled +forward ([0-9.]+) (\S+), backward ([0-9.]+) (\S+), forward \+ backward ([0-9.]+) (\S+)\n)");
    for (const char* tokens : {"100", "1000", "4096", "5000"}) {
        for (const char* device : {"h100", "znver4"}) {
            const auto result = run_flce({"explain", "--spec", "D=4096,V=128256,dtype=bf16", "--device", device, "-N", tokens});
            ASSERT_EQ(result.exit_code, 0) << result.err;
            EXPECT_EQ(result.err, "");
            std::smatch match;
            const bool is_modelled = std::regex_search(result.out, match, modelled);
            EXPECT_NE(is_modelled, result.out.find("\nmeasured  ") != std::string::npos) << result.out;
            EXPECT_EQ(is_modelled, std::string(tokens) != "4096" || std::string(device) != "h100") << result.out;
            EXPECT_THAT(result.out, Not(HasSubstr("expected at")));
            if (!is_modelled) {
                EXPECT_THAT(result.out, HasSubstr("to this call's time"));  // and no second number of milliseconds
                EXPECT_EQ(result.out.find(" ms"), result.out.rfind(" ms")) << result.out;
                continue;
            }
            const double forward = milliseconds_of(match[1], match[2]);
            const double backward = milliseconds_of(match[3], match[4]);
            const double both = milliseconds_of(match[5], match[6]);
            EXPECT_NEAR(forward + backward, both, 0.01 * both) << result.out;
        }
    }
}

TEST(FlceExplain_Times, AreGuessesForGpusThatNobodyHasMeasured) {
    const std::vector<std::string> layer{"explain", "--spec", "D=4096,V=128256,dtype=bf16", "--device"};
    const auto asked = [&](const char* device, std::vector<std::string> more) {
        more.insert(more.begin(), layer.begin(), layer.end());
        more.insert(more.begin() + std::ssize(layer), device);
        return run_flce(more, {.environment = {{"FLCE_NO_RECORDS", "1"}}});
    };
    for (const char* device : {"a100", "rtx 4090", "sm_88"}) {
        const std::string said = asked(device, {}).out;
        EXPECT_THAT(said, AllOf(HasSubstr("\nguessed     forward "), HasSubstr("guessed by the cost model"), Not(HasSubstr("modelled"))));
        EXPECT_EQ(asked(device, {"--json"}).json().at("guessed"), true);
    }
    EXPECT_THAT(asked("h100", {}).out, AllOf(HasSubstr("\nmodelled    forward "), Not(HasSubstr("guessed"))));
    EXPECT_EQ(asked("h100", {"--json"}).json().at("guessed"), false);
}

TEST(FlceExplain_Threads, OfTheEnvironmentOrTheOption) {
    const auto seconds = [](const char* environment, const std::vector<std::string>& more) {
        std::vector<std::string> arguments{"explain", "--spec", "D=768,V=50257,dtype=fp32", "--device", "znver4", "--json"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        const auto json = run_flce(arguments, {.environment = {{"FLCE_NUM_THREADS", environment}}}).json();
        EXPECT_EQ(json.at("times"), "cost model");
        EXPECT_NEAR(json.at("forward_ms").get<double>() + json.at("backward_ms").get<double>(),
                    json.at("forward_backward_ms").get<double>(), 1e-6);
        return std::pair(json.at("threads").get<int>(), json.at("forward_backward_ms").get<double>());
    };
    const auto [all, all_ms] = seconds("", {});
    const auto [one, one_ms] = seconds("1", {});
    EXPECT_GT(all, 1);
    EXPECT_EQ(one, 1);
    EXPECT_GT(one_ms, 1.5 * all_ms);
    EXPECT_EQ(seconds("", {"--threads", "1"}), seconds("1", {}));
    EXPECT_EQ(seconds("2", {"--threads", "1"}), seconds("1", {})) << "the option wins";
}

}  // namespace
}  // namespace flce::cli
