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

/// mean divides by the number of valid tokens (by the sum of their class weights, where there are some), whatever their token weights are;
/// weighted_mean by the sum of valid tokens' weights, each times its class weight. z-losses are divided without class weights.
enum class Reduction : std::uint8_t { none, sum, mean, weighted_mean };
enum class Pass : std::uint8_t { forward, backward, forward_backward, merge };

/// Caller-owned scratch, 256-byte aligned, on the kernel's device; may be used again as soon as the pass has run on its stream. Forward is
/// quicker with ignored tokens where it has more than it needs (backward's amount will do); its results are the same.
struct Workspace {
    void* data = nullptr;
    std::size_t bytes = 0;
};

/// Where what is retained lies: in memory of its own, or in that of grad_weight before backward writes it.
enum class RetainedPlace : std::uint8_t { own, grad_weight };

/// Caller-owned memory on the kernel's device, 16-byte aligned, in which forward leaves to backward what spares it computing logits again:
/// as much as fits. Both passes are given the same bytes and place, unchanged in between; none (the default) means that backward computes
/// all of them again. Backward may write there too: calls over the same bytes follow one another. CPU kernels retain logits, and their
/// gradients' bits do not depend on it; GPU kernels whose plan's strategy is retain keep exponentials in bf16 (grad_weight is then off by
/// two roundings of its factors, not one).
struct Retained {
    void* data = nullptr;
    std::size_t bytes = 0;  ///< in grad_weight's memory: exactly Kernel::retained_bytes(num_tokens, RetainedPlace::grad_weight)
    RetainedPlace place = RetainedPlace::own;
};

/// What of a step decides where forward leaves something to backward, and how much.
struct RetainOptions {
    /// On workspace and Retained together. 0: none, and no memory for Retained alone, but that of a shard may be as large as the whole
    /// layer's weight gradient and 1/32 more.
    std::int64_t workspace_limit_bytes = 0;
    bool lend_grad_weight = true;    ///< backward will write grad_weight, and its memory may hold what is retained until then
    std::int64_t vocab_columns = 0;  ///< classes of this rank's shard; 0: spec.vocab_size
    /// Multiply-adds of one GEMM (N·D·V) below which a layer retains nothing; 0: those where the launches that it takes cost more than it
    /// spares.
    std::int64_t least_work = 0;
};

/// A CUstream of the kernel's device (null: the legacy default stream). Ignored by CPU kernels, which have finished when the call returns.
struct Stream {
    void* handle = nullptr;
};

/// What a backward call does. A step may be cut in two where something waits for grad_hidden, as a reduction over shards does: the call
/// with until_grad_hidden completes grad_hidden (on its stream), the one with rest completes grad_weight and grad_bias. Both have the same
/// arguments, and the workspace stays as it is in between. Which part of grad_weight's work comes before is the kernel's choice.
enum class BackwardStage : std::uint8_t { whole, until_grad_hidden, rest };

// Shapes: N = num_tokens, D = hidden_size, V = vocab_size, P = padded_vocab_size. All tensors contiguous, on the kernel's device; hidden,
// weight and their gradients 16-byte aligned. Absent tensors are not read or written.
//
// Shards. A layer whose classes lie on several ranks (spec.whole_vocab_size) has a kernel for a rank's part, the same one for all ranks:
//
//     forward(partial_sums) ─▶ the caller gathers all ranks' ─▶ merge(loss, lse, …) ─▶ backward(lse) ─▶ the caller adds up grad_hidden
//
// The weight has the rows of labels vocab_start and up: as many as its shape says, at most P (hidden_major: exactly P columns). Rows at and
// past whole_vocab_size are padding, which any rank may have, and a rank may have nothing else. The others are at most V. Bias and
// class weights have as many elements as the weight has rows. Labels, a teacher's ids and top1 count all classes; label smoothing is over
// all of them. Partial sums are merged in the order in which they are given, so that every rank has the same bits.
struct ForwardArgs {
    TensorView hidden{};        ///< [N, D], spec dtype
    TensorView weight{};        ///< [P, D] (vocab_major) or [D, P] (hidden_major), weight_dtype(spec)
    TensorView bias{};          ///< [V], spec dtype; required iff spec.bias
    TensorView class_weight{};  ///< [V] fp32; required iff spec.class_weight
    TensorView target{};        ///< [N] int32 or int64. With spec.teacher_top_k and a hard_weight of 0 it only says which tokens take part:
                                ///< those with any class
    TensorView temperature{};   ///< [N] fp32; required iff spec.temperature. A row's that is not between 2^-100 and 2^100 is a fault
    TensorView token_weight{};  ///< [N] fp32; required iff spec.token_weight. Those of ignored rows are not read
    /// [N, K] int32 or int64, K = spec.teacher_top_k; required iff that is not 0. Classes in any order, −1 for none; what equal ids have
    /// adds up. An id that is neither is a fault and counts as none. Those of ignored rows are not read
    TensorView teacher_ids{};
    /// [N, K] fp32, required as the ids: the classes' probabilities q, or any numbers; they need not add up to 1. One of 0, or at no class,
    /// adds nothing, a negative one what it comes to, and a NaN makes its token's loss and gradients NaN
    TensorView teacher_probs{};
    std::int64_t ignore_index = -100;
    Reduction reduction = Reduction::mean;
    /// Scalar int32, int64 or fp32 that mean divides by; absent: the valid tokens (or their class weights) are counted.
    TensorView num_valid{};
    TensorView loss{};              ///< fp32: [N] for none, scalar otherwise
    TensorView z_loss{};            ///< fp32, like loss: its z-loss part alone, for logs
    TensorView lse{};               ///< [N] fp32; required: backward reads it. 0 is written for ignored rows
    TensorView logprob{};           ///< [N] fp32, 0 for ignored rows
    TensorView entropy{};           ///< [N] fp32, 0 for ignored rows
    TensorView top1{};              ///< [N] int64, −1 for ignored rows
    TensorView log_sum_sq_probs{};  ///< [N] fp32, 0 for ignored rows
    TensorView
        teacher_logprobs{};        ///< [N, K] fp32, required as the ids, as backward reads it: log p of each, 0 at no class and for ignored
                                   ///< rows
    TensorView invalid_label{};    ///< one uint64 that the caller set to ~0: receives the smallest index of a row whose label is neither
                                   ///< ignore_index nor in [0, V), or whose temperature is not between 2^-100 and 2^100. Such rows count as
                                   ///< ignored, with or without this tensor. Also that of a row that is not ignored and has a teacher's id
                                   ///< out of range, which counts as none
    Retained retained{};           ///< written; see Kernel::retained_bytes
    std::int64_t vocab_start = 0;  ///< of a shard: the label of the weight's first row
    TensorView partial_sums{};     ///< [F, N] fp32, F = Kernel::partial_sum_fields(); required of a shard, which writes no other output
};

/// What all shards' partial sums come to. A rank that merges has no need of a weight.
struct MergeArgs {
    TensorView all_partial_sums{};  ///< [R·F, N] fp32: those of R shards in the order of their labels, as each forward wrote them
    TensorView target{};            ///< this one to num_valid: as in forward
    TensorView temperature{};
    TensorView token_weight{};
    TensorView teacher_ids{};
    TensorView teacher_probs{};
    std::int64_t ignore_index = -100;
    Reduction reduction = Reduction::mean;
    TensorView num_valid{};
    TensorView loss{};  ///< this one to invalid_label: as forward writes them where there are no shards
    TensorView z_loss{};
    TensorView lse{};
    TensorView logprob{};
    TensorView entropy{};
    TensorView top1{};
    TensorView log_sum_sq_probs{};
    TensorView teacher_logprobs{};
    TensorView target_class_weight{};  ///< [N] fp32, required with spec.class_weight, as backward reads it: of each token's target, else 0
    TensorView class_weight_total{};   ///< scalar fp32, required with spec.class_weight and label smoothing: of all classes
    TensorView invalid_label{};
};

struct BackwardArgs {
    TensorView hidden{};
    TensorView weight{};
    TensorView bias{};
    TensorView class_weight{};
    TensorView target{};
    TensorView temperature{};
    TensorView token_weight{};
    TensorView teacher_ids{};
    TensorView teacher_probs{};
    std::int64_t ignore_index = -100;
    Reduction reduction = Reduction::mean;
    TensorView num_valid{};
    TensorView lse{};               ///< [N] fp32, as forward wrote it
    TensorView logprob{};           ///< [N] fp32, as forward wrote it; required with spec.dft
    TensorView entropy{};           ///< [N] fp32, as forward wrote it; required with grad_entropy
    TensorView teacher_logprobs{};  ///< [N, K] fp32, as forward wrote it; required with spec.teacher_top_k
    TensorView grad_loss{};         ///< fp32: [N] for none, scalar otherwise; absent: 1, or 0 without spec.outputs.loss
    TensorView grad_lse{};          ///< [N] fp32; absent: 0, as for the next two
    TensorView grad_logprob{};
    TensorView grad_entropy{};
    TensorView grad_hidden{};  ///< [N, D], grad_hidden_dtype(spec); absent: not computed. Ignored rows receive 0
    TensorView grad_weight{};  ///< like weight, spec.grad_weight_dtype; absent: not computed
    TensorView grad_bias{};    ///< [V], spec.grad_weight_dtype; absent: not computed
    /// As forward left it. If it is this grad_weight's memory, the call destroys it: later ones go without.
    Retained retained{};
    std::int64_t vocab_start = 0;      ///< of a shard, as in forward. grad_hidden is then this shard's part of the sum
    TensorView target_class_weight{};  ///< of a shard, as merge wrote it; so is the next one
    TensorView class_weight_total{};
    BackwardStage stage = BackwardStage::whole;
    /// Hidden states are there when the first of two stages begins. The call then may read them beside what makes grad_hidden, also where
    /// Kernel::reads_hidden_late says that it can do without them until the last stage. The same in both stages: with `true` the last one
    /// reads what the first one has made of them.
    bool hidden_ready = false;
};

/// Why this kernel is what it is, for people and for `flce explain`.
struct Explanation {
    std::string spec{};
    std::string plan{};
    std::string device{};
    std::vector<std::string> reasons{};  ///< a line each: why this plan, what was refused and why
};

/// A compiled kernel set for one Spec on one device. Immutable and thread-safe; usable on any stream of its device; never allocates device
/// memory, never synchronises, and its CUDA form can be captured in a graph. Keeps what it needs alive after its Session is gone.
class Kernel {
public:
    virtual ~Kernel() = default;
    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;

    [[nodiscard]] const Spec& spec() const noexcept { return spec_; }
    [[nodiscard]] const Device& device() const noexcept { return device_; }
    [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
    [[nodiscard]] DeviceRef device_ref() const noexcept { return device_ref_; }

    /// Scratch bytes that a pass over num_tokens tokens needs. More tokens may need less: ask for each number of tokens. Throws
    /// ArgumentError for num_tokens < 0 and on overflow.
    [[nodiscard]] std::size_t workspace_bytes(std::int64_t num_tokens, Pass pass = Pass::forward_backward) const;

    /// Most bytes of Retained that passes over num_tokens tokens have a use for; any smaller number does for a part. 0: this kernel retains
    /// nothing. RetainedPlace::grad_weight: exactly the bytes from the beginning of grad_weight that may be lent for it, or 0 where its
    /// memory will not do (it accumulates, or its rows are not the vocabulary's). `vocab_columns`: classes of this rank's shard, where they
    /// are fewer than spec.vocab_size; 0: spec.vocab_size.
    [[nodiscard]] std::size_t retained_bytes(std::int64_t num_tokens, RetainedPlace place = RetainedPlace::own,
                                             std::int64_t vocab_columns = 0) const;

    /// Whether a backward call in stages over num_tokens tokens, with such a Retained and without BackwardArgs::hidden_ready, reads hidden
    /// in its last stage alone. It may then still be on its way from other ranks while grad_hidden is made. False with an entropy, whose
    /// gradient needs logits again.
    /// `vocab_columns`: as of retained_bytes, whose errors it throws.
    [[nodiscard]] bool reads_hidden_late(std::int64_t num_tokens, const Retained& retained, std::int64_t vocab_columns = 0) const;

    /// What forward should leave to backward of a step over num_tokens tokens: place and bytes, for the caller to set `data` to such memory
    /// (0 bytes: nothing). grad_weight's memory where it may be lent and what the limit leaves beside the workspace holds no more; else
    /// that, where it holds enough to be worth it. Of a shard on a GPU memory of its own wherever the limit has room for everything: then
    /// grad_hidden's sum over ranks hides under grad_weight's product. Throws ArgumentError for num_tokens < 0 and on overflow, and for
    /// negative options.
    [[nodiscard]] Retained choose_retained(std::int64_t num_tokens, const RetainOptions& options = {}) const;

    /// Throws ArgumentError naming the argument before anything is launched; DeviceError when a launch fails.
    void forward(const ForwardArgs& args, Workspace workspace, Stream stream = {}) const;
    /// Of a shard: outputs from all shards' partial sums, with workspace_bytes(num_tokens, Pass::merge). Throws as forward does.
    void merge(const MergeArgs& args, Workspace workspace, Stream stream = {}) const;
    /// Fields of a shard's partial sums, F; 0 where the spec is no shard's.
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
    virtual bool defers_hidden() const noexcept { return false; }  ///< where everything is retained: see reads_hidden_late

    Spec spec_;
    Device device_;
    Plan plan_;
    DeviceRef device_ref_;
    Reasons reasons_;
};

/// What a Session did so far.
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
    std::int64_t workspace_limit_bytes = 0;             ///< of calls that give none of their own; see KernelOptions. 0: none
    /// Tuning records to read before the user's own (FLCE_RECORDS_DIR, else "records" in the cache directory) and those that flce brings:
    /// directories or files, first ones first. Empty: FLCE_RECORDS.
    std::vector<std::filesystem::path> records{};
    bool use_records = true;  ///< false: every plan is the caller's or the cost model's, as with FLCE_NO_RECORDS
    /// Strict: get_kernel compiles nothing. A kernel that no cache has is a CacheMissError that names the command to compile it with, and a
    /// tier of the cache that cannot be used is an EnvironmentError, here or in get_kernel, instead of a warning. Absent: FLCE_STRICT.
    std::optional<bool> strict{};
};

struct KernelOptions {
    std::string plan{};              ///< canonical plan text to use instead of the planner's choice; empty: the planner's
    std::int64_t scratch_bytes = 0;  ///< for the planner, instead of the session's; 0: the session's
    /// Most bytes beyond inputs and gradients that a call over num_tokens tokens may take, workspace and Retained together; 0: the
    /// session's limit. The kernel's workspace keeps to it (scratch gets smaller, in steps, so that different limits share kernels); what
    /// it leaves is the most that Retained of its own memory may have. A kernel that retains nothing gets more scratch than the default
    /// instead, where that is of use.
    std::int64_t workspace_limit_bytes = 0;
    /// Tokens of the call. The limit holds for this number, and the plan is that for its token_bucket. 0: not known. The limit is then for
    /// the workspace that does not grow with tokens, and the plan is that for kTypicalTokens.
    std::int64_t num_tokens = 0;
};

/// The plan of a kernel and where it comes from.
struct PlanChoice {
    Plan plan{};
    std::string source{};                ///< the caller, a record of measurements (which, and how good), or the cost model
    std::vector<std::string> reasons{};  ///< as Kernel::explain has them, without its line about times
};

/// One kernel set compiled for a device that need not be here.
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

    /// Of those, what no tier of the cache has: the text of each plan whose kernels are not complete. Empty: such a session would compile
    /// nothing. Compiles nothing.
    [[nodiscard]] std::vector<std::string> missing(const Spec& spec, const Device& device, const KernelOptions& options = {});

    /// The plan that a session on `device`, which need not be here, takes for such a call; compiles nothing. An explicit plan comes first,
    /// then that of the nearest record of measurements, then the cost model's. Throws SpecError, PlanError.
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
/// ranks of one training run that have the same one compute alike. They compare it before the first step (Python: flce.check_same_plans).
[[nodiscard]] std::string plan_digest(std::span<const std::shared_ptr<const Kernel>> kernels);

/// get_kernel on the process's default session.
[[nodiscard]] std::shared_ptr<const Kernel> get_kernel(const Spec& spec);

/// Resolves "cpu", "native", "cuda", "cuda:i" by looking at the machine, "" to what a default session would use, and any other name by
/// describe_device. Throws EnvironmentError saying why there is no such device.
[[nodiscard]] Device resolve_device(std::string_view name);

[[nodiscard]] std::string_view version() noexcept;

/// An environment variable that flce reads. They are read once, when first needed.
struct EnvironmentVariable {
    std::string name{};
    std::string meaning{};
    std::string default_value{};         ///< for people
    std::optional<std::string> value{};  ///< what it is set to now; absent: not set or empty
};
/// All of them.
[[nodiscard]] std::vector<EnvironmentVariable> environment_variables();

}  // namespace flce
