#include "autotune/tune_worker.hpp"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "runtime/kernel_factory.hpp"

namespace flce {

Json TuneWorker::serve(const Json& request) {
    const auto op = request.at("op").get<std::string>();
    if (op == "open") {
        before(op, request.at("spec").get<std::string>());
        return open(request);
    }
    if (op == "rates") {
        before(op, "");
        return rates(request);
    }
    const auto plan = request.at("plan").get<std::string>();
    before(op, plan);
    if (op == "compile") return compile(request, plan);
    if (layer_ == nullptr) throw InternalError("no layer has been opened");
    if (op == "check") {
        const MeasuredLayer::Checked checked = layer_->check(plan);
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

Json TuneWorker::open(const Json& request) {
    MeasuredLayerOptions options{.spec = parse_spec(request.at("spec").get<std::string>()).normalized(),
                                 .num_tokens = request.at("num_tokens").get<std::int64_t>(),
                                 .workspace_limit_bytes = request.at("workspace_limit_bytes").get<std::int64_t>(),
                                 .retain = request.at("retain").get<bool>(),
                                 .graphs = request.at("graphs").get<bool>()};
    options.session.device = request.at("device").get<std::string>();
    options.session.cache_dir = path_of_request(request.at("cache_dir"));
    options.session.threads = request.at("threads").get<int>();
    options.session.scratch_bytes = request.at("scratch_bytes").get<std::int64_t>();
    options.session.use_records = false;
    layer_ = std::make_unique<MeasuredLayer>(std::move(options));
    return Json::object();
}

Json TuneWorker::rates(const Json& request) {
    Device device = parse_device_json(request.at("device").get<std::string>());
    device.gpu.measured = measure_rates_of(request.at("ordinal").get<int>(), request.at("seconds").get<double>());
    // A rate that the model takes from the table as it is.
    device.gpu.bandwidth_bytes_per_s = device.gpu.measured.copy_bytes_per_s;
    return {{"device", device.json()}};
}

Json TuneWorker::compile(const Json& request, const std::string& plan) {
    if (compiler_ == nullptr) {
        compiler_ = std::make_unique<Session>(
            SessionOptions{.device = "cpu", .cache_dir = path_of_request(request.at("cache_dir")), .use_records = false});
    }
    const PrewarmResult result = compiler_->prewarm(parse_spec(request.at("spec").get<std::string>()),
                                                    parse_device_json(request.at("device").get<std::string>()), {.plan = plan});
    return {{"compiled", result.compiled}};
}

Json TuneWorker::warm(const std::string& plan, double seconds) {
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds) {
        static_cast<void>(layer_->time_ms(plan));
    }
    return {{"graphs_refused", layer_->graphs_refused()}};
}

}  // namespace flce
