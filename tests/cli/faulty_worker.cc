// A tuning worker that misbehaves: faulty_worker KIND@TEXT… does KIND with plans (of "open": specs) that hold TEXT. It stands in for
// `flce tune-worker`.
#include <csignal>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "autotune/tune_worker.hpp"
#include "tests/support/broken_kernel.hpp"

namespace flce::test {
namespace {

struct Fault {
    std::string kind;
    std::string text;
};

class FaultyWorker : public TuneWorker {
public:
    explicit FaultyWorker(std::vector<Fault> faults) : faults_(std::move(faults)) {}

private:
    void before(const std::string& op, const std::string& text) override {
        const bool runs = op == "check" || op == "time" || op == "warm";
        for (const Fault& fault : faults_) {
            if (text.find(fault.text) == std::string::npos) continue;
            if ((fault.kind == "hang" && runs) || fault.kind == "hang-" + op) hang();
            if ((fault.kind == "fault" && runs) || fault.kind == "fault-" + op) crash();
            if (fault.kind == "fault-timing" && op == "time") static_cast<void>(std::raise(SIGKILL));
            if (fault.kind == "refuse-graph" && (op == "time" || op == "warm") && layer() != nullptr) layer()->refuse_graph();
            if (fault.kind == "wrong" && op == "check" && layer() != nullptr) {
                layer()->spoil_results([](LayerOutputs& outputs) { outputs.grad_hidden.buffer.fill(std::byte{0}); });
            }
        }
    }

    [[nodiscard]] bool on_gpu() const { return layer() != nullptr && layer()->device().kind == DeviceKind::cuda; }

    /// Behind every run's own work, on its stream.
    void add_kernel(KernelFault fault) {
        layer()->add_to_runs([kernel = BrokenKernel(layer()->device(), fault)](Stream stream) { kernel.launch(stream); });
    }
    /// For ever: on a GPU in the candidate's own work, which the driver waits for.
    void hang() {
        if (on_gpu()) return add_kernel(KernelFault::endless);
        std::this_thread::sleep_for(std::chrono::hours(1));
    }
    /// On a GPU by a kernel, of which the driver tells; elsewhere by a signal.
    void crash() {
        if (on_gpu()) return add_kernel(KernelFault::illegal_write);
        static_cast<void>(std::raise(SIGSEGV));
    }

    std::vector<Fault> faults_;
};

}  // namespace
}  // namespace flce::test

int main(int argc, char** argv) {
    std::vector<flce::test::Fault> faults;
    for (const std::string argument : std::span(argv, static_cast<std::size_t>(argc)).subspan(1)) {
        const std::size_t at = argument.find('@');
        if (at == std::string::npos) {
            std::fprintf(stderr, "faulty_worker: \"%s\" is not KIND@TEXT\n", argument.c_str());
            return 2;
        }
        faults.push_back({argument.substr(0, at), argument.substr(at + 1)});
    }
    flce::test::FaultyWorker worker(std::move(faults));
    return flce::serve_requests([&](const flce::Json& request) { return worker.serve(request); }) ? 0 : 3;
}
