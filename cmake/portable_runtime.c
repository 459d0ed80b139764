// Symbols that code compiled for a newer glibc and libstdc++ asks for, in terms of glibc 2.28 and GCC 8's libstdc++; hidden in every
// library that is linked with them (FLCE_PORTABLE). A symbol of glibc that is needed and missing here is an error of the linker. A symbol
// of libstdc++ comes out of the compiler's archive, which is fine for code without a state of its own.
#define _GNU_SOURCE
#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

#pragma GCC visibility push(hidden)

// glibc 2.32: not 0 says that the process has one thread. It never says so, and reference counts are always atomic.
char __libc_single_threaded = 0;

// glibc 2.36. The system gives so few bytes whole; it makes a caller wait only while a machine starts.
uint32_t arc4random(void) {
    uint32_t value;
    while (getrandom(&value, sizeof(value), 0) != sizeof(value)) {
    }
    return value;
}

// glibc 2.33; mallinfo counts in int, and its figures are only printed.
struct mallinfo2 mallinfo2(void) {
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    const struct mallinfo counted = mallinfo();
    return (struct mallinfo2){
        .arena = (unsigned)counted.arena,
        .ordblks = (unsigned)counted.ordblks,
        .smblks = (unsigned)counted.smblks,
        .hblks = (unsigned)counted.hblks,
        .hblkhd = (unsigned)counted.hblkhd,
        .usmblks = (unsigned)counted.usmblks,
        .fsmblks = (unsigned)counted.fsmblks,
        .uordblks = (unsigned)counted.uordblks,
        .fordblks = (unsigned)counted.fordblks,
        .keepcost = (unsigned)counted.keepcost,
    };
}

// GCC 11: std::exception_ptr counts references through two new functions. The archive's would bring std::terminate and its handler with
// them, and a program sets its handler in the shared library. There, copying counts up and destroying counts down.
#pragma GCC visibility push(default)
void copy_exception_ptr(void** self, void* const* other) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_exception_ptr(void** self) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
#pragma GCC visibility pop

void add_reference(void** self) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void add_reference(void** self) {
    void* copy = NULL;
    copy_exception_ptr(&copy, self);
}

void release_reference(void** self) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void release_reference(void** self) {
    destroy_exception_ptr(self);
    *self = NULL;
}
