// What a test needs and this machine may lack: a GPU, NVRTC. The test is skipped with the reason.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "flce/error.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce::test {

/// Why there is no GPU here; empty where there is one.
inline const std::string& no_gpu_reason() {
    static const std::string reason = [] {
        std::string why;
        return cuda_devices(&why).empty() ? "no GPU: " + why : std::string();
    }();
    return reason;
}

/// Why there is no NVRTC here; empty where there is one.
inline const std::string& no_nvrtc_reason() {
    static const std::string reason = [] {
        try {
            (void)Nvrtc::load()->version();
            return std::string();
        } catch (const EnvironmentError& error) {
            return std::string(error.what());
        }
    }();
    return reason;
}

}  // namespace flce::test

/// First line of a test that runs kernels on a GPU, which needs NVRTC as well. Such tests have "Gpu" in the name of their suite.
#define FLCE_REQUIRE_GPU()                             \
    if (!::flce::test::no_gpu_reason().empty()) {      \
        GTEST_SKIP() << ::flce::test::no_gpu_reason(); \
    }                                                  \
    FLCE_REQUIRE_NVRTC()

/// First line of a test that compiles CUDA source.
#define FLCE_REQUIRE_NVRTC()                             \
    if (!::flce::test::no_nvrtc_reason().empty()) {      \
        GTEST_SKIP() << ::flce::test::no_nvrtc_reason(); \
    }
