// Merge: all shards' partial sums of a token become its outputs. Merge costs little beside the passes over the vocabulary: one thread does
// it.
#include <algorithm>

#include "runtime/cpu/passes.hpp"
#include "runtime/cpu/row_results.hpp"
#include "runtime/cpu/shard_sums.hpp"
#include "runtime/cpu/teacher.hpp"
#include "runtime/cpu/top_classes.hpp"

namespace flce {
namespace {

using AllSums = ShardSums<const float>;

class MergePass {
public:
    explicit MergePass(const CpuCall& call)
        : call_(call), first_(call.spec(), call.pointer<const float>(Slot::all_partial_sums), call.num_tokens()), teacher_(call) {}

    void run() {
        call_.report_invalid_label();
        write_class_weights();
        CpuRowResults results(call_);  // reads the total of class weights
        for (std::int64_t token = 0; token < call_.num_tokens(); ++token) {
            if (call_.valid_label(token) < 0) {
                results.write_ignored(token);
                teacher_.clear(token);
                write_no_top_classes(call_, token);
                continue;
            }
            const RowSums found = merged(token);
            const RowSums sums = call_.spec().support ? of_support(found) : found;
            merge_teacher(token);
            merge_top_classes(call_, first_, token, sums);
            const float class_weight = call_.element(Slot::target_class_weight, token, 1.F);
            const RowOutputs outputs = results.write(token, sums, class_weight, teacher_.finish(token, sums));
            results.add(outputs.cross_entropy, outputs.z_loss);
        }
        results.write_reduced(call_.mean_divisors());
    }

private:
    template <class Visit>
    void for_each_shard(const Visit& visit) const {
        AllSums sums = first_;
        for (std::int64_t shard = 0; shard < call_.value(Slot::num_shards); ++shard, sums = sums.next()) visit(sums);
    }

    [[nodiscard]] RowSums merged(std::int64_t token) const {
        RowSums all{};
        bool first = true;
        for_each_shard([&](const AllSums& sums) {
            const RowSums one = load_shard_sums(sums, token);
            all = first ? one : merge(all, one);
            first = false;
        });
        return all;
    }

    /// Writes the class weights that backward reads and that a mean divides by.
    void write_class_weights() const {
        const ShardFields& fields = first_.fields();
        if (fields.target_class_weight >= 0) {
            for (std::int64_t token = 0; token < call_.num_tokens(); ++token) {
                float weight = 0;
                if (call_.valid_label(token) >= 0) {
                    for_each_shard([&](const AllSums& sums) { weight += sums.at(fields.target_class_weight, token); });
                }
                call_.pointer<float>(Slot::target_class_weight)[token] = weight;
            }
        }
        if (fields.class_weight_total >= 0) {
            float total = 0;
            if (call_.num_tokens() > 0) for_each_shard([&](const AllSums& sums) { total += sums.at(fields.class_weight_total, 0); });
            *call_.pointer<float>(Slot::class_weight_total) = total;
        }
    }

    /// The logit of each class that the teacher names, from the shard that has it.
    void merge_teacher(std::int64_t token) const {
        for (std::int64_t k = 0; k < call_.spec().teacher_top_k; ++k) {
            float logit = first_.teacher_logit(token, k);
            for_each_shard([&](const AllSums& sums) { logit = std::max(logit, sums.teacher_logit(token, k)); });
            teacher_.set_logit(token, k, logit);
        }
    }

    const CpuCall& call_;
    AllSums first_;
    CpuTeacher teacher_;
};

}  // namespace

void run_cpu_merge(const CpuCall& call) { MergePass(call).run(); }

}  // namespace flce
