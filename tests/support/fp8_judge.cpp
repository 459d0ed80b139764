#include "tests/support/fp8_judge.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace flce::test {

std::string judge_gradient(const char* name, std::vector<double> got, std::vector<double> truth, const std::vector<double>& limit,
                           const std::vector<float>& old, double ties, double cap, double norm) {
    if (got.empty()) return {};
    if (got.size() != truth.size()) return fmt::format("\n  {}: {} numbers where {} are expected", name, got.size(), truth.size());
    double error2 = 0;
    double size2 = 0;
    for (std::size_t at = 0; at < got.size(); ++at) {
        if (!old.empty()) truth[at] += double(old[at]);
        size2 += std::isfinite(truth[at]) ? truth[at] * truth[at] : 0;
        if (!std::isfinite(truth[at])) {
            if (std::isfinite(got[at])) return fmt::format("\n  {}: [{}] is {}, should be {}", name, at, got[at], truth[at]);
            continue;
        }
        const double error = std::fabs(got[at] - truth[at]);
        if (!(error <= limit[at])) {
            return fmt::format("\n  {}: [{}] is {}, should be {}: off by {:.3e}, limit {:.3e}", name, at, got[at], truth[at], error,
                               limit[at]);
        }
        error2 += error * error;
    }
    const double bound = cap * std::max(std::sqrt(size2), norm) + 2 * ties;
    if (std::sqrt(error2) <= bound || std::sqrt(error2) < 1e-30) return {};
    return fmt::format("\n  {}: error {:.3e} over bound {:.3e}, norm {:.3e}", name, std::sqrt(error2), bound, std::sqrt(size2));
}

}  // namespace flce::test
