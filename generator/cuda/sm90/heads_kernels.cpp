#include "generator/cuda/common/heads_kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "generator/cuda/sm90/maps.hpp"
#include "generator/cuda/sm90/rules.hpp"
#include "templates/common/divergence_math.cuh"
#include "templates/sm90/params.cuh"

namespace flce {
namespace {

using Params = HeadsSm90Params;

// Consumers take turns with a tile. A fifth stage would have no room beside what they stage of the teacher's products.
constexpr GemmTile kTile{.block_m = 128, .block_n = 192, .block_k = 64, .stages = 4, .schedule = TileSchedule::by_turns};
constexpr std::int64_t kClusterRows = std::int64_t{sm90::kClusterBlocks} * kTile.block_m;
constexpr std::int64_t kConsumers = 2;
constexpr std::int64_t kJobsOfCluster = 8;  ///< jobs that a cluster takes, about: the last ones end together

/// Clusters of a launch, all of which run at once.
std::int64_t clusters_of(const Device& device) { return device.gpu.sm_count / sm90::kClusterBlocks; }

/// Shared memory of a kernel with `fields` sums of a row: the ring, what each consumer thread keeps, barriers, numbers of tiles.
std::int64_t smem_bytes(std::int64_t fields) {
    const std::int64_t ring = std::int64_t{128} * (kTile.block_m + kTile.block_n) * kTile.stages;
    const std::int64_t of_thread = fields + kTile.block_n / 4;
    return ring + of_thread * 128 * kConsumers * 4 + std::int64_t{8} * (2 * kTile.stages + 2) + std::int64_t{16} * (8 + 4);
}

/// Clusters of rows whose hidden states of both heads take half of L2. Blocks of them are nearly alike.
Expr block_clusters(const Spec& spec, const Device& device, const Expr& row_clusters) {
    const std::int64_t bytes = kClusterRows * (spec.hidden_size + spec.teacher_hidden_size) * 2;
    const std::int64_t most = std::max<std::int64_t>(device.gpu.l2_bytes / 2 / bytes, 1);
    return max(ceil_div(row_clusters, max(ceil_div(row_clusters, most), 1)), 1);
}

/// Whether a launch makes gradients beside its products (HeadSumsSm90::kLeavesGradients). Beside short products epilogues leave no time.
bool works_beside(const Spec& spec) { return spec.dtype == DType::bf16 && spec.hidden_size + spec.teacher_hidden_size >= 3072; }

/// block_clusters of a launch that leaves gradients of all blocks but the last: there is more than one, unless rows are few.
Expr block_clusters(const Spec& spec, const Device& device, const Expr& row_clusters, const HeadsLaunch& launch) {
    constexpr std::int64_t kLeast = 4;  // clusters of rows that the weight is worth reading for
    const Expr most = block_clusters(spec, device, row_clusters);
    if (!works_beside(spec)) return most;
    return select(launch.leaves_gradients, min(most, max(ceil_div(row_clusters, 2), kLeast)), most);
}

Expr strips_of(const Spec& spec, const Device& device, const HeadsLaunch& launch) {
    const Expr row_clusters = max(ceil_div(launch.rows, kClusterRows), 1);
    const Expr tiles = ceil_div(vocab_columns(spec) - launch.first_column, std::int64_t{kTile.block_n});
    return max(min(floor_div(kJobsOfCluster * clusters_of(device), row_clusters), ceil_div(tiles, kConsumers)), 1);
}

}  // namespace

bool has_heads_kernels(const Spec& spec, const Device& device) {
    if (!has_teacher_head(spec) || spec.dtype == DType::fp32) return false;
    return device.gpu.arch == "sm_90a" && clusters_of(device) > 1 && !smem_problem(device, smem_bytes(partial_fields(spec)));
}

void write_heads_kernels(KernelWriter& writer, const Spec& spec) {
    const std::string tile =
        fmt::format("TileSm90<{}, {}, {}, {}, true>", kTile.block_m, kTile.block_n, kTile.stages, sm90::kClusterBlocks);
    const auto write = [&](KernelRole role, const char* name, const char* function, std::int64_t fields,
                           const char* params = "HeadsSm90Params") {
        writer.gemm({.role = role,
                     .params = params,
                     .function = function,
                     .stated = name,
                     .tile = tile,
                     .block = {.threads = 384, .per_sm = 1, .smem_bytes = smem_bytes(fields), .cluster = sm90::kClusterBlocks},
                     .problem = "Problem, Teacher",
                     .header = "sm90/heads.cuh"});
    };
    write(KernelRole::heads_sums, "HeadsSumsSm90", "heads_sums_sm90", sizeof(DivergenceSums) / sizeof(float));
    if (divergence_form(spec.divergence_beta) == kMixture) {
        write(KernelRole::heads_mixture, "HeadsMixtureSm90", "heads_mixture_sm90", sizeof(MixtureTerm) / sizeof(float));
    }
    if (!spec.bias) write(KernelRole::heads_dlogits, "HeadsDlogitsSm90", "heads_dlogits_sm90", 0, "HeadsDlogitsSm90Params");
}

HeadsScratch heads_scratch(const Device& device) {
    return {.parked_bytes = clusters_of(device) * sm90::kClusterBlocks * kConsumers * kTile.block_m * kTile.block_n * 4,
            .partials = kJobsOfCluster * clusters_of(device) * kConsumers * kClusterRows};
}

Expr heads_splits(const Spec& spec, const Device& device, const HeadsLaunch& launch) {
    return strips_of(spec, device, launch) * kConsumers;
}

Expr heads_gradient_rows(const Spec& spec, const Device& device, const Expr& rows, const HeadsLaunch& launch) {
    const Expr row_clusters = ceil_div(rows, kClusterRows);
    if (!works_beside(spec)) return 0;
    const Expr block = block_clusters(spec, device, row_clusters, launch);
    return select(launch.leaves_gradients, floor_div(max(row_clusters - 1, 0), block) * block * kClusterRows, 0);
}

std::vector<Statement> heads_steps(const ForwardPass& pass, const Device& device, KernelRole kernel, const HeadsLaunch& of) {
    const Spec& spec = pass.spec;
    const Spec teacher = teacher_head(spec);
    const Expr columns = vocab_columns(spec);
    const LaunchRows& rows = pass.rows;
    const auto element = static_cast<std::int64_t>(element_bytes(spec.dtype));
    const Expr teacher_hidden = slot(Slot::teacher_hidden) + rows.base * (element * teacher.hidden_size);
    const int weight_box = (spec.layout == WeightLayout::vocab_major ? kTile.block_n : 64) / sm90::kClusterBlocks;
    LaunchBuilder<Params> launch(forward_launch(pass, kernel, clusters_of(device) * sm90::kClusterBlocks, 1));
    launch.set_map(&Params::hidden_map, {hidden_row_at(spec, rows.base), spec.hidden_size, rows.count, spec.hidden_size}, kTile.block_m)
        .set_map(&Params::weight_map, sm90::weight_matrix(spec, slot(Slot::weight), columns), weight_box)
        .set_map(&Params::teacher_hidden_map, {teacher_hidden, teacher.hidden_size, rows.count, teacher.hidden_size}, kTile.block_m)
        .set_map(&Params::teacher_weight_map, sm90::weight_matrix(teacher, slot(Slot::teacher_weight), columns), weight_box)
        .set(&Params::tickets, of.tickets)
        .set(&Params::parked, of.parked)
        .set(&Params::teacher_bias, slot(Slot::teacher_bias))
        .set(&Params::lse, slot(Slot::lse) + rows.base * 4)
        .set(&Params::teacher_lse, slot(Slot::teacher_lse) + rows.base * 4)
        .set_transform(&Params::teacher_transform, teacher)
        .set_float(&Params::beta, static_cast<float>(spec.divergence_beta))
        .set(&Params::first_column, of.first_column)
        .set(&Params::jobs, &HeadsJobs::strips, strips_of(spec, device, of))
        .set(&Params::jobs, &HeadsJobs::pairs, -1)
        .set(&Params::jobs, &HeadsJobs::block_clusters, block_clusters(spec, device, ceil_div(rows.count, kClusterRows), of))
        .set(&Params::done, of.tickets + static_cast<std::int64_t>(sizeof(Tickets)))
        .set(&Params::gradient_rows, heads_gradient_rows(spec, device, rows.count, of))
        .set(&Params::gradient_warps, clusters_of(device) * sm90::kClusterBlocks * kHeadsWarpsBeside);
    set_pairs(launch, of.retained);
    return {{MemsetZero{of.tickets, 4 * kHeadsCounterWords}}, build_with_rows(std::move(launch), spec, row_numbers_at(rows))};
}

bool has_heads_dlogits(const Spec& spec, const Device& device) { return has_heads_kernels(spec, device) && !spec.bias; }

std::vector<Statement> heads_dlogits_steps(const BackwardPass& pass, const Device& device, const Chunk& chunk, const RowBlock& rows,
                                           const HeadsDlogits& of) {
    using Params = HeadsDlogitsSm90Params;
    const Spec& spec = pass.spec;
    const Spec teacher = teacher_head(spec);
    const bool vocab_major = spec.layout == WeightLayout::vocab_major;
    const std::int64_t element = pass.element_bytes;
    const int weight_box = (vocab_major ? kTile.block_n : 64) / sm90::kClusterBlocks;
    // Columns of a head's weight, and a head's hidden states.
    const auto weight = [&](const Spec& head, Slot tensor) {
        const Expr first = chunk.first_column * (vocab_major ? element * head.hidden_size : element);
        return sm90::weight_matrix(head, slot(tensor) + first, chunk.columns);
    };
    const auto hidden = [&](const Spec& head, Slot tensor) {
        const Expr first = rows.first * (element * head.hidden_size);
        return MappedMatrix{slot(tensor) + first, head.hidden_size, rows.count, head.hidden_size};
    };
    // Two tiles a job, in whose epilogues the other consumer multiplies, and one at the end, so that clusters end together.
    const Expr tiles = ceil_div(chunk.columns, std::int64_t{kTile.block_n});
    const Expr row_clusters = ceil_div(rows.count, kClusterRows);
    const Expr alone = min(ceil_div(clusters_of(device), max(row_clusters, 1)), tiles);
    const Expr pairs = floor_div(tiles - alone, 2);
    const BackwardLayout& layout = pass.layout;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::heads_dlogits), clusters_of(device) * sm90::kClusterBlocks);
    launch.set(&Params::scalars, scalars_at())
        .set(&Params::coefficients, workspace_at(layout.coefficients))
        .set(&Params::row_targets, workspace_at(layout.row_targets))
        .set(&Params::dlogits, chunk.dlogits)
        .set(&Params::ld, chunk.width)
        .set(&Params::first_column, chunk.first_column)
        .set(&Params::rows, rows.count)
        .set(&Params::columns, chunk.columns)
        .set_transform(&Params::transform, spec)
        .set_map(&Params::hidden_map, hidden(spec, Slot::hidden), kTile.block_m)
        .set_map(&Params::weight_map, weight(spec, Slot::weight), weight_box)
        .set_map(&Params::teacher_hidden_map, hidden(teacher, Slot::teacher_hidden), kTile.block_m)
        .set_map(&Params::teacher_weight_map, weight(teacher, Slot::teacher_weight), weight_box)
        .set(&Params::tickets, of.tickets)
        .set(&Params::parked, of.parked)
        .set(&Params::factors, of.factors)
        .set(&Params::teacher_bias, advanced(slot(Slot::teacher_bias), chunk.first_column, element))
        .set(&Params::teacher_lse, slot(Slot::teacher_lse) + rows.first * 4)
        .set(&Params::student_divergence, slot(Slot::student_divergence) + rows.first * 4)
        .set_transform(&Params::teacher_transform, teacher)
        .set_float(&Params::beta, static_cast<float>(spec.divergence_beta))
        .set(&Params::jobs, &HeadsJobs::strips, tiles - pairs)
        .set(&Params::jobs, &HeadsJobs::pairs, pairs)
        .set(&Params::jobs, &HeadsJobs::block_clusters, block_clusters(spec, device, row_clusters));
    return {{MemsetZero{of.tickets, static_cast<std::int64_t>(sizeof(Tickets))}},
            build_with_rows(std::move(launch), spec, row_numbers_at(layout, 0))};
}

}  // namespace flce
