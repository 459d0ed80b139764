// The layer that a tuning worker measures: one layer on one device, run with any plan, checked and timed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "autotune/buffer_sets.hpp"
#include "autotune/judge.hpp"
#include "autotune/reference.hpp"
#include "flce/recording.hpp"
#include "runtime/layer/layer.hpp"

namespace flce {

struct MeasuredLayerOptions {
    Spec spec;
    SessionOptions session;
    std::int64_t num_tokens = kTypicalTokens;
    std::int64_t workspace_limit_bytes = 0;  ///< workspace and retained together; 0: none
    bool retain = true;                      ///< forward leaves to backward what grad_weight's memory or the limit has room for
    bool graphs = false;                     ///< a sample is one CUDA graph
    double sample_ms = 5;                    ///< shorter work is repeated
};

class MeasuredLayer {
public:
    explicit MeasuredLayer(MeasuredLayerOptions options);

    struct Checked {
        std::string wrong;  ///< empty: every output is right
        std::int64_t workspace_bytes = 0;
        std::int64_t retained_bytes = 0;
        std::int64_t compiled = 0;  ///< artifacts that no cache had
    };
    /// Runs the plan into poisoned outputs. Samples of tokens and vocabulary rows are held against fp64, and a spread of all rows against
    /// the first plan that was right. Throws what get_kernel does.
    [[nodiscard]] Checked check(const std::string& plan);
    /// Milliseconds of forward and backward, on buffers in turn so that the inputs come from memory; in a graph without the host's share.
    [[nodiscard]] double time_ms(const std::string& plan);
    /// Why there are no graphs, though they were asked for: times since then are of launches one by one. Empty: nothing was refused.
    [[nodiscard]] const std::string& graphs_refused() const { return graphs_refused_; }

    [[nodiscard]] DeviceRef device() const { return device_; }

    // Functions for tests of the process that asks.
    /// Has `how` change the next run's results.
    void spoil_results(std::function<void(LayerOutputs&)> how) { spoil_ = std::move(how); }
    /// Makes every run from now on submit `work` to its stream, behind its own work.
    void add_to_runs(std::function<void(Stream)> work);
    /// Makes the next sample go as if the driver refused its graph.
    void refuse_graph() { refuse_ = true; }

private:
    struct Runnable {
        std::shared_ptr<const Kernel> kernel;
        std::size_t workspace_bytes = 0;
        Retained retained;    ///< retained memory without its address
        int repetitions = 0;  ///< repetitions in a sample; 0: not known yet
        Recording sample;     ///< recording of that many repetitions; made when it is first timed
    };
    /// Numbers that are compared between plans: every output of a token and of the whole, and a spread of the gradients' rows.
    struct Sample {
        std::vector<float> lse, entropy, logprobs;
        std::vector<std::pair<std::string, std::vector<float>>> outputs;
        std::vector<double> grad_hidden, grad_weight, grad_bias;
    };

    Runnable& runnable(const std::string& plan);
    Runnable make_runnable(const std::string& plan);
    void run(const Runnable& runnable, std::size_t set, Stream stream = {}) const;
    [[nodiscard]] Recording recorded(const Runnable& candidate);
    void drop_samples();
    void make_reference();
    [[nodiscard]] Retained retained_by(const Runnable& runnable, const LayerOutputs& outputs) const;
    void reserve(const char* name, std::unique_ptr<Scratch>& memory, std::size_t& have, std::size_t wanted);
    void poison();
    [[nodiscard]] Sample sample() const;
    [[nodiscard]] std::string against_reference(const Sample& sample);
    [[nodiscard]] std::string against_first(const Sample& sample) const;
    void compare_rows(const Reference& reference, const Yardstick& yardstick, NormPair& norms) const;

    MeasuredLayerOptions options_;
    Session session_;
    DeviceRef device_;
    RandomLayer layer_;
    std::vector<BufferSet> sets_;
    std::size_t next_set_ = 0;
    std::unique_ptr<Scratch> scratch_, retained_;
    std::size_t scratch_bytes_ = 0;
    std::size_t retained_bytes_ = 0;
    std::map<std::string, Runnable> kernels_;
    std::vector<std::int64_t> rows_;  ///< rows of the vocabulary that the reference has
    std::unique_ptr<Reference> reference_;
    std::unique_ptr<Yardstick> yardstick_;
    std::unique_ptr<Sample> first_;  ///< sample of the first plan that was right
    std::function<void(LayerOutputs&)> spoil_;
    std::function<void(Stream)> added_work_;
    bool refuse_ = false;
    std::string graphs_refused_;
};

}  // namespace flce
