#include "flce/device.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>

#include "flce/error.hpp"
#include "generator/device_tables.hpp"
#include "generator/json_object.hpp"
#include "generator/nearest_name.hpp"

namespace flce {
namespace {

constexpr std::int64_t kKiB = 1024;
constexpr std::int64_t kMiB = 1024 * kKiB;
constexpr std::int64_t kGiB = 1024 * kMiB;

std::string lower(std::string_view text) {
    std::string result(text);
    std::ranges::transform(result, result.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return result;
}

/// The words of a product name that tell one product from another: "NVIDIA GeForce RTX 4090" is rtx, 4090.
std::vector<std::string> words(std::string_view name) {
    std::vector<std::string> result;
    std::string word;
    for (const char c : lower(name) + " ") {
        if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
            word += c;
        } else if (!word.empty()) {
            if (word != "nvidia" && word != "geforce" && word != "tesla" && word != "dgx") result.push_back(word);
            word.clear();
        }
    }
    return result;
}

/// Number of characters of `name` that the whole of `product` matches, word by word but blind to where words are split ("rtx4090"); 0 where
/// it does not match. Words after the match are memory size, form factor and the like.
std::size_t match_length(const std::vector<std::string>& name, const std::vector<std::string>& product) {
    std::string wanted;
    for (const std::string& word : product) wanted += word;
    std::string found;
    for (const std::string& word : name) {
        found += word;
        if (found == wanted) return wanted.size();
    }
    return 0;
}

const GpuProduct* find_product(std::string_view name) {
    const std::vector<std::string> asked = words(name);
    const GpuProduct* best = nullptr;
    std::size_t best_length = 0;
    for (const GpuProduct& product : kGpuProducts) {
        const std::size_t length = match_length(asked, words(product.name));
        if (length > best_length) {
            best = &product;
            best_length = length;
        }
    }
    return best;
}

Device gpu_device(std::string_view name, const GpuArch& arch, const GpuProduct& product) {
    Device device;
    device.kind = DeviceKind::cuda;
    device.name = name;
    device.gpu = {.arch = std::string(arch.target),
                  .compute_capability = arch.compute_capability,
                  .sm_count = product.sm_count,
                  .smem_per_block_bytes = arch.smem_per_block_kib * kKiB,
                  .smem_per_sm_bytes = arch.smem_per_sm_kib * kKiB,
                  .l2_bytes = product.l2_mib * kMiB,
                  .memory_bytes = product.memory_gib * kGiB,
                  .bandwidth_bytes_per_s = product.bandwidth_gb_per_s * 1e9,
                  .bf16_flops = product.bf16_tflops * 1e12};
    return device;
}

Device cpu_device(const CpuModel& model) {
    Device device;
    device.kind = DeviceKind::cpu;
    device.name = model.name;
    device.cpu = {.triple = linux_triple(model.arch),
                  .cpu = std::string(model.cpu),
                  .features = std::string(model.features),
                  .vector_bits = model.vector_bits,
                  .fma = model.fma,
                  .bf16_dot = model.bf16_dot,
                  .cores = model.cores,
                  .l1d_bytes = model.l1d_kib * kKiB,
                  .l2_bytes = model.l2_kib * kKiB,
                  .l3_bytes = model.l3_mib * kMiB};
    return device;
}

/// The known name that `name` is most like, a product's with or without "NVIDIA GeForce"; empty where it is like none.
std::string nearest_device(std::string_view name) {
    const std::vector<std::string> known = known_device_names();
    std::vector<std::string> spellings;
    for (const std::string& device : known) {
        std::string spelling;
        for (const std::string& word : words(device)) spelling += word;
        spellings.push_back(spelling);
    }
    const std::string nearest = nearest_name(name, spellings);
    if (nearest.empty()) return nearest_name(name, known);
    return known[static_cast<std::size_t>(std::ranges::find(spellings, nearest) - spellings.begin())];
}

std::string unknown_device(std::string_view name) {
    const std::string key = lower(name);
    if (key == "gpu" || key == "nvidia" || key == "hip" || key == "rocm") {
        return fmt::format("device '{}' is not known; a GPU of this machine is cuda or cuda:0, others go by name, like h100 or sm_90a",
                           name);
    }
    if (int number = 0;
        key.starts_with("sm_") && std::from_chars(key.data() + 3, key.data() + key.size(), number).ec == std::errc() && number < 80) {
        return fmt::format("device '{}' is too old: GPUs from sm_80 on are supported (A100, RTX 30 and newer)", name);
    }
    if (const std::string nearest = nearest_device(name); !nearest.empty()) {
        return fmt::format("device '{}' is not known; did you mean '{}'?", name, nearest);
    }
    std::string all;
    for (const std::string& known : known_device_names()) all += (all.empty() ? "" : ", ") + known;
    return fmt::format("device '{}' is not known; known names are {}", name, all);
}

}  // namespace

std::string linux_triple(std::string_view arch) { return fmt::format("{}-unknown-linux-gnu", arch); }

Device describe_device(std::string_view name) {
    const std::string key = lower(name);
    if (const auto* arch = std::ranges::find(kGpuArchs, key, &GpuArch::name); arch != kGpuArchs.end()) {
        return gpu_device(arch->target, *arch, *std::ranges::find(kGpuProducts, arch->product, &GpuProduct::name));
    }
    if (const auto* model = std::ranges::find(kCpuModels, key, &CpuModel::name); model != kCpuModels.end()) return cpu_device(*model);
    if (const GpuProduct* product = find_product(name); product != nullptr) {
        return gpu_device(product->name, *std::ranges::find(kGpuArchs, product->arch, &GpuArch::name), *product);
    }
    throw EnvironmentError(unknown_device(name));
}

std::vector<std::string> known_device_names() {
    std::vector<std::string> names;
    for (const GpuArch& arch : kGpuArchs) names.emplace_back(arch.name);
    for (const GpuProduct& product : kGpuProducts) names.emplace_back(product.name);
    for (const CpuModel& model : kCpuModels) names.emplace_back(model.name);
    return names;
}

namespace {

/// Visits every key of the JSON form with the field it stands for.
template <class DeviceType, class Visit>
void visit_fields(DeviceType& device, const Visit& visit) {
    visit("name", device.name);
    if (device.kind == DeviceKind::cuda) {
        auto& gpu = device.gpu;
        visit("arch", gpu.arch);
        visit("compute_capability", gpu.compute_capability);
        visit("sm_count", gpu.sm_count);
        visit("smem_per_block_bytes", gpu.smem_per_block_bytes);
        visit("smem_per_sm_bytes", gpu.smem_per_sm_bytes);
        visit("l2_bytes", gpu.l2_bytes);
        visit("memory_bytes", gpu.memory_bytes);
        visit("bandwidth_bytes_per_s", gpu.bandwidth_bytes_per_s);
        visit("bf16_flops", gpu.bf16_flops);
        visit("measured_mma_flops", gpu.measured.mma_flops);
        visit("measured_library_flops", gpu.measured.library_flops);
        visit("measured_copy_bytes_per_s", gpu.measured.copy_bytes_per_s);
        visit("measured_l2_bytes_per_s", gpu.measured.l2_bytes_per_s);
        visit("measured_launch_seconds", gpu.measured.launch_seconds);
    } else {
        auto& cpu = device.cpu;
        visit("triple", cpu.triple);
        visit("cpu", cpu.cpu);
        visit("features", cpu.features);
        visit("vector_bits", cpu.vector_bits);
        visit("fma", cpu.fma);
        visit("bf16_dot", cpu.bf16_dot);
        visit("cores", cpu.cores);
        visit("l1d_bytes", cpu.l1d_bytes);
        visit("l2_bytes", cpu.l2_bytes);
        visit("l3_bytes", cpu.l3_bytes);
    }
}

}  // namespace

std::string Device::json() const {
    nlohmann::ordered_json object;
    object["kind"] = kind == DeviceKind::cuda ? "cuda" : "cpu";
    visit_fields(*this, [&](const char* key, const auto& field) { object[key] = field; });
    return object.dump();
}

Device parse_device_json(std::string_view text) {
    const auto object = parse_json_object<EnvironmentError>(text, "device");
    Device device;
    std::size_t known = 1;
    auto read = [&](const char* key, auto& field) {
        try {
            object.at(key).get_to(field);
        } catch (const nlohmann::json::exception& error) {
            throw EnvironmentError(fmt::format("device: key '{}': {}", key, error.what()));
        }
        ++known;
    };
    std::string kind;
    read("kind", kind);
    if (kind != "cuda" && kind != "cpu") throw EnvironmentError(fmt::format("device: kind = {}: must be cuda or cpu", kind));
    device.kind = kind == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
    visit_fields(device, read);
    if (object.size() + 1 != known) throw EnvironmentError("device: has keys beyond those that Device::json writes");
    return device;
}

}  // namespace flce
