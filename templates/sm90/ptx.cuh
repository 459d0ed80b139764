// PTX of sm_90 and sm_90a as functions of the instructions' names: mbarriers, the tensor copy engine, clusters, register reallocation.
// wgmma is in ptx_wgmma.cuh. Section numbers are those of the PTX ISA manual, 8.8.
#pragma once

#include "flce/common/ptx.cuh"

namespace flce::ptx {

// ---- 9.7.13.15 mbarrier, in shared memory. `parity` is that of the phase waited for: a fresh barrier has completed "phase −1", parity
// 1.
__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
/// For `arrivals` threads.
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Arrives when this thread's cp.async so far have.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Arrives at the barrier that lies at the same offset in block `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier, unsigned rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
// 9.7.9.12: writes to what lies at the same offset in block `rank` of the cluster; the barrier there counts the 4 bytes.
__device__ __forceinline__ void st_async_b32(unsigned address, unsigned value, unsigned barrier, unsigned rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote, done;\n"
        "mapa.shared::cluster.u32 remote, %0, %3;\n"
        "mapa.shared::cluster.u32 done, %2, %3;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [remote], %1, [done];\n"
        "}\n" ::"r"(address),
        "r"(value), "r"(barrier), "r"(rank)
        : "memory");
}
__device__ __forceinline__ void mbarrier_wait_parity(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- 9.7.9.27 tensor copies, two dimensions; x counts elements of the contiguous one. `map` is a CUtensorMap among the kernel's
// parameters.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load(unsigned destination, const void* map, int x, int y, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}
/// Copies into every block of the cluster named by `blocks`, a bit each, and with the barrier at the same offset there.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load_multicast(unsigned destination, const void* map, int x, int y,
                                                                       unsigned barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], "
        "%5;\n" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
        : "memory");
}
/// Copies into this block; L2 keeps the data that is read as `policy` says.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load(unsigned destination, const void* map, int x, int y, unsigned barrier,
                                                             unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], "
        "%5;\n" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
        : "memory");
}
// 9.7.9.18: L2 gives up data that is read with this policy first.
__device__ __forceinline__ unsigned long long createpolicy_evict_first() {
    unsigned long long r;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(r));
    return r;
}
__device__ __forceinline__ void cp_async_bulk_tensor_2d_store(const void* map, int x, int y, unsigned source) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n" ::"l"(map), "r"(x), "r"(y), "r"(source)
                 : "memory");
}
// Tensor copies in three dimensions.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(unsigned destination, const void* map, int x, int y, int z, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];\n" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load_multicast(unsigned destination, const void* map, int x, int y, int z,
                                                                       unsigned barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], "
        "%6;\n" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)
        : "memory");
}
__device__ __forceinline__ void cp_async_bulk_tensor_3d_store(const void* map, int x, int y, int z, unsigned source) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n" ::"l"(map), "r"(x), "r"(y), "r"(z),
                 "r"(source)
                 : "memory");
}
/// Adds to the memory's contents. The order of several additions to an element is not defined; the bits are, where there is one.
__device__ __forceinline__ void cp_reduce_async_bulk_tensor_2d_add(const void* map, int x, int y, unsigned source) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];\n" ::"l"(map), "r"(x), "r"(y),
                 "r"(source)
                 : "memory");
}
__device__ __forceinline__ void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
/// Until at most kPending of this thread's groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void prefetch_tensormap(const void* map) { asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory"); }
/// Orders this thread's ordinary accesses and the copy engine's, in all memory.
__device__ __forceinline__ void fence_proxy_async_all() { asm volatile("fence.proxy.async;\n" ::: "memory"); }
/// Makes this thread's ordinary writes to shared memory visible to the copy engine and to wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// ---- 9.7.13 clusters and named barriers
__device__ __forceinline__ unsigned cluster_ctarank() {
    unsigned r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(r));
    return r;
}
__device__ __forceinline__ void barrier_cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
    asm volatile("barrier.cta.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- 9.7.13.1 and 9.7.9.8: counters in global memory that order what other blocks do
__device__ __forceinline__ void red_relaxed_gpu_add(unsigned* counter, unsigned value) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;\n" ::"l"(counter), "r"(value));
}
/// Returns the word's old value; writes `value` if the old value was `expected`.
__device__ __forceinline__ unsigned atom_relaxed_gpu_cas(unsigned* word, unsigned expected, unsigned value) {
    unsigned r;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;\n" : "=r"(r) : "l"(word), "r"(expected), "r"(value));
    return r;
}
__device__ __forceinline__ unsigned atom_release_gpu_add(unsigned* counter, unsigned value) {
    unsigned r;
    asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;\n" : "=r"(r) : "l"(counter), "r"(value) : "memory");
    return r;
}
__device__ __forceinline__ unsigned ld_relaxed_gpu(const unsigned* counter) {
    unsigned r;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];\n" : "=r"(r) : "l"(counter));
    return r;
}

// ---- 9.7.20.5 setmaxnreg: every warp of a warpgroup
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

__device__ __forceinline__ void st_shared_v2_f32(unsigned address, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(address), "f"(first), "f"(second) : "memory");
}

}  // namespace flce::ptx
