// The command's parts that need no process: progress, numbers, text, the demo's small model, the fp64 reference.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <new>
#include <stdexcept>

#include "autotune/buffer_sets.hpp"
#include "autotune/judge.hpp"
#include "autotune/reference.hpp"
#include "autotune/tuner.hpp"
#include "cli/command.hpp"
#include "cli/progress.hpp"
#include "cli/tune_report.hpp"
#include "demo/layer.hpp"
#include "demo/model.hpp"
#include "demo/text.hpp"
#include "generator/planner.hpp"
#include "runtime/layer/layer.hpp"
#include "runtime/layer/number_formats.hpp"
#include "runtime/layer/out_of_memory.hpp"
#include "tests/cli/process.hpp"

namespace flce::cli {
namespace {

using namespace flce::demo;

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ParseJson, NestedDeeply_CutWhereItIsDeepSoThatItCanBePrinted) {
    constexpr std::size_t kLevels = 200'000;
    EXPECT_EQ(parse_json(R"({"a":[[1]],"b":[2,3]})").dump(), R"({"a":[[1]],"b":[2,3]})");
    const Json json = parse_json("{\"a\":" + std::string(kLevels, '[') + std::string(kLevels, ']') + ",\"b\":1}");
    const Json copy = json;
    EXPECT_LT(copy.dump().size(), 100u);
    EXPECT_EQ(copy.at("b"), 1);
    EXPECT_TRUE(parse_json(std::string(kLevels, '[')).is_discarded());
}

std::string progress_output(bool terminal, int steps, int lines) {
    char* data = nullptr;
    std::size_t size = 0;
    std::FILE* stream = ::open_memstream(&data, &size);
    {
        Progress progress("work", steps,
                          {.stream = stream, .terminal = terminal ? 1 : 0, .redraw = std::chrono::milliseconds(0), .lines = lines});
        for (int i = 1; i <= steps; ++i) progress.update(i, "note");
        progress.finish();
    }
    std::fclose(stream);
    std::string text(data, size);
    std::free(data);
    return text;
}

TEST(Progress_OnATerminal, RedrawsOneLineAndEndsIt) {
    const std::string text = progress_output(true, 5, 10);
    EXPECT_THAT(text, HasSubstr("\r"));
    EXPECT_THAT(text, HasSubstr("100 %  5/5"));
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
    EXPECT_EQ(text.back(), '\n');
}

TEST(Progress_Elsewhere, PrintsAsManyPlainLinesAsAskedFor) {
    for (const int steps : {10, 100, 333}) {
        const std::string text = progress_output(false, steps, 10);
        EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 10) << steps;
        EXPECT_EQ(text.find('\r'), std::string::npos);
        EXPECT_THAT(text, HasSubstr(std::to_string(steps) + "/" + std::to_string(steps) + "  note"));
    }
    const std::string few = progress_output(false, 3, 10);
    EXPECT_EQ(std::count(few.begin(), few.end(), '\n'), 3);
}

TEST(RenderProgress_AnyWidth, NeverExceedsIt) {
    for (int width = 1; width < 100; ++width) {
        const std::string line = render_progress("title", 3, 7, "a rather long note about the work", width);
        EXPECT_LE(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; }), width);
    }
    EXPECT_THAT(render_progress("t", 0, 0, "", 80), HasSubstr("100 %"));
    EXPECT_THAT(render_progress("t", 9, 3, "", 80), HasSubstr("100 %"));
}

TEST(RenderProgress_Tuning, CountsCandidatesAndSecondsWithin80Columns) {
    for (const int budget : {60, 3600, 86400}) {
        const std::string note = tuning_note(1234, 123.4);
        const std::string line = render_progress("tune", budget, budget, note, 200, "s", 16);
        EXPECT_THAT(line, HasSubstr(fmt::format("{}/{} s  1234 candidates, best 123.4 ms", budget, budget)));
        EXPECT_EQ(line.find("measurements"), std::string::npos);
        EXPECT_LE(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; }), 79) << "nothing is cut off";
    }
    EXPECT_EQ(tuning_note(3, 0), "3 candidates");
}

Record record_of_ties() {
    Record record{.key = record_key(parse_spec("D=64,V=500,dtype=fp32"), describe_device("x86-64-v3"), {.num_tokens = 4096})};
    record.candidates["default,chunk=123456"] = {.rank = 0, .times_ms = {{"run", {1.01, 1.01, 1.01, 1.01, 1.01}}}};
    record.candidates["tie"] = {.rank = 1, .times_ms = {{"run", {1.0, 1.0, 1.0, 1.0, 1.0}}}};
    record.candidates["slow"] = {.rank = 2, .times_ms = {{"run", {2.0}}}};
    return record;
}

TEST(RecordTable_BestThatIsNotTheLeastMedian, SaysWhy) {
    Record record = record_of_ties();
    ASSERT_EQ(record.best_plan(), "default,chunk=123456");
    const std::string ties = record_table({"file", record}, 0);
    EXPECT_THAT(ties, HasSubstr("Medians within 2 % of the least are a tie"));
    EXPECT_THAT(ties, HasSubstr("*m     1.01 ms"));
    record.candidates["seldom"] = {.rank = 3, .times_ms = {{"run", {0.5}}}};
    EXPECT_THAT(record_table({"file", record}, 0), HasSubstr("A plan with fewer than 5 samples does not win"));
    record.candidates.erase("seldom");
    record.candidates.erase("tie");
    EXPECT_EQ(record_table({"file", record}, 0).find("tie"), std::string::npos);
}

TEST(HtmlReport_Tables, BreakBetweenNumbersAndMarkTheCostModelsChoice) {
    const std::string html = html_report({{"dir/file", record_of_ties(), "D=64,V=500,dtype=fp32,tied"}});
    EXPECT_EQ(html.find("break-all"), std::string::npos);
    EXPECT_THAT(html, HasSubstr("white-space:nowrap"));
    EXPECT_THAT(html, HasSubstr("default,<wbr>chunk=123456"));
    EXPECT_THAT(html, HasSubstr("the best, and the cost model's choice"));
    EXPECT_THAT(html, HasSubstr("<h2>D=64,<wbr>V=500,<wbr>dtype=fp32,<wbr>tied</h2>"));
    EXPECT_THAT(html, HasSubstr("are a tie"));
}

TEST(ParseBytes_Suffixes, AreBinary) {
    EXPECT_EQ(parse_bytes("--x", "0"), 0);
    EXPECT_EQ(parse_bytes("--x", "1048576"), 1 << 20);
    EXPECT_EQ(parse_bytes("--x", "64M"), 64 << 20);
    EXPECT_EQ(parse_bytes("--x", "1.5KiB"), 1536);
    EXPECT_EQ(parse_bytes("--x", "2gB"), std::int64_t{2} << 30);
    for (const char* bad : {"", "x", "-1", "1X", "1MM", "nan", "inf", "1e30", "64 M"})
        EXPECT_THROW(static_cast<void>(parse_bytes("--x", bad)), ArgumentError) << bad;
}

TEST(NumberFormats_EveryPattern, RoundTrips) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const auto half = static_cast<std::uint16_t>(bits);
        const float f = fp16_to_float(half);
        const float b = bf16_to_float(half);
        if (!std::isnan(f)) {
            EXPECT_EQ(float_to_fp16(f), half);
        } else {
            EXPECT_TRUE(std::isnan(fp16_to_float(float_to_fp16(f))));
        }
        if (!std::isnan(b)) {
            EXPECT_EQ(float_to_bf16(b), half);
        } else {
            EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(b))));
        }
    }
    EXPECT_EQ(fp16_to_float(0x3c00), 1.0F);
    EXPECT_EQ(fp16_to_float(0x0001), 0x1p-24F);
    EXPECT_EQ(fp16_to_float(0x7bff), 65504.0F);
}

TEST(NumberFormats_Halfway, RoundsToEven) {
    EXPECT_EQ(float_to_fp16(65519.9F), 0x7bff);
    EXPECT_EQ(float_to_fp16(65520.0F), 0x7c00);
    EXPECT_EQ(float_to_fp16(1.0F + 0x1p-11F), 0x3c00);
    EXPECT_EQ(float_to_fp16(1.0F + 3 * 0x1p-11F), 0x3c02);
    EXPECT_EQ(float_to_fp16(0x1p-25F), 0x0000);
    EXPECT_EQ(float_to_fp16(3 * 0x1p-25F), 0x0002);
    EXPECT_EQ(float_to_bf16(1.0F + 0x1p-8F), 0x3f80);
    EXPECT_EQ(float_to_bf16(1.0F + 3 * 0x1p-8F), 0x3f82);
    EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(SplitWords_Text, LosesNothing) {
    const std::string text = "int  main() {\n    return x_1 + 42;  // naïve\n}\n   ";
    std::string joined;
    for (const auto word : split_words(text)) {
        EXPECT_FALSE(word.empty());
        joined += word;
    }
    EXPECT_EQ(joined, text);
    EXPECT_THAT(split_words("a bc  d\n  e 12"), ElementsAre("a", " bc", " ", " d", "\n  ", "e", " 12"));
}

TEST(Vocabulary_AnyTextOfItsBytes, IsEncodedWithoutLoss) {
    const std::string text = "a the cat the dog the end cat.";
    const Vocabulary vocabulary(text, 1000);
    EXPECT_THAT(vocabulary.piece(0), " the");
    const std::string other = "eh the god tac.";
    std::string decoded;
    for (const auto token : vocabulary.encode(other)) decoded += vocabulary.piece(token);
    EXPECT_EQ(decoded, other);
    EXPECT_LE(Vocabulary(text, 15).size(), 15);
}

TEST(ReadCorpus_Folder, SkipsBuildTreesAndOtherFiles) {
    const test::TemporaryFolder folder;
    std::filesystem::create_directories(folder / "build");
    std::filesystem::create_directories(folder / "src");
    std::ofstream(folder / "src/b.md") << "two";
    std::ofstream(folder / "a.txt") << "one";
    std::ofstream(folder / "build/c.txt") << "no";
    std::ofstream(folder / "d.bin") << "no";
    const Corpus corpus = read_corpus(folder.path(), 1000);
    EXPECT_EQ(corpus.text, "one\ntwo\n");
    EXPECT_EQ(corpus.files, 2U);
    EXPECT_EQ(read_corpus(folder.path(), 2).text, "on");
    EXPECT_THROW(static_cast<void>(read_corpus(folder / "build/none", 10)), ArgumentError);
}

TEST(Multiply_RaggedShapes, MatchesTheDefinition) {
    for (const auto& [m, n, k] : {std::array<std::int64_t, 3>{1, 1, 1}, {5, 17, 9}, {70, 33, 3}, {4, 16, 128}}) {
        std::vector<float> a(static_cast<std::size_t>(m * k)), b(static_cast<std::size_t>(k * n)), c(static_cast<std::size_t>(m * n));
        fill_random(reinterpret_cast<std::byte*>(a.data()), DType::fp32, a.size(), 1, 1);
        fill_random(reinterpret_cast<std::byte*>(b.data()), DType::fp32, b.size(), 1, 2);
        multiply(m, n, k, a.data(), b.data(), c.data());
        const auto bt = transposed(k, n, b.data());
        for (std::int64_t i = 0; i < m; ++i) {
            for (std::int64_t j = 0; j < n; ++j) {
                double sum = 0;
                for (std::int64_t p = 0; p < k; ++p)
                    sum += static_cast<double>(a[static_cast<std::size_t>(i * k + p)]) * bt[static_cast<std::size_t>(j * k + p)];
                EXPECT_NEAR(c[static_cast<std::size_t>(i * n + j)], sum, 1e-4);
            }
        }
    }
}

TEST(ContextModel_Gradients, MatchCentralDifferences) {
    constexpr std::int64_t kVocab = 7, kHidden = 8, kContext = 2;
    const std::vector<std::int32_t> contexts{0, 1, 1, 1, 6, 0};
    ContextModel model({kVocab, kHidden, kContext}, 3);
    std::vector<float> embedding(kVocab * kHidden), upstream(3 * kHidden), hidden(3 * kHidden);
    model.initialize_embedding(embedding);
    fill_random(reinterpret_cast<std::byte*>(upstream.data()), DType::fp32, upstream.size(), 1, 9);
    const auto value = [&] {
        model.forward(embedding, contexts, hidden);
        double sum = 0;
        for (std::size_t i = 0; i < hidden.size(); ++i) sum += static_cast<double>(hidden[i]) * upstream[i];
        return sum;
    };
    static_cast<void>(value());
    std::vector<float> grad_embedding(embedding.size(), 0.5F);  // added to, not overwritten
    model.backward(upstream, grad_embedding);
    const auto expect_gradient = [&](float& parameter, double gradient) {
        const float kept = parameter;
        constexpr float kStep = 1e-2F;
        parameter = kept + kStep;
        const double up = value();
        parameter = kept - kStep;
        const double down = value();
        parameter = kept;
        EXPECT_NEAR(gradient, (up - down) / (2 * kStep), 2e-3);
    };
    for (std::size_t i = 0; i < embedding.size(); ++i) expect_gradient(embedding[i], grad_embedding[i] - 0.5);
    for (std::size_t i = 0; i < model.parameters().size(); ++i) expect_gradient(model.parameters()[i], model.gradients()[i]);
}

TEST(Reference_Gradients, MatchCentralDifferencesOfItsOwnLoss) {
    const Spec spec = parse_spec(
        "D=8,V=5,dtype=fp32,bias,logit_scale=1.5,softcap=3,label_smoothing=0.1,z_loss=0.01,class_weight,outputs=loss+lse+logprobs+entropy");
    RandomLayer layer = make_random_layer(spec, 6, {.seed = 4, .upstream = true});
    layer.target = {0, 4, -100, 2, 3, 1};
    const ReferenceProblem problem = reference_problem(spec, layer);
    const std::vector<std::int64_t> tokens{0, 1, 2, 3, 4, 5};
    const auto objective = [&] {
        const Reference reference(problem, tokens);
        double sum = 0;
        for (std::size_t i = 0; i < 6; ++i) {
            const ReferenceToken& t = reference.token(i);
            sum += (t.loss - t.z_loss) / reference.loss_divisor() + t.z_loss / reference.z_loss_divisor();
            sum += layer.grad_lse[i] * t.lse + layer.grad_logprobs[i] * t.logprob + layer.grad_entropy[i] * t.entropy;
        }
        return sum;
    };
    const auto numeric = [&](std::vector<std::byte>& storage, std::size_t i) {
        auto* values = reinterpret_cast<float*>(storage.data());
        const float kept = values[i];
        values[i] = kept + 0x1p-10F;
        const float up_at = values[i];
        const double up = objective();
        values[i] = kept - 0x1p-10F;
        const double down = objective();
        const double step = static_cast<double>(up_at) - values[i];
        values[i] = kept;
        return (up - down) / step;
    };
    const Reference reference(problem, tokens);
    for (std::size_t i = 0; i < 48; ++i) EXPECT_NEAR(reference.grad_hidden(i / 8)[i % 8], numeric(layer.hidden, i), 1e-5);
    std::vector<double> row(8);
    for (std::size_t j = 0; j < 5; ++j) {
        const double bias = reference.grad_weight_row(static_cast<std::int64_t>(j), row);
        EXPECT_NEAR(bias, numeric(layer.bias, j), 1e-5);
        for (std::size_t k = 0; k < 8; ++k) EXPECT_NEAR(row[k], numeric(layer.weight, j * 8 + k), 1e-5);
    }
}

TEST(DemoLayer_FewerTokens, MayNeedMoreWorkspaceThanTheMost) {
    SessionOptions options;
    options.device = "cpu";
    options.cache_dir = test::shared_cache();
    options.scratch_bytes = 1 << 20;
    Session session(options);
    const auto kernel = session.get_kernel(parse_spec("D=16,V=1068,dtype=fp32,tied"));
    std::int64_t fewer = 0;
    std::int64_t most = 0;
    for (std::int64_t n = 64; n < 2048 && most == 0; n += 16) {
        if (kernel->workspace_bytes(n + 16) >= kernel->workspace_bytes(n)) continue;
        fewer = n;
        most = n + 16;
    }
    ASSERT_GT(most, 0) << "workspace grows with the number of tokens: another shape is needed here";
    OutputLayer layer(kernel, most);
    std::fill(layer.embedding().begin(), layer.embedding().end(), 0.0F);
    std::fill(layer.grad_embedding().begin(), layer.grad_embedding().end(), 0.0F);
    layer.embedding_changed();
    const std::vector<float> hidden(static_cast<std::size_t>(fewer) * 16, 0.5F);
    const std::vector<std::int32_t> targets(static_cast<std::size_t>(fewer), 3);
    std::vector<float> grad_hidden(hidden.size());
    // Every word is as likely as any other.
    EXPECT_NEAR(layer.loss_and_gradients(hidden, targets, grad_hidden), std::log(1068.0), 1e-5);
}

std::string allocation_error(const char* buffer, double bytes, const std::function<int()>& make) {
    try {
        static_cast<void>(allocated(buffer, bytes, {DeviceKind::cuda, 1}, make));
    } catch (const OutOfMemory& error) {
        return error.what();
    }
    return "";
}

TEST(Allocated_NoMemory, NamesTheBufferAndWhatNeedsLess) {
    constexpr int kOutOfMemory = 2;
    const auto on_device = []() -> int { throw DeviceError("cuMemAlloc of 2048 bytes failed", "cuMemAlloc", kOutOfMemory); };
    EXPECT_EQ(allocation_error("grad_weight [4, 128]", 2048, on_device),
              "out of memory on cuda:1: grad_weight [4, 128] takes 2.0 KiB (2048 bytes); a smaller vocab_size or hidden_size needs less");
    EXPECT_THAT(allocation_error("workspace", 1, []() -> int { throw std::bad_alloc(); }), HasSubstr("less scratch need less"));
    EXPECT_THAT(allocation_error("retained", 1, []() -> int { throw std::length_error(""); }), HasSubstr("a smaller buffer"));
    EXPECT_THAT(allocation_error("lse [8]", 1e30, []() -> int { return 0; }), HasSubstr("fewer tokens need less"));
    EXPECT_EQ(allocation_error("lse [8]", 32, []() -> int { return 0; }), "");
    constexpr int kIllegalAddress = 700;  // is no lack of memory
    const auto at_fault = []() -> int { throw DeviceError("", "cuMemAlloc", kIllegalAddress); };
    EXPECT_THROW(static_cast<void>(allocated("lse", 32, {}, at_fault)), DeviceError);
}

TEST(ErrorNorm_Extremes, AreReported) {
    ErrorNorm exact;
    exact.add(0, 0);
    EXPECT_EQ(exact.relative(), 0);
    ErrorNorm absent;
    absent.add(1, 0);
    EXPECT_TRUE(std::isinf(absent.relative()));
    ErrorNorm broken;
    broken.add(std::nan(""), 1);
    EXPECT_TRUE(std::isnan(broken.relative()));
}

constexpr std::int64_t kMiB = 1 << 20;

TEST(BufferSets, Count_TurnsTouchThreeTimesTheCache) {
    const auto count = [](std::int64_t cache_mib, std::int64_t set_bytes) {
        return static_cast<std::int64_t>(buffer_set_count(cache_mib * kMiB, set_bytes, set_bytes));
    };
    for (const std::int64_t cache_mib : {2, 32, 50, 60}) {
        for (const std::int64_t set_bytes : {kMiB / 2, kMiB, 5 * kMiB, 19 * kMiB, 100 * kMiB, 1000 * kMiB}) {
            const std::int64_t sets = count(cache_mib, set_bytes);
            EXPECT_GE(sets * set_bytes, 3 * cache_mib * kMiB) << cache_mib << " " << set_bytes;
            EXPECT_TRUE(sets == 1 || (sets - 1) * set_bytes < 3 * cache_mib * kMiB) << "no more than that takes";
        }
    }
    EXPECT_EQ(count(60, 5 * kMiB), 36);
}

TEST(BufferSets, Count_BoundedByBytes) {
    EXPECT_EQ(buffer_set_count(60 * kMiB, 1, 1), 512U);
    EXPECT_EQ(buffer_set_count(4096 * kMiB, 100 * kMiB, 200 * kMiB), 10U);
    EXPECT_EQ(buffer_set_count(4096 * kMiB, 100 * kMiB, 5000 * kMiB), 1U);
    EXPECT_EQ(buffer_set_count(60 * kMiB, 0, 0), 512U);
    EXPECT_EQ(buffer_set_count(0, kMiB, kMiB), 1U);
}

TEST(BufferSets, Made_ForwardAloneNeedsMoreOfThem) {
    Device device = describe_device("znver4");
    device.cpu.l3_bytes = kMiB;
    device.cpu.l2_bytes = 0;
    const Spec spec = parse_spec("D=64,V=1000,dtype=fp32").normalized();
    const RandomLayer layer = make_random_layer(spec, 24, {.seed = 1});
    constexpr std::int64_t kInputBytes = 4 * 64 * (1000 + 24);  // 256 KiB
    const auto both = make_buffer_sets(spec, layer, device, {}, Turn::both);
    EXPECT_EQ(both.size(), 3 * kMiB / (2 * kInputBytes));
    const auto forward = make_buffer_sets(spec, layer, device, {}, Turn::forward_or_both);
    EXPECT_EQ(forward.size(), 3 * kMiB / kInputBytes);
    EXPECT_NE(forward[0].inputs.weight.view.data, forward[11].inputs.weight.view.data);
    EXPECT_EQ(forward[11].inputs.weight.to_host<float>(), forward[0].inputs.weight.to_host<float>());
}

TEST(TunedRequest, IsThatOfACallWithTheLimit) {
    const Spec spec = parse_spec("D=4096,V=128256,dtype=bf16").normalized();
    const Device h200 = describe_device("h200");
    Session session({.device = "cpu", .use_records = false});
    const auto request = [&](std::int64_t limit_mib, bool retain) {
        const TuneOptions options{.workspace_limit_bytes = limit_mib << 20, .retain = retain};
        return tuned_request(options, session, spec, h200, 8192);
    };
    const PlanRequest none = request(0, true);
    EXPECT_EQ(none.workspace_limit_bytes, 0);
    EXPECT_EQ(none.scratch_bytes, kDefaultScratchBytes);
    const PlanRequest large = request(4096, true);
    EXPECT_EQ(large.workspace_limit_bytes, std::int64_t{4} << 30);
    EXPECT_EQ(large.num_tokens, 8192);
    EXPECT_TRUE(retains_apart(spec, h200, large));
    EXPECT_FALSE(retains_apart(spec, h200, request(4096, false)));
    EXPECT_EQ(request(160, true).scratch_bytes, 32 << 20) << "what grad_hidden's sum leaves";
}

TEST(TunedTokens, BucketsOnce) {
    TuneOptions options;
    EXPECT_EQ(tuned_tokens(options), std::vector<std::int64_t>{4096});
    options.num_tokens = {8192, 60, 64, 8000};
    EXPECT_EQ(tuned_tokens(options), (std::vector<std::int64_t>{8192, 64}));
}

}  // namespace
}  // namespace flce::cli
