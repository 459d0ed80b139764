// PTX instructions as functions of the same name (dots as underscores). Section numbers are those of the PTX ISA manual, 8.8.
#pragma once

namespace flce::ptx {

/// Address of a shared-memory object in the .shared window.
__device__ __forceinline__ unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

/// 9.7.9.25.3 cp.async: copies `bytes` (0..16) and fills the rest of the 16 with zeros; reads nothing when bytes is 0.
__device__ __forceinline__ void cp_async_cg_16(unsigned destination, const void* source, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}
/// cp_async_cg_16 with ignore-src: 16 bytes, or zeros without a read.
__device__ __forceinline__ void cp_async_cg_16_if(bool exists, unsigned destination, const void* source) {
    asm volatile(
        "{\n"
        ".reg .pred absent;\n"
        "setp.eq.s32 absent, %2, 0;\n"
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, absent;\n"
        "}\n" ::"r"(destination),
        "l"(source), "r"(static_cast<int>(exists))
        : "memory");
}
/// Copies `bytes` (0..8) through L1 and fills the rest of the 8 with zeros; reads nothing when bytes is 0.
__device__ __forceinline__ void cp_async_ca_8(unsigned destination, const void* source, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}
/// Waits for this thread's copies.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }
/// cp.async of 4 bytes.
__device__ __forceinline__ void cp_async_ca_4(unsigned destination, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(destination), "l"(source) : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

/// 9.7.15.5.15 ldmatrix: four 8×8 matrices of 16-bit elements, or rows of 16 bytes taken as four 32-bit words.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ unsigned ld_shared_b32(unsigned address) {
    unsigned r;
    asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(r) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ unsigned long long ld_shared_b64(unsigned address) {
    unsigned long long r;
    asm volatile("ld.shared.b64 %0, [%1];\n" : "=l"(r) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ void st_shared_b32(unsigned address, unsigned value) {
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void st_shared_b8(unsigned address, unsigned value) {
    asm volatile("st.shared.b8 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void ld_shared_v4(unsigned (&r)[4], unsigned address) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void st_shared_v4(unsigned address, const unsigned (&r)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
/// `absent` where the number is not there.
__device__ __forceinline__ int ld_global(const int* address, bool there, int absent) {
    int r = absent;
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.s32 %0, [%1];\n}\n"
                 : "+r"(r)
                 : "l"(address), "r"(static_cast<int>(there))
                 : "memory");
    return r;
}
__device__ __forceinline__ float ld_global(const float* address, bool there, float absent) {
    float r = absent;
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.f32 %0, [%1];\n}\n"
                 : "+f"(r)
                 : "l"(address), "r"(static_cast<int>(there))
                 : "memory");
    return r;
}
__device__ __forceinline__ void ld_global_v4(unsigned (&r)[4], const void* address) {
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(address) : "memory");
}
/// atomicCAS in shared memory, of which NVRTC 13 makes a variable in every module.
__device__ __forceinline__ unsigned atom_shared_cas(unsigned* address, unsigned expected, unsigned value) {
    unsigned before;
    asm volatile("atom.shared.cas.b32 %0, [%1], %2, %3;\n"
                 : "=r"(before)
                 : "r"(shared_address(address)), "r"(expected), "r"(value)
                 : "memory");
    return before;
}
/// Stores without a branch, for where many of a thread's values may be stored, and few are.
__device__ __forceinline__ void st_global_v2_if(bool stores, void* address, unsigned first, unsigned second) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.v2.b32 [%1], {%2, %3};\n}\n" ::"r"(static_cast<int>(stores)),
                 "l"(address), "r"(first), "r"(second)
                 : "memory");
}
/// count + 1 where value is above limit.
__device__ __forceinline__ void count_if_above(int& count, float value, float limit) {
    asm volatile("{\n.reg .pred p;\nsetp.gt.f32 p, %1, %2;\n@p add.s32 %0, %0, 1;\n}\n" : "+r"(count) : "f"(value), "f"(limit));
}
/// bits | bit where value is not below limit.
__device__ __forceinline__ void or_if_reaches(unsigned& bits, float value, float limit, unsigned bit) {
    asm("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p or.b32 %0, %0, %3;\n}\n" : "+r"(bits) : "f"(value), "f"(limit), "r"(bit));
}
/// 9.7.3.12 max.NaN: NaN where one of them is.
__device__ __forceinline__ float max_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
/// Stores value and `beside` where value is above limit, and goes on to the next place. A carry to the address's upper half is lost, so
/// places that follow each other lie within a block that is aligned to its size.
__device__ __forceinline__ void put_global_v2_if_above(unsigned long long& address, float value, float limit, int beside) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b32 low, high;\nsetp.gt.f32 p, %1, %2;\n@p st.global.v2.b32 [%0], {%1, %3};\n"
        "mov.b64 {low, high}, %0;\n@p add.u32 low, low, 8;\nmov.b64 %0, {low, high};\n}\n"
        : "+l"(address)
        : "f"(value), "f"(limit), "r"(beside)
        : "memory");
}
__device__ __forceinline__ void st_global_v4(void* address, const unsigned (&r)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

/// Two products of fp16 numbers.
__device__ __forceinline__ unsigned mul_f16x2(unsigned a, unsigned b) {
    unsigned r;
    asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

/// 9.7.15.5.14 mma: c += a · b, fp32 accumulation.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// 9.7.9.21 cvt: `high` lands in the upper half.
__device__ __forceinline__ unsigned cvt_rn_bf16x2_f32(float high, float low) {
    unsigned r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ unsigned cvt_rn_f16x2_f32(float high, float low) {
    unsigned r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float cvt_f32_f16(unsigned short bits) {
    float r;
    asm("cvt.f32.f16 %0, %1;\n" : "=f"(r) : "h"(bits));
    return r;
}
__device__ __forceinline__ unsigned cvt_rna_tf32_f32(float value) {
    unsigned r;
    asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(value));
    return r;
}

/// 9.7.3.11 min and 9.7.3.12 max with .NaN: a number within ±most, NaN where it is that (fminf and fmaxf drop it).
__device__ __forceinline__ float clamp_nan(float value, float most) {
    float r;
    asm("{\n"
        ".reg .f32 above;\n"
        "max.NaN.f32 above, %1, %2;\n"
        "min.NaN.f32 %0, above, %3;\n"
        "}\n"
        : "=f"(r)
        : "f"(value), "f"(-most), "f"(most));
    return r;
}

/// 9.7.3.21 ex2: 2^value, relative error about 2^-22; subnormal results are kept out by .ftz.
__device__ __forceinline__ float ex2_approx_ftz(float value) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(value));
    return r;
}

/// 9.7.3.20 lg2: log₂ value, to 2^-22 between 0.5 and 2.
__device__ __forceinline__ float lg2_approx_ftz(float value) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(value));
    return r;
}

/// 9.7.3.13 rcp: 1/value, to one unit in the last place; subnormal results are kept out by .ftz.
__device__ __forceinline__ float rcp_approx_ftz(float value) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(value));
    return r;
}

/// 9.7.13.1 and 9.7.9.8: counters in global memory that order what other blocks do.
__device__ __forceinline__ void red_release_gpu_add(unsigned* counter, unsigned value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(counter), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned atom_relaxed_gpu_add(unsigned* counter, unsigned value) {
    unsigned r;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;\n" : "=r"(r) : "l"(counter), "r"(value));
    return r;
}
__device__ __forceinline__ unsigned ld_acquire_gpu(const unsigned* counter) {
    unsigned r;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(r) : "l"(counter) : "memory");
    return r;
}

/// 9.7.9.16 prefetch: the line that `address` is in comes to L2.
__device__ __forceinline__ void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address)); }

/// 9.7.19.6 nanosleep: the thread waits for up to twice the time.
__device__ __forceinline__ void nanosleep(unsigned nanoseconds) { asm volatile("nanosleep.u32 %0;\n" ::"r"(nanoseconds)); }

/// 9.7.13.13 griddepcontrol: the kernel behind this one in the stream may be brought onto free SMs; what the one before wrote is there
/// after the wait.
__device__ __forceinline__ void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }

}  // namespace flce::ptx
