// The tensors of a forward, merge or backward call, each described once. Slots and their names, the runtime's checks, the conversion of
// the C structs and Python's structs follow from this table. CONTRIBUTING.md ("Adding an argument of a call") lists what is written by hand
// beside it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace flce {

/// Element types that a tensor may have.
enum class Elements : std::uint8_t {
    spec,         ///< Spec::dtype
    weight,       ///< weight_dtype(spec); of a quantised weight bytes: e4m3 or uint8
    scale,        ///< fp32; of an nvfp4 weight bytes: e4m3 or uint8
    grad_hidden,  ///< Spec::grad_hidden_dtype
    grad_weight,  ///< Spec::grad_weight_dtype
    fp32,
    int32,
    label,  ///< int32 or int64
    count,  ///< fp32, int32 or int64
    uint64,
    int64,
};

/// Shapes over N = num_tokens, D = hidden_size, V = vocab_size, P = padded_vocab_size. For a shard P is the number of rows that the call's
/// weight has, and [V] is [P]; F are the fields of its partial sums (shard_fields) and R is the number of shards.
enum class Extent : std::uint8_t {
    scalar,
    tokens,            ///< [N]
    loss,              ///< [N] with reduction none, a scalar otherwise
    classes,           ///< [V]
    hidden,            ///< [N, D], 16-byte aligned
    weight,            ///< [P, D] or [D, P], as the spec's layout says, 16-byte aligned; [P, D / 2] of an nvfp4 weight
    weight_scale,      ///< [P], or [ceil(P / 128), ceil(D / 128)] with a weight_block; [P, D / 16] of an nvfp4 weight
    teacher,           ///< [N, K], K the spec's teacher_top_k
    teacher_hidden,    ///< [N, D_t], D_t the spec's teacher_hidden_size, 16-byte aligned
    teacher_weight,    ///< [V, D_t] or [D_t, V], as the spec's layout says, 16-byte aligned; a shard's as many rows as weight
    top,               ///< [N, K], K the spec's top_k
    partial_sums,      ///< [F, N]
    all_partial_sums,  ///< [R·F, N]
};

/// Property that the spec, its outputs or the call must have for the tensor to be given.
enum class Condition : std::uint8_t {
    always,
    quantized,  ///< the weight is quantised
    nvfp4,
    trained,  ///< the weight is not quantised
    bias,
    class_weight,
    class_offset,
    class_groups,
    temperature,
    token_weight,
    teacher,
    teacher_head,
    teacher_bias,
    top_k,
    loss,
    lse,
    logprobs,
    entropy,
    top1,
    log_sum_sq_probs,
    mean,
    shard,               ///< the spec is a shard's
    shard_class_weight,  ///< and has class weights
    shard_smoothing      ///< and label smoothing as well
};

/// Use that a pass makes of the tensor where its condition holds. none: the pass's argument structs have no such field.
enum class Use : std::uint8_t { none, read, may_read, write, may_write };  ///< may: where the caller gives it

// clang-format off
#define FLCE_CALL_TENSORS(X)                                                                                                               \
    /*name                 elements     extent            condition           forward    shard     merge      backward */                  \
    X(hidden,              spec,        hidden,           always,             read,      read,     none,      read)                        \
    X(weight,              weight,      weight,           always,             read,      read,     none,      read)                        \
    X(weight_scale,        scale,       weight_scale,     quantized,          read,      read,     none,      read)                        \
    X(weight_tensor_scale, fp32,        scalar,           nvfp4,              read,      read,     none,      read)                        \
    X(bias,                spec,        classes,          bias,               read,      read,     none,      read)                        \
    X(class_weight,        fp32,        classes,          class_weight,       read,      read,     none,      read)                        \
    X(class_offset,        fp32,        classes,          class_offset,       read,      read,     none,      read)                        \
    X(class_group,         int32,       classes,          class_groups,       read,      read,     none,      read)                        \
    X(row_group,           int32,       tokens,           class_groups,       read,      read,     none,      read)                        \
    X(target,              label,       tokens,           always,             read,      read,     read,      read)                        \
    X(temperature,         fp32,        tokens,           temperature,        read,      read,     read,      read)                        \
    X(token_weight,        fp32,        tokens,           token_weight,       read,      may_read, read,      read)                        \
    X(teacher_ids,         label,       teacher,          teacher,            read,      read,     read,      read)                        \
    X(teacher_probs,       fp32,        teacher,          teacher,            read,      may_read, read,      read)                        \
    X(teacher_hidden,      spec,        teacher_hidden,   teacher_head,       read,      read,     none,      read)                        \
    X(teacher_weight,      spec,        teacher_weight,   teacher_head,       read,      read,     none,      read)                        \
    X(teacher_bias,        spec,        classes,          teacher_bias,       read,      read,     none,      read)                        \
    X(num_valid,           count,       scalar,           mean,               may_read,  may_read, may_read,  may_read) /* divisor */      \
    X(partial_sums,        fp32,        partial_sums,     shard,              write,     write,    none,      none)     /* this shard */   \
    X(all_partial_sums,    fp32,        all_partial_sums, shard,              none,      none,     read,      none)     /* all shards */   \
    X(loss,                fp32,        loss,             loss,               may_write, none,     may_write, none)                        \
    X(z_loss,              fp32,        loss,             loss,               may_write, none,     may_write, none)     /* part of loss */ \
    X(lse,                 fp32,        tokens,           always,             write,     none,     write,     read)                        \
    X(logprobs,            fp32,        tokens,           logprobs,           may_write, none,     may_write, may_read) /* for dft */      \
    X(entropy,             fp32,        tokens,           entropy,            may_write, none,     may_write, may_read) /* for its grad */ \
    X(top1,                int64,       tokens,           top1,               may_write, none,     may_write, none)                        \
    X(log_sum_sq_probs,    fp32,        tokens,           log_sum_sq_probs,   may_write, none,     may_write, none)                        \
    X(teacher_logprobs,    fp32,        teacher,          teacher,            write,     none,     write,     read)     /* log p of ids */ \
    X(teacher_lse,         fp32,        tokens,           teacher_head,       write,     none,     write,     read)                        \
    X(teacher_entropy,     fp32,        tokens,           teacher_head,       may_write, none,     may_write, none)                        \
    X(student_divergence,  fp32,        tokens,           teacher_head,       write,     none,     write,     read)     /* KL to m */      \
    X(top_logprobs,        fp32,        top,              top_k,              write,     none,     write,     none)                        \
    X(top_ids,             int64,       top,              top_k,              write,     none,     write,     none)                        \
    X(target_class_weight, fp32,        tokens,           shard_class_weight, none,      none,     write,     read)                        \
    X(class_weight_total,  fp32,        scalar,           shard_smoothing,    none,      none,     write,     read)     /* all shards */   \
    X(invalid_label,       uint64,      scalar,           always,             may_write, none,     may_write, none)     /* or ~0 */        \
    X(grad_loss,           fp32,        loss,             loss,               none,      none,     none,      may_read) /* else 1 */       \
    X(grad_lse,            fp32,        tokens,           lse,                none,      none,     none,      may_read)                    \
    X(grad_logprobs,       fp32,        tokens,           logprobs,           none,      none,     none,      may_read)                    \
    X(grad_entropy,        fp32,        tokens,           entropy,            none,      none,     none,      may_read)                    \
    X(grad_hidden,         grad_hidden, hidden,           always,             none,      none,     none,      may_write)                   \
    X(grad_weight,         grad_weight, weight,           trained,            none,      none,     none,      may_write)                   \
    X(grad_bias,           grad_weight, classes,          bias,               none,      none,     none,      may_write)
// clang-format on

struct CallTensor {
    const char* name;
    Elements elements;
    Extent extent;
    Condition condition;
    Use forward;
    Use shard;  ///< use in forward where the spec is a shard's
    Use merge;
    Use backward;
};

#define FLCE_CALL_TENSOR(name, elements, extent, condition, forward, shard, merge, backward) \
    CallTensor{#name, Elements::elements, Extent::extent, Condition::condition, Use::forward, Use::shard, Use::merge, Use::backward},
inline constexpr std::array kCallTensors = {FLCE_CALL_TENSORS(FLCE_CALL_TENSOR)};
#undef FLCE_CALL_TENSOR
inline constexpr std::size_t kCallTensorCount = kCallTensors.size();

/// The field of an argument struct that holds a tensor which a pass uses so; null where it has none. For lists over FLCE_CALL_TENSORS.
#define FLCE_FIELD_none(Struct, name) nullptr
#define FLCE_FIELD_read(Struct, name) &Struct::name
#define FLCE_FIELD_may_read(Struct, name) &Struct::name
#define FLCE_FIELD_write(Struct, name) &Struct::name
#define FLCE_FIELD_may_write(Struct, name) &Struct::name

}  // namespace flce
