// A shard's layer with its programs, and calls of them with made-up addresses.
#pragma once

#include <cstdint>
#include <string>

#include "flce/flce.hpp"
#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce::shard_layers {

inline constexpr std::int64_t kStep = std::int64_t{1} << 44;
inline constexpr std::int64_t kStart = 5000;

inline std::int64_t address(Slot slot) { return (static_cast<std::int64_t>(slot) + 1) * kStep; }
inline std::int64_t as_address(const void* pointer) { return reinterpret_cast<std::int64_t>(pointer); }
inline void set(CallSlots& slots, Slot slot, std::int64_t value) { slots[static_cast<std::size_t>(slot)] = value; }

struct ShardLayer {
    Spec spec;
    Device device;
    Plan plan;
    CudaProgram program;

    explicit ShardLayer(const std::string& text, const char* device_name = "h100")
        : spec(parse_spec(text)),
          device(describe_device(device_name)),
          plan(choose_plan(spec, device)),
          program(generate_cuda(spec, device, plan)) {}

    /// The slots of a call: every tensor that the pass takes has a made-up address.
    [[nodiscard]] CallSlots call(Pass pass, std::int64_t tokens, std::int64_t columns, std::int64_t rows) const {
        CallSlots slots = test::made_up_call(tokens, {});
        for (std::size_t i = 0; i < kCallTensorCount; ++i) {
            const CallTensor& tensor = kCallTensors[i];
            const Use use = pass == Pass::forward ? tensor.shard : pass == Pass::merge ? tensor.merge : tensor.backward;
            if (use == Use::none) slots[i] = 0;
        }
        set(slots, Slot::grad_entropy, 0);
        set(slots, Slot::num_valid, 0);
        set(slots, Slot::vocab_start, pass == Pass::merge ? 0 : kStart);
        set(slots, Slot::vocab_columns, pass == Pass::merge ? 0 : columns);
        set(slots, Slot::weight_rows, pass == Pass::merge ? 0 : rows);
        return slots;
    }
};

}  // namespace flce::shard_layers
