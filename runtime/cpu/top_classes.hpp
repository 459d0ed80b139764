// The classes of each token's largest logits on the CPU, where the spec has a top_k.
#pragma once

#include <array>
#include <mutex>

#include "generator/cpu/layout.hpp"
#include "runtime/cpu/shard_sums.hpp"
#include "templates/common/top_classes.cuh"

namespace flce {

/// Lists of a row block, whose logits come strip by strip in any order: which classes a list has in the end does not depend on it.
class CpuTopClasses {
public:
    CpuTopClasses(const CpuCall& call, const CpuForwardLayout& layout, std::byte* workspace);

    [[nodiscard]] bool present() const { return top_k_ > 0; }
    /// Empties the lists of a block's rows.
    void begin(std::int64_t rows) const;
    /// Takes a row's logits of `columns` classes from label `first` on. The caller has the lock of the row's tile.
    void add(std::int64_t row, const float* logits, std::int64_t columns, std::int64_t first) const;
    [[nodiscard]] std::mutex& lock_of(std::int64_t tile) { return locks_[static_cast<std::size_t>(tile) % locks_.size()]; }

    /// Writes a token's outputs. `sums`: of all classes.
    void finish(std::int64_t token, std::int64_t row, const RowSums& sums) const;
    /// Writes a shard's fields: `any`, the row's classes, else none.
    void store(const ShardSums<float>& to, std::int64_t token, std::int64_t row, bool any) const;

private:
    [[nodiscard]] ClassKey* list(std::int64_t row) const { return keys_ + row * top_k_; }
    /// Puts the row's list into descending order. Returns its size.
    std::int64_t sort(std::int64_t row) const;

    const CpuCall& call_;
    const std::int64_t top_k_;
    std::int64_t* const sizes_;
    ClassKey* const keys_;
    std::array<std::mutex, 32> locks_;
};

/// Writes an ignored token's.
void write_no_top_classes(const CpuCall& call, std::int64_t token);
/// Writes a token's outputs from all shards' fields.
void merge_top_classes(const CpuCall& call, ShardSums<const float> sums, std::int64_t token, const RowSums& all);

}  // namespace flce
