// Programs of the paths whose products are of numbers in 8 bits: every column is worked on once, in memory that the call has, and nothing
// is written over before it has been read.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "generator/planner.hpp"
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
    bool of_entropy = false;    ///< the entropy has a gradient
};

/// A path, and a GPU that has it for its own.
struct Gpu {
    const char* name;
    const char* device;
    PlanPath path;
    int sum_columns;  ///< columns of a partial sum, where nothing crowds registers
};
constexpr Gpu kGpus[] = {{"H200", "h200", PlanPath::cuda_fp8, 192},
                         {"L40s", "l40s", PlanPath::cuda_fp8_sm89, 128},
                         {"Rtx5090", "rtx 5090", PlanPath::cuda_fp8_sm89, 128},
                         {"H200Mma", "h200", PlanPath::cuda_fp8_sm89, 128}};

struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    [[nodiscard]] bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
    [[nodiscard]] bool holds(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

/// Launch of logits, whatever its operands are: the parameters that all have, and where matrices lie.
struct Logits : Fp8LogitsParams {
    Range hidden;
    Range weight;
    Range turned_range;
};
struct Gradient : Fp8GradientParams {
    Range a;
    Range b;
    Range result;
};

class Fp8Programs : public testing::TestWithParam<std::tuple<Gpu, Case>> {
protected:
    const Gpu& gpu = std::get<0>(GetParam());
    const Case& of = std::get<1>(GetParam());
    Spec spec = parse_spec(of.spec).normalized();
    Device device = describe_device(gpu.device);
    Plan plan = path_plans(spec, device, gpu.path, {.scratch_bytes = of.scratch}).front();
    CudaProgram program = generate_cuda(spec, device, plan);
    std::int64_t retained_bytes = 0;
    CallSlots slots = call();

    CallSlots call() {
        CallSlots made = test::made_up_call(of.tokens, {});
        const auto set = [&](Slot slot, std::int64_t value) { made[static_cast<std::size_t>(slot)] = value; };
        if (is_shard(spec)) {
            set(Slot::vocab_start, 5000);
            set(Slot::vocab_columns, columns());
            set(Slot::weight_rows, hidden_major() ? spec.padded_vocab_size : columns() + 3);
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
        set(Slot::grad_entropy, of.of_entropy ? kOwn : 0);
        set(Slot::retained_in_grad_weight, of.lent ? 1 : 0);
        return made;
    }
    [[nodiscard]] std::int64_t slot_of(Slot slot) const { return slots[static_cast<std::size_t>(slot)]; }
    [[nodiscard]] bool hidden_major() const { return spec.layout == WeightLayout::hidden_major; }
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
        return {at, at + (hidden_major() ? spec.padded_vocab_size : columns()) * gradient_row()};
    }
    [[nodiscard]] Launched backward(StageCode stage) const {
        CallSlots of_stage = slots;
        of_stage[static_cast<std::size_t>(Slot::stage)] = static_cast<std::int64_t>(stage);
        return test::run(program, program.backward, of_stage);
    }
    [[nodiscard]] std::int64_t gradient_row() const { return spec.hidden_size * gradient_element(); }
    [[nodiscard]] std::int64_t gradient_element() const { return static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype)); }
    /// Whether a launch of grad_weight makes the gradient of classes from `first` on, of as many as it says; and how many these are.
    [[nodiscard]] std::int64_t expect_classes(const Gradient& p, std::int64_t first) const {
        EXPECT_EQ(p.result.begin, gradient().begin + first * (hidden_major() ? gradient_element() : gradient_row()));
        EXPECT_EQ(hidden_major() ? p.m : p.n, spec.hidden_size);
        const std::int64_t classes = hidden_major() ? p.n : p.m;
        const std::int64_t rows_before_last = (hidden_major() ? (spec.hidden_size - 1) * spec.padded_vocab_size : 0) * gradient_element();
        const std::int64_t last_rows = classes * (hidden_major() ? gradient_element() : gradient_row());
        EXPECT_EQ(p.result.end - p.result.begin, rows_before_last + last_rows);
        return classes;
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
    static Range range_of(const PlainMatrix& matrix, std::int64_t element_bytes = 1) {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(matrix.at) % 16, 0U);
        EXPECT_EQ(matrix.pitch * element_bytes % 16, 0);
        EXPECT_GE(matrix.pitch, matrix.columns);
        EXPECT_GT(matrix.rows, 0);
        EXPECT_GT(matrix.columns, 0);
        return bytes_from(matrix.at, ((matrix.rows - 1) * matrix.pitch + matrix.columns) * element_bytes);
    }
    [[nodiscard]] Logits logits_of(const Recorded& r) const {
        if (gpu.path == PlanPath::cuda_fp8) {
            return {r.params<Fp8LogitsParams>(), range_of(map_of(r, &Fp8LogitsParams::hidden_map)),
                    range_of(map_of(r, &Fp8LogitsParams::weight_map)), range_of(map_of(r, &Fp8LogitsParams::turned_map))};
        }
        const auto p = r.params<Fp8LogitsMmaParams>();
        EXPECT_EQ(p.weight_map.columns % 16, 0) << "codes of 16 bytes";
        EXPECT_EQ(p.weight_map.rows, p.columns);
        Logits made{{}, range_of(p.hidden_map), range_of(p.weight_map), range_of(p.turned_map)};
        static_cast<ForwardParams&>(made) = p;
        made.column_scales = p.column_scales;
        made.exponentials = p.exponentials;
        made.again = p.again;
        made.pitch = p.pitch;
        made.first_column = p.first_column;
        made.columns = p.columns;
        made.stored = p.stored;
        made.sums = p.sums;
        made.row_shares = p.row_shares;
        return made;
    }
    [[nodiscard]] Gradient gradient_of(const Recorded& r) const {
        if (gpu.path == PlanPath::cuda_fp8) {
            return {r.params<Fp8GradientParams>(), range_of(map_of(r, &Fp8GradientParams::a_map)),
                    range_of(map_of(r, &Fp8GradientParams::b_map)), range_of(map_of(r, &Fp8GradientParams::result_map))};
        }
        const auto p = r.params<Fp8GradientMmaParams>();
        EXPECT_EQ(p.a_map.columns, p.k);
        EXPECT_EQ(p.b_map.columns, p.k);
        EXPECT_EQ(p.k % 16, 0) << "codes of 16 bytes";
        const std::int64_t element = r.kernel == "flce_grad_hidden" ? 4 : static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype));
        Gradient made{{}, range_of(p.a_map), range_of(p.b_map), range_of(p.result_map, element)};
        made.m = p.m;
        made.n = p.n;
        made.k = p.k;
        made.adds = p.adds;
        return made;
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
            const Logits p = logits_of(r);
            if (p.stored == 0 || p.again != nullptr) continue;
            const Range rows = bytes_from(p.exponentials, (of.tokens - 1) * p.pitch + p.stored);
            const Range& turned = p.turned_range;
            all.rows = all.columns == 0 ? rows : Range{all.rows.begin, rows.end};
            all.turned = all.columns == 0 ? turned : Range{all.turned.begin, turned.end};
            all.columns += p.stored;
        }
        return all;
    }
    [[nodiscard]] std::int64_t positions() const { return (of.tokens + kFp8TokenGroup - 1) / kFp8TokenGroup * kFp8TokenGroup; }

    /// Whether a launch of grad_weight, of classes from `first` on, reads the sum that smoothing_totals has made, and its classes' weights.
    void expect_smoothed(const Recorded& r, std::int64_t first, const Range& room) const {
        if (gpu.path == PlanPath::cuda_fp8) return expect_smoothed(r.params<SmoothedFp8GradientParams>(), first, room);
        expect_smoothed(r.params<SmoothedFp8GradientMmaParams>(), first, room);
    }
    template <class Matrix>
    void expect_smoothed(const SmoothedFp8GradientOf<Matrix>& p, std::int64_t first, const Range& room) const {
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
        const Logits p = logits_of(r);
        EXPECT_LE(p.stored, p.columns);
        if (p.stored == 0) return;
        EXPECT_GE(p.pitch, p.stored);
        const std::int64_t columns = (p.stored + kFp8ClassGroup - 1) / kFp8ClassGroup * kFp8ClassGroup;
        EXPECT_EQ(p.pitch % kFp8ClassGroup, 0);
        const Range rows = bytes_from(p.exponentials, (of.tokens - 1) * p.pitch + columns);
        const Range& turned = p.turned_range;
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
    const int sum_columns = gpu.path == PlanPath::cuda_fp8 ? plan.cuda.forward.block_n : gpu.sum_columns;
    std::vector<Logits> all;
    for (const Recorded& r : made) {
        expect_aligned(r);
        if (r.kernel != "flce_forward") continue;
        const Logits p = logits_of(r);
        expect_stored(r, room);
        expect_owned(p.weight, room);
        expect_owned(p.hidden, room);
        const std::int64_t tiles = (p.columns + sum_columns - 1) / sum_columns;
        const std::int64_t fields = 2 + (spec.label_smoothing > 0 ? 1 : 0) + (spec.outputs.entropy ? 1 : 0);
        EXPECT_EQ(p.row_shares, nullptr);
        expect_owned(bytes_from(p.partials, tiles * fields * p.partial_rows * 4), room);
        expect_owned(bytes_from(p.column_scales, tiles * sum_columns * 4), room);
        all.push_back(p);
    }
    ASSERT_EQ(all.empty(), columns() == 0);
    if (columns() == 0) return;
    EXPECT_EQ(made.count("prepare"), spec.class_weight && spec.label_smoothing > 0 ? 1 : 0) << "the sum of class weights";
    EXPECT_EQ(all.front().stored, 0) << "powers come of it";
    std::int64_t stored = 0;
    for (const bool again : {false, true}) {
        std::int64_t next = 0;
        for (const Logits& p : std::vector(all.begin() + 1, all.end())) {
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
    const Left left = of.of_entropy ? Left() : this->left();  // exponentials that know nothing of a gradient are not read
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
            const Logits p = logits_of(r);
            EXPECT_EQ(p.first_column, written) << "rows before it are written";
            EXPECT_EQ(p.row_shares != nullptr, of.of_entropy);
            if (of.of_entropy) expect_owned(bytes_from(p.row_shares, of.tokens * 8), room);
            expect_stored(r, room);
            const Range& codes = p.weight;
            expect_owned(codes, room);
            expect_dead(codes);
            expect_dead(bytes_from(p.exponentials, (of.tokens - 1) * p.pitch + p.stored));
            expect_dead(p.turned_range);
            const std::int64_t gradients = gradient().begin + (p.first_column + p.columns) * gradient_row();
            for (const Range& used : {codes, bytes_from(p.exponentials, 1)}) {
                EXPECT_FALSE(used.begin < gradients && used.end > gradient().begin) << "its own gradient would be written over it";
            }
        } else if (r.kernel == "flce_grad_hidden") {
            const Gradient p = gradient_of(r);
            EXPECT_EQ(p.adds != 0, hidden_columns > 0);
            const Range& turned = p.b;
            expect_owned(turned, room);
            expect_dead(turned);
            EXPECT_TRUE(turned.begin >= gradient().begin + written * gradient_row() || turned.begin >= room.begin);
            EXPECT_FALSE(hidden_major() && written > 0 && turned.meets(gradient())) << "its rows have columns that are written";
            expect_owned(p.result, room);
            hidden_columns += p.k;
        } else if (r.kernel == "flce_grad_weight") {
            const Gradient p = gradient_of(r);
            const std::int64_t classes = expect_classes(p, written);
            EXPECT_FALSE(p.result.meets(p.a) || p.result.meets(p.b));
            expect_dead(p.result);
            EXPECT_EQ(p.k, positions());
            if (spec.label_smoothing > 0) expect_smoothed(r, written, room);
            written += classes;
        }
    }
    EXPECT_EQ(totals.hidden_sum != nullptr, spec.label_smoothing > 0 && columns() > 0);
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
    const bool left = of.kept == 1.0 && columns() > 0 && !of.of_entropy;
    EXPECT_EQ(rest.count("grad_weight") > 0, left) << "a sum of grad_hidden runs meanwhile";
    EXPECT_EQ(first.count("grad_weight") > 0, !left && columns() > 0);
    const std::int64_t hidden = of.tokens * spec.hidden_size * static_cast<std::int64_t>(element_bytes(grad_hidden_dtype(spec)));
    EXPECT_EQ(first.memsets.contains(slot_of(Slot::grad_hidden)), columns() == 0);
    if (columns() == 0) {
        EXPECT_EQ(first.memsets.at(slot_of(Slot::grad_hidden)), hidden);
    }
    EXPECT_EQ(first.count("zero_columns"), hidden_major() ? 1 : 0);
    if (hidden_major()) return;
    EXPECT_EQ(first.memsets.at(slot_of(Slot::grad_weight) + columns() * gradient_row()), 3 * gradient_row()) << "rows of padding";
}

constexpr const char* kLarge = "D=2048,V=151936,fp8";
constexpr const char* kRagged = "D=520,V=2571,fp8,bias,temperature";
constexpr const char* kLargeColumns = "D=2048,V=151936,fp8,layout=hidden_major";
constexpr const char* kRaggedColumns =
    "D=520,V=2571,padded_vocab_size=2576,fp8,layout=hidden_major,bias,temperature,class_weight,label_smoothing=0.1";
constexpr const char* kWithEntropy = "D=2048,V=50257,fp8,temperature,outputs=loss+entropy";
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
    {"Entropy", kWithEntropy, 4096},
    {"EntropyAll", kWithEntropy, 4096, 1.0},
    {"LentEntropy", kWithEntropy, 4096, 0, 64 << 20, -1, true},
    {"EntropyWithGradient", kWithEntropy, 4096, 0, 64 << 20, -1, false, true},
    {"EntropyPartWithGradient", kWithEntropy, 4096, 0.5, 64 << 20, -1, false, true},
    {"EntropyAllWithGradient", kWithEntropy, 4096, 1.0, 64 << 20, -1, false, true},
    {"LentEntropyWithGradient", kWithEntropy, 4096, 0, 64 << 20, -1, true, true},
    {"FewClasses", "D=264,V=7,fp8", 300, 1.0},
    {"FewClassesNothing", "D=264,V=7,fp8", 300},
    {"Padded", "D=264,V=1000,padded_vocab_size=1024,fp8=e4m3,fp8_dlogits=e4m3", 300},
    {"HiddenMajor", kLargeColumns, 4096},
    {"HiddenMajorAll", kLargeColumns, 4096, 1.0},
    {"HiddenMajorHalf", kLargeColumns, 4095, 0.5},
    {"HiddenMajorAdded", "D=2048,V=151936,fp8,layout=hidden_major,grad_weight_mode=accumulate,grad_weight_dtype=fp32", 4096, 0.7},
    {"HiddenMajorLittleScratch", kLargeColumns, 4096, 0.5, 4 << 20},
    {"HiddenMajorRagged", kRaggedColumns, 333},
    {"HiddenMajorRaggedPart", kRaggedColumns, 37, 0.6},
    {"HiddenMajorFewClasses", "D=264,V=7,padded_vocab_size=8,fp8,layout=hidden_major", 300, 1.0},
};
using NamedCase = std::tuple<Gpu, Case>;
std::string name_of(const testing::TestParamInfo<NamedCase>& info) {
    return std::string(std::get<0>(info.param).name) + std::get<1>(info.param).name;
}
INSTANTIATE_TEST_SUITE_P(Specs, Fp8Programs, testing::Combine(testing::ValuesIn(kGpus), testing::ValuesIn(kCases)), name_of);

constexpr const char* kLargeShard = "D=2048,V=75968,padded_vocab_size=75971,whole_vocab_size=151936,fp8";
constexpr const char* kShardWithEntropy =
    "D=520,V=2571,padded_vocab_size=2574,whole_vocab_size=9000,fp8,softcap=20,label_smoothing=0,outputs=loss+entropy";
constexpr const char* kSmoothedShard =
    "D=520,V=2571,padded_vocab_size=2574,whole_vocab_size=9000,fp8,bias,class_weight,label_smoothing=0.1";
constexpr const char* kRaggedShard = "D=520,V=2571,padded_vocab_size=2574,whole_vocab_size=9000,fp8,bias,grad_hidden_dtype=fp32";
constexpr const char* kColumnsOfAShard =
    "D=520,V=2571,padded_vocab_size=2576,whole_vocab_size=9000,fp8,layout=hidden_major,bias,class_weight,label_smoothing=0.1";
const Case kShardCases[] = {
    {"Shard", kLargeShard, 4096},
    {"ShardAll", kLargeShard, 4096, 1.0},
    {"ShardPart", kLargeShard, 4096, 0.4, 64 << 20, 70001},
    {"FewOfAShard", kLargeShard, 4096, 0, 64 << 20, 700},
    {"FewOfAShardAll", kLargeShard, 4096, 1.0, 64 << 20, 700},
    {"OneOfAShard", kLargeShard, 300, 1.0, 4 << 20, 1},
    {"NoneOfAShard", kLargeShard, 4096, 0, 64 << 20, 0},
    {"EntropyOfAShardWithGradient", kShardWithEntropy, 333, 0.6, 64 << 20, 1537, false, true},
    {"EntropyOfAShardAllWithGradient", kShardWithEntropy, 333, 1.0, 64 << 20, 1537, false, true},
    {"EntropyOfAShardAll", kShardWithEntropy, 333, 1.0, 64 << 20, 1537},
    {"SmoothedShard", kSmoothedShard, 333, 0.6},
    {"SmoothedShardAll", kSmoothedShard, 333, 1.0},
    {"FewOfASmoothedShard", kSmoothedShard, 333, 0, 64 << 20, 700},
    {"NoneOfASmoothedShard", kSmoothedShard, 333, 0, 64 << 20, 0},
    {"RaggedShard", kRaggedShard, 333, 0, 64 << 20, 1537},
    {"RaggedShardAll", kRaggedShard, 333, 1.0, 64 << 20, 385},
    {"HiddenMajorShard", kColumnsOfAShard, 333, 0.6, 64 << 20, 1537},
    {"HiddenMajorShardAll", kColumnsOfAShard, 333, 1.0, 64 << 20, 1537},
    {"NoneOfAHiddenMajorShard", kColumnsOfAShard, 333, 0, 64 << 20, 0},
    {"LentShard", kLargeShard, 4096, 0, 64 << 20, 70001, true},
    {"LentRaggedShard", kRaggedShard, 333, 0, 64 << 20, 1537, true},
    {"NoneOfARaggedShard", kRaggedShard, 333, 1.0, 64 << 20, 0},
};
INSTANTIATE_TEST_SUITE_P(Shards, Fp8Programs, testing::Combine(testing::ValuesIn(kGpus), testing::ValuesIn(kShardCases)), name_of);
INSTANTIATE_TEST_SUITE_P(Shards, Fp8ShardPrograms, testing::Combine(testing::ValuesIn(kGpus), testing::ValuesIn(kShardCases)), name_of);

}  // namespace
}  // namespace flce
