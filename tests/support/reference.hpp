// The yardstick: what a framework computes in the Spec's dtype with fp32 logits. Inputs in the dtype, logits and softmax in fp32, the
// logits' gradient rounded to the dtype, products accumulated in fp32 in slices, gradients rounded to the dtype that they are stored in.
#pragma once

#include "tests/support/error_budget.hpp"
#include "tests/support/oracle.hpp"

namespace flce::test {

struct Reference {
    Result result;  ///< stored numbers: rounded, gradients accumulated into the buffers' contents
    Budgets budgets;
};

/// Same selection and `known` as the oracle; `summation` as on the device that it is the yardstick for (summation_of).
[[nodiscard]] Reference reference(const Problem& problem, const Selection& selection, const KnownTokens& known = {},
                                  Summation summation = Summation::rounding);

}  // namespace flce::test
