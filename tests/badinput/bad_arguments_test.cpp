// A call with a wrong argument names it and changes nothing: not one byte of any buffer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/kernel_run.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

struct Call {
    ForwardArgs forward;
    BackwardArgs backward;
    Workspace workspace;
};

struct BadCall {
    const char* name;
    bool backward;
    void (*change)(Call&);
    const char* argument;  ///< named in the message
    friend std::ostream& operator<<(std::ostream& out, const BadCall& bad) { return out << bad.name; }
};

void move_address(TensorView& view, std::ptrdiff_t bytes) { view.data = static_cast<std::byte*>(view.data) + bytes; }
DeviceRef other_device(DeviceRef device) {
    if (device.kind == DeviceKind::cpu) return {DeviceKind::cuda, 0};
    return {DeviceKind::cpu, 0};
}

constexpr bool kForward = false;
constexpr bool kBackward = true;

const BadCall kBadCalls[] = {
    // absent
    {"no_hidden", kForward, [](Call& c) { c.forward.hidden = {}; }, "hidden"},
    {"no_weight", kForward, [](Call& c) { c.forward.weight = {}; }, "weight"},
    {"no_target", kForward, [](Call& c) { c.forward.target = {}; }, "target"},
    {"no_lse", kForward, [](Call& c) { c.forward.lse = {}; }, "lse"},
    {"no_bias", kForward, [](Call& c) { c.forward.bias = {}; }, "bias"},
    {"no_class_offset", kForward, [](Call& c) { c.forward.class_offset = {}; }, "class_offset"},
    {"no_class_group", kForward, [](Call& c) { c.forward.class_group = {}; }, "class_group"},
    {"no_row_group", kForward, [](Call& c) { c.forward.row_group = {}; }, "row_group"},
    {"backward_no_row_group", kBackward, [](Call& c) { c.backward.row_group = {}; }, "row_group"},
    {"class_group_of_64_bits", kForward, [](Call& c) { c.forward.class_group.dtype = ScalarType::int64; }, "class_group"},
    {"no_class_weight", kForward, [](Call& c) { c.forward.class_weight = {}; }, "class_weight"},
    {"backward_no_lse", kBackward, [](Call& c) { c.backward.lse = {}; }, "lse"},
    {"backward_no_weight", kBackward, [](Call& c) { c.backward.weight = {}; }, "weight"},
    {"backward_no_entropy", kBackward, [](Call& c) { c.backward.entropy = {}; }, "entropy"},
    {"backward_asks_nothing", kBackward, [](Call& c) { c.backward.grad_hidden = c.backward.grad_weight = c.backward.grad_bias = {}; },
     "grad_hidden"},
    // null
    {"null_hidden", kForward, [](Call& c) { c.forward.hidden.data = nullptr; }, "hidden"},
    {"null_weight", kForward, [](Call& c) { c.forward.weight.data = nullptr; }, "weight"},
    {"null_target", kForward, [](Call& c) { c.forward.target.data = nullptr; }, "target"},
    {"null_loss", kForward, [](Call& c) { c.forward.loss.data = nullptr; }, "loss"},
    {"null_lse", kForward, [](Call& c) { c.forward.lse.data = nullptr; }, "lse"},
    {"null_grad_weight", kBackward, [](Call& c) { c.backward.grad_weight.data = nullptr; }, "grad_weight"},
    {"null_workspace", kForward, [](Call& c) { c.workspace.data = nullptr; }, "workspace"},
    {"backward_null_workspace", kBackward, [](Call& c) { c.workspace.data = nullptr; }, "workspace"},
    // shapes
    {"hidden_one_dimension", kForward, [](Call& c) { c.forward.hidden.ndim = 1; }, "hidden"},
    {"hidden_narrow", kForward, [](Call& c) { c.forward.hidden.shape[1] -= 8; }, "hidden"},
    {"hidden_negative", kForward, [](Call& c) { c.forward.hidden.shape[0] = -1; }, "hidden"},
    {"hidden_overflow", kForward, [](Call& c) { c.forward.hidden.shape[0] = std::int64_t{1} << 62; }, "hidden"},
    {"weight_short", kForward, [](Call& c) { c.forward.weight.shape[0] -= 1; }, "weight"},
    {"weight_transposed", kForward, [](Call& c) { std::swap(c.forward.weight.shape[0], c.forward.weight.shape[1]); }, "weight"},
    {"target_short", kForward, [](Call& c) { c.forward.target.shape[0] -= 1; }, "target"},
    {"lse_long", kForward, [](Call& c) { c.forward.lse.shape[0] += 1; }, "lse"},
    {"bias_short", kForward, [](Call& c) { c.forward.bias.shape[0] -= 1; }, "bias"},
    {"loss_vector_for_mean", kForward,
     [](Call& c) { c.forward.loss = TensorView::vector(c.forward.loss.data, ScalarType::fp32, 130, c.forward.loss.device); }, "loss"},
    {"loss_scalar_for_none", kForward, [](Call& c) { c.forward.reduction = Reduction::none; }, "loss"},
    {"grad_hidden_short", kBackward, [](Call& c) { c.backward.grad_hidden.shape[0] -= 1; }, "grad_hidden"},
    {"grad_weight_wide", kBackward, [](Call& c) { c.backward.grad_weight.shape[1] += 8; }, "grad_weight"},
    {"grad_loss_vector", kBackward, [](Call& c) { c.backward.grad_loss.ndim = 1; }, "grad_loss"},
    {"no_temperature", kForward, [](Call& c) { c.forward.temperature = {}; }, "temperature"},
    {"no_token_weight", kForward, [](Call& c) { c.forward.token_weight = {}; }, "token_weight"},
    {"backward_no_temperature", kBackward, [](Call& c) { c.backward.temperature = {}; }, "temperature"},
    {"backward_no_logprob", kBackward, [](Call& c) { c.backward.logprobs = {}; }, "logprobs"},
    {"top1_in_32_bits", kForward, [](Call& c) { c.forward.top1.dtype = ScalarType::int32; }, "top1"},
    {"teacher_unasked", kForward, [](Call& c) { c.forward.teacher_ids = c.forward.target; }, "teacher_ids"},
    {"unknown_reduction", kForward, [](Call& c) { c.forward.reduction = static_cast<Reduction>(9); }, "reduction"},
    // strides
    {"hidden_rows_apart", kForward, [](Call& c) { c.forward.hidden.strides[0] += 8; }, "hidden"},
    {"weight_transposed_view", kForward, [](Call& c) { c.forward.weight.strides = {1, c.forward.weight.shape[0]}; }, "weight"},
    {"target_every_other", kForward, [](Call& c) { c.forward.target.strides[0] = 2; }, "target"},
    {"grad_weight_rows_apart", kBackward, [](Call& c) { c.backward.grad_weight.strides[0] *= 2; }, "grad_weight"},
    // alignment
    {"hidden_misaligned", kForward, [](Call& c) { move_address(c.forward.hidden, 4); }, "hidden"},
    {"weight_misaligned", kForward, [](Call& c) { move_address(c.forward.weight, 8); }, "weight"},
    {"lse_misaligned", kForward, [](Call& c) { move_address(c.forward.lse, 2); }, "lse"},
    {"grad_hidden_misaligned", kBackward, [](Call& c) { move_address(c.backward.grad_hidden, 2); }, "grad_hidden"},
    {"grad_weight_misaligned", kBackward, [](Call& c) { move_address(c.backward.grad_weight, 4); }, "grad_weight"},
    {"workspace_misaligned", kForward, [](Call& c) { c.workspace.data = static_cast<std::byte*>(c.workspace.data) + 16; }, "workspace"},
    // dtypes
    {"hidden_of_other_dtype", kForward, [](Call& c) { c.forward.hidden.dtype = ScalarType::fp32; }, "hidden"},
    {"weight_of_other_dtype", kForward, [](Call& c) { c.forward.weight.dtype = ScalarType::fp16; }, "weight"},
    {"float_target", kForward, [](Call& c) { c.forward.target.dtype = ScalarType::fp32; }, "target"},
    {"half_loss", kForward, [](Call& c) { c.forward.loss.dtype = ScalarType::bf16; }, "loss"},
    {"grad_weight_of_other_dtype", kBackward, [](Call& c) { c.backward.grad_weight.dtype = ScalarType::fp16; }, "grad_weight"},
    {"signed_flag", kForward, [](Call& c) { c.forward.invalid_label.dtype = ScalarType::int64; }, "invalid_label"},
    // devices
    {"hidden_elsewhere", kForward, [](Call& c) { c.forward.hidden.device = other_device(c.forward.hidden.device); }, "hidden"},
    {"hidden_on_a_device_of_another_number", kForward, [](Call& c) { c.forward.hidden.device.index += 3; }, ":3"},
    {"lse_elsewhere", kForward, [](Call& c) { c.forward.lse.device = other_device(c.forward.lse.device); }, "lse"},
    {"grad_hidden_elsewhere", kBackward, [](Call& c) { c.backward.grad_hidden.device = other_device(c.backward.grad_hidden.device); },
     "grad_hidden"},
    // sizes
    {"workspace_of_more_than_memory", kForward, [](Call& c) { c.workspace.bytes = SIZE_MAX; }, "2^63"},
    {"workspace_one_byte_short", kForward, [](Call& c) { c.workspace.bytes -= 1; }, "workspace"},
    {"backward_workspace_one_byte_short", kBackward, [](Call& c) { c.workspace.bytes -= 1; }, "workspace"},
    // memory used twice
    {"lse_is_logprob", kForward, [](Call& c) { c.forward.lse.data = c.forward.logprobs.data; }, "lse"},
    {"grad_hidden_is_hidden", kBackward, [](Call& c) { c.backward.grad_hidden.data = c.backward.hidden.data; }, "grad_hidden"},
};

class BadArguments : public testing::TestWithParam<std::tuple<Target, BadCall>> {};

TEST_P(BadArguments, NamedAndNothingWritten) {
    const auto& [target, bad] = GetParam();
    FLCE_REQUIRE_TARGET(target);
    const Spec spec = make_spec(64, 100, DType::bf16, WeightLayout::vocab_major, {"everything_groups", apply_everything_with_groups});
    const Problem problem = make_problem(spec, {.num_tokens = 130});
    KernelRun run(kernel_on(target, spec), problem);
    run.forward();
    Call call{run.forward_args(), run.backward_args(), bad.backward ? run.backward_workspace() : run.forward_workspace()};
    bad.change(call);
    const auto before = run.all_bytes();
    try {
        if (bad.backward) {
            run.kernel().backward(call.backward, call.workspace);
        } else {
            run.kernel().forward(call.forward, call.workspace);
        }
        ADD_FAILURE() << "the call was accepted";
    } catch (const ArgumentError& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr(bad.argument));
        EXPECT_THAT(error.what(), testing::HasSubstr(bad.backward ? "backward" : "forward"));
    }
    synchronize(run.kernel().device_ref());
    const auto after = run.all_bytes();
    for (const auto& [name, bytes] : before) EXPECT_EQ(after.at(name) == bytes, true) << name << " was written";
    EXPECT_EQ(run.violations(), "");
    run.backward();  // and the kernel still works
}

std::string name_of(const testing::TestParamInfo<std::tuple<Target, BadCall>>& info) { return std::get<1>(info.param).name; }
INSTANTIATE_TEST_SUITE_P(Cpu, BadArguments, testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kBadCalls)), name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, BadArguments, testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kBadCalls)), name_of);

class BadCount : public testing::TestWithParam<Target> {};

TEST_P(BadCount, WorkspaceBytes_NamesNumTokens) {
    FLCE_REQUIRE_TARGET(GetParam());
    const auto kernel = kernel_on(GetParam(), parse_spec("D=64,V=100"));
    for (std::int64_t n : {std::int64_t{-1}, std::int64_t{1} << 61, INT64_MAX, INT64_MIN}) {
        try {
            (void)kernel->workspace_bytes(n);
            ADD_FAILURE() << n;
        } catch (const ArgumentError& error) {
            EXPECT_THAT(error.what(), testing::HasSubstr("num_tokens"));
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Cpu, BadCount, testing::Values(Target::cpu));
INSTANTIATE_TEST_SUITE_P(Gpu, BadCount, testing::Values(Target::gpu));

}  // namespace
}  // namespace flce::test
