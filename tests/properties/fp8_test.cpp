// An FP8 head against its truth: options alone and together, shapes that fill no block, rows without numbers, and bits that repeat.
#include "tests/support/fp8.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "generator/planner.hpp"
#include "tests/support/kernel_run.hpp"
#include "tests/support/level.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/random_specs.hpp"
#include "tests/support/sharded_run.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

/// Scales of which hidden states, of a deviation of 2, reach `reach` and the weight's numbers, of 1 / √hidden_size, half of that.
void give_scales(Spec& s, double reach) {
    const double most = s.fp8 == Fp8Operands::int8 ? 127 : 448;
    s.fp8_hidden_scale = reach / most;
    s.fp8_weight_scale = reach / 2 / std::sqrt(static_cast<double>(s.hidden_size)) / most;
}

const std::vector<OptionSet>& fp8_options() {
    static const std::vector<OptionSet> sets = {
        {"plain", [](Spec&) {}},
        {"bias", [](Spec& s) { s.bias = true; }},
        {"logit_scale", [](Spec& s) { s.logit_scale = -0.35; }},
        {"softcap", [](Spec& s) { s.softcap = 5.0; }},
        {"temperature", [](Spec& s) { s.temperature = true; }},
        {"class_weight", [](Spec& s) { s.class_weight = true; }},
        {"class_offset", [](Spec& s) { s.class_offset = true; }},
        {"offset_gradient",
         [](Spec& s) {
             s.bias = s.class_offset = s.offset_gradient = true;
             s.softcap = 5.0;
         }},
        {"label_smoothing", [](Spec& s) { s.label_smoothing = 0.1; }},
        {"smoothed_alone", [](Spec& s) { s.label_smoothing = 1.0; }},
        {"smoothed_classes",
         [](Spec& s) {
             s.label_smoothing = 0.2;
             s.bias = s.class_weight = s.temperature = true;
             s.logit_scale = -0.5;
             s.grad_weight_mode = GradMode::accumulate;
         }},
        {"z_loss", [](Spec& s) { s.z_loss = 1e-2; }},
        {"token_weight", [](Spec& s) { s.token_weight = true; }},
        {"lse", [](Spec& s) { s.outputs.lse = true; }},
        {"logprobs", [](Spec& s) { s.outputs = {.loss = false, .logprobs = true}; }},
        {"dft", [](Spec& s) { s.dft = s.outputs.logprobs = true; }},
        {"top1", [](Spec& s) { s.outputs.top1 = s.outputs.log_sum_sq_probs = true; }},
        {"scales", [](Spec& s) { give_scales(s, 6); }},
        {"padded", apply_padding},
        {"tied", [](Spec& s) { s.tied = true, s.grad_weight_mode = GradMode::accumulate; }},
        {"accumulate_fp32",
         [](Spec& s) {
             s.grad_weight_mode = GradMode::accumulate;
             s.grad_weight_dtype = DType::fp32;
             s.bias = true;
         }},
        {"everything",
         [](Spec& s) {
             apply_everything(s);
             apply_padding(s);
             s.label_smoothing = 0;
             s.outputs.entropy = false;
             give_scales(s, 5);
         }},
        {"everything_smoothed",
         [](Spec& s) {
             apply_everything(s);
             apply_padding(s);
             s.softcap = 0;
             s.outputs.entropy = false;
         }},
        {"entropy", [](Spec& s) { s.outputs.entropy = true; }},
        {"hidden_major",
         [](Spec& s) {
             s.layout = WeightLayout::hidden_major;
             s.vocab_size = 304;
         }},
        {"hidden_major_accumulate",
         [](Spec& s) {
             s.layout = WeightLayout::hidden_major;
             s.vocab_size = 304;
             s.grad_weight_mode = GradMode::accumulate;
         }},
        {"hidden_major_padded",
         [](Spec& s) {
             s.layout = WeightLayout::hidden_major;
             s.bias = true;
             apply_padding(s);
         }},
        {"hidden_major_smoothed",
         [](Spec& s) {
             apply_everything(s);
             apply_padding(s);
             s.softcap = 0;
             s.outputs.entropy = s.tied = false;
             s.layout = WeightLayout::hidden_major;
         }},
        {"hidden_major_accumulate_fp32",
         [](Spec& s) {
             s.layout = WeightLayout::hidden_major;
             s.grad_weight_mode = GradMode::accumulate;
             s.grad_weight_dtype = DType::fp32;
             s.outputs.entropy = true;
             give_scales(s, 5);
             apply_padding(s);
         }},
        {"everything_with_entropy",
         [](Spec& s) {
             apply_everything(s);
             s.label_smoothing = 0;
             s.outputs.entropy = true;
         }},
    };
    return sets;
}

struct Form {
    const char* name;
    Fp8Operands operands;
    Fp8Dlogits dlogits;
};
void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }
constexpr Form kForms[] = {{"int8_e5m2", Fp8Operands::int8, Fp8Dlogits::e5m2},
                           {"int8_e4m3", Fp8Operands::int8, Fp8Dlogits::e4m3},
                           {"e4m3_e5m2", Fp8Operands::e4m3, Fp8Dlogits::e5m2},
                           {"e4m3_e4m3", Fp8Operands::e4m3, Fp8Dlogits::e4m3}};

Target target_of(PlanPath path) { return path == PlanPath::cpu ? Target::cpu : Target::gpu; }
/// Whether the path has a plan of the spec here; the CPU has all.
bool has(PlanPath path, const Spec& spec) { return path == PlanPath::cpu || !plan_on_path(spec, path).empty(); }
std::shared_ptr<const Kernel> kernel_of(PlanPath path, const Spec& spec) {
    return kernel_on(target_of(path), spec, path == PlanPath::cpu ? "" : plan_on_path(spec, path));
}

class Fp8Head : public testing::TestWithParam<std::tuple<PlanPath, DType, Form>> {
protected:
    void SetUp() override {
        FLCE_REQUIRE_TARGET(target());
        if (level() == Level::quick && std::get<1>(GetParam()) != DType::bf16) GTEST_SKIP() << "from level full on";
        if (!has(path(), spec(64, 64))) GTEST_SKIP() << to_string(path()) << " of this GPU has no plan of " << spec(64, 64).text();
    }
    static PlanPath path() { return std::get<0>(GetParam()); }
    static Target target() { return target_of(path()); }
    static std::shared_ptr<const Kernel> kernel(const Spec& spec) { return kernel_of(path(), spec); }
    static Spec spec(std::int64_t hidden_size, std::int64_t vocab_size, void (*option)(Spec&) = [](Spec&) {}) {
        Spec s{.hidden_size = hidden_size, .vocab_size = vocab_size, .dtype = std::get<1>(GetParam())};
        s.fp8 = std::get<2>(GetParam()).operands;
        s.fp8_dlogits = std::get<2>(GetParam()).dlogits;
        option(s);
        return s.normalized();
    }
    static void expect_right(const Spec& spec, const ProblemOptions& options) {
        EXPECT_TRUE(run_and_judge(kernel(spec), make_problem(spec, options)));
    }
};

TEST_P(Fp8Head, EveryOption_IsWithinItsBounds) {
    for (const OptionSet& set : fp8_options()) {
        const Spec s = spec(96, 300, set.apply);
        if (!has(path(), s)) continue;  // refused by name
        SCOPED_TRACE(set.name);
        const Reduction reduction = s.token_weight ? Reduction::weighted_mean : Reduction::mean;
        expect_right(s, {.num_tokens = 70, .reduction = reduction, .seed = 3});
    }
}

TEST_P(Fp8Head, RaggedShapes_AreWithinTheirBounds) {
    const std::tuple<std::int64_t, std::int64_t, std::int64_t> shapes[] = {{1, 8, 2},      {1, 64, 1000},  {3, 24, 17},    {129, 16, 33},
                                                                           {130, 40, 257}, {64, 272, 131}, {257, 136, 515}};
    for (const auto& [n, d, v] : shapes) {
        if (!has(path(), spec(d, v))) continue;
        for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
            expect_right(spec(d, v), {.num_tokens = n, .reduction = reduction, .seed = 5});
        }
    }
}

TEST_P(Fp8Head, FewOrNoValidTokens_AreWithinTheirBounds) {
    for (const Ignored ignored : {Ignored::none, Ignored::some, Ignored::all}) {
        expect_right(spec(64, 130), {.num_tokens = 40, .ignored = ignored, .seed = 7});
        expect_right(spec(64, 130), {.num_tokens = 0, .ignored = ignored});
    }
    Problem one = make_problem(spec(64, 130), {.num_tokens = 40, .ignored = Ignored::all, .seed = 7});
    one.target[17] = 5;
    EXPECT_TRUE(run_and_judge(kernel(one.spec), one));
}

TEST_P(Fp8Head, ConfidentAndHugeLogits_AreWithinTheirBounds) {
    expect_right(spec(64, 200), {.num_tokens = 50, .logits = Logits::saturated, .seed = 9});
    // Logits of 10⁶ whose sums have 13 bits are off by more than 1: gradients are those of other labels.
    const bool cut_off = target() == Target::gpu && std::get<2>(GetParam()).operands == Fp8Operands::e4m3;
    if (!cut_off) expect_right(spec(64, 200), {.num_tokens = 50, .logits = Logits::huge, .seed = 9});
    expect_right(spec(64, 200, [](Spec& s) { s.softcap = 30.0; }), {.num_tokens = 50, .logits = Logits::saturated, .seed = 9});
}

// Numbers beyond the largest code, and codes of a few numbers alone.
TEST_P(Fp8Head, ScalesThatAreSmallOrLarge_AreWithinTheirBounds) {
    const auto give = [](double reach) {
        Spec s = spec(64, 200);
        give_scales(s, reach);
        return s;
    };
    for (const double reach : {0.5, 200.0}) expect_right(give(reach), {.num_tokens = 50, .seed = 21});
    for (const double reach : {1e-12, 1e12}) expect_right(give(reach), {.num_tokens = 50, .seed = 21});  // all are the largest, or 0
}

TEST_P(Fp8Head, RowsOfZeros_HaveCodesAndScalesOfZero) {
    Problem p = make_problem(spec(64, 200), {.num_tokens = 50, .ignored = Ignored::none, .seed = 11});
    std::fill_n(p.hidden.begin() + 3 * 64, 64, 0.F);
    std::fill_n(p.weight.begin() + 7 * 64, 2 * 64, 0.F);
    EXPECT_TRUE(run_and_judge(kernel(p.spec), p));
    Problem given = p;
    give_scales(given.spec, 6);
    EXPECT_TRUE(run_and_judge(kernel(given.spec), given));
    std::fill(p.hidden.begin(), p.hidden.end(), 0.F);
    EXPECT_TRUE(run_and_judge(kernel(p.spec), p));
    std::fill(p.weight.begin(), p.weight.end(), 0.F);
    EXPECT_TRUE(run_and_judge(kernel(p.spec), p));
}

// A token's NaN stays its own; a class's is in every loss. An ignored token's row may hold anything.
TEST_P(Fp8Head, RowsWithoutNumbers_MakeNaNOfWhatMeetsThem) {
    constexpr float kNone[] = {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()};
    for (const float none : kNone) {
        Problem p = make_problem(spec(64, 200), {.num_tokens = 50, .ignored = Ignored::none, .seed = 13});
        if (std::isnan(none)) give_scales(p.spec, 6);
        p.target[9] = p.options.ignore_index;
        std::fill_n(p.hidden.begin() + 9 * 64, 64, none);
        EXPECT_TRUE(run_and_judge(kernel(p.spec), p)) << "an ignored token";
        p.hidden[20 * 64 + 5] = none;
        EXPECT_TRUE(run_and_judge(kernel(p.spec), p)) << "a token";
        p.weight[30 * 64 + 1] = none;
        EXPECT_TRUE(run_and_judge(kernel(p.spec), p)) << "a class";
    }
}

TEST_P(Fp8Head, ClassesRuledOutByTheirOffset_HaveNoGradient) {
    Problem p = make_problem(spec(64, 200, [](Spec& s) { s.class_offset = true; }), {.num_tokens = 50, .seed = 15});
    for (std::size_t j = 100; j < 160; ++j) {
        if (std::ranges::find(p.target, static_cast<std::int64_t>(j)) == p.target.end()) {
            p.class_offset[j] = -std::numeric_limits<float>::infinity();
        }
    }
    EXPECT_TRUE(run_and_judge(kernel(p.spec), p));
}

TEST_P(Fp8Head, TwiceAndInAnyMemory_HasTheSameBits) {
    const Spec s = spec(96, 700);
    const Problem p = make_problem(s, {.num_tokens = 150, .seed = 17});
    const auto run_by = kernel(s);
    const auto bytes = [&](std::size_t retained) {
        KernelRun run(run_by, p);
        run.retain(RetainedPlace::own, retained);
        run.forward();
        run.backward();
        auto all = run.all_bytes();
        std::erase_if(all, [](const auto& each) { return each.first.ends_with("workspace") || each.first == "retained"; });
        return all;
    };
    const auto once = bytes(0);
    EXPECT_TRUE(bytes(0) == once);
    if (target() == Target::gpu) return;  // references of exponentials that are retained are others
    EXPECT_TRUE(bytes(run_by->retained_bytes(150)) == once);
    EXPECT_TRUE(bytes(run_by->retained_bytes(150) / 2) == once);
}

std::string name_of(const testing::TestParamInfo<std::tuple<PlanPath, DType, Form>>& info) {
    const auto& [path, dtype, form] = info.param;
    return (path == PlanPath::cpu ? "" : std::string(to_string(path)) + "_") + std::string(to_string(dtype)) + "_" + form.name;
}

INSTANTIATE_TEST_SUITE_P(Cpu, Fp8Head,
                         testing::Combine(testing::Values(PlanPath::cpu), testing::Values(DType::bf16, DType::fp16, DType::fp32),
                                          testing::ValuesIn(kForms)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, Fp8Head,
                         testing::Combine(testing::Values(PlanPath::cuda_fp8, PlanPath::cuda_fp8_sm89), testing::Values(DType::bf16),
                                          testing::ValuesIn(kForms)),
                         name_of);

/// A random spec without what an FP8 head refuses.
Spec random_fp8_spec(Draw& draw, std::uint64_t seed) {
    Spec s = random_spec(draw);
    s.weight_dtype.reset();
    s.weight_format = WeightFormat::numbers;
    if (s.layout == WeightLayout::hidden_major) s.padded_vocab_size = (s.padded_vocab_size + 7) / 8 * 8;  // GPUs' rows begin on 16 bytes
    s.teacher_top_k = 0;
    s.support = s.class_groups = false;
    s.hard_weight = 0;
    if (s.softcap != 0) s.label_smoothing = 0;
    if (s.outputs == Outputs{.loss = false}) s.outputs.loss = true;
    s.fp8 = seed % 2 == 0 ? Fp8Operands::int8 : Fp8Operands::e4m3;
    s.fp8_dlogits = seed % 4 < 2 ? Fp8Dlogits::e5m2 : Fp8Dlogits::e4m3;
    if (seed % 3 == 0) give_scales(s, draw.uniform(2, 20));
    return s.normalized();
}

/// A random spec of an FP8 head with a weight of codes.
Spec random_spec_of_codes(Draw& draw, std::uint64_t seed) {
    Spec s = random_fp8_spec(draw, seed);
    s.hidden_size = 16 * (1 + draw.below(10));
    s.layout = WeightLayout::vocab_major;
    if (s.dtype == DType::fp32) s.dtype = s.grad_weight_dtype = DType::bf16;
    s.tied = false;
    s.grad_weight_mode = GradMode::write;
    s.fp8 = Fp8Operands::e4m3;
    s.fp8_weight_scale = 0;
    s.weight_format = WeightFormat::e4m3;
    return s.normalized();
}

class RandomFp8Specs : public testing::TestWithParam<std::tuple<PlanPath, std::uint64_t>> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(target_of(std::get<0>(GetParam()))); }
    /// Judges random specs of `make`. `draws`: a number for each kind of spec.
    static void judge(Spec (*make)(Draw&, std::uint64_t), std::uint64_t draws) {
        const auto [path, part] = GetParam();
        for (std::uint64_t seed = 100 * part; seed < 100 * part + (kSanitized || level() == Level::quick ? 2 : 12); ++seed) {
            Draw draw(draws + seed);
            const Spec spec = make(draw, seed);
            if (!has(path, spec)) continue;  // refused by name
            EXPECT_TRUE(run_and_judge(kernel_of(path, spec), make_problem(spec, random_options(draw, spec.token_weight, seed)))) << seed;
        }
    }
};

TEST_P(RandomFp8Specs, AreWithinTheirBounds) { judge(random_fp8_spec, 3000); }
TEST_P(RandomFp8Specs, OfCodes_AreWithinTheirBounds) { judge(random_spec_of_codes, 8000); }

INSTANTIATE_TEST_SUITE_P(Cpu, RandomFp8Specs, testing::Combine(testing::Values(PlanPath::cpu), testing::Range<std::uint64_t>(0, 4)));
INSTANTIATE_TEST_SUITE_P(Gpu, RandomFp8Specs,
                         testing::Combine(testing::Values(PlanPath::cuda_fp8, PlanPath::cuda_fp8_sm89),
                                          testing::Range<std::uint64_t>(0, 4)));

/// Codes of a frozen weight, of a dtype beside them.
class Fp8Codes : public testing::TestWithParam<std::tuple<PlanPath, DType, Fp8Dlogits>> {
protected:
    void SetUp() override {
        FLCE_REQUIRE_TARGET(target_of(path()));
        if (!has(path(), spec(64, 64))) GTEST_SKIP() << to_string(path()) << " of this GPU has no plan of " << spec(64, 64).text();
    }
    static PlanPath path() { return std::get<0>(GetParam()); }
    static Spec spec(std::int64_t hidden_size, std::int64_t vocab_size) {
        Spec s{.hidden_size = hidden_size, .vocab_size = vocab_size, .dtype = std::get<1>(GetParam())};
        s.grad_weight_dtype = s.dtype;
        s.weight_format = WeightFormat::e4m3;
        s.fp8 = Fp8Operands::e4m3;
        s.fp8_dlogits = std::get<2>(GetParam());
        return s;
    }
    static void expect_right(const Problem& problem) { EXPECT_TRUE(run_and_judge(kernel_of(path(), problem.spec), problem)); }
};

TEST_P(Fp8Codes, EveryOption_IsWithinItsBounds) {
    for (const OptionSet& set : fp8_options()) {
        Spec s = spec(96, 300);
        set.apply(s);
        if (s.layout != WeightLayout::vocab_major) continue;
        s.tied = false;
        s.grad_weight_mode = GradMode::write;
        s.grad_weight_dtype = s.dtype;
        s.fp8_weight_scale = 0;
        if (!has(path(), s.normalized())) continue;  // refused by name
        SCOPED_TRACE(set.name);
        const Reduction reduction = s.token_weight ? Reduction::weighted_mean : Reduction::mean;
        expect_right(make_problem(s, {.num_tokens = 70, .reduction = reduction, .seed = 3}));
    }
}

TEST_P(Fp8Codes, RaggedShapes_AreWithinTheirBounds) {
    const std::tuple<std::int64_t, std::int64_t, std::int64_t> shapes[] = {{1, 16, 2},    {1, 64, 1000},   {3, 32, 17},
                                                                           {129, 16, 33}, {130, 48, 1157}, {257, 272, 515}};
    for (const auto& [n, d, v] : shapes) expect_right(make_problem(spec(d, v), {.num_tokens = n, .reduction = Reduction::sum, .seed = 5}));
}

// Scales that have nothing to do with the largest code of a row, or are negative; rows of zeros beside them, and codes of NaN.
TEST_P(Fp8Codes, ScalesOfAnyKind_AreTheRowsOwn) {
    const auto set = [](Problem& p, const auto& change) {
        for (std::size_t j = 0; j < p.codes.scales.size(); ++j) change(j, p.codes.scales[j]);
        p.unrounded_weight = dequantized(p.spec, p.codes);
    };
    Problem p = make_problem(spec(64, 200), {.num_tokens = 50, .seed = 21});
    std::fill_n(p.codes.codes.begin() + 7 * 64, 64, std::byte{0x80});
    set(p, [](std::size_t j, float& scale) { scale *= j % 3 == 0 ? -1.F : j % 3 == 1 ? 0.25F : 1.F; });
    p.codes.scales[7] = 1e30F;
    expect_right(p);
    set(p, [](std::size_t, float& scale) { scale = 2e-4F; });
    expect_right(p);
    set(p, [](std::size_t, float& scale) { scale = 0; });
    expect_right(p);
    Problem none = make_problem(spec(64, 200), {.num_tokens = 50, .ignored = Ignored::some, .seed = 13});
    none.codes.codes[30 * 64 + 1] = std::byte{0xff};
    none.unrounded_weight = dequantized(none.spec, none.codes);
    expect_right(none);
}

std::string name_of_codes(const testing::TestParamInfo<std::tuple<PlanPath, DType, Fp8Dlogits>>& info) {
    const auto& [path, dtype, dlogits] = info.param;
    return (path == PlanPath::cpu ? "" : std::string(to_string(path)) + "_") + std::string(to_string(dtype)) + "_" +
           std::string(to_string(dlogits));
}
INSTANTIATE_TEST_SUITE_P(Cpu, Fp8Codes,
                         testing::Combine(testing::Values(PlanPath::cpu), testing::Values(DType::bf16, DType::fp16),
                                          testing::Values(Fp8Dlogits::e5m2, Fp8Dlogits::e4m3)),
                         name_of_codes);
INSTANTIATE_TEST_SUITE_P(Gpu, Fp8Codes,
                         testing::Combine(testing::Values(PlanPath::cuda_fp8, PlanPath::cuda_fp8_sm89), testing::Values(DType::bf16),
                                          testing::Values(Fp8Dlogits::e5m2, Fp8Dlogits::e4m3)),
                         name_of_codes);

class RandomFp8Shards : public testing::TestWithParam<std::tuple<PlanPath, std::uint64_t>> {};

TEST_P(RandomFp8Shards, AreWithinTheirBounds) {
    const auto [path, part] = GetParam();
    FLCE_REQUIRE_TARGET(target_of(path));
    for (std::uint64_t seed = 100 * part; seed < 100 * part + (kSanitized || level() == Level::quick ? 2 : 12); ++seed) {
        Draw draw(5000 + seed);
        Spec whole = seed % 5 == 4 ? random_spec_of_codes(draw, seed) : random_fp8_spec(draw, seed);
        whole.padded_vocab_size = whole.vocab_size;
        const bool hidden_major = whole.layout == WeightLayout::hidden_major;  // such shards have as many columns as the spec says
        std::vector<std::int64_t> rows = random_rows(draw, whole.vocab_size, hidden_major);
        if (hidden_major) std::ranges::fill(rows, (rows.front() + 7) / 8 * 8);
        const std::int64_t most = std::max<std::int64_t>(*std::ranges::max_element(rows), 1);
        Spec spec = shard_spec(whole, std::min(most, whole.vocab_size), most);
        if (draw.coin(0.3)) spec.grad_hidden_dtype = DType::fp32;
        if (!has(path, spec)) continue;  // refused by name
        ProblemOptions options = random_options(draw, spec.token_weight, seed);
        if (spec.dtype == DType::fp16) options.num_valid.reset();  // gradients of few out of many tokens are below fp16's normal numbers
        const Problem problem = make_problem(whole, options);
        EXPECT_TRUE(run_and_judge_shards(kernel_of(path, spec.normalized()), problem, shards_of(whole.vocab_size, rows))) << seed;
    }
}

INSTANTIATE_TEST_SUITE_P(Cpu, RandomFp8Shards, testing::Combine(testing::Values(PlanPath::cpu), testing::Range<std::uint64_t>(0, 4)));
INSTANTIATE_TEST_SUITE_P(Gpu, RandomFp8Shards,
                         testing::Combine(testing::Values(PlanPath::cuda_fp8, PlanPath::cuda_fp8_sm89),
                                          testing::Range<std::uint64_t>(0, 4)));

// Products in few rows and columns at a time: steps in flight, several blocks of tokens, chunks of the vocabulary.
TEST(Fp8Blocks, LittleScratch_HasTheSameRounding) {
    FLCE_REQUIRE_TARGET(Target::cpu);
    Spec s = parse_spec("D=64,V=900,fp8,grad_weight_dtype=fp32");
    const std::int64_t least = smallest_scratch_bytes(s, device_of(Target::cpu)).value();
    const Plan plan = choose_plan(s, device_of(Target::cpu), {.scratch_bytes = least});
    EXPECT_TRUE(run_and_judge(kernel_on(Target::cpu, s, plan.text()), make_problem(s, {.num_tokens = 300, .seed = 19})));
}

}  // namespace
}  // namespace flce::test
