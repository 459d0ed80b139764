// A rank's training step over its shard of the vocabulary, on one GPU: ParallelKernel with a communicator that delivers what other ranks
// would have sent. Beside it, in the same rounds, the three bare GEMMs of the shard by cuBLAS.
//     bench_shard_step [--shape 8192x4096x128256]... [--shards 2,4,8] [--seconds 2] [--blocks 16] [--options SPEC] [--plan PLAN]
//                      [--steps NAME,...]
// Prints a JSON object a shape and number of shards. Times are medians in ms, `ratios` are to the GEMMs. The steps:
//     all, default, grad_weight   amounts that forward retains: everything in memory of its own; Python's default, within the bytes of
//                                 the whole layer's weight gradient; within the shard's weight gradient. Nothing is reduced
//     copy                        like default, with a copy of grad_hidden's size on another stream in the place of its sum
//     blocks                      like copy, with --blocks blocks of a kernel that need an SM each, as NCCL's do
//     blocks_<n>us                like blocks, with a pause of n µs before the rest of grad_weight
//     blocks_priority             like blocks, with the other stream's priority raised
//     blocks_in_line              like blocks, on the call's own stream: the cost of a reduction that is not hidden
//     sequence                    like blocks, with sequence parallel: hidden states are gathered in forward and backward, by such blocks
//     sequence_in_line            like sequence, on the call's own stream
// `timelines`: when forward, grad_hidden, the reduction and the step ended, in ms after the step began.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "autotune/gemm_floor.hpp"
#include "benchmarks/reduction_stand_in.hpp"
#include "flce/buffer.hpp"
#include "flce/parallel.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/layer/layer.hpp"

namespace flce::bench {
namespace {

constexpr DeviceRef kGpu{DeviceKind::cuda, 0};
constexpr int kLeastRounds = 10;

struct Shape {
    std::int64_t tokens, hidden_size, vocab_size;
    std::string text;
};

struct Options {
    std::vector<Shape> shapes;
    std::vector<std::int64_t> shards = {2, 4, 8};
    std::vector<std::string> steps;  ///< none: all of them
    std::vector<unsigned> pauses_us = {3, 10};
    double seconds = 2;
    unsigned blocks = 16;
    std::string more;  ///< options of the spec
    std::string plan;  ///< empty: the planner's
};

/// How grad_hidden's sum is stood for.
struct Reduction {
    enum class Kind : std::uint8_t { none, copy, blocks };
    Kind kind = Kind::none;
    unsigned pause_us = 0;
    bool in_line = false;
    bool priority = false;
    bool sequence = false;
};

struct Step {
    std::string name;
    Retained retained;
    Reduction reduction{};
    std::vector<double> samples_ms{};
};

double median(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    return samples[samples.size() / 2];
}

class ShardBench {
public:
    ShardBench(const Options& options, Session& session, const Shape& shape, std::int64_t shards)
        : options_(options),
          shape_(shape),
          shards_(shards),
          context_(CudaDriver::load()->context(0)),
          stand_in_(context_),
          stream_(context_),
          side_(context_),
          hasty_side_(context_, -5),
          marks_{Moment(context_), Moment(context_), Moment(context_), Moment(context_), Moment(context_)} {
        const std::string spec = "D=" + std::to_string(shape.hidden_size) + ",V=" + std::to_string(shape.vocab_size / shards) +
                                 ",whole_vocab_size=" + std::to_string(shape.vocab_size) + ",dtype=bf16" + options.more;
        kernel_ = session.get_kernel(parse_spec(spec), {.plan = options.plan, .num_tokens = shape.tokens});
        RandomLayer layer = make_random_layer(kernel_->spec(), shape.tokens, {.seed = 1});
        for (std::size_t i = 0; i < layer.target.size(); ++i) layer.target[i] = static_cast<std::int64_t>(i * 7919) % shape.vocab_size;
        inputs_ = upload(kernel_->spec(), layer, kGpu);
        outputs_ = make_outputs(kernel_->spec(), kGpu, shape.tokens, flce::Reduction::mean);
        summed_.emplace("summed", kGpu, outputs_.grad_hidden.bytes());
        make_floor();
        make_steps();
    }

    nlohmann::json run() {
        double round_ms = 0;
        for (Step& step : steps_) {
            static_cast<void>(time_ms(step));
            round_ms += time_ms(step);
        }
        for (int i = 0; i < 2; ++i) round_ms += floor_ms();
        const int rounds = std::max(kLeastRounds, static_cast<int>(options_.seconds * 1e3 / round_ms));
        std::vector<double> floor, merge, copy;
        for (int i = 0; i < rounds; ++i) {
            floor.push_back(floor_ms());
            for (Step& step : steps_) step.samples_ms.push_back(time_ms(step));
            merge.push_back(merge_ms());
            copy.push_back(copy_ms());
        }
        nlohmann::json report{{"shape", shape_.text},
                              {"shards", shards_},
                              {"plan", kernel_->plan().text()},
                              {"rounds", rounds},
                              {"floor6_ms", median(floor)},
                              {"merge_ms", median(merge)},
                              {"reduction_by_blocks_ms", median(copy)},
                              {"grad_hidden_bytes", outputs_.grad_hidden.bytes()}};
        for (Step& step : steps_) {
            report["ms"][step.name] = median(step.samples_ms);
            report["ratios"][step.name] = median(step.samples_ms) / median(floor);
            report["retained_bytes"][step.name] = step.retained.bytes;
            report["in_grad_weight"][step.name] = step.retained.place == RetainedPlace::grad_weight;
            if (step.reduction.kind != Reduction::Kind::none) report["timelines"][step.name] = timeline(step);
        }
        return report;
    }

private:
    void make_floor() {
        std::string why;
        library_ = load_gemm_library(kGpu, DType::bf16, 0, &why);
        if (library_ == nullptr) throw std::runtime_error("no floor: " + why);
        // Rows of logits that are not aligned cost cuBLAS several times what the arithmetic does.
        const std::int64_t vocab = (kernel_->spec().vocab_size + 63) / 64 * 64;
        const std::int64_t n = shape_.tokens, d = shape_.hidden_size;
        floor_tensors_.push_back(make_tensor("weight", kGpu, ScalarType::bf16, {vocab, d}));
        floor_tensors_.push_back(make_tensor("logits", kGpu, ScalarType::bf16, {n, vocab}));
        floor_tensors_.push_back(make_tensor("grad_hidden", kGpu, ScalarType::bf16, {n, d}));
        floor_tensors_.push_back(make_tensor("grad_weight", kGpu, ScalarType::bf16, {vocab, d}));
        std::vector<std::byte> random(static_cast<std::size_t>(vocab * d) * 2);
        fill_random(random.data(), DType::bf16, static_cast<std::size_t>(vocab * d), 0.03, 5);
        floor_tensors_[0].buffer.upload(random.data(), random.size());
        floor_ = {n,
                  d,
                  vocab,
                  vocab,
                  WeightLayout::vocab_major,
                  inputs_.hidden.view.data,
                  floor_tensors_[0].view.data,
                  floor_tensors_[1].view.data,
                  floor_tensors_[2].view.data,
                  floor_tensors_[3].view.data};
    }

    void make_steps() {
        const std::int64_t n = shape_.tokens;
        const std::size_t workspace = step_workspace_bytes(*kernel_, n);
        const std::int64_t whole_gradient = shape_.vocab_size * shape_.hidden_size * 2;
        std::map<std::string, Retained> memory;
        memory["all"].bytes = kernel_->retained_bytes(n);
        memory["default"] = kernel_->choose_retained(
            n, {.workspace_limit_bytes = whole_gradient + whole_gradient / 32 + static_cast<std::int64_t>(workspace)});
        memory["grad_weight"] = kernel_->choose_retained(n);
        std::size_t own = 1;
        for (auto& [name, retained] : memory) {
            if (retained.place == RetainedPlace::own) own = std::max(own, retained.bytes);
        }
        retained_memory_.emplace("retained", kGpu, own);
        for (auto& [name, retained] : memory) {
            retained.data = retained.place == RetainedPlace::own ? retained_memory_->workspace().data : outputs_.grad_weight.view.data;
        }
        for (const char* name : {"all", "default", "grad_weight"}) steps_.push_back({name, memory.at(name)});
        const Retained usual = memory["default"];
        steps_.push_back({"copy", usual, {.kind = Reduction::Kind::copy}});
        steps_.push_back({"blocks", usual, {.kind = Reduction::Kind::blocks}});
        for (const unsigned us : options_.pauses_us)
            steps_.push_back({"blocks_" + std::to_string(us) + "us", usual, {.kind = Reduction::Kind::blocks, .pause_us = us}});
        steps_.push_back({"blocks_priority", usual, {.kind = Reduction::Kind::blocks, .priority = true}});
        steps_.push_back({"blocks_in_line", usual, {.kind = Reduction::Kind::blocks, .in_line = true}});
        steps_.push_back({"sequence", usual, {.kind = Reduction::Kind::blocks, .sequence = true}});
        steps_.push_back({"sequence_in_line", usual, {.kind = Reduction::Kind::blocks, .in_line = true, .sequence = true}});
        std::erase_if(steps_, [&](const Step& step) {
            return !options_.steps.empty() && std::ranges::find(options_.steps, step.name) == options_.steps.end();
        });
    }

    /// Collectives of a rank's communicator in this step.
    [[nodiscard]] Communicator communicator(const Step& step) {
        Communicator made{.rank = 0, .size = static_cast<int>(shards_)};
        made.all_gather = [this](const void* part, void* all, std::size_t bytes, flce::Stream stream) {
            const auto on = static_cast<CUstream>(stream.handle);
            if (bytes == inputs_.hidden.bytes() / static_cast<std::size_t>(shards_)) {
                return stand_in_.copy_by_blocks(all, inputs_.hidden.view.data, inputs_.hidden.bytes(), options_.blocks, on);
            }
            stand_in_.copy(all, part, bytes, on);
            const auto* others = static_cast<const std::byte*>(outputs_.all_partial_sums.view.data) + bytes;
            stand_in_.copy(static_cast<std::byte*>(all) + bytes, others, bytes * static_cast<std::size_t>(shards_ - 1), on);
        };
        made.all_reduce = [this, &step](void* data, std::int64_t count, DType dtype, flce::Stream stream) {
            const auto on = static_cast<CUstream>(stream.handle);
            const std::size_t bytes = static_cast<std::size_t>(count) * element_bytes(dtype);
            marks_[kGradHidden].record(on);
            if (step.reduction.kind == Reduction::Kind::copy) stand_in_.copy(summed_->workspace().data, data, bytes, on);
            if (step.reduction.kind == Reduction::Kind::blocks)
                stand_in_.copy_by_blocks(summed_->workspace().data, data, bytes, options_.blocks, on);
            marks_[kReduced].record(on);
            if (step.reduction.pause_us > 0) stand_in_.pause(step.reduction.pause_us * 1000ULL, stream_.get());
        };
        made.reduce_scatter = [this, all_reduce = made.all_reduce](const void* data, void*, std::int64_t count, DType dtype,
                                                                   flce::Stream stream) {
            all_reduce(const_cast<void*>(data), count * shards_, dtype, stream);
        };
        return made;
    }

    /// This rank's tokens of them.
    [[nodiscard]] TensorView part_of(const TensorView& tokens) const {
        return TensorView::matrix(tokens.data, tokens.dtype, shape_.tokens / shards_, shape_.hidden_size, kGpu);
    }

    void launch_step(const Step& step) {
        const flce::Stream side{step.reduction.in_line ? nullptr : step.reduction.priority ? hasty_side_.get() : side_.get()};
        const ParallelKernel parallel(kernel_, communicator(step),
                                      {.sequence_parallel = step.reduction.sequence, .communication_stream = side});
        if (!scratch_) {
            const ParallelKernel largest(kernel_, communicator(step), {.sequence_parallel = true});
            scratch_.emplace("workspace", kGpu, largest.workspace_bytes(shape_.tokens));
        }
        ForwardArgs forward = forward_args(inputs_, outputs_, {});
        forward.partial_sums = {};
        forward.retained = step.retained;
        BackwardArgs backward = backward_args(inputs_, outputs_, {});
        backward.retained = step.retained;
        if (step.reduction.sequence) {
            forward.hidden = backward.hidden = part_of(forward.hidden);
            backward.grad_hidden = part_of(backward.grad_hidden);
        }
        marks_[kBegin].record(stream_.get());
        parallel.forward({.call = forward}, scratch_->workspace(), {stream_.get()});
        marks_[kForward].record(stream_.get());
        parallel.backward(backward, scratch_->workspace(), {stream_.get()});
        marks_[kEnd].record(stream_.get());
    }

    double time_ms(const Step& step) {
        synchronize(kGpu);
        launch_step(step);
        synchronize(kGpu);
        return marks_[kEnd].ms_since(marks_[kBegin]);
    }

    nlohmann::json timeline(const Step& step) {
        std::map<std::string, std::vector<double>> samples;
        for (int i = 0; i < kLeastRounds; ++i) {
            static_cast<void>(time_ms(step));
            samples["forward"].push_back(marks_[kForward].ms_since(marks_[kBegin]));
            samples["grad_hidden"].push_back(marks_[kGradHidden].ms_since(marks_[kBegin]));
            samples["reduced"].push_back(marks_[kReduced].ms_since(marks_[kBegin]));
            samples["step"].push_back(marks_[kEnd].ms_since(marks_[kBegin]));
        }
        nlohmann::json medians;
        for (const auto& [name, times] : samples) medians[name] = median(times);
        return medians;
    }

    double floor_ms() {
        synchronize(kGpu);
        Timer timer(kGpu);
        timer.start();
        floor_forward(*library_, floor_);
        floor_backward(*library_, floor_);
        return timer.stop_ms();
    }

    double merge_ms() {
        MergeArgs args{.all_partial_sums = outputs_.all_partial_sums.view,
                       .target = inputs_.target.view,
                       .loss = outputs_.loss.view,
                       .lse = outputs_.lse.view};
        synchronize(kGpu);
        Timer timer(kGpu);
        timer.start({stream_.get()});
        kernel_->merge(args, scratch_->workspace(), {stream_.get()});
        return timer.stop_ms({stream_.get()});
    }

    double copy_ms() {
        synchronize(kGpu);
        Timer timer(kGpu);
        timer.start({stream_.get()});
        stand_in_.copy_by_blocks(summed_->workspace().data, outputs_.grad_hidden.view.data, outputs_.grad_hidden.bytes(), options_.blocks,
                                 stream_.get());
        return timer.stop_ms({stream_.get()});
    }

    enum Mark : std::uint8_t { kBegin, kForward, kGradHidden, kReduced, kEnd };

    const Options& options_;
    Shape shape_;
    std::int64_t shards_;
    std::shared_ptr<const CudaContext> context_;
    ReductionStandIn stand_in_;
    Stream stream_, side_, hasty_side_;
    Moment marks_[5];
    std::shared_ptr<const Kernel> kernel_;
    LayerInputs inputs_;
    LayerOutputs outputs_;
    std::optional<Scratch> summed_, retained_memory_, scratch_;
    std::unique_ptr<GemmLibrary> library_;
    std::vector<Tensor> floor_tensors_;
    FloorOperands floor_;
    std::vector<Step> steps_;
};

std::vector<std::string> parts(const std::string& text, char separator) {
    std::vector<std::string> found;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) found.push_back(part);
    return found;
}

std::vector<std::int64_t> numbers(const std::string& text, char separator) {
    std::vector<std::int64_t> found;
    for (const std::string& part : parts(text, separator)) found.push_back(std::stoll(part));
    return found;
}

Shape shape_of(const std::string& text) {
    const std::vector<std::int64_t> sizes = numbers(text, 'x');
    if (sizes.size() != 3) throw std::runtime_error("a shape is num_tokens x hidden_size x vocab_size, 8192x4096x128256, not " + text);
    return {sizes[0], sizes[1], sizes[2], text};
}

Options read(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        if (i + 1 == argc) throw std::runtime_error(flag + " needs a value");
        const std::string value = argv[++i];
        if (flag == "--shape") {
            options.shapes.push_back(shape_of(value));
        } else if (flag == "--shards") {
            options.shards = numbers(value, ',');
        } else if (flag == "--steps") {
            options.steps = parts(value, ',');
        } else if (flag == "--seconds") {
            options.seconds = std::stod(value);
        } else if (flag == "--blocks") {
            options.blocks = static_cast<unsigned>(std::stoul(value));
        } else if (flag == "--plan") {
            options.plan = value;
        } else if (flag == "--options") {
            options.more = "," + value;
        } else {
            throw std::runtime_error("unknown flag " + flag);
        }
    }
    if (options.shapes.empty()) options.shapes = {shape_of("8192x4096x128256"), shape_of("4096x2048x151936")};
    return options;
}

}  // namespace
}  // namespace flce::bench

int main(int argc, char** argv) {
    try {
        const flce::bench::Options options = flce::bench::read(argc, argv);
        flce::Session session({.device = "cuda"});
        for (const flce::bench::Shape& shape : options.shapes) {
            for (const std::int64_t shards : options.shards) {
                std::puts(flce::bench::ShardBench(options, session, shape, shards).run().dump(1).c_str());
                std::fflush(stdout);
            }
        }
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_shard_step: %s\n", error.what());
        return 1;
    }
}
