// flce/parallel.h: the C functions round ParallelKernel.
#include <fmt/format.h>

#include <memory>

#include "flce/parallel.h"
#include "flce/parallel.hpp"
#include "runtime/c_api_call.hpp"
#include "runtime/c_arguments.hpp"
#include "runtime/c_structs.hpp"

struct flce_parallel {
    flce::ParallelKernel kernel;
};

namespace flce {
namespace {

std::int32_t code_of(DType dtype) { return dtype == DType::bf16 ? FLCE_BF16 : dtype == DType::fp16 ? FLCE_FP16 : FLCE_FP32; }

void check_status(std::int32_t status, const char* function) {
    if (status != 0) throw DeviceError(fmt::format("{} of the communicator failed with {}", function, status), function, status);
}

Communicator communicator_of(const flce_communicator* given) {
    const flce_communicator known = versioned(given, "communicator");
    Communicator made{.rank = known.rank, .size = known.size};
    if (known.all_gather != nullptr) {
        made.all_gather = [known](const void* part, void* all, std::size_t bytes, Stream stream) {
            check_status(known.all_gather(known.user, part, all, bytes, stream.handle), "all_gather");
        };
    }
    if (known.all_reduce != nullptr) {
        made.all_reduce = [known](void* data, std::int64_t count, DType dtype, Stream stream) {
            check_status(known.all_reduce(known.user, data, count, code_of(dtype), stream.handle), "all_reduce");
        };
    }
    if (known.reduce_scatter != nullptr) {
        made.reduce_scatter = [known](const void* data, void* part, std::int64_t count, DType dtype, Stream stream) {
            check_status(known.reduce_scatter(known.user, data, part, count, code_of(dtype), stream.handle), "reduce_scatter");
        };
    }
    return made;
}

ParallelOptions options_of(const flce_parallel_options* given) {
    if (given == nullptr) return {};
    const flce_parallel_options known = versioned(given, "options");
    check_reserved(known.reserved, "options");
    return {.sequence_parallel = known.sequence_parallel != 0, .communication_stream = {known.communication_stream}};
}

const ParallelKernel& kernel_of(const flce_parallel* handle) { return not_null(handle, "parallel")->kernel; }

}  // namespace
}  // namespace flce

using namespace flce;  // NOLINT(google-build-using-namespace): the definitions below are C names

flce_status flce_parallel_create(const flce_kernel* kernel, const flce_communicator* communicator, const flce_parallel_options* options,
                                 flce_parallel** parallel) {
    return c_api_call([&] {
        *not_null(parallel, "parallel") = nullptr;
        *parallel = new flce_parallel{{shared_kernel(kernel), communicator_of(communicator), options_of(options)}};
    });
}

flce_status flce_parallel_create_nccl(const flce_kernel* kernel, void* nccl_comm, const flce_parallel_options* options,
                                      flce_parallel** parallel) {
    return c_api_call([&] {
        *not_null(parallel, "parallel") = nullptr;
        *parallel = new flce_parallel{{shared_kernel(kernel), nccl_communicator(nccl_comm), options_of(options)}};
    });
}

void flce_parallel_release(flce_parallel* parallel) { delete parallel; }

flce_status flce_parallel_workspace_bytes(const flce_parallel* parallel, int64_t num_tokens, size_t* bytes) {
    return c_api_call([&] { *not_null(bytes, "bytes") = kernel_of(parallel).workspace_bytes(num_tokens); });
}

flce_status flce_parallel_forward(const flce_parallel* parallel, const flce_forward_args* args, const flce_tensor* target_class_weight,
                                  const flce_tensor* class_weight_total, void* workspace, size_t workspace_bytes, void* stream) {
    return c_api_call([&] {
        const ParallelKernel& kernel = kernel_of(parallel);
        const ParallelForwardArgs call{.call = arguments_of(kernel.kernel(), args),
                                       .target_class_weight = tensor_of(target_class_weight, "target_class_weight"),
                                       .class_weight_total = tensor_of(class_weight_total, "class_weight_total")};
        kernel.forward(call, {workspace, workspace_bytes}, {stream});
    });
}

flce_status flce_parallel_backward(const flce_parallel* parallel, const flce_backward_args* args, void* workspace, size_t workspace_bytes,
                                   void* stream) {
    return c_api_call([&] {
        const ParallelKernel& kernel = kernel_of(parallel);
        kernel.backward(arguments_of(kernel.kernel(), args), {workspace, workspace_bytes}, {stream});
    });
}
