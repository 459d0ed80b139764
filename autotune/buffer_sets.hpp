// Copies of a layer's tensors that a measurement goes through in turn, so that they come from memory as they do in a training step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/layer/layer.hpp"

namespace flce {

struct BufferSet {
    LayerInputs inputs;
    LayerOutputs outputs;
};

/// How many times the bytes of the last cache are touched before a copy's turn comes again.
inline constexpr std::int64_t kColdCaches = 3;
/// Most bytes of all copies, unless there is only one. Each copy counts for kLeastSetBytes, if it is smaller: it costs allocations and a
/// share of a graph.
inline constexpr std::int64_t kMostSetBytes = std::int64_t{2} << 30;
inline constexpr std::int64_t kLeastSetBytes = std::int64_t{4} << 20;

/// Number of copies. `touched_bytes`: bytes of a copy that a turn reads or writes; `set_bytes`: all bytes of a copy.
[[nodiscard]] std::size_t buffer_set_count(std::int64_t cache_bytes, std::int64_t touched_bytes, std::int64_t set_bytes);

/// Whether a copy's turn may be forward alone, which touches no gradients.
enum class Turn : std::uint8_t { forward_or_both, both };

/// Copies of `layer` on `where`, which is a `device`.
[[nodiscard]] std::vector<BufferSet> make_buffer_sets(const Spec& spec, const RandomLayer& layer, const Device& device, DeviceRef where,
                                                      Turn turn);

}  // namespace flce
