// How long backward of cuda_sm90a takes with chunks of a given width: whole waves of clusters of tiles, which make widths that are nearly
// alike differ by a tenth. Generic over the number: the cost model computes with integers, layouts with expressions over the number of
// tokens.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/sm90/path.hpp"
#include "generator/cuda/sm90/rules.hpp"
#include "generator/launch_program.hpp"

namespace flce::sm90 {

/// Slices of 64 that grad_weight's epilogue takes on cuda_sm90a: rounding and storing, or a way through old values panel by panel.
[[nodiscard]] inline int grad_weight_epilogue_slices(const Spec& spec) {
    return spec.grad_weight_mode == GradMode::accumulate && element_bytes(spec.grad_weight_dtype) == 2 ? 40 : 4;
}

/// Time in units of one multiply-add of one thread block's tile: rows × columns for every slice of 64.
class ChunkTime {
public:
    ChunkTime(const Spec& spec, const Device& device, const Plan& plan)
        : spec_(spec), tiles_(plan.cuda), clusters_(std::max(device.gpu.sm_count / kClusterBlocks, 1)) {}

    /// Time of all chunks of the vocabulary.
    template <class Number>
    [[nodiscard]] Number all(const Number& tokens, const Number& columns) const {
        const Number chunks = up_div(Number(spec_.vocab_size), columns);
        const Number last = Number(spec_.vocab_size) - (chunks - Number(1)) * columns;
        return (chunks - Number(1)) * one(tokens, columns) + one(tokens, last);
    }

    /// Width that takes the least time: `widest`, or one of the next narrower ones, in steps of `quantum`.
    template <class Number>
    [[nodiscard]] Number quickest(const Number& tokens, const Number& widest, std::int64_t quantum) const {
        using std::max;
        using std::min;
        constexpr int kCandidates = 6;
        Number best = widest;
        Number best_time = all(tokens, widest);
        for (int narrower = 1; narrower < kCandidates; ++narrower) {
            const Number chunk = max(widest - Number(narrower * quantum), Number(quantum));
            const Number time = all(tokens, chunk);
            best = select(less(time, best_time), chunk, best);
            best_time = min(time, best_time);
        }
        return best;
    }

private:
    static constexpr std::int64_t kDepth = 64;
    // Measured on an H100: starting and ending three kernels costs 9 µs, a tile's way through grad_hidden's sum 4 µs.
    static constexpr std::int64_t kLaunches = 430'000;
    static constexpr std::int64_t kSumPass = 200'000;

    static std::int64_t up_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
    static Expr up_div(const Expr& a, const Expr& b) { return ceil_div(a, b); }
    static bool less(std::int64_t a, std::int64_t b) { return a < b; }
    static Expr less(const Expr& a, const Expr& b) { return flce::less(a, b); }
    static std::int64_t select(bool condition, std::int64_t then, std::int64_t otherwise) { return condition ? then : otherwise; }
    static Expr select(const Expr& condition, const Expr& then, const Expr& otherwise) { return flce::select(condition, then, otherwise); }

    /// One slice of a tile.
    static std::int64_t slice(const GemmTile& tile) {
        double efficiency = 0.7;
        for (const TileCandidate& candidate : tile_candidates()) {
            if (candidate.tile == tile) efficiency = candidate.efficiency;
        }
        return static_cast<std::int64_t>(tile.block_m * tile.block_n / efficiency);
    }
    /// Slices that the epilogue adds where warpgroups share a tile: nothing is multiplied while it runs.
    static std::int64_t tail(const GemmTile& tile, int slices = 2) { return takes_turns(tile) ? 0 : slices * slice(tile); }
    static constexpr int kExponentials = 4;  ///< slices that an epilogue with exponentials takes

    /// Waves of m × n results times what each takes.
    template <class Number>
    [[nodiscard]] Number waves(const GemmTile& tile, const Number& m, const Number& n) const {
        const Number tiles = up_div(m, Number(std::int64_t{kClusterBlocks} * tile.block_m)) * up_div(n, Number(std::int64_t{tile.block_n}));
        return up_div(tiles, Number(clusters_));
    }

    template <class Number>
    [[nodiscard]] Number one(const Number& tokens, const Number& columns) const {
        const bool vocab_major = spec_.layout == WeightLayout::vocab_major;
        const Number hidden(spec_.hidden_size);
        const Number depth(kDepth);
        const Number dlogits = waves(tiles_.dlogits, tokens, columns) *
                               Number(up_div(spec_.hidden_size, kDepth) * slice(tiles_.dlogits) + tail(tiles_.dlogits, kExponentials));
        const Number weight = waves(tiles_.grad_weight, vocab_major ? columns : hidden, vocab_major ? hidden : columns) *
                              (up_div(tokens, depth) * Number(slice(tiles_.grad_weight)) +
                               Number(tail(tiles_.grad_weight, grad_weight_epilogue_slices(spec_))));
        const Number sum = waves(tiles_.grad_hidden, tokens, hidden) *
                           (up_div(columns, depth) * Number(slice(tiles_.grad_hidden)) + Number(tail(tiles_.grad_hidden) + kSumPass));
        return dlogits + weight + sum + Number(kLaunches);
    }

    const Spec& spec_;
    const CudaPlan& tiles_;
    std::int64_t clusters_;
};

}  // namespace flce::sm90
