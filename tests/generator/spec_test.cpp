#include "flce/spec.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <unordered_set>

#include "flce/error.hpp"

namespace flce {
namespace {

using testing::AllOf;
using testing::HasSubstr;

template <class Parse>
std::string message_of(Parse parse) {
    try {
        (void)parse();
    } catch (const SpecError& error) {
        return error.what();
    }
    return "no SpecError";
}

Spec small() { return {.hidden_size = 64, .vocab_size = 50}; }

/// Any legal Spec: each option is at its default half of the time.
Spec random_spec(std::mt19937_64& random) {
    auto number = [&](std::int64_t low, std::int64_t high) { return std::uniform_int_distribution<std::int64_t>(low, high)(random); };
    auto coin = [&] { return number(0, 1) == 1; };
    auto real = [&](double low, double high) { return std::uniform_real_distribution<double>(low, high)(random); };
    Spec s;
    s.hidden_size = 8 * number(1, 4096);
    s.vocab_size = number(2, 300000);
    s.padded_vocab_size = coin() ? s.vocab_size : s.vocab_size + number(0, 1000);
    s.dtype = static_cast<DType>(number(0, 2));
    s.tied = coin();
    s.layout = !s.tied && coin() ? WeightLayout::hidden_major : WeightLayout::vocab_major;
    if (coin() && s.dtype != DType::fp32) s.weight_dtype = DType::fp32;
    s.grad_weight_dtype = coin() ? s.dtype : DType::fp32;
    s.grad_weight_mode = coin() ? GradMode::write : GradMode::accumulate;
    s.bias = coin();
    s.class_weight = coin();
    s.class_offset = coin();
    s.offset_gradient = s.bias && s.class_offset && coin();
    s.temperature = coin();
    s.batch_invariant = coin();
    if (coin()) s.logit_scale = real(-1.0, 1.0) * std::exp(real(-20, 20));
    if (coin()) s.softcap = std::exp(real(-10, 10));
    if (coin()) s.label_smoothing = real(0, 1);
    if (coin()) s.z_loss = real(0, 1e-3);
    s.outputs = {.loss = coin(), .lse = coin(), .logprobs = coin(), .entropy = coin(), .top1 = coin(), .log_sum_sq_probs = coin()};
    if (s.outputs == Outputs{.loss = false}) s.outputs.entropy = true;
    s.token_weight = s.outputs.loss && coin();
    if (s.outputs.loss && !s.class_weight && coin()) {
        s.teacher_top_k = static_cast<int>(number(1, 1024));
        s.hard_weight = real(0, 1);
    }
    if (s.teacher_top_k == 0 && !s.class_weight && !s.class_offset && !s.batch_invariant && !s.weight_dtype && coin()) {
        s.label_smoothing = s.z_loss = 0;
        s.outputs = {.loss = true, .lse = coin(), .entropy = coin()};
        s.teacher_hidden_size = 8 * number(1, 4096);
        s.divergence_beta = real(0.01, 0.99);
        s.teacher_bias = coin();
        s.teacher_logit_scale = std::exp(real(-20, 20));
        s.teacher_softcap = coin() ? std::exp(real(-10, 10)) : 0;
        return s;
    }
    s.dft = s.outputs.loss && s.outputs.logprobs && s.teacher_top_k == 0 && coin();
    if (s.teacher_top_k == 0 && s.layout == WeightLayout::vocab_major && !s.weight_dtype && !s.batch_invariant && coin()) {
        if (s.softcap != 0) s.label_smoothing = 0;
        s.fp8 = coin() ? Fp8Operands::int8 : Fp8Operands::e4m3;
        s.fp8_dlogits = coin() ? Fp8Dlogits::e5m2 : Fp8Dlogits::e4m3;
        if (!coin()) return s;
        s.fp8_hidden_scale = std::exp(real(-69, 69));
        s.fp8_weight_scale = std::exp(real(-69, 69));
        return s;
    }
    s.class_groups = s.teacher_top_k == 0 && s.label_smoothing == 0 && coin();
    if (s.class_groups) return s;
    if (!s.weight_dtype && coin()) s.top_k = static_cast<int>(number(1, std::min<std::int64_t>(256, s.vocab_size)));
    return s;
}

TEST(SpecText, Canonical_PrintsWhatDiffersFromItsDefault) {
    EXPECT_EQ(parse_spec("V=151936,D=2048,tied").text(), "D=2048,V=151936,dtype=bf16,tied");
    EXPECT_EQ(small().normalized().text(), "D=64,V=50,dtype=bf16");
    EXPECT_EQ(parse_spec("D=64,V=50,whole_vocab_size=100").text(), "D=64,V=50,whole_vocab_size=100,dtype=bf16");
    EXPECT_EQ(small().normalized().json(), R"({"D":64,"V":50,"dtype":"bf16"})");
    const Spec all = parse_spec(
        "outputs=entropy+loss,z_loss=0.0001,label_smoothing=0.1,softcap=30,logit_scale=0.0625,class_offset=1,offset_gradient,class_weight,"
        "bias=true,grad_"
        "weight_mode="
        "accumulate,"
        "grad_weight_dtype=fp32,layout=hidden_major,dtype=fp16,padded_vocab_size=64,V=50,D=64");
    EXPECT_EQ(all.text(),
              "D=64,V=50,padded_vocab_size=64,dtype=fp16,layout=hidden_major,grad_weight_dtype=fp32,grad_weight_mode=accumulate,bias,class_"
              "weight,class_offset,offset_gradient,"
              "logit_scale=0.0625,softcap=30,label_smoothing=0.1,z_loss=1e-04,outputs=loss+entropy");
    EXPECT_EQ(all.json(), R"({"D":64,"V":50,"padded_vocab_size":64,"dtype":"fp16","layout":"hidden_major","grad_weight_dtype":"fp32",)"
                          R"("grad_weight_mode":"accumulate","bias":true,"class_weight":true,"class_offset":true,)"
                          R"("offset_gradient":true,"logit_scale":0.0625,"softcap":30.0,)"
                          R"("label_smoothing":0.1,"z_loss":0.0001,"outputs":["loss","entropy"]})");
}

TEST(Spec, Literals_HaveTheDefaultsOfTheirText) {
    const std::pair<Spec, const char*> cases[] = {
        {{.hidden_size = 64, .vocab_size = 50, .dtype = DType::fp32}, "D=64,V=50,dtype=fp32"},
        {{.hidden_size = 64, .vocab_size = 50, .dtype = DType::fp16}, "D=64,V=50,dtype=fp16"},
        {{.hidden_size = 64, .vocab_size = 50, .weight_dtype = DType::fp32}, "D=64,V=50,weight_dtype=fp32"},
        {{.hidden_size = 64, .vocab_size = 50, .tied = true}, "D=64,V=50,tied"},
        {{.hidden_size = 64, .vocab_size = 50, .tied = true, .grad_weight_mode = GradMode::write}, "D=64,V=50,tied,grad_weight_mode=write"},
    };
    for (const auto& [literal, text] : cases) EXPECT_EQ(literal.normalized(), parse_spec(text)) << literal.text();
    Spec assigned = small();
    assigned.dtype = DType::fp16;
    EXPECT_THAT([&] { (void)assigned.normalized(); }, testing::ThrowsMessage<SpecError>(testing::HasSubstr("assigned later")));
}

TEST(SpecText, Defaults_DependOnOtherKeys) {
    const Spec tied = parse_spec("D=64,V=50,tied");
    EXPECT_EQ(tied.layout, WeightLayout::vocab_major);
    EXPECT_EQ(tied.grad_weight_mode, GradMode::accumulate);
    EXPECT_EQ(parse_spec("D=64,V=50,tied,grad_weight_mode=write").text(), "D=64,V=50,dtype=bf16,tied,grad_weight_mode=write");
    EXPECT_EQ(parse_spec("D=64,V=50").grad_weight_mode, GradMode::write);
    EXPECT_EQ(parse_spec("D=64,V=50,dtype=fp32").grad_weight_dtype, DType::fp32);
    EXPECT_EQ(parse_spec("D=64,V=50,dtype=fp16").grad_weight_dtype, DType::fp16);
    EXPECT_EQ(parse_spec("D=64,V=50").padded_vocab_size, 50);
    EXPECT_EQ(parse_spec("D=64,V=50,bias=false,tied=0"), parse_spec(" D = 64 ,\tV=50 "));
}

TEST(SpecText, FieldsOwnWords_AreTheSameSpec) {
    const Spec spec = parse_spec("D=64,V=50,dtype=fp16,grad_weight_dtype=fp32");
    for (const char* text :
         {"hidden_size=64,vocab_size=50,dtype=float16,grad_weight_dtype=float32", "D=64,vocab_size=50,dtype=half,grad_weight_dtype=float",
          "hidden_size=64,V=50,dtype=torch.float16,grad_weight_dtype=torch.float32",
          R"({"hidden_size": 64, "vocab_size": 50, "dtype": "float16", "grad_weight_dtype": "float32"})",
          R"( {"D":64,"V":50,"dtype":"fp16","grad_weight_dtype":"fp32"} )"}) {
        EXPECT_EQ(parse_spec(text), spec) << text;
        EXPECT_EQ(parse_spec(text).text(), "D=64,V=50,dtype=fp16,grad_weight_dtype=fp32") << "one spelling comes out";
    }
    EXPECT_EQ(parse_spec("D=64,V=50,dtype=bfloat16").dtype, DType::bf16);
    EXPECT_EQ(parse_spec("D=64,V=50,dtype=float32").text(), "D=64,V=50,dtype=fp32");
}

TEST(SpecText, RandomSpecs_RoundTripThroughTextAndJson) {
    std::mt19937_64 random(20240601);
    for (int i = 0; i < 5000; ++i) {
        const Spec spec = random_spec(random);
        ASSERT_EQ(spec.normalized(), spec) << spec.text();
        ASSERT_EQ(parse_spec(spec.text()), spec) << spec.text();
        ASSERT_EQ(parse_spec_json(spec.json()), spec) << spec.json();
        ASSERT_EQ(parse_spec(spec.text()).text(), spec.text());
        ASSERT_EQ(SpecHash{}(parse_spec(spec.text())), SpecHash{}(spec));
    }
}

TEST(SpecText, FromFile_ReadsJson) {
    const auto path = std::filesystem::path(testing::TempDir()) / "flce_spec_test.json";
    std::ofstream(path) << "{\"D\": 64, \"V\": 50, \"tied\": true}\n";
    EXPECT_EQ(parse_spec("@" + path.string()), parse_spec("D=64,V=50,tied"));
    std::ofstream(path) << std::string((1 << 20) + 1, ' ');
    EXPECT_THROW((void)parse_spec("@" + path.string()), SpecError);
    std::filesystem::remove(path);
    EXPECT_THROW((void)parse_spec("@" + path.string()), EnvironmentError);
    EXPECT_THROW((void)parse_spec("@" + testing::TempDir()), EnvironmentError);
}

TEST(SpecText, BadText_NamesKeyAndValue) {
    const std::pair<const char*, std::vector<const char*>> cases[] = {
        {"", {"empty"}},
        {"V=50", {"D is missing"}},
        {"D=64", {"V is missing"}},
        {"D=64,V=50,hidden=3", {"unknown key 'hidden'", "did you mean hidden_size?"}},
        {"D=64,V=50,sofcap=3", {"unknown key 'sofcap'", "did you mean softcap?"}},
        {"D=64,V=50,perplexity=3", {"unknown key 'perplexity'", "padded_vocab_size"}},
        {"D=64,V=50,hidden_size=64", {"'hidden_size'", "twice"}},
        {"D=64,V=50,D=64", {"'D'", "twice"}},
        {"D=64,V=50,tied,tied", {"'tied'", "twice"}},
        {"D=64,V=50,", {"no key"}},
        {"D=64,V=50,=3", {"no key"}},
        {"D=64,V=50,dtype", {"dtype has no value"}},
        {"D=64,V=50,dtype=fp8", {"dtype=fp8", "bf16", "fp16", "fp32"}},
        {"D=64,V=50,layout=row", {"layout=row", "vocab_major or hidden_major"}},
        {"D=64,V=50,grad_weight_mode=add", {"grad_weight_mode=add", "write or accumulate"}},
        {"D=64,V=50,bias=yes", {"bias=yes", "true or false"}},
        {"D=64x,V=50", {"D=64x", "integer"}},
        {"D=,V=50", {"D=", "integer"}},
        {"D=64.0,V=50", {"D=64.0", "integer"}},
        {"D=64,V=99999999999999999999", {"V=99999999999999999999", "64 bits"}},
        {"D=64,V=50,softcap=3o", {"softcap=3o", "number"}},
        {"D=64,V=50,softcap=1e999", {"softcap=1e999", "number"}},
        {"D=64,V=50,outputs=loss+perplexity", {"outputs=loss+perplexity", "entropy"}},
        {"D=64,V=50,outputs=", {"outputs=", "entropy"}},
        {"D=64,V=50,outputs=loss+", {"outputs=loss+"}},
        {"D=64,V=50,outputs=lse+lse", {"outputs=lse+lse", "once"}},
        {"D=64,V=50,padded_vocab_size=0", {"padded_vocab_size=0", "at least"}},
    };
    for (const auto& [text, parts] : cases) {
        const std::string message = message_of([&, t = text] { return parse_spec(t); });
        for (const char* part : parts) EXPECT_THAT(message, HasSubstr(part)) << text;
    }
}

TEST(SpecText, BadSizesAndOptions_NameFieldValueAndRule) {
    const std::pair<const char*, std::vector<const char*>> cases[] = {
        {"D=12,V=50", {"hidden_size", "12", "multiple of 8"}},
        {"D=0,V=50", {"hidden_size", "0", "multiple of 8"}},
        {"D=-64,V=50", {"hidden_size", "-64", "multiple of 8"}},
        {"D=64,V=1", {"vocab_size", "1", "from 2"}},
        {"D=64,V=-3", {"vocab_size", "-3", "from 2"}},
        {"D=64,V=50,padded_vocab_size=49", {"padded_vocab_size", "49", "50"}},
        {"D=64,V=50,padded_vocab_size=-1", {"padded_vocab_size", "-1"}},
        {"D=64,V=9223372036854775807", {"vocab_size", "9223372036854775807"}},
        {"D=9223372036854775800,V=50", {"hidden_size", "9223372036854775800"}},
        {"D=1073741824,V=1073741824", {"padded_vocab_size", "64 bits"}},
        {"D=64,V=50,dtype=bf16,grad_weight_dtype=fp16", {"grad_weight_dtype", "fp16", "bf16", "fp32"}},
        {"D=64,V=50,dtype=bf16,weight_dtype=fp16", {"weight_dtype", "fp16", "bf16", "fp32"}},
        {"D=64,V=50,dtype=fp32,weight_dtype=bf16", {"weight_dtype", "bf16", "fp32"}},
        {"D=64,V=50,weight_dtype=float8", {"weight_dtype", "float8", "bf16", "fp32"}},
        {"D=64,V=50,dtype=fp32,grad_weight_dtype=bf16", {"grad_weight_dtype", "bf16", "fp32"}},
        {"D=64,V=50,tied,layout=hidden_major", {"layout", "hidden_major", "vocab_major", "tied"}},
        {"D=64,V=50,logit_scale=0", {"logit_scale", "not 0"}},
        {"D=64,V=50,logit_scale=nan", {"logit_scale", "nan"}},
        {"D=64,V=50,logit_scale=inf", {"logit_scale", "inf"}},
        {"D=64,V=50,logit_scale=1e39", {"logit_scale", "1e+39"}},
        {"D=64,V=50,logit_scale=1e-50", {"logit_scale", "1e-50"}},
        {"D=64,V=50,softcap=-1", {"softcap", "-1"}},
        {"D=64,V=50,softcap=nan", {"softcap", "nan"}},
        {"D=64,V=50,softcap=3e38", {"softcap", "reciprocal"}},
        {"D=64,V=50,label_smoothing=1.5", {"label_smoothing", "1.5", "0 to 1"}},
        {"D=64,V=50,label_smoothing=-0.1", {"label_smoothing", "-0.1"}},
        {"D=64,V=50,label_smoothing=nan", {"label_smoothing", "nan"}},
        {"D=64,V=50,z_loss=-1", {"z_loss", "-1"}},
        {"D=64,V=50,z_loss=nan", {"z_loss", "nan"}},
        {"D=64,V=50,z_loss=inf", {"z_loss", "inf"}},
    };
    for (const auto& [text, parts] : cases) {
        const std::string message = message_of([&, t = text] { return parse_spec(t); });
        for (const char* part : parts) EXPECT_THAT(message, HasSubstr(part)) << text;
    }
}

TEST(SpecText, EdgesOfEveryRule_AreAccepted) {
    for (const char* text : {"D=8,V=2", "D=64,V=50,padded_vocab_size=50", "D=64,V=50,label_smoothing=0", "D=64,V=50,label_smoothing=1",
                             "D=64,V=50,softcap=0", "D=64,V=50,logit_scale=-1", "D=1073741816,V=1073741824", "D=64,V=50,outputs=entropy"}) {
        EXPECT_NO_THROW((void)parse_spec(text)) << text;
    }
}

TEST(SpecJson, BadJson_NamesWhatIsWrong) {
    const std::pair<const char*, std::vector<const char*>> cases[] = {
        {"{", {"not valid JSON"}},
        {"[1]", {"JSON object", "array"}},
        {R"({"D":64,"V":50,"D":64})", {"'D'", "twice"}},
        {R"({"D":64})", {"V is missing"}},
        {R"({"D":64,"V":50,"N":3})", {"unknown key 'N'"}},
        {R"({"D":"64","V":50})", {"D = \"64\"", "integer"}},
        {R"({"D":64.5,"V":50})", {"D = 64.5", "integer"}},
        {R"({"D":64,"V":18446744073709551615})", {"V=18446744073709551615", "64 bits"}},
        {R"({"D":64,"V":50,"tied":1})", {"tied = 1", "true or false"}},
        {R"({"D":64,"V":50,"dtype":16})", {"dtype = 16", "string"}},
        {R"({"D":64,"V":50,"softcap":"30"})", {"softcap", "number"}},
        {R"({"D":64,"V":50,"softcap":null})", {"softcap = null", "number"}},
        {R"({"D":64,"V":50,"softcap":1e999})", {"not valid JSON"}},
        {R"({"D":64,"V":50,"outputs":[]})", {"outputs"}},
        {R"({"D":64,"V":50,"outputs":[3]})", {"outputs", "strings"}},
        {R"({"D":64,"V":50,"outputs":{"loss":true}})", {"outputs", "array of strings"}},
    };
    for (const auto& [text, parts] : cases) {
        const std::string message = message_of([&, t = text] { return parse_spec_json(t); });
        for (const char* part : parts) EXPECT_THAT(message, HasSubstr(part)) << text;
    }
    EXPECT_EQ(parse_spec_json(R"({"D":64,"V":50,"outputs":"lse+loss"})"), parse_spec("D=64,V=50,outputs=loss+lse"));
}

/// A text of that many brackets, one in another.
std::string nested(int levels) {
    return std::string(static_cast<std::size_t>(levels), '[') + std::string(static_cast<std::size_t>(levels), ']');
}

TEST(SpecJson, NestedDeeply_RefusedBeforeItTakesTheStack) {
    EXPECT_THAT(message_of([] { return parse_spec_json("{\"D\":" + nested(200'000) + "}"); }), HasSubstr("deep"));
    EXPECT_THAT(message_of([] { return parse_spec_json(nested(200'000)); }), HasSubstr("deep"));
    // A little of it is an ordinary mistake.
    EXPECT_THAT(message_of([] { return parse_spec_json("{\"D\":" + nested(8) + "}"); }), HasSubstr("[[[[[[[[]]]]]]]]: must be an integer"));
}

TEST(Spec, Normalized_FillsInPaddingAndDropsNegativeZero) {
    EXPECT_EQ(small().normalized().padded_vocab_size, 50);
    Spec spec = small();
    spec.softcap = -0.0;
    spec.z_loss = -0.0;
    EXPECT_FALSE(std::signbit(spec.normalized().softcap));
    EXPECT_EQ(SpecHash{}(spec.normalized()), SpecHash{}(small().normalized()));
    spec.outputs = {.loss = false};
    EXPECT_THAT(message_of([&] { return spec.normalized(); }), HasSubstr("outputs"));
    EXPECT_THAT(message_of([] {
                    return Spec{.hidden_size = 64, .vocab_size = 50, .dtype = DType::fp32, .grad_weight_dtype = DType::bf16}.normalized();
                }),
                AllOf(HasSubstr("grad_weight_dtype"), HasSubstr("bf16")));
    EXPECT_THAT(message_of([] { return Spec{.hidden_size = 64, .vocab_size = 50, .dtype = static_cast<DType>(9)}.normalized(); }),
                HasSubstr("dtype"));
}

// Keys of layers without the option stay what they were.
TEST(Spec, WeightDtype_IsPrintedWhereItIsNotTheDtype) {
    EXPECT_EQ(parse_spec("D=64,V=50,dtype=fp16,weight_dtype=fp16").text(), "D=64,V=50,dtype=fp16");
    EXPECT_EQ(parse_spec("D=64,V=50,dtype=fp32,weight_dtype=fp32"), parse_spec("D=64,V=50,dtype=fp32"));
    const Spec autocast = parse_spec("D=64,V=50,weight_dtype=fp32");
    EXPECT_EQ(autocast.text(), "D=64,V=50,dtype=bf16,weight_dtype=fp32");
    EXPECT_EQ(autocast.json(), R"({"D":64,"V":50,"dtype":"bf16","weight_dtype":"fp32"})");
    EXPECT_EQ(autocast.grad_weight_dtype, DType::fp32);
    EXPECT_EQ(weight_dtype(autocast), DType::fp32);
    EXPECT_TRUE(rounds_weight(autocast));
    const Spec narrow = parse_spec("D=64,V=50,weight_dtype=fp32,grad_weight_dtype=bf16");
    EXPECT_EQ(narrow.text(), "D=64,V=50,dtype=bf16,weight_dtype=fp32,grad_weight_dtype=bf16");
    EXPECT_EQ(parse_spec(narrow.text()), narrow);
    EXPECT_FALSE(rounds_weight(parse_spec("D=64,V=50,dtype=fp32")));
}

TEST(Spec, QuantizedWeight_IsPrintedAsTheWeightDtype) {
    const Spec rows = parse_spec("D=64,V=50,weight_dtype=float8_e4m3fn");
    EXPECT_EQ(rows.text(), "D=64,V=50,dtype=bf16,weight_dtype=e4m3");
    EXPECT_EQ(rows.json(), R"({"D":64,"V":50,"dtype":"bf16","weight_dtype":"e4m3"})");
    EXPECT_EQ(parse_spec(rows.json()), rows);
    EXPECT_EQ(rows.weight_format, WeightFormat::e4m3);
    EXPECT_EQ(rows.grad_weight_dtype, DType::bf16);
    EXPECT_EQ(weight_dtype(rows), DType::fp32);
    EXPECT_TRUE(rounds_weight(rows));
    EXPECT_EQ(weight_row_bytes(rows), 64);
    const Spec blocks = parse_spec("D=64,V=50,dtype=fp16,weight_dtype=e4m3,weight_block=128,bias,grad_weight_dtype=fp32");
    EXPECT_EQ(blocks.text(), "D=64,V=50,dtype=fp16,weight_dtype=e4m3,weight_block=128,grad_weight_dtype=fp32,bias");
    EXPECT_EQ(parse_spec(blocks.json()), blocks);
    const Spec nvfp4 = parse_spec("D=64,V=50,weight_dtype=nvfp4");
    EXPECT_EQ(nvfp4.text(), "D=64,V=50,dtype=bf16,weight_dtype=nvfp4");
    EXPECT_EQ(weight_row_bytes(nvfp4), 32);
    EXPECT_EQ((Spec{.hidden_size = 64, .vocab_size = 50, .weight_format = WeightFormat::nvfp4}.normalized()), nvfp4);
    EXPECT_NE(rows, nvfp4);
    EXPECT_NE(SpecHash{}(rows), SpecHash{}(nvfp4));
    EXPECT_NE(SpecHash{}(rows), SpecHash{}(parse_spec("D=64,V=50,weight_dtype=e4m3,weight_block=128")));
}

TEST(Spec, Fp8_IsInt8WhereItStandsAlone) {
    const Spec spec = parse_spec("D=64,V=50,fp8");
    EXPECT_EQ(spec.text(), "D=64,V=50,dtype=bf16,fp8=int8");
    EXPECT_EQ(spec.json(), R"({"D":64,"V":50,"dtype":"bf16","fp8":"int8"})");
    EXPECT_EQ(parse_spec(spec.json()), spec);
    EXPECT_EQ(spec.fp8, Fp8Operands::int8);
    EXPECT_EQ(spec.fp8_dlogits, Fp8Dlogits::e5m2);
    EXPECT_FALSE(rounds_weight(spec)) << "the weight in memory has the dtype's numbers";
    EXPECT_EQ(parse_spec_json(R"({"D":64,"V":50,"fp8":true})"), spec) << "as the bare key of a text";
    EXPECT_THROW((void)parse_spec_json(R"({"D":64,"V":50,"fp8":false})"), SpecError);
    const Spec e4m3 = parse_spec("D=64,V=50,fp8=e4m3,fp8_dlogits=e4m3,outputs=loss+lse");
    EXPECT_EQ(e4m3.text(), "D=64,V=50,dtype=bf16,fp8=e4m3,fp8_dlogits=e4m3,outputs=loss+lse");
    EXPECT_EQ(parse_spec(e4m3.json()), e4m3);
    const Spec shard = parse_spec("D=64,V=50,whole_vocab_size=90,grad_hidden_dtype=fp32,fp8");
    EXPECT_TRUE(is_fp8(shard) && is_shard(shard) && grad_hidden_dtype(shard) == DType::fp32);
    EXPECT_FALSE(is_fp8(parse_spec("D=64,V=50,weight_dtype=e4m3"))) << "a weight's codes are dequantised";
}

TEST(Spec, Fp8Scales_AreBothGivenOrNeither) {
    const Spec spec = parse_spec("D=64,V=50,fp8=e4m3,fp8_hidden_scale=0.25,fp8_weight_scale=1.5e-3,outputs=loss+lse");
    EXPECT_EQ(spec.text(), "D=64,V=50,dtype=bf16,fp8=e4m3,fp8_hidden_scale=0.25,fp8_weight_scale=0.0015,outputs=loss+lse");
    EXPECT_EQ(parse_spec(spec.text()), spec);
    EXPECT_EQ(parse_spec(spec.json()), spec);
    EXPECT_TRUE(has_fp8_scales(spec));
    EXPECT_FALSE(has_fp8_scales(parse_spec("D=64,V=50,fp8")));
    EXPECT_NO_THROW((void)parse_spec("D=64,V=50,fp8,fp8_hidden_scale=1e30,fp8_weight_scale=1e-30"));
    const std::pair<const char*, std::vector<const char*>> cases[] = {
        {"fp8=e4m3,fp8_hidden_scale=0.1", {"fp8_weight_scale = (none)", "both", "Hidden's alone is for weight_dtype=e4m3"}},
        {"fp8,fp8_weight_scale=0.1", {"fp8_hidden_scale = (none)", "both"}},
        {"fp8_hidden_scale=0.1", {"fp8_hidden_scale", "no fp8"}},
        {"fp8_weight_scale=0.1", {"fp8_weight_scale", "no fp8"}},
        {"fp8,fp8_hidden_scale=-1,fp8_weight_scale=1", {"fp8_hidden_scale = -1", "2^-100"}},
        {"fp8,fp8_hidden_scale=1,fp8_weight_scale=1e31", {"fp8_weight_scale = 1e+31", "2^100"}},
        {"fp8,fp8_hidden_scale=nan,fp8_weight_scale=1", {"fp8_hidden_scale = nan"}},
        {"fp8,fp8_hidden_scale=1,fp8_weight_scale=inf", {"fp8_weight_scale = inf"}},
        {"fp8,fp8_hidden_scale=x,fp8_weight_scale=1", {"fp8_hidden_scale=x", "number"}},
    };
    for (const auto& [keys, parts] : cases) {
        const std::string message = message_of([&, t = keys] { return parse_spec(std::string("D=64,V=50,") + t); });
        for (const char* part : parts) EXPECT_THAT(message, HasSubstr(part)) << keys;
    }
}

TEST(Spec, Fp8_RefusesByNameWhatItHasNoArithmeticFor) {
    const std::pair<const char*, std::vector<const char*>> cases[] = {
        {"fp8=e5m2", {"fp8=e5m2", "int8 or e4m3"}},
        {"fp8,fp8_dlogits=int8", {"fp8_dlogits=int8", "e5m2 or e4m3"}},
        {"fp8_dlogits=e4m3", {"fp8_dlogits", "no fp8"}},
        {"fp8_dlogits", {"fp8_dlogits has no value"}},
        {"fp8,weight_dtype=fp32", {"weight_dtype", "fp32", "leave fp8 out"}},
        {"fp8,weight_dtype=e4m3", {"fp8 = int8", "e4m3", "flce.Fp8('e4m3')"}},
        {"fp8=e4m3,weight_dtype=nvfp4", {"weight_dtype = nvfp4", "a scale a row", "leave fp8 out"}},
        {"fp8=e4m3,weight_dtype=e4m3,weight_block=128", {"weight_block = 128", "0 (a scale a row)", "leave fp8 out"}},
        {"fp8=e4m3,weight_dtype=e4m3,fp8_hidden_scale=1,fp8_weight_scale=1", {"fp8_weight_scale = 1", "(fp8_hidden_scale, None)"}},
        {"fp8=e4m3,weight_dtype=e4m3,tied", {"tied", "frozen"}},
        {"fp8,teacher_hidden_size=64", {"teacher_hidden_size", "leave fp8 out"}},
        {"fp8,teacher_top_k=4", {"teacher_top_k", "leave fp8 out"}},
        {"fp8,top_k=4", {"top_k", "leave fp8 out"}},
        {"fp8,label_smoothing=0.1,softcap=30", {"label_smoothing", "softcap", "leave fp8"}},
        {"fp8,class_groups", {"class_groups", "leave fp8 out"}},
        {"fp8,batch_invariant", {"batch_invariant", "leave fp8 out"}},
    };
    for (const auto& [keys, parts] : cases) {
        const std::string message = message_of([&, t = keys] { return parse_spec(std::string("D=64,V=50,") + t); });
        for (const char* part : parts) EXPECT_THAT(message, HasSubstr(part)) << keys;
    }
    EXPECT_THAT(message_of([] { return parse_spec("D=131080,V=50,fp8"); }), AllOf(HasSubstr("hidden_size"), HasSubstr("int32")));
    for (const char* text : {"D=131080,V=50,fp8=e4m3", "D=131072,V=50,fp8", "D=64,V=50,fp8,tied,dtype=fp16,bias,softcap=30,z_loss=1e-4",
                             "D=64,V=50,fp8,class_weight,class_offset,temperature,token_weight,logit_scale=2,outputs=loss+lse+logprobs",
                             "D=64,V=50,fp8,class_weight,label_smoothing=0.1", "D=64,V=50,fp8,layout=hidden_major,bias"}) {
        EXPECT_NO_THROW((void)parse_spec(text)) << text;
    }
}

TEST(Spec, Fp8_OfCodesWithAScaleARow) {
    const Spec spec = parse_spec("D=64,V=50,fp8=e4m3,weight_dtype=e4m3,fp8_hidden_scale=0.25,label_smoothing=0.1,bias");
    EXPECT_TRUE(is_fp8(spec) && is_quantized(spec) && has_fp8_scales(spec));
    EXPECT_FALSE(rounds_weight(spec)) << "the logits are products of the codes themselves";
    EXPECT_EQ(parse_spec(spec.text()), spec);
    EXPECT_EQ(parse_spec(spec.json()), spec);
    EXPECT_THAT(spec.text(), AllOf(HasSubstr("weight_dtype=e4m3"), HasSubstr("fp8=e4m3,fp8_hidden_scale=0.25")));
}

TEST(SpecHash, EveryField_ChangesIt) {
    const Spec base = small().normalized();
    std::vector<Spec> specs(18, base);
    specs[1].hidden_size = 72;
    specs[2].vocab_size = 49;
    specs[3].padded_vocab_size = 51;
    specs[4].dtype = DType::fp16;
    specs[5].layout = WeightLayout::hidden_major;
    specs[6].grad_weight_dtype = DType::fp32;
    specs[7].grad_weight_mode = GradMode::accumulate;
    specs[8].tied = true;
    specs[9].bias = true;
    specs[10].class_weight = true;
    specs[11].logit_scale = 2;
    specs[12].softcap = 30;
    specs[13].label_smoothing = 0.1;
    specs[14].z_loss = 0.1;
    specs[15].weight_dtype = DType::fp32;
    specs[16].teacher_top_k = 4;
    specs[17].teacher_top_k = 4;
    specs[17].hard_weight = 0.5;
    specs.push_back(base);
    specs.back().bias = specs.back().class_offset = true;
    specs.push_back(specs.back());
    specs.back().offset_gradient = true;
    for (bool Spec::* flag :
         {&Spec::class_offset, &Spec::class_groups, &Spec::temperature, &Spec::token_weight, &Spec::batch_invariant, &Spec::dft}) {
        specs.push_back(base);
        specs.back().*flag = true;
    }
    specs.insert(specs.end(), 5, base);
    for (std::size_t i = specs.size() - 5; i < specs.size(); ++i) specs[i].teacher_hidden_size = 64;
    specs[specs.size() - 1].divergence_beta = 0.5;
    specs[specs.size() - 2].teacher_bias = true;
    specs[specs.size() - 3].teacher_logit_scale = 2;
    specs[specs.size() - 4].teacher_softcap = 30;
    specs.push_back(base);
    specs.back().top_k = 4;
    specs.insert(specs.end(), 3, base);
    specs[specs.size() - 3].fp8 = Fp8Operands::int8;
    specs[specs.size() - 2].fp8 = Fp8Operands::e4m3;
    specs[specs.size() - 1].fp8 = Fp8Operands::e4m3;
    specs[specs.size() - 1].fp8_dlogits = Fp8Dlogits::e4m3;
    specs.insert(specs.end(), 2, specs[specs.size() - 3]);
    for (std::size_t i = specs.size() - 2; i < specs.size(); ++i) specs[i].fp8_hidden_scale = specs[i].fp8_weight_scale = 0.5;
    specs.back().fp8_weight_scale = 0.25;
    specs.insert(specs.end(), 2, base);
    specs[specs.size() - 1].whole_vocab_size = 100;
    specs[specs.size() - 2].grad_hidden_dtype = DType::fp32;
    for (bool Outputs::* output :
         {&Outputs::loss, &Outputs::lse, &Outputs::logprobs, &Outputs::entropy, &Outputs::top1, &Outputs::log_sum_sq_probs}) {
        specs.push_back(base);
        specs.back().outputs.*output = !(specs.back().outputs.*output);
    }
    std::unordered_set<std::size_t> hashes;
    for (const Spec& spec : specs) hashes.insert(SpecHash{}(spec));
    EXPECT_EQ(hashes.size(), specs.size());
}

TEST(Spec, ElementBytes_MatchTheDtype) {
    EXPECT_EQ(element_bytes(DType::bf16), 2U);
    EXPECT_EQ(element_bytes(DType::fp16), 2U);
    EXPECT_EQ(element_bytes(DType::fp32), 4U);
}

}  // namespace
}  // namespace flce
