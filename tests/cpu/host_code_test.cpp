// IR to object to callable code, and everything that can go wrong on the way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>

#include "flce/error.hpp"
#include "generator/device_tables.hpp"
#include "runtime/host/object_file.hpp"
#include "tests/cpu/cpu_test_support.hpp"

namespace flce::test {
namespace {

using testing::HasSubstr;
using Arg = FunctionBuilder::Arg;

const VectorTarget kBaseline{};

// out[i] = i for i in [0, n)
void emit_iota(llvm::Module& module, const char* symbol) {
    FunctionBuilder f(module, kBaseline, symbol, {Arg::pointer, Arg::i64});
    f.loop(f.i64(0), f.arg(1), 1, [&](llvm::Value* i) { f.store_bits(i, f.at(f.arg(0), i, 8), 64); });
    f.finish();
}

std::vector<std::byte> iota_object() {
    return compile_host_object(native_cpu().cpu, "iota", [](llvm::Module& m) { emit_iota(m, "iota"); });
}

TEST(HostCode, CompiledAndLoaded_Runs) {
    const auto code = HostCode::load(iota_object(), "iota");
    std::vector<std::int64_t> numbers(100, -1);
    reinterpret_cast<void (*)(std::int64_t*, std::int64_t)>(code->symbol("iota"))(numbers.data(), 99);
    for (std::int64_t i = 0; i < 99; ++i) EXPECT_EQ(numbers[static_cast<std::size_t>(i)], i);
    EXPECT_EQ(numbers[99], -1);
}

TEST(HostCode, LoadedTwice_IsTwoIndependentCopies) {
    const auto object = iota_object();
    auto first = HostCode::load(object, "first");
    const auto second = HostCode::load(object, "second");
    EXPECT_NE(first->symbol("iota"), second->symbol("iota"));
    first.reset();
    std::int64_t number = -1;
    reinterpret_cast<void (*)(std::int64_t*, std::int64_t)>(second->symbol("iota"))(&number, 1);
    EXPECT_EQ(number, 0);
}

TEST(HostCode, MissingSymbol_IsAnInternalErrorNamingIt) {
    const auto code = HostCode::load(iota_object(), "iota");
    try {
        (void)code->symbol("no_such_symbol");
        FAIL();
    } catch (const InternalError& e) {
        EXPECT_THAT(e.what(), HasSubstr("no_such_symbol"));
        EXPECT_THAT(e.what(), HasSubstr("iota"));
    }
}

TEST(HostCode, BytesThatAreNoObject_AreACompileError) {
    const std::vector<std::byte> nonsense(100, std::byte{42});
    EXPECT_THROW((void)HostCode::load(nonsense, "nonsense"), CompileError);
    EXPECT_THROW((void)HostCode::load({}, "empty"), CompileError);
}

TEST(HostCode, TruncatedObject_IsACompileError) {
    auto object = iota_object();
    object.resize(object.size() / 2);
    EXPECT_THROW((void)HostCode::load(object, "half"), CompileError);
}

TEST(HostCode, ObjectOfAnotherArchitecture_IsACompileError) {
    auto object = iota_object();
    object[18] = std::byte{243};  // ELF header: e_machine = EM_RISCV
    object[19] = std::byte{0};
    try {
        (void)HostCode::load(object, "riscv");
        FAIL();
    } catch (const CompileError& e) {
        EXPECT_THAT(e.what(), HasSubstr("riscv64"));
    }
}

TEST(HostCode, UnresolvedReference_IsACompileErrorNamingIt) {
    const auto object = compile_host_object(native_cpu().cpu, "caller", [](llvm::Module& m) {
        FunctionBuilder f(m, kBaseline, "caller", {});
        f.call_external("flce_no_such_function_anywhere");
        f.finish();
    });
    try {
        (void)HostCode::load(object, "caller");
        FAIL();
    } catch (const CompileError& e) {
        EXPECT_THAT(e.what(), HasSubstr("flce_no_such_function_anywhere"));
    }
}

TEST(HostCode, MalformedIr_IsACompileErrorWithTheIrSaved) {
    try {
        (void)compile_host_object(native_cpu().cpu, "unfinished",
                                  [](llvm::Module& m) { const FunctionBuilder f(m, kBaseline, "unfinished_function", {}); });
        FAIL();
    } catch (const CompileError& e) {
        EXPECT_THAT(e.log(), HasSubstr("terminator"));
        ASSERT_FALSE(e.source_path().empty());
        std::ifstream file(e.source_path());
        const std::string text((std::istreambuf_iterator<char>(file)), {});
        EXPECT_THAT(text, HasSubstr("unfinished_function"));
        EXPECT_THAT(e.what(), HasSubstr(e.source_path().string()));
        std::filesystem::remove(e.source_path());
    }
}

TEST(HostCode, UnknownTarget_IsACompileErrorNamingIt) {
    CpuProperties cpu = native_cpu().cpu;
    cpu.triple = "vax-dec-vms";
    try {
        (void)compile_host_object(cpu, "vax", [](llvm::Module& m) { emit_iota(m, "iota"); });
        FAIL();
    } catch (const CompileError& e) {
        EXPECT_THAT(e.what(), HasSubstr("vax-dec-vms"));
    }
}

// A pack that is made on one machine serves the other.
TEST(HostCode, BothArchitectures_AreCompiledFor) {
    ASSERT_EQ(host_archs().size(), 2U);
    for (const std::string_view arch : host_archs()) {
        const std::string triple = linux_triple(arch);
        const auto object =
            compile_host_object({.triple = triple, .cpu = "generic"}, "iota", [](llvm::Module& m) { emit_iota(m, "iota"); });
        constexpr std::array<const char*, 1> symbols{"iota"};
        EXPECT_EQ(host_object_fault(object, triple, symbols), "");
        if (triple == native_triple()) continue;
        EXPECT_THAT(host_object_fault(object, native_triple(), symbols), HasSubstr("not"));
        EXPECT_THROW((void)HostCode::load(object, "iota"), CompileError);
    }
}

TEST(HostCode, ManyThreadsAtOnce_AllWork) {
    std::vector<int> good(8, 0);
    {
        std::vector<std::jthread> threads;
        for (int& g : good) {
            threads.emplace_back([&g] {
                for (int round = 0; round < 3; ++round) {
                    const auto code = HostCode::load(iota_object(), "iota");
                    std::int64_t numbers[4] = {};
                    reinterpret_cast<void (*)(std::int64_t*, std::int64_t)>(code->symbol("iota"))(numbers, 4);
                    g += numbers[3] == 3;
                }
            });
        }
    }
    EXPECT_EQ(std::accumulate(good.begin(), good.end(), 0), 24);
}

TEST(HostCode, LlvmVersion_IsAVersion) { EXPECT_THAT(llvm_version(), testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+.*")); }

TEST(NativeCpu, DescribesThisMachine) {
    const Device device = native_cpu();
    EXPECT_EQ(device.kind, DeviceKind::cpu);
    EXPECT_EQ(device.cpu.triple, native_triple());
    EXPECT_THAT(device.cpu.triple, HasSubstr("linux"));
    EXPECT_GE(device.cpu.cores, 1);
    EXPECT_LE(device.cpu.cores, static_cast<int>(std::thread::hardware_concurrency()));
    EXPECT_GT(device.cpu.l1d_bytes, 4096);
    EXPECT_GT(device.cpu.l2_bytes, device.cpu.l1d_bytes);
    EXPECT_THAT(device.cpu.vector_bits, testing::AnyOf(128, 256, 512));
    EXPECT_EQ(device, native_cpu());
#if defined(__x86_64__)
    EXPECT_EQ(device.cpu.vector_bits == 512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                                                 __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"));
    EXPECT_EQ(device.cpu.fma, __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2"));
    EXPECT_EQ(device.cpu.bf16_dot, device.cpu.vector_bits == 512 && __builtin_cpu_supports("avx512bf16"));
#endif
}

}  // namespace
}  // namespace flce::test
