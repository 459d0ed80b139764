// Programs of the path whose products are of numbers in 8 bits: every column is worked on once, in memory that the call has, and nothing is
// written over before it has been read.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <string>
#include <vector>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "generator/planner.hpp"
#include "records/record.hpp"
#include "templates/fp8/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce {
namespace {

using test::InterpretedMap;
using test::Launched;
using test::Recorded;

constexpr std::int64_t kOwn = std::int64_t{99} << 44;

struct Case {
    const char* name;
    const char* spec;
    std::int64_t tokens;
    double kept = 0;  ///< part of the most bytes
    std::int64_t scratch = 64 << 20;
    std::int64_t columns = -1;  ///< classes of a shard's call; −1: the spec's
    bool lent = false;          ///< grad_weight's memory is kept
};

struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    [[nodiscard]] bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
    [[nodiscard]] bool holds(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

class Fp8Programs : public testing::TestWithParam<Case> {
protected:
    const Case& of = GetParam();
    Spec spec = parse_spec(of.spec).normalized();
    Device device = describe_device("h200");
    Plan plan = path_plans(spec, device, PlanPath::cuda_fp8, {.scratch_bytes = of.scratch}).front();
    CudaProgram program = generate_cuda(spec, device, plan);
    std::int64_t retained_bytes = 0;
    CallSlots slots = call();

    CallSlots call() {
        CallSlots made = test::made_up_call(of.tokens, {});
        const auto set = [&](Slot slot, std::int64_t value) { made[static_cast<std::size_t>(slot)] = value; };
        if (is_shard(spec)) {
            set(Slot::vocab_start, 5000);
            set(Slot::vocab_columns, columns());
            set(Slot::weight_rows, columns() + 3);
        }
        if (of.lent) {
            retained_bytes = evaluate(program.lendable_bytes, made);
            EXPECT_EQ(retained_bytes, columns() * gradient_row());
            set(Slot::retained, made[static_cast<std::size_t>(Slot::grad_weight)]);
        } else {
            retained_bytes = static_cast<std::int64_t>(of.kept * static_cast<double>(evaluate(program.retained_bytes, made))) / 16 * 16;
            set(Slot::retained, retained_bytes > 0 ? kOwn : 0);
        }
        set(Slot::retained_bytes, retained_bytes);
        set(Slot::retained_in_grad_weight, of.lent ? 1 : 0);
        return made;
    }
    [[nodiscard]] std::int64_t slot_of(Slot slot) const { return slots[static_cast<std::size_t>(slot)]; }
    [[nodiscard]] std::int64_t columns() const { return of.columns >= 0 ? of.columns : spec.vocab_size; }
    /// Memory for the most classes of a shard.
    [[nodiscard]] Range workspace(const Expr& bytes) const {
        const std::int64_t at = slot_of(Slot::workspace);
        CallSlots most = slots;
        most[static_cast<std::size_t>(Slot::vocab_columns)] = spec.vocab_size;
        return {at, at + evaluate(bytes, most)};
    }
    [[nodiscard]] Range gradient() const {
        const std::int64_t at = slot_of(Slot::grad_weight);
        return {at, at + columns() * gradient_row()};
    }
    [[nodiscard]] Launched backward(StageCode stage) const {
        CallSlots of_stage = slots;
        of_stage[static_cast<std::size_t>(Slot::stage)] = static_cast<std::int64_t>(stage);
        return test::run(program, program.backward, of_stage);
    }
    [[nodiscard]] std::int64_t gradient_row() const {
        return spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype));
    }
    /// The map at `offset` of a parameter block.
    template <class Params>
    static const InterpretedMap& map_of(const Recorded& r, TensorMap Params::* member) {
        static const Params object{};
        const auto offset = reinterpret_cast<const char*>(&(object.*member)) - reinterpret_cast<const char*>(&object);
        return *std::ranges::find(r.launch.maps, static_cast<std::uint32_t>(offset), &InterpretedMap::offset);
    }
    static Range range_of(const InterpretedMap& map) {
        return {map.address, map.address + (map.rows - 1) * map.row_bytes + map.columns * map.element_bytes};
    }
    static Range bytes_from(const void* at, std::int64_t bytes) {
        const auto begin = reinterpret_cast<std::int64_t>(at);
        return {begin, begin + bytes};
    }
    /// Whether memory that is written lies where it may.
    void expect_owned(const Range& written, const Range& room) const {
        const Range retained{kOwn, kOwn + retained_bytes};
        EXPECT_TRUE(room.holds(written) || retained.holds(written) || gradient().holds(written))
            << written.begin - room.begin << " " << written.end - room.begin << " of " << room.end - room.begin;
    }
    void expect_aligned(const Recorded& r) const {
        for (const InterpretedMap& map : r.launch.maps) {
            EXPECT_EQ(map.address % 16, 0) << r.kernel;
            EXPECT_EQ(map.row_bytes % 16, 0) << r.kernel;
            EXPECT_GE(map.row_bytes, map.columns * map.element_bytes) << r.kernel;
            EXPECT_GT(map.rows, 0) << r.kernel;
            EXPECT_GT(map.columns, 0) << r.kernel;
            EXPECT_LE(map.box_rows, 256U) << r.kernel;
        }
    }
    /// Exponentials that forward leaves: columns, and where they lie by rows and by columns.
    struct Left {
        std::int64_t columns = 0;
        Range rows;
        Range turned;
    };
    [[nodiscard]] Left left() const {
        Left all;
        for (const Recorded& r : test::run(program, program.forward, slots)) {
            if (r.kernel != "flce_forward") continue;
            const auto p = r.params<Fp8LogitsParams>();
            if (p.stored == 0 || p.again != nullptr) continue;
            const Range rows = bytes_from(p.exponentials, (of.tokens - 1) * p.pitch + p.stored);
            const Range turned = range_of(map_of(r, &Fp8LogitsParams::turned_map));
            all.rows = all.columns == 0 ? rows : Range{all.rows.begin, rows.end};
            all.turned = all.columns == 0 ? turned : Range{all.turned.begin, turned.end};
            all.columns += p.stored;
        }
        return all;
    }
    [[nodiscard]] std::int64_t positions() const { return (of.tokens + kFp8TokenGroup - 1) / kFp8TokenGroup * kFp8TokenGroup; }

    /// Whether a launch of grad_weight, of classes from `first` on, reads the sum that smoothing_totals has made, and its classes' weights.
    void expect_smoothed(const Recorded& r, std::int64_t first, const Range& room) const {
        const auto p = r.params<SmoothedFp8GradientParams>();
        EXPECT_EQ(reinterpret_cast<std::int64_t>(p.class_weight),
                  slot_of(Slot::class_weight) == 0 ? 0 : slot_of(Slot::class_weight) + first * 4);
        EXPECT_TRUE(room.holds(bytes_from(p.hidden_sum, spec.hidden_size * 4)));
        EXPECT_TRUE(totals.hidden_sum == p.hidden_sum) << "before it has been made";
    }
    /// Keeps what a launch of smoothing_totals writes, whose memory nobody else has.
    void keep_totals(const Recorded& r, const Range& room) {
        totals = r.params<SmoothingTotalsParams>();
        const std::int64_t bytes = spec.hidden_size * 4;
        for (const float* sum : {totals.weight_sum, totals.hidden_sum}) expect_owned(bytes_from(sum, bytes), room);
        for (const float* sums : {totals.weight_sums, totals.hidden_sums}) expect_owned(bytes_from(sums, kSmoothingParts * bytes), room);
        EXPECT_EQ(totals.smoothing_total != nullptr, spec.bias);
        EXPECT_EQ(r.launch.grid[0], 2 * ((spec.hidden_size + 31) / 32) + (spec.bias ? 1 : 0));
    }
    SmoothingTotalsParams totals{};

    /// Exponentials that a launch of logits stores, both ways.
    void expect_stored(const Recorded& r, const Range& room) const {
        const auto p = r.params<Fp8LogitsParams>();
        EXPECT_LE(p.stored, p.columns);
        if (p.stored == 0) return;
        EXPECT_GE(p.pitch, p.stored);
        const std::int64_t columns = (p.stored + kFp8ClassGroup - 1) / kFp8ClassGroup * kFp8ClassGroup;
        EXPECT_EQ(p.pitch % kFp8ClassGroup, 0);
        const Range rows = bytes_from(p.exponentials, (of.tokens - 1) * p.pitch + columns);
        const Range turned = range_of(map_of(r, &Fp8LogitsParams::turned_map));
        EXPECT_EQ(turned.end - turned.begin, p.stored * positions());
        expect_owned(rows, room);
        expect_owned(turned, room);
        EXPECT_FALSE(rows.meets(turned));
    }
};

TEST_P(Fp8Programs, Forward_EveryColumnOnceAndOnceAgain) {
    const Launched made = test::run(program, program.forward, slots);
    const Range room = workspace(program.forward_workspace_bytes);
    EXPECT_LE(room.end - room.begin, of.scratch + workspace_of_tokens(spec, of.tokens).value());
    std::vector<Fp8LogitsParams> all;
    for (const Recorded& r : made) {
        expect_aligned(r);
        if (r.kernel != "flce_forward") continue;
        const auto p = r.params<Fp8LogitsParams>();
        expect_stored(r, room);
        expect_owned(range_of(map_of(r, &Fp8LogitsParams::weight_map)), room);
        expect_owned(range_of(map_of(r, &Fp8LogitsParams::hidden_map)), room);
        const std::int64_t tiles = (p.columns + plan.cuda.forward.block_n - 1) / plan.cuda.forward.block_n;
        const std::int64_t fields = spec.label_smoothing > 0 ? 3 : 2;
        expect_owned(bytes_from(p.partials, tiles * fields * p.partial_rows * 4), room);
        expect_owned(bytes_from(p.column_scales, tiles * plan.cuda.forward.block_n * 4), room);
        all.push_back(p);
    }
    ASSERT_EQ(all.empty(), columns() == 0);
    if (columns() == 0) return;
    EXPECT_EQ(made.count("prepare"), spec.class_weight && spec.label_smoothing > 0 ? 1 : 0) << "the sum of class weights";
    EXPECT_EQ(all.front().stored, 0) << "powers come of it";
    std::int64_t stored = 0;
    for (const bool again : {false, true}) {
        std::int64_t next = 0;
        for (const Fp8LogitsParams& p : std::vector(all.begin() + 1, all.end())) {
            if ((p.again != nullptr) != again) continue;
            EXPECT_EQ(p.first_column, next);
            EXPECT_TRUE(p.columns % kFp8Quantum == 0 || p.first_column + p.columns == columns());
            EXPECT_EQ(p.sums != 0, !again);
            next += p.columns;
            stored += again ? 0 : p.stored;
        }
        EXPECT_EQ(next, again ? stored : columns());
    }
    EXPECT_EQ(stored > 0, of.kept > 0 || of.lent);
}

TEST_P(Fp8Programs, Backward_GradientsOfEveryColumnOnce) {
    const Launched made = test::run(program, program.backward, slots);
    const Range room = workspace(program.backward_workspace_bytes);
    EXPECT_LE(room.end - room.begin, of.scratch + workspace_of_tokens(spec, of.tokens).value());
    std::int64_t hidden_columns = 0;
    std::int64_t written = 0;  // rows of grad_weight
    const float* totals_of_rows = nullptr;
    const Left left = this->left();
    const auto expect_dead = [&](const Range& used) {
        EXPECT_TRUE(hidden_columns >= left.columns || !used.meets(left.rows)) << "grad_hidden has yet to read them";
        EXPECT_TRUE(written >= left.columns || !used.meets(left.turned)) << "grad_weight has yet to read them";
    };
    for (const Recorded& r : made) {
        expect_aligned(r);
        if (r.kernel == "flce_smoothing_totals") keep_totals(r, room);
        if (r.kernel == "flce_fp8_finish" && spec.label_smoothing > 0) {
            EXPECT_EQ(r.params<Fp8FinishParams>().weight_sum, totals.weight_sum);
            EXPECT_EQ(r.params<Fp8FinishParams>().row_smoothing, totals_of_rows);
        }
        if (r.kernel == "flce_fp8_rows") totals_of_rows = r.params<Fp8RowsParams>().row_smoothing;
        if (r.kernel == "flce_forward") {
            const auto p = r.params<Fp8LogitsParams>();
            EXPECT_EQ(p.first_column, written) << "rows before it are written";
            expect_stored(r, room);
            const Range codes = range_of(map_of(r, &Fp8LogitsParams::weight_map));
            expect_owned(codes, room);
            expect_dead(codes);
            expect_dead(bytes_from(p.exponentials, (of.tokens - 1) * p.pitch + p.stored));
            expect_dead(range_of(map_of(r, &Fp8LogitsParams::turned_map)));
            const std::int64_t gradients = gradient().begin + (p.first_column + p.columns) * gradient_row();
            for (const Range& used : {codes, bytes_from(p.exponentials, 1)}) {
                EXPECT_FALSE(used.begin < gradients && used.end > gradient().begin) << "its own gradient would be written over it";
            }
        } else if (r.kernel == "flce_grad_hidden") {
            const auto p = r.params<Fp8GradientParams>();
            EXPECT_EQ(p.adds != 0, hidden_columns > 0);
            const Range turned = range_of(map_of(r, &Fp8GradientParams::b_map));
            expect_owned(turned, room);
            expect_dead(turned);
            EXPECT_TRUE(turned.begin >= gradient().begin + written * gradient_row() || turned.begin >= room.begin);
            expect_owned(range_of(map_of(r, &Fp8GradientParams::result_map)), room);
            hidden_columns += p.k;
        } else if (r.kernel == "flce_grad_weight") {
            const auto p = r.params<Fp8GradientParams>();
            const Range result = range_of(map_of(r, &Fp8GradientParams::result_map));
            EXPECT_EQ(result.begin, gradient().begin + written * gradient_row());
            EXPECT_FALSE(result.meets(range_of(map_of(r, &Fp8GradientParams::a_map))));
            expect_dead(result);
            EXPECT_EQ(p.k, positions());
            if (spec.label_smoothing > 0) expect_smoothed(r, written, room);
            written += p.m;
        }
    }
    EXPECT_EQ(totals.hidden_sum != nullptr, spec.label_smoothing > 0);
    EXPECT_EQ(written, columns());
    EXPECT_GE(hidden_columns, columns());
    EXPECT_LT(hidden_columns, columns() + kFp8ClassGroup);
}

class Fp8ShardPrograms : public Fp8Programs {};

// A whole backward is both of its stages, and the first one leaves nothing of grad_hidden.
TEST_P(Fp8ShardPrograms, BackwardInStages_HasTheSameLaunches) {
    const Launched whole = backward(StageCode::whole);
    const Launched first = backward(StageCode::first);
    const Launched rest = backward(StageCode::rest);
    ASSERT_EQ(first.launches.size() + rest.launches.size(), whole.launches.size());
    for (std::size_t i = 0; i < whole.launches.size(); ++i) {
        const bool early = i < first.launches.size();
        const Recorded& part = early ? first.launches[i] : rest.launches[i - first.launches.size()];
        EXPECT_EQ(part.kernel, whole.launches[i].kernel);
        EXPECT_EQ(part.launch.params, whole.launches[i].launch.params);
    }
    EXPECT_EQ(first.memsets, whole.memsets);
    EXPECT_TRUE(rest.memsets.empty());
    EXPECT_EQ(first.count("fp8_finish"), columns() > 0 ? 1 : 0);
    const bool left = of.kept == 1.0 && columns() > 0;
    EXPECT_EQ(rest.count("grad_weight") > 0, left) << "a sum of grad_hidden runs meanwhile";
    EXPECT_EQ(first.count("grad_weight") > 0, !left && columns() > 0);
    const std::int64_t hidden = of.tokens * spec.hidden_size * static_cast<std::int64_t>(element_bytes(grad_hidden_dtype(spec)));
    EXPECT_EQ(first.memsets.contains(slot_of(Slot::grad_hidden)), columns() == 0);
    if (columns() == 0) {
        EXPECT_EQ(first.memsets.at(slot_of(Slot::grad_hidden)), hidden);
    }
    EXPECT_EQ(first.memsets.at(slot_of(Slot::grad_weight) + columns() * gradient_row()), 3 * gradient_row()) << "rows of padding";
}

constexpr const char* kLarge = "D=2048,V=151936,fp8";
constexpr const char* kRagged = "D=520,V=2571,fp8,bias,temperature";
const Case kCases[] = {
    {"Nothing", kLarge, 4096},
    {"All", kLarge, 4096, 1.0},
    {"Half", kLarge, 4096, 0.5},
    {"Little", kLarge, 4096, 0.01},
    {"OneToken", kLarge, 1},
    {"OneTokenAll", kLarge, 1, 1.0},
    {"ManyTokens", "D=4096,V=128256,fp8", 70001, 0.3},
    {"VeryManyTokens", "D=1024,V=32000,fp8", 1 << 20},
    {"VeryManyTokensAll", "D=1024,V=32000,fp8,tied", 1 << 20, 1.0},
    {"Tied", "D=2048,V=151936,fp8,tied", 4096},
    {"TiedPart", "D=2048,V=151936,fp8,tied,grad_weight_dtype=fp32", 4095, 0.7},
    {"LittleScratch", "D=2048,V=151936,fp8,tied", 4096, 0.5, 4 << 20},
    {"Lent", kLarge, 4096, 0, 64 << 20, -1, true},
    {"LentMoreTokens", "D=4096,V=128256,fp8=e4m3", 8191, 0, 64 << 20, -1, true},
    {"LentFewTokens", kLarge, 300, 0, 64 << 20, -1, true},
    {"LentFp32", "D=2048,V=151936,fp8,grad_weight_dtype=fp32,bias", 4096, 0, 16 << 20, -1, true},
    {"LentRagged", kRagged, 333, 0, 64 << 20, -1, true},
    {"Ragged", kRagged, 333},
    {"RaggedAll", kRagged, 333, 1.0},
    {"RaggedPart", kRagged, 37, 0.6},
    {"Smoothed", "D=2048,V=151936,fp8,label_smoothing=0.1", 4096},
    {"SmoothedAll", "D=2048,V=151936,fp8,label_smoothing=0.1", 4096, 1.0},
    {"SmoothedLittleScratch", "D=2048,V=50257,fp8,label_smoothing=0.1,bias,class_weight,tied", 4096, 0.5, 8 << 20},
    {"SmoothedRagged", "D=520,V=2571,fp8,bias,temperature,class_weight,label_smoothing=0.1", 333, 0.6},
    {"FewClasses", "D=264,V=7,fp8", 300, 1.0},
    {"FewClassesNothing", "D=264,V=7,fp8", 300},
    {"Padded", "D=264,V=1000,padded_vocab_size=1024,fp8=e4m3,fp8_dlogits=e4m3", 300},
};
std::string name_of(const testing::TestParamInfo<Case>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Specs, Fp8Programs, testing::ValuesIn(kCases), name_of);

constexpr const char* kLargeShard = "D=2048,V=75968,padded_vocab_size=75971,whole_vocab_size=151936,fp8";
constexpr const char* kRaggedShard = "D=520,V=2571,padded_vocab_size=2574,whole_vocab_size=9000,fp8,bias,grad_hidden_dtype=fp32";
const Case kShardCases[] = {
    {"Shard", kLargeShard, 4096},
    {"ShardAll", kLargeShard, 4096, 1.0},
    {"ShardPart", kLargeShard, 4096, 0.4, 64 << 20, 70001},
    {"FewOfAShard", kLargeShard, 4096, 0, 64 << 20, 700},
    {"FewOfAShardAll", kLargeShard, 4096, 1.0, 64 << 20, 700},
    {"OneOfAShard", kLargeShard, 300, 1.0, 4 << 20, 1},
    {"NoneOfAShard", kLargeShard, 4096, 0, 64 << 20, 0},
    {"RaggedShard", kRaggedShard, 333, 0, 64 << 20, 1537},
    {"RaggedShardAll", kRaggedShard, 333, 1.0, 64 << 20, 385},
    {"LentShard", kLargeShard, 4096, 0, 64 << 20, 70001, true},
    {"LentRaggedShard", kRaggedShard, 333, 0, 64 << 20, 1537, true},
    {"NoneOfARaggedShard", kRaggedShard, 333, 1.0, 64 << 20, 0},
};
INSTANTIATE_TEST_SUITE_P(Shards, Fp8Programs, testing::ValuesIn(kShardCases), name_of);
INSTANTIATE_TEST_SUITE_P(Shards, Fp8ShardPrograms, testing::ValuesIn(kShardCases), name_of);

std::vector<std::string> sources_of(const CudaProgram& program) {
    std::vector<std::string> sources;
    for (const CudaUnit& unit : program.units) sources.push_back(unit.source);
    return sources;
}

// Scales are slots of a call: programs of another value are the same, to their launchers' machine code.
TEST(Fp8Scales, AnotherValue_CompilesNothing) {
    const Device h200 = describe_device("h200");
    const auto spec_of = [](const std::string& scales) { return parse_spec("D=2048,V=50257,fp8=e4m3" + scales).normalized(); };
    const auto program_of = [&](const std::string& scales) {
        return generate_cuda(spec_of(scales), h200, path_plans(spec_of(scales), h200, PlanPath::cuda_fp8).front());
    };
    const std::string ones = ",fp8_hidden_scale=0.22,fp8_weight_scale=0.0036";
    const std::string others = ",fp8_hidden_scale=3,fp8_weight_scale=1";
    const CudaProgram one = program_of(ones);
    const CudaProgram other = program_of(others);
    EXPECT_EQ(sources_of(one), sources_of(other));
    EXPECT_EQ(program_identity(one.forward), program_identity(other.forward));
    EXPECT_EQ(program_identity(one.backward), program_identity(other.backward));
    EXPECT_NE(sources_of(one), sources_of(program_of("")));
    const auto record_of = [&](const std::string& scales) { return record_key(spec_of(scales), h200, {}, "none", 0).digest(); };
    EXPECT_EQ(record_of(ones), record_of(others));
    EXPECT_NE(record_of(ones), record_of(""));
}

// Every kernel that makes codes of hidden or of the weight has that operand's scale.
TEST(Fp8Scales, EachOperand_HasItsOwn) {
    const Device h200 = describe_device("h200");
    const Spec spec = parse_spec("D=264,V=2571,fp8,fp8_hidden_scale=0.25,fp8_weight_scale=2").normalized();
    const CudaProgram program = generate_cuda(spec, h200, path_plans(spec, h200, PlanPath::cuda_fp8).front());
    CallSlots slots = test::made_up_call(300, {});
    slots[static_cast<std::size_t>(Slot::fp8_hidden_scale)] = std::bit_cast<std::int32_t>(0.25F);
    slots[static_cast<std::size_t>(Slot::fp8_weight_scale)] = std::bit_cast<std::int32_t>(2.F);
    const auto hidden = reinterpret_cast<const void*>(slots[static_cast<std::size_t>(Slot::hidden)]);
    int found = 0;
    for (const LaunchProgram* pass : {&program.forward, &program.backward}) {
        for (const Recorded& r : test::run(program, *pass, slots)) {
            if (r.kernel == "flce_fp8_codes" || r.kernel == "flce_fp8_scales") {
                const auto p = r.params<Fp8CodesParams>();
                EXPECT_EQ(p.given_scale, p.from == hidden ? 0.25F : 2.F) << r.kernel;
                ++found;
            } else if (r.kernel == "flce_fp8_targets") {
                EXPECT_EQ(r.params<Fp8TargetsParams>().hidden_scale, 0.25F);
                EXPECT_EQ(r.params<Fp8TargetsParams>().weight_scale, 2.F);
                ++found;
            }
        }
    }
    EXPECT_GE(found, 5);
}

// Costs of a chunk beside its products do not depend on its width.
TEST(Fp8Path, ChunksOfBackward_AreAsWideAsTheMemoryBehindThemAllows) {
    const Spec spec = parse_spec(kLarge).normalized();
    const Device h200 = describe_device("h200");
    const CudaProgram program = generate_cuda(spec, h200, path_plans(spec, h200, PlanPath::cuda_fp8, {.scratch_bytes = 64 << 20}).front());
    std::vector<int> widths;
    for (const Recorded& r : test::run(program, program.backward, test::made_up_call(4096, {}))) {
        if (r.kernel == "flce_forward") widths.push_back(r.params<Fp8LogitsParams>().columns);
    }
    ASSERT_FALSE(widths.empty());
    EXPECT_GE(widths.front() * 5, spec.vocab_size) << "a quarter of grad_weight's memory holds what a quarter of the classes needs";
    EXPECT_TRUE(std::ranges::is_sorted(widths, std::greater<>()));
    EXPECT_LE(widths.size(), 14U);
}

// Half of the exponentials where a row of the gradient takes as many bytes as a column of them, once.
TEST(Fp8Path, GradientsMemory_HoldsHalfOfTheExponentials) {
    const Device h200 = describe_device("h200");
    const auto columns = [&](const char* text, std::int64_t tokens) {
        const Spec spec = parse_spec(text).normalized();
        const CudaProgram program = generate_cuda(spec, h200, path_plans(spec, h200, PlanPath::cuda_fp8).front());
        CallSlots slots = test::made_up_call(tokens, {});
        const std::int64_t lendable = evaluate(program.lendable_bytes, slots);
        slots[static_cast<std::size_t>(Slot::retained)] = slots[static_cast<std::size_t>(Slot::grad_weight)];
        slots[static_cast<std::size_t>(Slot::retained_bytes)] = lendable;
        slots[static_cast<std::size_t>(Slot::retained_in_grad_weight)] = 1;
        std::int64_t stored = 0;
        for (const Recorded& r : test::run(program, program.forward, slots)) {
            if (r.kernel == "flce_forward") stored += r.params<Fp8LogitsParams>().stored;
        }
        return stored / 2;  // the second walk, of rows that turn out to have another power, names them again
    };
    EXPECT_NEAR(static_cast<double>(columns(kLarge, 4096)), 151936 / 2, 384);
    EXPECT_NEAR(static_cast<double>(columns(kLarge, 8192)), 151936 / 4, 384);
    EXPECT_NEAR(static_cast<double>(columns(kLarge, 1024)), 151936 * 0.8, 384);
    EXPECT_EQ(columns("D=2048,V=151936,fp8,tied", 4096), 0) << "old values are there";
    EXPECT_EQ(columns("D=2048,V=151936,fp8,fp8_dlogits=e4m3", 4096), 0) << "nothing is kept in e4m3";
}

TEST(Fp8Path, OtherSpecs_AreRefusedByName) {
    const Device h200 = describe_device("h200");
    const auto reason = [&](const char* text, const char* device) {
        const Spec spec = parse_spec(text).normalized();
        Plan plan = path_plans(parse_spec("D=64,V=1000,fp8").normalized(), h200, PlanPath::cuda_fp8).front();
        plan.strategy = Strategy::recompute;
        return illegal_reason(spec, describe_device(device), plan).value_or("");
    };
    EXPECT_EQ(reason("D=64,V=1000,fp8", "h200"), "");
    EXPECT_NE(reason("D=64,V=1000,fp8,dtype=fp16", "h200").find("dtype=fp16"), std::string::npos);
    EXPECT_NE(reason("D=64,V=1000", "h200").find("for specs with fp8"), std::string::npos);
    EXPECT_NE(reason("D=64,V=1000,fp8", "b200").find("sm_90a"), std::string::npos);
    EXPECT_NE(reason("D=64,V=1000,fp8,outputs=loss+top1", "h200").find("outputs"), std::string::npos);
    EXPECT_NE(reason("D=64,V=1000,fp8,softcap=30,class_offset", "h200").find("class_offset"), std::string::npos);
}

}  // namespace
}  // namespace flce
