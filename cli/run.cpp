// flce run: loss and gradients of real tensors from safetensors files.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstring>
#include <limits>

#include "cli/command.hpp"
#include "cli/interrupt.hpp"
#include "cli/safetensors.hpp"
#include "runtime/layer/layer.hpp"

namespace flce::cli {
namespace {

struct RunOptions {
    std::string spec;
    SessionFlags session;
    std::string plan;
    std::vector<std::filesystem::path> inputs;
    std::filesystem::path out;
    std::string reduction = "mean";
    std::int64_t ignore_index = -100;
    bool json = false;
};

std::string safetensors_name(ScalarType type) {
    switch (type) {
        case ScalarType::bf16: return "BF16";
        case ScalarType::fp16: return "F16";
        case ScalarType::fp32: return "F32";
        case ScalarType::int32: return "I32";
        case ScalarType::int64: return "I64";
        case ScalarType::uint64: return "U64";
        case ScalarType::uint8: return "U8";
        case ScalarType::e4m3: return "F8_E4M3";
    }
    return "";
}

/// The tensors of a run, found by name and checked against the spec before any memory is taken for them.
class InputReader {
public:
    InputReader(const std::vector<std::filesystem::path>& paths, const Spec& spec) : files_(paths), spec_(spec) {
        const ScalarType dtype = scalar_type(spec.dtype);
        hidden_ = files_.get("hidden");
        if (hidden_.entry->shape.size() != 2) fail("hidden", hidden_, fmt::format("must be [num_tokens, {}]", spec.hidden_size));
        const std::int64_t n = hidden_.entry->shape[0];
        check("hidden", hidden_, dtype, {n, spec.hidden_size});
        weight_ = checked("weight", weight_type(spec), weight_shape(spec));
        if (is_quantized(spec)) weight_scale_ = checked("weight_scale", scale_type(spec), weight_scale_shape(spec));
        if (spec.weight_format == WeightFormat::nvfp4) weight_tensor_scale_ = checked("weight_tensor_scale", ScalarType::fp32, {});
        target_ = checked_classes("target", {n});
        if (spec.teacher_top_k > 0) {
            teacher_ids_ = checked_classes("teacher_ids", {n, spec.teacher_top_k});
            teacher_probs_ = checked("teacher_probs", ScalarType::fp32, {n, spec.teacher_top_k});
        }
        if (has_teacher_head(spec)) {
            teacher_hidden_ = checked("teacher_hidden", dtype, {n, spec.teacher_hidden_size});
            teacher_weight_ = checked("teacher_weight", dtype, weight_shape(teacher_head(spec)));
        }
        if (spec.teacher_bias) teacher_bias_ = checked("teacher_bias", dtype, {spec.vocab_size});
        if (spec.bias) bias_ = checked("bias", dtype, {spec.vocab_size});
        if (spec.class_weight) class_weight_ = checked("class_weight", ScalarType::fp32, {spec.vocab_size});
        if (spec.class_offset) class_offset_ = checked("class_offset", ScalarType::fp32, {spec.vocab_size});
        if (spec.class_groups) class_group_ = checked("class_group", ScalarType::int32, {spec.vocab_size});
        if (spec.class_groups) row_group_ = checked("row_group", ScalarType::int32, {n});
        if (spec.temperature) temperature_ = checked("temperature", ScalarType::fp32, {n});
        if (spec.token_weight) token_weight_ = checked("token_weight", ScalarType::fp32, {n});
        refuse_unread();
        if (spec.grad_weight_mode != GradMode::accumulate) return;
        const ScalarType grad_dtype = scalar_type(spec.grad_weight_dtype);
        grad_weight_ = files_.find("grad_weight");
        if (grad_weight_) check("grad_weight", grad_weight_, grad_dtype, weight_shape(spec));
        if (spec.bias) grad_bias_ = files_.find("grad_bias");
        if (grad_bias_) check("grad_bias", grad_bias_, grad_dtype, {spec.vocab_size});
    }

    LayerInputs load(DeviceRef device) const {
        const ScalarType dtype = scalar_type(spec_.dtype);
        LayerInputs inputs;
        inputs.num_tokens = hidden_.entry->shape[0];
        inputs.hidden = load("hidden", device, hidden_, dtype);
        inputs.weight = load("weight", device, weight_, weight_type(spec_));
        if (weight_scale_) inputs.weight_scale = load("weight_scale", device, weight_scale_, scale_type(spec_));
        if (weight_tensor_scale_) {
            inputs.weight_tensor_scale = load("weight_tensor_scale", device, weight_tensor_scale_, ScalarType::fp32);
        }
        inputs.target = load("target", device, target_, classes_dtype(target_));
        if (teacher_ids_) inputs.teacher_ids = load("teacher_ids", device, teacher_ids_, classes_dtype(teacher_ids_));
        if (teacher_probs_) inputs.teacher_probs = load("teacher_probs", device, teacher_probs_, ScalarType::fp32);
        if (teacher_hidden_) inputs.teacher_hidden = load("teacher_hidden", device, teacher_hidden_, dtype);
        if (teacher_weight_) inputs.teacher_weight = load("teacher_weight", device, teacher_weight_, dtype);
        if (teacher_bias_) inputs.teacher_bias = load("teacher_bias", device, teacher_bias_, dtype);
        if (bias_) inputs.bias = load("bias", device, bias_, dtype);
        if (class_weight_) inputs.class_weight = load("class_weight", device, class_weight_, ScalarType::fp32);
        if (class_offset_) inputs.class_offset = load("class_offset", device, class_offset_, ScalarType::fp32);
        if (class_group_) inputs.class_group = load("class_group", device, class_group_, ScalarType::int32);
        if (row_group_) inputs.row_group = load("row_group", device, row_group_, ScalarType::int32);
        if (temperature_) inputs.temperature = load("temperature", device, temperature_, ScalarType::fp32);
        if (token_weight_) inputs.token_weight = load("token_weight", device, token_weight_, ScalarType::fp32);
        return inputs;
    }

    /// The first temperature that is out of range, −1: none is.
    [[nodiscard]] std::int64_t first_wrong_temperature() const {
        for (std::size_t i = 0; i < temperature_.bytes.size() / 4; ++i) {
            float value = 0;
            std::memcpy(&value, temperature_.bytes.data() + i * 4, 4);
            if (!(value >= kLeastTemperature && value <= kMostTemperature)) return static_cast<std::int64_t>(i);
        }
        return -1;
    }

    /// Number of valid labels, and index of the first label that is not valid and not ignored (−1: none).
    struct Labels {
        std::int64_t valid = 0;
        std::int64_t first_invalid = -1;
        std::int64_t first_invalid_label = 0;
    };
    Labels labels(std::int64_t ignore_index) const {
        Labels labels;
        for_each_class(target_, [&](std::int64_t i, std::int64_t label) {
            if (label == ignore_index) return;
            if (label >= 0 && label < spec_.vocab_size) {
                ++labels.valid;
            } else if (labels.first_invalid < 0) {
                labels.first_invalid = i;
                labels.first_invalid_label = label;
            }
        });
        return labels;
    }

    /// Throws where a teacher's id is not a class and not -1.
    void check_teacher() const {
        if (!teacher_ids_) return;
        for_each_class(teacher_ids_, [&](std::int64_t i, std::int64_t id) {
            if (id >= -1 && id < spec_.vocab_size) return;
            throw UsageError(fmt::format("teacher_ids[{}, {}] is {}; an id is in [0, {}) or -1", i / spec_.teacher_top_k,
                                         i % spec_.teacher_top_k, id, spec_.vocab_size));
        });
    }

    /// Loads the values that gradients are added to: grad_weight and grad_bias of the input, where it has them.
    void load_initial(LayerOutputs& outputs) const {
        if (grad_weight_) outputs.grad_weight.buffer.upload(grad_weight_.bytes.data(), grad_weight_.bytes.size());
        if (grad_bias_) outputs.grad_bias.buffer.upload(grad_bias_.bytes.data(), grad_bias_.bytes.size());
    }

private:
    /// Throws where there is a tensor of a layer's or call's that the spec does not read: it would change the result.
    void refuse_unread() const {
        struct Optional {
            const char* name;
            bool is_read;
            const char* key;
        };
        const bool of_classes = spec_.teacher_top_k > 0;
        const bool of_head = has_teacher_head(spec_);
        const bool nvfp4 = spec_.weight_format == WeightFormat::nvfp4;
        for (const Optional& each : {Optional{"bias", spec_.bias, "bias"},
                                     {"weight_scale", is_quantized(spec_), "weight_dtype=e4m3 or nvfp4"},
                                     {"weight_tensor_scale", nvfp4, "weight_dtype=nvfp4"},
                                     {"class_weight", spec_.class_weight, "class_weight"},
                                     {"class_offset", spec_.class_offset, "class_offset"},
                                     {"class_group", spec_.class_groups, "class_groups"},
                                     {"row_group", spec_.class_groups, "class_groups"},
                                     {"temperature", spec_.temperature, "temperature"},
                                     {"token_weight", spec_.token_weight, "token_weight"},
                                     {"teacher_ids", of_classes, "teacher_top_k"},
                                     {"teacher_probs", of_classes, "teacher_top_k"},
                                     {"teacher_hidden", of_head, "teacher_hidden_size"},
                                     {"teacher_weight", of_head, "teacher_hidden_size"},
                                     {"teacher_bias", spec_.teacher_bias, "teacher_bias"}}) {
            if (each.is_read) continue;
            if (const auto found = files_.find(each.name)) {
                fail(each.name, found, fmt::format("is not read with this spec: say {} in --spec, or leave the tensor out", each.key));
            }
        }
    }
    [[noreturn]] static void fail(const std::string& name, const SafetensorsSet::Found& found, const std::string& rule) {
        throw UsageError(fmt::format("{}: tensor \"{}\" is {}; it {}", found.file, name, describe(*found.entry), rule));
    }
    static void check(const std::string& name, const SafetensorsSet::Found& found, ScalarType dtype,
                      const std::vector<std::int64_t>& shape) {
        if (found.entry->dtype != safetensors_name(dtype) || found.entry->shape != shape) {
            fail(name, found, fmt::format("must be {} [{}] for this spec", safetensors_name(dtype), fmt::join(shape, ", ")));
        }
    }
    SafetensorsSet::Found checked(const std::string& name, ScalarType dtype, const std::vector<std::int64_t>& shape) const {
        const auto found = files_.get(name);
        check(name, found, dtype, shape);
        return found;
    }
    static Tensor load(const char* name, DeviceRef device, const SafetensorsSet::Found& found, ScalarType dtype) {
        return make_tensor(name, device, dtype, found.entry->shape, found.bytes.data());
    }

    SafetensorsSet::Found checked_classes(const std::string& name, const std::vector<std::int64_t>& shape) const {
        const auto found = files_.get(name);
        if (found.entry->dtype != "I64" && found.entry->dtype != "I32") fail(name, found, "must be I32 or I64");
        check(name, found, classes_dtype(found), shape);
        return found;
    }
    static ScalarType classes_dtype(const SafetensorsSet::Found& found) {
        return found.entry->dtype == "I64" ? ScalarType::int64 : ScalarType::int32;
    }
    /// Calls `visit` with every element's number and value.
    template <class Visit>
    static void for_each_class(const SafetensorsSet::Found& found, const Visit& visit) {
        const bool wide = classes_dtype(found) == ScalarType::int64;
        const std::size_t element = wide ? 8 : 4;
        for (std::size_t i = 0; i < found.bytes.size() / element; ++i) {
            std::int64_t value = 0;
            std::int32_t narrow = 0;
            std::memcpy(wide ? static_cast<void*>(&value) : &narrow, found.bytes.data() + i * element, element);
            visit(static_cast<std::int64_t>(i), wide ? value : std::int64_t{narrow});
        }
    }

    SafetensorsSet files_;
    const Spec& spec_;
    SafetensorsSet::Found hidden_, weight_, weight_scale_, weight_tensor_scale_, target_, bias_, class_weight_, class_offset_, class_group_,
        row_group_, temperature_, token_weight_, teacher_ids_, teacher_probs_;
    SafetensorsSet::Found teacher_hidden_, teacher_weight_, teacher_bias_;
    SafetensorsSet::Found grad_weight_, grad_bias_;
};

void write_outputs(const std::filesystem::path& path, const LayerOutputs& outputs) {
    std::vector<std::vector<std::byte>> storage;
    std::vector<TensorToWrite> tensors;
    storage.reserve(14);  // spans into it stay valid
    const auto add = [&](const char* name, const Tensor& tensor) {
        if (!tensor.view.present) return;
        const std::byte* data = static_cast<const std::byte*>(tensor.view.data);
        if (tensor.view.device.kind != DeviceKind::cpu) data = storage.emplace_back(tensor.to_host<std::byte>()).data();
        const auto& shape = tensor.view.shape;
        tensors.push_back(
            {name, safetensors_name(tensor.view.dtype), {shape.begin(), shape.begin() + tensor.view.ndim}, {data, tensor.bytes()}});
    };
    add("loss", outputs.loss);
    add("z_loss", outputs.z_loss);
    add("lse", outputs.lse);
    add("logprobs", outputs.logprobs);
    add("entropy", outputs.entropy);
    add("top1", outputs.top1);
    add("log_sum_sq_probs", outputs.log_sum_sq_probs);
    add("teacher_logprobs", outputs.teacher_logprobs);
    add("teacher_lse", outputs.teacher_lse);
    add("teacher_entropy", outputs.teacher_entropy);
    add("student_divergence", outputs.student_divergence);
    add("top_logprobs", outputs.top_logprobs);
    add("top_ids", outputs.top_ids);
    add("grad_hidden", outputs.grad_hidden);
    add("grad_weight", outputs.grad_weight);
    add("grad_bias", outputs.grad_bias);
    write_safetensors(path, tensors);
}

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

void report(const RunOptions& options, const Kernel& kernel, std::int64_t num_tokens, std::int64_t num_valid, const LayerOutputs& outputs) {
    const auto loss = outputs.loss.to_host<float>();
    const bool reduced = options.reduction != "none";
    double total = 0;
    for (const float value : loss) total += value;
    if (options.json) {
        Json json{{"loss", nullptr}, {"num_valid_tokens", num_valid}, {"num_tokens", num_tokens}, {"reduction", options.reduction}};
        if (!kernel.spec().outputs.loss) {
            // stays null: the spec has no loss among its outputs
        } else if (reduced) {
            json["loss"] = number(total);
        } else {
            json["loss"] = Json::array();
            for (const float value : loss) json["loss"].push_back(number(value));
        }
        if (outputs.z_loss.view.present && reduced) json["z_loss"] = number(outputs.z_loss.to_host<float>().front());
        json["spec"] = kernel.spec().text();
        json["device"] = kernel.device().name;
        json["plan"] = kernel.plan().text();
        json["workspace_bytes"] = kernel.workspace_bytes(num_tokens);
        json["out"] = options.out.empty() ? Json(nullptr) : Json(options.out.string());
        print_json(json);
        return;
    }
    fmt::print("{} on {}\n", kernel.spec().text(), kernel.device().name);
    fmt::print("tokens            {} ({} valid)\n", num_tokens, num_valid);
    if (kernel.spec().outputs.loss) fmt::print("loss ({})       {:.7g}\n", reduced ? options.reduction : "sum ", total);
    if (outputs.z_loss.view.present && reduced) fmt::print("of which z-loss   {:.7g}\n", outputs.z_loss.to_host<float>().front());
    fmt::print("workspace         {}\n", human_bytes(static_cast<double>(kernel.workspace_bytes(num_tokens))));
    if (!options.out.empty()) fmt::print("written           {}\n", options.out.string());
}

void refuse_to_overwrite_inputs(const RunOptions& options) {
    for (const std::filesystem::path& input : options.inputs) {
        std::error_code error;
        if (!options.out.empty() && std::filesystem::equivalent(options.out, input, error)) {
            throw UsageError(fmt::format("--out {} is the input {}, which it would overwrite", options.out.string(), input.string()));
        }
    }
}

int run(RunOptions options) {
    refuse_to_overwrite_inputs(options);
    if (!options.out.empty()) options.out = output_file("--out", options.out);
    const Spec spec = read_spec(options.spec);
    const Reduction reduction = parse_reduction(options.reduction);
    const InputReader reader(options.inputs, spec);
    const auto labels = reader.labels(options.ignore_index);
    if (labels.first_invalid >= 0) {
        throw UsageError(fmt::format("target[{}] is {}; a label is in [0, {}) or the ignore index {}", labels.first_invalid,
                                     labels.first_invalid_label, spec.vocab_size, options.ignore_index));
    }
    if (const std::int64_t wrong = reader.first_wrong_temperature(); wrong >= 0) {
        throw UsageError(fmt::format("temperature[{}] is not between 2^-100 and 2^100", wrong));
    }
    reader.check_teacher();
    if (is_shard(spec)) {
        throw UsageError("--spec has whole_vocab_size, and run computes a whole layer: leave it out, or run the ranks of a process group");
    }
    Session session(options.session.options());
    const auto kernel = session.get_kernel(spec, {.plan = options.plan});
    const DeviceRef device = kernel->device_ref();
    const LayerInputs inputs = reader.load(device);
    LayerOutputs outputs = make_outputs(spec, device, inputs.num_tokens, reduction);
    reader.load_initial(outputs);
    const Scratch scratch("workspace", device, kernel->workspace_bytes(inputs.num_tokens));
    const CallOptions call{.reduction = reduction, .ignore_index = options.ignore_index};
    stop_if_interrupted();
    kernel->forward(forward_args(inputs, outputs, call), scratch.workspace());
    stop_if_interrupted();
    kernel->backward(backward_args(inputs, outputs, call), scratch.workspace());
    synchronize(device);
    stop_if_interrupted();
    if (!options.out.empty()) write_outputs(options.out, outputs);
    report(options, *kernel, inputs.num_tokens, labels.valid, outputs);
    return kDone;
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
    auto options = std::make_shared<RunOptions>();
    CLI::App* command = app.add_subcommand("run", "Loss and gradients of real tensors (safetensors)");
    command->footer(
        "\nReads hidden [N, D], weight ([V, D], or [D, V] with layout=hidden_major), target [N] (I32 or I64) and, where the spec says so,\n"
        "bias [V], class_weight and class_offset [V], temperature [N] and token_weight [N] (F32), class_group [V] and row_group [N] "
        "(I32),\n"
        "teacher_ids [N, K] (I32 or I64, -1 for none) and\n"
        "teacher_probs [N, K] (F32); with grad_weight_mode=accumulate also grad_weight and grad_bias to add to (else they start at 0).\n"
        "Writes loss, lse, grad_hidden, grad_weight and what else the spec asks for.\n\n"
        "Examples:\n  flce run --spec D=2048,V=151936,dtype=bf16 --input step.safetensors --out grads.safetensors\n"
        "  flce run --spec @layer.json --input model.safetensors --input batch.safetensors --reduction sum --json");
    command->add_option("--spec", options->spec, kSpecHelp)->required();
    command->add_option("--input,-i", options->inputs, "safetensors file; may be given several times")->required();
    command->add_option("--out,-o", options->out, "safetensors file for loss and gradients");
    command->add_option("--reduction", options->reduction, "none, sum, mean, or weighted_mean (divides by the sum of token weights)")
        ->capture_default_str()
        ->check(CLI::IsMember({"none", "sum", "mean", "weighted_mean"}));
    command->add_option("--ignore-index", options->ignore_index, "label of tokens that do not count")->capture_default_str();
    options->session.add_to(*command);
    command->add_option("--plan", options->plan, "canonical plan text instead of the planner's choice");
    command->add_flag("--json", options->json, "one JSON object on stdout");
    command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace flce::cli
