// Ranks that are threads of one process, and memory of the host: a Communicator for tests.
#pragma once

#include <barrier>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "flce/parallel.hpp"
#include "tests/support/number_formats.hpp"

namespace flce::test {

class ThreadGroup {
public:
    explicit ThreadGroup(int size) : size_(size), barrier_(size), addresses_(static_cast<std::size_t>(size)) {}

    /// Calls `body` with each rank's communicator, each on a thread of its own.
    void run(const std::function<void(const Communicator&)>& body) {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < size_; ++rank) {
            threads.emplace_back([this, rank, &body] { body(communicator(rank)); });
        }
        for (std::thread& thread : threads) thread.join();
    }

    int collectives = 0;  ///< collectives that rank 0 has taken part in

private:
    Communicator communicator(int rank) {
        Communicator made{.rank = rank, .size = size_};
        made.all_gather = [this, rank](const void* part, void* all, std::size_t bytes, Stream) {
            exchange(rank, part, [&] {
                for (std::size_t i = 0; i < addresses_.size() && bytes > 0; ++i) {
                    std::memcpy(static_cast<std::byte*>(all) + i * bytes, addresses_[i], bytes);
                }
            });
        };
        made.all_reduce = [this, rank](void* data, std::int64_t count, DType dtype, Stream) {
            std::vector<std::byte> sum;
            exchange(rank, data, [&] { sum = sum_of(0, count, dtype); });
            if (!sum.empty()) std::memcpy(data, sum.data(), sum.size());
            barrier_.arrive_and_wait();
        };
        made.reduce_scatter = [this, rank](const void* data, void* part, std::int64_t count, DType dtype, Stream) {
            std::vector<std::byte> sum;
            exchange(rank, data, [&] { sum = sum_of(rank * count, count, dtype); });
            if (!sum.empty()) std::memcpy(part, sum.data(), sum.size());
        };
        return made;
    }

    template <class Read>
    void exchange(int rank, const void* mine, const Read& read) {
        addresses_[static_cast<std::size_t>(rank)] = static_cast<const std::byte*>(mine);
        if (rank == 0) ++collectives;
        barrier_.arrive_and_wait();
        read();
        barrier_.arrive_and_wait();
    }

    /// In the order of ranks, rounded once.
    [[nodiscard]] std::vector<std::byte> sum_of(std::int64_t first, std::int64_t count, DType dtype) const {
        std::vector<float> sum(static_cast<std::size_t>(count), 0.F);
        for (const std::byte* address : addresses_) {
            const std::vector<float> part = decode(address + first * static_cast<std::int64_t>(element_bytes(dtype)), count, dtype);
            for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
        }
        return encode(sum, dtype);
    }

    int size_;
    std::barrier<> barrier_;
    std::vector<const std::byte*> addresses_;
};

}  // namespace flce::test
