#include "runtime/parallel/side_stream.hpp"

namespace flce {

SideStream::SideStream(int ordinal, Stream side) : context_(CudaDriver::load()->context(ordinal)), side_(side) {}

void SideStream::order(Stream first, Stream second) const {
    const ContextScope scope(*context_);
    const CudaDriver& driver = context_->driver();
    const CudaFunctions& cuda = context_->functions();
    // An event of its own: calls on several threads do not meet, and a destroyed event is freed when it has happened.
    CUevent event = nullptr;
    driver.check(cuda.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    const CUresult recorded = cuda.cuEventRecord(event, static_cast<CUstream>(first.handle));
    const CUresult waits = recorded == CUDA_SUCCESS ? cuda.cuStreamWaitEvent(static_cast<CUstream>(second.handle), event, 0) : recorded;
    cuda.cuEventDestroy(event);
    driver.check(recorded, "cuEventRecord");
    driver.check(waits, "cuStreamWaitEvent");
}

}  // namespace flce
