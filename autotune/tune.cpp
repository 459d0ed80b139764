#include "flce/tune.hpp"

#include <fmt/format.h>

#include <array>

#include "autotune/tune_json.hpp"
#include "autotune/tune_worker.hpp"
#include "autotune/tuner.hpp"
#include "runtime/workers/worker_command.hpp"

namespace flce {
namespace {

TunedLayer layer_of(const Tuned& tuned) {
    const Record& record = tuned.record;
    const auto best = record.candidates.find(tuned.result.best_plan);
    return {.spec = tuned.spec,
            .num_tokens = record.key.request.num_tokens,
            .record = tuned.file,
            .best_plan = tuned.result.best_plan,
            .best_ms = best == record.candidates.end() ? 0 : best->second.median_ms(),
            .default_plan = tuned.result.default_plan,
            .candidates = record.candidates.size(),
            .measured = tuned.result.measured,
            .complete = tuned.result.complete,
            .seconds = tuned.seconds,
            .compiled = tuned.compiled};
}

}  // namespace

std::vector<Spec> well_known_layers() {
    constexpr std::array kLayers = {
        "D=2048,V=151936",             // Qwen3-1.7B
        "D=4096,V=128256",             // Llama-3-8B
        "D=2304,V=256000,softcap=30",  // Gemma-2-2B
        "D=2048,V=128256",             // Llama-3.2-1B
        "D=3584,V=152064",             // Qwen2.5-7B
        "D=4096,V=32000",              // Mistral-7B
        "D=7168,V=129280",             // DeepSeek-V3
        "D=768,V=50257",               // GPT-2
    };
    std::vector<Spec> specs;
    for (const char* layer : kLayers) specs.push_back(parse_spec(fmt::format("{},dtype=bf16", layer)).normalized());
    return specs;
}

TuneReport tune(const TuneOptions& options, const TuneListener& listener) {
    if (options.specs.empty()) throw ArgumentError("specs are empty: tune needs at least one");
    TuneOptions normalized = options;
    for (Spec& spec : normalized.specs) spec = spec.normalized();
    Tuner tuner(std::move(normalized), {.command = worker_command(options.command, kTuneWorker)},
                {.progress = listener.progress, .warning = listener.warning, .stop = listener.stop});
    tuner.run();
    TuneReport report{.errors = tuner.untuned(),
                      .stopped = listener.stop && listener.stop(),
                      .json = tune_report_json(tuner).dump(2, ' ', false, Json::error_handler_t::replace)};
    for (const Tuned& tuned : tuner.tuned()) report.layers.push_back(layer_of(tuned));
    return report;
}

}  // namespace flce
