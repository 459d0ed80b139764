// Checks of an object file before anything is made of it.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace flce {

/// Why `bytes` are not one whole 64-bit little-endian ELF file: empty, another format, cut off, tables that point outside it; empty: they
/// are.
[[nodiscard]] std::string elf_fault(std::span<const std::byte> bytes);

/// Why `object` cannot be linked on a machine of `triple`, or lacks one of `symbols`, as far as shows without linking it; empty: it can.
[[nodiscard]] std::string host_object_fault(std::span<const std::byte> object, const std::string& triple,
                                            std::span<const char* const> symbols);

}  // namespace flce
