// LLVM behind a small door: IR in, relocatable object out; object in, callable symbols out. Loading an object never runs the code
// generator, so host code that the cache holds costs no compile.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flce/device.hpp"

namespace llvm {
class LLVMContext;
class Module;
}  // namespace llvm

namespace flce {

/// "19.1.7": part of the key of every host object.
[[nodiscard]] std::string llvm_version();

/// Architectures of hosts that compile_host_object has code for: "x86_64", "aarch64".
[[nodiscard]] std::vector<std::string_view> host_archs();

/// Creates a module with the target's triple and data layout, lets `emit` fill it, verifies it and compiles it to an object file.
/// Throws CompileError carrying the verifier's or code generator's message; the IR is saved beside it.
[[nodiscard]] std::vector<std::byte> compile_host_object(const CpuProperties& target, const std::string& name,
                                                         const std::function<void(llvm::Module&)>& emit);

/// A loaded object; unloaded with its last owner.
class HostCode {
public:
    /// Throws CompileError if the object cannot be linked here (wrong architecture, unresolved symbol).
    [[nodiscard]] static std::shared_ptr<const HostCode> load(std::span<const std::byte> object, const std::string& name);
    virtual ~HostCode() = default;
    /// Address of an extern "C" symbol. Throws InternalError naming a missing one.
    [[nodiscard]] virtual void* symbol(std::string_view name) const = 0;

protected:
    HostCode() = default;
};

}  // namespace flce
