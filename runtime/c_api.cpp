// The C ABI: handles, structs and status codes round the C++ API. No exception leaves this file.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "flce/flce.h"
#include "flce/flce.hpp"
#include "runtime/c_api_call.hpp"
#include "runtime/c_arguments.hpp"
#include "runtime/c_structs.hpp"
#include "runtime/session.hpp"
#include "runtime/utf8.hpp"

struct flce_session {
    std::shared_ptr<flce::Session> session;
};

struct flce_kernel {
    std::shared_ptr<const flce::Kernel> kernel;
    std::atomic<std::int64_t> references{1};
};

namespace flce {
namespace {

static_assert(FLCE_ERROR_SPEC == static_cast<int>(ErrorKind::spec) && FLCE_ERROR_PLAN == static_cast<int>(ErrorKind::plan) &&
              FLCE_ERROR_ARGUMENT == static_cast<int>(ErrorKind::argument) && FLCE_ERROR_COMPILE == static_cast<int>(ErrorKind::compile) &&
              FLCE_ERROR_DEVICE == static_cast<int>(ErrorKind::device) &&
              FLCE_ERROR_ENVIRONMENT == static_cast<int>(ErrorKind::environment) &&
              FLCE_ERROR_INTERNAL == static_cast<int>(ErrorKind::internal) &&
              FLCE_ERROR_CACHE_MISS == static_cast<int>(ErrorKind::cache_miss));
static_assert(FLCE_FORWARD == static_cast<int>(Pass::forward) && FLCE_BACKWARD == static_cast<int>(Pass::backward) &&
              FLCE_FORWARD_BACKWARD == static_cast<int>(Pass::forward_backward));

struct LastError {
    std::string message;
    std::string log;
};

LastError& last_error() {
    thread_local LastError error;
    return error;
}

flce_status failed(flce_status status, const char* message, const std::string& log = {}) noexcept try {
    last_error().message = as_utf8(message);  // file names are bytes
    last_error().log = as_utf8(log);
    return status;
} catch (...) {
    last_error().message.clear();  // no memory even for the message: the status has to do
    last_error().log.clear();
    return status;
}

template <class Body>
flce_status guarded(Body&& body) noexcept {
    try {
        body();
        return FLCE_OK;
    } catch (const CompileError& error) {
        return failed(FLCE_ERROR_COMPILE, error.what(), error.log());
    } catch (const Error& error) {
        return failed(static_cast<flce_status>(error.kind()), error.what());
    } catch (const std::bad_alloc&) {
        return failed(FLCE_ERROR_ENVIRONMENT, "out of host memory");
    } catch (const std::exception& error) {
        return failed(FLCE_ERROR_INTERNAL, error.what());
    } catch (...) {
        return failed(FLCE_ERROR_INTERNAL, "unknown exception");
    }
}

void return_text(const std::string& text, char* buffer, std::size_t capacity, std::size_t* needed) {
    const std::size_t bytes = text.size() + 1;
    if (needed != nullptr) *needed = bytes;
    if (buffer == nullptr) {
        if (capacity != 0) throw ArgumentError(fmt::format("buffer is NULL with a capacity of {} bytes", capacity));
        if (needed == nullptr) throw ArgumentError("buffer and needed are both NULL");
        return;
    }
    if (capacity < bytes) throw ArgumentError(fmt::format("buffer has {} bytes; the text takes {}", capacity, bytes));
    std::memcpy(buffer, text.c_str(), bytes);
}

std::string text_or_empty(const char* text) { return text == nullptr ? std::string() : std::string(text); }

Spec spec_of(const char* text) {
    const std::string_view spec(not_null(text, "spec"));
    return spec.starts_with('{') ? parse_spec_json(spec) : parse_spec(spec);
}

KernelOptions options_of(const flce_kernel_options* given) {
    if (given == nullptr) return {};
    const flce_kernel_options options =
        versioned<flce_kernel_options, offsetof(flce_kernel_options, workspace_limit_bytes)>(given, "options");
    return {.plan = text_or_empty(options.plan),
            .scratch_bytes = options.scratch_bytes,
            .workspace_limit_bytes = options.workspace_limit_bytes,
            .num_tokens = options.num_tokens};
}

std::string explanation_text(const Explanation& explanation) {
    std::string text = fmt::format("spec: {}\nplan: {}\ndevice: {}\n", explanation.spec, explanation.plan, explanation.device);
    for (const std::string& reason : explanation.reasons) text += reason + "\n";
    return as_utf8(text);
}

std::string kernel_text(const Kernel& kernel, std::int32_t which) {
    switch (which) {
        case FLCE_TEXT_SPEC: return kernel.spec().text();
        case FLCE_TEXT_SPEC_JSON: return kernel.spec().json();
        case FLCE_TEXT_PLAN: return kernel.plan().text();
        case FLCE_TEXT_PLAN_JSON: return kernel.plan().json();
        case FLCE_TEXT_DEVICE_JSON: return kernel.device().json();
        case FLCE_TEXT_EXPLAIN: return explanation_text(kernel.explain());
        case FLCE_TEXT_EXPLAIN_JSON: {
            Explanation why = kernel.explain();
            for (std::string& reason : why.reasons) reason = as_utf8(reason);  // a reason may name a record's file
            return nlohmann::json{{"spec", why.spec}, {"plan", why.plan}, {"device", why.device}, {"reasons", why.reasons}}.dump();
        }
        default: throw ArgumentError(fmt::format("which is {}; allowed are FLCE_TEXT_SPEC (0) to FLCE_TEXT_EXPLAIN_JSON (6)", which));
    }
}

void return_device(DeviceRef ref, std::int32_t* device_type, std::int32_t* device_index) {
    *not_null(device_type, "device_type") = ref.kind == DeviceKind::cuda ? FLCE_CUDA : FLCE_CPU;
    *not_null(device_index, "device_index") = ref.index;
}

std::vector<std::filesystem::path> paths_of(const char* const* paths, std::size_t count, const char* name) {
    std::vector<std::filesystem::path> result;
    if (count > 0 && paths == nullptr) throw ArgumentError(fmt::format("options.{} is NULL and there are to be {} of them", name, count));
    for (std::size_t i = 0; i < count; ++i) {
        if (paths[i] == nullptr || *paths[i] == '\0') throw ArgumentError(fmt::format("options.{}[{}] is no path", name, i));
        result.emplace_back(paths[i]);
    }
    return result;
}

bool strictness(std::int32_t strict) {
    if (strict != 1 && strict != -1) throw ArgumentError(fmt::format("options.strict is {}; allowed are 1, -1 and 0", strict));
    return strict == 1;
}

TierStatistics tier_statistics(const Session& session, std::int32_t tier) {
    constexpr std::array kNames{"memory", "local", "packs", "remote"};
    if (tier < FLCE_TIER_MEMORY || tier > FLCE_TIER_REMOTE) {
        throw ArgumentError(fmt::format("tier is {}; allowed are memory (0), local (1), packs (2), remote (3)", tier));
    }
    TierStatistics found;
    for (TierStatistics& did : SessionAccess::tiers(session)) {
        if (did.name == kNames[static_cast<std::size_t>(tier)]) found = std::move(did);
    }
    return found;
}

Session& session_of(const flce_session* handle) { return *not_null(handle, "session")->session; }
const Kernel& kernel_of(const flce_kernel* handle) { return *not_null(handle, "kernel")->kernel; }

}  // namespace

flce_status c_api_call(const std::function<void()>& body) noexcept { return guarded(body); }

std::shared_ptr<const Kernel> shared_kernel(const flce_kernel* handle) { return not_null(handle, "kernel")->kernel; }

flce_job job_of(const flce_job* given) { return given == nullptr ? flce_job FLCE_JOB_INIT : versioned(given, "job"); }

}  // namespace flce

using namespace flce;  // NOLINT(google-build-using-namespace): the definitions below are C names

int32_t flce_abi_version(void) { return FLCE_ABI_VERSION; }
const char* flce_version(void) { return version().data(); }
int64_t flce_token_bucket(int64_t num_tokens) { return token_bucket(num_tokens); }
const char* flce_last_error(void) { return last_error().message.c_str(); }
const char* flce_last_error_log(void) { return last_error().log.c_str(); }

flce_status flce_session_create(const flce_session_options* options, flce_session** session) {
    return guarded([&] {
        *not_null(session, "session") = nullptr;
        SessionOptions wanted;
        if (options != nullptr) {
            const flce_session_options given =
                versioned<flce_session_options, offsetof(flce_session_options, workspace_limit_bytes)>(options, "options");
            check_reserved(given.reserved, "options");
            check_reserved(given.reserved_2, "options");
            wanted.device = text_or_empty(given.device);
            wanted.cache_dir = text_or_empty(given.cache_dir);
            wanted.disk_cache = given.no_disk_cache == 0;
            if (given.scratch_bytes != 0) wanted.scratch_bytes = given.scratch_bytes;
            wanted.threads = given.threads;
            wanted.workspace_limit_bytes = given.workspace_limit_bytes;
            if (given.strict != 0) wanted.strict = strictness(given.strict);
            wanted.use_records = given.no_records == 0;
            wanted.cache_packs = paths_of(given.cache_packs, given.num_cache_packs, "cache_packs");
            wanted.cache_remote = text_or_empty(given.cache_remote);
            wanted.trusted_keys = paths_of(given.trusted_keys, given.num_trusted_keys, "trusted_keys");
            wanted.records = paths_of(given.records, given.num_records, "records");
        }
        *session = new flce_session{std::make_shared<Session>(std::move(wanted))};
    });
}

flce_status flce_session_default(flce_session** session) {
    return guarded([&] {
        *not_null(session, "session") = nullptr;
        *session = new flce_session{std::shared_ptr<Session>(std::shared_ptr<void>(), &default_session())};
    });
}

void flce_session_release(flce_session* session) { delete session; }

flce_status flce_session_device_json(const flce_session* session, char* buffer, size_t capacity, size_t* needed) {
    return guarded([&] { return_text(session_of(session).device().json(), buffer, capacity, needed); });
}

flce_status flce_session_device(const flce_session* session, int32_t* device_type, int32_t* device_index) {
    return guarded([&] { return_device(SessionAccess::device_ref(session_of(session)), device_type, device_index); });
}

flce_status flce_session_cache_dir(const flce_session* session, char* buffer, size_t capacity, size_t* needed) {
    return guarded([&] { return_text(session_of(session).cache_dir().string(), buffer, capacity, needed); });
}

flce_status flce_session_statistics(const flce_session* session, flce_statistics* statistics) {
    return guarded([&] {
        const SessionStatistics now = session_of(session).statistics();
        return_struct({sizeof(flce_statistics), now.memory_hits, now.disk_hits, now.compiled, now.disk_faults}, statistics, "statistics");
    });
}

flce_status flce_session_tier_statistics(const flce_session* session, int32_t tier, flce_tier_statistics* statistics) {
    return guarded([&] {
        const TierStatistics did = tier_statistics(session_of(session), tier);
        return_struct({sizeof(flce_tier_statistics), did.hits, did.misses, did.faults, did.stored}, statistics, "statistics");
    });
}

flce_status flce_spec_text(const char* spec, char* buffer, size_t capacity, size_t* needed) {
    return guarded([&] { return_text(spec_of(spec).text(), buffer, capacity, needed); });
}

flce_status flce_spec_json(const char* spec, char* buffer, size_t capacity, size_t* needed) {
    return guarded([&] { return_text(spec_of(spec).json(), buffer, capacity, needed); });
}

flce_status flce_hf_config_spec(const char* config_json, char* buffer, size_t capacity, size_t* needed) {
    return guarded([&] { return_text(spec_from_hf_config(not_null(config_json, "config_json")).text(), buffer, capacity, needed); });
}

flce_status flce_get_kernel(flce_session* session, const char* spec, const flce_kernel_options* options, flce_kernel** kernel) {
    return guarded([&] {
        *not_null(kernel, "kernel") = nullptr;
        Session& owner = session_of(session);
        auto handle = std::make_unique<flce_kernel>();
        handle->kernel = owner.get_kernel(spec_of(spec), options_of(options));
        *kernel = handle.release();
    });
}

void flce_kernel_retain(flce_kernel* kernel) {
    if (kernel != nullptr) kernel->references.fetch_add(1, std::memory_order_relaxed);
}

void flce_kernel_release(flce_kernel* kernel) {
    if (kernel != nullptr && kernel->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete kernel;
}

flce_status flce_prewarm(flce_session* session, const char* spec, const char* device, const flce_kernel_options* options,
                         flce_prewarm_result* result) {
    return guarded([&] {
        Session& owner = session_of(session);
        const PrewarmResult done = owner.prewarm(spec_of(spec), resolve_device(not_null(device, "device")), options_of(options));
        if (result != nullptr) return_struct({sizeof(flce_prewarm_result), done.compiled, done.hits}, result, "result");
    });
}

flce_status flce_kernel_workspace_bytes(const flce_kernel* kernel, int64_t num_tokens, int32_t pass, size_t* bytes) {
    return guarded([&] {
        if (pass < FLCE_FORWARD || pass > FLCE_MERGE) {
            throw ArgumentError(fmt::format("pass is {}; allowed are forward (0), backward (1), forward_backward (2), merge (3)", pass));
        }
        *not_null(bytes, "bytes") = kernel_of(kernel).workspace_bytes(num_tokens, static_cast<Pass>(pass));
    });
}

flce_status flce_kernel_retained_bytes(const flce_kernel* kernel, int64_t num_tokens, int32_t place, size_t* bytes) {
    return guarded([&] { *not_null(bytes, "bytes") = kernel_of(kernel).retained_bytes(num_tokens, retained_place_of(place, "place")); });
}

flce_status flce_kernel_choose_retained(const flce_kernel* kernel, int64_t num_tokens, const flce_retain_options* options, int32_t* place,
                                        size_t* bytes) {
    return guarded([&] {
        RetainOptions wanted;
        if (options != nullptr) {
            const auto given = versioned<flce_retain_options, offsetof(flce_retain_options, vocab_columns)>(options, "options");
            check_reserved(given.reserved, "options");
            if (const std::int32_t in = given.retain_in_grad_weight; in < -1 || in > 1) {
                throw ArgumentError(fmt::format("options.retain_in_grad_weight is {}; allowed are 0 and 1 (yes) and -1 (no)", in));
            }
            wanted = {.workspace_limit_bytes = given.workspace_limit_bytes,
                      .retain_in_grad_weight = given.retain_in_grad_weight >= 0,
                      .vocab_columns = given.vocab_columns,
                      .least_work = given.least_work};
        }
        (void)not_null(bytes, "bytes");
        const Retained chosen = kernel_of(kernel).choose_retained(num_tokens, wanted);
        *not_null(place, "place") = static_cast<std::int32_t>(chosen.place);
        *bytes = chosen.bytes;
    });
}

flce_status flce_kernel_reads_hidden_late(const flce_kernel* kernel, int64_t num_tokens, int32_t retained_place, size_t retained_bytes,
                                          int64_t vocab_columns, int32_t* late) {
    return guarded([&] {
        const Retained retained{.bytes = retained_bytes, .place = retained_place_of(retained_place, "retained_place")};
        *not_null(late, "late") = kernel_of(kernel).reads_hidden_late(num_tokens, retained, vocab_columns) ? 1 : 0;
    });
}

flce_status flce_kernel_text(const flce_kernel* kernel, int32_t which, char* buffer, size_t capacity, size_t* needed) {
    return guarded([&] { return_text(kernel_text(kernel_of(kernel), which), buffer, capacity, needed); });
}

flce_status flce_kernel_device(const flce_kernel* kernel, int32_t* device_type, int32_t* device_index) {
    return guarded([&] { return_device(kernel_of(kernel).device_ref(), device_type, device_index); });
}

flce_status flce_plan_digest(const flce_kernel* const* kernels, size_t count, char* buffer, size_t capacity, size_t* needed) {
    return guarded([&] {
        if (count > 0) (void)not_null(kernels, "kernels");
        std::vector<std::shared_ptr<const Kernel>> all;
        for (size_t i = 0; i < count; ++i) all.push_back(not_null(kernels[i], "kernels[i]")->kernel);
        return_text(plan_digest(all), buffer, capacity, needed);
    });
}

flce_status flce_kernel_forward(const flce_kernel* kernel, const flce_forward_args* args, void* workspace, size_t workspace_bytes,
                                void* stream) {
    return guarded([&] {
        const Kernel& target = kernel_of(kernel);
        target.forward(arguments_of(target, args), {workspace, workspace_bytes}, {stream});
    });
}

flce_status flce_kernel_backward(const flce_kernel* kernel, const flce_backward_args* args, void* workspace, size_t workspace_bytes,
                                 void* stream) {
    return guarded([&] {
        const Kernel& target = kernel_of(kernel);
        target.backward(arguments_of(target, args), {workspace, workspace_bytes}, {stream});
    });
}

flce_status flce_kernel_merge(const flce_kernel* kernel, const flce_merge_args* args, void* workspace, size_t workspace_bytes,
                              void* stream) {
    return guarded([&] { kernel_of(kernel).merge(arguments_of(args), {workspace, workspace_bytes}, {stream}); });
}

flce_status flce_kernel_partial_sum_fields(const flce_kernel* kernel, int32_t* fields) {
    return guarded([&] { *not_null(fields, "fields") = kernel_of(kernel).partial_sum_fields(); });
}

flce_status flce_call_arguments_json(char* buffer, size_t capacity, size_t* needed) {
    return guarded([&] { return_text(call_arguments_json(), buffer, capacity, needed); });
}

flce_status flce_kernel_check_invalid_label(const flce_kernel* kernel, uint64_t word) {
    return guarded([&] {
        const Spec& spec = kernel_of(kernel).spec();
        if (word == UINT64_MAX) return;
        if (has_teacher_head(spec)) {
            throw ArgumentError(fmt::format("temperature[{}] is not between 2^-100 and 2^100 (and it may not be the only such row)", word));
        }
        const std::int64_t last = whole_vocab_size(spec) - 1;
        if (!spec.temperature && spec.teacher_top_k == 0) {
            throw ArgumentError(fmt::format(
                "target[{}] is neither ignore_index nor a label; labels are 0 to {} (and it may not be the only row out of range)", word,
                last));
        }
        std::string faults = fmt::format("target[{}] is neither ignore_index nor a label, which are 0 to {}", word, last);
        if (spec.temperature) faults += fmt::format(", or temperature[{}] is not between 2^-100 and 2^100", word);
        if (spec.teacher_top_k > 0) faults += fmt::format(", or teacher_ids[{}] holds a number that is neither -1 nor a label", word);
        throw ArgumentError(faults + " (and it may not be the only such row)");
    });
}
