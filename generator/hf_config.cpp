// The output layer that a Hugging Face config.json describes. Python reads equal options of a model's configuration
// (flce.huggingface.options_of); a test compares both, and the models themselves, over every class of transformers.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

#include "flce/error.hpp"
#include "flce/spec.hpp"
#include "generator/json_object.hpp"
#include "generator/spec_keys.hpp"

namespace flce {
namespace {

using nlohmann::json;
using Names = std::span<const std::string_view>;

// Names that one number has in different models.
constexpr std::string_view kHiddenSize[] = {"hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embed_dim"};
constexpr std::string_view kVocabSize[] = {"unpadded_vocab_size", "vocab_size", "tgt_vocab_size"};
constexpr std::string_view kDtype[] = {"dtype", "torch_dtype"};
constexpr std::string_view kSoftcap[] = {"final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"};
constexpr std::string_view kFactors[] = {"logit_scale", "lm_head_multiplier", "output_multiplier"};
constexpr std::string_view kDivisor = "logits_scaling";
constexpr std::string_view kBaseSize = "dim_model_base";  // hidden states are divided by hidden_size / this, as MiniCPM's are

// Facts that follow from model_type alone.
constexpr std::string_view kFactorTypes[] = {"hyperclovax", "hyperclovax_vision_v2"};    // multiply by logits_scaling
constexpr std::string_view kEmbeddingSizeTypes[] = {"albert", "electra", "mobilebert"};  // heads as wide as embedding_size
constexpr std::string_view kBiasTypes[] = {"albert",
                                           "bert",
                                           "bert-generation",
                                           "big_bird",
                                           "camembert",
                                           "codegen",
                                           "convbert",
                                           "ctrl",
                                           "data2vec-text",
                                           "deberta",
                                           "deberta-v2",
                                           "distilbert",
                                           "electra",
                                           "ernie",
                                           "esmc",
                                           "flaubert",
                                           "fnet",
                                           "funnel",
                                           "git",
                                           "gptj",
                                           "gte",
                                           "ibert",
                                           "jina_embeddings_v3",
                                           "layoutlm",
                                           "longformer",
                                           "luke",
                                           "megatron-bert",
                                           "mobilebert",
                                           "mpnet",
                                           "mra",
                                           "nomic_bert",
                                           "nystromformer",
                                           "phi",
                                           "reformer",
                                           "rembert",
                                           "roberta",
                                           "roberta-prelayernorm",
                                           "roc_bert",
                                           "roformer",
                                           "squeezebert",
                                           "tapas",
                                           "xlm",
                                           "xlm-roberta",
                                           "xlm-roberta-xl",
                                           "xlnet",
                                           "xmod",
                                           "yoso"};

struct BiasKey {
    std::string_view key;
    std::string_view type;  ///< model_type whose output layer has a bias by this flag; "": every model_type
};
constexpr BiasKey kBiasKeys[] = {
    {"lm_head_bias", ""},     {"decoder_bias", "modernbert"}, {"decoder_bias", "modernbert-decoder"},
    {"mlp_bias", "eurobert"}, {"use_bias", "ernie4_5_moe"},
};

bool has(Names names, std::string_view name) { return std::ranges::find(names, name) != names.end(); }

[[noreturn]] void refuse(std::string_view name, const json& value, std::string_view allowed) {
    throw SpecError(fmt::format("config: {} = {}: must be {}", name, value.dump(), allowed));
}

/// Looks keys up where Hugging Face keeps them: in the language model's part of a composite model first, then at the top.
class HfConfig {
public:
    explicit HfConfig(const json& config) : config_(config), text_(config) {
        for (const char* part : {"text_config", "decoder"}) {
            const auto nested = config.find(part);
            if (nested == config.end() || !nested->is_object()) continue;
            text_ = *nested;
            break;
        }
    }

    /// The first of `names` that is there and not null, else nullptr.
    [[nodiscard]] const json* find(Names names) const {
        for (const json* level : {&text_, &config_}) {
            if (const json* value = find_in(*level, names)) return value;
        }
        return nullptr;
    }

    [[nodiscard]] const json* find(const std::string_view& name) const { return find(Names(&name, 1)); }

    /// `name`: what messages call it.
    [[nodiscard]] std::int64_t size(std::string_view name, Names names) const {
        const json* value = find(names);
        if (value == nullptr) throw SpecError(fmt::format("config: {} is missing (also looked for in text_config)", name));
        if (!value->is_number_integer()) refuse(name, *value, "an integer");
        if (value->is_number_unsigned() && value->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) {
            refuse(name, *value, "an integer that fits in 64 bits");
        }
        return value->get<std::int64_t>();
    }

    [[nodiscard]] double number(std::string_view name, double absent) const {
        const json* value = find(name);
        if (value == nullptr) return absent;
        if (!value->is_number()) refuse(name, *value, "a number");
        return value->get<double>();
    }

    [[nodiscard]] bool flag(std::string_view name, bool absent) const { return flag_of(name, find(name), absent); }

    /// A composite model ties its embeddings as its own configuration says, whatever its language model's says.
    [[nodiscard]] bool tied() const {
        static constexpr std::string_view name = "tie_word_embeddings";
        const json* own = find_in(config_, Names(&name, 1));
        return flag_of(name, own != nullptr ? own : find(name), true);  // Hugging Face's default
    }

    [[nodiscard]] std::string model_type() const {
        const json* value = find("model_type");
        return value != nullptr && value->is_string() ? value->get<std::string>() : "";
    }

private:
    static const json* find_in(const json& level, Names names) {
        for (const std::string_view name : names) {
            const auto found = level.find(name);
            if (found != level.end() && !found->is_null()) return &*found;
        }
        return nullptr;
    }
    static bool flag_of(std::string_view name, const json* value, bool absent) {
        if (value == nullptr) return absent;
        if (!value->is_boolean()) refuse(name, *value, "true or false");
        return value->get<bool>();
    }

    const json& config_;
    json text_;
};

DType hf_dtype(const HfConfig& config) {
    const json* value = config.find(kDtype);
    if (value == nullptr) return DType::fp32;  // Hugging Face's default
    if (const auto dtype = parse_dtype(value->is_string() ? value->get<std::string>() : "")) return *dtype;
    refuse("dtype", *value, "bfloat16, float16 or float32");
}

/// Width of what reaches the output layer, in a multiple of 8 as Python pads it.
std::int64_t hf_hidden_size(const HfConfig& config, std::string_view type) {
    std::int64_t size = config.size("hidden_size", kHiddenSize);
    for (const std::string_view name : {"embedding_size", "output_embedding_size"}) {
        const bool wide = name == "embedding_size" ? has(kEmbeddingSizeTypes, type) : type == "rembert";
        if (wide && config.find(name) != nullptr) size = config.size(name, Names(&name, 1));
    }
    if (type == "reformer" && size < INT64_MAX / 2) size *= 2;  // both halves of a reversible layer
    return size > 0 && size < INT64_MAX - 8 ? (size + 7) / 8 * 8 : size;
}

double hf_softcap(const HfConfig& config) {
    double cap = 0;
    for (const std::string_view name : kSoftcap) {
        if (cap == 0) cap = config.number(name, 0.0);
    }
    return cap;
}

double hf_logit_scale(const HfConfig& config, std::string_view type) {
    double scale = 1;
    for (const std::string_view name : kFactors) scale *= config.number(name, 1.0);
    if (config.find(kBaseSize) != nullptr) {
        scale *= config.number(kBaseSize, 0) / static_cast<double>(config.size("hidden_size", kHiddenSize));
    }
    const double divisor = config.number(kDivisor, 1.0);
    if (has(kFactorTypes, type)) return scale * divisor;
    if (divisor == 0.0) throw SpecError("config: logits_scaling = 0: must not be 0 (logits are divided by it)");
    return scale / divisor;
}

bool hf_bias(const HfConfig& config, std::string_view type) {
    if (has(kBiasTypes, type)) return true;
    return std::ranges::any_of(kBiasKeys,
                               [&](const BiasKey& key) { return (key.type.empty() || key.type == type) && config.flag(key.key, false); });
}

}  // namespace

Spec spec_from_hf_config(std::string_view text) {
    const json object = parse_json_object<SpecError>(text, "config");
    const HfConfig config(object);
    const std::string type = config.model_type();
    Spec spec;
    spec.hidden_size = hf_hidden_size(config, type);
    spec.vocab_size = config.size("vocab_size", kVocabSize);
    spec.dtype = hf_dtype(config);
    spec.grad_weight_dtype = spec.dtype;
    spec.tied = config.tied();
    spec.grad_weight_mode = spec.tied ? GradMode::accumulate : GradMode::write;
    spec.logit_scale = hf_logit_scale(config, type);
    spec.softcap = hf_softcap(config);
    spec.bias = hf_bias(config, type);
    return spec.normalized();
}

}  // namespace flce
