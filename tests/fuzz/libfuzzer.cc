// A fuzzer of the reader FLCE_FUZZ_READER. `fuzz_NAME --seeds DIRECTORY` writes the inputs that are made rather than kept.
#include <cstdio>
#include <fstream>
#include <string_view>

#include "tests/fuzz/readers.hpp"

namespace {

const flce::fuzz::Reader& reader() {
    for (const auto& candidate : flce::fuzz::readers()) {
        if (std::string_view(candidate.name) == FLCE_FUZZ_READER) return candidate;
    }
    std::abort();
}

}  // namespace

/// Most inputs end in an exception, at each of which AddressSanitizer goes through its stack for returned frames: a small one (2^16 bytes)
/// is three to five times as quick as the default. Less quarantine stays in the caches.
extern "C" const char* __asan_default_options() { return "max_uar_stack_size_log=16:quarantine_size_mb=16"; }

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
    if (*argc != 3 || std::string_view((*argv)[1]) != "--seeds") return 0;
    int number = 0;
    for (const std::string& seed : reader().seeds()) {
        std::ofstream((*argv)[2] + std::string("/seed-") + std::to_string(number++), std::ios::binary) << seed;
    }
    std::exit(0);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const auto read = reader().read;
    read({reinterpret_cast<const char*>(data), size});
    return 0;
}
