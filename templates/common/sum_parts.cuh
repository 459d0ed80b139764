// How grad_hidden's sum over the vocabulary is divided among clusters that would have no tile of it. Plain C++: the host tests it.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/host_device.cuh"
#else
#include "templates/common/host_device.cuh"
#endif

namespace flce {

/// Parts of the sum, each with tiles and fp32 rows of its own, added up in order at the end. As many as finish first, by whole waves of
/// tiles: a matter of the number of rows alone, so that every launch of a pass, and the kernel that adds the parts up, finds the same ones.
struct SumParts {
    enum : int { kMost = 8 };         ///< and least slices of a part in the first launch, which every part begins with
    enum : int { kTileSlices = 16 };  ///< cost of a tile beside its own slices, in slices: its ring fills, and it goes through the sum

    int count;
    int stride;  ///< rows from one part to the next

    /// `share`: a SumShare.
    template <class Share>
    FLCE_HOST_DEVICE SumParts(const Share& share, int rows) : count(1), stride(0) {
        const int row_clusters = rows > share.cluster_rows ? (rows + share.cluster_rows - 1) / share.cluster_rows : 1;
        stride = row_clusters * share.cluster_rows;
        const int tiles = row_clusters * share.column_tiles;
        int best = time(share, tiles, 1);
        for (int parts = 2; parts <= kMost; ++parts) {
            if (parts * stride > share.room || parts * kMost > share.slices) break;
            const int mine = time(share, tiles, parts);
            if (mine >= best) continue;
            best = mine;
            count = parts;
        }
    }

private:
    template <class Share>
    static FLCE_HOST_DEVICE int time(const Share& share, int tiles, int parts) {
        return (tiles * parts + share.clusters - 1) / share.clusters * ((share.slices + parts - 1) / parts + kTileSlices);
    }
};

/// Tiles of the last wave of a launch, where they are fewer than half of the clusters: each is made by several clusters, of which each sums
/// over a part of the depth, and the last one adds up what the others have found. Numbers of tiles go on: part 0 of all of them, then
/// part 1.
struct TailParts {
    enum : int { kMost = 8, kLeastSlices = 32 };

    int full;   ///< tiles that are one cluster's
    int rest;   ///< tiles behind them
    int count;  ///< parts of each of these; 1: they are whole as well

    /// `room`: sums of a tile that may be kept.
    FLCE_HOST_DEVICE TailParts(int tiles, int clusters, int slices, int room)
        : full(tiles / clusters * clusters), rest(tiles - full), count(1) {
        if (rest == 0) return;
        const int idle = clusters / rest;
        while (count < kMost && count < idle && count * rest <= room && (count + 1) * kLeastSlices <= slices) ++count;
    }
    FLCE_HOST_DEVICE int numbers() const { return full + rest * count; }
    /// Tile and part of number `number` ≥ full.
    FLCE_HOST_DEVICE int tile_of(int number) const { return full + (number - full) % rest; }
    FLCE_HOST_DEVICE int part_of(int number) const { return (number - full) / rest; }
};

/// The parts that a launch over `slices` adds to: the first ones, each with `of_part` slices and the last with the rest, at least one.
struct PartSlices {
    int of_part;
    int count;

    FLCE_HOST_DEVICE PartSlices(int slices, int parts) {
        const int most = parts < slices ? parts : slices;
        of_part = (slices + most - 1) / most;
        count = (slices + of_part - 1) / of_part;
    }
};

}  // namespace flce
