#include "runtime/cpu/divergence.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <span>

#include "generator/logit_transforms.hpp"

namespace flce {
namespace {

std::vector<float> parameters_of(const Spec& spec) {
    std::vector<float> parameters;
    for (const double value : transform_parameters(spec)) parameters.push_back(static_cast<float>(value));
    return parameters;
}

TransformedLogit<float> transformed(const Spec& spec, std::span<const float> parameters, const float* bias, std::int64_t column, float x) {
    return transform_logit<float>(spec, spec.bias ? x + bias[column] : x, parameters);
}

}  // namespace

CpuDivergence::CpuDivergence(const CpuCall& call)
    : call_(call),
      student_(call.spec()),
      teacher_(teacher_head(call.spec())),
      form_(divergence_form(call.spec().divergence_beta)),
      beta_(static_cast<float>(call.spec().divergence_beta)),
      student_parameters_(parameters_of(student_)),
      teacher_parameters_(parameters_of(teacher_)) {}

void CpuDivergence::to_logits(const WorkerSlot& slot, std::int64_t token, std::int64_t at, std::int64_t columns) const {
    const float temperature = call_.temperature(token);
    float* student = slot.tile + at;
    float* teacher = slot.teacher_tile + at;
    for (std::int64_t j = 0; j < columns; ++j) {
        student[j] = transformed(student_, student_parameters_, slot.bias, j, student[j]).logit / temperature;
        teacher[j] = transformed(teacher_, teacher_parameters_, slot.teacher_bias, j, teacher[j]).logit / temperature;
    }
}

DivergenceSums CpuDivergence::sums(const float* student, const float* teacher, std::int64_t columns) {
    DivergenceSums sums = divergence_of_nothing();
    for (std::int64_t j = 0; j < columns; ++j) {
        sums.student.max = std::max(sums.student.max, student[j]);
        sums.teacher.max = std::max(sums.teacher.max, teacher[j]);
    }
    for (std::int64_t j = 0; j < columns; ++j) {
        const float student_below = student[j] - sums.student.max;
        const float teacher_below = teacher[j] - sums.teacher.max;
        const float gap = teacher_below - student_below;
        add_class(sums.student, std::exp(student_below), student_below, gap);
        add_class(sums.teacher, std::exp(teacher_below), teacher_below, gap);
    }
    return sums;
}

MixtureTerm CpuDivergence::mixture(const float* student, const float* teacher, std::int64_t columns, float lse, float teacher_lse) const {
    MixtureTerm sum{0.F, 0.F};
    for (std::int64_t j = 0; j < columns; ++j) {
        const MixtureTerm term = mixture_term<ExactDivergence>(student[j] - lse, teacher[j] - teacher_lse, beta_);
        sum.divergence += term.divergence;
        sum.student += term.student;
    }
    return sum;
}

void CpuDivergence::differentiate(const WorkerSlot& slot, const GradRow& row, std::int64_t token, std::int64_t at,
                                  std::int64_t columns) const {
    const float teacher_lse = call_.pointer<const float>(Slot::teacher_lse)[token];
    const float of_row = call_.pointer<const float>(Slot::student_divergence)[token];
    const float upstream = row.coefficients.a / row.temperature;
    float* student = slot.tile + at;
    const float* teacher = slot.teacher_tile + at;
    for (std::int64_t j = 0; j < columns; ++j) {
        const auto z = transformed(student_, student_parameters_, slot.bias, j, student[j]);
        const float of_teacher = transformed(teacher_, teacher_parameters_, slot.teacher_bias, j, teacher[j]).logit / row.temperature;
        const float slope =
            divergence_slope<ExactDivergence>(form_, z.logit / row.temperature - row.lse, of_teacher - teacher_lse, of_row, beta_);
        student[j] = upstream * slope * z.derivative;
    }
}

void CpuDivergence::write(const CpuRowResults& results, std::int64_t token, const DivergenceSums& sums) const {
    DivergenceRow row{};
    if (call_.valid_label(token) >= 0) row = divergence_row(sums, form_ == kReverse);
    results.write(token, {.lse = row.lse, .entropy = row.entropy});
    call_.pointer<float>(Slot::teacher_lse)[token] = row.teacher_lse;
    if (call_.has(Slot::teacher_entropy)) call_.pointer<float>(Slot::teacher_entropy)[token] = row.teacher_entropy;
    call_.pointer<float>(Slot::student_divergence)[token] = row.kl;
}

void CpuDivergence::write_loss(CpuRowResults& results, std::int64_t token, const MixtureTerm& mixture) const {
    float& of_student = call_.pointer<float>(Slot::student_divergence)[token];
    float divergence = of_student;
    if (form_ == kMixture) {
        divergence = mixture.divergence;
        of_student = mixture.student;
    }
    const float loss = call_.valid_label(token) >= 0 ? divergence * call_.token_weight(token) : 0.F;
    results.add(loss, 0);
    if (call_.reduction() != ReductionCode::none) return;
    if (call_.has(Slot::loss)) call_.pointer<float>(Slot::loss)[token] = loss;
    if (call_.has(Slot::z_loss)) call_.pointer<float>(Slot::z_loss)[token] = 0;
}

namespace {

MixtureTerm merge(const MixtureTerm& a, const MixtureTerm& b) { return {a.divergence + b.divergence, a.student + b.student}; }

/// Sums as numbers of a token's fields in partial_sums.
template <class Sums>
void store_numbers(const CpuCall& call, std::int64_t token, const Sums& sums) {
    const auto numbers = std::bit_cast<std::array<float, sizeof(Sums) / sizeof(float)>>(sums);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        call.pointer<float>(Slot::partial_sums)[static_cast<std::int64_t>(i) * call.num_tokens() + token] = numbers[i];
    }
}
/// A token's sums of all shards.
template <class Sums>
Sums merged_numbers(const CpuCall& call, std::int64_t token) {
    constexpr std::int64_t kFields = sizeof(DivergenceSums) / sizeof(float);
    Sums all{};
    for (std::int64_t shard = 0; shard < call.value(Slot::num_shards); ++shard) {
        std::array<float, sizeof(Sums) / sizeof(float)> numbers{};
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            const std::int64_t field = shard * kFields + static_cast<std::int64_t>(i);
            numbers[i] = call.pointer<const float>(Slot::all_partial_sums)[field * call.num_tokens() + token];
        }
        const auto sums = std::bit_cast<Sums>(numbers);
        all = shard == 0 ? sums : merge(all, sums);
    }
    return all;
}

class DivergencePass {
public:
    DivergencePass(const CpuContext& context, const CpuCall& call)
        : context_(context),
          plan_(context.plan.cpu),
          call_(call),
          spec_(call.spec()),
          layout_(cpu_forward_layout(spec_, context.plan, context.threads, call.num_tokens(), call.vocab_columns())),
          workspace_(call.pointer(Slot::workspace)),
          student_{workspace_ + layout_.hidden_panels, depth_units(plan_, spec_.hidden_size)},
          teacher_{workspace_ + layout_.teacher_panels, depth_units(plan_, spec_.teacher_hidden_size)},
          divergence_(call),
          results_(call) {}

    void run() {
        call_.report_invalid_label();
        for (std::int64_t block = 0; block < layout_.row_blocks.count; ++block) {
            const std::int64_t begin = layout_.row_blocks.begin(block);
            const std::int64_t rows = layout_.row_blocks.length(block);
            pack_hidden_rows(context_, call_, Slot::hidden, student_, begin, rows);
            pack_hidden_rows(context_, call_, Slot::teacher_hidden, teacher_, begin, rows);
            if (is_shard(spec_)) {
                sums_of_shard(begin, rows);
            } else {
                outputs_of(begin, rows);
            }
        }
        if (!is_shard(spec_)) results_.write_reduced(call_.mean_divisors());
    }

private:
    template <class Sums>
    [[nodiscard]] Sums* sums_of_group(std::int64_t group, std::int64_t rows) const {
        static_assert(sizeof(Sums) <= sizeof(DivergenceSums));
        return reinterpret_cast<Sums*>(workspace_ + layout_.partial_sums) + group * rows;
    }
    template <class Sums>
    [[nodiscard]] Sums merged(std::int64_t i, std::int64_t rows) const {
        Sums all = sums_of_group<Sums>(0, rows)[i];
        for (std::int64_t group = 1; group < layout_.strip_groups.count; ++group) all = merge(all, sums_of_group<Sums>(group, rows)[i]);
        return all;
    }

    void outputs_of(std::int64_t begin, std::int64_t rows) {
        walk_of_sums(begin, rows);
        for (std::int64_t i = 0; i < rows; ++i) {
            const bool valid = call_.valid_label(begin + i) >= 0;
            divergence_.write(results_, begin + i, valid ? merged<DivergenceSums>(i, rows) : divergence_of_nothing());
        }
        if (divergence_.form() == kMixture) walk_of_mixture(begin, rows);
        for (std::int64_t i = 0; i < rows; ++i) {
            const bool mixes = divergence_.form() == kMixture && call_.valid_label(begin + i) >= 0;
            divergence_.write_loss(results_, begin + i, mixes ? merged<MixtureTerm>(i, rows) : MixtureTerm{0.F, 0.F});
        }
    }

    /// Sums of a shard's classes, for merge.
    void sums_of_shard(std::int64_t begin, std::int64_t rows) {
        const bool mixture = call_.value(Slot::walk) == static_cast<std::int64_t>(WalkCode::mixture);
        if (mixture) {
            walk_of_mixture(begin, rows);
        } else {
            walk_of_sums(begin, rows);
        }
        for (std::int64_t i = 0; i < rows; ++i) {
            const bool any = call_.valid_label(begin + i) >= 0 && layout_.strip_groups.count > 0;
            if (mixture) {
                store_numbers(call_, begin + i, any ? merged<MixtureTerm>(i, rows) : MixtureTerm{0.F, 0.F});
            } else {
                store_numbers(call_, begin + i, any ? merged<DivergenceSums>(i, rows) : divergence_of_nothing());
            }
        }
    }

    void walk_of_sums(std::int64_t begin, std::int64_t rows) {
        walk<DivergenceSums>(begin, rows, divergence_of_nothing(),
                             [&](const WorkerSlot& slot, std::int64_t, std::int64_t at, auto columns) {
                                 return CpuDivergence::sums(slot.tile + at, slot.teacher_tile + at, columns);
                             });
    }
    /// The second walk of a mixture, once both normalizers are known.
    void walk_of_mixture(std::int64_t begin, std::int64_t rows) {
        const float* lse = call_.pointer<const float>(Slot::lse);
        const float* teacher_lse = call_.pointer<const float>(Slot::teacher_lse);
        walk<MixtureTerm>(begin, rows, {0.F, 0.F}, [&](const WorkerSlot& slot, std::int64_t token, std::int64_t at, auto columns) {
            return divergence_.mixture(slot.tile + at, slot.teacher_tile + at, columns, lse[token], teacher_lse[token]);
        });
    }

    /// Sums of every row over each group of strips: `of_row(slot, token, at, columns)` has those of a row of a strip.
    template <class Sums, class OfRow>
    void walk(std::int64_t begin, std::int64_t rows, const Sums& nothing, const OfRow& of_row) {
        const Blocks tiles = row_tiles(plan_, rows);
        context_.workers->run(tiles.count * layout_.strip_groups.count, layout_.slots, [&](std::int64_t task, std::int64_t worker) {
            const WorkerSlot slot(layout_.slot, workspace_ + layout_.slot_offset + worker * layout_.slot.bytes);
            const std::int64_t group = task / tiles.count;
            const std::int64_t tile = task % tiles.count;
            TileRange range{.row = tiles.begin(tile), .rows = tiles.length(tile)};
            Sums* sums = sums_of_group<Sums>(group, rows) + range.row;
            std::fill_n(sums, range.rows, nothing);
            const std::int64_t first = layout_.strip_groups.begin(group);
            for (std::int64_t strip = first; strip < first + layout_.strip_groups.length(group); ++strip) {
                range.columns = layout_.strips.length(strip);
                multiply(slot, layout_.strips.begin(strip), range);
                for (std::int64_t i = 0; i < range.rows; ++i) {
                    const std::int64_t token = begin + range.row + i;
                    if (call_.valid_label(token) < 0) continue;
                    const std::int64_t at = i * plan_.block_n;
                    divergence_.to_logits(slot, token, at, range.columns);
                    sums[i] = merge(sums[i], of_row(slot, token, at, range.columns));
                }
            }
        });
    }

    void multiply(const WorkerSlot& slot, std::int64_t vocab, const TileRange& range) const {
        slot.load_strip(context_, call_, vocab, range.columns);
        multiply_tile(context_.code, plan_, student_, weight_for_logits(context_, call_, slot, vocab), range, spec_.hidden_size,
                      slot.b_block, slot.tile);
        multiply_tile(context_.code, plan_, teacher_, teacher_weight_for_logits(context_, call_, vocab), range, spec_.teacher_hidden_size,
                      slot.b_block, slot.teacher_tile);
    }

    const CpuContext& context_;
    const CpuPlan& plan_;
    const CpuCall& call_;
    const Spec& spec_;
    const CpuForwardLayout layout_;
    std::byte* const workspace_;
    const PackedA student_, teacher_;
    const CpuDivergence divergence_;
    CpuRowResults results_;
};

}  // namespace

void run_cpu_divergence(const CpuContext& context, const CpuCall& call) { DivergencePass(context, call).run(); }

void run_cpu_divergence_merge(const CpuCall& call) {
    const CpuDivergence divergence(call);
    CpuRowResults results(call);
    const bool mixture = call.value(Slot::walk) == static_cast<std::int64_t>(WalkCode::mixture);
    call.report_invalid_label();
    for (std::int64_t token = 0; token < call.num_tokens(); ++token) {
        const bool valid = call.valid_label(token) >= 0;
        if (!mixture) divergence.write(results, token, valid ? merged_numbers<DivergenceSums>(call, token) : divergence_of_nothing());
        if (!mixture && divergence.form() == kMixture) continue;  // the second walk has the loss
        divergence.write_loss(results, token, mixture && valid ? merged_numbers<MixtureTerm>(call, token) : MixtureTerm{0.F, 0.F});
    }
    if (mixture || divergence.form() != kMixture) results.write_reduced(call.mean_divisors());
}

}  // namespace flce
