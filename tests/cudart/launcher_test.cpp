// Compiled launchers against interpret(), the meaning of a launch program.
#include "runtime/cuda/launcher.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <random>

#include "flce/error.hpp"
#include "generator/launch_text.hpp"
#include "runtime/host/host_code.hpp"
#include "tests/support/interpreter.hpp"

namespace flce {
namespace {

using test::interpret;
using test::InterpretedGemm;
using test::InterpretedLaunch;
using test::InterpretedMap;

struct Call {
    int kernel = -1;  // -1: a memset
    std::array<std::int64_t, 3> grid{};
    std::vector<std::byte> params;  // maps as write_map writes them
    std::int64_t address = 0;
    std::int64_t bytes = 0;
    friend bool operator==(const Call&, const Call&) = default;
};

/// Stands in for the driver.
struct Recorder {
    std::vector<Call> calls;
    std::vector<std::array<unsigned, 4>> blocks;  // block dimensions and shared memory of each launch
    void* stream = nullptr;
    std::optional<std::size_t> fail_at;
    std::optional<std::size_t> fail_map_at;  // map that cannot be written
    std::size_t maps = 0;
    std::vector<std::size_t> param_bytes;  // bytes of each call to come: the driver knows them from the kernel
};
Recorder* recorder = nullptr;
constexpr int kFailure = 719;

int outcome() { return recorder->fail_at && recorder->calls.size() - 1 == *recorder->fail_at ? kFailure : 0; }

int record_launch(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem, void* stream,
                  void** params, void** extra) {
    EXPECT_EQ(extra, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(params[0]) % 64, 0U);
    const auto* bytes = static_cast<const std::byte*>(params[0]);
    Call call{static_cast<int>(reinterpret_cast<std::uintptr_t>(function)), {gx, gy, gz}, {}, 0, 0};
    call.params.assign(bytes, bytes + recorder->param_bytes.at(recorder->calls.size()));
    recorder->calls.push_back(std::move(call));
    recorder->blocks.push_back({bx, by, bz, smem});
    recorder->stream = stream;
    return outcome();
}

int record_overlapping(const LauncherContext* context, void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned smem,
                       void* stream, void** params) {
    EXPECT_EQ(context->tensor_map_encode, recorder);
    return record_launch(function, gx, gy, gz, bx, 1, 1, smem, stream, params, nullptr);
}

int record_memset(std::uint64_t address, unsigned char value, std::size_t bytes, void* stream) {
    EXPECT_EQ(value, 0);
    recorder->calls.push_back({-1, {}, {}, static_cast<std::int64_t>(address), static_cast<std::int64_t>(bytes)});
    recorder->stream = stream;
    return outcome();
}

/// Stands in for a CUtensorMap.
void write_map(std::byte* at, const InterpretedMap& map) {
    const std::int64_t words[] = {map.address, map.columns,     map.rows,     map.row_bytes,
                                  map.blocks,  map.block_bytes, map.box_rows, map.element_bytes};
    std::memcpy(at, words, sizeof words);
}

int record_map(const LauncherContext* context, void* map, std::int64_t address, std::int64_t columns, std::int64_t rows,
               std::int64_t row_bytes, std::int64_t blocks, std::int64_t block_bytes, unsigned box_rows, unsigned element_bytes) {
    EXPECT_EQ(context->tensor_map_encode, recorder);
    if (recorder->fail_map_at == recorder->maps++) return kFailure;
    write_map(static_cast<std::byte*>(map), {0, box_rows, element_bytes, address, columns, rows, row_bytes, blocks, block_bytes});
    return 0;
}

/// A product as a call: its numbers as the parameters of kernel −2.
Call call_of(GemmCall gemm) {
    gemm.adds = gemm.adds != 0 ? 1 : 0;
    Call call{-2, {}, std::vector<std::byte>(sizeof gemm), 0, 0};
    std::memcpy(call.params.data(), &gemm, sizeof gemm);
    return call;
}

int record_gemm(const LauncherContext* context, const GemmCall* gemm, void* stream) {
    EXPECT_EQ(context->gemm_library, recorder);
    recorder->calls.push_back(call_of(*gemm));
    recorder->stream = stream;
    return outcome();
}

CpuProperties host() {
#if defined(__aarch64__)
    return launcher_target("aarch64-unknown-linux-gnu");
#else
    return launcher_target("x86_64-unknown-linux-gnu");
#endif
}

std::vector<Call> interpreted(const LaunchProgram& program, const CallSlots& slots) {
    std::vector<Call> calls;
    interpret(
        program, slots,
        [&](const InterpretedLaunch& launch) {
            calls.push_back({launch.kernel, launch.grid, launch.params, 0, 0});
            for (const InterpretedMap& map : launch.maps) write_map(calls.back().params.data() + map.offset, map);
        },
        [&](std::int64_t address, std::int64_t bytes) { calls.push_back({-1, {}, {}, address, bytes}); },
        [&](const InterpretedGemm& g) {
            calls.push_back(call_of({g.kind.transpose_a, g.kind.transpose_b, static_cast<std::int64_t>(g.kind.operands),
                                     static_cast<std::int64_t>(g.kind.result), g.kind.algorithm, g.m, g.n, g.k, g.a, g.lda, g.b, g.ldb,
                                     g.result, g.ld, g.adds, g.factors, g.workspace}));
        });
    return calls;
}

/// A program's launchers, loaded.
class Loaded {
public:
    explicit Loaded(const CudaProgram& program)
        : program_(program),
          code_(HostCode::load(compile_launchers(program, host()), "test")),
          forward_(reinterpret_cast<LauncherFunction>(code_->symbol(kForwardLauncherSymbol))),
          backward_(reinterpret_cast<LauncherFunction>(code_->symbol(kBackwardLauncherSymbol))) {
        for (std::size_t i = 0; i < program.kernels.size(); ++i) functions_.push_back(reinterpret_cast<void*>(i));
        context_.launch_kernel = reinterpret_cast<void*>(&record_launch);
        context_.memset_async = reinterpret_cast<void*>(&record_memset);
        context_.functions = functions_.data();
        context_.encode_map = reinterpret_cast<void*>(&record_map);
        context_.launch_overlapping = reinterpret_cast<void*>(&record_overlapping);
        context_.gemm = reinterpret_cast<void*>(&record_gemm);
    }

    std::int64_t run(bool backward, const CallSlots& slots, Recorder& into, void* stream = nullptr) const {
        recorder = &into;
        LauncherContext context = context_;
        context.tensor_map_encode = &into;
        context.gemm_library = &into;
        for (const Call& call : interpreted(backward ? program_.backward : program_.forward, slots))
            into.param_bytes.push_back(call.params.size());
        const std::int64_t result = (backward ? backward_ : forward_)(&context, slots.data(), stream);
        recorder = nullptr;
        return result;
    }

private:
    CudaProgram program_;
    std::shared_ptr<const HostCode> code_;
    LauncherFunction forward_;
    LauncherFunction backward_;
    std::vector<void*> functions_;
    LauncherContext context_;
};

std::vector<KernelEntry> three_kernels() { return {{"first", 128, 0}, {"second", 256, 98304, true}, {"third", 32, 1024}}; }

CudaProgram program_of(LaunchProgram forward) {
    CudaProgram program;
    program.kernels = three_kernels();
    program.forward = std::move(forward);
    return program;
}

CallSlots slots_with(Slot which, std::int64_t value) {
    CallSlots slots{};
    slots[static_cast<std::size_t>(which)] = value;
    return slots;
}

/// Random programs over small numbers, so that nothing overflows.
class RandomProgram {
public:
    explicit RandomProgram(unsigned seed) : random_(seed) {}

    LaunchProgram program() {
        LaunchProgram program;
        variables_ = 0;
        most_variables_ = 0;
        program.body = body(3);
        program.variable_count = most_variables_;
        return program;
    }

    CallSlots slots() {
        CallSlots slots{};
        for (std::int64_t& slot : slots) slot = pick(4) == 0 ? 0 : pick(300);
        return slots;
    }

private:
    int pick(int below) { return std::uniform_int_distribution<int>(0, below - 1)(random_); }

    Expr leaf() {
        if (variables_ > 0 && pick(3) == 0) return variable(pick(variables_));
        if (pick(2) == 0) return slot(static_cast<Slot>(pick(static_cast<int>(kSlotCount))));
        return Expr(pick(40) - 8);
    }

    Expr expression(int depth) {
        if (depth == 0) return leaf();
        const Expr a = expression(depth - 1);
        const Expr b = expression(pick(depth));
        switch (pick(9)) {
            case 0: return a + b;
            case 1: return a - b;
            case 2: return a * max(min(b, 50), -50);
            case 3: return ceil_div(max(a, 0), max(b, 1));
            case 4: return floor_div(max(a, 0), max(b, 1));
            case 5: return min(a, b);
            case 6: return equal(a, b);
            case 7: return less(a, b);
            default: return select(less(a, b), expression(depth - 1), a + 1);
        }
    }

    Launch launch() {
        Launch launch;
        launch.kernel = pick(3);
        for (Expr& dimension : launch.grid) dimension = min(expression(2), 65535);
        launch.param_bytes = static_cast<std::uint32_t>(pick(12)) * 8;
        for (std::uint32_t offset = 0; offset < launch.param_bytes; offset += 8) {
            if (pick(5) == 0) continue;  // a field left zero
            if (pick(3) == 0) {
                launch.params.push_back({offset, 4, expression(2)});
                launch.params.push_back({offset + 4, 4, float_bits(static_cast<float>(pick(100)) * 0.25F)});
            } else {
                launch.params.push_back({offset, 8, expression(3)});
            }
        }
        for (int maps = pick(3); maps > 0; --maps) {
            launch.param_bytes = (launch.param_bytes + 63) / 64 * 64;
            launch.maps.push_back({launch.param_bytes, pick(2) == 0 ? 2U : 4U, expression(1), expression(2), expression(2), expression(1),
                                   expression(2), pick(2) == 0 ? Expr(0) : expression(1), expression(1)});
            launch.param_bytes += TensorMapField::kBytes;
        }
        return launch;
    }

    Gemm gemm() {
        Gemm made{.kind = {"product", pick(2) == 0, pick(2) == 0, DType::fp16, pick(2) == 0 ? DType::fp32 : DType::bf16, pick(3)}};
        for (Expr* e : {&made.m, &made.n, &made.k, &made.a, &made.lda, &made.b, &made.ldb, &made.result, &made.ld, &made.adds,
                        &made.factors, &made.workspace}) {
            *e = expression(2);
        }
        return made;
    }

    std::vector<Statement> body(int depth) {
        std::vector<Statement> statements;
        for (int count = 1 + pick(3); count > 0; --count) {
            const int kind = depth == 0 ? pick(3) : pick(6);
            if (kind < 2) {
                statements.push_back({launch()});
            } else if (kind == 2) {
                if (pick(2) == 0) {
                    statements.push_back({gemm()});
                } else {
                    statements.push_back({MemsetZero{expression(2), expression(2)}});
                }
            } else if (kind == 3) {
                const Expr condition = expression(2);
                statements.push_back({If{condition, body(depth - 1)}});
            } else {
                Loop loop{variables_, min(expression(2), 4), {}};
                ++variables_;
                most_variables_ = std::max(most_variables_, variables_);
                loop.body = body(depth - 1);
                --variables_;
                statements.push_back({std::move(loop)});
            }
        }
        return statements;
    }

    std::mt19937 random_;
    int variables_ = 0;
    int most_variables_ = 0;
};

TEST(Launcher, RandomPrograms_CallTheDriverAsInterpreted) {
    std::size_t calls = 0;
    for (unsigned seed = 0; seed < 50; ++seed) {
        RandomProgram random(seed);
        CudaProgram program = program_of(random.program());
        program.backward = random.program();
        const Loaded launchers(program);
        for (int round = 0; round < 8; ++round) {
            const CallSlots slots = random.slots();
            for (const bool backward : {false, true}) {
                Recorder recorded;
                ASSERT_EQ(launchers.run(backward, slots, recorded), 0) << "seed " << seed;
                ASSERT_EQ(recorded.calls, interpreted(backward ? program.backward : program.forward, slots)) << "seed " << seed;
                calls += recorded.calls.size();
            }
        }
    }
    EXPECT_GT(calls, 500U);  // the programs do something
}

TEST(Launcher, BlockSharedMemoryAndStream_AreTheKernelsAndTheCalls) {
    Launch second{1, {Expr(3), Expr(1), Expr(1)}, 0, {}};
    const Loaded launchers(program_of({{{second}, {MemsetZero{4096, 8}}}, 0}));
    int stream = 0;
    Recorder recorded;
    ASSERT_EQ(launchers.run(false, CallSlots{}, recorded, &stream), 0);
    ASSERT_EQ(recorded.blocks.size(), 1U);
    EXPECT_EQ(recorded.blocks[0], (std::array<unsigned, 4>{256, 1, 1, 98304}));
    EXPECT_EQ(recorded.stream, &stream);
    EXPECT_EQ(recorded.calls.size(), 2U);
}

TEST(Launcher, EmptyGridOrMemset_CallsNothing) {
    Launch launch{0, {slot(Slot::num_tokens), Expr(1), Expr(1)}, 8, {{0, 8, slot(Slot::hidden)}}};
    const Loaded launchers(program_of({{{launch}, {MemsetZero{4096, slot(Slot::num_tokens) * 4}}}, 0}));
    for (const std::int64_t num_tokens : {0, -1}) {
        Recorder recorded;
        EXPECT_EQ(launchers.run(false, slots_with(Slot::num_tokens, num_tokens), recorded), 0);
        EXPECT_TRUE(recorded.calls.empty());
    }
}

TEST(Launcher, FailedCall_ReturnsItsResultAndStatementAndStops) {
    // Statements: 0 memset, 1 loop, 2 launch in it, 3 if, 4 launch in that, 5 launch.
    Launch launch{2, {Expr(1), Expr(1), Expr(1)}, 8, {{0, 8, variable(0)}}};
    Launch last{0, {Expr(1), Expr(1), Expr(1)}, 0, {}};
    const Loop loop{0, Expr(2), {{launch}, {If{equal(variable(0), 1), {{launch}}}}}};
    const LaunchProgram program{{{MemsetZero{16, 16}}, {loop}, {last}}, 1};
    const Loaded launchers(program_of(program));
    const std::vector<std::size_t> statement_of_call = {0, 2, 2, 4, 5};
    const std::vector<std::string> texts = statement_texts(program, three_kernels());
    ASSERT_EQ(texts.size(), 6U);
    for (std::size_t at = 0; at < statement_of_call.size(); ++at) {
        Recorder recorded;
        recorded.fail_at = at;
        const auto failure = launcher_failure(launchers.run(false, CallSlots{}, recorded));
        ASSERT_TRUE(failure.has_value());
        EXPECT_EQ(failure->result, kFailure);
        EXPECT_EQ(failure->statement, statement_of_call[at]);
        EXPECT_FALSE(failure->tensor_map);
        EXPECT_STREQ(failed_call(program, three_kernels(), *failure), at == 0 ? "cuMemsetD8Async" : "cuLaunchKernel");
        EXPECT_EQ(recorded.calls.size(), at + 1);
    }
    EXPECT_EQ(launcher_failure(0), std::nullopt);
    EXPECT_EQ(texts[0], "memset 16, 16 bytes");
    EXPECT_EQ(texts[1], "for i0 < 2");
    EXPECT_EQ(texts[4], "    launch third grid(1, 1, 1) params[8] 0+8: i0;");
    EXPECT_EQ(statement_text(program, three_kernels(), 4), "launch third grid(1, 1, 1) params[8] 0+8: i0;");
    EXPECT_NE(texts[5].find("launch first"), std::string::npos);
}

TEST(Launcher, FailedCall_IsNamedByWhatTheStatementIs) {
    const LaunchProgram program{{{MemsetZero{16, 16}}, {Loop{0, Expr(2), {{Launch{1}}}}}, {Launch{0}}, {Gemm{}}}, 1};
    const auto call = [&](std::size_t statement, bool tensor_map) {
        return std::string(failed_call(program, three_kernels(), {statement, tensor_map, kFailure}));
    };
    EXPECT_EQ(call(0, false), "cuMemsetD8Async");
    EXPECT_EQ(call(2, false), "cuLaunchKernelEx") << "which overlaps the kernel before it";
    EXPECT_EQ(call(2, true), "cuTensorMapEncodeTiled");
    EXPECT_EQ(call(3, false), "cuLaunchKernel");
    EXPECT_EQ(call(4, false), "cublasLtMatmul");
    EXPECT_THROW(call(1, false), InternalError) << "a loop calls nothing";
    EXPECT_THROW(call(5, false), InternalError) << "there are five statements";
}

TEST(Launcher, MapThatCannotBeWritten_LaunchesNothing) {
    Launch launch{1, {Expr(1), Expr(1), Expr(1)}, 256, {}, {{0, 64, 2, 0, 1, 1, 128}, {128, 64, 2, 0, 1, 1, 128}}};
    const Loaded launchers(program_of({{{launch}}, 0}));
    Recorder recorded;
    recorded.fail_map_at = 1;
    const auto failure = launcher_failure(launchers.run(false, CallSlots{}, recorded));
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->result, kFailure);
    EXPECT_TRUE(failure->tensor_map);
    EXPECT_TRUE(recorded.calls.empty());
}

TEST(Launcher, GridPast32Bits_IsHandedOnAsOneTheDriverRefuses) {
    Launch launch{0, {slot(Slot::num_tokens), Expr(1), Expr(1)}, 0, {}, {}};
    const Loaded launchers(program_of({{{launch}}, 0}));
    Recorder recorded;
    ASSERT_EQ(launchers.run(false, slots_with(Slot::num_tokens, (1LL << 32) + 1), recorded), 0);
    ASSERT_EQ(recorded.calls.size(), 1U);
    EXPECT_EQ(recorded.calls[0].grid[0], 0xffffffffLL);
}

TEST(Launcher, DivisionByZeroInTheBranchNotTaken_DoesNotTrap) {
    const Expr n = slot(Slot::num_tokens);
    Launch launch{0, {Expr(1), Expr(1), Expr(1)}, 8, {{0, 8, select(equal(n, 0), 7, floor_div(100, n))}}, {}};
    const Loaded launchers(program_of({{{launch}}, 0}));
    Recorder recorded;
    ASSERT_EQ(launchers.run(false, slots_with(Slot::num_tokens, 0), recorded), 0);
    std::int64_t value = 0;
    std::memcpy(&value, recorded.calls.at(0).params.data(), sizeof(value));
    EXPECT_EQ(value, 7);
}

TEST(Launcher, MalformedProgram_IsAnInternalError) {
    Launch unknown{3, {Expr(1), Expr(1), Expr(1)}, 0, {}, {}};
    EXPECT_THROW(compile_launchers(program_of({{{unknown}}, 0}), host()), InternalError);
    Launch outside{0, {Expr(1), Expr(1), Expr(1)}, 8, {{4, 8, 1}}, {}};
    EXPECT_THROW(compile_launchers(program_of({{{outside}}, 0}), host()), InternalError);
    Launch crooked{0, {Expr(1), Expr(1), Expr(1)}, 256, {}, {{32, 64, 2, 0, 1, 1, 128}}};
    EXPECT_THROW(compile_launchers(program_of({{{crooked}}, 0}), host()), InternalError);
    Launch stray{0, {variable(0), Expr(1), Expr(1)}, 0, {}, {}};
    EXPECT_THROW(compile_launchers(program_of({{{stray}}, 1}), host()), InternalError);
}

TEST(Launcher, SameProgram_GivesTheSameObject) {
    RandomProgram first(5);
    RandomProgram second(5);
    EXPECT_EQ(compile_launchers(program_of(first.program()), host()), compile_launchers(program_of(second.program()), host()));
}

}  // namespace
}  // namespace flce
