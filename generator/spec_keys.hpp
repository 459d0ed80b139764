// The keys of a Spec's text and JSON form, in one table: both parsers and both printers go through here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flce/spec.hpp"

namespace flce {

enum class SpecKeyKind : std::uint8_t { integer, real, flag, word, words };

/// One key with its value as text ("true" for a flag, names joined by '+' for words).
struct SpecEntry {
    std::string_view key;
    SpecKeyKind kind;
    std::string value;
};

/// Entries that the canonical forms print, in their order: D, V and dtype always, other keys where they differ from their default.
[[nodiscard]] std::vector<SpecEntry> spec_entries(const Spec& spec);

/// bf16, fp16, fp32 and torch's words for them ("bfloat16", "torch.float16", "half", …).
[[nodiscard]] std::optional<DType> parse_dtype(std::string_view name);

/// Kind of `key`. Throws SpecError listing the keys if there is none of that name.
[[nodiscard]] SpecKeyKind spec_key_kind(std::string_view key);

/// Value that a key has where it stands alone: "true" of a flag, "int8" of fp8; empty for a key that may not stand alone. Throws SpecError
/// as spec_key_kind does.
[[nodiscard]] std::string_view bare_value(std::string_view key);

/// Collects keys in any order, D also as hidden_size and V as vocab_size, then fills in the defaults that depend on other keys.
class SpecBuilder {
public:
    /// Throws SpecError for an unknown or repeated key and for a value that cannot be read.
    void set(std::string_view key, std::string_view value);
    /// The normalized Spec. Throws SpecError for a missing key and for whatever Spec::normalized refuses.
    [[nodiscard]] Spec finish();

private:
    [[nodiscard]] bool given(std::string_view key) const;

    Spec spec_;
    std::vector<std::string> given_;
};

}  // namespace flce
