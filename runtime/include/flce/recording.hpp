// Passes recorded once and submitted as often as wanted, for programs that measure them: the host's time for a launch is left out.
#pragma once

#include <functional>
#include <memory>

#include "flce/flce.hpp"

namespace flce {

/// A CUDA graph on a stream of its own, or on a CPU the calls themselves. Movable.
class Recording {
public:
    Recording() = default;
    /// Calls `work` with the stream to submit to: once, now, on a GPU (nothing runs yet), each time on a CPU. Memory that the work uses
    /// must outlive the recording and stay where it is. Throws the errors of `work`, and DeviceError where the driver refuses the graph.
    Recording(DeviceRef device, std::function<void(Stream)> work);

    [[nodiscard]] explicit operator bool() const noexcept { return state_ != nullptr; }
    /// The stream that submit() submits to, for a Timer.
    [[nodiscard]] Stream stream() const noexcept;
    /// Returns when the work is under way (on a CPU: done).
    void submit() const;

private:
    struct State;
    std::shared_ptr<const State> state_;
};

}  // namespace flce
