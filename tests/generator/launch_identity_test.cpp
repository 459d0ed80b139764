#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "generator/launch_program.hpp"

namespace flce {
namespace {

/// One statement of each kind, all fields set. Built anew each time: nothing is shared between two of them.
LaunchProgram everything() {
    const auto n = [] { return slot(Slot::num_tokens); };
    Launch launch{.kernel = 1, .grid = {n(), n() + 1, Expr(3)}, .param_bytes = 256};
    launch.params = {{0, 8, slot(Slot::hidden)}, {8, 4, n() * 2}};
    launch.maps = {{.offset = 128,
                    .element_bytes = 2,
                    .box_rows = Expr(64),
                    .address = slot(Slot::weight),
                    .columns = Expr(2048),
                    .rows = n(),
                    .row_bytes = Expr(4096),
                    .blocks = n() - 5,
                    .block_bytes = Expr(1 << 20)}};
    LaunchProgram program{.variable_count = 1};
    program.body.push_back({MemsetZero{slot(Slot::workspace), n() * 4}});
    program.body.push_back({Loop{0, ceil_div(n(), 128), {{launch}}}});
    program.body.push_back({If{less(n(), 7), {{MemsetZero{slot(Slot::lse), Expr(16)}}}}});
    program.body.push_back({Gemm{.kind = {"product", true, false, DType::bf16, DType::fp32, 1},
                                 .m = n(),
                                 .n = Expr(2048),
                                 .k = n() + 2,
                                 .a = slot(Slot::hidden),
                                 .lda = Expr(8),
                                 .b = slot(Slot::weight),
                                 .ldb = Expr(16),
                                 .result = slot(Slot::workspace),
                                 .ld = Expr(24),
                                 .adds = less(n(), 3),
                                 .factors = slot(Slot::lse),
                                 .workspace = slot(Slot::loss)}});
    return program;
}

Gemm& gemm_of(LaunchProgram& program) { return std::get<Gemm>(program.body[3].value); }
Launch& launch_of(LaunchProgram& program) { return std::get<Launch>(std::get<Loop>(program.body[1].value).body[0].value); }
MemsetZero& memset_of(LaunchProgram& program) { return std::get<MemsetZero>(program.body[0].value); }

TEST(ProgramIdentity, TheSameBuiltAgain_TheSame) {
    EXPECT_EQ(program_identity(everything()), program_identity(everything()));
    EXPECT_NE(program_identity(everything()), program_identity({}));
}

TEST(ProgramIdentity, AnyFieldChanged_Another) {
    const Expr other = slot(Slot::entropy);
    const std::map<std::string, std::function<void(LaunchProgram&)>> changes{
        {"variables", [&](LaunchProgram& p) { ++p.variable_count; }},
        {"kernel", [&](LaunchProgram& p) { ++launch_of(p).kernel; }},
        {"gemm's name", [&](LaunchProgram& p) { gemm_of(p).kind.name = "other"; }},
        {"gemm's a", [&](LaunchProgram& p) { gemm_of(p).kind.transpose_a = false; }},
        {"gemm's b", [&](LaunchProgram& p) { gemm_of(p).kind.transpose_b = true; }},
        {"gemm's operands", [&](LaunchProgram& p) { gemm_of(p).kind.operands = DType::fp16; }},
        {"gemm's result", [&](LaunchProgram& p) { gemm_of(p).kind.result = DType::bf16; }},
        {"gemm's algorithm", [&](LaunchProgram& p) { ++gemm_of(p).kind.algorithm; }},
        {"gemm's m", [&](LaunchProgram& p) { gemm_of(p).m = other; }},
        {"gemm's n", [&](LaunchProgram& p) { gemm_of(p).n = other; }},
        {"gemm's k", [&](LaunchProgram& p) { gemm_of(p).k = other; }},
        {"address of a", [&](LaunchProgram& p) { gemm_of(p).a = other; }},
        {"rows of a", [&](LaunchProgram& p) { gemm_of(p).lda = other; }},
        {"address of b", [&](LaunchProgram& p) { gemm_of(p).b = other; }},
        {"rows of b", [&](LaunchProgram& p) { gemm_of(p).ldb = other; }},
        {"address of the result", [&](LaunchProgram& p) { gemm_of(p).result = other; }},
        {"rows of the result", [&](LaunchProgram& p) { gemm_of(p).ld = other; }},
        {"adds", [&](LaunchProgram& p) { gemm_of(p).adds = other; }},
        {"factors", [&](LaunchProgram& p) { gemm_of(p).factors = other; }},
        {"gemm's workspace", [&](LaunchProgram& p) { gemm_of(p).workspace = other; }},
        {"grid x", [&](LaunchProgram& p) { launch_of(p).grid[0] = other; }},
        {"grid y", [&](LaunchProgram& p) { launch_of(p).grid[1] = other; }},
        {"grid z", [&](LaunchProgram& p) { launch_of(p).grid[2] = other; }},
        {"grid exchanged", [&](LaunchProgram& p) { std::swap(launch_of(p).grid[0], launch_of(p).grid[1]); }},
        {"parameter bytes", [&](LaunchProgram& p) { launch_of(p).param_bytes = 512; }},
        {"no parameters", [&](LaunchProgram& p) { launch_of(p).params.clear(); }},
        {"parameter offset", [&](LaunchProgram& p) { launch_of(p).params[1].offset = 16; }},
        {"parameter size", [&](LaunchProgram& p) { launch_of(p).params[1].bytes = 8; }},
        {"parameter value", [&](LaunchProgram& p) { launch_of(p).params[1].value = slot(Slot::num_tokens) * 3; }},
        {"parameter operation", [&](LaunchProgram& p) { launch_of(p).params[1].value = slot(Slot::num_tokens) + 2; }},
        {"map offset", [&](LaunchProgram& p) { launch_of(p).maps[0].offset = 64; }},
        {"map element", [&](LaunchProgram& p) { launch_of(p).maps[0].element_bytes = 4; }},
        {"map box", [&](LaunchProgram& p) { launch_of(p).maps[0].box_rows = Expr(32); }},
        {"map address", [&](LaunchProgram& p) { launch_of(p).maps[0].address = other; }},
        {"map columns", [&](LaunchProgram& p) { launch_of(p).maps[0].columns = other; }},
        {"map rows", [&](LaunchProgram& p) { launch_of(p).maps[0].rows = other; }},
        {"map row bytes", [&](LaunchProgram& p) { launch_of(p).maps[0].row_bytes = other; }},
        {"map blocks", [&](LaunchProgram& p) { launch_of(p).maps[0].blocks = other; }},
        {"map block bytes", [&](LaunchProgram& p) { launch_of(p).maps[0].block_bytes = other; }},
        {"memset address", [&](LaunchProgram& p) { memset_of(p).address = other; }},
        {"memset bytes", [&](LaunchProgram& p) { memset_of(p).bytes = variable(0); }},
        {"memset bytes, a slot of a variable's number", [&](LaunchProgram& p) { memset_of(p).bytes = slot(Slot{0}); }},
        {"loop variable", [&](LaunchProgram& p) { std::get<Loop>(p.body[1].value).variable = 1; }},
        {"loop count", [&](LaunchProgram& p) { std::get<Loop>(p.body[1].value).count = other; }},
        {"condition", [&](LaunchProgram& p) { std::get<If>(p.body[2].value).condition = less(7, slot(Slot::num_tokens)); }},
        {"after the branch",
         [&](LaunchProgram& p) {
             auto& then = std::get<If>(p.body[2].value).then;
             const Statement moved = then.front();
             then.clear();
             p.body.push_back(moved);
         }},
        {"order", [&](LaunchProgram& p) { std::swap(p.body[0], p.body[2]); }},
        {"one less", [&](LaunchProgram& p) { p.body.pop_back(); }},
    };
    std::map<std::string, std::string> seen{{program_identity(everything()), "nothing"}};
    for (const auto& [name, change] : changes) {
        LaunchProgram program = everything();
        change(program);
        const auto [at, is_new] = seen.emplace(program_identity(program), name);
        EXPECT_TRUE(is_new) << name << " is as " << at->second;
    }
}

TEST(ProgramIdentity, ManyUsesOfAPart_WrittenOnce) {
    const auto grown = [](int depth) {
        Expr e = slot(Slot::num_tokens) + 1;
        for (int i = 0; i < depth; ++i) e = max(e * e, e + 1);  // 2^depth parts and more, written out
        return LaunchProgram{.body = {{MemsetZero{Expr(0), e}}}};
    };
    EXPECT_LT(program_identity(grown(60)).size(), 60U * 200U);
    EXPECT_EQ(program_identity(grown(60)), program_identity(grown(60)));
    EXPECT_NE(program_identity(grown(60)), program_identity(grown(59)));
}

TEST(ProgramIdentity, GeneratedPrograms_DifferWhereTheirCallsDo) {
    const Spec spec = parse_spec("D=2048,V=151936,dtype=bf16").normalized();
    const Device device = describe_device("h100");
    Plan plan = choose_plan(spec, device);
    const CudaProgram program = generate_cuda(spec, device, plan);
    const CudaProgram again = generate_cuda(spec, device, plan);
    EXPECT_EQ(program_identity(program.forward), program_identity(again.forward));
    EXPECT_EQ(program_identity(program.backward), program_identity(again.backward));
    EXPECT_NE(program_identity(program.forward), program_identity(program.backward));
    plan.scratch_bytes *= 2;
    EXPECT_NE(program_identity(program.backward), program_identity(generate_cuda(spec, device, plan).backward));
}

}  // namespace
}  // namespace flce
