// A shard's partial sums on the CPU: forward writes them token by token, merge reads those of all shards.
#pragma once

#include "generator/shard_layout.hpp"
#include "runtime/cpu/cpu_call.hpp"

namespace flce {

/// [fields, num_tokens], as a call has them.
template <class Number>
class ShardSums {
public:
    ShardSums(const Spec& spec, Number* data, std::int64_t num_tokens)
        : fields_(shard_fields(spec)), data_(data), num_tokens_(num_tokens), top_k_(spec.teacher_top_k) {}

    [[nodiscard]] const ShardFields& fields() const { return fields_; }
    [[nodiscard]] Number& at(int field, std::int64_t token) const { return data_[field * num_tokens_ + token]; }
    /// The logit of the k-th class that the token's teacher names.
    [[nodiscard]] Number& teacher_logit(std::int64_t token, std::int64_t k) const {
        return data_[(fields_.teacher_logits + k) * num_tokens_ + token];
    }
    /// The next shard's.
    [[nodiscard]] ShardSums next() const {
        ShardSums other = *this;
        other.data_ += fields_.count * num_tokens_;
        return other;
    }

private:
    ShardFields fields_;
    Number* data_;
    std::int64_t num_tokens_;
    int top_k_;
};

/// A shard's numbers for a token's target.
struct ShardTarget {
    float class_weight = 0;  ///< 0 where another shard has the target
    float class_weight_total = 0;
};

void store_shard_sums(const ShardSums<float>& to, std::int64_t token, const RowSums& sums, const ShardTarget& target);
[[nodiscard]] RowSums load_shard_sums(const ShardSums<const float>& from, std::int64_t token);

}  // namespace flce
