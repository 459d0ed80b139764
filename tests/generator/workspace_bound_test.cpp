// The promise of Plan::scratch_bytes: workspace ≤ scratch_bytes + 4·N·D, and 8 bytes for each token above 262,144.
#include <gtest/gtest.h>

#include "flce/plan.hpp"
#include "generator/cpu/layout.hpp"
#include "generator/cuda_program.hpp"

namespace flce {
namespace {

constexpr std::int64_t kTokens[] = {0,      1,      3,      7,       31,      63,      64,        65,     127,    128,
                                    129,    200,    255,    256,     257,     1000,    1023,      4095,   4096,   4097,
                                    8191,   8192,   10000,  16384,   20001,   32768,   65535,     65536,  100000, 131072,
                                    262144, 524287, 524288, 1000000, 1 << 22, 1 << 24, 100000007, 1 << 30};

void expect_bound(const Spec& spec, const Device& device, const Plan& plan) {
    const CudaProgram program = generate_cuda(spec, device, plan);
    for (const std::int64_t n : kTokens) {
        CallSlots slots{};
        slots[static_cast<std::size_t>(Slot::num_tokens)] = n;
        const std::int64_t accumulator = 4 * n * spec.hidden_size + 8 * std::max<std::int64_t>(n - 262144, 0);
        for (const Expr* bytes : {&program.forward_workspace_bytes, &program.backward_workspace_bytes}) {
            const std::int64_t value = evaluate(*bytes, slots);
            EXPECT_GE(value, 0);
            EXPECT_LE(value, plan.scratch_bytes + accumulator) << (bytes == &program.forward_workspace_bytes ? "forward, " : "backward, ")
                                                               << n << " tokens, " << spec.text() << ", " << plan.text();
        }
    }
}

TEST(WorkspaceBound, ChosenPlans_StayWithinScratch) {
    for (const char* device_name : {"h100", "a100", "l4", "rtx5090", "b200"}) {
        const Device device = describe_device(device_name);
        for (const char* text :
             {"D=2048,V=151936,tied", "D=8,V=2", "D=200,V=127,dtype=fp32,bias", "D=7168,V=129280,bias,outputs=loss+entropy",
              "D=2560,V=50257,dtype=fp32,label_smoothing=0.1,outputs=loss+lse+logprobs+entropy,bias,class_weight",
              "D=4096,V=128256,dtype=fp16,layout=hidden_major,grad_weight_dtype=fp32", "D=2048,V=151936,weight_dtype=fp32",
              "D=8,V=2,weight_dtype=fp32,bias,label_smoothing=0.1,outputs=loss+entropy", "D=4096,V=32064,whole_vocab_size=128256,bias",
              "D=2048,V=40000,whole_vocab_size=151936,dtype=fp32,label_smoothing=0.1,outputs=loss+entropy",
              "D=4096,V=32064,whole_vocab_size=128256,dtype=fp16,grad_hidden_dtype=fp32"}) {
            const Spec spec = parse_spec(text);
            expect_bound(spec, device, choose_plan(spec, device));
            expect_bound(spec, device, choose_plan(spec, device, {.scratch_bytes = 200LL << 20}));
        }
    }
}

TEST(WorkspaceBound, LeastLegalScratch_IsKept) {
    const auto check = [](const char* device_name, const char* text) {
        const Device device = describe_device(device_name);
        const Spec spec = parse_spec(text);
        Plan plan = choose_plan(spec, device);
        plan.scratch_bytes = 0;
        const std::string reason = illegal_reason(spec, device, plan).value();
        plan.scratch_bytes = std::stoll(reason.substr(reason.find("at least ") + 9));
        ASSERT_EQ(illegal_reason(spec, device, plan), std::nullopt);
        expect_bound(spec, device, plan);
    };
    for (const char* text : {"D=2048,V=151936", "D=8,V=2", "D=256,V=50257,dtype=fp32,bias,outputs=loss+entropy,label_smoothing=0.1",
                             "D=8,V=256000,batch_invariant,outputs=loss+entropy,label_smoothing=0.1", "D=4096,V=128256,batch_invariant",
                             "D=2048,V=50257,batch_invariant,weight_dtype=fp32"}) {
        check("h100", text);
    }
    for (const char* device : {"h100", "a100"}) {
        for (const char* text :
             {"D=2048,V=151936,weight_dtype=fp32", "D=8,V=2,weight_dtype=fp32", "D=64,V=300000,weight_dtype=fp32,bias",
              "D=256,V=50257,dtype=fp16,weight_dtype=fp32,layout=hidden_major,outputs=loss+entropy,label_smoothing=0.1"}) {
            check(device, text);
        }
    }
}

TEST(WorkspaceBound, CpuPlans_StayWithinScratch) {
    for (const char* device_name : {"x86-64-v4", "znver4", "x86-64-v3", "x86-64", "graniterapids"}) {
        const Device device = describe_device(device_name);
        for (const char* text : {"D=2048,V=151936,tied", "D=8,V=2", "D=200,V=127,dtype=fp32,bias",
                                 "D=7168,V=129280,bias,outputs=loss+entropy", "D=61440,V=256000,dtype=fp32,bias"}) {
            const Spec spec = parse_spec(text);
            for (const Plan& plan : candidate_plans(spec, device)) {
                for (const std::int64_t n : kTokens) {
                    const std::int64_t accumulator = 4 * n * spec.hidden_size;
                    EXPECT_LE(cpu_forward_layout(spec, plan, device.cpu.cores, n, spec.vocab_size).bytes, plan.scratch_bytes)
                        << n << ' ' << plan.text();
                    EXPECT_LE(cpu_backward_layout(spec, plan, device.cpu.cores, n, spec.vocab_size).bytes, plan.scratch_bytes + accumulator)
                        << n << " tokens, " << text << ", " << plan.text();
                }
            }
        }
    }
}

}  // namespace
}  // namespace flce
