#include "flce/buffer.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "flce/recording.hpp"
#include "tests/support/gpu.hpp"

namespace flce {
namespace {

constexpr DeviceRef kCpu{DeviceKind::cpu, 0};
constexpr DeviceRef kGpuMemory{DeviceKind::cuda, 0};

void expect_round_trip(DeviceRef device) {
    std::vector<std::uint8_t> sent(1000);
    std::iota(sent.begin(), sent.end(), std::uint8_t{3});
    Buffer buffer(device, 1200);
    EXPECT_EQ(buffer.bytes(), 1200U);
    EXPECT_EQ(buffer.device(), device);
    buffer.fill(std::byte{0x5a});
    buffer.upload(sent.data(), sent.size(), 100);
    std::vector<std::uint8_t> received(1200);
    buffer.download(received.data(), received.size());
    for (std::size_t i = 0; i < received.size(); ++i) {
        const bool inside = i >= 100 && i < 1100;
        ASSERT_EQ(received[i], inside ? sent[i - 100] : 0x5a) << i;
    }
    std::uint8_t last = 0;
    buffer.download(&last, 1, 1199);
    EXPECT_EQ(last, 0x5a);
}

void expect_ranges_checked(DeviceRef device) {
    Buffer buffer(device, 16);
    std::uint8_t bytes[32] = {};
    EXPECT_THROW(buffer.upload(bytes, 17), ArgumentError);
    EXPECT_THROW(buffer.upload(bytes, 8, 9), ArgumentError);
    EXPECT_THROW(buffer.download(bytes, 1, SIZE_MAX), ArgumentError);
    EXPECT_THROW(buffer.download(bytes, SIZE_MAX, 1), ArgumentError);
    buffer.upload(bytes, 0, 16);
}

TEST(Buffer, Host_KeepsWhatIsUploaded) { expect_round_trip(kCpu); }
TEST(Buffer, Host_ChecksRanges) { expect_ranges_checked(kCpu); }

TEST(Buffer, Host_IsAligned) {
    for (const std::size_t bytes : {1, 63, 1000}) EXPECT_EQ(reinterpret_cast<std::uintptr_t>(Buffer(kCpu, bytes).data()) % 64, 0U);
}

TEST(Buffer, Empty_HasNoMemory) {
    EXPECT_EQ(Buffer().data(), nullptr);
    EXPECT_EQ(Buffer().bytes(), 0U);
    Buffer empty(kCpu, 0);
    EXPECT_EQ(empty.bytes(), 0U);
    empty.fill(std::byte{1});
    EXPECT_THROW(empty.upload("x", 1), ArgumentError);
}

TEST(Buffer, DeviceThatIsNotThere_IsAnEnvironmentError) {
    // Ordinal 1000 exists nowhere, with or without a driver.
    EXPECT_THROW(Buffer({DeviceKind::cuda, 1000}, 16), EnvironmentError);
    EXPECT_THROW(synchronize({DeviceKind::cuda, 1000}), EnvironmentError);
    EXPECT_THROW(Timer({DeviceKind::cuda, 1000}), EnvironmentError);
    EXPECT_THROW((void)memory_info(kCpu), EnvironmentError);
}

TEST(Timer, Host_MeasuresTime) {
    Timer timer(kCpu);
    timer.start();
    volatile double sum = 0;
    for (int i = 0; i < 200000; ++i) sum = sum + i;
    EXPECT_GT(timer.stop_ms(), 0.0);
    synchronize(kCpu);
}

TEST(Recording, Host_RunsTheWorkEachTime) {
    int runs = 0;
    const Recording recording(kCpu, [&](Stream stream) {
        EXPECT_EQ(stream.handle, nullptr);
        if (++runs == 3) throw ArgumentError("of the work");
    });
    EXPECT_EQ(runs, 0);
    recording.submit();
    recording.submit();
    EXPECT_EQ(runs, 2);
    EXPECT_THROW(recording.submit(), ArgumentError);
    EXPECT_TRUE(recording);
    EXPECT_FALSE(Recording());
    EXPECT_THROW(Recording({DeviceKind::cuda, 1000}, [](Stream) {}), EnvironmentError);
}

TEST(GpuBuffer, Device_KeepsWhatIsUploaded) {
    FLCE_REQUIRE_GPU();
    expect_round_trip(kGpuMemory);
    expect_ranges_checked(kGpuMemory);
}

TEST(GpuBuffer, TooLarge_IsADeviceErrorWithTheSize) {
    FLCE_REQUIRE_GPU();
    try {
        const Buffer buffer(kGpuMemory, std::size_t{1} << 50);
        FAIL() << "allocated";
    } catch (const DeviceError& error) {
        EXPECT_NE(std::string(error.what()).find("CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("1125899906842624 bytes"), std::string::npos) << error.what();
    }
}

TEST(GpuBuffer, TimerAndMemory_AreTheDevices) {
    FLCE_REQUIRE_GPU();
    Buffer buffer(kGpuMemory, 256 << 20);
    const MemoryInfo info = memory_info(kGpuMemory);
    EXPECT_GT(info.total_bytes, info.free_bytes);
    Timer timer(kGpuMemory);
    timer.start();
    buffer.fill(std::byte{0});
    EXPECT_GT(timer.stop_ms(), 0.0);
    synchronize(kGpuMemory);
}

}  // namespace
}  // namespace flce
