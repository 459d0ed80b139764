// Where the main loop of 8-bit mma.sync has its operands and sums: what ldmatrix brings is what mma.sync.m16n8k32 takes (PTX ISA, "Matrix
// fragments for mma.m16n8k32"), no bank is read twice, and tokens lie at their positions.
#include "templates/fp8/mma_layout.cuh"

#include <gtest/gtest.h>

#include <array>
#include <set>
#include <utility>
#include <vector>

namespace flce {
namespace {

using Code = std::pair<int, int>;  // row of the operand, and k

/// A slice of `rows` rows as the loaders write it: the code at each byte.
std::vector<Code> slice_of(int rows) {
    std::vector<Code> slice(static_cast<std::size_t>(rows) * SliceMma8::kRowBytes);
    for (int row = 0; row < rows; ++row) {
        for (int k = 0; k < SliceMma8::kDepth; ++k) slice.at(SliceMma8::offset(row, k / 16) + static_cast<unsigned>(k % 16)) = {row, k};
    }
    return slice;
}

/// Codes of a lane's four registers after ldmatrix.x4 of 16-bit elements, lane `l` having the address of row l % 8 of matrix l / 8.
template <class Address>
std::array<std::array<Code, 4>, 4> loaded(const std::vector<Code>& slice, int lane, const Address& address) {
    std::array<std::array<Code, 4>, 4> registers;
    for (int matrix = 0; matrix < 4; ++matrix) {
        const unsigned row = address(matrix * 8 + lane / 4);
        for (int byte = 0; byte < 4; ++byte) {
            registers[static_cast<std::size_t>(matrix)][static_cast<std::size_t>(byte)] =
                slice.at(row + static_cast<unsigned>(lane % 4 * 4 + byte));
        }
    }
    return registers;
}

TEST(MmaLayout, FragmentsOfA_AreThoseOfTheInstruction) {
    const std::vector<Code> slice = slice_of(128);
    for (int warp = 0; warp < 4; ++warp) {
        for (int piece = 0; piece < 2; ++piece) {
            for (int step = 0; step < SliceMma8::kSteps; ++step) {
                for (int lane = 0; lane < 32; ++lane) {
                    const auto registers =
                        loaded(slice, lane, [&](int of) { return fragment_at(fragment_offset_a(warp * 16, of), step, piece * 64); });
                    for (int i = 0; i < 16; ++i) {  // a0 … a15
                        const int row = lane / 4 + (i / 4 % 2 == 0 ? 0 : 8);
                        const int k = lane % 4 * 4 + i % 4 + (i < 8 ? 0 : 16);
                        const Code wanted{row_mma8(warp, row % 8 * 4, piece, row / 8), step * 32 + k};
                        EXPECT_EQ(registers.at(static_cast<std::size_t>(i / 4)).at(static_cast<std::size_t>(i % 4)), wanted);
                    }
                }
            }
        }
    }
}

TEST(MmaLayout, FragmentsOfB_AreThoseOfTheInstruction) {
    const std::vector<Code> slice = slice_of(256);
    for (const int group : {0, 128}) {
        for (int pair = 0; pair < 8; ++pair) {
            for (int step = 0; step < SliceMma8::kSteps; ++step) {
                for (int lane = 0; lane < 32; ++lane) {
                    const auto registers =
                        loaded(slice, lane, [&](int of) { return fragment_at(fragment_offset_b(group, of), step, pair * 16); });
                    for (int j = 0; j < 2; ++j) {
                        for (int i = 0; i < 8; ++i) {  // b0 … b7 of piece 2·pair + j
                            const Code wanted{group + (2 * pair + j) * 8 + lane / 4, step * 32 + lane % 4 * 4 + i % 4 + (i < 4 ? 0 : 16)};
                            EXPECT_EQ(registers.at(static_cast<std::size_t>(2 * j + i / 4)).at(static_cast<std::size_t>(i % 4)), wanted);
                        }
                    }
                }
            }
        }
    }
}

TEST(MmaLayout, RowsOfAMatrix_LieInDifferentBanks) {
    for (const auto offset : {fragment_offset_a, fragment_offset_b}) {
        for (int step = 0; step < SliceMma8::kSteps; ++step) {
            for (int matrix = 0; matrix < 4; ++matrix) {
                std::set<unsigned> banks;
                for (int row = 0; row < 8; ++row) banks.insert(fragment_at(offset(16, matrix * 8 + row), step, 0) % 128 / 16);
                EXPECT_EQ(banks.size(), 8U);
            }
        }
    }
}

// Token number 64·i + 16·w + 8·h + l of 128 lies at 32·w + 4·l + 2·i + h (fp8/params.cuh): a thread has four that follow each other.
TEST(MmaLayout, TokensOfAThread_FollowEachOther) {
    std::set<int> positions;
    for (int warp = 0; warp < 4; ++warp) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int byte = 0; byte < 4; ++byte) {
                const int row = row_mma8(warp, lane, byte / 2, byte % 2);
                const int position = row % 64 / 16 * 32 + row % 8 * 4 + row / 64 * 2 + row % 16 / 8;
                EXPECT_EQ(position_mma8(warp, lane) + byte, position);
                positions.insert(position);
            }
        }
    }
    EXPECT_EQ(positions.size(), 128U);
}

}  // namespace
}  // namespace flce
