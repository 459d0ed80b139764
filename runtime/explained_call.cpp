#include "runtime/explained_call.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "flce/error.hpp"
#include "generator/planner.hpp"
#include "records/record.hpp"
#include "runtime/retained_choice.hpp"
#include "runtime/scratch_steps.hpp"
#include "runtime/session.hpp"

namespace flce {
namespace {

class Explainer {
public:
    explicit Explainer(const CallQuestion& question)
        : q_(question),
          session_({.device = "cpu", .scratch_bytes = question.scratch_bytes, .threads = question.threads}),
          modelled_device_(with_threads(question.device, question.threads)) {}

    ExplainedCall call() {
        const std::int64_t plan_limit = q_.workspace_limit_bytes == 0 && q_.keep == Keep::all ? kAllMemory : q_.workspace_limit_bytes;
        const KernelOptions options{.plan = q_.plan, .workspace_limit_bytes = plan_limit, .num_tokens = q_.num_tokens};
        ExplainedCall call{.choice = session_.choose_plan(q_.spec, q_.device, options)};
        const Plan& plan = call.choice.plan;
        call.point = point(plan, asked(plan));
        call.measured = measured(call.point);
        call.guessed = !has_measured_rates(q_.device);
        call.curve = quickest_for_their_memory(points(plan));
        call.place = placed(call.curve, call.point);
        return call;
    }

private:
    [[nodiscard]] ArgumentError overflow() const {
        return ArgumentError(fmt::format("num_tokens is {}: sizes of its tensors overflow 64 bits", q_.num_tokens));
    }

    [[nodiscard]] std::int64_t workspace_bound(const Plan& plan) const {
        const auto of_tokens = workspace_of_tokens(q_.spec, q_.num_tokens);
        std::int64_t workspace = 0;
        if (!of_tokens || __builtin_add_overflow(plan.scratch_bytes, *of_tokens, &workspace)) {
            throw overflow();
        }
        return workspace;
    }

    [[nodiscard]] CallPoint point(const Plan& plan, const KeptPart& kept) const {
        std::int64_t bytes = 0;
        if (__builtin_add_overflow(workspace_bound(plan), kept.bytes, &bytes)) {
            throw overflow();
        }
        return {plan, bytes, kept, estimate_forward(q_.spec, modelled_device_, plan, q_.num_tokens, kept.part),
                estimate_backward(q_.spec, modelled_device_, plan, q_.num_tokens, kept.part)};
    }

    /// Eighths of a whole vocabulary, in memory of their own.
    [[nodiscard]] KeptPart own_eighths(const Plan& plan, int eighths) const {
        const KeptPart whole = own_part(q_.spec, plan, q_.num_tokens, 0x1p62);
        return own_part(q_.spec, plan, q_.num_tokens, eighths / 8.0 * static_cast<double>(whole.bytes));
    }

    [[nodiscard]] KeptPart asked(const Plan& plan) const {
        const std::int64_t workspace = workspace_bound(plan);
        if (q_.workspace_limit_bytes > 0 && workspace > q_.workspace_limit_bytes) {
            throw PlanError(limit_too_small(q_.workspace_limit_bytes, workspace, fmt::format("{} tokens with this plan", q_.num_tokens)));
        }
        switch (q_.keep) {
            case Keep::nothing: break;
            case Keep::automatic: return kept_by_default(q_.spec, plan, q_.num_tokens, workspace, q_.workspace_limit_bytes);
            case Keep::all: return own_part(q_.spec, plan, q_.num_tokens, 0x1p62);
            case Keep::bytes: return own_part(q_.spec, plan, q_.num_tokens, static_cast<double>(q_.keep_bytes));
            case Keep::grad_weight:
                if (lent_part(q_.spec, plan, q_.num_tokens).part == 0 && q_.num_tokens > 0) {
                    throw ArgumentError(
                        fmt::format("nothing can be kept in the memory of grad_weight with {} (the plan has to retain, the gradient to be "
                                    "written, not accumulated into, vocab_major)",
                                    plan.text()));
                }
                return lent_part(q_.spec, plan, q_.num_tokens);
        }
        return {};
    }

    /// Records know two ways: keeping nothing, and keeping the part that is kept by default.
    [[nodiscard]] std::optional<MeasuredTime> measured(const CallPoint& point) {
        if (q_.keep != Keep::nothing && q_.keep != Keep::automatic) return std::nullopt;
        const PlanRequest call{
            .scratch_bytes = point.plan.scratch_bytes, .workspace_limit_bytes = q_.workspace_limit_bytes, .num_tokens = q_.num_tokens};
        return SessionAccess::measured_time(session_, q_.spec, q_.device, point.plan, call,
                                            q_.keep == Keep::nothing ? kNothingRetained : kRetainedAutomatically);
    }

    /// The call's plan with so much scratch; where that is too little for it, the cost model's choice, unless the plan is the user's.
    [[nodiscard]] std::optional<Plan> plan_with(Plan plan, std::int64_t scratch_bytes) const {
        plan.scratch_bytes = scratch_bytes;
        if (!illegal_reason(q_.spec, q_.device, plan)) return plan;
        if (!q_.plan.empty()) return std::nullopt;
        try {
            return choose_plan(q_.spec, q_.device, {.scratch_bytes = scratch_bytes, .num_tokens = q_.num_tokens});
        } catch (const PlanError&) {  // too little for any
            return std::nullopt;
        }
    }

    /// Powers of two of scratch, keeping as much as needs no more memory; then memory of its own for eighths of the largest part.
    [[nodiscard]] std::vector<CallPoint> points(const Plan& call) {
        std::vector<CallPoint> all;
        for (std::int64_t scratch = 1 << 20; scratch <= most_useful_scratch(q_.num_tokens); scratch *= 2) {
            if (const auto plan = plan_with(call, scratch))
                all.push_back(point(*plan, q_.keep == Keep::nothing ? KeptPart{} : lent_part(q_.spec, *plan, q_.num_tokens)));
        }
        if (q_.keep == Keep::nothing || q_.keep == Keep::grad_weight) return all;
        const auto plan = plan_with(call, q_.scratch_bytes);
        if (!plan || !retains(*plan)) return all;
        for (int eighths = 1; eighths < 8; ++eighths) all.push_back(point(*plan, own_eighths(*plan, eighths)));
        const KernelOptions roomy{.plan = q_.plan, .workspace_limit_bytes = kAllMemory, .num_tokens = q_.num_tokens};
        const Plan most = session_.choose_plan(q_.spec, q_.device, roomy).plan;
        all.push_back(point(most, own_part(q_.spec, most, q_.num_tokens, 0x1p62)));
        return all;
    }

    /// Leaves out points that take as long with more memory.
    static std::vector<CallPoint> quickest_for_their_memory(std::vector<CallPoint> points) {
        std::ranges::stable_sort(points, {}, [](const CallPoint& p) { return std::pair(p.workspace_bytes, p.seconds()); });
        std::vector<CallPoint> quickest;
        for (CallPoint& point : points) {
            if (quickest.empty() || point.seconds() < 0.999 * quickest.back().seconds()) quickest.push_back(std::move(point));
        }
        return quickest;
    }

    /// Puts the call among them where no less memory is quicker; what then takes as long with more memory goes.
    static std::optional<std::size_t> placed(std::vector<CallPoint>& curve, const CallPoint& call) {
        const auto smaller = [&](const CallPoint& p) {
            return p.workspace_bytes < call.workspace_bytes || (p.workspace_bytes == call.workspace_bytes && p.seconds() < call.seconds());
        };
        for (const CallPoint& p : curve) {
            if (smaller(p) && p.seconds() < call.seconds()) return std::nullopt;
        }
        const auto after = std::ranges::find_if_not(curve, smaller);
        const auto place = static_cast<std::size_t>(after - curve.begin());
        curve.erase(after, std::ranges::find_if(after, curve.end(), [&](const CallPoint& p) {
                        return p.workspace_bytes > call.workspace_bytes && p.seconds() < call.seconds();
                    }));
        curve.insert(curve.begin() + static_cast<std::ptrdiff_t>(place), call);
        return place;
    }

    const CallQuestion& q_;
    Session session_;
    Device modelled_device_;
};

}  // namespace

ExplainedCall explained_call(const CallQuestion& question) { return Explainer(question).call(); }

}  // namespace flce
