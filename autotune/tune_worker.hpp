// The process in which the tuner compiles and runs candidates: `flce tune-worker`. autotune/process_measure.cpp is the other side.
#pragma once

#include <memory>
#include <string>

#include "autotune/measured_layer.hpp"
#include "runtime/workers/worker_process.hpp"

namespace flce {

/// The words after the command's name that make it this worker.
inline constexpr const char* kTuneWorker = "tune-worker";

/// Serves one request after another: "open" makes a layer's tensors, "check", "warm" and "time" run a plan on them, "compile" and
/// "rates" need none.
class TuneWorker {
public:
    TuneWorker() = default;
    virtual ~TuneWorker() = default;
    TuneWorker(const TuneWorker&) = delete;
    TuneWorker& operator=(const TuneWorker&) = delete;

    [[nodiscard]] Json serve(const Json& request);

protected:
    /// Called before a request is served; a test makes faults here. `text`: the request's plan, of "open" its spec.
    virtual void before(const std::string& /*op*/, const std::string& /*text*/) {}
    /// nullptr before "open".
    [[nodiscard]] MeasuredLayer* layer() const { return layer_.get(); }

private:
    [[nodiscard]] Json open(const Json& request);
    [[nodiscard]] static Json rates(const Json& request);
    [[nodiscard]] Json compile(const Json& request, const std::string& plan);
    [[nodiscard]] Json warm(const std::string& plan, double seconds);

    std::unique_ptr<MeasuredLayer> layer_;
    std::unique_ptr<Session> compiler_;
};

}  // namespace flce
