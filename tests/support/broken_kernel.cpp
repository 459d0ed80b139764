#include "tests/support/broken_kernel.hpp"

#include <span>
#include <string>
#include <vector>

#include "flce/buffer.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/nvrtc.hpp"

namespace flce::test {
namespace {

constexpr const char* kBrokenName = "flce_broken";
constexpr unsigned kBrokenThreads = 256;
constexpr unsigned kBrokenBlocksPerSm = 8;
constexpr std::uint64_t kBrokenAddress = 16;  // aligned, and nobody's

// Reads and writes are volatile: a loop that does nothing need not be kept.
constexpr std::string_view kBrokenSource = R"(
struct Params { unsigned long long address; int writes; };
extern "C" __global__ void flce_broken(const __grid_constant__ Params p) {
    volatile int* const word = reinterpret_cast<volatile int*>(p.address);
    if (p.writes != 0) *word = 1;
    while (*word == 0) {}
}
)";
struct BrokenParams {
    std::uint64_t address;
    int writes;
};

std::vector<std::byte> broken_cubin(const std::string& arch) {
    const std::vector<KernelEntry> kernels = {{kBrokenName, kBrokenThreads, 0}};
    return Nvrtc::load()->compile(std::string(kBrokenSource), {}, {"--gpu-architecture=" + arch, "--std=c++17"}, kernels).cubin;
}

}  // namespace

struct BrokenKernel::State {
    Device device;
    Buffer word;
    CudaModule module;
    CUfunction function;
    BrokenParams params{};

    State(DeviceRef ref, KernelFault fault)
        : device(CudaDriver::load()->device(ref.index)),
          word(ref, sizeof(int)),
          module(CudaDriver::load()->context(ref.index), broken_cubin(device.gpu.arch)),
          function(module.function(kBrokenName, 0)) {
        word.fill(std::byte{0});  // for ever
        const bool writes = fault == KernelFault::illegal_write;
        params = {writes ? kBrokenAddress : reinterpret_cast<std::uint64_t>(word.data()), writes ? 1 : 0};
    }
};

std::string_view broken_kernel_source() { return kBrokenSource; }

BrokenKernel::BrokenKernel(DeviceRef device, KernelFault fault) : state_(std::make_shared<State>(device, fault)) {}

void BrokenKernel::launch(Stream stream) const {
    LaunchConfig config{.block_threads = kBrokenThreads};
    config.grid[0] = static_cast<unsigned>(state_->device.gpu.sm_count) * kBrokenBlocksPerSm;
    flce::launch(*state_->module.context(), state_->function, config, std::as_bytes(std::span(&state_->params, 1)),
                 static_cast<CUstream>(stream.handle));
}

}  // namespace flce::test
