// flce tune-worker: the process in which the autotuner compiles and runs candidates. Not for people; cli/tune_measure.cpp is the other side.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <memory>
#include <thread>

#include "cli/command.hpp"
#include "cli/tune_layer.hpp"
#include "cli/tune_measure.hpp"
#include "cli/worker_process.hpp"

namespace flce::cli {
namespace {

struct Fault {
    std::string kind;
    std::string text;
};

class TuneWorker {
public:
    explicit TuneWorker(const std::vector<std::string>& inject) {
        for (const std::string& fault : inject) {
            const std::size_t at = fault.find('@');
            if (at == std::string::npos) throw UsageError(fmt::format("--inject: \"{}\" is not KIND@TEXT", fault));
            faults_.push_back({fault.substr(0, at), fault.substr(at + 1)});
        }
    }

    Json serve(const Json& request) {
        const auto op = request.at("op").get<std::string>();
        if (op == "open") {
            misbehave(op, request.at("spec").get<std::string>());
            return open(request);
        }
        const auto plan = request.at("plan").get<std::string>();
        misbehave(op, plan);
        if (op == "compile") return compile(request, plan);
        if (layer_ == nullptr) throw InternalError("no layer has been opened");
        if (op == "check") {
            const TuneLayer::Checked checked = layer_->check(plan);
            return {{"wrong", checked.wrong},
                    {"workspace_bytes", checked.workspace_bytes},
                    {"retained_bytes", checked.retained_bytes},
                    {"compiled", checked.compiled}};
        }
        if (op == "time") {
            const double ms = layer_->time_ms(plan);
            return {{"ms", ms}, {"graphs_refused", layer_->graphs_refused()}};
        }
        if (op == "warm") return warm(plan, request.at("seconds").get<double>());
        throw InternalError(fmt::format("no such request: {}", op));
    }

private:
    Json open(const Json& request) {
        TuneLayerOptions options{.spec = parse_spec(request.at("spec").get<std::string>()).normalized(),
                                 .num_tokens = request.at("num_tokens").get<std::int64_t>(),
                                 .limit_bytes = request.at("limit_bytes").get<std::int64_t>(),
                                 .retain = request.at("retain").get<bool>(),
                                 .graphs = request.at("graphs").get<bool>()};
        options.session.device = request.at("device").get<std::string>();
        options.session.cache_dir = path_of_request(request.at("cache_dir"));
        options.session.threads = request.at("threads").get<int>();
        options.session.scratch_bytes = request.at("scratch_bytes").get<std::int64_t>();
        options.session.use_records = false;
        layer_ = std::make_unique<TuneLayer>(std::move(options));
        return Json::object();
    }

    Json compile(const Json& request, const std::string& plan) {
        if (compiler_ == nullptr) {
            compiler_ = std::make_unique<Session>(
                SessionOptions{.device = "cpu", .cache_dir = path_of_request(request.at("cache_dir")), .use_records = false});
        }
        const PrewarmResult result = compiler_->prewarm(parse_spec(request.at("spec").get<std::string>()),
                                                        parse_device_json(request.at("device").get<std::string>()), {.plan = plan});
        return {{"compiled", result.compiled}};
    }

    Json warm(const std::string& plan, double seconds) {
        const auto begin = std::chrono::steady_clock::now();
        while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds) {
            static_cast<void>(layer_->time_ms(plan));
        }
        return {{"graphs_refused", layer_->graphs_refused()}};
    }

    [[nodiscard]] bool on_gpu() const { return layer_ != nullptr && layer_->on_gpu(); }

    /// For ever: on a GPU in the candidate's own work, which the driver waits for.
    void hang() const {
        if (on_gpu()) return layer_->break_runs(KernelFault::endless);
        std::this_thread::sleep_for(std::chrono::hours(1));
    }

    /// On a GPU by a kernel, of which the driver tells; elsewhere by a signal.
    void crash() const {
        if (on_gpu()) return layer_->break_runs(KernelFault::illegal_write);
        static_cast<void>(std::raise(SIGSEGV));
    }

    /// `text`: the plan; of "open" the spec.
    void misbehave(const std::string& op, const std::string& text) {
        const bool runs = op == "check" || op == "time" || op == "warm";
        for (const Fault& fault : faults_) {
            if (text.find(fault.text) == std::string::npos) continue;
            if ((fault.kind == "hang" && runs) || fault.kind == "hang-" + op) hang();
            if ((fault.kind == "fault" && runs) || fault.kind == "fault-" + op) crash();
            if (fault.kind == "fault-timing" && op == "time") static_cast<void>(std::raise(SIGKILL));
            if (fault.kind == "refuse-graph" && (op == "time" || op == "warm") && layer_ != nullptr) layer_->refuse_graph();
            if (fault.kind == "wrong" && op == "check" && layer_ != nullptr) layer_->spoil_results();
        }
    }

    std::vector<Fault> faults_;
    std::unique_ptr<TuneLayer> layer_;
    std::unique_ptr<Session> compiler_;
};

}  // namespace

void add_tune_worker(CLI::App& app, Action& action) {
    auto inject = std::make_shared<std::vector<std::string>>();
    CLI::App* command = app.add_subcommand(kTuneWorker, "")->group("");
    command->add_option("--inject", *inject)->take_all();
    command->callback([inject, &action] {
        action = [inject] {
            TuneWorker worker(*inject);
            return serve_requests([&](const Json& request) { return worker.serve(request); });
        };
    });
}

}  // namespace flce::cli
