// NVRTC of PyPI's wheels: beside the Python package's own library, and in the environments where Python would look.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>

#include "runtime/cuda/nvrtc.hpp"
#include "tests/cli/process.hpp"
#include "tests/support/gpu.hpp"

namespace flce::test {
namespace {

namespace fs = std::filesystem;

/// libflce, which the command runs with: beside the library of internals that this test is linked with.
fs::path flce_library() {
    auto* load = static_cast<std::shared_ptr<const Nvrtc> (*)()>(&Nvrtc::load);
    Dl_info info{};
    if (::dladdr(reinterpret_cast<const void*>(load), &info) == 0) throw std::runtime_error("where libflce lies is unknown");
    return fs::canonical(fs::path(info.dli_fname).replace_filename("libflce.so"));
}

/// flce run with a copy of its library in <root>/site-packages/flce/lib, as the Python package has it, and with nothing of the caller's
/// environment that leads to an NVRTC. The library, where it is found, looks for compilers from where it lies itself.
class InstalledWheel {
public:
    InstalledWheel() {
        const fs::path library = packages() / "flce" / "lib";
        fs::create_directories(library);
        fs::copy_file(flce_library(), library / "libflce.so.0");
        environment_ = {{"FLCE_NVRTC", ""},   {"CUDA_HOME", ""},         {"CUDA_PATH", ""},         {"VIRTUAL_ENV", ""},
                        {"CONDA_PREFIX", ""}, {"PATH", root() / "none"}, {"HOME", root() / "home"}, {"LD_LIBRARY_PATH", library}};
    }

    [[nodiscard]] fs::path root() const { return folder_.path(); }
    [[nodiscard]] fs::path packages() const { return root() / "site-packages"; }
    void set(const std::string& name, const fs::path& value) { environment_[name] = value; }

    /// Puts NVRTC where `wheel` has it below `packages`, the way pip unpacks it.
    static fs::path put_nvrtc(const fs::path& packages, const char* wheel) {
        const fs::path real = Nvrtc::load()->path();
        const fs::path library = packages / "nvidia" / wheel / "lib" / real.filename();
        fs::create_directories(library.parent_path());
        fs::create_symlink(real, library);
        return library;
    }

    [[nodiscard]] ProcessResult run(const std::vector<std::string>& arguments) const {
        return run_flce(arguments, {.environment = environment_});
    }
    /// The NVRTC that is found; empty where there is none.
    [[nodiscard]] fs::path found() const {
        const nlohmann::json nvrtc = run({"info", "--json"}).json().at("nvrtc");
        return nvrtc.at("found").get<bool>() ? nvrtc.at("path").get<std::string>() : std::string();
    }

private:
    TemporaryFolder folder_;
    std::map<std::string, std::string> environment_;
};

TEST(NvrtcWheels, BesideThePackage_AreFoundFirstAndCompile) {
    FLCE_REQUIRE_NVRTC_FOR("sm_80");
    for (const char* wheel : {"cu13", "cuda_nvrtc"}) {
        const InstalledWheel installed;
        const fs::path library = InstalledWheel::put_nvrtc(installed.packages(), wheel);
        EXPECT_EQ(installed.found(), library);
        if (wheel != std::string("cu13")) continue;
        const ProcessResult compiled = installed.run(
            {"prewarm", "--spec", "D=64,V=1000", "--device", "sm_80", "--cache-dir", (installed.root() / "cache").string(), "--json"});
        EXPECT_EQ(compiled.exit_code, 0) << compiled.err;
        EXPECT_EQ(compiled.json()["failed"], 0) << compiled.err;
    }
}

TEST(NvrtcWheels, OfAnEnvironment_AreFound) {
    FLCE_REQUIRE_NVRTC();
    const InstalledWheel bare;
    if (const fs::path first = bare.found(); !first.empty()) GTEST_SKIP() << first << " comes before any wheel of an environment here";
    const fs::path packages = fs::path("lib") / "python3.11" / "site-packages";
    for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
        InstalledWheel installed;
        const fs::path library = InstalledWheel::put_nvrtc(installed.root() / "env" / packages, "cu13");
        installed.set(variable, installed.root() / "env");
        EXPECT_EQ(installed.found(), library) << variable;
    }
    {
        InstalledWheel installed;  // python3 of PATH
        const fs::path library = InstalledWheel::put_nvrtc(installed.root() / "prefix" / packages, "cuda_nvrtc");
        fs::create_directories(installed.root() / "prefix" / "bin");
        std::ofstream(installed.root() / "prefix" / "bin" / "python3") << "an interpreter";
        installed.set("PATH", installed.root() / "prefix" / "bin");
        EXPECT_EQ(installed.found(), library);
    }
    const InstalledWheel installed;  // pip install --user
    EXPECT_EQ(installed.found(), "");
    const fs::path library = InstalledWheel::put_nvrtc(installed.root() / "home" / ".local" / packages, "cu13");
    EXPECT_EQ(installed.found(), library);
}

TEST(NvrtcWheels, HalfDownloaded_IsPassedOverAndNamed) {
    const InstalledWheel installed;
    if (!installed.found().empty()) GTEST_SKIP() << "this machine has an NVRTC that is found anyway";
    const fs::path library = installed.packages() / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13";
    fs::create_directories(library.parent_path());
    std::ofstream(library) << "half a download";
    EXPECT_EQ(installed.found(), "");
    const ProcessResult failed = installed.run({"prewarm", "--spec", "D=64,V=1000", "--device", "sm_80"});
    EXPECT_EQ(failed.exit_code, 3);
    EXPECT_THAT(failed.err, testing::HasSubstr(library.string() + ": not a shared library"));
}

}  // namespace
}  // namespace flce::test
