// Rules for every tensor of the table of a call: its slot, and each way in which it is refused.
#include <gmock/gmock.h>

#include "runtime/call_fields.hpp"
#include "tests/session/fake_backend.hpp"

namespace flce {
namespace {

using test::RecordingKernel;
using testing::AllOf;
using testing::HasSubstr;

constexpr std::int64_t kRows = 6;

/// Addresses that are never followed: each tensor has a megabyte of its own.
void* place(std::size_t number) { return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (number << 20)); }

ScalarType first_of(TypeSet types) {
    for (const ScalarType type :
         {ScalarType::bf16, ScalarType::fp32, ScalarType::int64, ScalarType::uint64, ScalarType::int32, ScalarType::uint8}) {
        if (types.contains(type)) return type;
    }
    return ScalarType::fp16;
}

TensorView view_of(const CallTensor& tensor, const Spec& spec, void* data) {
    const ExpectedShape shape = shape_of(tensor.extent, spec, sizes_of(spec, kRows, Reduction::mean));
    const ScalarType type = first_of(types_of(tensor.elements, spec));
    if (shape.ndim == 0) return TensorView::scalar(data, type);
    return shape.ndim == 1 ? TensorView::vector(data, type, shape.rows) : TensorView::matrix(data, type, shape.rows, shape.columns);
}

/// Every tensor whose condition holds.
template <class Args>
Args all_given(const Spec& spec) {
    Args args;
    for (std::size_t i = 0; i < kCallTensorCount; ++i) {
        const auto field = fields_of(args)[i];
        if (field && holds(kCallTensors[i].condition, spec, args.reduction)) args.*field = view_of(kCallTensors[i], spec, place(i));
    }
    return args;
}

void run(const Kernel& kernel, const ForwardArgs& args) { kernel.forward(args, {place(100), 1 << 20}); }
void run(const Kernel& kernel, const BackwardArgs& args) { kernel.backward(args, {place(100), 1 << 20}); }

template <class Args>
std::string refusal(const Kernel& kernel, const Args& args) {
    try {
        run(kernel, args);
    } catch (const ArgumentError& error) {
        return error.what();
    }
    return "(no error)";
}

template <class Args>
class CallTable : public testing::Test {
protected:
    RecordingKernel kernel_{
        parse_spec(
            "D=16,V=50,padded_vocab_size=64,dtype=bf16,grad_weight_dtype=fp32,bias,class_weight,class_offset,class_groups,temperature,"
            "token_weight,"
            "outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs"),
        describe_device("x86-64-v3")};
    /// A teacher is not together with class weights.
    RecordingKernel teacher_{parse_spec("D=16,V=50,dtype=bf16,teacher_top_k=3,outputs=loss"), describe_device("x86-64-v3")};
    RecordingKernel heads_{parse_spec("D=16,V=50,dtype=bf16,bias,teacher_hidden_size=24,teacher_bias,outputs=loss"),
                           describe_device("x86-64-v3")};
    RecordingKernel top_{parse_spec("D=16,V=50,dtype=bf16,top_k=3,outputs=loss"), describe_device("x86-64-v3")};
    RecordingKernel codes_{parse_spec("D=32,V=50,dtype=bf16,weight_dtype=nvfp4,bias,outputs=loss"), describe_device("x86-64-v3")};
    RecordingKernel plain_{parse_spec("D=16,V=50,dtype=bf16,outputs=loss"), describe_device("x86-64-v3")};

    /// Calls `check` with each tensor of the pass, its field and arguments that are right.
    template <class Check>
    void for_each(const RecordingKernel& kernel, const Check& check) {
        for (std::size_t i = 0; i < kCallTensorCount; ++i) {
            Args args = all_given<Args>(kernel.spec());
            const auto field = fields_of(args)[i];
            if (!field || (&kernel != &plain_ && !(args.*field).present)) continue;
            SCOPED_TRACE(kCallTensors[i].name);
            check(kCallTensors[i], args.*field, args);
        }
    }
};
using Passes = testing::Types<ForwardArgs, BackwardArgs>;
TYPED_TEST_SUITE(CallTable, Passes);

TYPED_TEST(CallTable, EveryTensor_InTheSlotOfItsNumber) {
    for (RecordingKernel* kernel : {&this->kernel_, &this->teacher_, &this->heads_, &this->top_, &this->codes_}) {
        const auto args = all_given<TypeParam>(kernel->spec());
        run(*kernel, args);
        for (std::size_t i = 0; i < kCallTensorCount; ++i) {
            const auto field = fields_of(args)[i];
            const bool has = field != nullptr && (args.*field).present;
            EXPECT_EQ(kernel->slots[i], has ? reinterpret_cast<std::int64_t>(place(i)) : 0) << kCallTensors[i].name;
            EXPECT_EQ(kSlotNames[i], kCallTensors[i].name);
        }
    }
}

TYPED_TEST(CallTable, TensorThatIsWrong_RefusedByItsName) {
    for (RecordingKernel* kernel : {&this->kernel_, &this->teacher_, &this->heads_, &this->top_, &this->codes_}) {
        this->for_each(*kernel, [&](const CallTensor& tensor, TensorView& view, const TypeParam& args) {
            const TensorView right = view;
            const std::string name = tensor.name;
            const auto refuses = [&](const std::string& what) {
                EXPECT_THAT(refusal(*kernel, args), HasSubstr(name + what));
                view = right;
            };
            view.ndim = view.ndim == 2 ? 1 : 2;
            refuses(".shape");
            view.dtype = ScalarType::fp16;
            refuses(".dtype");
            view.device = {DeviceKind::cuda, 3};
            refuses(" is on cuda:3");
            view.data = nullptr;
            refuses(".data is null");
            if (scalar_bytes(view.dtype) > 1 || alignment_of(tensor.extent) > 0) {
                view.data = static_cast<char*>(view.data) + 1;
                refuses(".data is 0x");
            }
            view.present = false;
            refuses(" has data but is marked absent");
        });
    }
}

TYPED_TEST(CallTable, TensorThatIsMissing_RefusedWhereItIsRequired) {
    for (RecordingKernel* kernel : {&this->kernel_, &this->teacher_, &this->heads_, &this->top_, &this->codes_}) {
        this->for_each(*kernel, [&](const CallTensor& tensor, TensorView& view, const TypeParam& args) {
            view = {};
            const Use use = use_of(tensor, args, this->plain_.spec());
            if (use == Use::read || use == Use::write) {
                EXPECT_THAT(refusal(*kernel, args), HasSubstr(std::string(tensor.name) + " is absent; it must be "));
            } else if (std::string_view(tensor.name) != "entropy") {  // grad_entropy needs entropy
                EXPECT_EQ(refusal(*kernel, args), "(no error)");
            }
        });
    }
}

TYPED_TEST(CallTable, TensorWithoutItsCondition_RefusedSayingWhy) {
    this->for_each(this->plain_, [&](const CallTensor& tensor, TensorView& view, const TypeParam& args) {
        if (holds(tensor.condition, this->plain_.spec(), args.reduction)) return;
        view = view_of(tensor, this->plain_.spec(), place(60));
        const std::string message = refusal(this->plain_, args);
        EXPECT_THAT(message, AllOf(HasSubstr(std::string(tensor.name) + " is given, but "), HasSubstr(why_not(tensor.condition))));
    });
}

TYPED_TEST(CallTable, WeightedMeanWithoutWeights_Refused) {
    auto args = all_given<TypeParam>(this->plain_.spec());
    args.reduction = Reduction::weighted_mean;
    EXPECT_THAT(refusal(this->plain_, args), HasSubstr("reduction is weighted_mean, but the spec has no token_weight"));
}

TYPED_TEST(CallTable, WrittenTensorOverAnother_Refused) {
    for (RecordingKernel* kernel : {&this->kernel_, &this->teacher_, &this->heads_, &this->top_, &this->codes_}) {
        this->for_each(*kernel, [&](const CallTensor& tensor, TensorView& view, const TypeParam& args) {
            const Use use = use_of(tensor, args, this->plain_.spec());
            if (use != Use::write && use != Use::may_write) return;
            view.data = args.target.data;
            EXPECT_THAT(refusal(*kernel, args), AllOf(HasSubstr(tensor.name), HasSubstr("overlaps target")));
        });
    }
}

}  // namespace
}  // namespace flce
