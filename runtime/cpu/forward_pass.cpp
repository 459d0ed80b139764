// Forward: strips of logits are reduced to a few sums a token as soon as they exist, then the sums become losses.
#include <algorithm>
#include <cstring>
#include <limits>

#include "runtime/cpu/passes.hpp"
#include "runtime/cpu/row_results.hpp"
#include "runtime/cpu/shard_sums.hpp"
#include "runtime/cpu/teacher.hpp"
#include "runtime/cpu/top_classes.hpp"

namespace flce {
namespace {

class ForwardPass {
public:
    ForwardPass(const CpuContext& context, const CpuCall& call)
        : context_(context),
          plan_(context.plan.cpu),
          call_(call),
          layout_(cpu_forward_layout(call.spec(), context.plan, context.threads, call.num_tokens(), call.vocab_columns())),
          workspace_(call.pointer(Slot::workspace)),
          results_(call),
          teacher_(call),
          top_(call, layout_, workspace_),
          partial_sums_(call.spec(), call.pointer<float>(Slot::partial_sums), call.num_tokens()),
          class_weight_total_(is_shard(call.spec()) ? static_cast<float>(call.sum_of_class_weights()) : 0.F),
          retained_(cpu_retained(context.plan, call.num_tokens(), call.vocab_columns(), call.value(Slot::retained_bytes))) {}

    void run() {
        call_.report_invalid_label();
        if (is_shard(call_.spec())) teacher_.clear_shard();
        for (std::int64_t block = 0; block < layout_.row_blocks.count; ++block) {
            const std::int64_t begin = layout_.row_blocks.begin(block);
            const std::int64_t rows = layout_.row_blocks.length(block);
            const PackedA hidden{workspace_ + layout_.hidden_panels, depth_units(plan_, call_.spec().hidden_size)};
            if (is_fp8(call_.spec())) {
                pack_hidden_codes(context_, call_, fp8_rows(), hidden, begin, rows);
            } else {
                pack_hidden_rows(context_, call_, Slot::hidden, hidden, begin, rows);
            }
            if (top_.present()) top_.begin(rows);
            reduce_logits(hidden, begin, rows);
            finish_rows(begin, rows);
        }
        if (!is_shard(call_.spec())) results_.write_reduced(call_.mean_divisors());
    }

private:
    [[nodiscard]] Fp8Rows fp8_rows() const {
        return {layout_.slot, workspace_ + layout_.slot_offset, layout_.slots, reinterpret_cast<float*>(workspace_ + layout_.row_factors),
                reinterpret_cast<float*>(workspace_ + layout_.row_scales)};
    }
    [[nodiscard]] RowSums* sums_of_group(std::int64_t group, std::int64_t rows) const {
        return reinterpret_cast<RowSums*>(workspace_ + layout_.partial_sums) + group * rows;
    }

    /// The longest dimension first: every task walks a group of strips for one tile of rows.
    void reduce_logits(const PackedA& hidden, std::int64_t begin, std::int64_t rows) {
        const Blocks tiles = row_tiles(plan_, rows);
        context_.workers->run(tiles.count * layout_.strip_groups.count, layout_.slots, [&](std::int64_t task, std::int64_t worker) {
            const WorkerSlot slot(layout_.slot, workspace_ + layout_.slot_offset + worker * layout_.slot.bytes);
            const std::int64_t group = task / tiles.count;
            const std::int64_t tile = task % tiles.count;
            reduce_group(slot, hidden, group, {.row = tiles.begin(tile), .rows = tiles.length(tile)}, begin,
                         sums_of_group(group, rows) + tiles.begin(tile), top_.lock_of(tile));
        });
    }

    void reduce_group(const WorkerSlot& slot, const PackedA& hidden, std::int64_t group, TileRange range, std::int64_t first_token,
                      RowSums* sums, std::mutex& top_lock) const {
        const std::int64_t first = layout_.strip_groups.begin(group);
        for (std::int64_t strip = first; strip < first + layout_.strip_groups.length(group); ++strip) {
            const std::int64_t vocab = layout_.strips.begin(strip);
            range.columns = layout_.strips.length(strip);
            slot.load_strip(context_, call_, vocab, range.columns);
            multiply_logits(context_, call_, slot, hidden, fp8_rows().scales, vocab, range);
            if (retained_.holds(vocab)) retain(slot.tile, vocab, first_token + range.row, range);
            RowSums* strip_sums = strip == first ? sums : slot.sums;
            if (call_.spec().class_groups) set_groups(slot, first_token + range.row, vocab, range);
            context_.code.forward_tile(slot.tile, plan_.block_n, range.rows, range.columns, slot.bias, slot.class_weight,
                                       context_.transform_parameters.data(), temperatures(first_token + range.row), strip_sums,
                                       slot.class_offset, slot.group_rows, slot.class_groups);
            if (top_.present()) {
                const std::scoped_lock lock(top_lock);
                for (std::int64_t i = 0; i < range.rows; ++i) {
                    top_.add(range.row + i, slot.tile + i * plan_.block_n, range.columns, call_.vocab_start() + vocab);
                }
            }
            for (std::int64_t i = 0; i < range.rows; ++i) {
                const std::int64_t token = first_token + range.row + i;
                const std::int64_t label = call_.valid_label(token);
                const std::int64_t column = call_.column_of(label) - vocab;
                if (label >= 0 && teacher_.present()) teacher_.keep_logits(token, slot.tile + i * plan_.block_n, vocab, range.columns);
                const bool here = column >= 0 && column < range.columns;
                strip_sums[i].target_logit = here ? slot.tile[i * plan_.block_n + column] : -std::numeric_limits<float>::infinity();
                strip_sums[i].top1 = FLCE_NO_CLASS;
                if (finds_top1() && (strip == first || strip_sums[i].max > sums[i].max)) {
                    strip_sums[i].top1 =
                        first_of(slot.tile + i * plan_.block_n, range.columns, strip_sums[i].max, call_.vocab_start() + vocab);
                }
                if (strip != first) sums[i] = merge(sums[i], strip_sums[i]);
            }
        }
    }

    void set_groups(const WorkerSlot& slot, std::int64_t token, std::int64_t vocab, const TileRange& range) const {
        for (std::int64_t i = 0; i < range.rows; ++i) {
            const std::int64_t own = call_.column_of(call_.valid_label(token + i));
            const bool here = own >= vocab && own < vocab + range.columns;
            slot.group_rows[i] = {here ? static_cast<std::int32_t>(own - vocab) : GradRow::kElsewhere, call_.row_group(token + i)};
        }
    }

    [[nodiscard]] bool finds_top1() const { return call_.has(Slot::top1) || partial_sums_.fields().top1 >= 0; }
    [[nodiscard]] const float* temperatures(std::int64_t token) const {
        return call_.has(Slot::temperature) ? call_.pointer<const float>(Slot::temperature) + token : nullptr;
    }
    /// The label of the first logit that is the largest, `label` being the first logit's label. FLCE_NO_CLASS where none is, all of them
    /// being −infinity or NaN.
    static int first_of(const float* logits, std::int64_t columns, float largest, std::int64_t label) {
        const float* found = std::find(logits, logits + columns, largest);
        return found == logits + columns ? FLCE_NO_CLASS : static_cast<int>(label + (found - logits));
    }

    /// Keeps logits for backward, before bias and transforms: backward goes on from here as if it had multiplied again.
    void retain(const float* tile, std::int64_t vocab, std::int64_t token, const TileRange& range) const {
        std::byte* to = call_.pointer(Slot::retained) + retained_.offset(vocab, range.columns, token);
        const std::int64_t row_bytes = 4 * range.columns;
        for (std::int64_t i = 0; i < range.rows; ++i) {
            std::memcpy(to + i * row_bytes, tile + i * plan_.block_n, static_cast<std::size_t>(row_bytes));
        }
    }

    void finish_rows(std::int64_t begin, std::int64_t rows) {
        constexpr std::int64_t kRowsPerTask = 64;
        auto* cross_entropies = reinterpret_cast<float*>(workspace_ + layout_.row_losses);
        float* z_losses = cross_entropies + rows;
        const Blocks tasks = fixed_blocks(rows, kRowsPerTask);
        context_.workers->run(tasks.count, context_.threads, [&](std::int64_t task, std::int64_t) {
            for (std::int64_t i = tasks.begin(task); i < tasks.begin(task) + tasks.length(task); ++i) {
                const RowOutputs outputs = finish_row(begin + i, i, rows);
                cross_entropies[i] = outputs.cross_entropy;
                z_losses[i] = outputs.z_loss;
            }
        });
        for (std::int64_t i = 0; i < rows; ++i) results_.add(cross_entropies[i], z_losses[i]);
    }

    /// Merges row i's partial sums in the order of the vocabulary. The merged sums are a shard's result. Without shards the wanted outputs
    /// follow from the sums; an ignored token's outputs are zeros.
    RowOutputs finish_row(std::int64_t token, std::int64_t i, std::int64_t rows) const {
        constexpr float kInfinity = std::numeric_limits<float>::infinity();
        const std::int64_t y = call_.valid_label(token);
        RowSums sums = sums_of_nothing(-kInfinity, -kInfinity);
        if (y >= 0 && layout_.strip_groups.count > 0) {
            sums = sums_of_group(0, rows)[i];
            for (std::int64_t group = 1; group < layout_.strip_groups.count; ++group) sums = merge(sums, sums_of_group(group, rows)[i]);
        }
        if (is_shard(call_.spec())) {
            const std::int64_t column = call_.column_of(y);
            store_shard_sums(partial_sums_, token, sums, {column >= 0 ? call_.class_weight(column) : 0.F, class_weight_total_});
            if (top_.present()) top_.store(partial_sums_, token, i, y >= 0 && layout_.strip_groups.count > 0);
            return {};
        }
        if (y >= 0 && top_.present()) top_.finish(token, i, sums);
        if (y >= 0) return results_.write(token, sums, call_.class_weight(y), teacher_.finish(token, sums));
        teacher_.clear(token);
        write_no_top_classes(call_, token);
        results_.write_ignored(token);
        return {};
    }

    const CpuContext& context_;
    const CpuPlan& plan_;
    const CpuCall& call_;
    const CpuForwardLayout layout_;
    std::byte* const workspace_;
    CpuRowResults results_;
    const CpuTeacher teacher_;
    CpuTopClasses top_;
    const ShardSums<float> partial_sums_;
    const float class_weight_total_;
    const CpuRetained retained_;
};

}  // namespace

void run_cpu_forward(const CpuContext& context, const CpuCall& call) { ForwardPass(context, call).run(); }

}  // namespace flce
