// The plans that a search can reach: legal ones that differ from another in one place.
#pragma once

#include <string>
#include <vector>

#include "flce/plan.hpp"

namespace flce {

/// A place in which plans differ: a GEMM's tile, the vocabulary chunk, the order of tiles; the CPU's blocks.
struct Coordinate {
    std::string name;
    std::vector<Plan> plans;  ///< legal, the given one first, the others as the cost model expects them
};

/// Names of all coordinates that plans for such a device can have.
[[nodiscard]] std::vector<std::string> coordinate_names(DeviceKind kind);

/// Every coordinate of `plan`, or the coordinates named in `only`; coordinates that matter most come first. Precondition: plan is legal.
[[nodiscard]] std::vector<Coordinate> coordinates(const Spec& spec, const Device& device, const Plan& plan,
                                                  const std::vector<std::string>& only = {});

/// Every combination of them, at most `most` (those nearest to `plan`), in the cost model's order; `plan` first.
[[nodiscard]] std::vector<Plan> all_combinations(const Spec& spec, const Device& device, const Plan& plan,
                                                 const std::vector<std::string>& only, std::size_t most);

/// The first candidates in the cost model's order, where a search begins: `count` of the favourite's path and strategy, one of each other.
/// `library_version`: of the cuBLASLt that is here; 0: there is none, and no plan calls it but where it is the favourite.
[[nodiscard]] std::vector<Plan> seed_plans(const Spec& spec, const Device& device, const PlanRequest& request, std::size_t count,
                                           int library_version = 0);

/// Plans that have, between them, every kernel that a search from `plan` along these coordinates can come to; `plan` is the first, and each
/// of the others is one change away from one before it. A kernel is compiled code, so plans that differ in sizes alone (chunks, a CPU's
/// blocks) share theirs.
[[nodiscard]] std::vector<Plan> covering_plans(const Spec& spec, const Device& device, const Plan& plan,
                                               const std::vector<std::string>& only);

/// Places in the fixed order that decides between equals: the planner's candidates, then everything else.
class PlanOrder {
public:
    PlanOrder(const Spec& spec, const Device& device, const PlanRequest& request);
    [[nodiscard]] int rank(const Plan& plan) const;

private:
    std::vector<Plan> candidates_;
};

}  // namespace flce
