#include "generator/planner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>

#include "flce/error.hpp"
#include "flce/plan.hpp"
#include "generator/cpu/blocks.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/heads_kernels.hpp"
#include "generator/cuda/common/kernel_role.hpp"
#include "templates/common/divergence_math.cuh"

namespace flce {
namespace {

/// Numbers of tokens that candidates are compared at: plans serve every N, and at thousands of tokens the differences matter most. Two, as
/// whole waves of tiles may make one of them the favourite of a tile; these are the ones that records are measured at.
constexpr std::array<std::int64_t, 2> kReferenceTokens = {kTypicalTokens, 2 * kTypicalTokens};

constexpr std::int64_t kListedTokenBytes = 8;  // bytes of an entry in a list of tokens

/// Bytes of a workspace that a token takes beside scratch, up to kTokensInScratch tokens.
std::int64_t bytes_of_token(const Spec& spec) {
    constexpr std::int64_t kPlace = 21;  // dz, twice the place and its class, and its part of a round's counts
    constexpr std::int64_t kRow = 32;    // coefficients, lse, label, temperature and weight
    // Codes of hidden both ways, and a row's part of a least chunk.
    constexpr std::int64_t kFp8Row = 1024;
    if (is_fp8(spec)) return 6 * spec.hidden_size + kFp8Row;
    return 4 * spec.hidden_size + (spec.support ? kPlace * spec.teacher_top_k + kRow : 0);
}

/// Device on which candidates are rated. All products of an architecture get one order, so that kernels compiled for the architecture's
/// name are the ones that each product asks for. A tuner with rates of the very GPU has an order of its own.
Device rating_device(const Device& device) {
    if (device.kind == DeviceKind::cpu || device.gpu.measured.mma_flops > 0) return device;
    try {
        return describe_device(device.gpu.arch);
    } catch (const EnvironmentError&) {  // newer than the tables
        return device;
    }
}

/// Time for a token, on average, where everything is retained that the plan can retain.
double expected_seconds(const Spec& spec, const Device& device, const Plan& plan) {
    double sum = 0;
    for (const std::int64_t tokens : kReferenceTokens) {
        const double seconds = estimate_forward(spec, device, plan, tokens).seconds + estimate_backward(spec, device, plan, tokens).seconds;
        sum += seconds / static_cast<double>(tokens);
    }
    return sum / static_cast<double>(kReferenceTokens.size());
}

struct Search {
    std::vector<Plan> plans;              ///< legal, best first
    std::map<std::string, int> refusals;  ///< reason → how many candidates
};

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

/// Chunk of at most `most` vocabulary rows, and no more than there are, in whole units.
std::int64_t chunk_of(const Spec& spec, std::int64_t most, std::int64_t unit) {
    return std::min(round_up(most, unit), round_up(spec.vocab_size, unit));
}

constexpr GemmTile CudaPlan::* kRoleTiles[] = {&CudaPlan::forward, &CudaPlan::dlogits, &CudaPlan::grad_hidden, &CudaPlan::grad_weight};
constexpr const char* kRoleNames[] = {"forward", "forward", "dlogits", "grad_hidden", "grad_weight"};

Plan with_chunk(const Spec& spec, Plan plan, std::int64_t most) {
    const int unit = std::lcm(std::lcm(plan.cuda.dlogits.block_n, plan.cuda.grad_weight.block_m), plan.cuda.grad_hidden.block_k);
    plan.vocab_chunk = chunk_of(spec, most, unit);
    return plan;
}

/// Tiles of the path's table, of at most `widest` rows and columns, that `role` can run on the device, in the table's order.
std::vector<GemmTile> legal_tiles(const Spec& spec, const Device& device, const CudaPath& path, GemmRole role, int widest, Search& search) {
    std::vector<GemmTile> tiles;
    for (const TileCandidate& candidate : path.tiles(spec.dtype)) {
        if (!path.calls_library && std::max(candidate.tile.block_m, candidate.tile.block_n) > widest) continue;
        if (auto reason = path.tile_problem(spec, device, role, candidate.tile)) {
            if (path.calls_library) continue;  // some are for other roles
            const GemmTile& t = candidate.tile;
            const TileWarps warps = path.warps(t);
            ++search.refusals[fmt::format("{}={}x{}x{}x{}/{}x{}: {}", kRoleNames[static_cast<std::size_t>(role)], t.block_m, t.block_n,
                                          t.block_k, t.stages, warps.m, warps.n, *reason)];
        } else {
            tiles.push_back(candidate.tile);
        }
    }
    return tiles;
}

/// Leaves those that are `good`, where there are any.
void prefer(std::vector<GemmTile>& tiles, const std::function<bool(const GemmTile&)>& good) {
    if (std::ranges::any_of(tiles, good)) std::erase_if(tiles, std::not_fn(good));
}

/// Leaves the tiles of each role that scratch has room for, where the other roles have their last tiles; the last ones in any case.
void leave_what_fits(const Spec& spec, const Device& device, Plan plan, std::vector<std::vector<GemmTile>>& tiles) {
    for (std::size_t role = 0; role < tiles.size(); ++role) {
        const GemmTile last = tiles[role].back();
        std::erase_if(tiles[role], [&](const GemmTile& tile) {
            for (std::size_t other = 0; other < tiles.size(); ++other) plan.cuda.*kRoleTiles[other] = tiles[other].back();
            plan.cuda.*kRoleTiles[role] = tile;
            return tile != last && illegal_reason(spec, device, with_chunk(spec, plan, 1)).has_value();
        });
    }
}

/// The four GEMMs do not influence each other's time, so a path's best plan has each role's best tile; the others differ from it in one
/// place.
std::vector<Plan> path_candidates(const Spec& spec, const Device& device, const CudaPath& path, Strategy strategy,
                                  const PlanRequest& request, int widest, Search& search) {
    constexpr std::int64_t kChunks[] = {16384, 8192, 32768};
    if (const auto reason = path.problem(spec, device, strategy)) {
        ++search.refusals[*reason];
        return {};
    }
    Plan best{.path = path.id, .strategy = strategy, .scratch_bytes = request.scratch_bytes};
    const std::span<const GemmTile> lent = path.lent_tiles(spec);
    if (!lent.empty()) best.cuda.lent = lent.front();
    std::vector<std::vector<GemmTile>> tiles;
    for (const GemmRole role : {forward_role(best), GemmRole::dlogits, GemmRole::grad_hidden, GemmRole::grad_weight}) {
        tiles.push_back(legal_tiles(spec, device, path, role, widest, search));
        if (strategy == Strategy::retain && role == GemmRole::grad_weight && own_memory(spec, device, request) == OwnMemory::none) {
            // A tile with which grad_weight's memory may be lent is worth more than the differences between tiles. Such a tile waits for
            // the readers of exponentials that it writes over; by turns the other warpgroup multiplies meanwhile, as it does while old
            // values come that are added to.
            prefer(tiles.back(), [&](const GemmTile& tile) { return lends_grad_weight(spec, tile, path.grad_weight_cluster); });
            prefer(tiles.back(), [](const GemmTile& tile) { return tile.schedule == TileSchedule::by_turns; });
        }
        if (tiles.back().empty()) return {};
    }
    if (path.calls_library) leave_what_fits(spec, device, best, tiles);
    const Device rating = rating_device(device);
    for (std::size_t role = 0; role < 4; ++role) best.cuda.*kRoleTiles[role] = tiles[role].front();
    for (std::size_t role = 0; role < 4; ++role) {
        auto cost_of = [&](const GemmTile& tile) {
            Plan plan = best;
            plan.cuda.*kRoleTiles[role] = tile;
            return expected_seconds(spec, rating, with_chunk(spec, plan, kChunks[0]));
        };
        best.cuda.*kRoleTiles[role] = *std::ranges::min_element(tiles[role], {}, cost_of);
    }
    if (path.gathers) return {with_chunk(spec, best, kChunks[0])};  // tiles and chunks are nothing to it
    std::vector<Plan> plans;
    for (const std::int64_t chunk : kChunks) plans.push_back(with_chunk(spec, best, chunk));
    for (std::size_t role = 0; role < 4; ++role) {
        for (const GemmTile& tile : tiles[role]) {
            Plan plan = best;
            plan.cuda.*kRoleTiles[role] = tile;
            plans.push_back(with_chunk(spec, plan, kChunks[0]));
        }
    }
    for (const GemmTile& tile : lent) {
        Plan plan = with_chunk(spec, best, kChunks[0]);
        plan.cuda.lent = tile;
        plans.push_back(plan);
    }
    for (const int raster : {4, 16}) {
        if (path.calls_library) break;  // the order of tiles is the library's
        Plan plan = with_chunk(spec, best, kChunks[0]);
        plan.cuda.raster = raster;
        plans.push_back(plan);
    }
    return plans;
}

/// Candidates of the path for all and of the device's own, or of `only`.
std::vector<Plan> cuda_candidates(const Spec& spec, const Device& device, const PlanRequest& request, const CudaPath* only, int widest,
                                  Search& search) {
    std::vector<Plan> plans;
    for (const CudaPath* path : cuda_paths()) {
        if (only != nullptr ? path != only : !path->is_considered(spec, device)) continue;
        for (const Strategy strategy : path->strategies) {
            std::ranges::copy(path_candidates(spec, device, *path, strategy, request, widest, search), std::back_inserter(plans));
        }
    }
    return plans;
}

/// Depth up to which a dot product of bf16 pairs saves little, and costs grad_hidden accuracy: dz is rounded to bf16 for it.
constexpr std::int64_t kShallow = 128;

/// The scratch decides how much of the chunk exists at once, so the widest comes first.
std::vector<Plan> cpu_candidates(const Spec& spec, const Device& device, const PlanRequest& request) {
    std::vector<Plan> plans;
    for (const auto& [blocks, efficiency] : block_candidates_cpu()) {
        if (blocks.vector_bits != device.cpu.vector_bits) continue;
        for (const bool bf16_dot : {true, false}) {
            if (bf16_dot && !(device.cpu.bf16_dot && spec.dtype == DType::bf16 && spec.hidden_size > kShallow)) continue;
            for (const std::int64_t chunk : {1 << 20, 8192, 2048}) {
                Plan plan{.path = PlanPath::cpu, .scratch_bytes = request.scratch_bytes, .cpu = blocks};
                plan.cpu.bf16_dot = bf16_dot;
                plan.vocab_chunk =
                    std::min<std::int64_t>(round_up(spec.vocab_size, blocks.block_n), chunk / blocks.block_n * blocks.block_n);
                plans.push_back(plan);
            }
        }
    }
    return plans;
}

/// Sorts out illegal candidates and puts the rest in order.
void rate(const Spec& spec, const Device& device, const std::vector<Plan>& candidates, Search& search) {
    struct Rated {
        double seconds;
        Plan plan;
    };
    const Device rating = rating_device(device);
    std::vector<Rated> rated;
    for (const Plan& plan : candidates) {
        if (std::ranges::find(rated, plan, &Rated::plan) != rated.end()) continue;
        if (auto reason = illegal_reason(spec, device, plan)) {
            ++search.refusals[*reason];
            continue;
        }
        rated.push_back({expected_seconds(spec, rating, plan), plan});
    }
    std::ranges::stable_sort(rated, {}, &Rated::seconds);
    for (const Rated& r : rated) search.plans.push_back(r.plan);
}

Search search_plans(const Spec& spec, const Device& device, const PlanRequest& request, const CudaPath* only = nullptr) {
    Search search;
    if (device.kind == DeviceKind::cpu) {
        rate(spec, device, cpu_candidates(spec, device, request), search);
        return search;
    }
    // Wide tiles need wide chunks, for which a very large hidden_size or little scratch leaves no room. A device's own path with narrow
    // ones is quicker than the path for all with wide ones.
    const CudaPath* own_path = only != nullptr ? only : own_cuda_path(spec, device);
    std::vector<Plan> candidates;
    for (const int widest : {256, 128, 64}) {
        std::ranges::copy(cuda_candidates(spec, device, request, only, widest, search), std::back_inserter(candidates));
        search.plans.clear();
        rate(spec, device, candidates, search);
        const auto on_own_path = [&](const Plan& plan) { return plan.path == own_path->id; };
        if (own_path != nullptr ? std::ranges::any_of(search.plans, on_own_path) : !search.plans.empty()) break;
    }
    return search;
}

/// The plan's path, and why it is not the GPU's own.
std::string path_line(const Spec& spec, const Device& device, const CudaPath& path, const PlanRequest& request) {
    const std::string name = fmt::format("{}: kernels of {}", path.name, path.instruction);
    if (path.is_own_of(device)) return fmt::format("{}, made for {}", name, device.gpu.arch);
    for (const CudaPath* own : cuda_paths()) {
        if (!own->is_own_of(device) || own->eight_bits != is_fp8(spec)) continue;
        const Reason problem = own->problem(spec, device, Strategy::recompute);
        std::string other = problem.value_or(fmt::format("{} is made for {}", own->name, device.gpu.arch));
        if (!problem && !own->is_preferred(spec, device)) {
            other += fmt::format(", for layers of {} hidden dimensions and more", own->least_hidden_size);
        } else if (!problem && path_plans(spec, device, own->id, request).empty()) {
            other += fmt::format(", and has no plan in {} bytes of scratch", request.scratch_bytes);
        }
        return fmt::format("{}, for {}; {}", name, path.runs_on, other);
    }
    return fmt::format("{}, for {}; none are made for {} alone", name, path.runs_on, device.gpu.arch);
}

/// The cost model's numbers of a GPU, each said to be measured, published or assumed.
std::string gpu_line(const Device& device, const CudaPath& path) {
    const GpuProperties& gpu = device.gpu;
    const std::string rate =
        fmt::format("{:.0f} % of the dense rate of {:.0f} TFLOP/s", 100 * path.rate_share(device), 1e-12 * gpu.bf16_flops);
    const std::string line = fmt::format("{}: {} SMs, {} KiB of shared memory a block, {} MiB of L2, {:.0f} GB/s; ", gpu.arch, gpu.sm_count,
                                         gpu.smem_per_block_bytes >> 10, gpu.l2_bytes >> 20, 1e-9 * gpu.bandwidth_bytes_per_s);
    if (path.id == PlanPath::cuda_gather) return line + "modelled: rows of the weight are read, and gradients written, at that bandwidth";
    if (gpu.measured.mma_flops > 0) {
        return line +
               fmt::format("modelled: kernels of {} are taken to keep up {}, after rates measured on this GPU", path.instruction, rate);
    }
    const bool is_measured_path = !path.eight_bits || path.is_own_of(device);
    if (has_measured_rates(device) && is_measured_path) {
        return line + fmt::format("modelled: kernels of {} keep up {}, as measured on H100 and H200", path.instruction, rate);
    }
    return line + fmt::format(
                      "guessed: kernels of {} are assumed to keep up {}; nobody has measured {} on {}, so times by the cost model "
                      "are guesses here",
                      path.instruction, rate, is_measured_path ? "flce" : path.name, gpu.arch);
}

/// Whether a kernel of the plan's makes all of a chunk's gradients.
bool joins_chunks(const Spec& spec, const Device& device, const Plan& plan) {
    const std::string joined = fmt::format("flce_{}", to_string(KernelRole::backward_chunks));
    const std::vector<KernelEntry> kernels = generate_cuda(spec, device, plan).kernels;
    return std::ranges::find(kernels, joined, &KernelEntry::name) != kernels.end();
}

std::string refusals_text(const Search& search) {
    std::string text;
    for (const auto& [reason, count] : search.refusals) text += (text.empty() ? "" : "; ") + reason;
    return text;
}

}  // namespace

bool has_measured_rates(const Device& device) noexcept {
    constexpr int kHopper = 90;
    return device.kind == DeviceKind::cpu || device.gpu.compute_capability == kHopper || device.gpu.measured.mma_flops > 0;
}

std::optional<std::int64_t> workspace_of_tokens(const Spec& spec, std::int64_t num_tokens) noexcept {
    if (num_tokens < 0) return std::nullopt;
    if (spec.dtype == DType::fp32 && !spec.support) return 0;
    std::int64_t bytes = 0;
    std::int64_t list_bytes = 0;
    const std::int64_t beyond = std::max<std::int64_t>(num_tokens - kTokensInScratch, 0);
    if (__builtin_mul_overflow(bytes_of_token(spec), num_tokens, &bytes)) return std::nullopt;
    if (__builtin_mul_overflow(kListedTokenBytes, beyond, &list_bytes)) return std::nullopt;
    if (__builtin_add_overflow(bytes, list_bytes, &bytes)) return std::nullopt;
    return bytes;
}

std::int64_t tokens_with_workspace(const Spec& spec, std::int64_t bytes) noexcept {
    const std::int64_t of_token = bytes_of_token(spec);
    const std::int64_t tokens = bytes / of_token;
    if (tokens <= kTokensInScratch) return tokens;
    return kTokensInScratch + (bytes - of_token * kTokensInScratch) / (of_token + kListedTokenBytes);
}

bool may_lend_grad_weight(const Spec& spec) noexcept {
    return spec.grad_weight_mode == GradMode::write && spec.layout == WeightLayout::vocab_major && !is_quantized(spec) && !is_fp8(spec);
}

double lendable_part(const Spec& spec, std::int64_t num_tokens) noexcept {
    if (!may_lend_grad_weight(spec) || num_tokens <= 0) return 0;
    const double bytes = static_cast<double>(spec.hidden_size) * static_cast<double>(element_bytes(spec.grad_weight_dtype));
    return std::min(1.0, bytes / (static_cast<double>(num_tokens) * static_cast<double>(element_bytes(spec.dtype))));
}

namespace {

/// Part of exponentials in 8 bits, both ways, that the gradient's memory holds: its rows may take the place of one of both.
double lendable_part_fp8(const Spec& spec, std::int64_t num_tokens) noexcept {
    const bool writes = spec.grad_weight_mode == GradMode::write && !is_quantized(spec);
    if (!writes || spec.layout != WeightLayout::vocab_major || num_tokens <= 0) return 0;
    const double row_bytes = static_cast<double>(spec.hidden_size) * static_cast<double>(element_bytes(spec.grad_weight_dtype));
    const auto tokens = static_cast<double>(num_tokens);
    return row_bytes / (std::max(tokens, row_bytes) + tokens);
}

}  // namespace

double lendable_part(const Spec& spec, const Plan& plan, std::int64_t num_tokens) noexcept {
    if (is_fp8(spec)) return lendable_part_fp8(spec, num_tokens);
    if (!has_teacher_head(spec)) return lendable_part(spec, num_tokens);
    if (!has_lent_tile(plan) || is_shard(spec) || num_tokens <= 0) return 0;
    const auto tokens = static_cast<double>(num_tokens);
    const double gradient_row = static_cast<double>(spec.hidden_size) * static_cast<double>(element_bytes(spec.grad_weight_dtype));
    const double both_logits = 4 * tokens;
    const GemmTile& tile = plan.cuda.lent;
    const bool mixture = divergence_form(spec.divergence_beta) == kMixture;
    constexpr std::int64_t kNarrowest = 512;  // columns of sums in scratch, which the last retained ones have
    const std::int64_t in_scratch = std::int64_t{plan.cuda.forward.block_m} * plan.cuda.forward.block_n;
    if (!mixture && in_scratch < tile.block_m * kNarrowest) return 0;
    const bool beside = mixture || num_tokens > tile.block_m;  // a second walk needs both
    const double of_tile =
        beside ? 8 * std::min(tokens, static_cast<double>(tile.block_m)) * tile.block_n / static_cast<double>(spec.vocab_size) : 0;
    return std::clamp((gradient_row - of_tile) / std::max(both_logits, gradient_row), 0.0, 1.0);
}

std::int64_t unlimited_own_bytes(const Spec& spec) noexcept {
    if (!is_shard(spec)) return 0;
    const std::int64_t whole = whole_vocab_size(spec) * spec.hidden_size * element_bytes(spec.grad_weight_dtype);
    return whole + whole / 32;
}

OwnMemory own_memory(const Spec& spec, const Device& device, const PlanRequest& request) {
    if (device.kind != DeviceKind::cuda) return OwnMemory::none;
    const auto tokens = static_cast<double>(token_bucket(request.num_tokens));
    const auto element = static_cast<double>(element_bytes(spec.dtype));
    const auto hidden_size = static_cast<double>(spec.hidden_size);
    constexpr double kOfRow = 1536;  // references and scales, and the end of the last block of exponentials
    constexpr double kLeastPart = 0.02;
    if (tokens * hidden_size * static_cast<double>(spec.vocab_size) < kLeastRetainedWork) return OwnMemory::none;
    const double exponentials = tokens * (static_cast<double>(spec.vocab_size) * element + kOfRow);
    const double workspace = static_cast<double>(request.scratch_bytes) + 4 * tokens * hidden_size;
    const double room = request.workspace_limit_bytes > 0 ? static_cast<double>(request.workspace_limit_bytes) - workspace
                                                          : static_cast<double>(unlimited_own_bytes(spec));
    if (room < kLeastPart * exponentials) return OwnMemory::none;
    if (std::ranges::none_of(cuda_paths(), [&](const CudaPath* path) { return path->can_retain(spec, device); })) return OwnMemory::none;
    if (room < exponentials) return may_lend_grad_weight(spec) ? OwnMemory::none : OwnMemory::part;
    return is_shard(spec) || lendable_part(spec, token_bucket(request.num_tokens)) < 1 ? OwnMemory::all : OwnMemory::none;
}

bool retains_apart(const Spec& spec, const Device& device, const PlanRequest& request) {
    return own_memory(spec, device, request) == OwnMemory::all;
}

std::optional<std::int64_t> smallest_scratch_bytes(const Spec& any_spec, const Device& device) {
    const Spec spec = any_spec.normalized();
    constexpr std::int64_t kMost = std::int64_t{1} << 40;
    const std::vector<Plan> plans = spec.batch_invariant ? search_plans(spec, device, {}).plans : std::vector<Plan>{};
    const auto enough = [&](std::int64_t bytes) {
        if (!spec.batch_invariant) return !search_plans(spec, device, {.scratch_bytes = bytes}).plans.empty();
        if (plans.empty()) return false;
        Plan plan = plans.front();  // plan of every call, whatever its scratch
        plan.scratch_bytes = bytes;
        return !illegal_reason(spec, device, plan);
    };
    if (!enough(kMost)) return std::nullopt;
    std::int64_t low = 1;
    std::int64_t high = kMost;
    while (low < high) {  // a plan that is legal stays so with more
        const std::int64_t middle = low + (high - low) / 2;
        if (enough(middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

std::vector<Plan> candidate_plans(const Spec& any_spec, const Device& device, const PlanRequest& request) {
    const Spec spec = any_spec.normalized();
    Search search = search_plans(spec, device, request);
    if (search.plans.empty()) {
        if (const auto least = smallest_scratch_bytes(spec, device); least && request.scratch_bytes < *least) {
            throw PlanError(fmt::format("scratch={} bytes is too little for {} on {}: the smallest that works is {}", request.scratch_bytes,
                                        spec.text(), device.name, *least));
        }
        throw PlanError(fmt::format("no plan for {} on {} with {} bytes of scratch: {}", spec.text(), device.name, request.scratch_bytes,
                                    refusals_text(search)));
    }
    return std::move(search.plans);
}

std::vector<Plan> path_plans(const Spec& spec, const Device& device, PlanPath path, const PlanRequest& request) {
    if ((path == PlanPath::cpu) != (device.kind == DeviceKind::cpu)) return {};
    return search_plans(spec.normalized(), device, request, path == PlanPath::cpu ? nullptr : &cuda_path(path)).plans;
}

Plan choose_plan(const Spec& spec, const Device& device, const PlanRequest& request) {
    return candidate_plans(spec, device, request).front();
}

std::vector<std::string> plan_reasons(const Spec& any_spec, const Device& device, const Plan& plan, const PlanRequest& request) {
    const Spec spec = any_spec.normalized();
    const Search search = search_plans(spec, device, request);
    std::vector<std::string> lines;
    if (device.kind == DeviceKind::cuda) {
        lines.push_back(path_line(spec, device, cuda_path(plan.path), request));
        lines.push_back(gpu_line(device, cuda_path(plan.path)));
    } else {
        lines.push_back(fmt::format("{}: vectors of {} bits{}{}, {} cores", device.cpu.cpu, device.cpu.vector_bits,
                                    device.cpu.fma ? ", FMA" : "", device.cpu.bf16_dot ? ", bf16 dot products" : "", device.cpu.cores));
    }
    const auto rank = std::ranges::find(search.plans, plan) - search.plans.begin();
    if (rank == std::ssize(search.plans)) {
        lines.push_back(
            fmt::format("plan that the planner does not consider unasked; it has {} candidates of its own", search.plans.size()));
    } else {
        lines.push_back(fmt::format("number {} of {} legal candidates by expected time at {} and {} tokens", rank + 1, search.plans.size(),
                                    kReferenceTokens.front(), kReferenceTokens.back()));
    }
    if (plan.path != PlanPath::cuda_gather) {
        lines.push_back(fmt::format("chunk of at most {} vocabulary rows; scratch of {} bytes decides how many at a time", plan.vocab_chunk,
                                    plan.scratch_bytes));
    }
    if (device.kind == DeviceKind::cuda && has_heads_kernels(spec, device)) {
        lines.push_back(fmt::format(
            "one launch makes both heads' logits of more than {} tokens where scratch has room for it, else the library", kFewHeadsRows));
    }
    if (has_lent_tile(plan)) {
        lines.push_back(
            fmt::format("grad_weight's memory has both heads' logits of {} tokens and {} classes at a time while it is free: in "
                        "backward, and in a forward to which it is lent",
                        plan.cuda.lent.block_m, plan.cuda.lent.block_n));
    }
    if (plan.strategy == Strategy::retain && retains_apart(spec, device, request)) {
        lines.emplace_back(
            "every exponential has memory of its own beside grad_weight, whose tile need not be one with which that memory is lent");
    }
    if (rounds_weight(spec)) {
        const std::string_view form = is_quantized(spec) ? to_string(spec.weight_format) : to_string(weight_dtype(spec));
        lines.push_back(fmt::format("the weight is {} and {}rounded to {} as it is read{}", form,
                                    is_quantized(spec) ? "dequantised and " : "", to_string(spec.dtype),
                                    device.kind == DeviceKind::cuda ? ", a stretch of the vocabulary at a time, into scratch" : ""));
    }
    if (device.kind == DeviceKind::cuda && joins_chunks(spec, device, plan)) {
        lines.emplace_back(
            "chunks that are computed again are one launch, where a call wants both gradients and has more than a few tokens");
    }
    for (const auto& [reason, count] : search.refusals) lines.push_back("refused " + reason);
    return lines;
}

}  // namespace flce
