#include <gtest/gtest.h>

#include <array>

#include "tests/parallel/c_client.h"

namespace flce::test {
namespace {

TEST(ParallelCApi, FromC_WorksAndReportsErrors) {
    std::array<char, 512> failure{};
    EXPECT_EQ(run_parallel_client(failure.data(), failure.size()), 0) << failure.data();
}

}  // namespace
}  // namespace flce::test
