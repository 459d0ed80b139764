#include "cache/single_flight.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace flce {
namespace {

constexpr int kThreads = 8;

/// Runs kThreads calls of one key of which the first waits for the others to have come.
template <class Body>
void together(const Body& body) {
    std::latch begun(kThreads);
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
        threads.emplace_back([&] {
            begun.count_down();
            body(begun);
        });
    }
}

TEST(SingleFlight, ConcurrentCallsOfOneKey_OneMakesAllHaveIt) {
    SingleFlight<std::string, int> flight;
    std::atomic<int> made{0};
    std::atomic<int> sum{0};
    together([&](std::latch& begun) {
        sum += flight.run("key", [&] {
            begun.wait();
            std::this_thread::sleep_for(std::chrono::milliseconds(100));  // for those that have begun to come to the flight
            return ++made;
        });
    });
    EXPECT_EQ(made, 1);
    EXPECT_EQ(sum, kThreads);
}

TEST(SingleFlight, Failure_ReachesAllAndTheNextCallTriesAgain) {
    SingleFlight<std::string, int> flight;
    std::atomic<int> attempts{0};
    std::atomic<int> failures{0};
    together([&](std::latch& begun) {
        try {
            (void)flight.run("key", [&]() -> int {
                begun.wait();
                std::this_thread::sleep_for(std::chrono::milliseconds(100));
                ++attempts;
                throw std::runtime_error("ill");
            });
        } catch (const std::runtime_error&) {
            ++failures;
        }
    });
    EXPECT_EQ(attempts, 1);
    EXPECT_EQ(failures, kThreads);
    EXPECT_EQ(flight.run("key", [] { return 5; }), 5);
}

TEST(SingleFlight, OtherKeyInsideACall_Runs) {
    SingleFlight<int, int> flight;
    EXPECT_EQ(flight.run(1, [&] { return flight.run(2, [] { return 3; }) + 1; }), 4);
}

TEST(SingleFlight, CallAfterAnother_MakesAgain) {
    SingleFlight<int, int> flight;
    int made = 0;
    for (int i = 0; i < 2; ++i) (void)flight.run(1, [&] { return ++made; });
    EXPECT_EQ(made, 2);
}

}  // namespace
}  // namespace flce
