// The devices that the tests run on, and kernels for them.
#pragma once

#include <memory>
#include <ostream>
#include <string>

#include "flce/flce.hpp"

namespace flce::test {

enum class Target : std::uint8_t { cpu, gpu };

/// "Cpu" or "Gpu": the prefix of test instances, by which they are labelled.
[[nodiscard]] const char* to_string(Target target);
inline std::ostream& operator<<(std::ostream& out, Target target) { return out << to_string(target); }

/// Why there are no tests on `target` here: no such device, or FLCE_TEST_DEVICE ("cpu", "cuda", "cuda:1") names the other. Empty: there
/// are.
[[nodiscard]] const std::string& skip_reason(Target target);

/// A kernel of the target's session, whose disk cache is in the folder FLCE_TEST_CACHE; without it there is none. `plan` or, without it,
/// FLCE_TEST_PLAN replaces the planner's choice where it is legal. FLCE_TEST_PATH names a path ("cuda_sm80") whose best plan replaces it,
/// where the path has one.
[[nodiscard]] std::shared_ptr<const Kernel> kernel_on(Target target, const Spec& spec, const std::string& plan = {});

/// Text of the planner's best plan of a GPU's path; empty where the path has none.
[[nodiscard]] std::string plan_on_path(const Spec& spec, PlanPath path);

/// The device of a target's session.
[[nodiscard]] const Device& device_of(Target target);

}  // namespace flce::test

/// First line of a test that runs kernels.
#define FLCE_REQUIRE_TARGET(target) \
    if (!::flce::test::skip_reason(target).empty()) GTEST_SKIP() << ::flce::test::skip_reason(target)
