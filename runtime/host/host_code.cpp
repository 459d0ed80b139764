#include "runtime/host/host_code.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <map>
#include <mutex>

#include "flce/error.hpp"
#include "generator/device_tables.hpp"
#include "llvm/ADT/SmallVector.h"
#include "llvm/Config/llvm-config.h"
#include "llvm/ExecutionEngine/JITLink/JITLinkMemoryManager.h"
#include "llvm/ExecutionEngine/Orc/Core.h"
#include "llvm/ExecutionEngine/Orc/ExecutionUtils.h"
#include "llvm/ExecutionEngine/Orc/ExecutorProcessControl.h"
#include "llvm/ExecutionEngine/Orc/ObjectFileInterface.h"
#include "llvm/ExecutionEngine/Orc/ObjectLinkingLayer.h"
#include "llvm/IR/DiagnosticInfo.h"
#include "llvm/IR/DiagnosticPrinter.h"
#include "llvm/IR/LLVMContext.h"
#include "llvm/IR/LegacyPassManager.h"
#include "llvm/IR/Module.h"
#include "llvm/IR/Verifier.h"
#include "llvm/MC/TargetRegistry.h"
#include "llvm/Object/ObjectFile.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/TargetSelect.h"
#include "llvm/Support/raw_ostream.h"
#include "llvm/Target/TargetMachine.h"
#include "llvm/TargetParser/Host.h"
#include "runtime/host/object_file.hpp"

namespace flce {
namespace {

void initialize_llvm() {
    static std::once_flag once;
    std::call_once(once, [] {
#if defined(FLCE_LLVM_X86)
        LLVMInitializeX86TargetInfo();
        LLVMInitializeX86Target();
        LLVMInitializeX86TargetMC();
        LLVMInitializeX86AsmPrinter();
#endif
#if defined(FLCE_LLVM_AARCH64)
        LLVMInitializeAArch64TargetInfo();
        LLVMInitializeAArch64Target();
        LLVMInitializeAArch64TargetMC();
        LLVMInitializeAArch64AsmPrinter();
#endif
    });
}

std::string ir_text(const llvm::Module& module) {
    std::string text;
    llvm::raw_string_ostream stream(text);
    module.print(stream, nullptr);
    return text;
}

/// Writes the failing IR where a person can look at it; an empty path when that fails too.
std::filesystem::path save_ir(const llvm::Module& module) {
    static std::atomic<int> serial{0};
    std::error_code error;
    const auto directory = std::filesystem::temp_directory_path(error);
    if (error) return {};
    auto path = directory / fmt::format("flce-{}-{}.ll", getpid(), serial++);
    std::ofstream file(path);
    file << ir_text(module);
    return file.good() ? path : std::filesystem::path{};
}

[[noreturn]] void throw_compile_error(const llvm::Module& module, const std::string& what, const std::string& log) {
    auto path = save_ir(module);
    throw CompileError(fmt::format("host code '{}': {}: {} (IR {})", module.getName().str(), what, log,
                                   path.empty() ? "could not be saved" : "saved as " + path.string()),
                       log, path);
}

std::unique_ptr<llvm::TargetMachine> make_target_machine(const CpuProperties& target) {
    initialize_llvm();
    std::string error;
    const llvm::Target* llvm_target = llvm::TargetRegistry::lookupTarget(target.triple, error);
    if (llvm_target == nullptr) {
        throw CompileError(fmt::format("LLVM {} has no target '{}': {}", llvm_version(), target.triple, error), error, {});
    }
    // Position-independent, so that the loader may put an object anywhere relative to the process's own symbols.
    std::unique_ptr<llvm::TargetMachine> machine(llvm_target->createTargetMachine(target.triple, target.cpu, target.features,
                                                                                  llvm::TargetOptions{}, llvm::Reloc::PIC_,
                                                                                  llvm::CodeModel::Small, llvm::CodeGenOptLevel::Default));
    if (machine == nullptr) {
        throw CompileError(fmt::format("LLVM cannot generate code for '{}', cpu '{}'", target.triple, target.cpu), {}, {});
    }
    return machine;
}

/// Collects what LLVM has to say instead of letting it print to stderr.
class DiagnosticCollector : public llvm::DiagnosticHandler {
public:
    explicit DiagnosticCollector(std::string& errors) : errors_(errors) {}
    bool handleDiagnostics(const llvm::DiagnosticInfo& info) override {
        if (info.getSeverity() != llvm::DS_Error) return true;
        llvm::raw_string_ostream stream(errors_);
        llvm::DiagnosticPrinterRawOStream printer(stream);
        info.print(printer);
        stream << "\n";
        return true;
    }

private:
    std::string& errors_;
};

std::string to_message(llvm::Error error) { return llvm::toString(std::move(error)); }

class LoadedObject final : public HostCode {
public:
    LoadedObject(std::span<const std::byte> object, const std::string& name) : name_(name) {
        initialize_llvm();
        auto process_control = llvm::orc::SelfExecutorProcessControl::Create();
        if (!process_control) fail(to_message(process_control.takeError()));
        session_ = std::make_unique<llvm::orc::ExecutionSession>(std::move(*process_control));
        session_->setErrorReporter([this](llvm::Error error) { append_log(to_message(std::move(error))); });
        try {
            link(object);
        } catch (...) {
            close();
            throw;
        }
    }
    ~LoadedObject() override { close(); }

    void* symbol(std::string_view name) const override {
        const auto found = addresses_.find(name);
        if (found == addresses_.end()) {
            throw InternalError(fmt::format("host code '{}' has no symbol '{}' ({} symbols)", name_, name, addresses_.size()));
        }
        return found->second;
    }

private:
    [[noreturn]] void fail(const std::string& why) {
        append_log(why);
        throw CompileError(fmt::format("host code '{}' cannot be loaded here: {}", name_, log_), log_, {});
    }

    void append_log(const std::string& line) {
        const std::scoped_lock lock(log_mutex_);
        if (!log_.empty()) log_ += "; ";
        log_ += line;
    }

    /// Links everything now, so that a missing symbol shows here and symbol() is a plain look-up afterwards.
    void link(std::span<const std::byte> object) {
        // LLVM's linker takes more on trust than a cache's file deserves.
        if (const std::string why = host_object_fault(object, session_->getTargetTriple().str(), {}); !why.empty()) fail(why);
        auto buffer =
            llvm::MemoryBuffer::getMemBufferCopy(llvm::StringRef(reinterpret_cast<const char*>(object.data()), object.size()), name_);
        auto interface = llvm::orc::getObjectFileInterface(*session_, buffer->getMemBufferRef());
        if (!interface) fail(to_message(interface.takeError()));
        layer_ = std::make_unique<llvm::orc::ObjectLinkingLayer>(*session_, session_->getExecutorProcessControl().getMemMgr());
        auto& library = session_->createBareJITDylib("flce");
        // The C library's memset and memcpy, which the code generator may have called.
        auto process_symbols = llvm::orc::DynamicLibrarySearchGenerator::GetForCurrentProcess(/*GlobalPrefix=*/'\0');
        if (!process_symbols) fail(to_message(process_symbols.takeError()));
        library.addGenerator(std::move(*process_symbols));
        llvm::orc::SymbolLookupSet wanted;
        for (const auto& [symbol, flags] : interface->SymbolFlags) wanted.add(symbol);
        if (auto error = layer_->add(library, std::move(buffer))) fail(to_message(std::move(error)));
        auto found = session_->lookup({{&library, llvm::orc::JITDylibLookupFlags::MatchAllSymbols}}, std::move(wanted));
        if (!found) fail(to_message(found.takeError()));
        for (const auto& [symbol, definition] : *found) {
            addresses_.emplace((*symbol).str(), definition.getAddress().toPtr<void*>());
        }
    }

    void close() {
        if (session_ == nullptr) return;
        if (auto error = session_->endSession()) llvm::consumeError(std::move(error));
        layer_.reset();
        session_.reset();
    }

    std::string name_;
    std::mutex log_mutex_;
    std::string log_;
    std::unique_ptr<llvm::orc::ExecutionSession> session_;
    std::unique_ptr<llvm::orc::ObjectLinkingLayer> layer_;
    std::map<std::string, void*, std::less<>> addresses_;
};

}  // namespace

std::string llvm_version() { return LLVM_VERSION_STRING; }

std::vector<std::string_view> host_archs() {
    return {
#if defined(FLCE_LLVM_X86)
        kX86_64,
#endif
#if defined(FLCE_LLVM_AARCH64)
        kAarch64,
#endif
    };
}

std::vector<std::byte> compile_host_object(const CpuProperties& target, const std::string& name,
                                           const std::function<void(llvm::Module&)>& emit) {
    const auto machine = make_target_machine(target);
    std::string errors;
    llvm::LLVMContext context;
    context.setDiagnosticHandler(std::make_unique<DiagnosticCollector>(errors));
    llvm::Module module(name, context);
    module.setTargetTriple(target.triple);
    module.setDataLayout(machine->createDataLayout());
    emit(module);

    std::string verifier_log;
    llvm::raw_string_ostream verifier_stream(verifier_log);
    if (llvm::verifyModule(module, &verifier_stream)) throw_compile_error(module, "the IR is malformed", verifier_log);

    llvm::SmallVector<char, 0> object;
    llvm::raw_svector_ostream stream(object);
    llvm::legacy::PassManager passes;
    llvm::MCContext* mc = nullptr;
    if (machine->addPassesToEmitMC(passes, mc, stream)) {
        throw_compile_error(module, "no object output", fmt::format("target '{}'", target.triple));
    }
    passes.run(module);
    if (!errors.empty()) throw_compile_error(module, "code generation failed", errors);
    const auto* bytes = reinterpret_cast<const std::byte*>(object.data());
    return {bytes, bytes + object.size()};
}

std::shared_ptr<const HostCode> HostCode::load(std::span<const std::byte> object, const std::string& name) {
    return std::make_shared<LoadedObject>(object, name);
}

}  // namespace flce
