// Requirements of a test that this machine may lack: a GPU, NVRTC. The test is skipped with the reason.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
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

/// Why the NVRTC here cannot compile for `arch` ("sm_100a"); empty where it can.
inline std::string no_nvrtc_reason(const std::string& arch) {
    if (!no_nvrtc_reason().empty()) return no_nvrtc_reason();
    const auto known = Nvrtc::load()->supported_architectures();
    const std::string plain = arch.substr(0, arch.find_last_of("0123456789") + 1);
    if (std::find(known.begin(), known.end(), plain) != known.end()) return {};
    return Nvrtc::load()->path().string() + " is too old for " + arch;
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

/// Requires an NVRTC for source that is compiled for one architecture, which an older NVRTC may not know.
#define FLCE_REQUIRE_NVRTC_FOR(arch)                                                                 \
    if (const std::string flce_reason = ::flce::test::no_nvrtc_reason(arch); !flce_reason.empty()) { \
        GTEST_SKIP() << flce_reason;                                                                 \
    }
