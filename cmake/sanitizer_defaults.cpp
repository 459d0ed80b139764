// Run-time options of the sanitizers, linked into every executable of a sanitizer build; the environment variables still override them.
// The hooks' names are the sanitizers' own.

extern "C" {

const char* __asan_default_options();   // NOLINT(bugprone-reserved-identifier)
const char* __asan_default_options() {  // NOLINT(bugprone-reserved-identifier)
    // detect_container_overflow: LLVM is not instrumented, so a std::vector that crosses into it has annotations only one side maintains.
    // protect_shadow_gap: the CUDA driver maps memory there.
    // detect_odr_violation=1: LLVM's and our copy of an inline variable are the same size and meant to merge.
    return "detect_container_overflow=0:protect_shadow_gap=0:detect_odr_violation=1:detect_stack_use_after_return=1:strict_string_checks=1";
}

const char* __ubsan_default_options();   // NOLINT(bugprone-reserved-identifier)
const char* __ubsan_default_options() {  // NOLINT(bugprone-reserved-identifier)
    return "print_stacktrace=1:halt_on_error=1";
}

const char* __tsan_default_options();   // NOLINT(bugprone-reserved-identifier)
const char* __tsan_default_options() {  // NOLINT(bugprone-reserved-identifier)
    // oneTBB and LLVM are not instrumented: their own synchronisation is invisible, and reports from within them say nothing.
    return "ignore_noninstrumented_modules=1:second_deadlock_stack=1";
}
}
