// flce run on files: its numbers against fp64, every refusal of a bad file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>

#include "autotune/judge.hpp"
#include "autotune/reference.hpp"
#include "cli/safetensors.hpp"
#include "runtime/layer/layer.hpp"
#include "runtime/layer/number_formats.hpp"
#include "tests/cli/process.hpp"

namespace flce::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const char* dtype_name(DType dtype) { return dtype == DType::fp32 ? "F32" : dtype == DType::bf16 ? "BF16" : "F16"; }

/// A random layer in a file, and what fp64 makes of it.
class Layer {
public:
    Layer(const std::string& spec_text, std::int64_t num_tokens, bool wide_target, Reduction reduction = Reduction::mean)
        : spec_(parse_spec(spec_text)), num_tokens_(num_tokens), reduction_(reduction) {
        data_ = make_random_layer(spec_, num_tokens, {.seed = 11, .ignore_index = -7, .ignored = 0.3});
        std::vector<std::int32_t> narrow(data_.target.begin(), data_.target.end());
        const auto target = wide_target ? std::as_bytes(std::span(data_.target)) : std::as_bytes(std::span(narrow));
        std::vector<cli::TensorToWrite> tensors{
            {"hidden", dtype_name(spec_.dtype), {num_tokens, spec_.hidden_size}, data_.hidden},
            {"weight", dtype_name(spec_.dtype), weight_shape(spec_), data_.weight},
            {"target", wide_target ? "I64" : "I32", {num_tokens}, target},
        };
        if (spec_.bias) tensors.push_back({"bias", dtype_name(spec_.dtype), {spec_.vocab_size}, data_.bias});
        if (spec_.class_weight)
            tensors.push_back({"class_weight", "F32", {spec_.vocab_size}, std::as_bytes(std::span(data_.class_weight))});
        if (spec_.teacher_top_k > 0) {
            const std::vector<std::int64_t> shape{num_tokens, spec_.teacher_top_k};
            tensors.push_back({"teacher_ids", "I64", shape, std::as_bytes(std::span(data_.teacher_ids))});
            tensors.push_back({"teacher_probs", "F32", shape, std::as_bytes(std::span(data_.teacher_probs))});
        }
        cli::write_safetensors(folder_ / "in", tensors);
    }

    ProcessResult run(const std::vector<std::string>& more = {}) const {
        std::vector<std::string> arguments{"run", "--device", "cpu",     "--spec",       spec_.text(), "--ignore-index",
                                           "-7",  "--json",   "--input", folder_ / "in", "--out",      folder_ / "out"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        return run_flce(arguments);
    }

    flce::Reference reference() const {
        std::vector<std::int64_t> tokens(static_cast<std::size_t>(num_tokens_));
        std::iota(tokens.begin(), tokens.end(), 0);
        return flce::Reference({.spec = spec_,
                                .num_tokens = num_tokens_,
                                .hidden = data_.hidden.data(),
                                .weight = data_.weight.data(),
                                .bias = data_.bias.data(),
                                .class_weight = data_.class_weight,
                                .target = data_.target,
                                .teacher_ids = data_.teacher_ids,
                                .teacher_probs = data_.teacher_probs,
                                .ignore_index = -7,
                                .reduction = reduction_},
                               tokens);
    }

    /// A tensor of the output as doubles.
    std::vector<double> output(const std::string& name) const {
        const cli::SafetensorsSet set({folder_ / "out"});
        const auto found = set.get(name);
        const DType dtype = found.entry->dtype == "F32" ? DType::fp32 : found.entry->dtype == "BF16" ? DType::bf16 : DType::fp16;
        std::vector<double> values(found.bytes.size() / element_bytes(dtype));
        to_real(found.bytes.data(), dtype, values.data(), values.size());
        return values;
    }

    void expect_right(double bound) const {
        const flce::Reference reference = this->reference();
        const auto d = static_cast<std::size_t>(spec_.hidden_size);
        const auto lse = output("lse"), grad_hidden = output("grad_hidden"), grad_weight = output("grad_weight");
        ErrorNorm lse_norm, hidden_norm, weight_norm, bias_norm;
        for (std::size_t i = 0; i < lse.size(); ++i) {
            lse_norm.add(lse[i], reference.token(i).lse);
            for (std::size_t k = 0; k < d; ++k) hidden_norm.add(grad_hidden[i * d + k], reference.grad_hidden(i)[k]);
        }
        const auto grad_bias = spec_.bias ? output("grad_bias") : std::vector<double>{};
        std::vector<double> row(d);
        for (std::size_t j = 0; j < static_cast<std::size_t>(spec_.vocab_size); ++j) {
            const double bias = reference.grad_weight_row(static_cast<std::int64_t>(j), row);
            if (spec_.bias) bias_norm.add(grad_bias[j], bias);
            for (std::size_t k = 0; k < d; ++k) {
                const bool vocab_major = spec_.layout == WeightLayout::vocab_major;
                weight_norm.add(grad_weight[vocab_major ? j * d + k : k * static_cast<std::size_t>(spec_.padded_vocab_size) + j], row[k]);
            }
        }
        EXPECT_LT(lse_norm.relative(), 1e-5);
        EXPECT_LT(hidden_norm.relative(), bound);
        EXPECT_LT(weight_norm.relative(), bound);
        EXPECT_LT(bias_norm.relative(), bound);
    }

    std::int64_t valid() const {
        return std::count_if(data_.target.begin(), data_.target.end(), [](std::int64_t label) { return label != -7; });
    }
    double mean_loss() const {
        const flce::Reference r = reference();
        double sum = 0;
        for (std::size_t i = 0; i < r.tokens().size(); ++i) sum += r.token(i).loss / r.loss_divisor();
        return sum;
    }

    TemporaryFolder folder_;
    Spec spec_;
    std::int64_t num_tokens_;
    Reduction reduction_;
    RandomLayer data_;
};

TEST(FlceRun_Variants, MatchFp64) {
    const struct {
        const char* spec;
        bool wide;
        double bound;
    } cases[] = {{"D=32,V=99,dtype=fp32", true, 2e-6},
                 {"D=32,V=99,dtype=fp32", false, 2e-6},
                 {"D=32,V=99,dtype=fp32,layout=hidden_major,bias", false, 2e-6},
                 {"D=32,V=99,padded_vocab_size=112,dtype=bf16,bias,softcap=20", true, 4e-3},
                 {"D=32,V=99,dtype=fp16,class_weight,label_smoothing=0.1", false, 5e-4},
                 {"D=32,V=99,dtype=fp32,teacher_top_k=7,hard_weight=0.25", false, 2e-6}};
    for (const auto& c : cases) {
        const Layer layer(c.spec, 70, c.wide);
        const ProcessResult result = layer.run();
        ASSERT_EQ(result.exit_code, 0) << c.spec << result.err;
        const auto json = result.json();
        EXPECT_NEAR(json["loss"].get<double>(), layer.mean_loss(), 1e-5 * layer.mean_loss()) << c.spec;
        EXPECT_EQ(json["num_valid_tokens"], layer.valid());
        EXPECT_LT(layer.valid(), 70);
        SCOPED_TRACE(c.spec);
        layer.expect_right(c.bound);
    }
}

TEST(FlceRun_Reductions, SumAndNone) {
    const Layer sum("D=32,V=99,dtype=fp32", 40, true, Reduction::sum);
    const auto summed = sum.run({"--reduction", "sum"}).json();
    EXPECT_NEAR(summed["loss"].get<double>(), sum.mean_loss(), 1e-5 * sum.mean_loss());
    sum.expect_right(2e-6);
    const Layer none("D=32,V=99,dtype=fp32", 40, true, Reduction::none);
    const auto each = none.run({"--reduction", "none"}).json();
    ASSERT_EQ(each["loss"].size(), 40U);
    const flce::Reference reference = none.reference();
    for (std::size_t i = 0; i < 40; ++i) EXPECT_NEAR(each["loss"][i].get<double>(), reference.token(i).loss, 1e-5 * 10);
    none.expect_right(2e-6);
}

TEST(FlceRun_SeveralFiles, AreOneSet) {
    const Layer layer("D=32,V=99,dtype=fp32", 20, true);
    const cli::SafetensorsSet set({layer.folder_ / "in"});
    const auto part = [&](const std::string& name) {
        const auto found = set.get(name);
        cli::write_safetensors(layer.folder_ / name, {{name, found.entry->dtype, found.entry->shape, found.bytes}});
        return layer.folder_ / name;
    };
    const ProcessResult result = run_flce({"run", "--device", "cpu", "--spec", layer.spec_.text(), "--ignore-index", "-7", "--json",
                                           "--input", part("hidden"), "--input", part("weight"), "--input", part("target")});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.json()["loss"], layer.run().json()["loss"]);
    const ProcessResult missing = run_flce({"run", "--device", "cpu", "--spec", layer.spec_.text(), "--input", layer.folder_ / "hidden"});
    EXPECT_EQ(missing.exit_code, 2);
    EXPECT_THAT(missing.err, HasSubstr("\"weight\" is missing"));
    const ProcessResult twice =
        run_flce({"run", "--spec", layer.spec_.text(), "--input", layer.folder_ / "in", "--input", layer.folder_ / "hidden"});
    EXPECT_EQ(twice.exit_code, 2);
    EXPECT_THAT(twice.err, HasSubstr("\"hidden\" is in"));
}

TEST(FlceRun_Accumulate, AddsToTheGivenGradient) {
    const Layer plain("D=32,V=99,dtype=fp32", 20, true);
    ASSERT_EQ(plain.run().exit_code, 0);
    const auto gradient = plain.output("grad_weight");
    std::vector<float> initial(gradient.size());
    std::iota(initial.begin(), initial.end(), 0.0F);
    cli::write_safetensors(plain.folder_ / "initial", {{"grad_weight", "F32", {99, 32}, std::as_bytes(std::span(initial))}});
    const ProcessResult result =
        run_flce({"run", "--device", "cpu", "--spec", "D=32,V=99,dtype=fp32,tied", "--ignore-index", "-7", "--input", plain.folder_ / "in",
                  "--input", plain.folder_ / "initial", "--out", plain.folder_ / "out"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const auto accumulated = plain.output("grad_weight");
    for (std::size_t i = 0; i < gradient.size(); ++i) EXPECT_NEAR(accumulated[i], initial[i] + gradient[i], 1e-3);
}

TEST(FlceRun_LabelOutOfRange, IsReportedAndNothingWritten) {
    for (const std::int64_t bad : {std::int64_t{99}, std::int64_t{-1}, std::int64_t{1} << 40}) {
        Layer layer("D=32,V=99,dtype=fp32", 20, true);
        layer.data_.target[13] = bad;
        layer.data_.target[17] = bad;
        cli::write_safetensors(layer.folder_ / "in", {{"hidden", "F32", {20, 32}, layer.data_.hidden},
                                                      {"weight", "F32", {99, 32}, layer.data_.weight},
                                                      {"target", "I64", {20}, std::as_bytes(std::span(layer.data_.target))}});
        const ProcessResult result = layer.run();
        EXPECT_EQ(result.exit_code, 2);
        EXPECT_THAT(result.err, AllOf(StartsWith("flce: error: target[13] is " + std::to_string(bad)), HasSubstr("[0, 99)")));
        EXPECT_EQ(result.json()["error"]["exit_code"], 2) << result.out;
        EXPECT_FALSE(std::filesystem::exists(layer.folder_ / "out"));
    }
}

TEST(FlceRun_WrongShapeOrDtype, NamesTensorFoundAndWanted) {
    const Layer layer("D=32,V=99,dtype=fp32", 20, true);
    const auto refused = [&](const std::string& spec, const std::string& reason) {
        const ProcessResult result = run_flce({"run", "--device", "cpu", "--spec", spec, "--input", layer.folder_ / "in"});
        EXPECT_EQ(result.exit_code, 2) << spec;
        EXPECT_THAT(result.err, AllOf(StartsWith("flce: error: "), HasSubstr(reason))) << spec;
    };
    refused("D=40,V=99,dtype=fp32", "\"hidden\" is F32 [20, 32]; it must be F32 [20, 40]");
    refused("D=32,V=98,dtype=fp32", "\"weight\" is F32 [99, 32]; it must be F32 [98, 32]");
    refused("D=32,V=99,dtype=fp32,layout=hidden_major", "\"weight\"");
    refused("D=32,V=99,dtype=bf16", "must be BF16");
    refused("D=32,V=99,dtype=fp32,bias", "\"bias\" is missing");
}

TEST(FlceRun_TensorsThatTheSpecDoesNotRead, AreRefused) {
    const Layer layer("D=32,V=99,dtype=fp32", 20, true);
    const std::vector<float> numbers(99, 1.0F);
    const auto run_beside = [&](const std::string& name) {
        cli::write_safetensors(layer.folder_ / "more", {{name, "F32", {99}, std::as_bytes(std::span(numbers))}});
        return run_flce({"run", "--device", "cpu", "--spec", layer.spec_.text(), "--ignore-index", "-7", "--input", layer.folder_ / "in",
                         "--input", layer.folder_ / "more"});
    };
    for (const char* name : {"bias", "class_offset", "class_group", "row_group", "temperature", "teacher_ids", "teacher_bias"}) {
        const ProcessResult result = run_beside(name);
        EXPECT_EQ(result.exit_code, 2) << name;
        EXPECT_THAT(result.err, HasSubstr("tensor \"" + std::string(name) + "\" is F32 [99]; it is not read with this spec: say "));
    }
    EXPECT_EQ(run_beside("model.norm.weight").exit_code, 0);
}

TEST(FlceRun_CorruptFiles, AreRefusedWithoutACrash) {
    const Layer layer("D=8,V=9,dtype=fp32", 3, true);
    std::ifstream file(layer.folder_ / "in", std::ios::binary);
    const std::string good((std::istreambuf_iterator<char>(file)), {});
    const auto run_with = [&](const std::string& bytes) {
        std::ofstream(layer.folder_ / "bad", std::ios::binary) << bytes;
        return run_flce({"run", "--device", "cpu", "--spec", layer.spec_.text(), "--ignore-index", "-7", "--input", layer.folder_ / "bad"});
    };
    ASSERT_EQ(run_with(good).exit_code, 0);
    for (const double part : {0.0, 0.01, 0.1, 0.5, 0.9, 0.999}) {
        const ProcessResult result = run_with(good.substr(0, static_cast<std::size_t>(part * static_cast<double>(good.size()))));
        EXPECT_EQ(result.exit_code, 2) << part;
        EXPECT_THAT(result.err, AllOf(StartsWith("flce: error: "), HasSubstr("not a valid safetensors file"))) << part;
        EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
    }
    EXPECT_EQ(run_with(good + "x").exit_code, 2);
    std::mt19937 random(3);
    const std::size_t header_end = good.find('}') + 60;
    for (int i = 0; i < 60; ++i) {
        std::string bad = good;
        bad[random() % header_end] = static_cast<char>(random());
        const ProcessResult result = run_with(bad);
        EXPECT_TRUE(result.exit_code == 0 || result.exit_code == 2) << result.exit_code << result.err;
    }
}

TEST(FlceRun_NoTokens, GivesZeroGradients) {
    const Layer layer("D=32,V=99,dtype=fp32", 0, true);
    const ProcessResult result = layer.run();
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.json()["loss"], 0.0);
    EXPECT_EQ(result.json()["num_valid_tokens"], 0);
    for (const double value : layer.output("grad_weight")) ASSERT_EQ(value, 0);
}

TEST(FlceRun_OutputThatIsAnInput, IsRefusedAndTheInputKept) {
    const Layer layer("D=32,V=99,dtype=fp32", 5, true);
    std::filesystem::create_symlink(layer.folder_ / "in", layer.folder_ / "link");
    const auto size = std::filesystem::file_size(layer.folder_ / "in");
    for (const char* name : {"in", "link"}) {
        const ProcessResult result = run_flce({"run", "--device", "cpu", "--spec", layer.spec_.text(), "--ignore-index", "-7", "--input",
                                               layer.folder_ / "in", "--out", layer.folder_ / name});
        EXPECT_EQ(result.exit_code, 2);
        EXPECT_THAT(result.err, HasSubstr("would overwrite"));
        EXPECT_EQ(std::filesystem::file_size(layer.folder_ / "in"), size);
    }
}

TEST(FlceRun_OutputThatIsNoFile, IsRefusedAndLeftAsItIs) {
    const Layer layer("D=32,V=99,dtype=fp32", 5, true);
    const auto run_into = [&](const std::filesystem::path& out) {
        return run_flce({"run", "--device", "cpu", "--spec", layer.spec_.text(), "--ignore-index", "-7", "--input", layer.folder_ / "in",
                         "--out", out});
    };
    ASSERT_EQ(::mkfifo(std::string(layer.folder_ / "fifo").c_str(), 0600), 0);
    for (const std::filesystem::path& out : {std::filesystem::path(layer.folder_ / "fifo"), layer.folder_.path()}) {
        const ProcessResult result = run_into(out);
        EXPECT_EQ(result.exit_code, 2);
        EXPECT_THAT(result.err, HasSubstr("is not a regular file"));
    }
    EXPECT_TRUE(std::filesystem::is_fifo(layer.folder_ / "fifo"));
    // A link stays one: its target is written.
    std::ofstream(layer.folder_ / "real") << "before";
    std::filesystem::create_symlink("real", layer.folder_ / "out link");
    ASSERT_EQ(run_into(layer.folder_ / "out link").exit_code, 0);
    EXPECT_TRUE(std::filesystem::is_symlink(layer.folder_ / "out link"));
    EXPECT_GT(std::filesystem::file_size(layer.folder_ / "real"), 100u);
}

TEST(FlceRun_UnwritableOutput, ExitsWith3) {
    const Layer layer("D=32,V=99,dtype=fp32", 5, true);
    const ProcessResult result = run_flce({"run", "--device", "cpu", "--spec", layer.spec_.text(), "--ignore-index", "-7", "--input",
                                           layer.folder_ / "in", "--out", "/nonexistent/folder/out"});
    EXPECT_EQ(result.exit_code, 3);
    EXPECT_THAT(result.err, HasSubstr("/nonexistent/folder/out"));
}

}  // namespace
}  // namespace flce::test
