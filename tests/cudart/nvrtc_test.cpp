#include "runtime/cuda/nvrtc.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <thread>

#include "flce/error.hpp"
#include "runtime/cuda/cubin.hpp"
#include "runtime/cuda/nvrtc_search.hpp"
#include "tests/support/broken_kernel.hpp"
#include "tests/support/gpu.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kSource = R"(
#include "flce/scale.cuh"
struct Params { float* data; long long count; float factor; };
extern "C" __global__ void scale(const __grid_constant__ Params p) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < p.count) p.data[i] = flce::scaled(p.data[i], p.factor);
}
)";
constexpr EmbeddedHeader kHeader{"flce/scale.cuh",
                                 "#pragma once\nnamespace flce { __device__ inline float scaled(float x, float f) { return x * f; } }\n"};
const std::vector<KernelEntry> kKernels = {{"scale", 128, 0}};

std::vector<std::string> options_for(const std::string& arch) {
    return {"--gpu-architecture=" + arch, "--std=c++17", "--ptxas-options=-v"};
}

std::string read(const fs::path& file) {
    std::stringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
}

class TempFolder {
public:
    TempFolder() {
        std::string name = (fs::temp_directory_path() / "flce-test-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temp folder");
        path_ = name;
    }
    ~TempFolder() { fs::remove_all(path_); }
    [[nodiscard]] const fs::path& path() const { return path_; }

private:
    fs::path path_;
};

class NvrtcCompile : public testing::TestWithParam<const char*> {};

TEST_P(NvrtcCompile, SmallKernel_GivesACubinForTheArchitecture) {
    const std::string arch = GetParam();
    FLCE_REQUIRE_NVRTC_FOR(arch);
    const auto result = Nvrtc::load()->compile(kSource, {&kHeader, 1}, options_for(arch), kKernels);
    std::string why;
    const auto contents = read_cubin(result.cubin, &why);
    ASSERT_TRUE(contents) << why;
    EXPECT_EQ("sm_" + std::to_string(contents->sm), arch.substr(0, arch.find('a')));
    ASSERT_EQ(contents->kernels.size(), 1U);
    EXPECT_EQ(contents->kernels[0].name, "scale");
    EXPECT_EQ(contents->kernels[0].param_bytes, 24U);
    const auto used = parse_ptxas_report(result.log);
    ASSERT_EQ(used.size(), 1U) << result.log;
    EXPECT_EQ(used[0].name, "scale");
    EXPECT_GT(used[0].registers, 0);
    EXPECT_EQ(used[0].spill_store_bytes, 0);
}

/// Kernels that tests of the tuner launch where there is a GPU.
TEST_P(NvrtcCompile, KernelThatIsAtFault_Compiles) {
    const std::string arch = GetParam();
    FLCE_REQUIRE_NVRTC_FOR(arch);
    const std::vector<KernelEntry> kernels = {{"flce_broken", 256, 0}};
    const auto result = Nvrtc::load()->compile(std::string(test::broken_kernel_source()), {}, options_for(arch), kernels);
    const auto contents = read_cubin(result.cubin, nullptr);
    ASSERT_TRUE(contents);
    EXPECT_EQ(contents->kernels.at(0).param_bytes, 16U);
}

INSTANTIATE_TEST_SUITE_P(Architectures, NvrtcCompile, testing::Values("sm_80", "sm_90a", "sm_100a", "sm_120"));

TEST(Nvrtc, Loaded_NamesItselfAndItsBuild) {
    FLCE_REQUIRE_NVRTC();
    const auto nvrtc = Nvrtc::load();
    EXPECT_GE(nvrtc->version().first, 12);
    EXPECT_TRUE(fs::exists(nvrtc->path()));
    EXPECT_GE(nvrtc->build_id().size(), 32U);
    EXPECT_THAT(nvrtc->supported_architectures(), testing::Contains("sm_80"));
    for (const std::string& arch : nvrtc->supported_architectures()) {
        if (std::stoi(arch.substr(3)) >= 80) {
            EXPECT_NO_THROW((void)describe_device(arch)) << "a target that explain and prewarm do not know";
        }
    }
    EXPECT_EQ(Nvrtc::open(nvrtc->path())->build_id(), nvrtc->build_id());
    EXPECT_EQ(Nvrtc::open(nvrtc->path().parent_path())->build_id(), nvrtc->build_id());
}

TEST(Nvrtc, BrokenSource_GivesTheLogAndSavesTheSource) {
    FLCE_REQUIRE_NVRTC();
    const std::string source = std::string(kSource) + "\n__device__ int broken() { return no_such_name; }\n";
    try {
        (void)Nvrtc::load()->compile(source, {&kHeader, 1}, options_for("sm_80"), kKernels);
        FAIL() << "compiled";
    } catch (const CompileError& error) {
        EXPECT_THAT(error.log(), HasSubstr("no_such_name"));
        EXPECT_THAT(error.what(), HasSubstr("no_such_name"));
        EXPECT_THAT(error.what(), HasSubstr("sm_80"));
        ASSERT_FALSE(error.source_path().empty());
        EXPECT_THAT(error.what(), HasSubstr(error.source_path().string()));
        EXPECT_EQ(read(error.source_path()), source);
        EXPECT_EQ(read(error.source_path().parent_path() / kHeader.name), kHeader.text);
        EXPECT_THAT(read(error.source_path().parent_path() / "options.txt"), HasSubstr("--gpu-architecture=sm_80"));
        fs::remove_all(error.source_path().parent_path());
    }
}

void expect_compile_error(const std::string& source, const std::string& arch, const std::vector<KernelEntry>& kernels,
                          const std::string& text) {
    try {
        (void)Nvrtc::load()->compile(source, {&kHeader, 1}, options_for(arch), kernels);
        FAIL() << "compiled";
    } catch (const CompileError& error) {
        EXPECT_THAT(error.what(), HasSubstr(text));
        fs::remove_all(error.source_path().parent_path());
    }
}

TEST(Nvrtc, KernelThatNobodyInstantiates_IsMissed) {
    FLCE_REQUIRE_NVRTC();
    expect_compile_error("template <int N> __global__ void scale(int* p) { *p = N; }", "sm_90a", kKernels, "lacks kernel 'scale'");
    expect_compile_error(kSource, "sm_90a", {{"scale", 128, 0}, {"other", 128, 0}}, "lacks kernel 'other' (it holds: scale)");
}

TEST(Nvrtc, ArchitectureItDoesNotKnow_IsAnEnvironmentErrorListingThoseItDoes) {
    FLCE_REQUIRE_NVRTC();
    try {
        (void)Nvrtc::load()->compile(kSource, {&kHeader, 1}, options_for("sm_999a"), kKernels);
        FAIL() << "compiled";
    } catch (const EnvironmentError& error) {
        EXPECT_THAT(error.what(), HasSubstr("cannot compile for sm_999a; it knows sm_"));
    }
}

TEST(Nvrtc, OptionItDoesNotKnow_IsACompileErrorWithTheLog) {
    FLCE_REQUIRE_NVRTC();
    try {
        (void)Nvrtc::load()->compile(kSource, {&kHeader, 1}, {"--gpu-architecture=sm_80", "--no-such-option"}, kKernels);
        FAIL() << "compiled";
    } catch (const CompileError& error) {
        EXPECT_THAT(error.log(), HasSubstr("no-such-option"));
        fs::remove_all(error.source_path().parent_path());
    }
}

TEST(Nvrtc, ManyThreads_CompileTheSameBytes) {
    FLCE_REQUIRE_NVRTC();
    std::array<std::vector<std::byte>, 4> cubins;
    {
        std::vector<std::jthread> threads;
        for (auto& cubin : cubins) {
            threads.emplace_back(
                [&cubin] { cubin = Nvrtc::load()->compile(kSource, {&kHeader, 1}, options_for("sm_80"), kKernels).cubin; });
        }
    }
    EXPECT_FALSE(cubins[0].empty());
    for (const auto& cubin : cubins) EXPECT_EQ(cubin, cubins[0]);
}

std::string open_error(const fs::path& place) {
    try {
        (void)Nvrtc::open(place);
    } catch (const EnvironmentError& error) {
        return error.what();
    }
    return "opened";
}

TEST(NvrtcSearch, MissingLibrary_IsNamed) {
    EXPECT_THAT(open_error("/nonexistent/libnvrtc.so.13"), HasSubstr("FLCE_NVRTC=/nonexistent/libnvrtc.so.13"));
    const TempFolder empty;
    EXPECT_THAT(open_error(empty.path()), HasSubstr(empty.path().string()));
}

TEST(NvrtcSearch, FileThatIsNoLibrary_IsRefusedWithTheReason) {
    const TempFolder folder;
    std::ofstream(folder.path() / "libnvrtc.so.13") << "text, not a library";
    EXPECT_THAT(open_error(folder.path()), HasSubstr("not a shared library"));
    EXPECT_THAT(open_error(folder.path() / "libnvrtc.so.13"), HasSubstr("not a shared library"));
}

TEST(NvrtcSearch, AnotherLibrary_IsRefusedWithTheReason) {
    // This test's own program is a valid ELF file that is not NVRTC.
    EXPECT_THAT(open_error(fs::canonical("/proc/self/exe")), HasSubstr("does not export nvrtcCompileProgram"));
}

TEST(NvrtcSearch, BrokenCandidate_IsPassedOverForTheNext) {
    FLCE_REQUIRE_NVRTC();
    const fs::path real = Nvrtc::load()->path();
    const TempFolder folder;
    std::ofstream(folder.path() / "libnvrtc.so.13") << "half a download";
    fs::create_symlink(real, folder.path() / "libnvrtc.so.12");
    const NvrtcLocation found = find_nvrtc(folder.path());
    EXPECT_EQ(found.library.filename(), "libnvrtc.so.12");
    // The builtins lie beside the file that the link leads to.
    EXPECT_EQ(found.build_id, Nvrtc::load()->build_id());
}

TEST(Cubin, BytesThatAreNone_AreRefusedWithTheReason) {
    const std::vector<KernelEntry> none;
    EXPECT_EQ(cubin_fault({}, "sm_80", none), "it is empty");
    const std::string text = "no ELF at all";
    EXPECT_EQ(cubin_fault(std::as_bytes(std::span(text)), "sm_80", none), "it is not an ELF file");
    const std::string program = read("/proc/self/exe");
    EXPECT_THAT(cubin_fault(std::as_bytes(std::span(program)), "sm_80", none), HasSubstr("not a GPU"));
    const std::string truncated = program.substr(0, 32);
    EXPECT_NE(cubin_fault(std::as_bytes(std::span(truncated)), "sm_80", none), "");
}

TEST(Cubin, AnotherArchitecture_IsAFault) {
    FLCE_REQUIRE_NVRTC();
    const auto cubin = Nvrtc::load()->compile(kSource, {&kHeader, 1}, options_for("sm_80"), kKernels).cubin;
    EXPECT_EQ(cubin_fault(cubin, "sm_80", kKernels), "");
    EXPECT_EQ(cubin_fault(cubin, "sm_90a", kKernels), "it is for sm_80, not sm_90a");
    const std::vector<std::byte> half(cubin.begin(), cubin.begin() + static_cast<std::ptrdiff_t>(cubin.size() / 2));
    EXPECT_NE(cubin_fault(half, "sm_80", kKernels), "");
}

TEST(Cubin, PtxasReport_IsReadByKernel) {
    const auto used = parse_ptxas_report(
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'k2' for 'sm_80'\n"
        "ptxas info    : Function properties for k2\n"
        "ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 0 barriers, 16 bytes cumulative stack size, 360 bytes cmem[0]\n"
        "ptxas info    : Compile time = 1.501 ms\n"
        "ptxas info    : Compiling entry function 'k' for 'sm_80'\n"
        "ptxas info    : Function properties for k\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 1256 bytes smem, 364 bytes cmem[0]\n"
        "ptxas info    : Function properties for helper\n"
        "ptxas         .     64 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n");
    ASSERT_EQ(used.size(), 2U);
    EXPECT_EQ(used[0].name, "k2");
    EXPECT_EQ(used[0].registers, 255);
    EXPECT_EQ(used[0].stack_bytes, 16);
    EXPECT_EQ(used[0].spill_store_bytes, 8);
    EXPECT_EQ(used[0].spill_load_bytes, 12);
    EXPECT_EQ(used[0].static_smem_bytes, 0);
    EXPECT_EQ(used[1].registers, 40);
    EXPECT_EQ(used[1].static_smem_bytes, 1256);
    EXPECT_EQ(used[1].spill_store_bytes, 0);
}

}  // namespace
}  // namespace flce
