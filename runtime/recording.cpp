#include "flce/recording.hpp"

#include <utility>

#include "runtime/cuda/driver.hpp"

namespace flce {

struct Recording::State {
    std::function<void(Stream)> work;            // calls to repeat on a CPU
    std::shared_ptr<const CudaContext> context;  // null for a CPU
    CUstream stream = nullptr;
    CUgraphExec graph = nullptr;

    State(DeviceRef device, std::function<void(Stream)> given) : work(std::move(given)) {
        if (device.kind == DeviceKind::cpu) return;
        context = CudaDriver::load()->context(device.index);
        const ContextScope scope(*context);
        check(functions().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
        try {
            record();
        } catch (...) {
            functions().cuStreamDestroy(stream);
            throw;
        }
        work = nullptr;
    }
    ~State() {
        if (context == nullptr) return;
        functions().cuStreamSynchronize(stream);
        functions().cuGraphExecDestroy(graph);
        functions().cuStreamDestroy(stream);
    }
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    [[nodiscard]] const CudaFunctions& functions() const { return context->functions(); }
    void check(CUresult result, const char* call) const { context->driver().check(result, call); }

    void record() {
        // Other threads may allocate meanwhile.
        check(functions().cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
        CUgraph captured = nullptr;
        try {
            work(Stream{stream});
        } catch (...) {
            // Whatever the driver says of it: what the work threw says more.
            if (functions().cuStreamEndCapture(stream, &captured) == CUDA_SUCCESS) functions().cuGraphDestroy(captured);
            throw;
        }
        check(functions().cuStreamEndCapture(stream, &captured), "cuStreamEndCapture");
        const CUresult result = functions().cuGraphInstantiateWithFlags(&graph, captured, 0);
        functions().cuGraphDestroy(captured);
        check(result, "cuGraphInstantiateWithFlags");
    }
};

Recording::Recording(DeviceRef device, std::function<void(Stream)> work) : state_(std::make_shared<State>(device, std::move(work))) {}

Stream Recording::stream() const noexcept { return {state_ == nullptr ? nullptr : state_->stream}; }

void Recording::submit() const {
    if (state_->context == nullptr) return state_->work({});
    const ContextScope scope(*state_->context);
    state_->check(state_->functions().cuGraphLaunch(state_->graph, state_->stream), "cuGraphLaunch");
}

}  // namespace flce
