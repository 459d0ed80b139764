// A file system that fails when it is told to: tests/support/fault_shim.c, preloaded.
#pragma once

#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "tests/cache/cache_fixture.hpp"

namespace flce::test {

/// ESTALE and EBUSY are NFS's, ENOENT is what another client's rename looks like, ENOSPC a full disk, EIO a broken one.
inline constexpr std::array kErrors{ESTALE, EBUSY, ENOENT, ENOSPC, EIO};

/// Tests that run once more in a process of their own, with tests/support/fault_shim.c preloaded.
class FaultFixture : public ArtifactCacheTest {
protected:
    void SetUp() override {
        if (*FLCE_SANITIZE != '\0') GTEST_SKIP() << "sanitizers stand between the same calls";
        arm_ = reinterpret_cast<void (*)(int, int, int)>(::dlsym(RTLD_DEFAULT, "flce_fault_arm"));
        disarm_ = reinterpret_cast<int (*)()>(::dlsym(RTLD_DEFAULT, "flce_fault_disarm"));
        before_ = reinterpret_cast<void (*)(const char*, void (*)())>(::dlsym(RTLD_DEFAULT, "flce_fault_before"));
        nfs_ = reinterpret_cast<int (*)(const char*)>(::dlsym(RTLD_DEFAULT, "flce_fault_nfs"));
        if (arm_ == nullptr && !std::filesystem::exists(FLCE_FAULT_SHIM)) GTEST_SKIP() << "there is no " << FLCE_FAULT_SHIM;
    }

    /// Whether this is the process with the shim. Elsewhere: runs the same test in one, and its result is this one's.
    bool here() {
        if (arm_ != nullptr && disarm_ != nullptr) return true;
        const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
        const std::string filter = fmt::format("--gtest_filter={}.{}", test->test_suite_name(), test->name());
        const pid_t child = ::fork();
        if (child == 0) {
            ::setenv("LD_PRELOAD", FLCE_FAULT_SHIM, 1);
            if (::access("/dev/shm", W_OK) == 0) ::setenv("TMPDIR", "/dev/shm", 1);  // where syncing thousands of times takes no time
            ::execl("/proc/self/exe", "a test", filter.c_str(), nullptr);
            ::_exit(127);
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the test failed with the shim; what it says is above";
        return false;
    }

    /// Calls `attempt` with a failure at its first, second, … and last system call, for every error, once and for good; `after` each
    /// time.
    void at_every_call(const std::function<void()>& before, const std::function<void()>& attempt, const std::function<void()>& after) {
        injected_ = 0;
        before();
        arm_(-1, 0, 0);
        attempt();
        const int calls = disarm_();
        ASSERT_GT(calls, 3);  // the shim is between
        after();
        for (const int error : kErrors) {
            for (const bool sticky : {false, true}) {
                for (int nth = 0; nth < calls; ++nth) {
                    SCOPED_TRACE(fmt::format("{} at call {}{}", std::strerror(error), nth, sticky ? " and later" : ""));
                    before();
                    log_.clear();
                    injected_ = error;
                    arm_(nth, error, sticky ? 1 : 0);
                    attempt();
                    (void)disarm_();
                    EXPECT_LE(warnings(), most_warnings_) << log_.text();
                    after();
                }
            }
        }
    }

    /// Does `then` in this thread right before its next mkdir, rename or link of a path that ends so; after "to:", rename to such a path;
    /// after "open:", open of one. The text must outlive that.
    void before_call(const char* end_of_path, std::function<void()> then) {
        then_ = std::move(then);
        before_(end_of_path, [] {
            const auto now = std::move(then_);  // `now` may name something to be done before a later call
            now();
        });
    }

    int most_warnings_ = 1;  ///< most warnings that an attempt may end in
    int injected_ = 0;       ///< error of the last attempt of at_every_call, 0 for none
    static inline std::function<void()> then_;
    void (*before_)(const char*, void (*)()) = nullptr;
    void (*arm_)(int, int, int) = nullptr;
    int (*disarm_)() = nullptr;
    int (*nfs_)(const char*) = nullptr;
};

}  // namespace flce::test
