#include "runtime/cuda/cubin.hpp"

#include <fmt/format.h>
#include <llvm/BinaryFormat/ELF.h>
#include <llvm/Object/ELFObjectFile.h>
#include <llvm/Support/Endian.h>
#include <llvm/Support/MemoryBufferRef.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "runtime/host/object_file.hpp"

namespace flce {
namespace {

using CubinFile = llvm::object::ELFObjectFile<llvm::object::ELF64LE>;

// CUDA 13 writes ABI version 8, with the architecture in the second byte of e_flags; before, it was the first.
constexpr unsigned kAbiVersionCuda13 = 8;

int sm_of(const CubinFile& file) {
    const auto& header = file.getELFFile().getHeader();
    const unsigned flags = header.e_flags;
    return static_cast<int>((header.e_ident[llvm::ELF::EI_ABIVERSION] >= kAbiVersionCuda13 ? flags >> 8 : flags) & 0xffU);
}

/// Size of the one parameter from .nv.info.<kernel>: a sequence of (format u8, attribute u8, value u16), followed by value bytes where the
/// format is 4. The size of the parameter space, less what lies before a parameter that is aligned to more than the space is.
std::optional<std::uint32_t> param_bytes_of(llvm::StringRef info) {
    constexpr std::uint8_t kFormatSized = 4;
    constexpr std::uint8_t kAttributeParam = 0x17;  // index u32, ordinal u16, offset u16, …
    constexpr std::uint8_t kAttributeParamSize = 0x19;
    std::optional<std::uint32_t> size;
    std::uint32_t first = std::numeric_limits<std::uint32_t>::max();
    while (info.size() >= 4) {
        const auto format = static_cast<std::uint8_t>(info[0]);
        const auto attribute = static_cast<std::uint8_t>(info[1]);
        const std::uint16_t value = llvm::support::endian::read16le(info.data() + 2);
        if (attribute == kAttributeParamSize && format != kFormatSized) size = value;
        if (attribute == kAttributeParam && format == kFormatSized && value >= 8 && info.size() >= 12) {
            first = std::min<std::uint32_t>(first, llvm::support::endian::read16le(info.data() + 4 + 6));
        }
        info = info.drop_front(std::min<std::size_t>(info.size(), 4 + (format == kFormatSized ? value : 0)));
    }
    if (size && first <= *size) return *size - first;
    return size;
}

/// The value, or a default where LLVM found the file malformed.
template <typename T>
T value_or(llvm::Expected<T> value, T otherwise) {
    if (value) return std::move(*value);
    llvm::consumeError(value.takeError());
    return otherwise;
}

std::vector<CubinKernel> kernels_of(const CubinFile& file) {
    constexpr llvm::StringRef kText = ".text.";
    constexpr llvm::StringRef kInfo = ".nv.info.";
    std::vector<CubinKernel> kernels;
    for (const auto& symbol : file.symbols()) {
        const std::string name = value_or(symbol.getName(), llvm::StringRef()).str();
        const bool defined = (value_or<std::uint32_t>(symbol.getFlags(), 0) & llvm::object::BasicSymbolRef::SF_Undefined) == 0;
        const bool function = llvm::object::ELFSymbolRef(symbol).getELFType() == llvm::ELF::STT_FUNC;
        const auto section = value_or(symbol.getSection(), file.section_end());
        // A device function that was not inlined has a symbol too, but shares its kernel's section or has one without a kernel's info.
        if (!defined || !function || section == file.section_end()) continue;
        if (value_or(section->getName(), llvm::StringRef()) == kText.str() + name) kernels.push_back({name, std::nullopt});
    }
    for (const auto& section : file.sections()) {
        llvm::StringRef name = value_or(section.getName(), llvm::StringRef());
        if (!name.consume_front(kInfo)) continue;
        const auto kernel = std::find_if(kernels.begin(), kernels.end(), [&](const CubinKernel& k) { return name == k.name; });
        if (kernel != kernels.end()) kernel->param_bytes = param_bytes_of(value_or(section.getContents(), llvm::StringRef()));
    }
    return kernels;
}

/// "sm_90a" → 90; 0 when there is no number.
int sm_number(std::string_view arch) {
    const std::size_t digit = arch.find_first_of("0123456789");
    int number = 0;
    if (digit != std::string_view::npos) std::from_chars(arch.data() + digit, arch.data() + arch.size(), number);
    return number;
}

/// The number before `what` in `line` ("…, 24 bytes stack frame, …"); 0 when it is not there.
std::int64_t number_before(std::string_view line, std::string_view what) {
    const std::size_t end = line.find(what);
    if (end == std::string_view::npos) return 0;
    const std::size_t last = line.find_last_of("0123456789", end);
    if (last == std::string_view::npos) return 0;
    std::size_t first = line.find_last_not_of("0123456789", last);
    first = first == std::string_view::npos ? 0 : first + 1;
    std::int64_t number = 0;
    std::from_chars(line.data() + first, line.data() + last + 1, number);
    return number;
}

}  // namespace

std::optional<CubinContents> read_cubin(std::span<const std::byte> cubin, std::string* why) {
    const auto fail = [why](std::string message) -> std::optional<CubinContents> {
        if (why != nullptr) *why = std::move(message);
        return std::nullopt;
    };
    if (std::string fault = elf_fault(cubin); !fault.empty()) return fail(std::move(fault));
    const llvm::StringRef bytes(reinterpret_cast<const char*>(cubin.data()), cubin.size());
    auto file = CubinFile::create(llvm::MemoryBufferRef(bytes, "cubin"), /*InitContent=*/true);
    if (!file) return fail("it is not a 64-bit ELF file: " + llvm::toString(file.takeError()));
    if (const unsigned machine = file->getELFFile().getHeader().e_machine; machine != llvm::ELF::EM_CUDA) {
        return fail(fmt::format("it is for ELF machine {}, not a GPU ({})", machine, unsigned{llvm::ELF::EM_CUDA}));
    }
    return CubinContents{sm_of(*file), kernels_of(*file)};
}

std::string cubin_fault(std::span<const std::byte> cubin, std::string_view arch, std::span<const KernelEntry> kernels) {
    std::string why;
    const auto contents = read_cubin(cubin, &why);
    if (!contents) return why;
    if (contents->sm != sm_number(arch)) return fmt::format("it is for sm_{}, not {}", contents->sm, arch);
    for (const KernelEntry& wanted : kernels) {
        const bool found =
            std::any_of(contents->kernels.begin(), contents->kernels.end(), [&](const auto& k) { return k.name == wanted.name; });
        if (found) continue;
        std::string names;
        for (const CubinKernel& kernel : contents->kernels) names += (names.empty() ? "" : ", ") + kernel.name;
        return fmt::format("it lacks kernel '{}' (it holds: {})", wanted.name, names.empty() ? "no kernel at all" : names);
    }
    return {};
}

std::vector<KernelResources> parse_ptxas_report(std::string_view log) {
    std::vector<KernelResources> kernels;
    bool in_kernel = false;
    while (!log.empty()) {
        const std::size_t end = std::min(log.find('\n'), log.size());
        const std::string_view line = log.substr(0, end);
        log.remove_prefix(std::min(end + 1, log.size()));
        constexpr std::string_view kEntry = "Compiling entry function '";
        constexpr std::string_view kProperties = "Function properties for ";
        if (const std::size_t at = line.find(kEntry); at != std::string_view::npos) {
            const std::string_view name = line.substr(at + kEntry.size());
            kernels.push_back({std::string(name.substr(0, name.find('\'')))});
        } else if (const std::size_t properties = line.find(kProperties); properties != std::string_view::npos) {
            // ptxas lists device functions that it kept apart too; their frames are in the kernel's own.
            in_kernel = !kernels.empty() && line.substr(properties + kProperties.size()) == kernels.back().name;
        } else if (kernels.empty()) {
            continue;
        } else if (line.find("bytes stack frame") != std::string_view::npos && in_kernel) {
            kernels.back().stack_bytes = number_before(line, " bytes stack frame");
            kernels.back().spill_store_bytes = number_before(line, " bytes spill stores");
            kernels.back().spill_load_bytes = number_before(line, " bytes spill loads");
        } else if (line.find(" registers") != std::string_view::npos) {
            kernels.back().registers = static_cast<int>(number_before(line, " registers"));
            kernels.back().static_smem_bytes = number_before(line, " bytes smem");
        }
    }
    return kernels;
}

}  // namespace flce
