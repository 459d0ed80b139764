// A Spec that makes no sense is refused when it is read and when a kernel is asked for, by the same rule and with the field's name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

struct BadText {
    const char* name;
    const char* text;
    const char* field;  ///< named in the message
    const char* value;  ///< quoted in the message
    friend std::ostream& operator<<(std::ostream& out, const BadText& bad) { return out << bad.text; }
};

constexpr BadText kBadTexts[] = {
    {"unknown_key", "D=64,V=100,color=blue", "color", ""},
    {"repeated_key", "D=64,V=100,D=64", "D", ""},
    {"missing_hidden_size", "V=100", "D", ""},
    {"missing_vocab_size", "D=64", "V", ""},
    {"one_class", "D=64,V=1", "V", "1"},
    {"no_class", "D=64,V=0", "V", "0"},
    {"negative_vocab_size", "D=64,V=-5", "V", "-5"},
    {"negative_hidden_size", "D=-8,V=100", "D", "-8"},
    {"hidden_size_no_multiple_of_8", "D=60,V=100", "D", "60"},
    {"hidden_size_under_8", "D=4,V=100", "D", "4"},
    {"hidden_size_no_number", "D=many,V=100", "D", "many"},
    {"hidden_size_past_64_bits", "D=99999999999999999999999,V=100", "D", "99999999999999999999999"},
    {"product_past_64_bits", "D=4611686018427387904,V=4611686018427387904", "", ""},
    {"padding_under_vocab_size", "D=64,V=100,padded_vocab_size=99", "padded_vocab_size", "99"},
    {"unknown_dtype", "D=64,V=100,dtype=fp8", "dtype", "fp8"},
    {"unknown_layout", "D=64,V=100,layout=diagonal", "layout", "diagonal"},
    {"tied_hidden_major", "D=64,V=100,layout=hidden_major,tied", "tied", ""},
    {"gradient_dtype_neither", "D=64,V=100,dtype=bf16,grad_weight_dtype=fp16", "grad_weight_dtype", "fp16"},
    {"zero_scale", "D=64,V=100,logit_scale=0", "logit_scale", "0"},
    {"infinite_scale", "D=64,V=100,logit_scale=inf", "logit_scale", "inf"},
    {"negative_softcap", "D=64,V=100,softcap=-3", "softcap", "-3"},
    {"not_a_number_softcap", "D=64,V=100,softcap=nan", "softcap", "nan"},
    {"smoothing_over_1", "D=64,V=100,label_smoothing=1.5", "label_smoothing", "1.5"},
    {"negative_smoothing", "D=64,V=100,label_smoothing=-0.1", "label_smoothing", "-0.1"},
    {"negative_z_loss", "D=64,V=100,z_loss=-1", "z_loss", "-1"},
    {"too_many_classes_of_a_teacher", "D=64,V=1000,teacher_top_k=1025", "teacher_top_k", "1025"},
    {"negative_teacher_top_k", "D=64,V=100,teacher_top_k=-1", "teacher_top_k", "-1"},
    {"teacher_top_k_past_32_bits", "D=64,V=100,teacher_top_k=4294967297", "teacher_top_k", "4294967297"},
    {"teacher_hidden_size_no_multiple_of_8", "D=64,V=100,teacher_hidden_size=12", "teacher_hidden_size", "12"},
    {"divergence_beta_over_1", "D=64,V=100,teacher_hidden_size=64,divergence_beta=1.5", "divergence_beta", "1.5"},
    {"divergence_beta_near_1", "D=64,V=100,teacher_hidden_size=64,divergence_beta=0.9999", "divergence_beta", "from 2^-10 to 1 - 2^-10"},
    {"divergence_beta_without_teacher", "D=64,V=100,divergence_beta=0.5", "divergence_beta", "teacher_hidden_size"},
    {"teacher_bias_without_teacher", "D=64,V=100,teacher_bias", "teacher_bias", "teacher_hidden_size"},
    {"teacher_softcap_below_0", "D=64,V=100,teacher_hidden_size=64,teacher_softcap=-1", "teacher_softcap", "-1"},
    {"teacher_logit_scale_0", "D=64,V=100,teacher_hidden_size=64,teacher_logit_scale=0", "teacher_logit_scale", "0"},
    {"divergence_with_smoothing", "D=64,V=100,teacher_hidden_size=64,label_smoothing=0.1", "label_smoothing", "no target"},
    {"offset_gradient_without_offset", "D=64,V=100,bias,offset_gradient", "offset_gradient", "no class_offset"},
    {"offset_gradient_without_bias", "D=64,V=100,class_offset,offset_gradient", "offset_gradient", "no bias"},
    {"divergence_with_class_offset", "D=64,V=100,teacher_hidden_size=64,class_offset", "class_offset", "biases"},
    {"groups_with_smoothing", "D=64,V=100,class_groups,label_smoothing=0.1", "label_smoothing", "class_groups"},
    {"groups_with_teacher", "D=64,V=100,class_groups,teacher_top_k=4", "teacher_top_k", "class_groups"},
    {"groups_with_support", "D=64,V=100,class_groups,teacher_top_k=4,support", "teacher_top_k", "class_groups"},
    {"groups_with_divergence", "D=64,V=100,class_groups,teacher_hidden_size=64", "teacher_hidden_size", "class_groups"},
    {"groups_with_top_k", "D=64,V=100,class_groups,top_k=4", "top_k", "class_groups"},
    {"divergence_with_logprobs", "D=64,V=100,teacher_hidden_size=64,outputs=loss+logprobs", "outputs", "teacher_hidden_size"},
    {"top_k_below_0", "D=64,V=100,top_k=-1", "top_k", "0 (none) to 256"},
    {"top_k_over_256", "D=64,V=1000,top_k=257", "top_k", "0 (none) to 256"},
    {"top_k_over_classes", "D=64,V=100,top_k=101", "top_k", "classes"},
    {"top_k_with_divergence", "D=64,V=100,top_k=4,teacher_hidden_size=64", "top_k", "one head"},
    {"top_k_with_fp32_weight", "D=64,V=100,top_k=4,weight_dtype=fp32", "weight_dtype", "top_k"},
    {"unknown_weight_dtype", "D=64,V=100,weight_dtype=int4", "weight_dtype", "e4m3 (float8_e4m3fn) or nvfp4"},
    {"codes_as_dtype", "D=64,V=100,dtype=e4m3", "dtype", "e4m3"},
    {"codes_in_columns", "D=64,V=100,weight_dtype=e4m3,layout=hidden_major", "layout", "vocab_major"},
    {"codes_under_fp32", "D=64,V=100,dtype=fp32,weight_dtype=nvfp4", "dtype", "cast hidden"},
    {"codes_in_odd_rows", "D=72,V=100,weight_dtype=nvfp4", "hidden_size", "multiple of 16"},
    {"codes_tied", "D=64,V=100,weight_dtype=e4m3,tied", "tied", "frozen"},
    {"codes_accumulated", "D=64,V=100,weight_dtype=e4m3,bias,grad_weight_mode=accumulate", "grad_weight_mode", "frozen"},
    {"codes_with_divergence", "D=64,V=100,weight_dtype=e4m3,teacher_hidden_size=64", "weight_dtype", "teacher_hidden_size"},
    {"block_of_numbers", "D=64,V=100,weight_block=128", "weight_block", "128"},
    {"block_of_groups", "D=64,V=100,weight_dtype=nvfp4,weight_block=128", "weight_block", "e4m3"},
    {"block_of_64", "D=64,V=100,weight_dtype=e4m3,weight_block=64", "weight_block", "64"},
    {"hard_weight_over_1", "D=64,V=100,teacher_top_k=4,hard_weight=1.5", "hard_weight", "1.5"},
    {"hard_weight_not_a_number", "D=64,V=100,teacher_top_k=4,hard_weight=nan", "hard_weight", "nan"},
    {"hard_weight_without_teacher", "D=64,V=100,hard_weight=0.5", "hard_weight", "teacher_top_k"},
    {"teacher_with_class_weight", "D=64,V=100,teacher_top_k=4,class_weight", "class_weight", "teacher_top_k"},
    {"teacher_with_dft", "D=64,V=100,teacher_top_k=4,dft,outputs=loss+logprobs", "dft", "teacher_top_k"},
    {"teacher_without_loss", "D=64,V=100,teacher_top_k=4,outputs=logprobs", "teacher_top_k", "loss"},
    {"shard_larger_than_the_whole", "D=64,V=100,whole_vocab_size=99", "whole_vocab_size", "99"},
    {"dft_without_logprob", "D=64,V=100,dft,outputs=loss", "dft", "logprobs"},
    {"wide_grad_hidden_without_shards", "D=64,V=100,grad_hidden_dtype=fp32", "grad_hidden_dtype", "fp32"},
    {"unknown_output", "D=64,V=100,outputs=loss+magic", "outputs", "magic"},
};

class BadSpec : public testing::TestWithParam<BadText> {};

TEST_P(BadSpec, Text_NamesTheField) {
    const BadText& bad = GetParam();
    try {
        const Spec spec = parse_spec(bad.text);
        FAIL() << bad.text << " was read as " << spec.text();
    } catch (const SpecError& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr(bad.field));
        EXPECT_THAT(error.what(), testing::HasSubstr(bad.value));
        EXPECT_EQ(error.kind(), ErrorKind::spec);
    }
}

std::string text_name_of(const testing::TestParamInfo<BadText>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Texts, BadSpec, testing::ValuesIn(kBadTexts), text_name_of);

struct BadField {
    const char* name;
    void (*change)(Spec&);
    const char* field;
    friend std::ostream& operator<<(std::ostream& out, const BadField& bad) { return out << bad.name; }
};

constexpr BadField kBadFields[] = {
    {"hidden_size", [](Spec& s) { s.hidden_size = 12; }, "D"},
    {"hidden_size_left_out", [](Spec& s) { s.hidden_size = 0; }, "D"},
    {"vocab_size", [](Spec& s) { s.vocab_size = 1; }, "V"},
    {"padded_vocab_size", [](Spec& s) { s.padded_vocab_size = 5; }, "padded_vocab_size"},
    {"overflow", [](Spec& s) { s.hidden_size = s.vocab_size = std::int64_t{1} << 62; }, ""},
    {"dtype", [](Spec& s) { s.dtype = static_cast<DType>(17); }, "dtype"},
    {"softcap", [](Spec& s) { s.softcap = -1; }, "softcap"},
    {"nothing_asked_for", [](Spec& s) { s.outputs = {false, false, false, false}; }, "outputs"},
};

class BadSpecObject : public testing::TestWithParam<std::tuple<Target, BadField>> {};

TEST_P(BadSpecObject, GetKernel_NamesTheField) {
    const auto& [target, bad] = GetParam();
    FLCE_REQUIRE_TARGET(target);
    Spec spec;
    spec.hidden_size = 64;
    spec.vocab_size = 100;
    bad.change(spec);
    try {
        (void)kernel_on(target, spec);
        FAIL() << "a kernel was made for " << bad.name;
    } catch (const SpecError& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr(bad.field));
    }
}

std::string field_name_of(const testing::TestParamInfo<std::tuple<Target, BadField>>& info) { return std::get<1>(info.param).name; }
INSTANTIATE_TEST_SUITE_P(Cpu, BadSpecObject, testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kBadFields)), field_name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, BadSpecObject, testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kBadFields)), field_name_of);

TEST(BadPlan, UnreadableOrIllegal_IsRefused) {
    FLCE_REQUIRE_TARGET(Target::cpu);
    const Spec spec = parse_spec("D=64,V=100");
    for (const char* plan : {"nonsense", "path=quantum", "path=cpu,path=cpu"})
        EXPECT_THROW((void)kernel_on(Target::cpu, spec, plan), PlanError) << plan;
    Plan huge = kernel_on(Target::cpu, spec)->plan();
    huge.cpu.micro_n = 1 << 20;
    EXPECT_THROW((void)kernel_on(Target::cpu, spec, huge.text()), PlanError);
}

TEST(BadDevice, Unknown_IsRefusedWithTheKnownOnes) {
    try {
        Session session({.device = "abacus", .disk_cache = false});
        (void)session.get_kernel(parse_spec("D=64,V=100"));
        FAIL();
    } catch (const EnvironmentError& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr("abacus"));
    }
}

}  // namespace
}  // namespace flce::test
