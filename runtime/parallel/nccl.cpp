// NCCL behind a Communicator, loaded at run time: no build needs it, and a process has one only, the framework's.
#include <fmt/format.h>

#include <memory>

#include "cache/dynamic_library.hpp"
#include "flce/parallel.hpp"
#include "runtime/environment.hpp"

namespace flce {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";

// Types and numbers of nccl.h, whose interface has kept them since version 2: ncclResult_t and the enumerations are ints, ncclComm_t and
// streams pointers.
using Result = int;
enum : int { kSuccess = 0, kInProgress = 7 };
enum : int { kSum = 0 };
enum : int { kInt8 = 0, kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9 };

class Nccl {
public:
    /// The process's. Never unloaded.
    static std::shared_ptr<const Nccl> load() {
        const std::filesystem::path given = environment().nccl;
        const std::filesystem::path file = given.empty() ? std::filesystem::path(kLibrary) : given;
        std::string why;
        const DynamicLibrary library = DynamicLibrary::open(file, &why);
        if (!library) {
            throw EnvironmentError(fmt::format("no NCCL: {} cannot be loaded ({}); FLCE_NCCL may name another", file.string(), why));
        }
        auto nccl = std::make_shared<Nccl>();
        const auto bind = [&](auto& function, const char* name) {
            if (!library.bind(function, name))
                throw EnvironmentError(fmt::format("{} is no NCCL: it has no {}", library.path().string(), name));
        };
        bind(nccl->all_gather, "ncclAllGather");
        bind(nccl->all_reduce, "ncclAllReduce");
        bind(nccl->reduce_scatter, "ncclReduceScatter");
        bind(nccl->comm_count, "ncclCommCount");
        bind(nccl->comm_rank, "ncclCommUserRank");
        bind(nccl->error_text, "ncclGetErrorString");
        return nccl;
    }

    /// A communicator that does not block says that work is in progress, which is no failure.
    void check(Result result, const char* call) const {
        if (result == kSuccess || result == kInProgress) return;
        throw DeviceError(fmt::format("{} failed: {}", call, error_text(result)), call, result);
    }

    Result (*all_gather)(const void* send, void* receive, std::size_t count, int type, void* comm, void* stream) = nullptr;
    Result (*all_reduce)(const void* send, void* receive, std::size_t count, int type, int operation, void* comm, void* stream) = nullptr;
    Result (*reduce_scatter)(const void* send, void* receive, std::size_t count, int type, int operation, void* comm,
                             void* stream) = nullptr;
    Result (*comm_count)(const void* comm, int* count) = nullptr;
    Result (*comm_rank)(const void* comm, int* rank) = nullptr;
    const char* (*error_text)(Result result) = nullptr;
};

int type_of(DType dtype) {
    switch (dtype) {
        case DType::bf16: return kBfloat16;
        case DType::fp16: return kFloat16;
        case DType::fp32: break;
    }
    return kFloat32;
}

}  // namespace

Communicator nccl_communicator(void* comm) {
    if (comm == nullptr) throw ArgumentError("nccl_communicator: comm is null");
    const std::shared_ptr<const Nccl> nccl = Nccl::load();
    Communicator made;
    nccl->check(nccl->comm_count(comm, &made.size), "ncclCommCount");
    nccl->check(nccl->comm_rank(comm, &made.rank), "ncclCommUserRank");
    made.all_gather = [nccl, comm](const void* part, void* all, std::size_t bytes, Stream stream) {
        nccl->check(nccl->all_gather(part, all, bytes, kInt8, comm, stream.handle), "ncclAllGather");
    };
    made.all_reduce = [nccl, comm](void* data, std::int64_t count, DType dtype, Stream stream) {
        const auto elements = static_cast<std::size_t>(count);
        nccl->check(nccl->all_reduce(data, data, elements, type_of(dtype), kSum, comm, stream.handle), "ncclAllReduce");
    };
    made.reduce_scatter = [nccl, comm](const void* data, void* part, std::int64_t count, DType dtype, Stream stream) {
        const auto elements = static_cast<std::size_t>(count);
        nccl->check(nccl->reduce_scatter(data, part, elements, type_of(dtype), kSum, comm, stream.handle), "ncclReduceScatter");
    };
    return made;
}

}  // namespace flce
