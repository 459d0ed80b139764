// The main loop of 8-bit operands for GPUs without wgmma, C[m, n] = Σ_k A[m, k]·B[n, k], both contiguous along k: cp.async brings slices
// through a ring of stages in shared memory, and warps multiply them with mma.sync. Groups of four warps have 128 rows, and a part of the
// columns each.
#pragma once

#include "flce/common/logit_epilogue.cuh"
#include "flce/common/tile_order.cuh"
#include "flce/fp8/mma.cuh"
#include "flce/fp8/mma_layout.cuh"

namespace flce {

template <int kBlockM_, int kBlockN_, int kStages_, int kGroups_>
struct TileMma8 {
    enum : int { kBlockM = kBlockM_ };
    enum : int { kBlockN = kBlockN_ };
    enum : int { kStages = kStages_ };
    enum : int { kGroups = kGroups_ };
    enum : int { kThreads = 128 * kGroups };
    enum : int { kGroupN = kBlockN / kGroups };
    enum : int { kStageBytes = (kBlockM + kBlockN) * SliceMma8::kRowBytes };
    enum : int { kSmemBytes = kStageBytes * kStages };
    static_assert(kBlockM == 128 && kBlockN % kGroups == 0 && kGroupN % kFp8ClassGroup == 0, "a group of warps has 128 rows");
    static_assert(kStages >= 2, "one slice is read while another arrives");
};

/// Place of a thread. Columns are those of its group, which begin at first_column() of the tile.
template <class TileT>
struct PlaceMma8 {
    using Columns = MmaColumns;
    int lane;
    int warp;  // in the group
    int group;
    __device__ __forceinline__ PlaceMma8() {
        lane = static_cast<int>(threadIdx.x) % 32;
        // Equal in all lanes of a warp, which the compiler is to know.
        const int warp_of_block = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
        warp = warp_of_block % 4;
        group = warp_of_block / 4;
    }
    __device__ __forceinline__ int first_column() const { return group * TileT::kGroupN; }
    __device__ __forceinline__ int row(int i, int h) const { return row_mma8(warp, lane, i, h); }
    __device__ __forceinline__ int column(int j, int e) const { return column_mma8(lane, j, e); }
};

/// Tiles by number, in the order of tile_of_block.
template <class TileT, int kRaster>
struct WalkMma8 {
    int tiles_m;
    int tiles_n;
    unsigned count;
    int m = 0;  // first row of the tile at hand
    int n = 0;

    __device__ __forceinline__ WalkMma8(int extent_m, int extent_n)
        : tiles_m(ceil_div(extent_m, TileT::kBlockM)),
          tiles_n(ceil_div(extent_n, TileT::kBlockN)),
          count(static_cast<unsigned>(tiles_m) * static_cast<unsigned>(tiles_n)) {}

    /// False where there is no such tile.
    __device__ __forceinline__ bool go_to(unsigned tile) {
        if (tile >= count) return false;
        int tile_m;
        int tile_n;
        tile_of_block<kRaster>(tile, tiles_m, tiles_n, tile_m, tile_n);
        m = tile_m * TileT::kBlockM;
        n = tile_n * TileT::kBlockN;
        return true;
    }
};

/// Copies this thread's part of kRows rows of a matrix, from (first_row, depth) on, to the slice at `slice`: the same 16 bytes of every
/// kRowStep-th row. What does not exist becomes 0. Nothing is kept from slice to slice: registers are scarce.
template <class TileT, int kRows>
__device__ __forceinline__ void load_slice_mma8(const PlainMatrix& matrix, int first_row, int depth, unsigned slice) {
    constexpr int kChunks = SliceMma8::kRowBytes / 16;
    constexpr int kRowStep = TileT::kThreads / kChunks;
    static_assert(kRows % kRowStep == 0 && kRowStep % 8 == 0, "threads divide a slice evenly, and a thread's rows are permuted alike");
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int row = static_cast<int>(threadIdx.x) / kChunks;
    const int column = depth + chunk * 16;
    const unsigned to = slice + SliceMma8::offset(row, chunk);
    const unsigned char* const from = static_cast<const unsigned char*>(matrix.at) + (first_row + row) * matrix.pitch + column;
#pragma unroll
    for (int i = 0; i < kRows / kRowStep; ++i) {
        ptx::cp_async_cg_16_if(column < matrix.columns && first_row + row + i * kRowStep < matrix.rows,
                               to + static_cast<unsigned>(i * kRowStep * SliceMma8::kRowBytes), from + i * kRowStep * matrix.pitch);
    }
}

/// kBySteps: every step's product is added in fp32, because tensor cores cut off what lies 13 bits below a sum (numerics.md).
template <class TileT, CodesFp8 kCodes, bool kBySteps>
struct MainloopMma8 {
    enum : int { kPiecesA = TileT::kBlockM / 64 };
    enum : int { kColumnPieces = TileT::kGroupN / 8 };
    enum : int { kPairs = kColumnPieces / 2 };  // pairs of pieces of B, which one ldmatrix brings
    // Parts of the columns: fragments of all of them, twice, would not fit into registers beside sums and products.
    enum : int { kParts = kBySteps ? 4 : 2 };
    static_assert(kPairs % kParts == 0);
    enum : int { kTurns = SliceMma8::kSteps * kParts };  // turns of a slice
    using Sum = Select<kCodes == CodesFp8::s8_s8, int, float>;
    using Accumulators = Sum[kPiecesA][kColumnPieces][4];

    const PlainMatrix& a;
    const PlainMatrix& b;
    PlaceMma8<TileT> place;
    int m = 0;      // first rows of both matrices of the tile that slices are brought of
    int n = 0;      //
    int depth = 0;  // first code of the next slice
    unsigned smem;
    unsigned read_stage = 0;  // byte offsets in the ring
    unsigned write_stage = 0;
    unsigned offset_a;  // fragments of this lane in a stage, at step 0
    unsigned offset_b;

    __device__ __forceinline__ MainloopMma8(const PlainMatrix& of_a, const PlainMatrix& of_b, const void* ring)
        : a(of_a), b(of_b), smem(ptx::shared_address(ring)) {
        offset_a = fragment_offset_a(place.warp * 16, place.lane);
        offset_b = TileT::kBlockM * SliceMma8::kRowBytes + fragment_offset_b(place.first_column(), place.lane);
    }

    /// Starts the first slices of a tile. Nobody reads the ring, and no copy into it is on its way.
    __device__ __forceinline__ void begin(int tile_m, int tile_n) {
        m = tile_m;
        n = tile_n;
        depth = 0;
        read_stage = write_stage = 0u;
#pragma unroll
        for (int stage = 0; stage < TileT::kStages - 1; ++stage) produce();
    }

    /// c += the `slices` slices of the tile that has begun. Nobody reads the ring afterwards, and no copy into it is on its way. Fragments
    /// of the next part of the columns are read while one part is multiplied.
    __device__ __forceinline__ void consume(Accumulators& c, int slices) {
        FragmentsA a_parts[2];
        FragmentsB b_parts[2];
        arrive();
        read_a(0, a_parts[0]);
        read_b(0, 0, b_parts[0]);
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
            if constexpr (kBySteps) {  // half of the turns at a time: registers do not suffice for all
#pragma unroll kTurns / 2
                for (int turn = 0; turn < kTurns; ++turn) take_turn(turn, c, a_parts, b_parts);
            } else {
#pragma unroll
                for (int turn = 0; turn < kTurns; ++turn) take_turn(turn, c, a_parts, b_parts);
            }
        }
        ptx::cp_async_wait_group<0>();
        __syncthreads();
    }

private:
    using FragmentsA = unsigned[kPiecesA][4];
    using FragmentsB = unsigned[kPairs / kParts][4];

    /// Multiplies a part of the columns, and reads what the next turn has.
    __device__ __forceinline__ void take_turn(int turn, Accumulators& c, FragmentsA (&a_parts)[2], FragmentsB (&b_parts)[2]) {
        const int next = (turn + 1) % kTurns;
        if (next == 0) {
            // The barrier also says that everyone has read this slice, over which the next copies will write.
            advance(read_stage);
            arrive();
        }
        if (next % kParts == 0) read_a(next / kParts, a_parts[next / kParts % 2]);
        read_b(next / kParts, next % kParts, b_parts[next % 2]);
        if (turn == 0) produce();
        multiply(c, turn % kParts, a_parts[turn / kParts % 2], b_parts[turn % 2]);
    }

    static __device__ __forceinline__ void advance(unsigned& stage) {
        stage = stage == TileT::kSmemBytes - TileT::kStageBytes ? 0u : stage + TileT::kStageBytes;
    }
    __device__ __forceinline__ void produce() {
        load_slice_mma8<TileT, TileT::kBlockM>(a, m, depth, smem + write_stage);
        load_slice_mma8<TileT, TileT::kBlockN>(b, n, depth, smem + write_stage + TileT::kBlockM * SliceMma8::kRowBytes);
        depth += SliceMma8::kDepth;
        ptx::cp_async_commit_group();
        advance(write_stage);
    }
    /// Every thread's part of the slice at read_stage is visible to all.
    static __device__ __forceinline__ void arrive() {
        ptx::cp_async_wait_group<TileT::kStages - 2>();
        __syncthreads();
    }
    __device__ __forceinline__ void read_a(int step, FragmentsA& to) const {
#pragma unroll
        for (int i = 0; i < kPiecesA; ++i) ptx::ldmatrix_x4(to[i], smem + read_stage + fragment_at(offset_a, step, i * 64));
    }
    __device__ __forceinline__ void read_b(int step, int part, FragmentsB& to) const {
#pragma unroll
        for (int pair = 0; pair < kPairs / kParts; ++pair) {
            ptx::ldmatrix_x4(to[pair], smem + read_stage + fragment_at(offset_b, step, (part * (kPairs / kParts) + pair) * 16));
        }
    }
    static __device__ __forceinline__ void multiply(Accumulators& c, int part, const FragmentsA& a, const FragmentsB& b) {
        constexpr int kPieces = kColumnPieces / kParts;
#pragma unroll
        for (int i = 0; i < kPiecesA; ++i) {
#pragma unroll
            for (int k = 0; k < kPieces; ++k) {
                const int of = i % 2 == 1 ? kPieces - 1 - k : k;  // back and forth, so that neighbours share an operand
                const unsigned b0 = b[of / 2][of % 2 * 2];
                const unsigned b1 = b[of / 2][of % 2 * 2 + 1];
                auto& sum = c[i][part * kPieces + of];
                if constexpr (kBySteps) {
                    Sum product[4] = {};
                    add(product, a[i], b0, b1);
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[e] += product[e];
                } else {
                    add(sum, a[i], b0, b1);
                }
            }
        }
    }
    static __device__ __forceinline__ void add(Sum (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        if constexpr (kCodes == CodesFp8::s8_s8) ptx::mma_m16n8k32_s8_s8(sum, a, b0, b1);
        if constexpr (kCodes == CodesFp8::e4m3_e4m3) ptx::mma_m16n8k32_e4m3_e4m3(sum, a, b0, b1);
        if constexpr (kCodes == CodesFp8::e5m2_e4m3) ptx::mma_m16n8k32_e5m2_e4m3(sum, a, b0, b1);
        if constexpr (kCodes == CodesFp8::e4m3_e5m2) ptx::mma_m16n8k32_e4m3_e5m2(sum, a, b0, b1);
    }
};

}  // namespace flce
