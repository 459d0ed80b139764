#include "runtime/host/object_file.hpp"

#include <fmt/format.h>
#include <llvm/BinaryFormat/ELF.h>
#include <llvm/Object/ELF.h>
#include <llvm/Object/ObjectFile.h>
#include <llvm/Support/MemoryBufferRef.h>
#include <llvm/TargetParser/Triple.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string_view>

namespace flce {
namespace {

using ElfFile = llvm::object::ELFFile<llvm::object::ELF64LE>;

std::string elf_message(llvm::Error error) { return llvm::toString(std::move(error)); }

}  // namespace

std::string elf_fault(std::span<const std::byte> bytes) {
    if (bytes.empty()) return "it is empty";
    const llvm::StringRef text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (!text.starts_with(llvm::StringRef(llvm::ELF::ElfMagic, 4))) return "it is not an ELF file";
    if (bytes.size() < sizeof(ElfFile::Elf_Ehdr)) return fmt::format("it is cut off after {} bytes, in its header", bytes.size());
    const auto identity = [&](int at) { return static_cast<unsigned char>(text[static_cast<std::size_t>(at)]); };
    if (identity(llvm::ELF::EI_CLASS) != llvm::ELF::ELFCLASS64 || identity(llvm::ELF::EI_DATA) != llvm::ELF::ELFDATA2LSB) {
        return "it is not a 64-bit little-endian ELF file";
    }
    auto file = ElfFile::create(text);
    if (!file) return elf_message(file.takeError());
    auto sections = file->sections();
    if (!sections) return elf_message(sections.takeError());
    if (sections->empty()) return "it has no sections";
    for (const auto& section : *sections) {
        if (section.sh_type == llvm::ELF::SHT_NOBITS) continue;
        if (auto contents = file->getSectionContents(section); !contents) return elf_message(contents.takeError());
    }
    auto segments = file->program_headers();
    if (!segments) return elf_message(segments.takeError());
    for (const auto& segment : *segments) {
        const std::uint64_t offset = segment.p_offset;
        const std::uint64_t size = segment.p_filesz;
        if (offset > bytes.size() || size > bytes.size() - offset) {
            return fmt::format("it is cut off: a segment of {} bytes begins at {} of {}", size, offset, bytes.size());
        }
    }
    return {};
}

std::string host_object_fault(std::span<const std::byte> object, const std::string& triple, std::span<const char* const> symbols) {
    if (std::string fault = elf_fault(object); !fault.empty()) return fault;
    const llvm::StringRef bytes(reinterpret_cast<const char*>(object.data()), object.size());
    auto file = llvm::object::ObjectFile::createObjectFile(llvm::MemoryBufferRef(bytes, "object"));
    if (!file) return elf_message(file.takeError());
    const auto arch = (*file)->makeTriple().getArch();
    const auto wanted = llvm::Triple(triple).getArch();
    if (arch != wanted) {
        return fmt::format("it is for {}, not {}", llvm::Triple::getArchTypeName(arch).str(), llvm::Triple::getArchTypeName(wanted).str());
    }
    if (!(*file)->isRelocatableObject()) return "it is not a relocatable object";
    std::set<std::string, std::less<>> defined;
    for (const llvm::object::SymbolRef& symbol : (*file)->symbols()) {
        auto flags = symbol.getFlags();
        if (!flags) return elf_message(flags.takeError());
        auto name = symbol.getName();
        if (!name) return elf_message(name.takeError());
        if ((*flags & llvm::object::BasicSymbolRef::SF_Undefined) == 0) defined.insert(name->str());
    }
    for (const char* symbol : symbols) {
        if (!defined.contains(std::string_view(symbol))) return fmt::format("it lacks the symbol '{}'", symbol);
    }
    return {};
}

}  // namespace flce
