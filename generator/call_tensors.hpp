// The tensors of a forward or backward call, each described once. Slots and their names, the runtime's checks, the conversion of the C
// structs and Python's structs follow from this table. CONTRIBUTING.md ("Adding an argument of a call") lists what is written by hand
// beside it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace flce {

/// Element types that a tensor may have.
enum class Elements : std::uint8_t {
    spec,         ///< Spec::dtype
    weight,       ///< weight_dtype(spec)
    grad_weight,  ///< Spec::grad_weight_dtype
    fp32,
    label,  ///< int32 or int64
    count,  ///< fp32, int32 or int64
    uint64,
    int64,
};

/// Shapes over N = num_tokens, D = hidden_size, V = vocab_size, P = padded_vocab_size.
enum class Extent : std::uint8_t {
    scalar,
    tokens,   ///< [N]
    loss,     ///< [N] with reduction none, a scalar otherwise
    classes,  ///< [V]
    hidden,   ///< [N, D], 16-byte aligned
    weight,   ///< [P, D] or [D, P], as the spec's layout says, 16-byte aligned
    teacher,  ///< [N, K], K the spec's teacher_top_k
};

/// What the spec, its outputs or the call must have for the tensor to be given.
enum class Condition : std::uint8_t {
    always,
    bias,
    class_weight,
    temperature,
    token_weight,
    teacher,
    loss,
    lse,
    logprob,
    entropy,
    top1,
    log_sum_sq_probs,
    mean
};

/// What a pass does with the tensor where its condition holds. none: the pass's argument structs have no such field.
enum class Use : std::uint8_t { none, read, read_if_given, write, write_if_given };

// clang-format off
#define FLCE_CALL_TENSORS(X)                                                                                                     \
    /* name          elements     extent   condition     forward         backward */                                            \
    X(hidden,        spec,        hidden,  always,       read,           read)                                                   \
    X(weight,        weight,      weight,  always,       read,           read)                                                   \
    X(bias,          spec,        classes, bias,         read,           read)                                                   \
    X(class_weight,  fp32,        classes, class_weight, read,           read)                                                   \
    X(target,        label,       tokens,  always,       read,           read)                                                   \
    X(temperature,   fp32,        tokens,  temperature,  read,           read)                                                   \
    X(token_weight,  fp32,        tokens,  token_weight, read,           read)                                                   \
    X(teacher_ids,   label,       teacher, teacher,      read,           read)                                                   \
    X(teacher_probs, fp32,        teacher, teacher,      read,           read)                                                   \
    X(num_valid,     count,       scalar,  mean,         read_if_given,  read_if_given)  /* mean divides by it; else counted */  \
    X(loss,          fp32,        loss,    loss,         write_if_given, none)                                                   \
    X(z_loss,        fp32,        loss,    loss,         write_if_given, none)           /* the part of it, already in loss */   \
    X(lse,           fp32,        tokens,  always,       write,          read)                                                   \
    X(logprob,       fp32,        tokens,  logprob,      write_if_given, read_if_given)  /* read with dft */                     \
    X(entropy,       fp32,        tokens,  entropy,      write_if_given, read_if_given)  /* read with grad_entropy */            \
    X(top1,          int64,       tokens,  top1,         write_if_given, none)                                                   \
    X(log_sum_sq_probs, fp32,     tokens,  log_sum_sq_probs, write_if_given, none)                                               \
    X(teacher_logprobs, fp32,     teacher, teacher,      write,          read)           /* log p at the ids */                  \
    X(invalid_label, uint64,      scalar,  always,       write_if_given, none)           /* smallest row with a fault, or ~0 */  \
    X(grad_loss,     fp32,        loss,    loss,         none,           read_if_given)  /* absent: 1 */                         \
    X(grad_lse,      fp32,        tokens,  lse,          none,           read_if_given)                                          \
    X(grad_logprob,  fp32,        tokens,  logprob,      none,           read_if_given)                                          \
    X(grad_entropy,  fp32,        tokens,  entropy,      none,           read_if_given)                                          \
    X(grad_hidden,   spec,        hidden,  always,       none,           write_if_given)                                         \
    X(grad_weight,   grad_weight, weight,  always,       none,           write_if_given)                                         \
    X(grad_bias,     grad_weight, classes, bias,         none,           write_if_given)
// clang-format on

struct CallTensor {
    const char* name;
    Elements elements;
    Extent extent;
    Condition condition;
    Use forward;
    Use backward;
};

#define FLCE_CALL_TENSOR(name, elements, extent, condition, forward, backward) \
    CallTensor{#name, Elements::elements, Extent::extent, Condition::condition, Use::forward, Use::backward},
inline constexpr std::array kCallTensors = {FLCE_CALL_TENSORS(FLCE_CALL_TENSOR)};
#undef FLCE_CALL_TENSOR
inline constexpr std::size_t kCallTensorCount = kCallTensors.size();

/// The field of an argument struct that holds a tensor which a pass uses so; null where it has none. For lists over FLCE_CALL_TENSORS.
#define FLCE_FIELD_none(Struct, name) nullptr
#define FLCE_FIELD_read(Struct, name) &Struct::name
#define FLCE_FIELD_read_if_given(Struct, name) &Struct::name
#define FLCE_FIELD_write(Struct, name) &Struct::name
#define FLCE_FIELD_write_if_given(Struct, name) &Struct::name

}  // namespace flce
