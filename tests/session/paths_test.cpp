// Paths of a GPU's plans that a session may not take: all but one by FLCE_PATH, and those that need a library which is not here.
#include <gmock/gmock.h>

#include "flce/error.hpp"
#include "tests/cache/cache_test_support.hpp"
#include "tests/session/fake_backend.hpp"

namespace flce {
namespace {

using test::FakeMachine;
using test::TemporaryDirectory;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::ThrowsMessage;

class SessionPathsTest : public testing::Test {
protected:
    Session session_on(const char* gpu) {
        machine_.gpus = {describe_device(gpu)};
        return SessionAccess::make({.device = "cuda", .cache_dir = directory_.path()}, environment_, machine_.backends());
    }
    PlanPath path_on(const char* gpu, const Spec& spec) { return session_on(gpu).get_kernel(spec)->plan().path; }

    TemporaryDirectory directory_;
    FakeMachine machine_;
    Environment environment_;
    const Spec spec_ = parse_spec("D=2048,V=50257,dtype=bf16");
};

TEST_F(SessionPathsTest, NoVariable_TheDevicesOwn) {
    EXPECT_EQ(path_on("h100", spec_), PlanPath::cuda_sm90a);
    EXPECT_EQ(path_on("b200", spec_), PlanPath::cuda_lt);
    EXPECT_EQ(path_on("a100", spec_), PlanPath::cuda_sm80);
    const Spec eight_bits = parse_spec("D=2048,V=50257,fp8");
    EXPECT_EQ(path_on("h100", eight_bits), PlanPath::cuda_fp8);
    EXPECT_EQ(path_on("l40s", eight_bits), PlanPath::cuda_fp8_sm89);
    EXPECT_EQ(path_on("l40s", spec_), PlanPath::cuda_sm80);
}

TEST_F(SessionPathsTest, Variable_TheOnlyOne) {
    for (const auto& [name, path] :
         {std::pair{"cuda_sm80", PlanPath::cuda_sm80}, {"cuda_sm90a", PlanPath::cuda_sm90a}, {"cuda_lt", PlanPath::cuda_lt}}) {
        environment_.path = name;
        EXPECT_EQ(path_on("h100", spec_), path);
    }
    environment_.path = "cuda_sm80";
    EXPECT_EQ(path_on("b200", spec_), PlanPath::cuda_sm80);
    environment_.path = "cuda_fp8_sm89";
    EXPECT_EQ(path_on("h100", parse_spec("D=2048,V=50257,fp8")), PlanPath::cuda_fp8_sm89);
}

TEST_F(SessionPathsTest, VariableWithoutAPlan_ErrorNamesItAndTheReason) {
    environment_.path = "cuda_sm90a";
    EXPECT_THAT([&] { (void)path_on("a100", spec_); },
                ThrowsMessage<PlanError>(AllOf(HasSubstr("FLCE_PATH is cuda_sm90a"), HasSubstr("D=2048,V=50257"))));
    environment_.path = "cuda_lt";
    EXPECT_THAT([&] { (void)path_on("h100", parse_spec("D=2048,V=50257,dtype=fp32")); },
                ThrowsMessage<PlanError>(AllOf(HasSubstr("FLCE_PATH is cuda_lt"), HasSubstr("fp32 runs on cuda_sm80"))));
}

TEST_F(SessionPathsTest, NoLibrary_TheGenericPathAndTheReason) {
    machine_.cublaslt = false;
    const auto kernel = session_on("b200").get_kernel(spec_);
    EXPECT_EQ(kernel->plan().path, PlanPath::cuda_sm80);
    EXPECT_THAT(kernel->explain().reasons,
                Contains(AllOf(HasSubstr("call cuBLASLt are passed over"), HasSubstr("cuBLASLt was not found"))));
    const PlanChoice there = session_on("h100").choose_plan(spec_, describe_device("b200"));
    EXPECT_EQ(there.plan.path, PlanPath::cuda_lt) << "nobody knows what a machine elsewhere has";
}

}  // namespace
}  // namespace flce
