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
    if (is_fp8(spec)) fp8_class_scales(call, begin, columns, class_factors, class_scales);
}

UnpackedB weight_for_logits(const CpuContext& context, const CpuCall& call, const WorkerSlot& slot, std::int64_t begin) {
    const Spec& spec = call.spec();
    const bool vocab_major = spec.layout == WeightLayout::vocab_major;
    if (is_fp8(spec)) {
        return {.depth_contiguous = vocab_major,
                .pack = context.code.pack_weight_logits,
                .dequantized = slot.dequantized,
                .rounded = fp8_logits_weight(call, begin, slot.class_factors)};
    }
    if (is_quantized(spec)) {
        return {.depth_contiguous = true,
                .pack = context.code.pack_weight_logits,
                .quantized = QuantizedWeight(call),
                .first_class = begin,
                .dequantized = slot.dequantized};
    }
    const auto bytes = static_cast<std::int64_t>(element_bytes(weight_dtype(spec)));
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

void multiply_logits(const CpuContext& context, const CpuCall& call, const WorkerSlot& slot, const PackedA& hidden,
                     const float* hidden_scales, std::int64_t begin, TileRange range) {
    range.column = 0;
    multiply_tile(context.code, context.plan.cpu, hidden, weight_for_logits(context, call, slot, begin), range, call.spec().hidden_size,
                  slot.b_block, slot.tile);
    if (!is_fp8(call.spec())) return;
    scale_products(slot.tile, context.plan.cpu.block_n, range.rows, range.columns, hidden_scales + range.row, slot.class_scales);
}

void pack_hidden_codes(const CpuContext& context, const CpuCall& call, const Fp8Rows& memory, const PackedA& panels, std::int64_t begin,
                       std::int64_t rows) {
    constexpr std::int64_t kPanelsPerTask = 8;
    const Spec& spec = call.spec();
    const CpuPlan& plan = context.plan.cpu;
    const std::int64_t depth = spec.hidden_size;
    const std::byte* const hidden = call.pointer(Slot::hidden) + begin * depth * static_cast<std::int64_t>(element_bytes(spec.dtype));
    const Fp8Numbers codes(spec.dtype, hidden, depth, logits_rounding(spec), memory.factors);
    const Blocks tasks = fixed_blocks(rows, kPanelsPerTask * plan.micro_m);
    context.workers->run(tasks.count, memory.slots, [&](std::int64_t task, std::int64_t worker) {
        const WorkerSlot slot(memory.layout, memory.first_slot + worker * memory.layout.bytes);
        const std::int64_t end = tasks.begin(task) + tasks.length(task);
        fp8_row_scales(spec, spec.fp8_hidden_scale,
                       hidden + tasks.begin(task) * depth * static_cast<std::int64_t>(element_bytes(spec.dtype)), tasks.length(task),
                       memory.factors + tasks.begin(task), memory.scales + tasks.begin(task));
        for (std::int64_t row = tasks.begin(task); row < end; row += plan.micro_m) {
            const std::int64_t lines = std::min<std::int64_t>(plan.micro_m, end - row);
            for (std::int64_t k = 0; k < depth; k += plan.block_k) {
                const std::int64_t deep = std::min<std::int64_t>(plan.block_k, depth - k);
                for (std::int64_t i = 0; i < lines; ++i) {
                    float* const to = slot.dequantized + i * deep;
                    if (call.valid_label(begin + row + i) < 0) {
                        std::fill(to, to + deep, 0.F);
                    } else {
                        codes.load(row + i, k, deep, to);
                    }
                }
                context.code.pack_hidden(slot.dequantized, deep, panels.at(plan, row, depth_units(plan, k)), lines, deep);
            }
        }
    });
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
