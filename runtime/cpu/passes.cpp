#include "runtime/cpu/passes.hpp"

#include <algorithm>
#include <cstring>

namespace flce {

void WorkerSlot::load_strip(const CpuContext& context, const CpuCall& call, std::int64_t begin, std::int64_t columns) const {
    const Spec& spec = call.spec();
    const std::int64_t width = context.plan.cpu.block_n;
    if (spec.bias) {
        const auto bytes = static_cast<std::int64_t>(element_bytes(spec.dtype));
        context.code.to_float(call.pointer(Slot::bias) + begin * bytes, bias, columns);
        std::fill(bias + columns, bias + width, 0.F);
    }
    if (spec.teacher_bias) {
        const auto bytes = static_cast<std::int64_t>(element_bytes(spec.dtype));
        context.code.to_float(call.pointer(Slot::teacher_bias) + begin * bytes, teacher_bias, columns);
    }
    if (spec.class_offset) {
        std::copy_n(call.pointer<const float>(Slot::class_offset) + begin, columns, class_offset);
        std::fill(class_offset + columns, class_offset + width, 0.F);
    }
    if (spec.class_groups) {
        const std::int32_t* groups = call.pointer<const std::int32_t>(Slot::class_group) + begin;
        std::transform(groups, groups + columns, class_groups, [](std::int32_t group) { return group < 0 ? kNoClassGroup : group; });
        std::fill(class_groups + columns, class_groups + width, kNoClassGroup);
    }
    if (spec.class_weight) {
        std::copy_n(call.pointer<const float>(Slot::class_weight) + begin, columns, class_weight);
        std::fill(class_weight + columns, class_weight + width, 0.F);
    }
}

UnpackedB weight_for_logits(const CpuContext& context, const CpuCall& call, const WorkerSlot& slot, std::int64_t begin) {
    const Spec& spec = call.spec();
    if (is_quantized(spec)) {
        return {.depth_contiguous = true,
                .pack = context.code.pack_weight_logits,
                .quantized = QuantizedWeight(call),
                .first_class = begin,
                .dequantized = slot.dequantized};
    }
    const auto bytes = static_cast<std::int64_t>(element_bytes(weight_dtype(spec)));
    const bool vocab_major = spec.layout == WeightLayout::vocab_major;
    return {.data = call.pointer(Slot::weight) + begin * bytes * (vocab_major ? spec.hidden_size : 1),
            .ld = vocab_major ? spec.hidden_size : spec.padded_vocab_size,
            .element_bytes = bytes,
            .depth_contiguous = vocab_major,
            .pack = context.code.pack_weight_logits};
}

UnpackedB teacher_weight_for_logits(const CpuContext& context, const CpuCall& call, std::int64_t begin) {
    const Spec& spec = call.spec();
    const auto bytes = static_cast<std::int64_t>(element_bytes(spec.dtype));
    const bool vocab_major = spec.layout == WeightLayout::vocab_major;
    return {.data = call.pointer(Slot::teacher_weight) + begin * bytes * (vocab_major ? spec.teacher_hidden_size : 1),
            .ld = vocab_major ? spec.teacher_hidden_size : teacher_head(spec).padded_vocab_size,
            .element_bytes = bytes,
            .depth_contiguous = vocab_major,
            .pack = context.code.pack_weight_logits};
}

void pack_hidden_rows(const CpuContext& context, const CpuCall& call, Slot hidden, const PackedA& panels, std::int64_t begin,
                      std::int64_t rows) {
    constexpr std::int64_t kPanelsPerTask = 8;
    const std::int64_t hidden_size = hidden == Slot::hidden ? call.spec().hidden_size : call.spec().teacher_hidden_size;
    const auto bytes = static_cast<std::int64_t>(element_bytes(call.spec().dtype));
    const CpuPlan& plan = context.plan.cpu;
    const Blocks tasks = fixed_blocks(rows, kPanelsPerTask * plan.micro_m);
    context.workers->run(tasks.count, context.threads, [&](std::int64_t task, std::int64_t) {
        const std::int64_t end = tasks.begin(task) + tasks.length(task);
        for (std::int64_t row = tasks.begin(task); row < end; row += plan.micro_m) {
            context.code.pack_hidden(call.pointer(hidden) + (begin + row) * hidden_size * bytes, hidden_size, panels.at(plan, row, 0),
                                     std::min<std::int64_t>(plan.micro_m, end - row), hidden_size);
        }
    });
}

}  // namespace flce
