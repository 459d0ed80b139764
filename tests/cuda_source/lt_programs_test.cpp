// Programs of the path that multiplies with cuBLASLt: which products there are, where their operands lie, and what follows each of them.
// Nothing is written over before it has been read.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "generator/planner.hpp"
#include "templates/common/output_params.cuh"
#include "templates/lt/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce::lt_programs {
namespace {

using test::InterpretedGemm;
using test::InterpretedLaunch;
using test::Recorded;

constexpr std::int64_t kOwn = std::int64_t{99} << 44;

enum class Kept { none, all, half, lent };

struct Case {
    const char* name;
    const char* spec;
    std::int64_t tokens;
    Kept kept = Kept::none;
    std::int64_t scratch = 64 << 20;
    const char* device = "b200";
};

/// A product, and the launch that follows it.
struct Step {
    InterpretedGemm gemm;
    Recorded next;
};

/// Bytes from `begin` to `end`.
struct Range {
    std::int64_t begin;
    std::int64_t end;
    [[nodiscard]] bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
    [[nodiscard]] bool holds(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

Range matrix(std::int64_t at, std::int64_t rows, std::int64_t columns, std::int64_t ld, std::int64_t element) {
    return {at, at + ((rows - 1) * ld + columns) * element};
}

std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(element_bytes(dtype)); }

class LtPrograms : public testing::TestWithParam<Case> {
protected:
    const Case& of = GetParam();
    Spec spec = parse_spec(of.spec).normalized();
    Device device = describe_device(of.device);
    Plan plan = path_plans(spec, device, PlanPath::cuda_lt, {.scratch_bytes = of.scratch}).front();
    CudaProgram program = generate_cuda(spec, device, plan);
    CallSlots slots = call();

    CallSlots call() const {
        CallSlots made = test::made_up_call(of.tokens, {});
        const auto set = [&](Slot slot, std::int64_t value) { made[static_cast<std::size_t>(slot)] = value; };
        set(Slot::vocab_columns, spec.vocab_size);
        set(Slot::weight_rows, spec.padded_vocab_size);
        if (of.kept == Kept::none) return made;
        const std::int64_t all = evaluate(program.retained_bytes, made);
        const bool lent = of.kept == Kept::lent;
        set(Slot::retained, lent ? made[static_cast<std::size_t>(Slot::grad_weight)] : kOwn);
        set(Slot::retained_bytes, lent ? evaluate(program.lendable_bytes, made) : of.kept == Kept::half ? all / 2 : all);
        set(Slot::retained_in_grad_weight, lent ? 1 : 0);
        return made;
    }
    [[nodiscard]] std::int64_t slot_of(Slot slot) const { return slots[static_cast<std::size_t>(slot)]; }

    std::vector<Step> steps_of(const LaunchProgram& pass) const {
        std::vector<Step> steps;
        bool waits = false;
        test::interpret(
            pass, slots,
            [&](const InterpretedLaunch& launch) {
                if (waits) steps.back().next = {program.kernels[static_cast<std::size_t>(launch.kernel)].name, launch};
                waits = false;
            },
            [](std::int64_t, std::int64_t) {},
            [&](const InterpretedGemm& gemm) {
                steps.push_back({gemm, {}});
                waits = true;
            });
        return steps;
    }
    [[nodiscard]] std::vector<Step> named(const std::vector<Step>& steps, std::string_view name) const {
        std::vector<Step> found;
        std::ranges::copy_if(steps, std::back_inserter(found), [&](const Step& step) { return step.gemm.kind.name == name; });
        return found;
    }

    [[nodiscard]] bool hidden_major() const { return spec.layout == WeightLayout::hidden_major; }
    /// Column of the vocabulary at which an operand of the weight's, or of its gradient's, begins.
    [[nodiscard]] std::int64_t column_at(std::int64_t address, Slot tensor, DType dtype) const {
        const std::int64_t elements = (address - slot_of(tensor)) / bytes_of(dtype);
        return hidden_major() ? elements : elements / spec.hidden_size;
    }
    [[nodiscard]] std::int64_t row_at(std::int64_t address) const {
        return (address - slot_of(Slot::hidden)) / (spec.hidden_size * bytes_of(spec.dtype));
    }
    [[nodiscard]] Range workspace(const Expr& bytes) const {
        const std::int64_t at = slot_of(Slot::workspace);
        return {at, at + evaluate(bytes, slots)};
    }
    /// Whether logits' products compute every token's columns from `first` on, once each.
    void expect_all_logits(const std::vector<Step>& steps, std::int64_t first) const {
        std::int64_t area = 0;
        std::set<std::pair<std::int64_t, std::int64_t>> places;
        for (const Step& step : named(steps, "logits")) {
            const InterpretedGemm& g = step.gemm;
            const std::int64_t row = row_at(g.a);
            const std::int64_t column = column_at(g.b, Slot::weight, spec.dtype);
            EXPECT_GE(column, first);
            EXPECT_LE(row + g.m, of.tokens);
            EXPECT_LE(column + g.n, spec.vocab_size);
            EXPECT_TRUE(places.emplace(row, column).second) << row << " " << column;
            EXPECT_EQ(g.k, spec.hidden_size);
            EXPECT_FALSE(g.adds);
            area += g.m * g.n;
        }
        EXPECT_EQ(area, of.tokens * (spec.vocab_size - first));
    }
};

TEST_P(LtPrograms, Forward_MultipliesEveryColumnOnceAndReducesItAtOnce) {
    const std::vector<Step> steps = steps_of(program.forward);
    const Range room = workspace(program.forward_workspace_bytes);
    EXPECT_LE(room.end - room.begin, of.scratch);
    expect_all_logits(steps, 0);
    for (const Step& step : steps) {
        const InterpretedGemm& g = step.gemm;
        ASSERT_EQ(step.next.kernel, "flce_forward");
        const auto p = step.next.params<LtForwardParams>();
        EXPECT_EQ(reinterpret_cast<std::int64_t>(p.sums), g.result);
        EXPECT_EQ(p.ld, g.ld);
        EXPECT_EQ(p.rows, g.m);
        EXPECT_EQ(p.columns, g.n);
        EXPECT_EQ(p.first_column, column_at(g.b, Slot::weight, spec.dtype));
        EXPECT_EQ(p.first != 0, p.first_column == 0);
        EXPECT_EQ(p.splits, step.next.launch.grid[1]);
        EXPECT_GE(step.next.launch.grid[0] * 16, g.m);
        EXPECT_TRUE(room.holds(matrix(g.result, g.m, g.n, g.ld, 4)));
        EXPECT_TRUE(room.holds({g.workspace, g.workspace + kGemmWorkspaceBytes}));
        EXPECT_FALSE(matrix(g.result, g.m, g.n, g.ld, 4).meets({g.workspace, g.workspace + kGemmWorkspaceBytes}));
    }
}

TEST_P(LtPrograms, Backward_HasEveryPartOfBothGradientsOnce) {
    const std::vector<Step> steps = steps_of(program.backward);
    const Range room = workspace(program.backward_workspace_bytes);
    EXPECT_LE(room.end - room.begin, of.scratch + workspace_of_tokens(spec, of.tokens).value());
    std::int64_t of_hidden = 0;
    std::int64_t of_weight = 0;
    std::map<std::int64_t, int> begun;  // rows of grad_hidden's sum
    std::set<std::int64_t> columns;
    for (const Step& step : steps) {
        const InterpretedGemm& g = step.gemm;
        EXPECT_TRUE(room.holds({g.workspace, g.workspace + kGemmWorkspaceBytes}));
        if (g.kind.name == "grad_hidden") {
            EXPECT_EQ(g.n, spec.hidden_size);
            EXPECT_EQ(g.adds, begun[g.result]++ > 0) << "the first product of a row begins its sum";
            of_hidden += g.m * g.k;
        }
        if (g.kind.name == "grad_weight") {
            EXPECT_EQ(hidden_major() ? g.m : g.n, spec.hidden_size);
            of_weight += (hidden_major() ? g.n : g.m) * g.k;
            if (g.kind.result == spec.grad_weight_dtype && g.factors != 0) {
                EXPECT_EQ(g.adds, spec.grad_weight_mode == GradMode::accumulate);
                EXPECT_TRUE(columns.insert(column_at(g.result, Slot::grad_weight, spec.grad_weight_dtype)).second);
            } else {
                EXPECT_EQ(g.kind.result, DType::fp32) << "sums over row blocks";
                EXPECT_TRUE(room.holds(matrix(g.result, g.m, g.n, g.ld, 4)));
            }
        }
    }
    EXPECT_EQ(of_hidden, of.tokens * spec.vocab_size);
    EXPECT_EQ(of_weight, of.tokens * spec.vocab_size);
}

TEST_P(LtPrograms, Chunks_BecomeDlogitsPieceByPiece) {
    const std::vector<Step> steps = steps_of(program.backward);
    const std::vector<Step> logits = named(steps, "logits");
    std::int64_t retained = spec.vocab_size;
    for (const Step& step : logits) retained = std::min(retained, column_at(step.gemm.b, Slot::weight, spec.dtype));
    EXPECT_EQ(retained == 0, of.kept == Kept::none);
    EXPECT_EQ(retained == spec.vocab_size, of.kept == Kept::all);
    EXPECT_TRUE(retained % kLtRetainedColumns == 0 || retained == spec.vocab_size);
    if (retained < spec.vocab_size) expect_all_logits(steps, retained);
    for (const Step& step : logits) {
        const InterpretedGemm& g = step.gemm;
        ASSERT_EQ(step.next.kernel, "flce_dlogits");
        const auto p = step.next.params<LtDlogitsParams>();
        EXPECT_EQ(reinterpret_cast<std::int64_t>(p.sums), g.result);
        EXPECT_EQ(p.sums_ld, g.ld);
        EXPECT_EQ(p.rows, g.m);
        EXPECT_EQ(p.columns, g.n);
        EXPECT_EQ(p.first_column, column_at(g.b, Slot::weight, spec.dtype));
        EXPECT_GE(step.next.launch.grid[0] * kLtBlockRows, g.m);
        EXPECT_GE(step.next.launch.grid[1] * kLtTileColumns, g.n);
        EXPECT_EQ(reinterpret_cast<std::int64_t>(p.dlogits) % 16, 0);
    }
}

// A product of grad_weight may write over exponentials, but only over those that no later product reads.
TEST_P(LtPrograms, GradWeight_WritesOverNothingThatIsStillRead) {
    const std::vector<Step> steps = steps_of(program.backward);
    for (std::size_t i = 0; i < steps.size(); ++i) {
        const InterpretedGemm& writes = steps[i].gemm;
        const Range written = matrix(writes.result, writes.m, writes.n, writes.ld, bytes_of(writes.kind.result));
        for (std::size_t later = i; later < steps.size(); ++later) {
            const InterpretedGemm& reads = steps[later].gemm;
            if (reads.kind.name == "logits") continue;
            const bool of_weight = reads.kind.name == "grad_weight";
            const std::int64_t dlogits = of_weight && hidden_major() ? reads.b : reads.a;
            const std::int64_t ld = of_weight && hidden_major() ? reads.ldb : reads.lda;
            const std::int64_t rows = of_weight ? reads.k : reads.m;
            const std::int64_t width = of_weight ? (hidden_major() ? reads.n : reads.m) : reads.k;
            if (dlogits < slot_of(Slot::grad_weight) || dlogits > slot_of(Slot::grad_weight) + (std::int64_t{1} << 43)) continue;
            // dlogits of wide chunks are made anew for each chunk.
            if (later > i && steps[later - 1].gemm.kind.name == "logits") continue;
            const bool made_between =
                std::any_of(steps.begin() + static_cast<std::ptrdiff_t>(i), steps.begin() + static_cast<std::ptrdiff_t>(later),
                            [](const Step& step) { return step.gemm.kind.name == "logits"; });
            if (made_between) continue;
            EXPECT_FALSE(written.meets(matrix(dlogits, rows, width, ld, bytes_of(spec.dtype)))) << i << " " << later;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, LtPrograms,
    testing::Values(Case{"Recompute", "D=2048,V=50257", 3000}, Case{"AllRetained", "D=2048,V=50257", 3000, Kept::all},
                    Case{"HalfRetained", "D=2048,V=50257", 3000, Kept::half}, Case{"Lent", "D=2048,V=50257", 1500, Kept::lent},
                    Case{"LentManyTokens", "D=2048,V=151936", 9000, Kept::lent},
                    Case{"Accumulate", "D=2048,V=50257,grad_weight_mode=accumulate", 3000},
                    Case{"AccumulateHalf", "D=2048,V=50257,grad_weight_mode=accumulate", 3000, Kept::half},
                    Case{"RowBlocks", "D=1024,V=20000,grad_weight_mode=accumulate,bias", 40000, Kept::none, 16 << 20},
                    Case{"HiddenMajor", "D=1024,V=20000,layout=hidden_major", 5000, Kept::half},
                    Case{"HiddenMajorRowBlocks", "D=1024,V=20000,layout=hidden_major,dtype=fp16", 40000, Kept::none, 16 << 20},
                    Case{"OneToken", "D=64,V=1001", 1}, Case{"Hopper", "D=4096,V=128256", 8192, Kept::all, 64 << 20, "h100"},
                    Case{"Ampere", "D=4096,V=128256,bias,softcap=30", 100, Kept::none, 64 << 20, "a100"}),
    [](const auto& info) { return std::string(info.param.name); });

// The weight is rounded before each product that reads it.
TEST(LtProgramsOfARoundedWeight, Products_ReadTheRoundedStretch) {
    const Spec spec = parse_spec("D=1024,V=20000,weight_dtype=fp32").normalized();
    const Device device = describe_device("b200");
    const Plan plan = path_plans(spec, device, PlanPath::cuda_lt).front();
    const CudaProgram program = generate_cuda(spec, device, plan);
    const CallSlots slots = test::made_up_call(3000, {});
    for (const LaunchProgram* pass : {&program.forward, &program.backward}) {
        std::int64_t rounded = 0;
        std::int64_t rows = 0;
        std::int64_t columns = 0;
        test::interpret(
            *pass, slots,
            [&](const InterpretedLaunch& launch) {
                if (program.kernels[static_cast<std::size_t>(launch.kernel)].name != "flce_round_weight") return;
                const auto p = Recorded{"", launch}.params<RoundWeightParams>();
                rounded = reinterpret_cast<std::int64_t>(p.rounded);
                rows = p.rows;
            },
            [](std::int64_t, std::int64_t) {},
            [&](const InterpretedGemm& g) {
                if (g.kind.name == "grad_weight") return;
                EXPECT_GE(g.b, rounded);
                EXPECT_LE(g.b, rounded + rows * spec.hidden_size * 2);
                columns += g.kind.name == "logits" ? g.m * g.n : 0;
            });
        EXPECT_EQ(columns, 3000 * spec.vocab_size);
    }
}

}  // namespace
}  // namespace flce::lt_programs
