/* flce in C: what flce.hpp offers, behind opaque handles and status codes. C99; nothing throws, longjmps or aborts.
 *
 *     flce_session* session = NULL;
 *     flce_kernel* kernel = NULL;
 *     if (flce_session_create(NULL, &session) || flce_get_kernel(session, "D=2048,V=151936,dtype=bf16", NULL, &kernel)) {
 *         fprintf(stderr, "%s\n", flce_last_error());
 *     }
 *     flce_forward_args args = FLCE_FORWARD_ARGS_INIT;
 *     args.hidden = &hidden; args.weight = &weight; args.target = &target; args.loss = &loss; args.lse = &lse;
 *     flce_kernel_forward(kernel, &args, workspace, workspace_bytes, stream);
 *
 * Threads: every function may be called from any thread; a handle may be shared between threads, as long as each holds a reference.
 * Structs passed by the caller begin with `struct_size`, set to sizeof the struct as the caller was compiled: fields that a newer library
 * knows beyond it take their defaults. Set the structs up with the _INIT macros, or zero them and set struct_size. */
#ifndef FLCE_FLCE_H_
#define FLCE_FLCE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define FLCE_API __declspec(dllimport)
#else
#define FLCE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when functions or fields are added; fields and functions that are there keep their meaning. */
#define FLCE_ABI_VERSION 17

/* The ABI version the library was built with, and the library's version ("0.1.0"). */
FLCE_API int32_t flce_abi_version(void);
FLCE_API const char* flce_version(void);

/* --- Status ------------------------------------------------------------------------------------------------------------------- */

typedef enum flce_status {
    FLCE_OK = 0,
    FLCE_ERROR_SPEC = 1,        /* the spec (or its text) is malformed or outside the limits */
    FLCE_ERROR_PLAN = 2,        /* the plan is malformed or not legal for this spec and device */
    FLCE_ERROR_ARGUMENT = 3,    /* a tensor, workspace, pointer or number is wrong; nothing was written */
    FLCE_ERROR_COMPILE = 4,     /* a compiler refused generated source; flce_last_error_log() has its log */
    FLCE_ERROR_DEVICE = 5,      /* a CUDA driver call failed */
    FLCE_ERROR_ENVIRONMENT = 6, /* a library, device, file or memory that the call needs is not there */
    FLCE_ERROR_INTERNAL = 7,    /* a bug in flce */
    FLCE_ERROR_CACHE_MISS = 8   /* strict session: no cache has the kernel; the message names the command that compiles it */
} flce_status;

/* All text that this library returns is UTF-8, but for file names, which are returned as they are: bytes of any encoding
 * (flce_session_cache_dir). In messages and explanations a byte of a file name that is no UTF-8 is written as \xNN. Texts that are given
 * must be UTF-8, but for file names. */

/* Message of the last call on this thread that failed, "" if none did. Valid until this thread's next call that fails. Never NULL. */
FLCE_API const char* flce_last_error(void);
/* The compiler's whole log, if that call failed with FLCE_ERROR_COMPILE; else "". Lives as long as the message. */
FLCE_API const char* flce_last_error_log(void);

/* Functions that return text write it, NUL-terminated, to buffer[0 .. capacity) and the bytes it takes, NUL included, to *needed. With
 * buffer NULL and capacity 0 they only say how much is needed. If capacity is too small, nothing is written but *needed, and the status is
 * FLCE_ERROR_ARGUMENT. `needed` may be NULL where buffer is not. */

/* --- Tensors ------------------------------------------------------------------------------------------------------------------ */

/* A DLPack element type (DLDataType with lanes = 1) in one number. */
#define FLCE_DTYPE(dlpack_code, bits) (((dlpack_code) << 8) | (bits))
enum {
    FLCE_INT32 = FLCE_DTYPE(0, 32), /* kDLInt */
    FLCE_INT64 = FLCE_DTYPE(0, 64),
    FLCE_UINT64 = FLCE_DTYPE(1, 64), /* kDLUInt */
    FLCE_UINT8 = FLCE_DTYPE(1, 8),
    FLCE_E4M3 = FLCE_DTYPE(10, 8), /* kDLFloat8_e4m3fn */
    FLCE_FP16 = FLCE_DTYPE(2, 16), /* kDLFloat */
    FLCE_FP32 = FLCE_DTYPE(2, 32),
    FLCE_BF16 = FLCE_DTYPE(4, 16) /* kDLBfloat */
};

/* DLPack's DLDeviceType. */
enum { FLCE_CPU = 1 /* kDLCPU */, FLCE_CUDA = 2 /* kDLCUDA */ };

/* A view of the caller's memory: DLTensor for at most two dimensions, with byte_offset already added to data and strides always given, in
 * elements. Not kept beyond the call. */
typedef struct flce_tensor {
    void* data;    /* may be NULL where a dimension is 0 */
    int32_t dtype; /* FLCE_BF16, … */
    int32_t ndim;  /* 0 (scalar), 1 or 2 */
    int64_t shape[2];
    int64_t strides[2];
    int32_t device_type;  /* FLCE_CPU or FLCE_CUDA */
    int32_t device_index; /* CUDA ordinal; 0 for the CPU */
} flce_tensor;

/* --- Sessions ----------------------------------------------------------------------------------------------------------------- */

/* Owns a cache and the device that it serves. */
typedef struct flce_session flce_session;

/* All zero but struct_size: every default. Strings are copied. */
typedef struct flce_session_options {
    size_t struct_size;
    const char* device;            /* "cpu", "cuda", "cuda:1", …; NULL or "": FLCE_DEVICE, else the first CUDA device, else the CPU */
    const char* cache_dir;         /* NULL or "": FLCE_CACHE_DIR, else $XDG_CACHE_HOME/flce, else ~/.cache/flce */
    int64_t scratch_bytes;         /* workspace beside 4·N·D bytes and long lists of tokens that plans may use; 0: 64 MiB */
    int32_t threads;               /* threads of CPU kernels; 0: FLCE_NUM_THREADS, else every core */
    int32_t no_disk_cache;         /* not 0: nothing is kept on disk */
    int64_t workspace_limit_bytes; /* limit of calls that give none of their own, see flce_kernel_options; 0: none */
    /* 1: flce_get_kernel compiles nothing: FLCE_ERROR_CACHE_MISS for a kernel that no cache has, FLCE_ERROR_ENVIRONMENT (at once or then)
     * for a part of the cache that cannot be used. -1: it compiles. 0: FLCE_STRICT decides. */
    int32_t strict;
    int32_t reserved;   /* 0 */
    int32_t no_records; /* not 0: every plan is the caller's or the cost model's, as with FLCE_NO_RECORDS */
    int32_t reserved_2; /* 0 */
    /* Packs, read after the directory in this order; 0 of them: FLCE_CACHE_PACKS. */
    const char* const* cache_packs;
    size_t num_cache_packs;
    const char* cache_remote; /* URL of a cache that machines share; NULL or "": FLCE_CACHE_REMOTE */
    /* Files of Ed25519 public keys (PEM), one of which must have signed packs and remote entries; 0 of them: FLCE_TRUSTED_KEYS. */
    const char* const* trusted_keys;
    size_t num_trusted_keys;
    /* Directories or files of tuning records, read before the user's own and those that flce brings; 0 of them: FLCE_RECORDS. */
    const char* const* records;
    size_t num_records;
} flce_session_options;
#define FLCE_SESSION_OPTIONS_INIT {sizeof(flce_session_options), NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0, NULL, 0, NULL, NULL, 0, NULL, 0}

/* `options` may be NULL. */
FLCE_API flce_status flce_session_create(const flce_session_options* options, flce_session** session);
/* A reference to the process's own session: default options, made at the first call. Release it like any other. */
FLCE_API flce_status flce_session_default(flce_session** session);
/* NULL is ignored. Kernels outlive their session. */
FLCE_API void flce_session_release(flce_session* session);
/* JSON object describing the session's device. */
FLCE_API flce_status flce_session_device_json(const flce_session* session, char* buffer, size_t capacity, size_t* needed);
/* The session's device in DLPack's terms. */
FLCE_API flce_status flce_session_device(const flce_session* session, int32_t* device_type, int32_t* device_index);
/* Directory of the disk cache, "" if there is none: the file name's bytes. */
FLCE_API flce_status flce_session_cache_dir(const flce_session* session, char* buffer, size_t capacity, size_t* needed);

typedef struct flce_statistics {
    size_t struct_size;  /* set by the caller */
    int64_t memory_hits; /* kernels and artifacts answered from memory */
    int64_t disk_hits;   /* artifacts read from disk */
    int64_t compiled;    /* artifacts compiled */
    int64_t disk_faults; /* corrupt, unreadable or unwritable entries: each cost a compile at most */
} flce_statistics;
#define FLCE_STATISTICS_INIT {sizeof(flce_statistics), 0, 0, 0, 0}
FLCE_API flce_status flce_session_statistics(const flce_session* session, flce_statistics* statistics);

/* Places where kernels are looked for, in this order. */
enum { FLCE_TIER_MEMORY = 0, FLCE_TIER_LOCAL = 1, FLCE_TIER_PACKS = 2, FLCE_TIER_REMOTE = 3 };
typedef struct flce_tier_statistics {
    size_t struct_size; /* set by the caller */
    int64_t hits;       /* lookups that it answered */
    int64_t misses;     /* lookups that it did not */
    int64_t faults;     /* entries or media that were harmed, refused or out of reach: each cost time, and a compile at most */
    int64_t stored;     /* entries that it took */
} flce_tier_statistics;
#define FLCE_TIER_STATISTICS_INIT {sizeof(flce_tier_statistics), 0, 0, 0, 0}
/* Counts of one tier's work for flce_get_kernel; all 0 where the session has no such tier. */
FLCE_API flce_status flce_session_tier_statistics(const flce_session* session, int32_t tier, flce_tier_statistics* statistics);

/* --- Specs -------------------------------------------------------------------------------------------------------------------- */

/* Specs are text: "D=2048,V=151936,dtype=bf16,tied", or JSON with the same keys (first character '{'). These functions check a spec and
 * return its canonical forms. */
FLCE_API flce_status flce_spec_text(const char* spec, char* buffer, size_t capacity, size_t* needed);
FLCE_API flce_status flce_spec_json(const char* spec, char* buffer, size_t capacity, size_t* needed);
/* The canonical text of the output layer that a Hugging Face config.json describes, given its text; flce/spec.hpp has the keys. */
FLCE_API flce_status flce_hf_config_spec(const char* config_json, char* buffer, size_t capacity, size_t* needed);

/* --- Kernels ------------------------------------------------------------------------------------------------------------------ */

/* A compiled kernel set for one spec on one device: immutable, usable from any thread and on any stream of its device. A kernel allocates
 * no device memory, never synchronises, and its CUDA form can be captured in a graph. Counted references. */
typedef struct flce_kernel flce_kernel;

typedef struct flce_kernel_options {
    size_t struct_size;
    const char* plan;      /* canonical plan text instead of the planner's choice; NULL or "": the planner's */
    int64_t scratch_bytes; /* instead of the session's; 0: the session's */
    /* Most bytes beyond inputs and gradients that a call over num_tokens tokens may take, workspace and `retained` together; 0: the
     * session's limit. The kernel's workspace keeps to it; `retained` in memory of its own may have the rest. */
    int64_t workspace_limit_bytes;
    /* Tokens of the call. The limit holds for this number, and the plan is made for its token bucket (flce_token_bucket). 0: not known. The
     * limit is then for the memory that does not grow with tokens, and the plan is made for 4096. */
    int64_t num_tokens;
} flce_kernel_options;
#define FLCE_KERNEL_OPTIONS_INIT {sizeof(flce_kernel_options), NULL, 0, 0, 0}

/* The number of tokens that calls over num_tokens tokens are planned for: the nearest of 64, 256, 1024, 2048, 4096, … 65536 by ratio, the
 * smaller of two; 4096 for 0 and less, which stand for a number not known. Calls of one bucket without a limit have one kernel. */
FLCE_API int64_t flce_token_bucket(int64_t num_tokens);

/* Gets a kernel from memory, from disk, or compiles it: once, whatever the number of concurrent callers; a failure is not remembered.
 * `options` may be NULL. *kernel is a new reference, or NULL on failure. */
FLCE_API flce_status flce_get_kernel(flce_session* session, const char* spec, const flce_kernel_options* options, flce_kernel** kernel);
/* One more reference. NULL is ignored. */
FLCE_API void flce_kernel_retain(flce_kernel* kernel);
FLCE_API void flce_kernel_release(flce_kernel* kernel);

typedef struct flce_prewarm_result {
    size_t struct_size; /* set by the caller */
    int64_t compiled;
    int64_t hits;
} flce_prewarm_result;
#define FLCE_PREWARM_RESULT_INIT {sizeof(flce_prewarm_result), 0, 0}
/* Compiles into the session's disk cache what a session on `device` ("sm_90a", "NVIDIA H200", "x86-64-v4", "cuda:0", …) would ask for,
 * without needing the device. `options` and `result` may be NULL. */
FLCE_API flce_status flce_prewarm(flce_session* session, const char* spec, const char* device, const flce_kernel_options* options,
                                  flce_prewarm_result* result);

enum { FLCE_FORWARD = 0, FLCE_BACKWARD = 1, FLCE_FORWARD_BACKWARD = 2, FLCE_MERGE = 3 };
/* Scratch bytes of a pass over num_tokens tokens (FLCE_FORWARD_BACKWARD: enough for either). More tokens may need fewer bytes: ask for each
 * number of tokens. */
FLCE_API flce_status flce_kernel_workspace_bytes(const flce_kernel* kernel, int64_t num_tokens, int32_t pass, size_t* bytes);

/* Place of the retained values: memory of their own, or grad_weight's memory before backward writes it. */
enum { FLCE_RETAINED_OWN = 0, FLCE_RETAINED_GRAD_WEIGHT = 1 };
/* Most bytes that forward can leave to backward for num_tokens tokens (16-byte aligned, on the kernel's device); any smaller number spares
 * a part. 0: this kernel retains nothing. `place` FLCE_RETAINED_GRAD_WEIGHT: exactly the bytes from the beginning of grad_weight that may
 * be lent, or 0 where grad_weight's memory will not do. A backward call that writes grad_weight then destroys the values retained there:
 * later calls go without. */
FLCE_API flce_status flce_kernel_retained_bytes(const flce_kernel* kernel, int64_t num_tokens, int32_t place, size_t* bytes);

/* A step's properties that decide where forward leaves values to backward, and how many. All zero but struct_size: every default. */
typedef struct flce_retain_options {
    size_t struct_size;
    /* Most bytes of workspace and `retained` together. 0: no limit, and no memory of its own for `retained`, except that of a shard, which
     * may be as large as the whole layer's weight gradient and 1/32 more. */
    int64_t workspace_limit_bytes;
    /* Multiply-adds of one GEMM (N·D·V) below which a layer retains nothing; 0: the number at which the launches for it cost more than they
     * spare. */
    int64_t least_work;
    int32_t retain_in_grad_weight; /* 0, 1: in grad_weight's memory, which backward then writes, where that will do; -1: not there */
    int32_t reserved;              /* 0 */
    int64_t vocab_columns;         /* classes of this rank's shard; 0: the spec's vocab_size */
} flce_retain_options;
#define FLCE_RETAIN_OPTIONS_INIT {sizeof(flce_retain_options), 0, 0, 0, 0, 0}
/* Values for retained_place and retained_bytes that forward and backward of a step over num_tokens tokens should be given; 0 bytes:
 * nothing. The memory is the caller's own, or grad_weight's. `options` may be NULL. */
FLCE_API flce_status flce_kernel_choose_retained(const flce_kernel* kernel, int64_t num_tokens, const flce_retain_options* options,
                                                 int32_t* place, size_t* bytes);

/* Whether a backward call in stages over num_tokens tokens, with such a `retained` and hidden_ready 0, reads hidden in its last stage alone
 * (*late is 1, else 0): hidden may then still be on its way from other ranks while grad_hidden is made. `vocab_columns`: classes of this
 * rank's shard; 0: the spec's vocab_size. */
FLCE_API flce_status flce_kernel_reads_hidden_late(const flce_kernel* kernel, int64_t num_tokens, int32_t retained_place,
                                                   size_t retained_bytes, int64_t vocab_columns, int32_t* late);

enum {
    FLCE_TEXT_SPEC = 0,
    FLCE_TEXT_SPEC_JSON = 1,
    FLCE_TEXT_PLAN = 2,
    FLCE_TEXT_PLAN_JSON = 3,
    FLCE_TEXT_DEVICE_JSON = 4,
    FLCE_TEXT_EXPLAIN = 5,     /* lines for people: spec, plan, device and why */
    FLCE_TEXT_EXPLAIN_JSON = 6 /* {"spec", "plan", "device", "reasons": [...]} */
};
FLCE_API flce_status flce_kernel_text(const flce_kernel* kernel, int32_t which, char* buffer, size_t capacity, size_t* needed);
FLCE_API flce_status flce_kernel_device(const flce_kernel* kernel, int32_t* device_type, int32_t* device_index);

/* SHA-256, as 64 hexadecimal digits, of the specs and plans of `count` kernels in any order, and of the version of the code that they were
 * generated by. Ranks of one training run compare digests before the first step: ranks with equal digests compute alike. */
FLCE_API flce_status flce_plan_digest(const flce_kernel* const* kernels, size_t count, char* buffer, size_t capacity, size_t* needed);

/* WEIGHTED_MEAN divides by the sum of valid tokens' weights; MEAN by their number, whatever their weights are. */
enum { FLCE_REDUCTION_NONE = 0, FLCE_REDUCTION_SUM = 1, FLCE_REDUCTION_MEAN = 2, FLCE_REDUCTION_WEIGHTED_MEAN = 3 };

/* A backward call in one, or cut in two where something waits for grad_hidden: the first part completes grad_hidden. Both calls have the
 * same arguments, and the second one the workspace as the first one left it. */
enum { FLCE_STAGE_WHOLE = 0, FLCE_STAGE_UNTIL_GRAD_HIDDEN = 1, FLCE_STAGE_REST = 2 };

/* Walk over the vocabulary of a forward and of the merge behind it. A mixture's divergence (divergence_beta between 0 and 1) of a layer
 * over shards needs two of both: SUMS leads to lse and teacher_lse of all shards, MIXTURE reads them and leads to loss and
 * student_divergence. Everything else has SUMS alone. */
enum { FLCE_WALK_SUMS = 0, FLCE_WALK_MIXTURE = 1 };

/* Tensors: NULL means absent. N = num_tokens, D = hidden_size, V = vocab_size, P = padded_vocab_size. All contiguous and on the kernel's
 * device; hidden, weight and their gradients 16-byte aligned; what is written overlaps nothing else.
 *
 * Shards (specs with whole_vocab_size): a rank's weight has the rows of labels vocab_start and up, at most P (hidden_major: exactly P
 * columns); rows at and past whole_vocab_size are padding, and at most V rows are before it. Bias and class weights have as many elements
 * as the weight has rows. Forward writes partial_sums, the caller gathers all ranks' partial sums in the order of their labels, merge
 * makes the outputs from the gathered sums, and the caller adds up the ranks' grad_hidden. */
typedef struct flce_forward_args {
    size_t struct_size;
    const flce_tensor* hidden;       /* [N, D], the spec's dtype */
    const flce_tensor* weight;       /* [P, D] (vocab_major) or [D, P] (hidden_major), the spec's weight_dtype */
    const flce_tensor* bias;         /* [V], the spec's dtype; required iff the spec has bias */
    const flce_tensor* class_weight; /* [V] fp32; required iff the spec has class_weight */
    const flce_tensor* target;       /* [N] int32 or int64 */
    int64_t ignore_index;
    int32_t reduction;
    int32_t walk;                     /* FLCE_WALK_...; in MIXTURE lse and teacher_lse are read */
    const flce_tensor* num_valid;     /* scalar int32, int64 or fp32 that mean divides by (<= 0: it is 0); NULL: valid tokens are counted */
    const flce_tensor* loss;          /* fp32: [N] for FLCE_REDUCTION_NONE, scalar otherwise */
    const flce_tensor* z_loss;        /* fp32, same shape as loss: the loss's z-loss part alone */
    const flce_tensor* lse;           /* [N] fp32; required: backward reads it */
    const flce_tensor* logprobs;      /* [N] fp32; the spec's outputs must have it, as for entropy */
    const flce_tensor* entropy;       /* [N] fp32 */
    const flce_tensor* invalid_label; /* one uint64 that the caller set to UINT64_MAX; see flce_kernel_check_invalid_label */
    void* retained;                   /* written: values that spare backward their logits, as many as fit; see flce_kernel_retained_bytes */
    size_t retained_bytes;            /* 0 with retained NULL: nothing is retained */
    int32_t
        retained_place; /* FLCE_RETAINED_OWN, or FLCE_RETAINED_GRAD_WEIGHT with exactly the bytes that flce_kernel_retained_bytes says */
    int32_t reserved_2; /* 0 */
    const flce_tensor* temperature;      /* [N] fp32, 2^-100 to 2^100; required iff the spec has temperature */
    const flce_tensor* token_weight;     /* [N] fp32; required iff the spec has token_weight */
    const flce_tensor* top1;             /* [N] int64, -1 for ignored rows; the spec's outputs must have it, as for log_sum_sq_probs */
    const flce_tensor* log_sum_sq_probs; /* [N] fp32, 0 for ignored rows */
    /* Required iff the spec has teacher_top_k = K. Ids: [N, K] int32 or int64, classes in any order, -1 for none; equal ids add up, and an
     * id that is neither a class nor -1 is reported like such a label and counts as none. Probabilities: [N, K] fp32, any numbers; a NaN
     * makes its token's loss and gradients NaN. Log-probabilities: [N, K] fp32, written, 0 at no class; backward reads them. */
    const flce_tensor* teacher_ids;
    const flce_tensor* teacher_probs;
    const flce_tensor* teacher_logprobs;
    int64_t vocab_start;             /* label of the weight's first row in a shard; else 0 */
    const flce_tensor* partial_sums; /* [F, N] fp32, written: required with a shard, which writes no other output */
    /* Required iff the spec has teacher_hidden_size = D_t, but for teacher_bias and teacher_entropy. */
    const flce_tensor* teacher_hidden;     /* [N, D_t], the spec's dtype */
    const flce_tensor* teacher_weight;     /* [V, D_t] (vocab_major) or [D_t, V] (hidden_major), the spec's dtype */
    const flce_tensor* teacher_bias;       /* [V], the spec's dtype; required iff the spec has teacher_bias */
    const flce_tensor* teacher_lse;        /* [N] fp32, written: backward reads it, as student_divergence */
    const flce_tensor* teacher_entropy;    /* [N] fp32, written; NULL: not wanted */
    const flce_tensor* student_divergence; /* [N] fp32, written: the divergence at a beta of 0 and 1, else KL(student || mixture) */
    /* Required iff the spec has top_k = K: the K classes of the largest logits, the largest first, of equal ones the smaller class. */
    const flce_tensor* top_logprobs; /* [N, K] fp32, written; 0 for ignored rows */
    const flce_tensor* top_ids;      /* [N, K] int64, written; -1 for ignored rows */
    const flce_tensor* class_offset; /* [V] fp32, -inf for a class that is ruled out; required iff the spec has class_offset */
    const flce_tensor* class_group;  /* [V] int32; required iff the spec has class_groups, and so is row_group. Below 0: of no group */
    const flce_tensor* row_group;    /* [N] int32 */
    /* Required iff the spec's weight_dtype is e4m3 or nvfp4; weight is then codes: [P, D] e4m3 or uint8, or [P, D / 2] uint8. Scales: fp32
     * [P], or with weight_block [ceil(P / 128), ceil(D / 128)]; of nvfp4 [P, D / 16] e4m3 or uint8. A shard's begin with its first row. */
    const flce_tensor* weight_scale;
    const flce_tensor* weight_tensor_scale; /* scalar fp32; required iff the spec's weight_dtype is nvfp4 */
} flce_forward_args;
/* clang-format off */
#define FLCE_FORWARD_ARGS_INIT                                                                                 \
    {sizeof(flce_forward_args), NULL, NULL, NULL, NULL, NULL, -100, FLCE_REDUCTION_MEAN, 0, NULL, NULL, NULL,  \
     NULL, NULL, NULL, NULL, NULL, 0, FLCE_RETAINED_OWN, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL,  \
     NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}
/* clang-format on */

/* Arguments that make a shard's outputs from all shards' partial sums. Tensors as in forward, but for three. */
typedef struct flce_merge_args {
    size_t struct_size;
    const flce_tensor* all_partial_sums; /* [R x F, N] fp32: partial sums of R shards in the order of their labels */
    const flce_tensor* target;
    const flce_tensor* temperature;
    const flce_tensor* token_weight;
    const flce_tensor* teacher_ids;
    const flce_tensor* teacher_probs;
    int64_t ignore_index;
    int32_t reduction;
    int32_t walk; /* the forward's before; MIXTURE leaves lse, teacher_lse and entropies as they are */
    const flce_tensor* num_valid;
    const flce_tensor* loss;
    const flce_tensor* z_loss;
    const flce_tensor* lse;
    const flce_tensor* logprobs;
    const flce_tensor* entropy;
    const flce_tensor* top1;
    const flce_tensor* log_sum_sq_probs;
    const flce_tensor* teacher_logprobs;
    const flce_tensor* target_class_weight; /* [N] fp32, written; required with the spec's class_weight, since backward reads it */
    const flce_tensor* class_weight_total;  /* scalar fp32, written; required with the spec's class_weight and label smoothing */
    const flce_tensor* invalid_label;
    const flce_tensor* teacher_lse; /* teacher_lse to top_ids: as in forward */
    const flce_tensor* teacher_entropy;
    const flce_tensor* student_divergence;
    const flce_tensor* top_logprobs;
    const flce_tensor* top_ids;
} flce_merge_args;
/* clang-format off */
#define FLCE_MERGE_ARGS_INIT                                                                                \
    {sizeof(flce_merge_args), NULL, NULL, NULL, NULL, NULL, NULL, -100, FLCE_REDUCTION_MEAN, 0, NULL, NULL, \
     NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}
/* clang-format on */

typedef struct flce_backward_args {
    size_t struct_size;
    const flce_tensor* hidden; /* hidden to num_valid: as in forward */
    const flce_tensor* weight;
    const flce_tensor* bias;
    const flce_tensor* class_weight;
    const flce_tensor* target;
    int64_t ignore_index;
    int32_t reduction;
    int32_t reserved; /* 0 */
    const flce_tensor* num_valid;
    const flce_tensor* lse;       /* [N] fp32, as forward wrote it */
    const flce_tensor* entropy;   /* [N] fp32, as forward wrote it; required with grad_entropy */
    const flce_tensor* grad_loss; /* fp32: [N] for FLCE_REDUCTION_NONE, scalar otherwise; NULL: 1 */
    const flce_tensor* grad_lse;  /* [N] fp32; NULL: 0, and so for grad_logprobs and grad_entropy */
    const flce_tensor* grad_logprobs;
    const flce_tensor* grad_entropy;
    const flce_tensor* grad_hidden; /* [N, D], the spec's dtype; NULL: not computed */
    const flce_tensor* grad_weight; /* like weight, the spec's grad_weight_dtype; NULL: not computed */
    const flce_tensor* grad_bias;   /* [V], the spec's grad_weight_dtype; NULL: not computed */
    void* retained; /* retained values as forward left them, with the same retained_bytes (written to as well); NULL: every logit is
                     * computed again */
    size_t retained_bytes;
    int32_t retained_place;         /* place given to forward */
    int32_t reserved_2;             /* 0 */
    const flce_tensor* temperature; /* temperature and token_weight: as in forward */
    const flce_tensor* token_weight;
    const flce_tensor* logprobs;    /* [N] fp32, as forward wrote it; required with the spec's dft */
    const flce_tensor* teacher_ids; /* teacher_ids and teacher_probs: as in forward */
    const flce_tensor* teacher_probs;
    const flce_tensor* teacher_logprobs;    /* [N, K] fp32, as forward wrote it */
    int64_t vocab_start;                    /* a shard's, as in forward. grad_hidden is then this shard's part of the sum */
    const flce_tensor* target_class_weight; /* a shard's, as merge wrote it; class_weight_total too */
    const flce_tensor* class_weight_total;
    int32_t stage;        /* FLCE_STAGE_... */
    int32_t hidden_ready; /* 1 if hidden is there when the first stage begins and may be read in it, else 0; equal in both stages */
    const flce_tensor* teacher_hidden; /* teacher_hidden to teacher_bias: as in forward. The teacher gets no gradient */
    const flce_tensor* teacher_weight;
    const flce_tensor* teacher_bias;
    const flce_tensor* teacher_lse; /* teacher_lse and student_divergence: [N] fp32, as forward wrote them */
    const flce_tensor* student_divergence;
    const flce_tensor* class_offset; /* [V] fp32, forward's */
    const flce_tensor* class_group;  /* [V] int32, forward's; row_group too */
    const flce_tensor* row_group;
    const flce_tensor* weight_scale; /* weight_scale and weight_tensor_scale: as in forward. grad_weight is then NULL */
    const flce_tensor* weight_tensor_scale;
} flce_backward_args;
/* clang-format off */
#define FLCE_BACKWARD_ARGS_INIT                                                                             \
    {sizeof(flce_backward_args), NULL, NULL, NULL, NULL, NULL, -100, FLCE_REDUCTION_MEAN, 0, NULL, NULL,    \
     NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, FLCE_RETAINED_OWN, 0, NULL, NULL, NULL, NULL, \
     NULL, NULL, 0, NULL, NULL, FLCE_STAGE_WHOLE, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}
/* clang-format on */

/* JSON description of these three structs, for bindings that build them when they are loaded:
 *     {"forward": {"size": bytes, "fields": [{"name", "offset", "type"}, ...]}, "merge": {...}, "backward": {...},
 *      "tensors": [{"name", "elements", "extent"}, ...]}
 * type: "tensor" (const flce_tensor*), "pointer", "size", "int32", "int64". elements: what the tensor's element type is: "spec", "weight",
 * "grad_hidden", "grad_weight" (the spec's dtype, weight_dtype, grad_hidden_dtype, grad_weight_dtype), "scale" (fp32; of nvfp4 e4m3 or
 * uint8), "fp32", "int32", "int64", "uint64", "label" (int32 or int64), "count" (fp32, int32, int64). extent: its shape: "scalar", "tokens"
 * [N], "loss" ([N] or a scalar), "classes" [V], "hidden" [N, D], "weight", "weight_scale", "teacher" [N, K], "teacher_hidden" [N, D_t],
 * "teacher_weight", "top" [N, K], "partial_sums" [F, N], "all_partial_sums" [R x F, N]. */
FLCE_API flce_status flce_call_arguments_json(char* buffer, size_t capacity, size_t* needed);

/* `workspace`: scratch of the caller's on the kernel's device, 256-byte aligned, at least flce_kernel_workspace_bytes(); NULL where that is
 * 0. Forward is quicker with ignored tokens where it has more than it needs (backward's amount will do).
 * `stream`: a CUstream (cudaStream_t) of the kernel's device, NULL for the legacy default stream; ignored by CPU kernels, which have
 * finished when the call returns. Everything is checked before anything is launched. */
FLCE_API flce_status flce_kernel_forward(const flce_kernel* kernel, const flce_forward_args* args, void* workspace, size_t workspace_bytes,
                                         void* stream);
/* Merges a shard's partial sums, with flce_kernel_workspace_bytes(FLCE_MERGE). */
FLCE_API flce_status flce_kernel_merge(const flce_kernel* kernel, const flce_merge_args* args, void* workspace, size_t workspace_bytes,
                                       void* stream);
/* Fields of a shard's partial sums; 0 where the spec is not a shard's. */
FLCE_API flce_status flce_kernel_partial_sum_fields(const flce_kernel* kernel, int32_t* fields);
/* May run any number of times after one forward, for all gradients or for some. */
FLCE_API flce_status flce_kernel_backward(const flce_kernel* kernel, const flce_backward_args* args, void* workspace,
                                          size_t workspace_bytes, void* stream);

/* `word`: the value that forward left in invalid_label, copied to the host. FLCE_OK if no label was out of range; else FLCE_ERROR_ARGUMENT
 * with a message naming the first row and the labels allowed. */
FLCE_API flce_status flce_kernel_check_invalid_label(const flce_kernel* kernel, uint64_t word);

/* --- Before a run: measuring plans, compiling kernels ------------------------------------------------------------------------- */

/* Functions by which a long call tells its caller of its progress, in the calling thread, and asks whether to stop. Each may be NULL. Texts
 * live until the function returns. */
typedef struct flce_job {
    size_t struct_size;
    void* user;                                     /* handed to each function */
    void (*progress)(void* user, const char* json); /* several times a second: how far the call is */
    void (*warning)(void* user, const char* text);
    int32_t (*stop)(void* user);                  /* several times a second; not 0: the call ends with the results that it has */
    void (*report)(void* user, const char* json); /* the result, once, where the call succeeds */
} flce_job;
#define FLCE_JOB_INIT {sizeof(flce_job), NULL, NULL, NULL, NULL, NULL}

/* Each takes its options as one JSON object, whose keys are the fields of flce/tune.hpp and flce/prewarm.hpp, and reports the object
 * that the command prints with --json. Specs are texts or objects, paths texts; keys that are left out take their defaults, unknown
 * ones are FLCE_ERROR_ARGUMENT. Work is done in processes of the flce command: bin/flce beside libflce's folder, or the option
 * "command". `job` may be NULL.
 *
 * flce_tune is `flce tune`: {"specs": [...], "hf_configs": [...], "num_tokens": [4096], "device": "cuda", "budget_s": 60,
 * "workspace_limit_bytes": 0, "retain": true, "plans": [...], "coordinates": [...], "exhaustive": 0, "candidate_timeout_s": 30,
 * "scratch_bytes": 67108864, "threads": 0, "cache_dir": "", "records_dir": "", "commit": "", "fresh": false, "command": ""}. */
FLCE_API flce_status flce_tune(const char* options, const flce_job* job);
/* `flce prewarm`: {"specs": [...], "hf_configs": [...], "autocast": ["bf16"], "manifests": [...], "devices": ["sm_90a"], "num_tokens":
 * [...], "workspace_limits": [0], "scratch_bytes": [...], "plan": "", "cache_dir": "", "pack": "", "jobs": 0, "command": ""}. Kernels
 * that fail are in the report. */
FLCE_API flce_status flce_prewarm_sets(const char* options, const flce_job* job);
/* `flce prewarm --check`, with the same options but "pack", "jobs" and "command": the kernel sets that a run would not find. Compiles
 * nothing. */
FLCE_API flce_status flce_missing_sets(const char* options, const flce_job* job);

#ifdef __cplusplus
}
#endif

#endif /* FLCE_FLCE_H_ */
