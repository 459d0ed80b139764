#include "autotune/buffer_sets.hpp"

#include <algorithm>
#include <initializer_list>

namespace flce {
namespace {

std::int64_t last_cache_bytes(const Device& device) {
    return device.kind == DeviceKind::cuda ? device.gpu.l2_bytes : std::max(device.cpu.l3_bytes, device.cpu.l2_bytes);
}

std::int64_t bytes_of(std::initializer_list<const Tensor*> tensors) {
    std::size_t bytes = 0;
    for (const Tensor* tensor : tensors) bytes += tensor->buffer.bytes();
    return static_cast<std::int64_t>(bytes);
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

std::size_t buffer_set_count(std::int64_t cache_bytes, std::int64_t touched_bytes, std::int64_t set_bytes) {
    const std::int64_t wanted = ceil_div(kColdCaches * cache_bytes, std::max<std::int64_t>(touched_bytes, 1));
    const std::int64_t affordable = kMostSetBytes / std::max(set_bytes, kLeastSetBytes);
    return static_cast<std::size_t>(std::max<std::int64_t>(1, std::min(wanted, affordable)));
}

std::vector<BufferSet> make_buffer_sets(const Spec& spec, const RandomLayer& layer, const Device& device, DeviceRef where, Turn turn) {
    std::vector<BufferSet> sets;
    std::size_t count = 1;
    while (sets.size() < count) {
        sets.push_back({upload(spec, layer, where), make_outputs(spec, where, layer.num_tokens, Reduction::mean)});
        if (sets.size() > 1) continue;
        const auto& [inputs, outputs] = sets.front();
        const std::int64_t read = bytes_of({&inputs.hidden, &inputs.weight});
        const std::int64_t written = bytes_of({&outputs.grad_hidden, &outputs.grad_weight});
        count = buffer_set_count(last_cache_bytes(device), turn == Turn::both ? read + written : read, read + written);
    }
    return sets;
}

}  // namespace flce
