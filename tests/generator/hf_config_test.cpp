// Output layers of well-known models, from the keys of their published configurations.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flce/error.hpp"
#include "flce/spec.hpp"

namespace flce {
namespace {

struct Model {
    const char* name;
    const char* config;
    const char* spec;
};

TEST(HfConfig, KnownModels_GiveTheirOutputLayer) {
    const Model models[] = {
        {"GPT-2", R"({"model_type":"gpt2","n_embd":768,"n_ctx":1024,"vocab_size":50257})", "D=768,V=50257,dtype=fp32,tied"},
        {"Llama-3.2-1B", R"({"hidden_size":2048,"vocab_size":128256,"tie_word_embeddings":true,"torch_dtype":"bfloat16"})",
         "D=2048,V=128256,dtype=bf16,tied"},
        {"Llama-3.1-8B", R"({"hidden_size":4096,"vocab_size":128256,"tie_word_embeddings":false,"torch_dtype":"bfloat16"})",
         "D=4096,V=128256,dtype=bf16"},
        {"Qwen3-1.7B", R"({"hidden_size":2048,"vocab_size":151936,"tie_word_embeddings":true,"torch_dtype":"bfloat16"})",
         "D=2048,V=151936,dtype=bf16,tied"},
        {"Qwen3-8B", R"({"hidden_size":4096,"vocab_size":151936,"tie_word_embeddings":false,"dtype":"bfloat16"})",
         "D=4096,V=151936,dtype=bf16"},
        {"Gemma-2-2B", R"({"hidden_size":2304,"vocab_size":256000,"final_logit_softcapping":30.0,"torch_dtype":"float32"})",
         "D=2304,V=256000,dtype=fp32,tied,softcap=30"},
        {"Gemma-3-4B", R"({"model_type":"gemma3","text_config":{"hidden_size":2560,"vocab_size":262208,"final_logit_softcapping":null},
                           "vision_config":{"hidden_size":1152},"torch_dtype":"bfloat16"})",
         "D=2560,V=262208,dtype=bf16,tied"},
        {"Mistral-7B-v0.3", R"({"hidden_size":4096,"vocab_size":32768,"tie_word_embeddings":false,"torch_dtype":"bfloat16"})",
         "D=4096,V=32768,dtype=bf16"},
        {"Mistral-Nemo-12B", R"({"hidden_size":5120,"vocab_size":131072,"tie_word_embeddings":false,"torch_dtype":"bfloat16"})",
         "D=5120,V=131072,dtype=bf16"},
        {"Phi-4", R"({"model_type":"phi3","hidden_size":5120,"vocab_size":100352,"tie_word_embeddings":false,"torch_dtype":"bfloat16"})",
         "D=5120,V=100352,dtype=bf16"},
        {"gpt-oss-20b", R"({"hidden_size":2880,"vocab_size":201088,"tie_word_embeddings":false,"torch_dtype":"bfloat16"})",
         "D=2880,V=201088,dtype=bf16"},
        {"DeepSeek-V3", R"({"hidden_size":7168,"vocab_size":129280,"tie_word_embeddings":false,"torch_dtype":"bfloat16"})",
         "D=7168,V=129280,dtype=bf16"},
        {"Cohere", R"({"hidden_size":8192,"vocab_size":256000,"logit_scale":0.0625,"torch_dtype":"float16"})",
         "D=8192,V=256000,dtype=fp16,tied,logit_scale=0.0625"},
        {"Granite", R"({"hidden_size":2048,"vocab_size":49152,"logits_scaling":8.0,"tie_word_embeddings":true,"torch_dtype":"bfloat16"})",
         "D=2048,V=49152,dtype=bf16,tied,logit_scale=0.125"},
        {"Phi-2", R"({"model_type":"phi","hidden_size":2560,"vocab_size":51200,"tie_word_embeddings":false,"torch_dtype":"float16"})",
         "D=2560,V=51200,dtype=fp16,bias"},
        {"RecurrentGemma", R"({"model_type":"recurrent_gemma","hidden_size":2560,"vocab_size":256000,"logits_soft_cap":30.0})",
         "D=2560,V=256000,dtype=fp32,tied,softcap=30"},
        {"xLSTM",
         R"({"model_type":"xlstm","hidden_size":4096,"vocab_size":50304,"output_logit_soft_cap":30.0,"tie_word_embeddings":false})",
         "D=4096,V=50304,dtype=fp32,softcap=30"},
        {"MiniCPM3", R"({"model_type":"minicpm3","hidden_size":2560,"vocab_size":73448,"dim_model_base":256})",
         "D=2560,V=73448,dtype=fp32,tied,logit_scale=0.1"},
        {"HyperCLOVA X", R"({"model_type":"hyperclovax","hidden_size":64,"vocab_size":50,"logits_scaling":0.125})",
         "D=64,V=50,dtype=fp32,tied,logit_scale=0.125"},
        {"BERT", R"({"model_type":"bert","hidden_size":768,"vocab_size":30522})", "D=768,V=30522,dtype=fp32,tied,bias"},
        {"ELECTRA", R"({"model_type":"electra","hidden_size":256,"embedding_size":128,"vocab_size":30522})",
         "D=128,V=30522,dtype=fp32,tied,bias"},
        {"Phi-3.5-MoE", R"({"model_type":"phimoe","hidden_size":4096,"vocab_size":32064,"lm_head_bias":true,"tie_word_embeddings":false})",
         "D=4096,V=32064,dtype=fp32,bias"},
        {"encoder and decoder",
         R"({"model_type":"encoder-decoder","decoder":{"model_type":"bert","hidden_size":768,"vocab_size":30522},)"
         R"("tie_word_embeddings":false})",
         "D=768,V=30522,dtype=fp32,bias"},
        {"a width that Python pads", R"({"hidden_size":60,"vocab_size":50})", "D=64,V=50,dtype=fp32,tied"},
    };
    for (const Model& model : models) EXPECT_EQ(spec_from_hf_config(model.config).text(), model.spec) << model.name;
}

TEST(HfConfig, NestedTextConfig_ComesBeforeTheTop) {
    const Spec spec = spec_from_hf_config(R"({"hidden_size":8,"tie_word_embeddings":false,"dtype":"float16",)"
                                          R"("text_config":{"hidden_size":64,"vocab_size":50,"dtype":"torch.bfloat16"}})");
    EXPECT_EQ(spec.text(), "D=64,V=50,dtype=bf16");
}

TEST(HfConfig, CompositeModel_TiesAsItsOwnConfigSays) {
    const auto tied = [](const char* own, const char* text) {
        return spec_from_hf_config(fmt::format(R"({{{}"text_config":{{{}"hidden_size":64,"vocab_size":50}}}})", own, text)).tied;
    };
    EXPECT_TRUE(tied(R"("tie_word_embeddings":true,)", R"("tie_word_embeddings":false,)"));
    EXPECT_FALSE(tied(R"("tie_word_embeddings":false,)", R"("tie_word_embeddings":true,)"));
    EXPECT_FALSE(tied("", R"("tie_word_embeddings":false,)"));
    EXPECT_TRUE(tied("", ""));
}

TEST(HfConfig, BadConfig_NamesTheKey) {
    // Copied for text_config, by recursion.
    const std::string deep = R"({"text_config":{"x":)" + std::string(200'000, '[') + std::string(200'000, ']') + "}}";
    const std::pair<const char*, const char*> cases[] = {
        {"nonsense", "not valid JSON"},
        {R"({"vocab_size":50})", "hidden_size is missing"},
        {R"({"hidden_size":64})", "vocab_size is missing"},
        {R"({"hidden_size":null,"vocab_size":50})", "hidden_size is missing"},
        {R"({"hidden_size":"64","vocab_size":50})", "hidden_size = \"64\""},
        {R"({"hidden_size":64,"vocab_size":18446744073709551615})", "vocab_size = 18446744073709551615"},
        {R"({"hidden_size":-60,"vocab_size":50})", "hidden_size (D) = -60"},
        {R"({"hidden_size":64,"vocab_size":50,"torch_dtype":"float8_e4m3fn"})", "float8_e4m3fn"},
        {R"({"hidden_size":64,"vocab_size":50,"torch_dtype":16})", "dtype = 16"},
        {R"({"hidden_size":64,"vocab_size":50,"tie_word_embeddings":"yes"})", "tie_word_embeddings"},
        {R"({"hidden_size":64,"vocab_size":50,"final_logit_softcapping":"30"})", "final_logit_softcapping"},
        {R"({"hidden_size":64,"vocab_size":50,"logits_scaling":0})", "logits_scaling"},
        {deep.c_str(), "deep"},
    };
    for (const auto& [config, part] : cases) {
        try {
            (void)spec_from_hf_config(config);
            ADD_FAILURE() << config;
        } catch (const SpecError& error) {
            EXPECT_THAT(error.what(), testing::HasSubstr(part)) << config;
        }
    }
}

}  // namespace
}  // namespace flce
