// The truth of an FP8 head over shards, and kernels as they are on Hopper where forward keeps exponentials: a rank has powers of its own
// logits. Such kernels are right, and ones with a fault are not.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/fp8.hpp"
#include "tests/support/fp8_formats.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/sharded_run.hpp"

namespace flce::test {
namespace {

enum class Fault : std::uint8_t { none, no_target, power_of_another, target_twice };

constexpr double kLog2E = 1.44269504F;
constexpr double kNone = -std::numeric_limits<double>::infinity();

/// A mean loss of hard targets over two shards.
class SimulatedRanks {
public:
    SimulatedRanks(const Problem& problem, const std::vector<Shard>& shards, std::int64_t telling)
        : problem_(problem),
          shards_(shards),
          telling_(telling),
          depth_(problem.spec.hidden_size),
          classes_(problem.spec.vocab_size),
          tokens_(problem.num_tokens()) {
        const std::vector<double> hidden = dequantised_rows(problem.spec, 0, problem.hidden);
        const std::vector<double> weight = dequantised_rows(problem.spec, 0, problem.weight);
        for (std::int64_t i = 0; i < tokens_; ++i) {
            double most = kNone;
            for (std::int64_t j = 0; j < classes_; ++j) {
                double z = problem.class_offset[j];
                for (std::int64_t k = 0; k < depth_; ++k) z += hidden[i * depth_ + k] * weight[j * depth_ + k];
                logits_.push_back(z);
                most = std::max(most, z);
            }
            double sum = 0;
            for (std::int64_t j = 0; j < classes_; ++j) sum += std::exp(logits_[i * classes_ + j] - most);
            lse_.push_back(static_cast<float>(most + std::log(sum)));
            valid_ += is_valid(i) ? 1 : 0;
        }
    }

    /// Judges gradients that ranks make with a fault; empty where they are right.
    [[nodiscard]] std::string failures(Fault fault) const {
        KernelOutputs out;
        out.grad_hidden.assign(problem_.hidden.size(), 0.0);
        for (const Shard& shard : shards_) add_rank(shard, fault, out);
        return fp8_failures(problem_, out, lse_, {}, fp8_tolerance(true), {shards_, DType::bf16});
    }

private:
    struct Row {
        double k = 0;
        double r = 0;
        std::vector<double> e;
    };
    [[nodiscard]] bool is_valid(std::int64_t i) const { return problem_.target[i] != problem_.options.ignore_index; }
    [[nodiscard]] double logit(std::int64_t i, std::int64_t j) const { return logits_[i * classes_ + j]; }
    [[nodiscard]] std::int64_t end(const Shard& shard) const { return shard.start + shard.classes; }
    [[nodiscard]] bool has_target(const Shard& shard, std::int64_t i) const {
        return problem_.target[i] >= shard.start && problem_.target[i] < end(shard);
    }

    [[nodiscard]] Row row_of(const Shard& shard, std::int64_t i) const {
        double known = has_target(shard, i) ? logit(i, problem_.target[i]) : kNone;
        double largest = known;
        for (std::int64_t j = shard.start; j < end(shard); ++j) {
            largest = std::max(largest, logit(i, j));
            if (j < shard.start + telling_) known = std::max(known, logit(i, j));
        }
        Row row;
        row.k = known == kNone ? -0x1p24 : std::floor(known * kLog2E) - 4;
        if (largest * kLog2E - row.k > 15.5) row.k = std::floor(largest * kLog2E) - 14;
        row.r = std::exp2(row.k - double(lse_[i]) * kLog2E) / static_cast<double>(valid_);
        for (std::int64_t j = shard.start; j < end(shard); ++j) {
            row.e.push_back(j == problem_.target[i] ? 0 : nearest(kE5m2, std::exp2(logit(i, j) * kLog2E - row.k)));
        }
        return row;
    }

    [[nodiscard]] double largest_of(const std::vector<float>& rows, std::int64_t first, std::int64_t end) const {
        double largest = 0;
        for (std::int64_t at = first * depth_; at < end * depth_; ++at) largest = std::max(largest, std::fabs(double(rows[at])));
        return largest;
    }

    void add_rank(const Shard& shard, Fault fault, KernelOutputs& out) const {
        std::vector<Row> rows(static_cast<std::size_t>(tokens_));
        double largest = 0;
        for (std::int64_t i = 0; i < tokens_; ++i) {
            if (!is_valid(i)) continue;
            rows[i] = row_of(shard, i);
            largest = std::max(largest, rows[i].r * largest_of(problem_.hidden, i, i + 1));
        }
        if (fault == Fault::power_of_another) rows[1].r *= 2;
        const int m = power_for(largest_of(problem_.weight, shard.start, end(shard)));
        const int q = power_for(largest);
        std::vector<double> grad_weight(static_cast<std::size_t>(shard.classes * depth_), 0.0);
        for (std::int64_t i = 0; i < tokens_; ++i) {
            if (is_valid(i)) add_token(shard, i, rows[i], m, q, fault, grad_weight, out);
        }
        for (const double number : grad_weight) out.grad_weight.push_back(rounded(static_cast<float>(number), DType::bf16));
    }

    void add_token(const Shard& shard, std::int64_t i, const Row& row, int m, int q, Fault fault, std::vector<double>& grad_weight,
                   KernelOutputs& out) const {
        const std::int64_t y = problem_.target[i];
        double dz = (std::exp(logit(i, y) - double(lse_[i])) - 1) / static_cast<double>(valid_);
        if (!has_target(shard, i)) dz = fault == Fault::target_twice ? dz : 0;
        if (fault == Fault::no_target) dz = 0;
        for (std::int64_t k = 0; k < depth_; ++k) {
            const double h = problem_.hidden[i * depth_ + k];
            const double h8 = std::ldexp(nearest(kE4m3, std::ldexp(h * row.r, q)), -q);
            const auto weight = [&](std::int64_t row_of_weight) {
                return std::ldexp(nearest(kE4m3, std::ldexp(problem_.weight[row_of_weight * depth_ + k], m)), -m);
            };
            double sum = 0;
            for (std::int64_t j = 0; j < shard.classes; ++j) {
                sum += row.e[j] * weight(shard.start + j);
                grad_weight[j * depth_ + k] += row.e[j] * h8;
            }
            if (has_target(shard, i)) grad_weight[(y - shard.start) * depth_ + k] += dz * h;
            const double part = row.r * sum + dz * weight(y);
            out.grad_hidden[i * depth_ + k] += rounded(static_cast<float>(part), DType::bf16);
        }
    }

    const Problem& problem_;
    const std::vector<Shard>& shards_;
    std::int64_t telling_;
    std::int64_t depth_;
    std::int64_t classes_;
    std::int64_t tokens_;
    std::int64_t valid_ = 0;
    std::vector<double> logits_;  ///< [tokens, classes]
    std::vector<float> lse_;
};

/// A problem with classes [begin, end) whose logits are `nats` higher.
Problem raised(std::int64_t begin, std::int64_t end, float nats) {
    const Spec spec = parse_spec("D=40,V=300,fp8,class_offset");
    Problem p = make_problem(spec, {.num_tokens = 60, .ignored = Ignored::none, .upstream = false, .seed = 31});
    p.class_offset.assign(300, 0.F);
    for (std::int64_t j = begin; j < end; ++j) p.class_offset[j] = nats;
    if (std::isinf(nats)) {
        for (std::int64_t& label : p.target) label = label >= begin && label < end ? end + label % (300 - end) : label;
    }
    return p;
}

TEST(Fp8ShardsTruth, AnyPowersOfRanks_AreRight) {
    constexpr float kOut = -std::numeric_limits<float>::infinity();
    const std::vector<Shard> shards = shards_of(300, {200, 100});
    const std::tuple<std::int64_t, std::int64_t, float> cases[] = {
        {0, 0, 0.F},       {200, 300, -12.F}, {200, 300, -40.F}, {200, 300, -300.F}, {0, 200, -12.F}, {0, 200, -30.F},
        {0, 200, -2000.F}, {160, 190, 9.F},   {160, 190, 30.F},  {0, 150, kOut},     {0, 200, kOut}};
    for (const auto& [begin, end, nats] : cases) {
        EXPECT_EQ(SimulatedRanks(raised(begin, end, nats), shards, 150).failures(Fault::none), "") << begin << " " << end << " " << nats;
    }
}

TEST(Fp8ShardsTruth, Faults_AreFound) {
    const std::vector<Shard> shards = shards_of(300, {200, 100});
    const Problem problem = raised(0, 0, 0.F);
    const SimulatedRanks ranks(problem, shards, 150);
    for (const Fault fault : {Fault::no_target, Fault::power_of_another, Fault::target_twice}) EXPECT_NE(ranks.failures(fault), "");
}

}  // namespace
}  // namespace flce::test
