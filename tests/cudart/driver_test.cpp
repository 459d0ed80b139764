#include "runtime/cuda/driver.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "flce/error.hpp"
#include "runtime/kernel_factory.hpp"
#include "tests/cudart/fake_driver.hpp"

namespace flce {
namespace {

using test::FakeGpu;
using testing::HasSubstr;

template <typename Call>
std::string environment_error(const Call& call) {
    try {
        call();
    } catch (const EnvironmentError& error) {
        return error.what();
    }
    return "no error";
}

TEST(Driver, Missing_SaysWhichLibraryAndWhy) {
    const std::string message = environment_error([] { (void)CudaDriver::open("/nonexistent/libcuda.so.1"); });
    EXPECT_THAT(message, HasSubstr("no CUDA driver: /nonexistent/libcuda.so.1"));
    EXPECT_THAT(message, HasSubstr("No such file"));
}

TEST(Driver, AnotherLibrary_IsRefused) {
    EXPECT_THAT(environment_error([] { (void)CudaDriver::open("libm.so.6"); }), HasSubstr("is no CUDA driver of CUDA 12.0 or newer"));
}

TEST(Driver, NoDevice_IsAnEnvironmentErrorWithTheDriversWords) {
    FakeGpu gpu;
    gpu.init = CUDA_ERROR_NO_DEVICE;
    EXPECT_THAT(environment_error([] { (void)FakeGpu::driver(); }),
                HasSubstr("cuInit failed: CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)"));
}

TEST(Driver, TooOld_NamesWhatItLacks) {
    FakeGpu gpu;
    gpu.lacks = "cuLaunchKernelEx";
    EXPECT_THAT(environment_error([] { (void)FakeGpu::driver(); }), HasSubstr("lacks cuLaunchKernelEx"));
}

TEST(Driver, Devices_WithoutOne_AreEmptyWithTheReason) {
    std::string why;
    const auto devices = cuda_devices(&why);
    EXPECT_EQ(devices.empty(), !why.empty()) << why;
    for (const Device& device : devices) EXPECT_THAT(device.gpu.arch, HasSubstr("sm_"));
}

TEST(Driver, OrdinalThatDoesNotExist_IsRefused) {
    FakeGpu gpu;
    const auto driver = FakeGpu::driver();
    EXPECT_THAT(environment_error([&] { (void)driver->context(1); }), HasSubstr("no CUDA device 1: allowed are 0 to 0"));
    EXPECT_THAT(environment_error([&] { (void)driver->device(-1); }), HasSubstr("no CUDA device -1"));
    gpu.device_count = 0;
    EXPECT_THAT(environment_error([&] { (void)driver->context(0); }), HasSubstr("the driver sees none"));
}

TEST(Driver, FailedCall_IsADeviceErrorWithNameAndText) {
    FakeGpu gpu;
    const auto driver = FakeGpu::driver();
    try {
        driver->check(CUDA_ERROR_LAUNCH_FAILED, "cuLaunchKernel");
        FAIL() << "no error";
    } catch (const DeviceError& error) {
        EXPECT_STREQ(error.what(), "cuLaunchKernel failed: CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)");
        EXPECT_EQ(error.call(), "cuLaunchKernel");
        EXPECT_EQ(error.result(), CUDA_ERROR_LAUNCH_FAILED);
    }
    EXPECT_EQ(driver->describe(static_cast<CUresult>(4242)), "CUresult 4242");
    driver->check(CUDA_SUCCESS, "cuLaunchKernel");
}

TEST(Driver, KnownProduct_IsTheDeviceThatItsNameDescribes) {
    FakeGpu gpu;
    const Device device = FakeGpu::driver()->device(0);
    Device described = describe_device("NVIDIA H200");
    described.gpu.memory_bytes = device.gpu.memory_bytes;
    EXPECT_EQ(device.gpu, described.gpu);  // equal, so that the machine finds a kernel prewarmed by name
    EXPECT_EQ(device.kind, DeviceKind::cuda);
}

TEST(Driver, Device_IsAskedForOnce) {
    FakeGpu gpu;
    const auto driver = FakeGpu::driver();
    const Device device = driver->device(0);
    gpu.attributes.clear();  // asking again is an error
    EXPECT_EQ(driver->device(0), device);
    EXPECT_THROW((void)FakeGpu::driver()->device(0), DeviceError);
    EXPECT_THROW((void)driver->device(7), EnvironmentError);
}

TEST(Driver, PartOfAProduct_KeepsItsOwnSize) {
    FakeGpu gpu;
    gpu.name = "NVIDIA H200 MIG 1g.18gb";
    gpu.attributes[CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT] = 16;
    gpu.attributes[CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE] = 6 << 20;
    const Device device = FakeGpu::driver()->device(0);
    EXPECT_EQ(device.gpu.sm_count, 16);
    EXPECT_EQ(device.gpu.l2_bytes, 6 << 20);
}

TEST(Driver, UnknownProductAndArchitecture_GetAPlainTargetAndScaledRates) {
    FakeGpu gpu;
    gpu.name = "Imaginary 9000";
    gpu.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = 14;
    gpu.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR] = 2;
    const Device device = FakeGpu::driver()->device(0);
    EXPECT_EQ(device.gpu.arch, "sm_142");
    EXPECT_EQ(device.gpu.compute_capability, 142);
    EXPECT_GT(device.gpu.bf16_flops, 0);
    EXPECT_NEAR(device.gpu.bandwidth_bytes_per_s, 4.917e12, 0.001e12);
}

TEST(Driver, Context_IsSharedAndReleasedWithItsLastOwner) {
    FakeGpu gpu;
    const auto driver = FakeGpu::driver();
    {
        const auto first = driver->context(0);
        const auto second = driver->context(0);
        EXPECT_EQ(first, second);
        EXPECT_EQ(gpu.retained, 1);
    }
    EXPECT_EQ(gpu.retained, 0);
}

TEST(Driver, ContextScope_PushesOnlyWhenAnotherIsCurrent) {
    FakeGpu gpu;
    const auto context = FakeGpu::driver()->context(0);
    {
        const ContextScope scope(*context);
        EXPECT_EQ(gpu.context_stack, std::vector<CUcontext>{FakeGpu::primary()});
        const ContextScope nested(*context);
        EXPECT_EQ(gpu.context_stack.size(), 1U);
    }
    EXPECT_TRUE(gpu.context_stack.empty());
    const auto other = reinterpret_cast<CUcontext>(0x3000);
    gpu.context_stack = {other};
    {
        const ContextScope scope(*context);
        EXPECT_EQ(gpu.context_stack.back(), FakeGpu::primary());
    }
    EXPECT_EQ(gpu.context_stack, std::vector<CUcontext>{other});
}

}  // namespace
}  // namespace flce
