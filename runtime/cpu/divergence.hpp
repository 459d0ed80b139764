// The divergence from a teacher's head on the CPU: logits of both heads from their products, what forward sums up of a row of them, and
// backward's gradient.
#pragma once

#include <vector>

#include "runtime/cpu/cpu_call.hpp"
#include "runtime/cpu/passes.hpp"
#include "runtime/cpu/row_results.hpp"
#include "templates/common/divergence_math.cuh"

namespace flce {

class CpuDivergence {
public:
    explicit CpuDivergence(const CpuCall& call);

    [[nodiscard]] DivergenceForm form() const { return form_; }
    [[nodiscard]] float beta() const { return beta_; }

    /// Rows of both tiles, `at` elements from their beginning, become logits of `token`.
    void to_logits(const WorkerSlot& slot, std::int64_t token, std::int64_t at, std::int64_t columns) const;
    /// Sums of rows of logits.
    [[nodiscard]] static DivergenceSums sums(const float* student, const float* teacher, std::int64_t columns);
    /// Part of a mixture's divergences that such rows have.
    [[nodiscard]] MixtureTerm mixture(const float* student, const float* teacher, std::int64_t columns, float lse, float teacher_lse) const;

    /// Writes a token's outputs from its sums over all classes, and then its loss. `mixture`: sums of the second walk, where there is one.
    void write(const CpuRowResults& results, std::int64_t token, const DivergenceSums& sums) const;
    void write_loss(CpuRowResults& results, std::int64_t token, const MixtureTerm& mixture) const;

    /// The student's row of hidden · weightᵀ becomes its gradient.
    void differentiate(const WorkerSlot& slot, const GradRow& row, std::int64_t token, std::int64_t at, std::int64_t columns) const;

private:
    const CpuCall& call_;
    const Spec& student_;
    const Spec teacher_;
    const DivergenceForm form_;
    const float beta_;
    std::vector<float> student_parameters_, teacher_parameters_;
};

}  // namespace flce
