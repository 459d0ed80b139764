// The first use of kernels on an architecture that flce has not run on: compared once per cache, and an error where results differ.
#include "runtime/first_use.hpp"

#include <gmock/gmock.h>

#include <cmath>
#include <thread>

#include "flce/error.hpp"
#include "runtime/layer/out_of_memory.hpp"
#include "tests/cache/cache_test_support.hpp"
#include "tests/session/fake_backend.hpp"

namespace flce {
namespace {

using test::FakeMachine;
using test::TemporaryDirectory;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

class FirstUseTest : public testing::Test {
protected:
    Session session_on(const char* gpu, SessionOptions options = {}) {
        machine_.gpus = {describe_device(gpu)};
        options.device = "cuda";
        if (options.cache_dir.empty()) options.cache_dir = directory_.path();
        return SessionAccess::make(options, environment_, machine_.backends());
    }
    void results_differ() {
        machine_.compare = [] { return std::vector<Difference>{{"lse", 1e-6, 1e-5}, {"grad_weight", 0.3, 8e-3}, {"loss", 2e-5, 1e-5}}; };
    }

    TemporaryDirectory directory_;
    FakeMachine machine_;
    Environment environment_;
    const Spec spec_ = parse_spec("D=2048,V=50257,dtype=bf16");
    const Spec other_ = parse_spec("D=1024,V=32000,dtype=bf16");
};

TEST_F(FirstUseTest, ArchitecturesWithRecords_AreNotCompared) {
    EXPECT_TRUE(ships_records_for("sm_90a"));
    EXPECT_FALSE(ships_records_for("sm_80"));
    for (const char* gpu : {"h100", "h200", "gh200"}) (void)session_on(gpu).get_kernel(spec_);
    EXPECT_EQ(machine_.compared, 0);
}

TEST_F(FirstUseTest, OncePerCache_ForAllLayersOfADtype) {
    {
        Session session = session_on("a100");
        (void)session.get_kernel(spec_);
        (void)session.get_kernel(other_);
        EXPECT_EQ(machine_.compared, 1);
    }
    (void)session_on("a100").get_kernel(spec_);
    EXPECT_EQ(machine_.compared, 1) << "the outcome lies in the cache";
    (void)session_on("a100").get_kernel(parse_spec("D=2048,V=50257,dtype=fp16"));
    EXPECT_EQ(machine_.compared, 2) << "another dtype has other instructions";
    (void)session_on("l40s").get_kernel(spec_);
    EXPECT_EQ(machine_.compared, 3) << "another GPU";
    machine_.driver_version = 13010;
    (void)session_on("a100").get_kernel(spec_);
    EXPECT_EQ(machine_.compared, 4) << "another driver";
    machine_.compilers = "NVRTC 13.1";
    (void)session_on("a100").get_kernel(spec_);
    EXPECT_EQ(machine_.compared, 5) << "code of another compiler";
    environment_.path = "cuda_lt";
    (void)session_on("a100").get_kernel(spec_);
    EXPECT_EQ(machine_.compared, 6) << "another path";
}

TEST_F(FirstUseTest, LayersWithOtherKernels_AreComparedThemselves) {
    Session session = session_on("a100");
    int compared = 0;
    for (const char* more : {"", ",layout=hidden_major", ",grad_weight_mode=accumulate", ",whole_vocab_size=100514"}) {
        (void)session.get_kernel(parse_spec(std::string("D=2048,V=50257,dtype=bf16") + more));
        EXPECT_EQ(machine_.compared, ++compared) << more;
    }
    Session tiny_first = session_on("a100", {.disk_cache = false});
    (void)tiny_first.get_kernel(parse_spec("D=64,V=500,dtype=bf16"));
    (void)tiny_first.get_kernel(spec_);
    EXPECT_EQ(machine_.compared, compared + 2) << "a tiny layer says nothing of others";
}

TEST_F(FirstUseTest, WithoutADirectory_OncePerSession) {
    Session session = session_on("a100", {.disk_cache = false});
    (void)session.get_kernel(spec_);
    (void)session.get_kernel(other_);
    EXPECT_EQ(machine_.compared, 1);
}

TEST_F(FirstUseTest, ManyThreads_CompareOnce) {
    Session session = session_on("a100");
    std::vector<std::jthread> threads;
    for (int i = 0; i < 8; ++i) {
        threads.emplace_back([&, i] { (void)session.get_kernel(i % 2 == 0 ? spec_ : other_); });
    }
    threads.clear();
    EXPECT_EQ(machine_.compared, 1);
}

TEST_F(FirstUseTest, ResultsDiffer_NoKernelAndTheWayRound) {
    results_differ();
    const auto names_the_way = ThrowsMessage<DeviceError>(
        AllOf(HasSubstr("kernels of cuda_sm80 on NVIDIA A100 (sm_80)"), HasSubstr("are wrong over 64 random tokens"),
              HasSubstr("grad_weight: differs from the CPU backend's by 0.3"), HasSubstr("FLCE_PATH=cuda_lt or device=\"cpu\""),
              HasSubstr("flce info --check --spec D=2048,V=50257"), Not(HasSubstr("FLCE_PATH=cuda_sm90a"))));
    EXPECT_THAT([&] { (void)session_on("a100").get_kernel(spec_); }, names_the_way);
    machine_.compare = nullptr;
    EXPECT_THROW((void)session_on("a100").get_kernel(other_), DeviceError) << "the outcome is kept";
    EXPECT_EQ(machine_.compared, 1);
    environment_.path = "cuda_lt";
    EXPECT_NO_THROW((void)session_on("a100").get_kernel(spec_)) << "the way round";
}

TEST_F(FirstUseTest, LibraryThatIsNotHere_IsNoWayRound) {
    results_differ();
    machine_.cublaslt = false;
    EXPECT_THAT([&] { (void)session_on("a100").get_kernel(spec_); },
                ThrowsMessage<DeviceError>(AllOf(HasSubstr("(device=\"cpu\")"), Not(HasSubstr("cuda_lt")))));
}

TEST_F(FirstUseTest, KernelThatTheDriverRefuses_NamesThePathAndTheWayRoundAndKeepsNothing) {
    machine_.compare = []() -> std::vector<Difference> { throw DeviceError("cuLaunchKernel failed: 715", "cuLaunchKernel", 715); };
    EXPECT_THAT([&] { (void)session_on("a100").get_kernel(spec_); },
                ThrowsMessage<DeviceError>(
                    AllOf(HasSubstr("kernels of cuda_sm80"), HasSubstr("cuLaunchKernel failed: 715"), HasSubstr("FLCE_PATH=cuda_lt"))));
    machine_.compare = nullptr;
    EXPECT_NO_THROW((void)session_on("a100").get_kernel(spec_));
    EXPECT_EQ(machine_.compared, 2);
}

TEST_F(FirstUseTest, ComparedByHand_AFaultStaysUntilItsOwnLayerAgrees) {
    results_differ();
    EXPECT_THROW((void)session_on("a100").get_kernel(spec_), DeviceError);
    machine_.compare = nullptr;
    environment_.cache_dir = directory_.path();
    std::string why;
    std::vector<PathCheck> checks = check_paths(other_, environment_, machine_.backends(), &why);
    ASSERT_EQ(checks.size(), 6U);
    EXPECT_EQ(checks[0].path, "cuda_sm80");
    EXPECT_EQ(checks[0].skipped + checks[0].fault, "");
    EXPECT_EQ(checks[0].other_fault, spec_.normalized().text());
    std::string skipped;
    for (const PathCheck& check : checks) skipped += check.skipped + "\n";
    EXPECT_THAT(skipped, HasSubstr("cuda_sm90a")) << "a path that cannot run there";
    EXPECT_THAT(skipped, AllOf(HasSubstr("cuda_gather"), HasSubstr("cuda_fp8"))) << "paths of other layers";
    EXPECT_THROW((void)session_on("a100").get_kernel(spec_), DeviceError);
    checks = check_paths(spec_, environment_, machine_.backends(), &why);
    EXPECT_EQ(checks[0].fault + checks[0].other_fault, "");
    EXPECT_NO_THROW((void)session_on("a100").get_kernel(spec_));
}

TEST_F(FirstUseTest, ProductsInEightBits_AreComparedForEachFormat) {
    const auto use = [&](const char* spec) { (void)session_on("l40s").get_kernel(parse_spec(spec)); };
    use("D=2048,V=50257,fp8");
    EXPECT_EQ(machine_.compared, 1);
    use("D=2048,V=50257");
    EXPECT_EQ(machine_.compared, 2) << "of another path";
    use("D=2048,V=50257,fp8=e4m3");
    EXPECT_EQ(machine_.compared, 3) << "another instruction";
    use("D=2048,V=32000,fp8=e4m3");
    EXPECT_EQ(machine_.compared, 3);
    results_differ();
    EXPECT_THAT(
        [&] { use("D=2048,V=50257,fp8=e4m3,fp8_dlogits=e4m3"); },
        ThrowsMessage<DeviceError>(AllOf(HasSubstr("kernels of cuda_fp8_sm89 on NVIDIA L40S (sm_89)"), HasSubstr("(device=\"cpu\")"))));
}

TEST_F(FirstUseTest, ComparedByHandOnTwoGpus_TheIllOneCounts) {
    for (const int ill : {0, 1}) {
        TemporaryDirectory directory;
        environment_.cache_dir = directory.path();
        machine_.gpus = {describe_device("a100"), describe_device("a100")};
        int call = 0;
        machine_.compare = [&call, ill] {  // each GPU has two paths
            const bool is_ill = call++ / 2 == ill;
            return std::vector<Difference>{{"loss", is_ill ? 1.0 : 0.0, 1e-5}};
        };
        std::string why;
        const auto checks = check_paths(spec_, environment_, machine_.backends(), &why);
        ASSERT_EQ(checks.size(), 12U);
        EXPECT_NE(checks[static_cast<std::size_t>(6 * ill)].fault, "");
        EXPECT_EQ(checks[static_cast<std::size_t>(6 - 6 * ill)].fault, "");
        machine_.compare = nullptr;
        EXPECT_THROW((void)session_on("a100", {.cache_dir = directory.path()}).get_kernel(spec_), DeviceError) << ill;
    }
}

TEST_F(FirstUseTest, ComparedByHandWithoutAGpu_SaysWhy) {
    std::string why;
    EXPECT_TRUE(check_paths(spec_, environment_, machine_.backends(), &why).empty());
    EXPECT_EQ(why, "there is no driver");
}

TEST_F(FirstUseTest, NamedPlan_IsNotCompared) {
    Session session = session_on("a100");
    const std::string plan = choose_plan(spec_, describe_device("a100")).text();
    (void)session.get_kernel(spec_, {.plan = plan});
    EXPECT_EQ(machine_.compared, 0) << "the tuner judges its candidates itself";
}

TEST_F(FirstUseTest, NoMemory_AKernelAndNothingKept) {
    machine_.compare = []() -> std::vector<Difference> { throw OutOfMemory("weight [50257, 2048]", 2e8, {DeviceKind::cuda, 0}); };
    EXPECT_NE(session_on("a100").get_kernel(spec_), nullptr);
    machine_.compare = nullptr;
    (void)session_on("a100").get_kernel(spec_);
    EXPECT_EQ(machine_.compared, 2);
}

TEST_F(FirstUseTest, Strict_AsksForTheOutcomeAndCompilesNothing) {
    results_differ();
    EXPECT_THROW((void)session_on("a100").get_kernel(spec_), DeviceError);
    EXPECT_THROW((void)session_on("a100", {.strict = true}).get_kernel(spec_), DeviceError);
    EXPECT_EQ(machine_.compared, 1);
    machine_.driver_version = 13010;
    EXPECT_NE(session_on("a100", {.strict = true}).get_kernel(spec_), nullptr) << "nothing is known, and nothing is compiled";
    EXPECT_EQ(machine_.compared, 1);
}

TEST(FaultOf, WorstDifference_NaNAboveAll) {
    EXPECT_EQ(fault_of({}), "");
    EXPECT_EQ(fault_of({{"loss", 1e-6, 1e-6}}), "");
    EXPECT_THAT(fault_of({{"loss", 2e-6, 1e-6}, {"lse", 9e-6, 1e-6}}), HasSubstr("lse: differs"));
    EXPECT_THAT(fault_of({{"loss", 2e6, 1e-6}, {"lse", std::nan(""), 1e-6}}), HasSubstr("lse: differs"));
}

}  // namespace
}  // namespace flce
