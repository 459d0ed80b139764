// Programs of a divergence whose logits lie in grad_weight's memory until backward writes it: whatever a launch or a product reads, nobody
// has written over it since it was made, in that memory and in the workspace.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "flce/plan.hpp"
#include "generator/cuda/common/heads_kernels.hpp"
#include "generator/cuda_program.hpp"
#include "generator/planner.hpp"
#include "templates/lt/params.cuh"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce::lent_heads {
namespace {

using test::InterpretedGemm;
using test::InterpretedLaunch;
using test::Recorded;

constexpr std::int64_t kOwn = std::int64_t{99} << 44;

constexpr std::int64_t kLittleScratch = 16 << 20;
constexpr std::int64_t kParkedBytes = std::int64_t{132} * 2 * 128 * 192 * 4;  ///< parked products of an H200's blocks

enum class Kept { none, own, lent, all };  ///< all: in memory of its own

struct Case {
    const char* name;
    const char* spec;
    std::int64_t tokens;
    Kept kept = Kept::lent;
    std::int64_t scratch = 64 << 20;
    std::pair<int, int> tile{};  ///< the plan's lent tile; zeros: the planner's
};

/// Contents of memory: what was written last, by ranges that do not meet.
class Memory {
public:
    void write(std::int64_t begin, std::int64_t bytes, const std::string& what) {
        if (bytes <= 0) return;
        const std::int64_t end = begin + bytes;
        split(begin);
        split(end);
        ranges_.erase(ranges_.lower_bound(begin), ranges_.lower_bound(end));
        ranges_[begin] = {end, what};
    }
    void expect(std::int64_t begin, std::int64_t bytes, const std::string& what, const std::string& reader) const {
        for (std::int64_t at = begin; at < begin + bytes;) {
            auto found = ranges_.upper_bound(at);
            if (found != ranges_.begin()) found = std::prev(found);
            const bool holds = found != ranges_.end() && found->first <= at && at < found->second.end;
            if (!holds || found->second.what != what) {
                ADD_FAILURE() << reader << " finds " << (holds ? found->second.what : "nothing") << " and not " << what << " at byte "
                              << at - begin << " of " << bytes;
                return;
            }
            at = found->second.end;
        }
    }

private:
    struct Content {
        std::int64_t end;
        std::string what;
    };
    void split(std::int64_t at) {
        auto after = ranges_.upper_bound(at);
        if (after == ranges_.begin()) return;
        const auto range = std::prev(after);
        if (range->first == at || range->second.end <= at) return;
        ranges_[at] = range->second;
        range->second.end = at;
    }
    std::map<std::int64_t, Content> ranges_;
};

std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(element_bytes(dtype)); }

std::int64_t matrix_bytes(std::int64_t rows, std::int64_t columns, std::int64_t ld, std::int64_t element) {
    return ((rows - 1) * ld + columns) * element;
}

/// Calls `act` with the ranges of a matrix: one, or one of each row where its rows do not follow one another.
template <class Act>
void of_rows(std::int64_t at, std::int64_t rows, std::int64_t columns, std::int64_t ld, std::int64_t element, const Act& act) {
    if (columns == ld) {
        act(at, rows * ld * element);
        return;
    }
    for (std::int64_t row = 0; row < rows; ++row) act(at + row * ld * element, columns * element);
}

std::int64_t address(const void* pointer) { return reinterpret_cast<std::int64_t>(pointer); }

/// A device, and a call there. An H200 has kernels that make both heads' products of forward; elsewhere the library makes them.
using Given = std::tuple<const char*, Case>;
std::string name_of(const testing::TestParamInfo<Given>& info) {
    return std::string(std::get<1>(info.param).name) + "_" + std::get<0>(info.param);
}

class LentHeads : public testing::TestWithParam<Given> {
protected:
    const Case& of = std::get<1>(GetParam());
    Spec spec = parse_spec(of.spec).normalized();
    Device device = describe_device(std::get<0>(GetParam()));
    Plan plan = planned();
    CudaProgram program = generate_cuda(spec, device, plan);
    CallSlots slots = call();
    Memory memory;

    std::int64_t products_in_gradient = 0;  ///< logits of both heads that products made in grad_weight's memory
    std::int64_t student_area = 0;          ///< logits of the student's that products made
    std::int64_t joined_area = 0;           ///< logits of both heads that kernels made
    std::int64_t weight_area = 0;
    std::int64_t hidden_area = 0;
    std::int64_t retained_read = 0;  ///< logits of one head
    std::int64_t rows_left = 0;      ///< rows whose gradients the launch that makes their logits leaves
    int gradient_products = 0;
    int generation = 0;  ///< number of the dlogits at hand
    bool dlogits_read = false;

    Plan planned() const {
        Plan made = path_plans(spec, device, PlanPath::cuda_lt, {.scratch_bytes = of.scratch}).front();
        if (of.tile.first > 0) made.cuda.lent = {of.tile.first, of.tile.second, 1, 1, 1, 1};
        EXPECT_EQ(illegal_reason(spec, device, made), std::nullopt);
        return made;
    }
    CallSlots call() const {
        CallSlots made = test::made_up_call(of.tokens, {});
        const auto set = [&](Slot slot, std::int64_t value) { made[static_cast<std::size_t>(slot)] = value; };
        set(Slot::vocab_columns, spec.vocab_size);
        set(Slot::weight_rows, spec.padded_vocab_size);
        if (of.kept == Kept::none) return made;
        const bool lent = of.kept == Kept::lent;
        set(Slot::retained, lent ? made[static_cast<std::size_t>(Slot::grad_weight)] : kOwn);
        const std::int64_t most = evaluate(program.retained_bytes, made);
        set(Slot::retained_bytes, lent ? evaluate(program.lendable_bytes, made) : of.kept == Kept::all ? most : most / 3);
        set(Slot::retained_in_grad_weight, lent ? 1 : 0);
        return made;
    }
    [[nodiscard]] std::int64_t slot_of(Slot slot) const { return slots[static_cast<std::size_t>(slot)]; }
    [[nodiscard]] std::int64_t gradient_row() const { return spec.hidden_size * bytes_of(spec.grad_weight_dtype); }
    [[nodiscard]] bool in_gradient(std::int64_t at) const {
        const std::int64_t begin = slot_of(Slot::grad_weight);
        return begin != 0 && at >= begin && at < begin + spec.padded_vocab_size * gradient_row();
    }

    // ---- Products.

    void logits(const InterpretedGemm& g) {
        const bool teacher = g.a >= slot_of(Slot::teacher_hidden) && g.a < slot_of(Slot::teacher_hidden) + (std::int64_t{1} << 44);
        const Slot of_weight = teacher ? Slot::teacher_weight : Slot::weight;
        const std::int64_t column = (g.b - slot_of(of_weight)) / (g.k * bytes_of(spec.dtype));
        EXPECT_EQ(g.k, teacher ? spec.teacher_hidden_size : spec.hidden_size);
        EXPECT_EQ(g.result % 16, 0);
        memory.write(g.result, matrix_bytes(g.m, g.n, g.ld, 4), sums_name(teacher, column, g.m, g.n));
        student_area += teacher ? 0 : g.m * g.n;
        products_in_gradient += in_gradient(g.result) ? g.m * g.n : 0;
    }
    void gradient(const InterpretedGemm& g) {
        const bool of_weight = g.kind.name == "grad_weight";
        const std::int64_t rows = of_weight ? g.k : g.m;
        const std::int64_t columns = of_weight ? g.m : g.k;
        of_rows(g.a, rows, columns, g.lda, bytes_of(spec.dtype),
                [&](std::int64_t begin, std::int64_t bytes) { memory.expect(begin, bytes, dlogits_name(), std::string(g.kind.name)); });
        dlogits_read = true;
        ++gradient_products;
        (of_weight ? weight_area : hidden_area) += rows * columns;
        if (of_weight) memory.write(g.result, matrix_bytes(g.m, g.n, g.ld, bytes_of(g.kind.result)), "gradient");
    }
    static std::string sums_name(bool teacher, std::int64_t column, std::int64_t rows, std::int64_t columns) {
        return fmt::format("{}'s sums of {} rows from column {} on, {}", teacher ? "teacher" : "student", rows, column, columns);
    }
    [[nodiscard]] std::string dlogits_name() const { return fmt::format("dlogits {}", generation); }

    // ---- Launches.

    template <class Params>
    void expect_sums(const Params& p, std::int64_t ld, const std::string& reader) {
        const std::int64_t bytes = matrix_bytes(p.rows, p.columns, ld, 4);
        memory.expect(address(p.sums), bytes, sums_name(false, p.first_column, p.rows, p.columns), reader);
        memory.expect(address(p.teacher_sums), bytes, sums_name(true, p.first_column, p.rows, p.columns), reader);
    }
    /// Calls `act` with the ranges of a block of retained logits, and what they are called.
    template <class Act>
    void of_retained(const RetainedPairs& p, std::int64_t rows, std::int64_t column, const Act& act) {
        const std::int64_t block = column / kPairColumns;
        const std::string name = fmt::format("logits from column {} on", column);
        const auto of_matrix = [&](std::int64_t at, std::int64_t row_bytes, std::int64_t columns) {
            of_rows(at + p.first_row * row_bytes, rows, columns, row_bytes / 4, 4,
                    [&](std::int64_t begin, std::int64_t bytes) { act(begin, bytes, name); });
        };
        of_matrix(address(p.data) + block * p.block_bytes, p.row_bytes, kPairColumns);
        of_matrix(address(p.data) + p.references + block * p.reference_block_bytes, p.reference_row_bytes, kPairGroups);
    }
    /// Gradients of `rows` in the place of their pairs, all of which are read before.
    void leave_gradients(const RetainedPairs& p, std::int64_t rows) {
        EXPECT_EQ(p.columns, spec.vocab_size);
        for (std::int64_t column = 0; column < p.columns; column += kPairColumns) {
            of_retained(p, rows, column, [&](std::int64_t begin, std::int64_t bytes, const std::string& name) {
                memory.expect(begin, bytes, name, "gradients of pairs");
            });
        }
        if (std::exchange(dlogits_read, false)) ++generation;
        of_rows(address(p.data) + p.first_row * p.row_bytes, rows, spec.vocab_size, p.row_bytes / bytes_of(spec.dtype),
                bytes_of(spec.dtype), [&](std::int64_t begin, std::int64_t bytes) { memory.write(begin, bytes, dlogits_name()); });
    }
    void scales_launch(const DivergenceScalesParams& p) {
        memory.write(address(p.row_scales), std::int64_t{p.rows} * 4, "scales");
        retained_read += std::int64_t{p.rows} * spec.vocab_size;
    }
    void joined_launch(const HeadsSm90Params& p, bool second) {
        EXPECT_GT(p.jobs.strips, 0);
        EXPECT_GE(p.first_column, second ? p.retained.columns : 0);
        joined_area += std::int64_t{p.rows} * (spec.vocab_size - p.first_column);
        for (std::int64_t column = 0; !second && column < p.retained.columns; column += kPairColumns) {
            of_retained(p.retained, p.rows, column,
                        [&](std::int64_t begin, std::int64_t bytes, const std::string& name) { memory.write(begin, bytes, name); });
        }
        if (p.gradient_rows == 0) return;
        // Rows of a launch that come before its last block of rows.
        EXPECT_EQ(p.gradient_rows % (2 * 128 * p.jobs.block_clusters), 0);
        EXPECT_LT(p.gradient_rows, p.rows);
        EXPECT_EQ(p.gradient_warps, 132 * kHeadsWarpsBeside);
        rows_left += p.gradient_rows;
        leave_gradients(p.retained, p.gradient_rows);
    }
    void forward_launch(const LtDivergenceParams& p, bool second) {
        bool reads_sums = false;
        for (std::int64_t at = 0; at < p.columns; at += kLtTileColumns) {
            const std::int64_t column = p.first_column + at;
            const bool retained = column < p.retained.columns;
            reads_sums = reads_sums || !(retained && second);
            if (!retained) continue;
            of_retained(p.retained, p.rows, column, [&](std::int64_t begin, std::int64_t bytes, const std::string& name) {
                if (second) {
                    memory.expect(begin, bytes, name, "a mixture's walk");
                } else {
                    memory.write(begin, bytes, name);
                }
            });
        }
        if (reads_sums) expect_sums(p, p.ld, "forward");
    }
    void dlogits_launch(const LtDivergenceDlogitsParams& p, bool of_kept) {
        if (of_kept) {
            for (std::int64_t at = 0; at < p.columns; at += kLtTileColumns) {
                of_retained(p.retained, p.rows, p.first_column + at, [&](std::int64_t begin, std::int64_t bytes, const std::string& name) {
                    memory.expect(begin, bytes, name, "dlogits of retained logits");
                });
            }
            retained_read += std::int64_t{p.rows} * p.columns;
        } else {
            expect_sums(p, p.sums_ld, "dlogits");
        }
        if (std::exchange(dlogits_read, false)) ++generation;
        EXPECT_EQ(address(p.dlogits) % 16, 0);
        of_rows(address(p.dlogits), p.rows, p.columns, p.ld, bytes_of(spec.dtype),
                [&](std::int64_t begin, std::int64_t bytes) { memory.write(begin, bytes, dlogits_name()); });
    }
    void joined_dlogits_launch(const HeadsDlogitsSm90Params& p) {
        EXPECT_GT(p.jobs.strips, p.jobs.pairs);
        joined_area += std::int64_t{p.rows} * p.columns;
        memory.write(address(p.parked), kParkedBytes, "parked products");
        if (std::exchange(dlogits_read, false)) ++generation;
        of_rows(address(p.dlogits), p.rows, p.columns, p.ld, bytes_of(spec.dtype),
                [&](std::int64_t begin, std::int64_t bytes) { memory.write(begin, bytes, dlogits_name()); });
        memory.expect(address(p.parked), kParkedBytes, "parked products", "dlogits of both products");
    }
    void launch(const InterpretedLaunch& launched) {
        const Recorded r{program.kernels[static_cast<std::size_t>(launched.kernel)].name, launched};
        if (r.kernel == "flce_divergence_sums") forward_launch(r.params<LtDivergenceParams>(), false);
        if (r.kernel == "flce_divergence_mixture") forward_launch(r.params<LtDivergenceParams>(), true);
        if (r.kernel == "flce_divergence_pairs") forward_launch(r.params<LtDivergenceParams>(), true);
        if (r.kernel == "flce_heads_sums") joined_launch(r.params<HeadsSm90Params>(), false);
        if (r.kernel == "flce_heads_mixture") joined_launch(r.params<HeadsSm90Params>(), true);
        if (r.kernel == "flce_heads_dlogits") joined_dlogits_launch(r.params<HeadsDlogitsSm90Params>());
        if (r.kernel == "flce_dlogits") dlogits_launch(r.params<LtDivergenceDlogitsParams>(), false);
        if (r.kernel == "flce_divergence_retained") dlogits_launch(r.params<LtDivergenceDlogitsParams>(), true);
        if (r.kernel == "flce_divergence_gradients") {
            const auto p = r.params<PairRowsParams>();
            leave_gradients(p.retained, p.rows);
        }
        if (r.kernel == "flce_divergence_scales") scales_launch(r.params<DivergenceScalesParams>());
        if (r.kernel == "flce_finish_hidden") {
            const auto p = r.params<LtFinishHiddenParams>();
            if (p.row_scales != nullptr) memory.expect(address(p.row_scales), p.rows * 4, "scales", "grad_hidden");
        }
        if (r.kernel == "flce_finish_weight") {
            const auto p = r.params<LtFinishWeightParams>();
            memory.write(address(p.grad_weight), p.columns * gradient_row(), "gradient");
        }
    }
    void walk(const LaunchProgram& pass) {
        products_in_gradient = student_area = joined_area = weight_area = hidden_area = retained_read = 0;
        gradient_products = 0;
        test::interpret(
            pass, slots, [&](const InterpretedLaunch& each) { launch(each); }, [](std::int64_t, std::int64_t) {},
            [&](const InterpretedGemm& g) { g.kind.name == "logits" ? logits(g) : gradient(g); });
    }
    [[nodiscard]] std::int64_t walks() const { return spec.divergence_beta > 0 && spec.divergence_beta < 1 ? 2 : 1; }
};

TEST_P(LentHeads, NothingIsWrittenOverBeforeItIsRead) {
    const std::int64_t all = of.tokens * spec.vocab_size;
    ASSERT_TRUE(has_lent_tile(plan)) << plan.text();
    EXPECT_LE(evaluate(program.forward_workspace_bytes, slots), of.scratch);
    EXPECT_LE(evaluate(program.backward_workspace_bytes, slots), of.scratch + 4 * of.tokens * spec.hidden_size);
    ASSERT_TRUE(of.kept != Kept::lent || slot_of(Slot::retained_bytes) > 0);
    if (of.scratch <= kLittleScratch) {
        EXPECT_EQ(evaluate(program.lendable_bytes, slots), 0) << "no sums of so many rows in scratch";
    }
    walk(program.forward);
    EXPECT_EQ(products_in_gradient > 0, of.kept == Kept::lent && joined_area == 0);
    EXPECT_LE(student_area + joined_area, walks() * all);
    EXPECT_GE(student_area + joined_area, all);
    EXPECT_TRUE(student_area == 0 || joined_area == 0);

    // A call that wants the hidden states' gradient alone leaves retained logits where they are.
    const std::int64_t gradient = std::exchange(slots[static_cast<std::size_t>(Slot::grad_weight)], 0);
    walk(program.backward);
    EXPECT_EQ(hidden_area, all);
    EXPECT_EQ(student_area + joined_area + retained_read, all);
    EXPECT_EQ(products_in_gradient + weight_area, 0);

    slots[static_cast<std::size_t>(Slot::grad_weight)] = gradient;
    walk(program.backward);
    EXPECT_EQ(hidden_area, all);
    EXPECT_EQ(weight_area, all);
    EXPECT_EQ(student_area + joined_area + retained_read, all);
    EXPECT_GT(products_in_gradient + joined_area + retained_read, 0);
    memory.expect(gradient, spec.vocab_size * gradient_row(), "gradient", "the caller");
    const bool gradients = of.kept == Kept::all && of.tokens > kFewHeadsRows && !spec.bias;
    EXPECT_TRUE(gradient_products == 2 || !gradients) << gradient_products;
    // The launch that makes the logits leaves most gradients of many tokens, unless there is a second walk
    // or its products are short.
    const bool joined = device.gpu.arch == "sm_90a" && of.scratch >= 64 << 20;
    const bool long_products = spec.hidden_size + spec.teacher_hidden_size >= 3072;
    const bool beside = gradients && joined && walks() == 1 && long_products && spec.dtype == DType::bf16;
    EXPECT_EQ(rows_left > of.tokens / 2, beside && of.tokens > 1024);
    EXPECT_TRUE(beside || rows_left == 0);
}

/// Parts of all logits, where the memory is as scarce as in a usual layer.
class LentHeadsOfALayer : public LentHeads {};
TEST_P(LentHeadsOfALayer, MostLogitsAreOfWideProductsOrRetained) {
    const auto all = static_cast<double>(of.tokens * spec.vocab_size);
    walk(program.forward);
    EXPECT_GE(static_cast<double>(joined_area) / all + static_cast<double>(products_in_gradient) / 2 / all, walks() == 1 ? 0.94 : 1.75);
    EXPECT_EQ(joined_area > 0, device.gpu.arch == "sm_90a");
    walk(program.backward);
    EXPECT_GE(static_cast<double>(retained_read) / all, walks() == 1 ? 0.24 : 0.19);
    EXPECT_LE((static_cast<double>(student_area) - static_cast<double>(products_in_gradient) / 2) / all, 0.11);
}
INSTANTIATE_TEST_SUITE_P(Calls, LentHeadsOfALayer,
                         testing::Combine(testing::Values("h200", "b200"),
                                          testing::Values(Case{"Plain", "D=2048,V=151936,teacher_hidden_size=4096", 4096},
                                                          Case{"Mixture", "D=2048,V=151936,teacher_hidden_size=4096,divergence_beta=0.5",
                                                               4096})),
                         name_of);

INSTANTIATE_TEST_SUITE_P(
    Calls, LentHeads,
    testing::Combine(
        testing::Values("h200", "b200"),
        testing::Values(Case{"Plain", "D=2048,V=151936,teacher_hidden_size=4096", 4096},
                        Case{"Mixture", "D=2048,V=151936,teacher_hidden_size=4096,divergence_beta=0.5", 4096},
                        Case{"Wider", "D=2048,V=151936,teacher_hidden_size=4096", 4096, Kept::lent, 64 << 20, {4096, 8192}},
                        Case{"Narrower", "D=2048,V=151936,teacher_hidden_size=4096", 4096, Kept::lent, 64 << 20, {4096, 2048}},
                        Case{"FewerRows", "D=2048,V=151936,teacher_hidden_size=64", 5000, Kept::lent, 64 << 20, {2048, 4608}},
                        Case{"LittleScratch", "D=2048,V=151936,teacher_hidden_size=2048", 1024, Kept::none, kLittleScratch},
                        Case{"LittleScratchBias", "D=2048,V=151936,teacher_hidden_size=2048,divergence_beta=1,bias", 4096, Kept::none,
                             kLittleScratch},
                        Case{"LittleScratchNarrow", "D=1024,V=151936,teacher_hidden_size=2048", 256, Kept::none, kLittleScratch},
                        Case{"Recomputed", "D=2048,V=151936,teacher_hidden_size=4096", 4096, Kept::none},
                        Case{"OfItsOwn", "D=2048,V=151936,teacher_hidden_size=4096,divergence_beta=0.3", 4096, Kept::own},
                        Case{"All", "D=1024,V=20001,teacher_hidden_size=1024", 300, Kept::all},
                        Case{"AllOfAMixture", "D=1024,V=20001,teacher_hidden_size=1024,divergence_beta=0.3,dtype=fp16", 301, Kept::all},
                        Case{"AllWithBias", "D=2048,V=20001,teacher_hidden_size=1024,divergence_beta=1,bias", 300, Kept::all},
                        Case{"AllOfRowBlocks", "D=1024,V=20000,teacher_hidden_size=1024", 10000, Kept::all, 24 << 20},
                        Case{"AllOfBlocks", "D=1024,V=20001,teacher_hidden_size=2048,divergence_beta=1", 3001, Kept::all},
                        Case{"AllOfLaunches", "D=512,V=5000,teacher_hidden_size=4096", 9001, Kept::all},
                        Case{"AllOfFp16", "D=1024,V=5000,teacher_hidden_size=2048,dtype=fp16", 3001, Kept::all},
                        Case{"AllOfShortProducts", "D=1024,V=5000,teacher_hidden_size=1024", 3001, Kept::all},
                        Case{"AllOfFewTokens", "D=1024,V=20001,teacher_hidden_size=104,divergence_beta=0.5", 100, Kept::all},
                        Case{"Fp32", "D=512,V=50257,teacher_hidden_size=520,dtype=fp32", 3001, Kept::none},
                        Case{"Fp16", "D=1024,V=50257,teacher_hidden_size=1024,divergence_beta=1,dtype=fp16,temperature", 3001},
                        Case{"Fp32Gradient", "D=1024,V=50257,teacher_hidden_size=1024,grad_weight_dtype=fp32", 3001},
                        Case{"Ragged", "D=1024,V=60001,teacher_hidden_size=520,divergence_beta=0.25", 4097},
                        Case{"FewTokens", "D=64,V=60001,teacher_hidden_size=104", 37},
                        Case{"OneToken", "D=64,V=60001,teacher_hidden_size=104,divergence_beta=0.5", 1},
                        Case{"SmallVocabulary", "D=2048,V=3000,teacher_hidden_size=64", 200},
                        Case{"Bias", "D=2048,V=131072,teacher_hidden_size=4096,bias,teacher_bias", 4096},
                        Case{"ManyTokens", "D=4096,V=128256,teacher_hidden_size=4096", 10000},
                        Case{"ManyTokensOfItsOwn", "D=4096,V=128256,teacher_hidden_size=4096,divergence_beta=0.5", 10000, Kept::own},
                        Case{"ManyTokensRecomputed", "D=4096,V=128256,teacher_hidden_size=4096", 20001, Kept::none},
                        Case{"RowBlocks", "D=1024,V=200000,teacher_hidden_size=1024,divergence_beta=0.5", 40000, Kept::lent, 24 << 20},
                        Case{"RowBlocksOfItsOwn", "D=1024,V=20000,teacher_hidden_size=1024", 40000, Kept::own, 24 << 20},
                        Case{"Padded", "D=2048,V=100001,padded_vocab_size=100096,teacher_hidden_size=2048", 4096},
                        Case{"RoomyScratch", "D=2048,V=151936,teacher_hidden_size=4096", 4096, Kept::lent, 512 << 20})),
    name_of);

std::string problem_of(const char* text, std::pair<int, int> tile) {
    const Spec spec = parse_spec(text).normalized();
    const Device device = describe_device("h200");
    Plan plan = path_plans(spec, device, PlanPath::cuda_lt, {}).front();
    plan.cuda.lent = {tile.first, tile.second, 1, 1, 1, 1};
    return illegal_reason(spec, device, plan).value_or("");
}

TEST(LentTile, Plans_HaveOneWhereADivergencesGradientIsWritten) {
    const auto plan_of = [](const char* text) {
        return path_plans(parse_spec(text).normalized(), describe_device("h200"), PlanPath::cuda_lt, {}).front();
    };
    const Plan lends = plan_of("D=2048,V=151936,teacher_hidden_size=4096");
    EXPECT_TRUE(lends.text().ends_with(",lent=4096x4096")) << lends.text();
    EXPECT_EQ(parse_plan(lends.text()), lends);
    EXPECT_EQ(parse_plan_json(lends.json()), lends);
    for (const char* other : {"D=2048,V=151936,teacher_hidden_size=4096,grad_weight_mode=accumulate",
                              "D=2048,V=151936,teacher_hidden_size=4096,layout=hidden_major", "D=2048,V=151936,top_k=8"}) {
        const Plan plan = plan_of(other);
        EXPECT_FALSE(has_lent_tile(plan)) << plan.text();
        EXPECT_EQ(plan.text().find("lent"), std::string::npos);
        EXPECT_EQ(parse_plan(plan.text()), plan);
    }
}

TEST(LentTile, Others_AreRefusedByName) {
    const char* spec = "D=2048,V=151936,teacher_hidden_size=4096";
    EXPECT_EQ(problem_of(spec, {4096, 8192}), "");
    EXPECT_EQ(problem_of(spec, {4096, 100}), "lent: 100 columns: must be a multiple of 512 and at most 16384");
    EXPECT_EQ(problem_of(spec, {100, 4096}), "lent: 100 tokens: must be a multiple of 64 and at most 16384");
    EXPECT_EQ(problem_of("D=2048,V=151936,teacher_hidden_size=4096,grad_weight_mode=accumulate", {4096, 4096}),
              "lent: only a divergence's logits lie in grad_weight's memory, where that is vocab_major and not accumulated into");
}

}  // namespace
}  // namespace flce::lent_heads
