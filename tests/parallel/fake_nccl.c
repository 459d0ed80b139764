/* Stands in for NCCL where there is none: one rank, host memory. The communicator is a struct that says how calls end and counts them. */
#include <string.h>

struct fake_comm {
    int result;
    int calls;
    int type;
    int operation;
    size_t count;
};

__attribute__((visibility("default"))) int ncclAllGather(const void* from, void* to, size_t count, int type, struct fake_comm* comm,
                                                         void* stream) {
    (void)stream;
    comm->calls++, comm->type = type, comm->count = count;
    memcpy(to, from, count);
    return comm->result;
}

__attribute__((visibility("default"))) int ncclAllReduce(const void* from, void* to, size_t count, int type, int operation,
                                                         struct fake_comm* comm, void* stream) {
    (void)stream, (void)from, (void)to;
    comm->calls++, comm->type = type, comm->count = count, comm->operation = operation;
    return comm->result;
}

__attribute__((visibility("default"))) int ncclReduceScatter(const void* from, void* to, size_t count, int type, int operation,
                                                             struct fake_comm* comm, void* stream) {
    (void)stream;
    comm->calls++, comm->type = type, comm->count = count, comm->operation = operation;
    memcpy(to, from, count * (type == 7 ? 4 : 2));
    return comm->result;
}

__attribute__((visibility("default"))) int ncclCommCount(const struct fake_comm* comm, int* count) {
    *count = 1;
    return comm->result == 3 ? 3 : 0;
}

__attribute__((visibility("default"))) int ncclCommUserRank(const struct fake_comm* comm, int* rank) {
    (void)comm;
    *rank = 0;
    return 0;
}

__attribute__((visibility("default"))) const char* ncclGetErrorString(int result) { return result == 2 ? "unhandled system error" : "?"; }
