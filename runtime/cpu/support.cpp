#include "runtime/cpu/support.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "runtime/cpu/quantized_weight.hpp"
#include "runtime/cpu/row_results.hpp"
#include "runtime/cpu/shard_sums.hpp"
#include "runtime/cpu/teacher.hpp"

namespace flce {
namespace {

constexpr std::int64_t kTokensPerTask = 16;
constexpr std::int64_t kBinsPerTask = 128;

/// Many sums side by side, so that the compiler may use vectors and every machine adds in one order.
float dot(const float* a, const float* b, std::int64_t count) {
    constexpr std::int64_t kSums = 16;
    float sums[kSums] = {};
    for (std::int64_t i = 0; i + kSums <= count; i += kSums) {
        for (std::int64_t k = 0; k < kSums; ++k) sums[k] += a[i + k] * b[i + k];
    }
    for (std::int64_t i = count / kSums * kSums; i < count; ++i) sums[i % kSums] += a[i] * b[i];
    float sum = 0;
    for (const float each : sums) sum += each;
    return sum;
}

void add_scaled(float* to, float factor, const float* from, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

/// Rows of a call's matrices as fp32.
class Rows {
public:
    Rows(const CpuContext& context, const CpuCall& call) : code_(context.code), call_(call), spec_(call.spec()) {}

    void load_hidden(std::int64_t token, float* to) const {
        code_.to_float(call_.pointer(Slot::hidden) + token * spec_.hidden_size * bytes_of(spec_.dtype), to, spec_.hidden_size);
    }
    /// The weight's row of a class, as products read it. `raw`: room for the row as memory has it.
    void load_weight(std::int64_t column, std::byte* raw, float* to) const {
        if (is_quantized(spec_)) {
            QuantizedWeight(call_).load(column, 0, spec_.hidden_size, to);
            return round(raw, to);
        }
        const std::int64_t bytes = bytes_of(weight_dtype(spec_));
        const std::byte* row = call_.pointer(Slot::weight);
        const std::int64_t d = spec_.hidden_size;
        if (spec_.layout == WeightLayout::hidden_major) {
            for (std::int64_t i = 0; i < d; ++i) {
                std::memcpy(raw + i * bytes, row + (i * spec_.padded_vocab_size + column) * bytes, static_cast<std::size_t>(bytes));
            }
            row = raw;
        } else {
            row += column * d * bytes;
        }
        if (rounds_weight(spec_)) {
            std::memcpy(to, row, static_cast<std::size_t>(4 * d));
            return round(raw, to);
        }
        code_.to_float(row, to, d);
    }
    [[nodiscard]] float bias(std::int64_t column) const {
        float value = 0;
        if (spec_.bias) code_.to_float(call_.pointer(Slot::bias) + column * bytes_of(spec_.dtype), &value, 1);
        return value;
    }

private:
    /// Rounds a row to the spec's dtype, as products round what they read.
    void round(std::byte* raw, float* to) const {
        code_.store_hidden(to, spec_.hidden_size, raw, spec_.hidden_size, 1, spec_.hidden_size);
        code_.to_float(raw, to, spec_.hidden_size);
    }
    static std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(element_bytes(dtype)); }

    const CpuFunctions& code_;
    const CpuCall& call_;
    const Spec& spec_;
};

/// Calls `visit(k, column)` with each class that the token names and this weight has.
template <class Visit>
void for_each_named(const CpuCall& call, std::int64_t token, const Visit& visit) {
    for (std::int64_t k = 0; k < call.spec().teacher_top_k; ++k) {
        const std::int64_t column = call.column_of(call.teacher_id(token, k));
        if (column >= 0) visit(k, column);
    }
}

/// The workspace's places of a worker.
struct Slots {
    Slots(const CpuSupportLayout& layout, std::byte* workspace, std::int64_t worker)
        : row(reinterpret_cast<float*>(workspace + layout.slot_offset + worker * layout.slot_bytes)),
          other(row + layout.depth),
          raw(reinterpret_cast<std::byte*>(other + layout.depth)),
          logits(other + 2 * layout.depth) {}

    float* row;
    float* other;
    std::byte* raw;  ///< 4 bytes for each number of a row
    float* logits;
};

class SupportForward {
public:
    SupportForward(const CpuContext& context, const CpuCall& call)
        : context_(context),
          call_(call),
          layout_(cpu_support_layout(call.spec(), context.plan, context.threads, call.num_tokens())),
          workspace_(call.pointer(Slot::workspace)),
          rows_(context, call),
          results_(call),
          teacher_(call),
          partial_sums_(call.spec(), call.pointer<float>(Slot::partial_sums), call.num_tokens()) {}

    void run() {
        call_.report_invalid_label();
        if (is_shard(call_.spec())) teacher_.clear_shard();
        auto* losses = reinterpret_cast<float*>(workspace_ + layout_.row_losses);
        const Blocks tasks = fixed_blocks(call_.num_tokens(), kTokensPerTask);
        context_.workers->run(tasks.count, layout_.slots, [&](std::int64_t task, std::int64_t worker) {
            const Slots slots(layout_, workspace_, worker);
            for (std::int64_t i = tasks.begin(task); i < tasks.begin(task) + tasks.length(task); ++i) losses[i] = token(slots, i);
        });
        if (is_shard(call_.spec())) return;
        for (std::int64_t i = 0; i < call_.num_tokens(); ++i) results_.add(losses[i], 0);
        results_.write_reduced(call_.mean_divisors());
    }

private:
    /// Writes a token's results, or a shard's sums of it; returns its loss.
    float token(const Slots& slots, std::int64_t i) const {
        const std::int64_t label = call_.valid_label(i);
        const bool shard = is_shard(call_.spec());
        if (label < 0) {
            if (shard) {
                const float none = -std::numeric_limits<float>::infinity();
                store_shard_sums(partial_sums_, i, sums_of_nothing(none, none), {});
            } else {
                teacher_.clear(i);
                results_.write_ignored(i);
            }
            return 0;
        }
        const RowSums sums = sums_of(slots, i, label);
        if (shard) {
            store_shard_sums(partial_sums_, i, sums, {});
            return 0;
        }
        return results_.write(i, sums, 1.F, teacher_.finish(i, sums)).cross_entropy;
    }

    [[nodiscard]] RowSums sums_of(const Slots& slots, std::int64_t i, std::int64_t label) const {
        constexpr float kNone = -std::numeric_limits<float>::infinity();
        const Spec& spec = call_.spec();
        const float temperature = call_.temperature(i);
        RowSums sums = sums_of_nothing(kNone, kNone);
        std::int64_t count = 0;
        rows_.load_hidden(i, slots.row);
        for_each_named(call_, i, [&](std::int64_t k, std::int64_t column) {
            rows_.load_weight(column, slots.raw, slots.other);
            const float x = dot(slots.row, slots.other, spec.hidden_size) + rows_.bias(column);
            const float capped = transform_logit<float>(spec, x, context_.transform_parameters).logit;
            const float logit = (capped + call_.class_offset(column)) / temperature;
            teacher_.keep_logit(i, k, logit);
            if (column == call_.column_of(label)) sums.target_logit = logit;
            sums.max = std::max({sums.max, logit, std::numeric_limits<float>::lowest()});
            slots.logits[count++] = logit;
        });
        for (std::int64_t at = 0; at < count; ++at) {
            const float below = slots.logits[at] - sums.max;
            const float e = std::exp(below);
            sums.exp_sum += e;
            sums.exp_z_sum += e * (below < farthest_below() ? farthest_below() : below);
        }
        return is_shard(spec) ? sums : of_support(sums);
    }

    const CpuContext& context_;
    const CpuCall& call_;
    const CpuSupportLayout layout_;
    std::byte* const workspace_;
    const Rows rows_;
    CpuRowResults results_;
    const CpuTeacher teacher_;
    const ShardSums<float> partial_sums_;
};

class SupportBackward {
public:
    SupportBackward(const CpuContext& context, const CpuCall& call)
        : context_(context),
          call_(call),
          spec_(call.spec()),
          layout_(cpu_support_layout(call.spec(), context.plan, context.threads, call.num_tokens())),
          workspace_(call.pointer(Slot::workspace)),
          rows_(context, call),
          teacher_(call),
          options_(call.loss_options()),
          divisors_(call.mean_divisors()) {}

    void run() const {
        if (static_cast<BackwardStage>(call_.value(Slot::stage)) == BackwardStage::rest) return;
        const Blocks tokens = fixed_blocks(call_.num_tokens(), kTokensPerTask);
        context_.workers->run(tokens.count, layout_.slots, [&](std::int64_t task, std::int64_t worker) {
            const Slots slots(layout_, workspace_, worker);
            for (std::int64_t i = tokens.begin(task); i < tokens.begin(task) + tokens.length(task); ++i) differentiate(slots, i);
        });
        if (!call_.has(Slot::grad_weight) && !call_.has(Slot::grad_bias)) return;
        if (spec_.grad_weight_mode == GradMode::write) clear_weight();
        sort_places();
        const Blocks bins = fixed_blocks(layout_.bins, kBinsPerTask);
        context_.workers->run(bins.count, layout_.slots, [&](std::int64_t task, std::int64_t worker) {
            const Slots slots(layout_, workspace_, worker);
            for (std::int64_t bin = bins.begin(task); bin < bins.begin(task) + bins.length(task); ++bin) write_bin(slots, bin);
        });
    }

private:
    [[nodiscard]] float* dlogits() const { return reinterpret_cast<float*>(workspace_ + layout_.dlogits); }
    /// Places with their classes by bins; a bin's are from starts[bin] to starts[bin + 1].
    [[nodiscard]] std::uint64_t* sorted() const { return reinterpret_cast<std::uint64_t*>(workspace_ + layout_.sorted); }
    static std::int64_t class_of(std::uint64_t sorted) { return static_cast<std::int64_t>(sorted >> 32U); }
    [[nodiscard]] std::uint32_t* starts() const { return reinterpret_cast<std::uint32_t*>(workspace_ + layout_.starts); }

    /// dz of a token's places, and its grad_hidden.
    void differentiate(const Slots& slots, std::int64_t i) const {
        const std::int64_t d = spec_.hidden_size;
        const std::int64_t label = call_.valid_label(i);
        const bool wants_hidden = call_.has(Slot::grad_hidden);
        if (wants_hidden) std::fill_n(slots.row, d, 0.F);
        if (label >= 0) {
            const RowUpstream upstream = upstream_of(call_, i, divisors_, options_);
            const float lse = call_.pointer<const float>(Slot::lse)[i];
            const RowCoefficients of_row =
                row_coefficients(upstream, lse, call_.element(Slot::entropy, i, 0.F), 1.F, teacher_.sum(i), options_);
            for_each_named(call_, i, [&](std::int64_t k, std::int64_t column) {
                const float dz = dz_of(i, k, column, of_row, lse, teacher_weight(upstream, options_));
                dlogits()[i * spec_.teacher_top_k + k] = dz;
                if (!wants_hidden) return;
                rows_.load_weight(column, slots.raw, slots.other);
                add_scaled(slots.row, dz, slots.other, d);
            });
        }
        if (!wants_hidden) return;
        const auto bytes = static_cast<std::int64_t>(element_bytes(grad_hidden_dtype(spec_)));
        const StoreTile store = grad_hidden_dtype(spec_) == spec_.dtype ? context_.code.store_hidden : context_.code.write_float;
        store(slots.row, d, call_.pointer(Slot::grad_hidden) + i * d * bytes, d, 1, d);
    }

    [[nodiscard]] float dz_of(std::int64_t i, std::int64_t k, std::int64_t column, const RowCoefficients& of_row, float lse,
                              float weight) const {
        const std::int64_t place = i * spec_.teacher_top_k + k;
        const float temperature = call_.temperature(i);
        const float logprob = call_.pointer<const float>(Slot::teacher_logprobs)[place];
        const float slope = slope_of_class(logit_slope(spec_), logprob, lse, temperature, call_.class_offset(column));
        const float probability = call_.pointer<const float>(Slot::teacher_probs)[place];
        const float p = std::exp(logprob);
        const float of_all = p * (of_row.a + of_row.b * logit_of_share(p, logprob + lse));
        return (of_all - weight * probability) * (slope / temperature);
    }

    void clear_weight() const {
        const auto bytes = static_cast<std::int64_t>(element_bytes(spec_.grad_weight_dtype));
        const std::int64_t rows = call_.value(Slot::weight_rows);
        const std::int64_t biases = is_shard(spec_) ? rows : spec_.vocab_size;
        const auto clear = [&](Slot gradient, std::int64_t elements) {
            if (call_.has(gradient)) std::memset(call_.pointer(gradient), 0, static_cast<std::size_t>(elements * bytes));
        };
        clear(Slot::grad_weight, rows * spec_.hidden_size);
        clear(Slot::grad_bias, biases);
    }

    /// Puts places into their bins.
    void sort_places() const {
        std::fill_n(starts(), layout_.bins + 2, 0U);
        // Numbers of places lie two behind their bin, so that a bin's start is where its next place goes while places are put there.
        for_all_places([&](std::int64_t, std::int64_t column) { ++starts()[(column >> layout_.bin_bits) + 2]; });
        for (std::int64_t bin = 0; bin < layout_.bins; ++bin) starts()[bin + 2] += starts()[bin + 1];
        for_all_places([&](std::int64_t place, std::int64_t column) {
            const auto of_class = static_cast<std::uint64_t>(column) << 32U;
            sorted()[starts()[(column >> layout_.bin_bits) + 1]++] = of_class | static_cast<std::uint64_t>(place);
        });
    }
    /// Writes the gradients of a bin's classes, whose terms are added up in the order of tokens.
    void write_bin(const Slots& slots, std::int64_t bin) const {
        std::uint64_t* const end = sorted() + starts()[bin + 1];
        std::uint64_t* begin = sorted() + starts()[bin];
        std::sort(begin, end);
        while (begin != end) {
            const std::int64_t column = class_of(*begin);
            std::uint64_t* const next = std::find_if(begin, end, [&](std::uint64_t place) { return class_of(place) != column; });
            write_class(slots, column, {begin, next});
            begin = next;
        }
    }
    template <class Visit>
    void for_all_places(const Visit& visit) const {
        for (std::int64_t i = 0; i < call_.num_tokens(); ++i) {
            if (call_.valid_label(i) < 0) continue;
            for_each_named(call_, i, [&](std::int64_t k, std::int64_t column) { visit(i * spec_.teacher_top_k + k, column); });
        }
    }

    void write_class(const Slots& slots, std::int64_t column, std::span<const std::uint64_t> places) const {
        const std::int64_t d = spec_.hidden_size;
        const auto bytes = static_cast<std::int64_t>(element_bytes(spec_.grad_weight_dtype));
        const bool wants_weight = call_.has(Slot::grad_weight);
        std::fill_n(slots.row, d, 0.F);
        float bias = 0;
        for (const std::uint64_t of_class : places) {
            const auto place = static_cast<std::int64_t>(of_class & 0xffffffffU);
            const float dz = dlogits()[place];
            bias += dz;
            if (!wants_weight) continue;
            rows_.load_hidden(place / spec_.teacher_top_k, slots.other);
            add_scaled(slots.row, dz, slots.other, d);
        }
        if (wants_weight) {
            const bool vocab_major = spec_.layout == WeightLayout::vocab_major;
            const std::int64_t at = column * (vocab_major ? d : 1);
            context_.code.store_weight(slots.row, d, call_.pointer(Slot::grad_weight) + at * bytes,
                                       vocab_major ? d : spec_.padded_vocab_size, 1, d);
        }
        if (call_.has(Slot::grad_bias)) context_.code.store_bias(&bias, 1, call_.pointer(Slot::grad_bias) + column * bytes, 1, 1, 1);
    }

    const CpuContext& context_;
    const CpuCall& call_;
    const Spec& spec_;
    const CpuSupportLayout layout_;
    std::byte* const workspace_;
    const Rows rows_;
    const CpuTeacher teacher_;
    const LossOptions options_;
    const MeanDivisors divisors_;
};

}  // namespace

void run_cpu_support_forward(const CpuContext& context, const CpuCall& call) { SupportForward(context, call).run(); }

void run_cpu_support_backward(const CpuContext& context, const CpuCall& call) { SupportBackward(context, call).run(); }

}  // namespace flce
