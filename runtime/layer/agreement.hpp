// Two kernels' results for one layer, beside each other: what the first use of a GPU's kernels is judged by.
#pragma once

#include <string>
#include <vector>

#include "flce/flce.hpp"

namespace flce {

/// Tokens of the step that is compared.
inline constexpr std::int64_t kComparedTokens = 64;

/// Difference of one output or gradient, in the Frobenius norm and relative to the reference's; of top1: the share of other classes.
struct Difference {
    std::string output;  ///< "loss", "grad_weight", …; "grad_weight, nothing retained" and the like where that matters
    double relative = 0;
    double allowed = 0;  ///< twice the cap of docs/numerics.md: either result may be so far from the exact one
    [[nodiscard]] bool passed() const { return relative <= allowed; }  // NaN does not pass
};

/// Forward and backward of `kernel` beside those of `reference`, a kernel of an equal Spec, over the same random tokens, some of which are
/// ignored: with nothing retained, and with exponentials in grad_weight's memory, or in memory of their own where the kernel cannot lend
/// that. Throws OutOfMemory where either side has no memory for it, SpecError for a shard whose weight is padded and where the reference's
/// results are not finite, and DeviceError.
[[nodiscard]] std::vector<Difference> compare_steps(const Kernel& kernel, const Kernel& reference);

/// A sentence that names the output which differs most beyond what is allowed, and by how much; empty where all results agree.
[[nodiscard]] std::string fault_of(const std::vector<Difference>& differences);

}  // namespace flce
