// A stream beside that of a call: it begins behind everything that the call has launched so far, and the call's stream waits for it.
#pragma once

#include <memory>

#include "flce/flce.hpp"
#include "runtime/cuda/driver.hpp"

namespace flce {

class SideStream {
public:
    /// `side`: a stream of CUDA device `ordinal`, the caller's. Throws EnvironmentError, DeviceError.
    SideStream(int ordinal, Stream side);

    /// Makes work that comes on the side stream from now on wait for the work on `stream`.
    void follow(Stream stream) const { order(stream, side_); }
    /// Makes work that comes on `stream` from now on wait for the work on the side stream.
    void join(Stream stream) const { order(side_, stream); }

private:
    void order(Stream first, Stream second) const;

    std::shared_ptr<const CudaContext> context_;
    Stream side_;
};

}  // namespace flce
