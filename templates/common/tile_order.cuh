// Order in which the tiles of a matrix are worked on. Plain C++: the host tests it.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/host_device.cuh"
#else
#include "templates/common/host_device.cuh"
#endif

namespace flce {

/// Position of tile number `block` in a grid of tiles_m × tiles_n tiles: `kRaster` tile rows walk together over the columns, so that the
/// tiles in flight share few slices of both operands in L2.
template <int kRaster>
FLCE_HOST_DEVICE void tile_of_block(unsigned block, int tiles_m, int tiles_n, int& m, int& n) {
    const unsigned band_tiles = static_cast<unsigned>(kRaster * tiles_n);
    const int band = static_cast<int>(block / band_tiles);
    const int in_band = static_cast<int>(block % band_tiles);
    const int left = tiles_m - band * kRaster;
    const int rows = left < kRaster ? left : kRaster;
    m = band * kRaster + in_band % rows;
    n = in_band / rows;
}

}  // namespace flce
