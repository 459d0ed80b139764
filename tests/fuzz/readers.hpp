// The readers of files that others may have written, as functions of bytes: libFuzzer calls them with its inputs (tests/fuzz/libfuzzer.cc),
// a test of the normal build with the corpus and variations of it. Each aborts where a reader breaks its word: a text that it accepts it
// must print and read again to an equal value.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flce::fuzz {

struct Reader {
    const char* name;
    void (*read)(std::string_view input);
    /// Inputs that are made rather than kept: binary ones.
    std::vector<std::string> (*seeds)();
};

/// entry, pack, record, spec, hf_config, plan, safetensors.
[[nodiscard]] std::span<const Reader> readers();

}  // namespace flce::fuzz
