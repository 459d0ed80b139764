// flce: fused linear + cross-entropy kernels, generated for one concrete output layer.
//
//     flce::Session session;                                                    // default cache, best device there is
//     auto kernel = session.get_kernel(flce::parse_spec("D=2048,V=151936,dtype=bf16"));
//     kernel->forward ({.hidden = h, .weight = w, .target = t, .loss = loss, .lse = lse}, workspace, stream);
//     kernel->backward({.hidden = h, .weight = w, .target = t, .lse = lse, .grad_hidden = dh, .grad_weight = dw}, workspace, stream);
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flce/device.hpp"
#include "flce/error.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "flce/tensor.hpp"

namespace flce {

/// mean divides by the number of valid tokens, or by the sum of their class weights where the spec has them; token weights do not count.
/// weighted_mean divides by the sum of valid tokens' weights, each times its class weight. z-losses are divided without class weights.
enum class Reduction : std::uint8_t { none, sum, mean, weighted_mean };
enum class Pass : std::uint8_t { forward, backward, forward_backward, merge };

/// Caller-owned scratch, 256-byte aligned, on the kernel's device; may be used again as soon as the pass has run on its stream. More bytes
/// than forward needs (backward's amount will do) make forward quicker where tokens are ignored; results do not change.
struct Workspace {
    void* data = nullptr;
    std::size_t bytes = 0;
};

/// Place of the retained values: memory of their own, or grad_weight's memory before backward writes it.
enum class RetainedPlace : std::uint8_t { own, grad_weight };

/// Caller-owned memory on the kernel's device, 16-byte aligned, in which forward leaves values to backward, as many as fit, so that
/// backward does not compute their logits again. Both passes are given the same bytes and place, unchanged in between; without any (the
/// default) backward computes all logits again. Backward may write there too: calls over the same bytes follow one another. CPU kernels
/// retain logits, and the bits of gradients do not depend on the amount. GPU kernels whose plan's strategy is retain keep exponentials in
/// bf16; grad_weight is then off by two roundings of its factors, not one. Of a divergence they keep both heads' logits in fp16, or, of all
/// classes, gradients by the student's; in grad_weight's memory forward also has room for wider products.
struct Retained {
    void* data = nullptr;
    std::size_t bytes = 0;  ///< in grad_weight's memory: exactly Kernel::retained_bytes(num_tokens, RetainedPlace::grad_weight)
    RetainedPlace place = RetainedPlace::own;
};

/// A step's properties that decide where forward leaves values to backward, and how many.
struct RetainOptions {
    /// Most bytes of workspace and Retained together. 0: no limit, and no memory of its own for Retained, except that of a shard, which may
    /// be as large as the whole layer's weight gradient and 1/32 more.
    std::int64_t workspace_limit_bytes = 0;
    bool retain_in_grad_weight = true;  ///< backward will write grad_weight, and grad_weight's memory may hold retained values until then
    std::int64_t vocab_columns = 0;     ///< classes of this rank's shard; 0: spec.vocab_size
    /// Multiply-adds of one GEMM (N·D·V) below which a layer retains nothing; 0: the number at which the launches for it cost more than
    /// they spare.
    std::int64_t least_work = 0;
};

/// A CUstream of the kernel's device (null: the legacy default stream). Ignored by CPU kernels, which have finished when the call returns.
struct Stream {
    void* handle = nullptr;
};

/// Part of backward that a call does. A step may be cut in two where something waits for grad_hidden, for example a reduction over shards:
/// the call with until_grad_hidden completes grad_hidden (on its stream), the call with rest completes grad_weight and grad_bias. Both have
/// the same arguments, and the workspace stays as it is in between. The kernel chooses how much of grad_weight's work comes before
/// grad_hidden is complete.
enum class BackwardStage : std::uint8_t { whole, until_grad_hidden, rest };

/// Walk over the vocabulary of a forward and of the merge behind it. A mixture's divergence (divergence_beta between 0 and 1) of a layer
/// over shards needs two of both: `sums` leads to lse and teacher_lse of all shards, and `mixture` reads them and leads to the loss and
/// student_divergence. Everything else has `sums` alone; without shards a forward does both.
enum class DivergenceWalk : std::uint8_t { sums, mixture };

// Shapes: N = num_tokens, D = hidden_size, V = vocab_size, P = padded_vocab_size. All tensors contiguous, on the kernel's device; hidden,
// weight and their gradients 16-byte aligned. Absent tensors are not read or written.
//
// Shards. A layer whose classes lie on several ranks (spec.whole_vocab_size) has a kernel for a rank's part, the same one for all ranks:
//
//     forward(partial_sums) ─▶ the caller gathers all ranks' ─▶ merge(loss, lse, …) ─▶ backward(lse) ─▶ the caller adds up grad_hidden
//
// The weight has the rows of labels vocab_start and up: as many as its shape says, at most P (hidden_major: exactly P columns). Rows at and
// past whole_vocab_size are padding; any rank may have such rows, even no other rows. Rows before whole_vocab_size are at most V. Bias and
// class weights have as many elements as the weight has rows. Labels, a teacher's ids and top1 count all classes; label smoothing is over
// all classes. Merge adds partial sums in the order in which they are given, so that every rank has the same bits.
struct ForwardArgs {
    TensorView hidden{};  ///< [N, D], spec dtype
    TensorView weight{};  ///< [P, D] (vocab_major) or [D, P] (hidden_major), weight_dtype(spec). Codes of e4m3: [P, D], e4m3 or
                          ///< uint8; of nvfp4: [P, D / 2] uint8. A NaN code makes a NaN weight
    /// Required iff the weight is quantised. e4m3: fp32 [P], or with weight_block [ceil(P / 128), ceil(D / 128)]; nvfp4: [P, D / 16], e4m3
    /// or uint8. A shard's scales begin with its own first row
    TensorView weight_scale{};
    TensorView weight_tensor_scale{};  ///< scalar fp32; required iff the weight is nvfp4
    TensorView bias{};                 ///< [V], spec dtype; required iff spec.bias
    TensorView class_weight{};         ///< [V] fp32; required iff spec.class_weight
    TensorView class_offset{};         ///< [V] fp32; required iff spec.class_offset
    TensorView class_group{};          ///< [V] int32; required iff spec.class_groups, and so is row_group [N]. Below 0: of no group
    TensorView row_group{};
    TensorView target{};        ///< [N] int32 or int64. With spec.teacher_top_k and a hard_weight of 0 it only says which tokens take part:
                                ///< tokens with any class
    TensorView temperature{};   ///< [N] fp32; required iff spec.temperature. A row's temperature that is not between 2^-100 and 2^100 is a
                                ///< fault
    TensorView token_weight{};  ///< [N] fp32; required iff spec.token_weight. Ignored rows' weights are not read
    /// [N, K] int32 or int64, K = spec.teacher_top_k; required iff K is not 0. Classes in any order, −1 for none; probabilities of equal
    /// ids add up. An id that is neither a class nor −1 is a fault and counts as none. Ids of ignored rows are not read
    TensorView teacher_ids{};
    /// [N, K] fp32, required with the ids: the classes' probabilities q, or any numbers; they need not add up to 1. A probability of 0, or
    /// at no class, adds nothing; a negative one counts as it is; a NaN makes its token's loss and gradients NaN
    TensorView teacher_probs{};
    TensorView teacher_hidden{};  ///< [N, D_t], spec dtype; required iff spec.teacher_hidden_size, and so are the other two of its tensors
    TensorView teacher_weight{};  ///< [V, D_t] (vocab_major) or [D_t, V] (hidden_major), spec dtype; a shard's has the weight's classes
    TensorView teacher_bias{};    ///< [V], spec dtype; required iff spec.teacher_bias
    std::int64_t ignore_index = -100;
    Reduction reduction = Reduction::mean;
    DivergenceWalk walk = DivergenceWalk::sums;  ///< in `mixture` lse and teacher_lse are read
    /// Scalar int32, int64 or fp32 that mean divides by; absent: the valid tokens (or their class weights) are counted.
    TensorView num_valid{};
    TensorView loss{};              ///< fp32: [N] for none, scalar otherwise
    TensorView z_loss{};            ///< fp32, same shape as loss: the loss's z-loss part alone, for logs
    TensorView lse{};               ///< [N] fp32; required: backward reads it. 0 is written for ignored rows
    TensorView logprobs{};          ///< [N] fp32, 0 for ignored rows
    TensorView entropy{};           ///< [N] fp32, 0 for ignored rows
    TensorView top1{};              ///< [N] int64, −1 for ignored rows
    TensorView log_sum_sq_probs{};  ///< [N] fp32, 0 for ignored rows
    TensorView
        teacher_logprobs{};        ///< [N, K] fp32, required with the ids, since backward reads it: log p of each id, 0 at no class and for
                                   ///< ignored rows
    TensorView teacher_lse{};      ///< [N] fp32, required with teacher_hidden, since backward reads it; 0 for ignored rows
    TensorView teacher_entropy{};  ///< [N] fp32, 0 for ignored rows
    TensorView student_divergence{};  ///< [N] fp32, required with teacher_hidden, since backward reads it: the divergence at β of 0 and 1,
                                      ///< between them KL(student ‖ m)
    TensorView top_logprobs{};        ///< [N, K] fp32, K = spec.top_k; required iff K is not 0: the largest first, 0 for ignored rows
    TensorView top_ids{};             ///< [N, K] int64, required with top_logprobs: their classes; −1 for ignored rows
    TensorView invalid_label{};    ///< one uint64 that the caller set to ~0: receives the smallest index of a row with a fault. A fault is
                                   ///< a label that is neither ignore_index nor in [0, V), or a temperature that is not between 2^-100 and
                                   ///< 2^100: such rows count as ignored, with or without this tensor. A fault is also a teacher's id out
                                   ///< of range in a row that is not ignored; the id counts as none
    Retained retained{};           ///< written; see Kernel::retained_bytes
    std::int64_t vocab_start = 0;  ///< label of the weight's first row in a shard
    TensorView partial_sums{};     ///< [F, N] fp32, F = Kernel::partial_sum_fields(); required of a shard, which writes no other output
};

/// Arguments that make outputs of all shards' partial sums. A rank that merges needs no weight.
struct MergeArgs {
    TensorView all_partial_sums{};  ///< [R·F, N] fp32: partial sums of R shards in the order of their labels, as each forward wrote them
    TensorView target{};            ///< target to num_valid: as in forward
    TensorView temperature{};
    TensorView token_weight{};
    TensorView teacher_ids{};
    TensorView teacher_probs{};
    std::int64_t ignore_index = -100;
    Reduction reduction = Reduction::mean;
    DivergenceWalk walk =
        DivergenceWalk::sums;  ///< walk of the forward before. `mixture` leaves lse, teacher_lse and entropies as they are
    TensorView num_valid{};
    TensorView loss{};  ///< loss to invalid_label: as forward writes them where there are no shards
    TensorView z_loss{};
    TensorView lse{};
    TensorView logprobs{};
    TensorView entropy{};
    TensorView top1{};
    TensorView log_sum_sq_probs{};
    TensorView teacher_logprobs{};
    TensorView teacher_lse{};
    TensorView teacher_entropy{};
    TensorView student_divergence{};
    TensorView top_logprobs{};
    TensorView top_ids{};
    TensorView target_class_weight{};  ///< [N] fp32, required with spec.class_weight, since backward reads it: class weight of each token's
                                       ///< target, else 0
    TensorView class_weight_total{};   ///< scalar fp32, required with spec.class_weight and label smoothing: sum of all class weights
    TensorView invalid_label{};
};

struct BackwardArgs {
    TensorView hidden{};
    TensorView weight{};
    TensorView weight_scale{};
    TensorView weight_tensor_scale{};
    TensorView bias{};
    TensorView class_weight{};
    TensorView class_offset{};
    TensorView class_group{};
    TensorView row_group{};
    TensorView target{};
    TensorView temperature{};
    TensorView token_weight{};
    TensorView teacher_ids{};
    TensorView teacher_probs{};
    TensorView teacher_hidden{};  ///< teacher_hidden to teacher_bias: as in forward. The teacher gets no gradient
    TensorView teacher_weight{};
    TensorView teacher_bias{};
    std::int64_t ignore_index = -100;
    Reduction reduction = Reduction::mean;
    TensorView num_valid{};
    TensorView lse{};               ///< [N] fp32, as forward wrote it
    TensorView logprobs{};          ///< [N] fp32, as forward wrote it; required with spec.dft
    TensorView entropy{};           ///< [N] fp32, as forward wrote it; required with grad_entropy
    TensorView teacher_logprobs{};  ///< [N, K] fp32, as forward wrote it; required with spec.teacher_top_k
    TensorView teacher_lse{};       ///< [N] fp32, as forward wrote it, and so is student_divergence; required with teacher_hidden
    TensorView student_divergence{};
    TensorView grad_loss{};  ///< fp32: [N] for none, scalar otherwise; absent: 1, or 0 without spec.outputs.loss
    TensorView grad_lse{};   ///< [N] fp32; absent: 0, and so for grad_logprobs and grad_entropy
    TensorView grad_logprobs{};
    TensorView grad_entropy{};
    TensorView grad_hidden{};  ///< [N, D], grad_hidden_dtype(spec); absent: not computed. Ignored rows receive 0
    TensorView grad_weight{};  ///< like weight, spec.grad_weight_dtype; absent: not computed. A quantised weight has none
    TensorView grad_bias{};    ///< [V], spec.grad_weight_dtype; absent: not computed
    /// Retained values as forward left them. If they lie in the memory of this call's grad_weight, the call destroys them: later calls go
    /// without.
    Retained retained{};
    std::int64_t vocab_start = 0;      ///< a shard's, as in forward. grad_hidden is then this shard's part of the sum
    TensorView target_class_weight{};  ///< a shard's, as merge wrote it; class_weight_total too
    TensorView class_weight_total{};
    BackwardStage stage = BackwardStage::whole;
    /// Hidden states are there when the first of two stages begins. The first stage may then read them for more than grad_hidden, even
    /// where Kernel::reads_hidden_late says that hidden can wait for the last stage. Both stages are given the same value: with `true` the
    /// last stage reads results that the first stage has made of hidden.
    bool hidden_ready = false;
};

/// Reasons for a kernel's plan, for people and for `flce explain`.
struct Explanation {
    std::string spec{};
    std::string plan{};
    std::string device{};
    std::vector<std::string> reasons{};  ///< a line each: reasons for this plan, plans that were refused and why
};

/// A compiled kernel set for one Spec on one device. Immutable and thread-safe; usable on any stream of its device; never allocates device
/// memory, never synchronises, and its CUDA form can be captured in a graph. A kernel stays usable after its Session is gone.
class Kernel {
public:
    virtual ~Kernel() = default;
    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;

    [[nodiscard]] const Spec& spec() const noexcept { return spec_; }
    [[nodiscard]] const Device& device() const noexcept { return device_; }
    [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
    [[nodiscard]] DeviceRef device_ref() const noexcept { return device_ref_; }

    /// Scratch bytes that a pass over num_tokens tokens needs. More tokens may need fewer bytes: ask for each number of tokens. Throws
    /// ArgumentError for num_tokens < 0 and on overflow.
    [[nodiscard]] std::size_t workspace_bytes(std::int64_t num_tokens, Pass pass = Pass::forward_backward) const;

    /// Most bytes of Retained that passes over num_tokens tokens have a use for; any smaller number serves a part. 0: this kernel retains
    /// nothing. RetainedPlace::grad_weight: exactly the bytes from the beginning of grad_weight that may be lent, or 0 where grad_weight's
    /// memory will not do (it accumulates, or its rows are not the vocabulary's). `vocab_columns`: classes of this rank's shard, where they
    /// are fewer than spec.vocab_size; 0: spec.vocab_size.
    [[nodiscard]] std::size_t retained_bytes(std::int64_t num_tokens, RetainedPlace place = RetainedPlace::own,
                                             std::int64_t vocab_columns = 0) const;

    /// Whether a backward call in stages over num_tokens tokens, with such a Retained and without BackwardArgs::hidden_ready, reads hidden
    /// in its last stage alone. Hidden may then still be on its way from other ranks while grad_hidden is made. False with an entropy,
    /// whose gradient needs logits again. `vocab_columns`: as in retained_bytes. Throws the errors of retained_bytes.
    [[nodiscard]] bool reads_hidden_late(std::int64_t num_tokens, const Retained& retained, std::int64_t vocab_columns = 0) const;

    /// Place and bytes that forward should retain for backward of a step over num_tokens tokens; the caller sets `data` to such memory (0
    /// bytes: nothing). The place is grad_weight's memory where it may be lent and the memory that the limit leaves beside the workspace
    /// holds no more. Else the place is memory of its own, where that holds enough to be worth it. A shard on a GPU gets memory of its own
    /// wherever the limit has room for everything: grad_hidden's sum over ranks then hides under grad_weight's product. Throws
    /// ArgumentError for num_tokens < 0 and on overflow, and for negative options.
    [[nodiscard]] Retained choose_retained(std::int64_t num_tokens, const RetainOptions& options = {}) const;

    /// Throws ArgumentError naming the argument before anything is launched; DeviceError when a launch fails.
    void forward(const ForwardArgs& args, Workspace workspace, Stream stream = {}) const;
    /// Makes a shard's outputs from all shards' partial sums, with workspace_bytes(num_tokens, Pass::merge). Throws as forward does.
    void merge(const MergeArgs& args, Workspace workspace, Stream stream = {}) const;
    /// Fields of a shard's partial sums, F; 0 where the spec is not a shard's.
    [[nodiscard]] int partial_sum_fields() const noexcept;
    /// May run any number of times after one forward, for both gradients or for either.
    void backward(const BackwardArgs& args, Workspace workspace, Stream stream = {}) const;

    [[nodiscard]] Explanation explain() const;

    /// Explanation's lines, worked out when somebody asks. Thread-safe; needs nothing of the session.
    using Reasons = std::function<std::vector<std::string>()>;

protected:
    Kernel(Spec spec, Device device, Plan plan, DeviceRef device_ref, Reasons reasons = {})
        : spec_(std::move(spec)),
          device_(std::move(device)),
          plan_(std::move(plan)),
          device_ref_(device_ref),
          reasons_(std::move(reasons)) {}

private:
    // `slots` is a flce::CallSlots. The public functions above have validated everything.
    virtual void run(Pass pass, const std::int64_t* slots, Stream stream) const = 0;  // forward, merge or backward
    virtual std::int64_t workspace_bytes_of(Pass pass, std::int64_t num_tokens) const = 0;
    virtual std::int64_t retained_bytes_of(std::int64_t /*num_tokens*/, RetainedPlace /*place*/, std::int64_t /*vocab_columns*/) const {
        return 0;
    }
    virtual bool defers_hidden() const noexcept { return false; }  ///< answer of reads_hidden_late where everything is retained

    Spec spec_;
    Device device_;
    Plan plan_;
    DeviceRef device_ref_;
    Reasons reasons_;
};

/// Counts of a Session's work so far.
struct SessionStatistics {
    std::int64_t memory_hits = 0;  ///< get_kernel calls and artifacts answered from memory
    std::int64_t disk_hits = 0;    ///< artifacts read from the cache directory
    std::int64_t compiled = 0;     ///< artifacts compiled (cubins and host objects)
    std::int64_t disk_faults = 0;  ///< corrupt, unreadable or unwritable entries: each cost a compile at most
    std::int64_t pack_hits = 0;    ///< artifacts read from packs
    std::int64_t pack_faults = 0;
    std::int64_t remote_hits = 0;  ///< artifacts read from the remote cache
    std::int64_t remote_faults = 0;
};

struct SessionOptions {
    /// "cpu" ("native"), "cuda", "cuda:1", or a named CPU that this machine can stand in for ("x86-64-v3"). Empty: FLCE_DEVICE, else the
    /// first CUDA device, else the CPU.
    std::string device{};
    std::filesystem::path cache_dir{};                 ///< empty: FLCE_CACHE_DIR, else $XDG_CACHE_HOME/flce, else ~/.cache/flce
    bool disk_cache = true;                            ///< the directory; packs and the remote cache are used where they are named
    std::vector<std::filesystem::path> cache_packs{};  ///< read after the directory, in this order; empty: FLCE_CACHE_PACKS
    std::string cache_remote{};                        ///< URL of a cache that machines share; empty: FLCE_CACHE_REMOTE
    /// Ed25519 public keys (PEM), one of which must have signed packs and remote entries. Empty: FLCE_TRUSTED_KEYS; none there either:
    /// signatures are not asked for.
    std::vector<std::filesystem::path> trusted_keys{};
    std::int64_t scratch_bytes = kDefaultScratchBytes;  ///< workspace that plans may use, beside 4·N·D and long lists of tokens
    int threads = 0;                                    ///< CPU backend: 0 means FLCE_NUM_THREADS, else every core
    std::int64_t workspace_limit_bytes = 0;             ///< limit of calls that give none of their own; see KernelOptions. 0: none
    /// Tuning records to read before the user's own (FLCE_RECORDS_DIR, else "records" in the cache directory) and those that flce brings:
    /// directories or files, first ones first. Empty: FLCE_RECORDS.
    std::vector<std::filesystem::path> records{};
    bool use_records = true;  ///< false: every plan is the caller's or the cost model's, as with FLCE_NO_RECORDS
    /// Strict: get_kernel compiles nothing. A kernel that no cache has is a CacheMissError that names the command that compiles the kernel.
    /// A tier of the cache that cannot be used is an EnvironmentError, here or in get_kernel, instead of a warning. Absent: FLCE_STRICT.
    std::optional<bool> strict{};
};

struct KernelOptions {
    std::string plan{};              ///< canonical plan text to use instead of the planner's choice; empty: the planner's
    std::int64_t scratch_bytes = 0;  ///< scratch for the planner, instead of the session's; 0: the session's
    /// Most bytes beyond inputs and gradients that a call over num_tokens tokens may take, workspace and Retained together; 0: the
    /// session's limit. The kernel's workspace keeps to it (scratch gets smaller, in steps, so that different limits share kernels);
    /// Retained in memory of its own may have the rest. A kernel that retains nothing gets more scratch than the default instead, where
    /// more is of use.
    std::int64_t workspace_limit_bytes = 0;
    /// Tokens of the call. The limit holds for this number, and the plan is made for its token_bucket. 0: not known. The limit is then for
    /// the workspace that does not grow with tokens, and the plan is made for kTypicalTokens.
    std::int64_t num_tokens = 0;
};

/// The plan of a kernel and where it comes from.
struct PlanChoice {
    Plan plan{};
    std::string source{};                ///< the caller, a record of measurements (which, and how good), or the cost model
    std::vector<std::string> reasons{};  ///< Kernel::explain's reasons without the line about times
};

/// Counts of one kernel set compiled for a device that need not be here.
struct PrewarmResult {
    std::int64_t compiled = 0;
    std::int64_t hits = 0;
};

/// Owns a cache and the device it serves. Thread-safe. Kernels outlive it.
class Session {
public:
    explicit Session(SessionOptions options = {});
    ~Session();
    Session(Session&&) noexcept;
    Session& operator=(Session&&) noexcept;

    /// The kernel for `spec` on this session's device: from memory, from disk, or compiled (once, whatever the number of concurrent
    /// callers; a failure is not remembered). Throws SpecError, PlanError, CompileError, DeviceError, EnvironmentError; strict sessions
    /// also CacheMissError.
    [[nodiscard]] std::shared_ptr<const Kernel> get_kernel(const Spec& spec, const KernelOptions& options = {});

    /// Compiles all that get_kernel(spec, options) of a session like this one on `device` would ask for into the cache, without needing the
    /// device. Strict sessions do it too.
    PrewarmResult prewarm(const Spec& spec, const Device& device, const KernelOptions& options = {});

    /// Texts of the plans that a session like this one on `device` would take for these arguments and whose kernels no tier of the cache
    /// has in full. Empty: such a session would compile nothing. Compiles nothing.
    [[nodiscard]] std::vector<std::string> missing(const Spec& spec, const Device& device, const KernelOptions& options = {});

    /// The plan that a session on `device`, which need not be here, takes for such a call; compiles nothing. An explicit plan comes first,
    /// then the plan of the nearest record of measurements, then the cost model's. Throws SpecError, PlanError.
    [[nodiscard]] PlanChoice choose_plan(const Spec& spec, const Device& device, const KernelOptions& options = {});

    [[nodiscard]] const Device& device() const noexcept;
    [[nodiscard]] SessionStatistics statistics() const;
    [[nodiscard]] const std::filesystem::path& cache_dir() const noexcept;
    /// The user's own tuning records; empty where there is no such directory.
    [[nodiscard]] const std::filesystem::path& records_dir() const noexcept;

private:
    friend struct SessionAccess;  // runtime/session.hpp
    struct State;
    explicit Session(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

/// SHA-256, 64 hexadecimal digits, of the specs and plans of `kernels` in any order, and of the version of the code they were generated by:
/// ranks of one training run with equal digests compute alike. Ranks compare digests before the first step (Python: flce.check_same_plans).
[[nodiscard]] std::string plan_digest(std::span<const std::shared_ptr<const Kernel>> kernels);

/// get_kernel on the process's default session.
[[nodiscard]] std::shared_ptr<const Kernel> get_kernel(const Spec& spec);

/// Resolves "cpu", "native", "cuda", "cuda:i" by looking at the machine, "" to what a default session would use, and any other name by
/// describe_device. Throws EnvironmentError saying why there is no such device.
[[nodiscard]] Device resolve_device(std::string_view name);

[[nodiscard]] std::string_view version() noexcept;

/// An environment variable that flce reads, once, when it is first needed.
struct EnvironmentVariable {
    std::string name{};
    std::string meaning{};
    std::string default_value{};         ///< text for people
    std::optional<std::string> value{};  ///< value that the variable is set to now; absent: not set or empty
};
/// All environment variables that flce reads.
[[nodiscard]] std::vector<EnvironmentVariable> environment_variables();

}  // namespace flce
