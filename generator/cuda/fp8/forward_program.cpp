#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/prepare.hpp"
#include "generator/cuda/common/retained_steps.hpp"
#include "generator/cuda/fp8/logits_launch.hpp"

namespace flce::fp8 {
namespace {

/// Powers of two above a row's own up to which exponentials that are kept are in range.
constexpr float kMostOfKept = 15.5F;

struct ForwardPassFp8 : ForwardPass {
    const ForwardLayoutFp8& layout;  ///< ForwardPass's, with this path's places
    const Device& device;
    const Gemms& gemms;
    Expr retains;         ///< whether anything is retained
    Expr powers;          ///< address, and so are the next two
    Expr weight_largest;  ///< 0: nobody asks, as of a weight of codes, whose forward reads no numbers
    Expr any_again;

    ForwardPassFp8(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source, const ForwardLayoutFp8& layout)
        : ForwardPass(spec, plan, source, layout),
          layout(layout),
          device(device),
          gemms(gemms_of(plan.path)),
          retains(less(0, layout.retained.columns)),
          powers(select(retains, retained_at(layout.retained.powers), workspace_at(layout.powers))),
          weight_largest(is_quantized(spec) ? Expr(0) : select(retains, slot(Slot::retained), 0)),
          any_again(workspace_at(layout.largest) + static_cast<std::int64_t>(offsetof(Fp8Largest, again))) {
        splits = 1;
    }
};

/// Logits of columns [first, first + columns), whose codes are made before. `at`: what differs from one launch to the other.
std::vector<Statement> logits_steps(const ForwardPassFp8& pass, LogitsAt at, const Expr& weight_largest) {
    const ForwardLayoutFp8& layout = pass.layout;
    at.hidden_codes = workspace_at(layout.hidden_codes);
    at.row_scales = workspace_at(layout.row_scales);
    at.weight_codes = is_quantized(pass.spec) ? weight_row_at(pass.spec, at.first) : workspace_at(layout.weight_codes);
    at.column_scales = workspace_at(layout.column_scales);
    at.powers = pass.powers;
    at.sums = equal(at.again, 0);
    const CodesAt codes{.from = weight_row_at(pass.spec, at.first),
                        .rows = at.columns,
                        .codes = at.weight_codes,
                        .scales = at.column_scales,
                        .given_scale = Slot::fp8_weight_scale,
                        .largest = weight_largest,
                        .unless = at.unless,
                        .factors = workspace_at(layout.column_factors)};
    LaunchBuilder<ForwardParams> launch =
        forward_launch(pass, KernelRole::forward, logits_grid(pass.gemms, pass.spec, pass.device, at.columns), 1);
    std::vector<Statement> steps;
    if (is_quantized(pass.spec)) {
        steps.push_back(given_scales_launch(pass.source, codes, at.first));
    } else {
        steps = weight_codes_steps(pass.spec, pass.source, codes);
    }
    steps.push_back(logits_launch(pass.gemms, pass.spec, std::move(launch), at));
    return steps;
}

Statement powers_launch(const ForwardPassFp8& pass, const Expr& columns) {
    using Params = Fp8PowersParams;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::fp8_powers), ceil_div(slot(Slot::num_tokens), kRowThreads));
    launch.set(&Params::partials, workspace_at(pass.layout.partials))
        .set(&Params::target_logits, workspace_at(pass.layout.target_logits))
        .set(&Params::powers, pass.powers)
        .set_targets(&Params::targets, pass.spec, 0)
        .set(&Params::temperature, slot(Slot::temperature))
        .set(&Params::partial_rows, pass.layout.partial_rows)
        .set(&Params::rows, slot(Slot::num_tokens))
        .set(&Params::splits, ceil_div(columns, sum_columns(pass.gemms, pass.spec)));
    return launch.build();
}

Statement merge_launch(const ForwardPassFp8& pass, const LogitsAt& at) {
    using Params = Fp8MergeParams;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::fp8_merge), ceil_div(slot(Slot::num_tokens), 32));
    launch.set(&Params::partials, workspace_at(pass.layout.partials))
        .set(&Params::running, workspace_at(pass.layout.running))
        .set(&Params::partial_rows, pass.layout.partial_rows)
        .set(&Params::rows, slot(Slot::num_tokens))
        .set(&Params::splits, ceil_div(at.columns, sum_columns(pass.gemms, pass.spec)))
        .set(&Params::first, equal(at.first, 0));
    return launch.build();
}

Statement stale_launch(const ForwardPassFp8& pass) {
    using Params = Fp8StaleParams;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::fp8_stale), ceil_div(slot(Slot::num_tokens), kFp8ClusterRows));
    launch.set(&Params::running, workspace_at(pass.layout.running))
        .set(&Params::target_logits, workspace_at(pass.layout.target_logits))
        .set(&Params::retained_target_logits, retained_at(pass.layout.retained.target_logits))
        .set(&Params::powers, pass.powers)
        .set(&Params::again, workspace_at(pass.layout.again))
        .set(&Params::any, pass.any_again)
        .set(&Params::partial_rows, pass.layout.partial_rows)
        .set(&Params::rows, slot(Slot::num_tokens))
        .set_float(&Params::most, kMostOfKept);
    return launch.build();
}

/// All columns, stretch by stretch. `again`: exponentials alone, of clusters of rows that have one with another power now.
Statement stretches_loop(const ForwardPassFp8& pass, bool again) {
    const ForwardLayoutFp8& layout = pass.layout;
    const RetainedFp8& retained = layout.retained;
    LogitsAt at;
    at.first = variable(kStretchLoop) * layout.cut.width;
    at.columns = min(layout.cut.end - at.first, layout.cut.width);
    at.stored = min(max(retained.columns - at.first, 0), at.columns);
    at.exponentials = retained_at(retained.exponentials) + at.first;
    at.turned = retained_at(retained.turned) + at.first * token_positions();
    at.pitch = retained.pitch;
    if (again) {
        at.columns = at.stored;
        at.again = workspace_at(layout.again);
        at.unless = pass.any_again;
    }
    std::vector<Statement> steps = logits_steps(pass, at, again ? Expr(0) : pass.weight_largest);
    if (!again) steps.push_back(merge_launch(pass, at));
    return {Loop{kStretchLoop, again ? ceil_div(retained.columns, layout.cut.width) : layout.cut.count, std::move(steps)}};
}

/// Powers from the logits of the first classes and of the targets.
std::vector<Statement> power_steps(const ForwardPassFp8& pass) {
    LogitsAt at;
    at.first = 0;
    at.columns = min(pass.layout.cut.width, min(kFp8FirstClasses, vocab_columns(pass.spec)));
    std::vector<Statement> steps = {{MemsetZero{pass.powers, slot(Slot::num_tokens) * 4}}};
    for (Statement& step : logits_steps(pass, at, 0)) steps.push_back(std::move(step));
    steps.push_back(powers_launch(pass, at.columns));
    return steps;
}

/// Everything of a call that has a class, but for the rows' outputs.
std::vector<Statement> logits_and_sums(const ForwardPassFp8& pass) {
    const ForwardLayoutFp8& layout = pass.layout;
    std::vector<Statement> steps;
    const std::int64_t largest_bytes = sizeof(Fp8Largest);
    steps.push_back({MemsetZero{workspace_at(layout.largest), largest_bytes}});
    steps.push_back({If{pass.retains, {Statement{MemsetZero{slot(Slot::retained), largest_bytes}}}}});
    steps.push_back(hidden_codes_launch(pass.spec, pass.source, workspace_at(layout.hidden_codes), workspace_at(layout.row_scales)));
    steps.push_back(targets_launch(pass.spec, pass.source, workspace_at(layout.target_logits)));
    for (Statement& step : power_steps(pass)) steps.push_back(std::move(step));
    steps.push_back(stretches_loop(pass, false));
    steps.push_back({If{pass.retains, {stale_launch(pass), stretches_loop(pass, true)}}});
    return steps;
}

}  // namespace

LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                              const ForwardLayoutFp8& layout) {
    const ForwardPassFp8 pass(spec, device, plan, source, layout);
    std::vector<Statement> steps = with_columns(spec, logits_and_sums(pass));
    steps.push_back(row_outputs_launch(pass, {}));
    std::vector<Statement> body;
    if (sums_class_weights(spec)) body.push_back(prepare_launch(spec, source, {}));
    std::ranges::move(for_all_rows(pass, std::move(steps)), std::back_inserter(body));
    return {.body = std::move(body), .variable_count = kStretchLoop + 1};
}

}  // namespace flce::fp8
