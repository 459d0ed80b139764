// The communicator over NCCL, with a library that stands in for it.
#include <gmock/gmock.h>

#include <array>
#include <cstdlib>
#include <filesystem>

#include "flce/parallel.hpp"

namespace flce::test {
namespace {

// Before anything reads the environment.
[[maybe_unused]] const int kNamed = setenv("FLCE_NCCL", FLCE_FAKE_NCCL, 0);

struct FakeComm {  // tests/parallel/fake_nccl.c
    int result = 0;
    int calls = 0;
    int type = -1;
    int operation = -1;
    std::size_t count = 0;
};

/// The library is made with the tests and does not travel with them.
#define FLCE_REQUIRE_FAKE_NCCL() \
    if (!std::filesystem::exists(std::getenv("FLCE_NCCL"))) GTEST_SKIP() << std::getenv("FLCE_NCCL") << " is not here"

TEST(NcclCommunicator, Functions_ReachNcclWithTheirTypes) {
    FLCE_REQUIRE_FAKE_NCCL();
    FakeComm comm;
    const Communicator ranks = nccl_communicator(&comm);
    EXPECT_EQ(ranks.size, 1);
    EXPECT_EQ(ranks.rank, 0);
    std::array<float, 4> from{1, 2, 3, 4};
    std::array<float, 4> to{};
    ranks.all_gather(from.data(), to.data(), sizeof(from), {});
    EXPECT_EQ(to, from);
    EXPECT_EQ(comm.type, 0);  // bytes
    EXPECT_EQ(comm.count, sizeof(from));
    const std::array<std::pair<DType, int>, 3> types{{{DType::bf16, 9}, {DType::fp16, 6}, {DType::fp32, 7}}};
    for (const auto& [dtype, code] : types) {
        ranks.all_reduce(to.data(), 2, dtype, {});
        EXPECT_EQ(comm.type, code);
        EXPECT_EQ(comm.operation, 0);  // the sum
        EXPECT_EQ(comm.count, 2U);
        ranks.reduce_scatter(from.data(), to.data(), 1, dtype, {});
        EXPECT_EQ(comm.type, code);
        EXPECT_EQ(comm.count, 1U);
    }
    EXPECT_EQ(comm.calls, 7);
}

TEST(NcclCommunicator, Failure_IsADeviceErrorInNcclsWords) {
    FLCE_REQUIRE_FAKE_NCCL();
    FakeComm comm;
    const Communicator ranks = nccl_communicator(&comm);
    comm.result = 2;
    float number = 0;
    try {
        ranks.all_reduce(&number, 1, DType::fp32, {});
        FAIL() << "no error";
    } catch (const DeviceError& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr("ncclAllReduce failed: unhandled system error"));
    }
    comm.result = 7;  // in progress: no failure
    EXPECT_NO_THROW(ranks.all_reduce(&number, 1, DType::fp32, {}));
    EXPECT_THROW((void)nccl_communicator(nullptr), ArgumentError);
    comm.result = 3;
    EXPECT_THROW((void)nccl_communicator(&comm), DeviceError);
}

}  // namespace
}  // namespace flce::test
