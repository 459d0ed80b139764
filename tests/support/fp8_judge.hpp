// Judging the gradients of an FP8 head.
#pragma once

#include <string>
#include <vector>

namespace flce::test {

/// One gradient: each number within its limit, and the whole within the dtype's cap and what ties add. `norm`: of the parts of a sum.
[[nodiscard]] std::string judge_gradient(const char* name, std::vector<double> got, std::vector<double> truth,
                                         const std::vector<double>& limit, const std::vector<float>& old, double ties, double cap,
                                         double norm = 0);

}  // namespace flce::test
