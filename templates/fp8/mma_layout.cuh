// Where codes lie in the main loop of mma.sync, and who has them. Plain C++: the host tests it.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/host_device.cuh"
#else
#include "templates/common/host_device.cuh"
#endif

namespace flce {

/// A slice of an operand in shared memory: rows of 128 bytes, 128 codes deep. The 16-byte chunks of a row are permuted by an XOR with the
/// row's last three bits, so that the eight rows that one matrix of ldmatrix has lie in different banks.
struct SliceMma8 {
    enum : int { kRowBytes = 128 };
    enum : int { kDepth = 128 };
    enum : int { kSteps = kDepth / 32 };
    static FLCE_HOST_DEVICE unsigned offset(int row, int chunk) {
        return static_cast<unsigned>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
    }
};

/// A lane's 16 bytes of the four 8 × 16 matrices that ldmatrix brings for a step of 32: offset in the slice at step 0, `first` being the
/// fragment's first row. mma.sync wants A's matrices along the rows first, B's, of two pieces of 8 columns, along k first.
FLCE_HOST_DEVICE unsigned fragment_offset_a(int first, int lane) {
    return SliceMma8::offset(first + lane / 8 % 2 * 8 + lane % 8, lane / 16);
}
FLCE_HOST_DEVICE unsigned fragment_offset_b(int first, int lane) {
    return SliceMma8::offset(first + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}
/// Offset of the same fragment at another step, `rows` rows behind, a multiple of 8.
FLCE_HOST_DEVICE unsigned fragment_at(unsigned offset, int step, int rows) {
    return (offset ^ static_cast<unsigned>(step * 32)) + static_cast<unsigned>(rows * SliceMma8::kRowBytes);
}

/// Place of a thread's accumulators: [i][j][2·h + e] is at row(i, h) of the block's 128 and column(j, e) of its group of warps.
FLCE_HOST_DEVICE int row_mma8(int warp, int lane, int i, int h) { return i * 64 + warp * 16 + h * 8 + lane / 4; }
FLCE_HOST_DEVICE int column_mma8(int lane, int j, int e) { return j * 8 + lane % 4 * 2 + e; }
/// First of the four positions, in a group of 128 tokens, that a thread's tokens have: (i, h) = (0, 0), (0, 1), (1, 0), (1, 1).
FLCE_HOST_DEVICE int position_mma8(int warp, int lane) { return warp * 32 + lane / 4 * 4; }

}  // namespace flce
