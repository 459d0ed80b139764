// Every argument of forward and backward: refusals, their words, and that nothing runs then.
#include <gmock/gmock.h>

#include <functional>

#include "tests/session/fake_backend.hpp"

namespace flce {
namespace {

using test::RecordingKernel;
using testing::AllOf;
using testing::HasSubstr;

constexpr std::int64_t kTokens = 6;
constexpr std::int64_t kHidden = 16;
constexpr std::int64_t kVocab = 50;
constexpr std::int64_t kPadded = 64;
constexpr char kSpec[] =
    "D=16,V=50,padded_vocab_size=64,dtype=bf16,grad_weight_dtype=fp32,bias,class_weight,outputs=loss+lse+logprobs+entropy";

/// Addresses that are never followed: each tensor has a megabyte of its own.
void* address(int number, std::uintptr_t offset = 0) {
    return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (number << 20) + offset);
}

ForwardArgs forward_args(std::int64_t n = kTokens) {
    using V = TensorView;
    return {.hidden = V::matrix(address(0), ScalarType::bf16, n, kHidden),
            .weight = V::matrix(address(1), ScalarType::bf16, kPadded, kHidden),
            .bias = V::vector(address(2), ScalarType::bf16, kVocab),
            .class_weight = V::vector(address(3), ScalarType::fp32, kVocab),
            .target = V::vector(address(4), ScalarType::int64, n),
            .num_valid = V::scalar(address(5), ScalarType::int32),
            .loss = V::scalar(address(6), ScalarType::fp32),
            .z_loss = V::scalar(address(7), ScalarType::fp32),
            .lse = V::vector(address(8), ScalarType::fp32, n),
            .logprobs = V::vector(address(9), ScalarType::fp32, n),
            .entropy = V::vector(address(10), ScalarType::fp32, n),
            .invalid_label = V::scalar(address(11), ScalarType::uint64)};
}

BackwardArgs backward_args(std::int64_t n = kTokens) {
    using V = TensorView;
    const ForwardArgs f = forward_args(n);
    return {.hidden = f.hidden,
            .weight = f.weight,
            .bias = f.bias,
            .class_weight = f.class_weight,
            .target = f.target,
            .num_valid = f.num_valid,
            .lse = f.lse,
            .entropy = f.entropy,
            .grad_loss = V::scalar(address(20), ScalarType::fp32),
            .grad_lse = V::vector(address(21), ScalarType::fp32, n),
            .grad_logprobs = V::vector(address(22), ScalarType::fp32, n),
            .grad_entropy = V::vector(address(23), ScalarType::fp32, n),
            .grad_hidden = V::matrix(address(24), ScalarType::bf16, n, kHidden),
            .grad_weight = V::matrix(address(25), ScalarType::fp32, kPadded, kHidden),
            .grad_bias = V::vector(address(26), ScalarType::fp32, kVocab)};
}

Workspace workspace() { return {address(40), 1 << 20}; }

class KernelArguments : public testing::Test {
protected:
    RecordingKernel kernel_{parse_spec(kSpec), describe_device("x86-64-v3")};
    RecordingKernel plain_{parse_spec("D=16,V=50,padded_vocab_size=64,dtype=bf16,outputs=loss"), describe_device("x86-64-v3")};

    std::string refusal(const std::function<void()>& call) {
        const int before = kernel_.runs + plain_.runs;
        try {
            call();
        } catch (const ArgumentError& error) {
            EXPECT_EQ(kernel_.runs + plain_.runs, before) << "ran all the same";
            return error.what();
        }
        return "(no error)";
    }
    std::string forward_refusal(const std::function<void(ForwardArgs&)>& change, const RecordingKernel* kernel = nullptr) {
        ForwardArgs args = forward_args();
        change(args);
        return refusal([&] { (kernel == nullptr ? kernel_ : *kernel).forward(args, workspace()); });
    }
    std::string backward_refusal(const std::function<void(BackwardArgs&)>& change, const RecordingKernel* kernel = nullptr) {
        BackwardArgs args = backward_args();
        change(args);
        return refusal([&] { (kernel == nullptr ? kernel_ : *kernel).backward(args, workspace()); });
    }
};

std::int64_t number(void* pointer) { return reinterpret_cast<std::int64_t>(pointer); }

TEST_F(KernelArguments, Forward_FillsEverySlot) {
    ForwardArgs args = forward_args();
    args.ignore_index = -7;
    int stream = 0;
    kernel_.forward(args, workspace(), {&stream});
    EXPECT_EQ(kernel_.runs, 1);
    EXPECT_FALSE(kernel_.ran_backward);
    EXPECT_EQ(kernel_.stream, &stream);
    EXPECT_EQ(kernel_.slot(Slot::num_tokens), kTokens);
    EXPECT_EQ(kernel_.slot(Slot::target_bits), 64);
    EXPECT_EQ(kernel_.slot(Slot::ignore_index), -7);
    EXPECT_EQ(kernel_.slot(Slot::reduction), static_cast<int>(ReductionCode::mean));
    EXPECT_EQ(kernel_.slot(Slot::num_valid_code), static_cast<int>(CountCode::int32));
    EXPECT_EQ(kernel_.slot(Slot::workspace), number(workspace().data));
    const std::pair<Slot, int> tensors[] = {{Slot::hidden, 0},       {Slot::weight, 1},    {Slot::bias, 2},     {Slot::class_weight, 3},
                                            {Slot::target, 4},       {Slot::num_valid, 5}, {Slot::loss, 6},     {Slot::z_loss, 7},
                                            {Slot::lse, 8},          {Slot::logprobs, 9},  {Slot::entropy, 10}, {Slot::invalid_label, 11},
                                            {Slot::grad_hidden, -1}, {Slot::grad_loss, -1}};
    for (const auto& [slot, which] : tensors) EXPECT_EQ(kernel_.slot(slot), which < 0 ? 0 : number(address(which)));
}

TEST_F(KernelArguments, Backward_FillsEverySlot) {
    BackwardArgs args = backward_args();
    args.target.dtype = ScalarType::int32;
    args.num_valid.dtype = ScalarType::int64;
    kernel_.backward(args, workspace());
    EXPECT_TRUE(kernel_.ran_backward);
    EXPECT_EQ(kernel_.slot(Slot::target_bits), 32);
    EXPECT_EQ(kernel_.slot(Slot::num_valid_code), static_cast<int>(CountCode::int64));
    const std::pair<Slot, int> tensors[] = {{Slot::lse, 8},          {Slot::entropy, 10},       {Slot::grad_loss, 20},
                                            {Slot::grad_lse, 21},    {Slot::grad_logprobs, 22}, {Slot::grad_entropy, 23},
                                            {Slot::grad_hidden, 24}, {Slot::grad_weight, 25},   {Slot::grad_bias, 26},
                                            {Slot::loss, -1},        {Slot::invalid_label, -1}};
    for (const auto& [slot, which] : tensors) EXPECT_EQ(kernel_.slot(slot), which < 0 ? 0 : number(address(which)));
}

TEST_F(KernelArguments, OptionalTensorsAbsent_Accepted) {
    ForwardArgs args = forward_args();
    args.num_valid = args.loss = args.z_loss = args.logprobs = args.entropy = args.invalid_label = {};
    kernel_.forward(args, workspace());
    EXPECT_EQ(kernel_.slot(Slot::num_valid), 0);
    BackwardArgs back = backward_args();
    back.num_valid = back.entropy = back.grad_loss = back.grad_lse = back.grad_logprobs = back.grad_entropy = {};
    back.grad_hidden = back.grad_weight = {};
    kernel_.backward(back, workspace());
    EXPECT_EQ(kernel_.runs, 2);
}

TEST_F(KernelArguments, NoTokens_LegalWithNullData) {
    ForwardArgs args = forward_args(0);
    args.hidden.data = args.target.data = args.lse.data = args.logprobs.data = args.entropy.data = nullptr;
    kernel_.forward(args, {});
    BackwardArgs back = backward_args(0);
    back.hidden.data = back.target.data = back.lse.data = back.grad_hidden.data = nullptr;
    kernel_.backward(back, {});
    EXPECT_EQ(kernel_.runs, 2);
}

TEST_F(KernelArguments, ScalarAsVectorOfOne_Accepted) {
    ForwardArgs args = forward_args();
    args.loss = TensorView::vector(address(6), ScalarType::fp32, 1);
    kernel_.forward(args, workspace());
    EXPECT_EQ(kernel_.runs, 1);
}

TEST_F(KernelArguments, StrideOfADimensionOfOne_Ignored) {
    ForwardArgs args = forward_args(1);
    args.hidden.strides[0] = 12345;
    args.target.strides[0] = 99;
    kernel_.forward(args, workspace());
    EXPECT_EQ(kernel_.runs, 1);
}

// One row for each tensor of a call.
template <class Args>
struct Member {
    const char* name;
    TensorView Args::* view;
    bool required;
    ScalarType wrong_type;
};

const Member<ForwardArgs> kForwardMembers[] = {
    {"hidden", &ForwardArgs::hidden, true, ScalarType::fp32},    {"weight", &ForwardArgs::weight, true, ScalarType::fp16},
    {"bias", &ForwardArgs::bias, true, ScalarType::fp32},        {"class_weight", &ForwardArgs::class_weight, true, ScalarType::bf16},
    {"target", &ForwardArgs::target, true, ScalarType::fp32},    {"num_valid", &ForwardArgs::num_valid, false, ScalarType::bf16},
    {"loss", &ForwardArgs::loss, false, ScalarType::bf16},       {"z_loss", &ForwardArgs::z_loss, false, ScalarType::int32},
    {"lse", &ForwardArgs::lse, true, ScalarType::bf16},          {"logprobs", &ForwardArgs::logprobs, false, ScalarType::bf16},
    {"entropy", &ForwardArgs::entropy, false, ScalarType::bf16}, {"invalid_label", &ForwardArgs::invalid_label, false, ScalarType::int32},
};
const Member<BackwardArgs> kBackwardMembers[] = {
    {"hidden", &BackwardArgs::hidden, true, ScalarType::fp32},
    {"weight", &BackwardArgs::weight, true, ScalarType::fp16},
    {"bias", &BackwardArgs::bias, true, ScalarType::fp32},
    {"class_weight", &BackwardArgs::class_weight, true, ScalarType::bf16},
    {"target", &BackwardArgs::target, true, ScalarType::uint64},
    {"num_valid", &BackwardArgs::num_valid, false, ScalarType::uint64},
    {"lse", &BackwardArgs::lse, true, ScalarType::bf16},
    {"grad_loss", &BackwardArgs::grad_loss, false, ScalarType::bf16},
    {"grad_lse", &BackwardArgs::grad_lse, false, ScalarType::bf16},
    {"grad_logprobs", &BackwardArgs::grad_logprobs, false, ScalarType::bf16},
    {"grad_entropy", &BackwardArgs::grad_entropy, false, ScalarType::bf16},
    {"grad_hidden", &BackwardArgs::grad_hidden, false, ScalarType::fp32},
    {"grad_weight", &BackwardArgs::grad_weight, false, ScalarType::bf16},
    {"grad_bias", &BackwardArgs::grad_bias, false, ScalarType::bf16},
};

template <class Args, class Refusal>
void check_every_tensor(const Member<Args>& member, const Refusal& refusal) {
    SCOPED_TRACE(member.name);
    const std::string name = member.name;
    EXPECT_THAT(refusal([&](Args& a) { (a.*member.view).dtype = member.wrong_type; }),
                AllOf(HasSubstr(name + ".dtype is "), HasSubstr("it must be")));
    EXPECT_THAT(refusal([&](Args& a) { (a.*member.view).dtype = static_cast<ScalarType>(77); }), HasSubstr(name + ".dtype is unknown"));
    EXPECT_THAT(refusal([&](Args& a) { (a.*member.view).ndim = 3; }), HasSubstr(name + ".shape is of 3 dimensions"));
    EXPECT_THAT(refusal([&](Args& a) { (a.*member.view).ndim = -1; }), HasSubstr(name + ".shape is of -1 dimensions"));
    EXPECT_THAT(refusal([&](Args& a) { (a.*member.view).device = {DeviceKind::cuda, 2}; }),
                AllOf(HasSubstr(name + " is on cuda:2"), HasSubstr("this kernel's device is cpu")));
    EXPECT_THAT(refusal([&](Args& a) { (a.*member.view).data = nullptr; }), HasSubstr(name + ".data is null"));
    EXPECT_THAT(refusal([&](Args& a) { (a.*member.view).present = false; }), HasSubstr(name + " has data but is marked absent"));
    EXPECT_THAT(refusal([&](Args& a) {
                    auto& view = a.*member.view;
                    view.data = static_cast<char*>(view.data) + 1;
                }),
                HasSubstr(name + ".data is 0x"));
    if (member.required) {
        EXPECT_THAT(refusal([&](Args& a) { a.*member.view = {}; }), HasSubstr(name + " is absent"));
    } else {
        EXPECT_EQ(refusal([&](Args& a) { a.*member.view = {}; }), "(no error)");
    }
    EXPECT_THAT(refusal([&](Args& a) {
                    auto& view = a.*member.view;
                    view.ndim = view.ndim == 2 ? 2 : 1;
                    ++view.shape[view.ndim - 1];
                    if (view.shape[0] == 1) ++view.shape[0];  // a scalar may be a vector of one
                }),
                AllOf(HasSubstr(name + ".shape is "), HasSubstr("it must be")));
    const Args good = [] {
        if constexpr (std::is_same_v<Args, ForwardArgs>)
            return forward_args();
        else
            return backward_args();
    }();
    if ((good.*member.view).ndim > 0) {
        EXPECT_THAT(refusal([&](Args& a) { (a.*member.view).strides[0] *= 2; }),
                    AllOf(HasSubstr(name + ".strides are "), HasSubstr("contiguous")));
    }
    if ((good.*member.view).ndim == 2) {
        EXPECT_THAT(refusal([&](Args& a) { (a.*member.view).strides[1] = 2; }), HasSubstr(name + ".strides are "));
    }
}

TEST_F(KernelArguments, ForwardTensorsWrong_NamedWithWhatIsAllowed) {
    for (const auto& member : kForwardMembers) check_every_tensor(member, [&](auto change) { return forward_refusal(change); });
}

TEST_F(KernelArguments, BackwardTensorsWrong_NamedWithWhatIsAllowed) {
    for (const auto& member : kBackwardMembers) check_every_tensor(member, [&](auto change) { return backward_refusal(change); });
}

TEST_F(KernelArguments, Messages_StartWithTheCall) {
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.lse = {}; }), testing::StartsWith("forward: lse"));
    EXPECT_THAT(backward_refusal([](BackwardArgs& a) { a.lse = {}; }), testing::StartsWith("backward: lse"));
    EXPECT_EQ(forward_refusal([](ForwardArgs& a) { a.target.shape[0] = 5; }),
              "forward: target.shape is [5]; it must be [6] = [num_tokens]");
    EXPECT_EQ(forward_refusal([](ForwardArgs& a) { a.weight.dtype = ScalarType::fp32; }), "forward: weight.dtype is fp32; it must be bf16");
}

TEST_F(KernelArguments, HiddenShape_DecidesTheTokens) {
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.hidden.shape[1] = 8; }), HasSubstr("with hidden_size 16"));
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.hidden.shape[0] = -1; }), HasSubstr("num_tokens must be 0 to"));
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.hidden.shape[0] = INT64_MAX; }), HasSubstr("num_tokens must be 0 to"));
}

TEST_F(KernelArguments, RowTensors_SixteenByteAligned) {
    const auto shift = [](TensorView& view) { view.data = static_cast<char*>(view.data) + 8; };
    EXPECT_THAT(forward_refusal([&](ForwardArgs& a) { shift(a.hidden); }), HasSubstr("aligned to 16 bytes"));
    EXPECT_THAT(forward_refusal([&](ForwardArgs& a) { shift(a.weight); }), HasSubstr("aligned to 16 bytes"));
    EXPECT_THAT(backward_refusal([&](BackwardArgs& a) { shift(a.grad_hidden); }), HasSubstr("aligned to 16 bytes"));
    EXPECT_THAT(backward_refusal([&](BackwardArgs& a) { shift(a.grad_weight); }), HasSubstr("aligned to 16 bytes"));
    EXPECT_EQ(forward_refusal([&](ForwardArgs& a) { shift(a.lse); }), "(no error)");
}

TEST_F(KernelArguments, NotInTheSpec_Refused) {
    const auto strip = [](auto& a) { a.bias = a.class_weight = {}; };
    const auto forward = [&](auto change) {
        return forward_refusal([&](ForwardArgs& a) { strip(a), a.logprobs = a.entropy = {}, change(a); }, &plain_);
    };
    const auto backward = [&](auto change) {
        return backward_refusal(
            [&](BackwardArgs& a) {
                strip(a);
                a.entropy = a.grad_lse = a.grad_logprobs = a.grad_entropy = a.grad_bias = {};
                a.grad_weight.dtype = ScalarType::bf16;
                change(a);
            },
            &plain_);
    };
    EXPECT_EQ(forward([](ForwardArgs&) {}), "(no error)");
    EXPECT_EQ(backward([](BackwardArgs&) {}), "(no error)");
    const ForwardArgs f = forward_args();
    const BackwardArgs b = backward_args();
    EXPECT_THAT(forward([&](ForwardArgs& a) { a.bias = f.bias; }), HasSubstr("bias is given, but the spec has no bias"));
    EXPECT_THAT(forward([&](ForwardArgs& a) { a.class_weight = f.class_weight; }), HasSubstr("the spec has no class_weight"));
    EXPECT_THAT(forward([&](ForwardArgs& a) { a.logprobs = f.logprobs; }), HasSubstr("spec.outputs has no logprobs"));
    EXPECT_THAT(forward([&](ForwardArgs& a) { a.entropy = f.entropy; }), HasSubstr("spec.outputs has no entropy"));
    EXPECT_THAT(backward([&](BackwardArgs& a) { a.entropy = b.entropy; }), HasSubstr("spec.outputs has no entropy"));
    EXPECT_THAT(backward([&](BackwardArgs& a) { a.grad_lse = b.grad_lse; }), HasSubstr("spec.outputs has no lse"));
    EXPECT_THAT(backward([&](BackwardArgs& a) { a.grad_logprobs = b.grad_logprobs; }), HasSubstr("spec.outputs has no logprobs"));
    EXPECT_THAT(backward([&](BackwardArgs& a) { a.grad_entropy = b.grad_entropy; }), HasSubstr("spec.outputs has no entropy"));
    EXPECT_THAT(backward([&](BackwardArgs& a) { a.grad_bias = b.grad_bias; }), HasSubstr("the spec has no bias"));

    EXPECT_THAT(forward([&](ForwardArgs& a) { a.bias.data = f.bias.data; }), HasSubstr("bias is given"))
        << "with data, though marked absent";

    RecordingKernel no_loss{parse_spec("D=16,V=50,padded_vocab_size=64,dtype=bf16,outputs=logprobs"), describe_device("x86-64-v3")};
    EXPECT_THAT(forward_refusal([&](ForwardArgs& a) { strip(a), a.entropy = {}; }, &no_loss), HasSubstr("spec.outputs has no loss"));
}

TEST_F(KernelArguments, ReductionDecidesLossShapes) {
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.reduction = static_cast<Reduction>(9); }), HasSubstr("reduction is 9"));
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.reduction = Reduction::sum; }), HasSubstr("only reduction mean"));
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.reduction = Reduction::none, a.num_valid = {}; }),
                HasSubstr("loss.shape is []; it must be [6]"));
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.loss = TensorView::vector(address(6), ScalarType::fp32, kTokens); }),
                HasSubstr("loss.shape is [6]; it must be []"));
    EXPECT_THAT(backward_refusal([](BackwardArgs& a) { a.reduction = Reduction::none, a.num_valid = {}; }),
                HasSubstr("grad_loss.shape is []; it must be [6]"));
    EXPECT_EQ(forward_refusal([](ForwardArgs& a) {
                  a.reduction = Reduction::none, a.num_valid = {};
                  a.loss = TensorView::vector(address(6), ScalarType::fp32, kTokens);
                  a.z_loss = TensorView::vector(address(7), ScalarType::fp32, kTokens);
              }),
              "(no error)");
}

TEST_F(KernelArguments, GradientOfEntropy_NeedsEntropy) {
    EXPECT_THAT(backward_refusal([](BackwardArgs& a) { a.entropy = {}; }), HasSubstr("entropy is absent; grad_entropy needs it"));
}

TEST_F(KernelArguments, NoGradientWanted_Refused) {
    EXPECT_THAT(backward_refusal([](BackwardArgs& a) { a.grad_hidden = a.grad_weight = a.grad_bias = {}; }),
                HasSubstr("at least one must be given"));
}

TEST_F(KernelArguments, Workspace_SizeAlignmentAndNull) {
    const std::size_t needed = kernel_.workspace_bytes(kTokens, Pass::backward);
    const auto with = [&](Workspace w) { return refusal([&] { kernel_.backward(backward_args(), w); }); };
    EXPECT_EQ(with({address(40), needed}), "(no error)");
    EXPECT_EQ(with({address(40), needed - 1}), "backward: workspace has 3071 bytes; 6 tokens need 3072 (Kernel::workspace_bytes)");
    EXPECT_THAT(with({address(40, 128), needed}), HasSubstr("aligned to 256 bytes"));
    EXPECT_THAT(with({nullptr, needed}), HasSubstr("workspace.data is null"));
}

TEST_F(KernelArguments, Overlap_Refused) {
    EXPECT_THAT(backward_refusal([](BackwardArgs& a) { a.grad_hidden.data = a.hidden.data; }),
                AllOf(HasSubstr("grad_hidden ["), HasSubstr("overlaps hidden [")));
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.loss.data = static_cast<char*>(a.weight.data) + 4; }),
                AllOf(HasSubstr("loss ["), HasSubstr("overlaps weight [")));
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.lse.data = a.entropy.data; }), HasSubstr("overlaps"));
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.lse.data = static_cast<char*>(workspace().data) + 256; }),
                HasSubstr("overlaps lse"));
    EXPECT_THAT(forward_refusal([](ForwardArgs& a) { a.loss.data = static_cast<char*>(a.weight.data) + 2 * kPadded * kHidden - 4; }),
                HasSubstr("overlaps weight"));
    // Two inputs may share memory, and neighbours may touch.
    EXPECT_EQ(forward_refusal([](ForwardArgs& a) { a.class_weight.data = a.weight.data; }), "(no error)");
    EXPECT_EQ(forward_refusal([](ForwardArgs& a) { a.z_loss.data = static_cast<char*>(a.loss.data) + 4; }), "(no error)");
}

TEST_F(KernelArguments, Retained_SizeAlignmentPlaceAndOverlap) {
    kernel_.retained_bytes_per_token = 96;
    const std::size_t bytes = kernel_.retained_bytes(kTokens, RetainedPlace::grad_weight);
    const auto forward = [&](const Retained& retained) { return forward_refusal([&](ForwardArgs& a) { a.retained = retained; }); };
    const auto backward = [&](const Retained& retained) { return backward_refusal([&](BackwardArgs& a) { a.retained = retained; }); };
    EXPECT_EQ(forward({address(50), bytes, RetainedPlace::own}), "(no error)");
    EXPECT_EQ(forward({address(50), 16, RetainedPlace::own}), "(no error)") << "less is legal";
    EXPECT_EQ(forward({address(50), bytes, RetainedPlace::grad_weight}), "(no error)");
    EXPECT_THAT(forward({nullptr, bytes, RetainedPlace::own}), HasSubstr("give both, or neither"));
    EXPECT_THAT(forward({address(50), 0, RetainedPlace::own}), HasSubstr("give both, or neither"));
    EXPECT_THAT(forward({address(50, 8), bytes, RetainedPlace::own}), HasSubstr("aligned to 16 bytes"));
    EXPECT_THAT(forward({address(50), ~std::size_t{0}, RetainedPlace::own}), HasSubstr("allowed are 0 to 2^63 - 1"));
    for (const std::size_t other : {bytes - 16, bytes + 16}) {
        EXPECT_THAT(forward({address(50), other, RetainedPlace::grad_weight}), HasSubstr("6 tokens are lent 576 of it"));
    }
    EXPECT_THAT(forward({address(50), bytes, static_cast<RetainedPlace>(2)}), HasSubstr("allowed are own (0), grad_weight (1)"));
    EXPECT_THAT(forward({address(0), bytes, RetainedPlace::own}), HasSubstr("overlaps"));
    // Backward writes over it where it is grad_weight's memory, and nowhere else.
    const BackwardArgs b = backward_args();
    EXPECT_EQ(backward({b.grad_weight.data, bytes, RetainedPlace::grad_weight}), "(no error)");
    EXPECT_THAT(backward({b.grad_weight.data, bytes, RetainedPlace::own}), HasSubstr("overlaps"));
    EXPECT_THAT(backward({b.hidden.data, bytes, RetainedPlace::grad_weight}), HasSubstr("overlaps"));
}

TEST_F(KernelArguments, HiddenMajorWeight_ItsShape) {
    RecordingKernel kernel{parse_spec("D=16,V=50,padded_vocab_size=64,dtype=bf16,layout=hidden_major"), describe_device("x86-64-v3")};
    const auto bare = [](ForwardArgs& a) { a.bias = a.class_weight = a.logprobs = a.entropy = {}; };
    EXPECT_THAT(forward_refusal(bare, &kernel),
                HasSubstr("weight.shape is [64, 16]; it must be [16, 64] = [hidden_size, padded_vocab_size]"));
    EXPECT_EQ(forward_refusal(
                  [&](ForwardArgs& a) {
                      bare(a);
                      a.weight = TensorView::matrix(address(1), ScalarType::bf16, kHidden, kPadded);
                  },
                  &kernel),
              "(no error)");
}

TEST_F(KernelArguments, WorkspaceBytes_PassesAndLimits) {
    EXPECT_EQ(kernel_.workspace_bytes(10, Pass::forward), 2560u);
    EXPECT_EQ(kernel_.workspace_bytes(10, Pass::backward), 5120u);
    EXPECT_EQ(kernel_.workspace_bytes(10), 5120u);
    EXPECT_EQ(kernel_.workspace_bytes(0), 0u);
    EXPECT_THROW((void)kernel_.workspace_bytes(-1), ArgumentError);
    EXPECT_THROW((void)kernel_.workspace_bytes(INT64_MAX), ArgumentError);
    EXPECT_THROW((void)kernel_.workspace_bytes(1, static_cast<Pass>(5)), ArgumentError);
}

TEST_F(KernelArguments, Explain_NamesEverything) {
    const RecordingKernel kernel(parse_spec(kSpec), describe_device("sm_90a"), {}, {DeviceKind::cuda, 3},
                                 [] { return std::vector<std::string>{"because"}; });
    const Explanation why = kernel.explain();
    EXPECT_EQ(why.spec, kernel.spec().text());
    EXPECT_EQ(why.plan, kernel.plan().text());
    EXPECT_THAT(why.device, AllOf(HasSubstr("sm_90a"), HasSubstr("cuda:3")));
    EXPECT_EQ(why.reasons, std::vector<std::string>{"because"});
}

}  // namespace
}  // namespace flce
