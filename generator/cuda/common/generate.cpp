#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda_program.hpp"

namespace flce {

CudaProgram generate_cuda(const Spec& spec, const Device& device, const Plan& plan) {
    const CudaPath& path = cuda_path(plan.path);
    const CudaSource source = path.source(spec, device, plan);
    const ForwardLayout forward = forward_layout(spec, device, plan);
    const BackwardLayout backward = backward_layout(spec, device, plan);
    CudaProgram program;
    program.units = source.units;
    program.options = source.options;
    program.kernels = source.kernels;
    program.forward = path.forward_program(spec, device, plan, source, forward);
    program.merge = merge_program(spec, source, merge_layout());
    program.backward = path.backward_program(spec, device, plan, source, backward);
    program.forward_workspace_bytes = forward.total;
    program.merge_workspace_bytes = is_shard(spec) ? merge_layout().total : Expr(0);
    program.backward_workspace_bytes = backward.total;
    const RetainedLayout retained = retained_layout(spec, plan);
    program.retained_bytes = retained.most;
    program.lendable_bytes = retained.lendable;
    program.defers_hidden = path.defers_hidden(spec, plan);
    return program;
}

}  // namespace flce
