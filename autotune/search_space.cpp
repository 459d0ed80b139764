#include "autotune/search_space.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "generator/cpu/blocks.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda_program.hpp"
#include "generator/planner.hpp"

namespace flce {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

double expected_seconds(const Spec& spec, const Device& device, const Plan& plan) {
    return estimate_forward(spec, device, plan, kTypicalTokens).seconds + estimate_backward(spec, device, plan, kTypicalTokens).seconds;
}

std::int64_t chunk_unit(const Plan& plan) {
    if (plan.path == PlanPath::cpu) return plan.cpu.block_n;
    return std::lcm(std::lcm(plan.cuda.dlogits.block_n, plan.cuda.grad_weight.block_m), plan.cuda.grad_hidden.block_k);
}

/// The chunk nearest to `rows` that the plan's tiles divide.
Plan with_chunk(const Spec& spec, Plan plan, std::int64_t rows) {
    constexpr std::int64_t kMost = 1 << 20;
    const std::int64_t unit = chunk_unit(plan);
    plan.vocab_chunk = std::min({round_up(rows, unit), round_up(spec.vocab_size, unit), kMost / unit * unit});
    return plan;
}

/// Collects the legal ones, each once, behind the plan that they are variants of.
class Variants {
public:
    Variants(const Spec& spec, const Device& device, const Plan& plan) : spec_(spec), device_(device), plans_{plan} {}

    void add(const Plan& plan) {
        if (std::ranges::find(plans_, plan) == plans_.end() && !illegal_reason(spec_, device_, plan)) plans_.push_back(plan);
    }
    [[nodiscard]] std::vector<Plan> sorted() && {
        std::ranges::stable_sort(plans_.begin() + 1, plans_.end(), {}, [&](const Plan& p) { return expected_seconds(spec_, device_, p); });
        return std::move(plans_);
    }

private:
    const Spec& spec_;
    const Device& device_;
    std::vector<Plan> plans_;
};

Coordinate rasters(const Spec& spec, const Device& device, const Plan& plan) {
    Variants variants(spec, device, plan);
    for (const int raster : {4, 8, 16}) {
        Plan other = plan;
        other.cuda.raster = raster;
        variants.add(other);
    }
    return {"raster", std::move(variants).sorted()};
}

/// The next algorithms that the library names for each product, where its version is known.
Coordinate algorithms(const Spec& spec, const Device& device, const Plan& plan) {
    constexpr int kMost = 3;
    Variants variants(spec, device, plan);
    for (int LibraryPlan::* product : {&LibraryPlan::grad_weight, &LibraryPlan::grad_hidden, &LibraryPlan::logits}) {
        for (int number = 0; number < kMost && plan.cuda.library.version > 0; ++number) {
            Plan other = plan;
            other.cuda.library.*product = number;
            variants.add(other);
        }
    }
    return {"algorithms", std::move(variants).sorted()};
}

std::vector<Coordinate> cuda_coordinates(const Spec& spec, const Device& device, const Plan& plan) {
    // Backward's products are two thirds of the time; the order of tiles is compiled into every kernel, so it comes last.
    constexpr std::array<std::pair<const char*, GemmTile CudaPlan::*>, 4> kTiles = {{{"grad_weight", &CudaPlan::grad_weight},
                                                                                     {"grad_hidden", &CudaPlan::grad_hidden},
                                                                                     {"forward", &CudaPlan::forward},
                                                                                     {"dlogits", &CudaPlan::dlogits}}};
    std::vector<Coordinate> result;
    for (const auto& [name, tile] : kTiles) {
        Variants variants(spec, device, plan);
        for (const TileCandidate& candidate : cuda_path(plan.path).tiles(spec.dtype)) {
            Plan other = plan;
            other.cuda.*tile = candidate.tile;
            variants.add(with_chunk(spec, other, plan.vocab_chunk));
        }
        result.push_back({name, std::move(variants).sorted()});
    }
    Variants lent(spec, device, plan);
    for (const GemmTile& tile : cuda_path(plan.path).lent_tiles(spec)) {
        Plan other = plan;
        other.cuda.lent = tile;
        lent.add(other);
    }
    result.push_back({"lent", std::move(lent).sorted()});
    Variants chunks(spec, device, plan);
    for (const std::int64_t rows : {4096, 8192, 16384, 32768}) chunks.add(with_chunk(spec, plan, rows));
    result.push_back({"chunk", std::move(chunks).sorted()});
    result.push_back(cuda_path(plan.path).calls_library ? algorithms(spec, device, plan) : rasters(spec, device, plan));
    return result;
}

std::vector<Coordinate> cpu_coordinates(const Spec& spec, const Device& device, const Plan& plan) {
    std::vector<Coordinate> result;
    const auto vary = [&](const char* name, const std::function<void(Variants&)>& add) {
        Variants variants(spec, device, plan);
        add(variants);
        result.push_back({name, std::move(variants).sorted()});
    };
    const auto scaled = [&](int CpuPlan::* side, int unit) {
        return [&, side, unit](Variants& variants) {
            for (const auto& [numerator, denominator] : {std::pair{1, 2}, {2, 1}, {1, 4}, {4, 1}}) {
                Plan other = plan;
                other.cpu.*side = static_cast<int>(round_up(std::int64_t{plan.cpu.*side} * numerator / denominator, unit));
                variants.add(with_chunk(spec, other, plan.vocab_chunk));
            }
        };
    };
    vary("blocks", [&](Variants& variants) {
        for (const CpuBlockCandidate& candidate : block_candidates_cpu()) {
            Plan other = plan;
            other.cpu = candidate.blocks;
            other.cpu.bf16_dot = plan.cpu.bf16_dot;
            variants.add(with_chunk(spec, other, plan.vocab_chunk));
        }
    });
    vary("block_m", scaled(&CpuPlan::block_m, plan.cpu.micro_m));
    vary("block_n", scaled(&CpuPlan::block_n, std::lcm(plan.cpu.micro_n, plan.cpu.micro_m)));
    vary("block_k", scaled(&CpuPlan::block_k, 8));
    vary("chunk", [&](Variants& variants) {
        for (const std::int64_t rows : {2048, 8192, 1 << 20}) variants.add(with_chunk(spec, plan, rows));
    });
    vary("bf16_dot", [&](Variants& variants) {
        Plan other = plan;
        other.cpu.bf16_dot = !plan.cpu.bf16_dot;
        variants.add(other);
    });
    return result;
}

/// Kernels that are compiled for a plan: a GPU's as sources, a CPU's as the parts of the plan that its code depends on.
std::vector<std::string> kernels_of(const Spec& spec, const Device& device, const Plan& plan) {
    std::vector<std::string> kernels;
    if (plan.path == PlanPath::cpu) {
        const CpuPlan& cpu = plan.cpu;
        kernels.push_back(fmt::format("{} {} {}x{}", cpu.vector_bits, cpu.bf16_dot, cpu.micro_m, cpu.micro_n));
        return kernels;
    }
    for (CudaUnit& unit : generate_cuda(spec, device, plan).units) kernels.push_back(std::move(unit.source));
    return kernels;
}

}  // namespace

std::vector<std::string> coordinate_names(DeviceKind kind) {
    if (kind == DeviceKind::cuda) return {"grad_weight", "grad_hidden", "forward", "dlogits", "lent", "chunk", "raster", "algorithms"};
    return {"blocks", "block_m", "block_n", "block_k", "chunk", "bf16_dot"};
}

std::vector<Coordinate> coordinates(const Spec& spec, const Device& device, const Plan& plan, const std::vector<std::string>& only) {
    std::vector<Coordinate> all = plan.path == PlanPath::cpu ? cpu_coordinates(spec, device, plan) : cuda_coordinates(spec, device, plan);
    std::erase_if(
        all, [&](const Coordinate& c) { return c.plans.size() < 2 || (!only.empty() && std::ranges::find(only, c.name) == only.end()); });
    return all;
}

std::vector<Plan> all_combinations(const Spec& spec, const Device& device, const Plan& plan, const std::vector<std::string>& only,
                                   std::size_t most) {
    // Breadth first through single changes: every legal combination is reached, near ones before far ones.
    std::vector<Plan> reached{plan};
    std::set<std::string> known{plan.text()};
    for (std::size_t i = 0; i < reached.size() && reached.size() < most; ++i) {
        const Plan from = reached[i];
        for (const Coordinate& coordinate : coordinates(spec, device, from, only)) {
            for (const Plan& next : coordinate.plans) {
                if (reached.size() < most && known.insert(next.text()).second) reached.push_back(next);
            }
        }
    }
    std::ranges::stable_sort(reached.begin() + 1, reached.end(), {}, [&](const Plan& p) { return expected_seconds(spec, device, p); });
    return reached;
}

std::vector<Plan> seed_plans(const Spec& spec, const Device& device, const PlanRequest& request, std::size_t count, int library_version) {
    std::map<std::pair<PlanPath, Strategy>, std::size_t> taken;
    std::vector<Plan> seeds;
    const auto add = [&](Plan plan) {
        const bool calls_library = plan.path != PlanPath::cpu && cuda_path(plan.path).calls_library;
        if (calls_library && library_version == 0 && !seeds.empty()) return;
        if (calls_library) plan.cuda.library.version = library_version;
        if (std::ranges::find(seeds, plan) != seeds.end()) return;
        const bool favourite = seeds.empty() || (plan.path == seeds.front().path && plan.strategy == seeds.front().strategy);
        if (taken[{plan.path, plan.strategy}]++ < (favourite ? count : 1)) seeds.push_back(plan);
    };
    std::ranges::for_each(candidate_plans(spec, device, request), add);
    // Paths that the planner leaves out here may be the quickest nonetheless.
    for (const CudaPath* path : cuda_paths()) {
        if (device.kind == DeviceKind::cuda) std::ranges::for_each(path_plans(spec, device, path->id, request), add);
    }
    return seeds;
}

std::vector<Plan> covering_plans(const Spec& spec, const Device& device, const Plan& plan, const std::vector<std::string>& only) {
    std::vector<Plan> covering;
    std::set<std::string> kernels;
    std::set<std::string> known;
    const auto add = [&](const Plan& next) {
        if (!known.insert(next.text()).second) return;
        bool brings_new = false;
        for (std::string& kernel : kernels_of(spec, device, next)) brings_new = kernels.insert(std::move(kernel)).second || brings_new;
        if (brings_new) covering.push_back(next);
    };
    add(plan);
    for (std::size_t i = 0; i < covering.size(); ++i) {
        const Plan from = covering[i];
        for (const Coordinate& coordinate : coordinates(spec, device, from, only)) std::ranges::for_each(coordinate.plans, add);
    }
    return covering;
}

PlanOrder::PlanOrder(const Spec& spec, const Device& device, const PlanRequest& request)
    : candidates_(candidate_plans(spec, device, request)) {}

int PlanOrder::rank(const Plan& plan) const {
    constexpr int kNotListed = 10'000;
    const auto found = std::ranges::find(candidates_, plan);
    return found == candidates_.end() ? kNotListed : static_cast<int>(found - candidates_.begin());
}

}  // namespace flce
