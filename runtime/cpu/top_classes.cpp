#include "runtime/cpu/top_classes.hpp"

#include <algorithm>
#include <bit>
#include <functional>
#include <vector>

namespace flce {
namespace {

void write_class(const CpuCall& call, std::int64_t token, std::int64_t rank, float logprob, std::int64_t id) {
    const std::int64_t at = token * call.spec().top_k + rank;
    call.pointer<float>(Slot::top_logprobs)[at] = logprob;
    call.pointer<std::int64_t>(Slot::top_ids)[at] = id;
}

void write_classes(const CpuCall& call, std::int64_t token, const RowSums& sums, const ClassKey* keys) {
    for (std::int64_t rank = 0; rank < call.spec().top_k; ++rank) {
        write_class(call, token, rank, log_probability(logit_of(keys[rank]), sums), id_of(keys[rank]));
    }
}

}  // namespace

CpuTopClasses::CpuTopClasses(const CpuCall& call, const CpuForwardLayout& layout, std::byte* workspace)
    : call_(call),
      top_k_(call.spec().top_k),
      sizes_(reinterpret_cast<std::int64_t*>(workspace + layout.top_sizes)),
      keys_(reinterpret_cast<ClassKey*>(workspace + layout.top_keys)) {}

void CpuTopClasses::begin(std::int64_t rows) const { std::fill_n(sizes_, rows, 0); }

void CpuTopClasses::add(std::int64_t row, const float* logits, std::int64_t columns, std::int64_t first) const {
    ClassKey* const keys = list(row);  // a heap, the smallest key first
    std::int64_t& size = sizes_[row];
    for (std::int64_t j = 0; j < columns; ++j) {
        const auto id = static_cast<int>(first + j);
        if (size < top_k_) {
            keys[size++] = class_key(logits[j], id);
            if (size == top_k_) std::make_heap(keys, keys + size, std::greater<>());
            continue;
        }
        if (logits[j] < logit_of(keys[0])) continue;
        const ClassKey key = class_key(logits[j], id);
        if (key < keys[0]) continue;
        std::pop_heap(keys, keys + size, std::greater<>());
        keys[size - 1] = key;
        std::push_heap(keys, keys + size, std::greater<>());
    }
}

std::int64_t CpuTopClasses::sort(std::int64_t row) const {
    std::sort(list(row), list(row) + sizes_[row], std::greater<>());
    return sizes_[row];
}

void CpuTopClasses::finish(std::int64_t token, std::int64_t row, const RowSums& sums) const {
    sort(row);
    write_classes(call_, token, sums, list(row));
}

void CpuTopClasses::store(const ShardSums<float>& to, std::int64_t token, std::int64_t row, bool any) const {
    const std::int64_t size = any ? sort(row) : 0;
    for (int rank = 0; rank < call_.spec().top_k; ++rank) {
        const ClassKey key = rank < size ? list(row)[rank] : no_class_key();
        to.at(to.fields().top_logits + rank, token) = logit_of(key);
        to.at(to.fields().top_labels + rank, token) = std::bit_cast<float>(id_of(key));
    }
}

void write_no_top_classes(const CpuCall& call, std::int64_t token) {
    for (std::int64_t rank = 0; rank < call.spec().top_k; ++rank) write_class(call, token, rank, 0, -1);
}

void merge_top_classes(const CpuCall& call, ShardSums<const float> sums, std::int64_t token, const RowSums& all) {
    const int top_k = call.spec().top_k;
    if (top_k == 0) return;
    std::vector<ClassKey> keys;
    for (std::int64_t shard = 0; shard < call.value(Slot::num_shards); ++shard, sums = sums.next()) {
        for (int rank = 0; rank < top_k; ++rank) {
            const int label = std::bit_cast<int>(sums.at(sums.fields().top_labels + rank, token));
            keys.push_back(class_key(sums.at(sums.fields().top_logits + rank, token), label));
        }
    }
    std::partial_sort(keys.begin(), keys.begin() + top_k, keys.end(), std::greater<>());
    write_classes(call, token, all, keys.data());
}

}  // namespace flce
