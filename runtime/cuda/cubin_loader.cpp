#include "runtime/cuda/cubin_loader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <variant>

#include "flce/error.hpp"
#include "runtime/cuda/cubin.hpp"

namespace flce {
namespace {

std::string param_block_fault(const std::vector<Statement>& body, const CudaProgram& program, const CubinContents& cubin) {
    std::string fault;
    for (const Statement& statement : body) {
        if (const auto* loop = std::get_if<Loop>(&statement.value)) fault = param_block_fault(loop->body, program, cubin);
        if (const auto* branch = std::get_if<If>(&statement.value)) fault = param_block_fault(branch->then, program, cubin);
        if (!fault.empty()) return fault;
        const auto* launch = std::get_if<Launch>(&statement.value);
        if (launch == nullptr) continue;
        const std::string& name = program.kernels.at(static_cast<std::size_t>(launch->kernel)).name;
        for (const CubinKernel& kernel : cubin.kernels) {
            if (kernel.name != name || !kernel.param_bytes || *kernel.param_bytes == launch->param_bytes) continue;
            return fmt::format("kernel {} takes {} bytes of parameters, its launch passes {}", name, *kernel.param_bytes,
                               launch->param_bytes);
        }
    }
    return fault;
}

/// Driver errors that mean the image: whatever else fails, memory or a context that is lost, says nothing about it.
bool is_of_the_image(const DeviceError& error) {
    constexpr std::array kOfTheImage{CUDA_ERROR_INVALID_VALUE,
                                     CUDA_ERROR_INVALID_IMAGE,
                                     CUDA_ERROR_NO_BINARY_FOR_GPU,
                                     CUDA_ERROR_INVALID_PTX,
                                     CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
                                     CUDA_ERROR_INVALID_SOURCE,
                                     CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND,
                                     CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,
                                     CUDA_ERROR_NOT_FOUND};
    return std::ranges::find(kOfTheImage, static_cast<CUresult>(error.result())) != kOfTheImage.end();
}

std::unique_ptr<CudaModule> load_module(const std::shared_ptr<const CudaContext>& context, std::span<const std::byte> cubin,
                                        std::span<const KernelEntry> kernels) {
    auto module = std::make_unique<CudaModule>(context, cubin);
    for (const KernelEntry& kernel : kernels) (void)module->function(kernel.name, kernel.dynamic_smem_bytes);
    return module;
}

}  // namespace

std::string param_block_fault(const CudaProgram& program, std::span<const std::byte> cubin) {
    const auto contents = read_cubin(cubin, nullptr);
    if (!contents) return {};
    for (const LaunchProgram* pass : {&program.forward, &program.merge, &program.backward}) {
        if (std::string fault = param_block_fault(pass->body, program, *contents); !fault.empty()) return fault;
    }
    return {};
}

std::string load_fault(const std::shared_ptr<const CudaContext>& context, std::span<const std::byte> cubin,
                       std::span<const KernelEntry> kernels, std::unique_ptr<CudaModule>& module) {
    try {
        module = load_module(context, cubin, kernels);
        return {};
    } catch (const DeviceError& error) {
        if (!is_of_the_image(error)) throw;
        return error.what();
    }
}

CubinLoader::CubinLoader(const CudaProgram& program, std::string arch, std::shared_ptr<const CudaContext> context)
    : program_(program), arch_(std::move(arch)), context_(std::move(context)), modules_(program.units.size()) {}

std::string CubinLoader::fault_of(std::size_t unit, const Artifact& cubin) {
    const std::vector<KernelEntry>& kernels = program_.units[unit].kernels;
    std::string fault = cubin_fault(cubin.payload, arch_, kernels);
    if (fault.empty()) fault = param_block_fault(program_, cubin.payload);
    if (!fault.empty() || context_ == nullptr) return fault;
    const std::scoped_lock lock(mutex_);
    return load_fault(context_, cubin.payload, kernels, modules_[unit]);
}

std::unique_ptr<CudaModule> CubinLoader::take(std::size_t unit, const Artifact& cubin) {
    if (modules_[unit] == nullptr) {
        const std::scoped_lock lock(mutex_);
        modules_[unit] = load_module(context_, cubin.payload, program_.units[unit].kernels);
    }
    return std::move(modules_[unit]);
}

}  // namespace flce
