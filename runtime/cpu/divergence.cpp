#include "runtime/cpu/divergence.hpp"

#include <algorithm>
#include <span>

#include "generator/logit_transforms.hpp"
#include "runtime/cpu/row_results.hpp"

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

namespace {

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
            walk<DivergenceSums>(begin, rows, divergence_of_nothing(),
                                 [&](const WorkerSlot& slot, std::int64_t, std::int64_t at, auto columns) {
                                     return CpuDivergence::sums(slot.tile + at, slot.teacher_tile + at, columns);
                                 });
            for (std::int64_t i = 0; i < rows; ++i) finish_row(begin + i, merged<DivergenceSums>(i, rows));
            if (divergence_.form() == kMixture) mixture_of(begin, rows);
            for (std::int64_t i = 0; i < rows; ++i) write_loss(begin + i, i);
        }
        results_.write_reduced(call_.mean_divisors());
    }

private:
    static MixtureTerm merge(const MixtureTerm& a, const MixtureTerm& b) { return {a.divergence + b.divergence, a.student + b.student}; }
    static DivergenceSums merge(const DivergenceSums& a, const DivergenceSums& b) { return flce::merge(a, b); }

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
        multiply_tile(context_.code, plan_, student_, weight_for_logits(context_, call_, vocab), range, spec_.hidden_size, slot.b_block,
                      slot.tile);
        multiply_tile(context_.code, plan_, teacher_, teacher_weight_for_logits(context_, call_, vocab), range, spec_.teacher_hidden_size,
                      slot.b_block, slot.teacher_tile);
    }

    void finish_row(std::int64_t token, const DivergenceSums& sums) const {
        DivergenceRow row{};
        if (call_.valid_label(token) >= 0) row = divergence_row(sums, divergence_.form() == kReverse);
        results_.write(token, {.lse = row.lse, .entropy = row.entropy});
        call_.pointer<float>(Slot::teacher_lse)[token] = row.teacher_lse;
        if (call_.has(Slot::teacher_entropy)) call_.pointer<float>(Slot::teacher_entropy)[token] = row.teacher_entropy;
        call_.pointer<float>(Slot::student_divergence)[token] = row.kl;
    }

    /// Divergences of a mixture: a second walk, now that both normalizers are known. Row i's is then in `divergences_`.
    void mixture_of(std::int64_t begin, std::int64_t rows) {
        const float* lse = call_.pointer<const float>(Slot::lse);
        const float* teacher_lse = call_.pointer<const float>(Slot::teacher_lse);
        walk<MixtureTerm>(begin, rows, {0.F, 0.F}, [&](const WorkerSlot& slot, std::int64_t token, std::int64_t at, auto columns) {
            return divergence_.mixture(slot.tile + at, slot.teacher_tile + at, columns, lse[token], teacher_lse[token]);
        });
        auto* divergences = reinterpret_cast<float*>(workspace_ + layout_.row_losses);
        for (std::int64_t i = 0; i < rows; ++i) {
            const bool valid = call_.valid_label(begin + i) >= 0;
            const MixtureTerm sum = valid ? merged<MixtureTerm>(i, rows) : MixtureTerm{0.F, 0.F};
            divergences[i] = sum.divergence;
            call_.pointer<float>(Slot::student_divergence)[begin + i] = sum.student;
        }
    }

    void write_loss(std::int64_t token, std::int64_t i) {
        float loss = 0;
        if (call_.valid_label(token) >= 0) {
            const float divergence = divergence_.form() == kMixture ? reinterpret_cast<const float*>(workspace_ + layout_.row_losses)[i]
                                                                    : call_.pointer<const float>(Slot::student_divergence)[token];
            loss = divergence * call_.token_weight(token);
        }
        results_.add(loss, 0);
        if (call_.reduction() != ReductionCode::none) return;
        if (call_.has(Slot::loss)) call_.pointer<float>(Slot::loss)[token] = loss;
        if (call_.has(Slot::z_loss)) call_.pointer<float>(Slot::z_loss)[token] = 0;
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

}  // namespace flce
