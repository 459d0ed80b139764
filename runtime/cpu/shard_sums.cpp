#include "runtime/cpu/shard_sums.hpp"

#include <bit>
#include <limits>

namespace flce {

void store_shard_sums(const ShardSums<float>& to, std::int64_t token, const RowSums& sums, const ShardTarget& target) {
    const ShardFields& f = to.fields();
    const auto store = [&](int field, float value) {
        if (field >= 0) to.at(field, token) = value;
    };
    store(f.max, sums.max);
    store(f.exp_sum, sums.exp_sum);
    store(f.exp_z_sum, sums.exp_z_sum);
    store(f.weighted_sum, sums.weighted_sum);
    store(f.exp_sq_sum, sums.exp_sq_sum);
    store(f.top1, std::bit_cast<float>(sums.top1));
    store(f.target_logit, sums.target_logit);
    store(f.target_class_weight, target.class_weight);
    store(f.class_weight_total, target.class_weight_total);
}

RowSums load_shard_sums(const ShardSums<const float>& from, std::int64_t token) {
    const ShardFields& f = from.fields();
    const auto load = [&](int field) { return field >= 0 ? from.at(field, token) : 0.F; };
    RowSums sums = sums_of_nothing(load(f.max), load(f.target_logit));
    sums.exp_sum = load(f.exp_sum);
    sums.exp_z_sum = load(f.exp_z_sum);
    sums.weighted_sum = load(f.weighted_sum);
    sums.exp_sq_sum = load(f.exp_sq_sum);
    if (f.top1 >= 0) sums.top1 = std::bit_cast<int>(from.at(f.top1, token));
    return sums;
}

}  // namespace flce
