// Spec: what is computed. Plain data with one canonical text, used by hashes, logs, the command line and Python alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace flce {

/// Element type of hidden, bias and grad_hidden, and of the weight unless Spec::weight_dtype says otherwise. Softmax, lse, loss and every
/// accumulation are fp32.
enum class DType : std::uint8_t { bf16, fp16, fp32 };

/// vocab_major is [vocab_size, hidden_size] (nn.Linear, an embedding table); hidden_major is [hidden_size, vocab_size].
enum class WeightLayout : std::uint8_t { vocab_major, hidden_major };

/// Form of the weight in memory: numbers of weight_dtype, or codes with scales beside them, which a call has too. A quantised weight is
/// dequantised in fp32 as it is read, and each number is rounded to the dtype once; with fp8 logits are products of the codes themselves.
/// e4m3: a byte a number (float8_e4m3fn), scales fp32.
/// nvfp4: two e2m1 codes a byte, the earlier number in the low half; a scale in e4m3 for each 16 numbers of a row, and an fp32 scale of
/// the whole tensor.
enum class WeightFormat : std::uint8_t { numbers, e4m3, nvfp4 };

/// Numbers in 8 bits that the logits are products of. Rows of hidden and of the weight are rounded to them as they are read, each with a
/// scale of its own: int8 to -127 … 127 and e4m3 to float8_e4m3fn, of the row's largest number. none: products of the dtype's numbers.
enum class Fp8Operands : std::uint8_t { none, int8, e4m3 };

/// Format of the logits' gradients as operands of grad_hidden and grad_weight, with fp8.
enum class Fp8Dlogits : std::uint8_t { e5m2, e4m3 };

/// Whether backward overwrites the gradient buffers of weight and bias or adds to what they hold.
enum class GradMode : std::uint8_t { write, accumulate };

/// Per-token outputs that the forward pass offers besides lse, which it always computes.
struct Outputs {
    bool loss = true;               ///< per-token or reduced loss
    bool lse = false;               ///< lse is asked for by the user and may receive a gradient
    bool logprobs = false;          ///< log-probability of the target, z_y − lse; may receive a gradient
    bool entropy = false;           ///< entropy of the softmax in nats; may receive a gradient
    bool top1 = false;              ///< index of the largest logit, the first of equal ones
    bool log_sum_sq_probs = false;  ///< log Σ p² over the vocabulary
    friend bool operator==(const Outputs&, const Outputs&) = default;
};

/// A token's temperature is between these.
inline constexpr float kLeastTemperature = 0x1p-100F;
inline constexpr float kMostTemperature = 0x1p100F;

/// The output layer and its loss. logits = softcap(logit_scale · (hidden · weightᵀ + bias)) + class_offset, where softcap(u) = softcap ·
/// tanh(u / softcap); with temperature, logits are divided by their token's temperature. Loss of a token = (cross entropy (torch's meaning
/// of label_smoothing and of class weights) + z_loss · lse²) · token_weight · (dft: the target's probability). With teacher_top_k the
/// cross entropy is hard_weight · (that of the target) + (1 − hard_weight) · (−Σ_k q_k·log p_k over the teacher's ids). In a literal,
/// grad_weight_dtype and grad_weight_mode follow from the fields before them, as in a text. Fields assigned later move neither.
struct Spec {
    std::int64_t hidden_size = 0;        ///< D: ≥ 8 and a multiple of 8 (rows of 16 bytes)
    std::int64_t vocab_size = 0;         ///< V ≥ 2
    std::int64_t padded_vocab_size = 0;  ///< rows (vocab_major) or columns that the weight has in memory; ≥ V; 0 in a literal means V. Rows
                                         ///< past V are never predicted and their gradient is 0 (untouched when accumulating)
    std::int64_t whole_vocab_size = 0;   ///< 0, or the layer is a shard: classes of all shards, of which vocab_size is the most that one
                                         ///< has. A call says which (flce.hpp, "Shards"); labels are 0 to whole_vocab_size − 1
    DType dtype = DType::bf16;
    WeightLayout layout = WeightLayout::vocab_major;
    std::optional<DType> weight_dtype =
        std::nullopt;  ///< fp32: the weight is that in memory and rounded to the dtype as it is read; none: the dtype
    WeightFormat weight_format =
        WeightFormat::numbers;  ///< e4m3, nvfp4: the weight is quantised and frozen, vocab_major, under a 16-bit dtype, and hidden_size is
                                ///< a multiple of 16. Texts write the format as weight_dtype
    int weight_block = 0;       ///< 128, with e4m3: a scale for each 128 x 128 numbers; 0: a scale a row
    std::optional<DType> grad_hidden_dtype =
        std::nullopt;  ///< fp32, of a shard alone, so that a sum over shards is rounded once; none: the dtype
    DType grad_weight_dtype = weight_dtype.value_or(dtype);  ///< dtype of the gradients of weight and bias: the spec's dtype, or fp32
    bool tied = false;  ///< the weight is the embedding table: vocab_major, gradient accumulated unless said otherwise
    GradMode grad_weight_mode = tied ? GradMode::accumulate : GradMode::write;  ///< mode of the gradients of weight and bias
    bool bias = false;          ///< a bias [V] of the spec's dtype is added to hidden · weightᵀ
    bool class_weight = false;  ///< class weights [V] (fp32), torch's meaning
    bool class_offset = false;  ///< offsets [V] (fp32, −inf for a class that is ruled out) are added to logits behind the softcap, before
                                ///< the temperature
    bool class_groups = false;  ///< a call has numbers of rows [N] and of classes [V] (int32): a class whose number is its row's, both 0 or
                                ///< more, counts for nothing in the row's softmax, unless it is the target
    bool offset_gradient = false;  ///< backward takes the slopes of logit_scale and softcap for 1, so that grad_bias is the gradient of the
                                   ///< offsets. grad_hidden and grad_weight are then none of the layer's: leave them out. Only with bias
                                   ///< (zeros where the layer has none) and class_offset
    bool temperature = false;      ///< a call has temperatures [N] (fp32, kLeastTemperature to kMostTemperature)
    bool token_weight = false;     ///< a call has weights [N] (fp32) of its tokens' losses
    bool batch_invariant = false;  ///< a token's outputs and grad_hidden have the same bits whatever other tokens its call has
    bool dft = false;              ///< a token's loss is multiplied by its target's probability, which receives no gradient (dynamic
                                   ///< fine-tuning, arXiv 2508.05629); outputs has to have logprobs, which backward reads
    double logit_scale = 1.0;      ///< finite, not 0
    double softcap = 0.0;          ///< 0: off; else > 0
    double label_smoothing = 0.0;  ///< 0 ≤ ε ≤ 1
    double z_loss = 0.0;           ///< ω ≥ 0
    int teacher_top_k = 0;         ///< K, 0 to 1024: a call has K ids of classes and their probabilities for each token (the teacher's); 0:
                                   ///< none. Not together with class_weight or dft
    double hard_weight = 0.0;      ///< 0 to 1, with teacher_top_k: the share of the target's cross entropy
    bool support = false;          ///< with teacher_top_k: a token's softmax is over its K ids alone, each as often as it is named. Nothing
                                   ///< else of the vocabulary is looked at. With a hard_weight of 0; outputs are loss, lse and entropy
    std::int64_t teacher_hidden_size = 0;  ///< D_t: the loss is the divergence from a teacher's head over the same classes. Its hidden
                                           ///< states have D_t numbers (a multiple of 8), its weight V rows in the spec's layout and dtype.
                                           ///< 0: none. Not together with options of a target's cross entropy
    double divergence_beta = 0.0;          ///< β, 0 to 1: KL(teacher ‖ student) at 0, KL(student ‖ teacher) at 1, between them (1 − β) ·
                                           ///< KL(student ‖ m) + β · KL(teacher ‖ m) with the mixture m = (1 − β) · student + β · teacher
    bool teacher_bias = false;             ///< the teacher's head has a bias [V]
    double teacher_logit_scale = 1.0;      ///< logit_scale of the teacher's head
    double teacher_softcap = 0.0;          ///< softcap of the teacher's head
    int top_k = 0;  ///< K, 0 to 256 and no more than there are classes: forward also writes the K classes of the largest logits of each
                    ///< token, without a gradient; of equal logits the smaller class comes first. 0: none
    Fp8Operands fp8 = Fp8Operands::none;        ///< operands of all three products are rounded to 8 bits: the logits' to this format, the
                                                ///< gradients' to fp8_dlogits and e4m3. Not together with a weight in another form than the
                                                ///< dtype or, with e4m3, codes with a scale a row, a teacher, and options that refuse it
    Fp8Dlogits fp8_dlogits = Fp8Dlogits::e5m2;  ///< with fp8: e5m2 has the range of far tails, e4m3 one more bit
    double fp8_hidden_scale = 0.0;  ///< with fp8, 2^-100 to 2^100: number that one code of hidden stands for in the logits, in all rows.
                                    ///< Numbers beyond the format's largest code become that code. 0: a row's scale follows from its
                                    ///< largest number. Another value compiles nothing
    double fp8_weight_scale = 0.0;  ///< number that one code of the weight stands for. Both scales are given or neither; beside codes,
                                    ///< which have scales of their own, hidden's alone or none
    Outputs outputs{};

    friend bool operator==(const Spec&, const Spec&) = default;

    /// Returns a copy with implied fields filled in (padded_vocab_size, no weight_dtype where it is the dtype) after checking every rule.
    /// Throws SpecError naming the field, its value and what is allowed.
    [[nodiscard]] Spec normalized() const;

    /// Canonical text, e.g. "D=2048,V=151936,dtype=bf16,tied"; parse_spec reads it back to an equal Spec.
    [[nodiscard]] std::string text() const;
    /// Canonical JSON object as text, with the same keys.
    [[nodiscard]] std::string json() const;
};

/// Parses "key=value,flag,…", the JSON object that parse_spec_json reads, or "@file.json" (a file that holds one). Keys: D or hidden_size,
/// V or vocab_size, padded_vocab_size, whole_vocab_size, dtype, layout, tied, weight_dtype, weight_block, grad_hidden_dtype,
/// grad_weight_dtype, grad_weight_mode, bias, class_weight, class_offset, class_groups, offset_gradient, temperature, token_weight,
/// batch_invariant, dft, logit_scale, softcap, label_smoothing, z_loss, teacher_top_k, hard_weight, support, teacher_hidden_size,
/// divergence_beta, teacher_bias, teacher_logit_scale, teacher_softcap, top_k, fp8 (int8, e4m3; alone: int8), fp8_dlogits (e5m2, e4m3),
/// fp8_hidden_scale, fp8_weight_scale, outputs (names joined by '+': loss+lse+logprobs+entropy+top1+log_sum_sq_probs). dtypes: bf16, fp16,
/// fp32, or torch's bfloat16, float16, float32; of the weight also e4m3 (float8_e4m3fn) and nvfp4. D and V are required; dtype defaults to
/// bf16, weight_dtype and grad_hidden_dtype to dtype, grad_weight_dtype to weight_dtype, grad_weight_mode to write, or accumulate where
/// tied is set. The result is normalized. Throws SpecError for an unknown or repeated key and for a bad value, EnvironmentError for a file
/// that cannot be read.
[[nodiscard]] Spec parse_spec(std::string_view text);
/// A JSON object with the same keys: numbers, booleans, strings, and an array of names for outputs.
[[nodiscard]] Spec parse_spec_json(std::string_view json);

/// The output layer that a Hugging Face config.json describes: hidden_size (n_embd, d_model, dim, …; rounded up to a multiple of 8, as
/// Python pads it), vocab_size, dtype or torch_dtype (missing: float32), tie_word_embeddings (missing: true), final_logit_softcapping,
/// logits_soft_cap (RecurrentGemma), output_logit_soft_cap (xLSTM), logit_scale (Cohere), lm_head_multiplier (Falcon-H1),
/// output_multiplier, logits_scaling (Granite, a divisor; HyperCLOVA X, a factor); bias by model_type, as of BERT and Phi, or by
/// lm_head_bias and its like. A nested text_config, or decoder, is looked into first, but for tie_word_embeddings. Throws SpecError naming
/// a missing key or a bad value.
[[nodiscard]] Spec spec_from_hf_config(std::string_view json);

/// Whether the layer is a shard of one whose classes lie on several ranks.
[[nodiscard]] bool is_shard(const Spec& spec) noexcept;
/// Whether the loss is the divergence from a teacher's head.
[[nodiscard]] bool has_teacher_head(const Spec& spec) noexcept;
/// The teacher's head as a layer of its own, without outputs beside the loss. For specs that have one.
[[nodiscard]] Spec teacher_head(const Spec& spec);
/// Classes that a label may name: those of all shards.
[[nodiscard]] std::int64_t whole_vocab_size(const Spec& spec) noexcept;
/// The dtype of the weight's numbers: in memory, or fp32 where a quantised weight is dequantised.
[[nodiscard]] DType weight_dtype(const Spec& spec) noexcept;
/// grad_hidden's dtype in memory.
[[nodiscard]] DType grad_hidden_dtype(const Spec& spec) noexcept;
/// Whether the weight is fp32 under a 16-bit dtype, or quantised, so that the weight is rounded to the dtype as it is read.
[[nodiscard]] bool rounds_weight(const Spec& spec) noexcept;
/// Whether the weight is codes with scales. A quantised weight has no gradient.
[[nodiscard]] bool is_quantized(const Spec& spec) noexcept;
/// Whether the layer's products are of numbers in 8 bits.
[[nodiscard]] bool is_fp8(const Spec& spec) noexcept;
/// Whether operands of the logits have scales that the spec gives.
[[nodiscard]] bool has_fp8_scales(const Spec& spec) noexcept;
/// Bytes of a row of the weight in memory, for vocab_major.
[[nodiscard]] std::int64_t weight_row_bytes(const Spec& spec) noexcept;
/// Numbers of a row that an nvfp4 scale is for.
inline constexpr std::int64_t kNvfp4Group = 16;

[[nodiscard]] std::size_t element_bytes(DType dtype) noexcept;
[[nodiscard]] std::string_view to_string(DType dtype) noexcept;
[[nodiscard]] std::string_view to_string(WeightLayout layout) noexcept;
[[nodiscard]] std::string_view to_string(WeightFormat format) noexcept;
[[nodiscard]] std::string_view to_string(GradMode mode) noexcept;
[[nodiscard]] std::string_view to_string(Fp8Operands operands) noexcept;
[[nodiscard]] std::string_view to_string(Fp8Dlogits dlogits) noexcept;

struct SpecHash {
    [[nodiscard]] std::size_t operator()(const Spec& spec) const noexcept;
};

}  // namespace flce
