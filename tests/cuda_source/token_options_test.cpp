// Tensors with a number for every token: each kernel reads them from the place where its rows are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "generator/logit_transforms.hpp"
#include "templates/common/output_params.cuh"
#include "templates/sm80/params.cuh"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce::token_options {
namespace {

using test::Recorded;
using test::run;

// Made-up addresses, far apart.
constexpr std::int64_t kStep = std::int64_t{1} << 44;
constexpr std::int64_t address(Slot slot) { return (static_cast<std::int64_t>(slot) + 1) * kStep; }
std::int64_t as_address(const void* pointer) { return reinterpret_cast<std::int64_t>(pointer); }

/// A call that has every tensor.
CallSlots call(std::int64_t num_tokens, ReductionCode reduction = ReductionCode::mean) {
    CallSlots slots{};
    const auto set = [&](Slot slot, std::int64_t value) { slots[static_cast<std::size_t>(slot)] = value; };
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(Slot::num_tokens); ++i) set(static_cast<Slot>(i), address(static_cast<Slot>(i)));
    for (const Slot absent : {Slot::num_valid, Slot::retained, Slot::retained_bytes, Slot::retained_in_grad_weight}) set(absent, 0);
    set(Slot::workspace, address(Slot::workspace));
    set(Slot::num_tokens, num_tokens);
    set(Slot::target_bits, 64);
    set(Slot::teacher_bits, 32);
    set(Slot::reduction, static_cast<std::int64_t>(reduction));
    return slots;
}

CudaProgram program_of(const std::string& spec_text, const char* device_name, std::int64_t scratch = kDefaultScratchBytes) {
    const Spec spec = parse_spec(spec_text);
    const Device device = describe_device(device_name);
    return generate_cuda(spec, device, choose_plan(spec, device, {.scratch_bytes = scratch}));
}

// Listed rows, launches and blocks of rows, and neither.
struct Shape {
    const char* device;
    const char* spec;
    std::int64_t tokens;
    std::int64_t scratch = kDefaultScratchBytes;
};
constexpr Shape kShapes[] = {
    {"h100", "D=64,V=1000", 100},
    {"h100", "D=64,V=1000", 5000},
    {"h100", "D=64,V=50257", 300'001},
    {"h100", "D=2048,V=50257", 4096},
    {"h100", "D=2048,V=50257", 40'000, std::int64_t{8} << 20},
    {"h100", "D=2048,V=50257,weight_dtype=fp32", 5000},
    {"a100", "D=64,V=1000", 100},
    {"a100", "D=64,V=1000,weight_dtype=fp32", 5000},
    {"a100", "D=64,V=50257", 300'001},
    {"a100", "D=2048,V=50257,dtype=fp32", 40'000, std::int64_t{8} << 20},
};

/// `from` is where the launch takes its rows of the caller's tensor from: the row at which it takes their labels.
template <class Params>
void expect_beside_labels(const Params& p, const float* from, Slot slot) {
    const std::int64_t first = (as_address(p.targets.target) - address(Slot::target)) / 8;
    EXPECT_EQ(as_address(from), address(slot) + first * 4);
}

std::int64_t program_hidden_bytes(const char* spec_text) {
    const Spec spec = parse_spec(spec_text);
    return spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.dtype));
}

class TokenOptions : public testing::TestWithParam<Shape> {};

TEST_P(TokenOptions, Weights_LieBesideTheLabels) {
    const Shape& shape = GetParam();
    const CudaProgram program = program_of(std::string(shape.spec) + ",token_weight", shape.device, shape.scratch);
    for (const Recorded& r : run(program, program.forward, call(shape.tokens))) {
        if (r.kernel != "flce_row_outputs") continue;
        const auto p = r.params<RowOutputsParams>();
        expect_beside_labels(p, p.token_weight, Slot::token_weight);
    }
    for (const ReductionCode reduction : {ReductionCode::sum, ReductionCode::mean, ReductionCode::weighted_mean}) {
        int counted = 0;
        for (const Recorded& r : run(program, program.backward, call(shape.tokens, reduction))) {
            if (r.kernel == "flce_prepare") {
                const auto p = r.params<PrepareParams>();
                expect_beside_labels(p, p.token_weight, Slot::token_weight);
                counted += p.want_count;
            }
            if (r.kernel != "flce_row_coefficients") continue;
            const auto p = r.params<RowCoefficientsParams>();
            expect_beside_labels(p, p.token_weight, Slot::token_weight);
            EXPECT_EQ(p.logprobs, nullptr) << "no dft";
            counted += p.prepares != 0 ? p.want_count : 0;
        }
        EXPECT_EQ(counted, reduction == ReductionCode::sum ? 0 : 1);
    }
}

TEST_P(TokenOptions, Dft_ReadsWhatForwardWrote) {
    const Shape& shape = GetParam();
    const CudaProgram program = program_of(std::string(shape.spec) + ",dft,outputs=loss+logprobs", shape.device, shape.scratch);
    for (const Recorded& r : run(program, program.forward, call(shape.tokens))) {
        if (r.kernel != "flce_row_outputs") continue;
        EXPECT_EQ(r.params<RowOutputsParams>().dft, 1);
    }
    for (const Recorded& r : run(program, program.backward, call(shape.tokens))) {
        if (r.kernel != "flce_row_coefficients") continue;
        const auto p = r.params<RowCoefficientsParams>();
        expect_beside_labels(p, p.logprobs, Slot::logprobs);
    }
}

TEST_P(TokenOptions, Outputs_LieBesideTheLabels) {
    const Shape& shape = GetParam();
    const CudaProgram program = program_of(std::string(shape.spec) + ",outputs=loss+top1+log_sum_sq_probs", shape.device, shape.scratch);
    for (const Recorded& r : run(program, program.forward, call(shape.tokens))) {
        if (r.kernel == "flce_row_outputs") {
            const auto p = r.params<RowOutputsParams>();
            expect_beside_labels(p, p.log_sum_sq_probs, Slot::log_sum_sq_probs);
            const std::int64_t first = (as_address(p.targets.target) - address(Slot::target)) / 8;
            EXPECT_EQ(as_address(p.top1), address(Slot::top1) + first * 8);
        } else if (r.kernel == "flce_prepare") {
            const auto p = r.params<PrepareParams>();
            EXPECT_EQ(as_address(p.outputs[kRowOutputs - 1]), address(Slot::log_sum_sq_probs));
            EXPECT_EQ(as_address(p.top1), address(Slot::top1));
        }
    }
}

/// The temperatures of a launch that sees logits, which begins with `Params`.
template <class Params>
void expect_tempered(const Recorded& r) {
    const auto p = r.params<Tempered<Params>>();
    expect_beside_labels(p, p.temperatures, Slot::temperature);
}

TEST_P(TokenOptions, Temperatures_ReachEveryKernelThatSeesLogitsOrLabels) {
    const Shape& shape = GetParam();
    const CudaProgram program = program_of(std::string(shape.spec) + ",temperature", shape.device, shape.scratch);
    const bool hopper = std::string(shape.device) == "h100";
    const bool rounds = std::string(shape.spec).find("weight_dtype") != std::string::npos;
    const bool retains = !rounds && std::string(shape.spec).find("dtype=fp32") == std::string::npos;
    int gemms = 0;
    for (const Recorded& r : run(program, program.forward, call(shape.tokens))) {
        if (r.kernel == "flce_row_outputs") {
            const auto p = r.params<RowOutputsParams>();
            expect_beside_labels(p, p.temperature, Slot::temperature);
        } else if (r.kernel == "flce_prepare") {
            const auto p = r.params<PrepareParams>();
            expect_beside_labels(p, p.temperature, Slot::temperature);
        } else if (r.kernel.starts_with("flce_forward")) {
            ++gemms;
            if (hopper && rounds) expect_tempered<ForwardStretchSm90Params>(r);
            if (hopper && !rounds) expect_tempered<ForwardSm90Params>(r);
            if (!hopper && rounds) expect_tempered<ForwardStretchParams>(r);
            if (!hopper && retains) expect_tempered<RetainForwardParams>(r);
            if (!hopper && !rounds && !retains) expect_tempered<ForwardParams>(r);
        }
    }
    EXPECT_GT(gemms, 0);
}

TEST_P(TokenOptions, Temperatures_OfLaunchesRowsReachDlogits) {
    const Shape& shape = GetParam();
    const CudaProgram program = program_of(std::string(shape.spec) + ",temperature", shape.device, shape.scratch);
    const CallSlots slots = call(shape.tokens);
    const float* written = nullptr;
    std::int64_t rows = 0;
    int gemms = 0;
    for (const Recorded& r : run(program, program.backward, slots)) {
        if (r.kernel == "flce_row_coefficients") {
            const auto p = r.params<RowCoefficientsParams>();
            expect_beside_labels(p, p.temperature, Slot::temperature);
            written = p.row_temperatures;
            rows = p.rows;
            const std::int64_t end = as_address(written) + rows * 4;
            EXPECT_LE(end, address(Slot::workspace) + evaluate(program.backward_workspace_bytes, slots));
            EXPECT_GE(as_address(written), as_address(p.row_targets) + rows * 8);
        } else if (r.kernel == "flce_gather_rows") {
            const auto p = r.params<GatherRowsParams>();
            expect_beside_labels(p, p.temperature, Slot::temperature);
        } else if (r.kernel == "flce_dlogits") {
            ++gemms;
            const bool hopper = std::string(shape.device) == "h100";
            EXPECT_EQ(hopper ? r.params<Tempered<DlogitsSm90Params>>().temperatures : r.params<Tempered<DlogitsParams>>().temperatures,
                      written);
            EXPECT_EQ(r.params<DlogitsParams>().rows, rows);
        } else if (r.kernel == "flce_backward_chunks") {
            ++gemms;
            const bool rounds = std::string(shape.spec).find("weight_dtype") != std::string::npos;
            EXPECT_EQ(rounds ? r.params<Tempered<RoundedChunksSm90Params>>().temperatures
                             : r.params<Tempered<BackwardChunksSm90Params>>().temperatures,
                      written);
        }
    }
    EXPECT_GT(gemms, 0);
}

constexpr int kTopK = 24;

/// The teacher's tensors, from the row on at which the labels begin.
void expect_teacher(const TeacherParams& p, std::int64_t first) {
    EXPECT_EQ(p.top_k, kTopK);
    EXPECT_EQ(p.bits, 32);
    EXPECT_EQ(as_address(p.ids), address(Slot::teacher_ids) + first * kTopK * 4);
    EXPECT_EQ(as_address(p.probs), address(Slot::teacher_probs) + first * kTopK * 4);
    EXPECT_EQ(as_address(p.logprobs), address(Slot::teacher_logprobs) + first * kTopK * 4);
}
template <class Params>
std::int64_t first_row(const Params& p) {
    return (as_address(p.targets.target) - address(Slot::target)) / 8;
}

TEST_P(TokenOptions, Teacher_LogitsComeBeforeTheRowsOutputs) {
    const Shape& shape = GetParam();
    const CudaProgram program = program_of(std::string(shape.spec) + ",teacher_top_k=24,hard_weight=0.25", shape.device, shape.scratch);
    std::int64_t rows = 0;
    std::int64_t all_rows = 0;
    for (const Recorded& r : run(program, program.forward, call(shape.tokens))) {
        if (r.kernel == "flce_teacher_logits") {
            const auto p = r.params<TeacherLogitsParams>();
            const std::int64_t first = first_row(p);
            expect_teacher(p.teacher, first);
            EXPECT_EQ(as_address(p.hidden), address(Slot::hidden) + first * program_hidden_bytes(shape.spec));
            EXPECT_EQ(as_address(p.weight), address(Slot::weight));
            EXPECT_EQ(p.first_row, first);
            rows = r.launch.grid[0];
            all_rows += rows;
        } else if (r.kernel == "flce_row_outputs") {
            const auto p = r.params<RowOutputsParams>();
            EXPECT_EQ(p.rows, rows);
            EXPECT_EQ(p.hard_weight, 0.25F);
            expect_teacher(p.teacher, first_row(p));
        }
    }
    EXPECT_EQ(all_rows, shape.tokens);
}

TEST_P(TokenOptions, Teacher_WritesIntoEveryChunkOfDlogits) {
    const Shape& shape = GetParam();
    for (const char* options : {",teacher_top_k=24,softcap=4", ",teacher_top_k=24,bias"}) {
        const CudaProgram program = program_of(std::string(shape.spec) + options, shape.device, shape.scratch);
        const CallSlots slots = call(shape.tokens);
        RowCoefficientsParams rows{};
        DlogitsParams dlogits{};
        std::int64_t columns = 0;
        std::string before;
        for (const Recorded& r : run(program, program.backward, slots)) {
            EXPECT_NE(r.kernel, "flce_backward_chunks");
            if (r.kernel == "flce_row_coefficients") {
                rows = r.params<RowCoefficientsParams>();
                expect_teacher(rows.teacher, first_row(rows));
                const std::int64_t end = as_address(rows.row_teacher_weights) + std::int64_t{rows.rows} * 4;
                EXPECT_LE(end, address(Slot::workspace) + evaluate(program.backward_workspace_bytes, slots));
                EXPECT_GE(as_address(rows.row_teacher_weights), as_address(rows.row_targets) + std::int64_t{rows.rows} * 8);
            } else if (r.kernel == "flce_dlogits") {
                dlogits = r.params<DlogitsParams>();
                columns += dlogits.first_column + dlogits.columns > columns ? dlogits.columns : 0;
            } else if (r.kernel == "flce_teacher_dlogits" || r.kernel == "flce_teacher_bias") {
                const auto p = r.params<TeacherRowsParams>();
                EXPECT_EQ(before == "flce_dlogits", r.kernel == "flce_teacher_dlogits");
                expect_teacher(p.teacher, first_row(rows));
                EXPECT_EQ(p.row_weights, rows.row_teacher_weights);
                EXPECT_EQ(p.coefficients, dlogits.coefficients);
                EXPECT_EQ(p.dlogits, dlogits.dlogits);
                EXPECT_EQ(p.bias_partials, dlogits.bias_partials);
                EXPECT_EQ(std::tie(p.ld, p.first_column, p.rows, p.columns),
                          std::tie(dlogits.ld, dlogits.first_column, dlogits.rows, dlogits.columns));
                EXPECT_EQ(p.slope.inverse_softcap, dlogits.bias_partials == nullptr ? 0.25F : 0.0F);
                const std::int64_t width = r.kernel == "flce_teacher_bias" ? kTeacherColumns : kRowThreads / 32;
                const std::int64_t items = r.kernel == "flce_teacher_bias" ? p.columns : p.rows;
                EXPECT_EQ(r.launch.grid[0], (items + width - 1) / width);
            } else if (r.kernel == "flce_grad_bias") {
                EXPECT_EQ(before, "flce_teacher_bias");
            } else if (r.kernel == "flce_grad_weight") {
                EXPECT_EQ(before, "flce_teacher_dlogits");
            }
            before = r.kernel;
        }
        EXPECT_EQ(columns, parse_spec(shape.spec).vocab_size);
    }
}

TEST(TokenOptionsRetained, References_AreOfTemperedLogits) {
    const CudaProgram program = program_of("D=2048,V=50257,temperature", "h100");
    CallSlots slots = call(4096);
    slots[static_cast<std::size_t>(Slot::retained)] = address(Slot::retained);
    slots[static_cast<std::size_t>(Slot::retained_bytes)] = std::int64_t{4} << 30;
    int references = 0;
    for (const Recorded& r : run(program, program.forward, slots)) {
        if (r.kernel == "flce_forward") expect_tempered<ForwardSm90Params>(r);
        if (r.kernel != "flce_references") continue;
        ++references;
        const auto p = r.params<ReferencesParams>();
        expect_beside_labels(p, p.temperature, Slot::temperature);
    }
    EXPECT_EQ(references, 1);
}

// They are numbers of small kernels: no GEMM is compiled anew for them.
TEST(TokenOptionsSource, WeightsAndDft_ChangeNoKernel) {
    for (const char* device : {"h100", "a100"}) {
        const CudaProgram plain = program_of("D=64,V=1000,outputs=loss+logprobs", device);
        const CudaProgram weighted = program_of("D=64,V=1000,outputs=loss+logprobs,token_weight,dft", device);
        ASSERT_EQ(plain.units.size(), weighted.units.size());
        for (std::size_t i = 0; i < plain.units.size(); ++i) EXPECT_EQ(plain.units[i].source, weighted.units[i].source);
    }
}

// A teacher's classes are a matter of small kernels, and their number and share are parameters. Only chunks are not joined.
TEST(TokenOptionsSource, Teacher_ChangesNoKernelOverTiles) {
    for (const char* device : {"h100", "a100"}) {
        for (const std::string spec : {"D=64,V=1000,dtype=fp16,bias", "D=64,V=1000,bias", "D=64,V=1000,dtype=fp32,bias"}) {
            CudaProgram plain = program_of(spec, device);
            std::erase_if(plain.units, [](const CudaUnit& unit) { return unit.kernels.front().name.ends_with("_chunks"); });
            const CudaProgram taught = program_of(spec + ",teacher_top_k=3", device);
            const CudaProgram other = program_of(spec + ",teacher_top_k=200,hard_weight=0.5", device);
            ASSERT_EQ(plain.units.size(), taught.units.size());
            for (std::size_t i = 0; i < plain.units.size(); ++i) {
                const std::string& name = plain.units[i].kernels.front().name;
                EXPECT_EQ(plain.units[i].source == taught.units[i].source, name != "flce_row_outputs") << name;
                EXPECT_EQ(taught.units[i].source, other.units[i].source);
            }
        }
    }
}

/// Slope from the numbers that backward has of a logit: its log-probability and lse, of `classes` classes of which the largest has a logit
/// of `top`.
float slope_beside(const LogitSlope& slope, float logit, float top, float classes, float temperature) {
    const float log_sum = std::log(classes);
    return slope_of_class(slope, (logit - top) - log_sum, top + log_sum, temperature, 0);
}

TEST(TeacherSlope, AtTheCap_IsExactlyZero) {
    for (const float cap : {1.0F, 3.7F, 30.0F, 50.0F}) {
        const LogitSlope slope = logit_slope(parse_spec(fmt::format("D=64,V=1000,softcap={},logit_scale=0.75", cap)));
        for (const float temperature : {1.0F, 0.1F, 0.7F, 1.9F, 0x1p-100F, 0x1p100F}) {
            for (float classes = 1; classes < 3e5F; classes *= 1.37F) {
                const float top = cap / temperature;
                EXPECT_EQ(slope_beside(slope, top, top, classes, temperature), 0) << cap << " " << temperature << " " << classes;
                EXPECT_EQ(slope_beside(slope, -top, top, classes, temperature), 0) << cap << " " << temperature << " " << classes;
            }
        }
    }
}

TEST(TeacherSlope, BelowTheCap_IsThatOfTheLogit) {
    const LogitSlope slope = logit_slope(parse_spec("D=64,V=1000,softcap=30,logit_scale=0.75"));
    for (const float t : {0.0F, 0.5F, -0.9F, 0.999F, 1 - 0x1p-18F, -1 + 0x1p-18F}) {
        const float got = slope_beside(slope, 30 * t, 30, 151'936, 1);
        EXPECT_NEAR(got, 0.75 * (1 - double(t) * double(t)), 16 * 0x1p-24);
        EXPECT_GT(got, 0);
    }
    EXPECT_EQ(slope_of_class(logit_slope(parse_spec("D=64,V=1000")), -INFINITY, 3, 1, 0), 1) << "a class that does not take part";
}

TEST(TeacherSlope, BehindAnOffset_IsThatOfTheCappedLogit) {
    const LogitSlope slope = logit_slope(parse_spec("D=64,V=1000,softcap=30,logit_scale=0.75"));
    for (const float offset : {-200.0F, -11.3F, 0.0F, 4.0F}) {
        for (const float temperature : {0.5F, 1.0F, 1.7F}) {
            const double t = 0.4;
            const float logit = (30 * float(t) + offset) / temperature;
            EXPECT_NEAR(slope_of_class(slope, logit - 70, 70, temperature, offset), 0.75 * (1 - t * t), 64 * 0x1p-24);
        }
    }
    EXPECT_EQ(slope_of_class(slope, -INFINITY, 3, 1, -INFINITY), 0) << "a class that is ruled out";
}

std::string shape_name(const testing::TestParamInfo<Shape>& info) {
    return std::string(info.param.device) + "_" + std::to_string(info.param.tokens) + "_" + std::to_string(info.index);
}
INSTANTIATE_TEST_SUITE_P(EveryWay, TokenOptions, testing::ValuesIn(kShapes), shape_name);

}  // namespace
}  // namespace flce::token_options
