#include "tests/support/fp8.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "tests/support/fp8_formats.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/quantized.hpp"

namespace flce::test {
namespace {

constexpr double kU = 0x1p-24;
constexpr double kLog2E = 1.44269504F;  // fp32's

/// One row of the logits' operands.
struct Codes {
    std::vector<double> codes;
    float scale = 0;
};
/// `given`: the spec's scale of the operand, or 0.
Codes codes_of(const Spec& spec, double given, const float* row) {
    Codes result;
    result.codes.assign(static_cast<std::size_t>(spec.hidden_size), 0.0);
    float largest = 0;
    for (std::int64_t k = 0; k < spec.hidden_size; ++k) {
        if (!std::isfinite(row[k])) {
            result.scale = std::numeric_limits<float>::quiet_NaN();
            return result;
        }
        largest = std::max(largest, std::fabs(row[k]));
    }
    if (given == 0 ? largest < 0x1p-100F : largest == 0) return result;
    const float most = spec.fp8 == Fp8Operands::int8 ? 127.F : 448.F;
    const float factor = given == 0 ? most / largest : 1 / float(given);
    result.scale = given == 0 ? largest / most : float(given);
    for (std::int64_t k = 0; k < spec.hidden_size; ++k) {
        const float scaled = row[k] * factor;
        result.codes[k] =
            spec.fp8 == Fp8Operands::int8 ? std::clamp(std::nearbyint(double(scaled)), -127.0, 127.0) : nearest(kE4m3, double(scaled));
    }
    return result;
}

/// A row of a weight of codes.
Codes codes_of_row(const Problem& problem, std::int64_t row) {
    Codes result;
    result.scale = problem.codes.scales[static_cast<std::size_t>(row)];
    const std::byte* const codes = &problem.codes.codes[static_cast<std::size_t>(row * problem.spec.hidden_size)];
    for (std::int64_t k = 0; k < problem.spec.hidden_size; ++k) {
        result.codes.push_back(double(from_e4m3(std::to_integer<std::uint8_t>(codes[k]))));
    }
    return result;
}
Codes codes_of_weight(const Problem& problem, std::int64_t row) {
    if (is_quantized(problem.spec)) return codes_of_row(problem, row);
    return codes_of(problem.spec, problem.spec.fp8_weight_scale, &problem.weight[static_cast<std::size_t>(row * problem.spec.hidden_size)]);
}

/// The layer, with numbers of codes as they are, not rounded to the dtype.
Layer<float> layer_of_numbers(const Problem& problem) {
    Layer<float> layer = layer_of(problem);
    if (is_quantized(problem.spec)) layer.weight = problem.unrounded_weight.data();
    return layer;
}

void append(const Codes& of, std::vector<double>& numbers) {
    for (const double code : of.codes) numbers.push_back(code * double(of.scale));
}

/// A sum in fp32 of products of label smoothing, and how far off one may be.
struct Sum {
    double value = 0;
    double sizes = 0;
    void add(double term) {
        value += term;
        sizes += std::fabs(term);
    }
    [[nodiscard]] double error(std::int64_t length) const { return kU * (40 + 3 * std::sqrt(double(length))) * sizes; }
};

double slope_of_softcap(const Spec& spec, double x) {
    if (spec.softcap <= 0 || spec.offset_gradient) return 1;
    const double t = std::tanh(spec.logit_scale * x / spec.softcap);
    return 1 - t * t;
}

/// A token's numbers in backward.
struct Row {
    bool valid = false;
    std::int64_t label = 0;
    double a = 0, t = 0, a_terms = 0;  ///< factor of its probabilities at z = lse, what the label's is less by, and Σ |terms| of the first
    double b = 0;                      ///< times z − lse, what the factor of a probability is more by
    double scale = 0;                  ///< unit of both, where there is a b
    double gain = 1;                   ///< slope that all of its logits have
    double s = 0;                      ///< label smoothing's part, times a class's weight, slope included
    double k = 0;
    double r = 0, r_error = 0;
    double label_gradient = 0, label_error = 0;
    double logit_size = 0;  ///< Fp8Truth::logit_sizes
    Codes hidden;
    std::vector<double> e, e_doubt, e_ties;    ///< [V]: exponentials as codes have them, how far off they may be, and that by ties
    std::vector<double> h, h_ties;             ///< [D]: hidden states as operands of grad_weight
    std::vector<std::vector<double>> h_doubt;  ///< [shards][D]
    std::vector<double> largest;               ///< [shards]: the largest logit
};

class TruthMaker {
public:
    TruthMaker(const Problem& problem, const std::vector<float>& lse, const std::vector<float>& logprobs,
               const std::vector<double>& entropy, const Fp8Tolerance& tolerance, const Fp8Shards& shards)
        : problem_(problem),
          layer_(layer_of_numbers(problem)),
          spec_(problem.spec),
          lse_(lse),
          logprobs_(logprobs),
          entropy_(entropy),
          tolerance_(tolerance),
          shards_(shards),
          divide_(divisors(layer_)),
          format_(spec_.fp8_dlogits == Fp8Dlogits::e5m2 ? kE5m2 : kE4m3) {
        if (shards.of.empty()) shards_ = {{{.classes = spec_.vocab_size}}, grad_hidden_dtype(spec_)};
        for (std::size_t s = 0; s < shards_.of.size(); ++s) shard_of_.insert(shard_of_.end(), shards_.of[s].classes, s);
        sharded_ = !shards.of.empty();
    }

    Fp8Truth make() {
        const std::int64_t n = problem_.num_tokens();
        const std::int64_t v = spec_.vocab_size;
        for (std::int64_t j = 0; j < v; ++j) {
            weight_.push_back(codes_of_weight(problem_, j));
            classes_ += layer_.class_weight_of(j);
        }
        rows_.resize(static_cast<std::size_t>(n));
        for (std::int64_t i = 0; i < n; ++i) set_row(i, rows_[i]);
        find_powers();
        for (Row& row : rows_) {
            if (row.valid) set_hidden(row);
            out_.logit_sizes.push_back(row.logit_size);
        }
        out_.grad_hidden.assign(static_cast<std::size_t>(n * spec_.hidden_size), 0.0);
        out_.grad_weight.assign(static_cast<std::size_t>(v * spec_.hidden_size), 0.0);
        out_.hidden_limit = out_.grad_hidden;
        out_.weight_limit = out_.grad_weight;
        for (std::int64_t i = 0; i < n; ++i) {
            if (rows_[i].valid) set_grad_hidden(i);
        }
        for (std::int64_t j = 0; j < v; ++j) set_grad_weight(j);
        if (layer_.bias != nullptr) {
            for (std::int64_t j = 0; j < v; ++j) add_grad_bias(j);
        }
        out_.hidden_norm = std::sqrt(out_.hidden_norm);
        out_.hidden_ties = std::sqrt(out_.hidden_ties);
        out_.weight_ties = std::sqrt(out_.weight_ties);
        out_.bias_ties = std::sqrt(out_.bias_ties);
        return std::move(out_);
    }

private:
    [[nodiscard]] double upstream(const float* values, std::int64_t i, double absent) const {
        return values != nullptr ? double(values[i]) : absent;
    }

    void set_coefficients(std::int64_t i, Row& row) const {
        const double factor = layer_.token_weight_of(i) * (spec_.dft ? std::exp(double(logprobs_[i])) : 1);
        const double g = factor * upstream(layer_.grad_loss, layer_.reduction == Reduction::none ? i : 0, spec_.outputs.loss ? 1 : 0);
        const double hard = g / divide_.cross_entropy * (1 - spec_.label_smoothing) * layer_.class_weight_of(row.label);
        const double smoothing = g / divide_.cross_entropy * spec_.label_smoothing / double(spec_.vocab_size);
        const double z_loss = g / divide_.z_loss * spec_.z_loss * 2 * double(lse_[i]);
        const double of_lse = upstream(layer_.grad_lse, i, 0);
        const double of_logprob = upstream(layer_.grad_logprobs, i, 0);
        row.a = hard + smoothing * classes_ + z_loss + of_lse - of_logprob;
        row.a_terms = std::fabs(hard) + std::fabs(smoothing * classes_) + std::fabs(z_loss) + std::fabs(of_lse) + std::fabs(of_logprob);
        row.b = -upstream(layer_.grad_entropy, i, 0);
        if (row.b != 0) {
            row.a += row.b * entropy_[i];
            row.a_terms += std::fabs(row.b) * (std::fabs(entropy_[i]) + 2 * std::fabs(double(lse_[i])));
        }
        row.scale = row.b == 0 ? row.a : std::max(std::fabs(row.a), std::fabs(row.b));
        row.t = hard - of_logprob;
        row.gain = (spec_.offset_gradient ? 1 : spec_.logit_scale) / layer_.temperature_of(i);
        row.s = smoothing * row.gain;
    }

    void set_row(std::int64_t i, Row& row) {
        row.valid = layer_.valid(i);
        if (!row.valid) return;
        row.label = layer_.target[i];
        set_coefficients(i, row);
        row.hidden = codes_of(spec_, spec_.fp8_hidden_scale, layer_.hidden + i * spec_.hidden_size);
        const double lse = lse_[i];
        row.k = std::floor(lse_[i] * 1.44269504F) - (spec_.fp8_dlogits == Fp8Dlogits::e5m2 ? 14 : 7);
        const double unit = std::exp2(row.k - lse * kLog2E);
        row.r = row.scale * row.gain * unit;
        row.r_error = std::fabs(unit * row.gain) * (40 * kU * row.a_terms + (spec_.dft ? 8 * kU * row.a_terms : 0));
        for (auto* values : {&row.e, &row.e_doubt, &row.e_ties}) values->assign(static_cast<std::size_t>(spec_.vocab_size), 0.0);
        row.largest.assign(shards_.of.size(), -std::numeric_limits<double>::infinity());
        for (std::int64_t j = 0; j < spec_.vocab_size; ++j) set_exponential(i, j, row);
    }

    void set_exponential(std::int64_t i, std::int64_t j, Row& row) const {
        double sum = 0;
        double sizes = 0;
        double squares = 0;
        for (std::int64_t k = 0; k < spec_.hidden_size; ++k) {
            const double product = row.hidden.codes[k] * weight_[j].codes[k];
            sum += product;
            sizes += std::fabs(product);
            squares += product * product;
        }
        const double scale = double(row.hidden.scale) * double(weight_[j].scale);
        row.logit_size = std::max(row.logit_size, sizes * scale * std::fabs(spec_.logit_scale) / layer_.temperature_of(i));
        const double bias = layer_.bias != nullptr ? double(layer_.bias[j]) : 0;
        const double offset = layer_.offset_of(i, j);
        const double x = sum * scale + bias;
        const double z = logit_of(spec_, x, offset, layer_.temperature_of(i));
        double& largest = row.largest[shard_of_[j]];
        largest = std::max(largest, z);
        const double depth = std::sqrt(double(spec_.hidden_size));
        const double roundoff = tolerance_.sum_roundoff;
        const double summed = spec_.fp8 == Fp8Operands::int8 ? 0 : 4 * depth * roundoff * scale * (std::sqrt(squares) + std::fabs(sum));
        const double x_error = summed + 4 * kU * (std::fabs(sum * scale) + std::fabs(bias));
        const double offset_size = std::isinf(offset) ? 0 : std::fabs(offset);
        const double z_size = std::isinf(offset) ? 0 : std::fabs(z);
        const double z_error =
            std::fabs(spec_.logit_scale) / layer_.temperature_of(i) * x_error + 8 * kU * (z_size + offset_size / layer_.temperature_of(i));
        const double slope = slope_of_softcap(spec_, x);
        const double slope_error = spec_.softcap > 0 && !spec_.offset_gradient ? 24 * kU + 4 * x_error / spec_.softcap : 0;
        if (j == row.label) {
            const double p = std::exp(z - double(lse_[i]));
            const double factor = row.a + (row.b == 0 ? 0 : row.b * (z - double(lse_[i])));
            const double inner = factor * p - row.t;
            row.label_gradient = inner * slope * row.gain;
            const double inner_error =
                (std::fabs(factor) + std::fabs(row.b)) * p * (z_error + 4 * kU * (std::fabs(double(lse_[i])) + z_size + 4)) +
                16 * kU * (row.a_terms * p + std::fabs(row.t) + row.a_terms);
            row.label_error = std::fabs(row.gain) * (inner_error * slope + std::fabs(inner) * slope_error);
            return;
        }
        const double power = z * kLog2E - row.k;
        const double power_error = 2 * z_error + 4 * kU * (z_size * 2 + std::fabs(row.k) + 8);
        const double low = std::exp2(power - power_error) * std::max(0.0, slope - slope_error);
        const double high = std::exp2(power + power_error) * (slope + slope_error);
        if (row.b != 0 && std::isfinite(z)) return set_shared(j, row, {low, std::exp2(power) * slope, high}, z - double(lse_[i]), z_error);
        row.e[j] = nearest(format_, std::exp2(power) * slope);
        row.e_ties[j] = doubt(format_, row.e[j], low, high);
        row.e_doubt[j] = row.e_ties[j] + below_range(format_, high, row.e[j], tolerance_.octaves, sharded_);
    }

    /// Sets a class's number where the entropy has a gradient: an exponential times its factor, in units of the row's.
    void set_shared(std::int64_t j, Row& row, std::array<double, 3> exponential, double below_lse, double z_error) const {
        const double share = (row.a + row.b * below_lse) / row.scale;
        const double error = (40 * kU * row.a_terms + std::fabs(row.b) * (z_error + 4 * kU * std::fabs(below_lse))) / row.scale;
        const double value = exponential[1] * share;
        const double off = (exponential[2] - exponential[0]) * std::fabs(share) + exponential[2] * error;
        row.e[j] = nearest(format_, value);
        row.e_ties[j] = doubt(format_, row.e[j], value - off, value + off);
        row.e_doubt[j] = row.e_ties[j] + below_range(format_, std::fabs(value) + off, row.e[j], tolerance_.octaves, sharded_);
    }

    /// Powers that a rank may give a row: on a GPU it knows no other rank's logits where forward keeps exponentials.
    [[nodiscard]] std::pair<double, double> powers_of(const Row& row, std::size_t shard) const {
        if (!sharded_ || tolerance_.octaves == 0 || spec_.fp8_dlogits == Fp8Dlogits::e4m3) return {row.k, row.k};
        const double largest = std::max(std::floor(row.largest[shard] * kLog2E), row.k - 1000);
        return {std::min(row.k, largest - 17), std::max(row.k, largest - 3)};
    }

    /// Largest |hidden| of a token, of numbers that are finite.
    [[nodiscard]] double largest_hidden(const Row& row) const {
        const float* hidden = layer_.hidden + (&row - rows_.data()) * spec_.hidden_size;
        double most = 0;
        for (std::int64_t k = 0; k < spec_.hidden_size; ++k) {
            if (std::isfinite(hidden[k])) most = std::max(most, std::fabs(double(hidden[k])));
        }
        return most;
    }

    void find_powers() {
        for (const Shard& shard : shards_.of) {
            double largest = 0;
            for (std::int64_t at = shard.start * spec_.hidden_size; at < (shard.start + shard.classes) * spec_.hidden_size; ++at) {
                if (std::isfinite(layer_.weight[at])) largest = std::max(largest, std::fabs(double(layer_.weight[at])));
            }
            weight_powers_.push_back(power_for(largest));
            for (std::int64_t at = shard.start * spec_.hidden_size; at < (shard.start + shard.classes) * spec_.hidden_size; ++at) {
                narrow_.push_back(nearest(kE4m3, std::ldexp(double(layer_.weight[at]), weight_powers_.back())));
            }
        }
        double of_tokens = 0;
        std::vector<double> of_shards(shards_.of.size(), 0.0);
        for (const Row& row : rows_) {
            if (!row.valid || !std::isfinite(row.r)) continue;
            const double most = std::fabs(row.r) * largest_hidden(row);
            of_tokens = std::max(of_tokens, most);
            for (std::size_t s = 0; s < of_shards.size(); ++s) {
                of_shards[s] = std::max(of_shards[s], most * std::exp2(powers_of(row, s).second - row.k));
            }
        }
        hidden_power_ = power_for(of_tokens);
        for (const double most : of_shards) least_hidden_powers_.push_back(power_for(most));
    }

    void set_hidden(Row& row) const {
        const float* hidden = layer_.hidden + (&row - rows_.data()) * spec_.hidden_size;
        row.h_doubt.resize(shards_.of.size());
        for (std::int64_t k = 0; k < spec_.hidden_size; ++k) {
            const double x = std::ldexp(double(hidden[k]) * row.r, hidden_power_);
            const double error = std::ldexp(std::fabs(double(hidden[k])) * (row.r_error + 4 * kU * std::fabs(row.r)), hidden_power_);
            const double number = nearest(kE4m3, x);
            row.h.push_back(number);
            row.h_ties.push_back(doubt(kE4m3, number, x - error, x + error));
            for (std::size_t s = 0; s < shards_.of.size(); ++s) {
                const int lower = static_cast<int>(row.k - powers_of(row, s).first) + hidden_power_ - least_hidden_powers_[s];
                const int octaves = std::max(tolerance_.octaves, lower);
                row.h_doubt[s].push_back(row.h_ties.back() + below_range(kE4m3, std::fabs(x), number, octaves, sharded_));
            }
        }
    }

    [[nodiscard]] double summing(std::int64_t length) const { return tolerance_.sum_roundoff * (8 + 3 * std::sqrt(double(length))); }
    [[nodiscard]] double summing_gradient(std::int64_t length) const { return summing(std::min(length, tolerance_.longest_sum)); }
    [[nodiscard]] double storing(double value, DType dtype) const {
        return 1.01 * unit_roundoff(dtype) * std::fabs(value) + underflow_error(dtype);
    }
    /// Error of storing a gradient of the weight that is `limit` off already. `own`: its targets' terms.
    [[nodiscard]] double storing_weight(double value, double own, double limit) const {
        const double error = storing(std::fabs(value) + limit, spec_.grad_weight_dtype);
        return tolerance_.stores_twice ? error + storing(std::fabs(value - own) + limit, spec_.grad_weight_dtype) : error;
    }

    void set_grad_hidden(std::int64_t i) {
        for (std::int64_t k = 0; k < spec_.hidden_size; ++k) {
            for (std::size_t s = 0; s < shards_.of.size(); ++s) add_grad_hidden(i, k, s);
        }
    }
    /// Adds a shard's part, which is stored in the dtype.
    void add_grad_hidden(std::int64_t i, std::int64_t k, std::size_t s) {
        const Row& row = rows_[i];
        const Shard& shard = shards_.of[s];
        const double unit = std::ldexp(1.0, -weight_powers_[s]);
        double sum = 0;
        double sizes = 0;
        double doubts = 0;
        double ties = 0;
        Sum smoothing;
        for (std::int64_t j = shard.start; j < shard.start + shard.classes; ++j) {
            if (row.s != 0) smoothing.add(layer_.class_weight_of(j) * double(layer_.weight[j * spec_.hidden_size + k]));
            const double w = narrow_[j * spec_.hidden_size + k];
            sum += row.e[j] * w;
            sizes += std::fabs(row.e[j] * w);
            doubts += row.e_doubt[j] * std::fabs(w);
            ties += row.e_ties[j] * row.e_ties[j] * w * w;
        }
        const bool has_label = shard_of_[row.label] == s;
        const double own = has_label ? unit * narrow_[row.label * spec_.hidden_size + k] : 0;
        const double part = row.r * unit * sum + (has_label ? row.label_gradient * own : 0) - row.s * smoothing.value;
        const double limit = std::fabs(row.r) * unit * (doubts + summing_gradient(shard.classes) * sizes) + row.r_error * unit * sizes +
                             (has_label ? row.label_error * std::fabs(own) + 4 * kU * std::fabs(row.label_gradient * own) : 0) +
                             std::fabs(row.s) * smoothing.error(shard.classes);
        const std::int64_t at = i * spec_.hidden_size + k;
        out_.grad_hidden[at] += part;
        out_.hidden_limit[at] += limit + storing(std::fabs(part) + limit, shards_.grad_hidden_dtype);
        if (!std::isfinite(part)) return;
        out_.hidden_norm += part * part;
        out_.hidden_ties += row.r * row.r * unit * unit * ties;
    }

    void set_grad_weight(std::int64_t j) {
        const double unit = std::ldexp(1.0, -hidden_power_);
        for (std::int64_t k = 0; k < spec_.hidden_size; ++k) {
            double sum = 0;
            double sizes = 0;
            double doubts = 0;
            double ties = 0;
            double own = 0;
            double own_error = 0;
            Sum smoothing;
            for (std::size_t i = 0; i < rows_.size(); ++i) {
                const Row& row = rows_[i];
                if (!row.valid) continue;
                sum += row.e[j] * row.h[k];
                sizes += std::fabs(row.e[j] * row.h[k]);
                const double h_doubt = row.h_doubt[shard_of_[j]][k];
                doubts += row.e_doubt[j] * (std::fabs(row.h[k]) + h_doubt) + std::fabs(row.e[j]) * h_doubt;
                ties += row.e_ties[j] * row.e_ties[j] * row.h[k] * row.h[k] + row.e[j] * row.e[j] * row.h_ties[k] * row.h_ties[k];
                if (row.s != 0) smoothing.add(row.s * double(layer_.hidden[static_cast<std::int64_t>(i) * spec_.hidden_size + k]));
                if (row.label != j) continue;
                const double h = layer_.hidden[static_cast<std::int64_t>(i) * spec_.hidden_size + k];
                own += row.label_gradient * h;
                own_error += (row.label_error + 8 * kU * std::fabs(row.label_gradient)) * std::fabs(h);
            }
            const std::int64_t at = j * spec_.hidden_size + k;
            const double c = layer_.class_weight_of(j);
            out_.grad_weight[at] = unit * sum + own - c * smoothing.value;
            const double old = problem_.old_grad_weight.empty() ? 0 : double(problem_.old_grad_weight[at]);
            const double limit = unit * (doubts + summing_gradient(std::ssize(rows_)) * sizes) + own_error +
                                 4 * kU * (std::fabs(own) + std::fabs(old)) + c * smoothing.error(std::ssize(rows_));
            out_.weight_limit[at] = limit + storing_weight(out_.grad_weight[at], own, std::fabs(old) + limit);
            if (std::isfinite(out_.grad_weight[at])) out_.weight_ties += unit * unit * ties;
        }
    }

    void add_grad_bias(std::int64_t j) {
        double sum = 0;
        double of_targets = 0;
        double limit = 0;
        for (const Row& row : rows_) {
            if (!row.valid) continue;
            const bool own = row.label == j;
            const double taken = row.s * layer_.class_weight_of(j);
            const double part = (own ? row.label_gradient : row.r * row.e[j]) - taken;
            sum += part;
            if (own) of_targets += row.label_gradient;
            limit += (own ? row.label_error : std::fabs(row.r) * row.e_doubt[j] + row.r_error * std::fabs(row.e[j])) +
                     kU * (40 + 3 * std::sqrt(double(rows_.size()))) * std::fabs(taken) +
                     kU * (8 + 3 * std::sqrt(double(rows_.size()))) * std::fabs(part);
            if (std::isfinite(part)) out_.bias_ties += row.r * row.r * row.e_ties[j] * row.e_ties[j];
        }
        const double old = problem_.old_grad_bias.empty() ? 0 : double(problem_.old_grad_bias[j]);
        out_.grad_bias.push_back(sum);
        out_.bias_limit.push_back(limit + storing_weight(sum, of_targets, std::fabs(old) + limit));
    }

    const Problem& problem_;
    const Layer<float> layer_;
    const Spec& spec_;
    const std::vector<float>& lse_;
    const std::vector<float>& logprobs_;
    const std::vector<double>& entropy_;
    const Fp8Tolerance tolerance_;
    Fp8Shards shards_;                   ///< one that has everything where the layer is whole
    bool sharded_ = false;               //
    std::vector<std::size_t> shard_of_;  ///< [V]
    const Divisors divide_;
    const Format format_;
    double classes_ = 0;  ///< Σ c_j
    std::vector<Codes> weight_;
    std::vector<Row> rows_;
    std::vector<int> weight_powers_;  ///< [shards]
    std::vector<double> narrow_;      ///< [V, D]: the weight as an operand of grad_hidden
    int hidden_power_ = 0;
    std::vector<int> least_hidden_powers_;  ///< [shards]: the least that a kernel may have
    Fp8Truth out_;
};

}  // namespace

Fp8Tolerance fp8_tolerance(bool on_gpu) {
    // Exponentials above a row's reference, and sums of FP8 products in tensor cores: docs/numerics.md.
    if (on_gpu) return {.octaves = 12, .sum_roundoff = 0x1p-13, .longest_sum = 256, .stores_twice = true};
    return {};
}

std::vector<double> dequantised_rows(const Spec& spec, double given, const std::vector<float>& rows) {
    std::vector<double> numbers;
    for (std::size_t first = 0; first < rows.size(); first += static_cast<std::size_t>(spec.hidden_size)) {
        append(codes_of(spec, given, &rows[first]), numbers);
    }
    return numbers;
}

std::vector<double> dequantised_weight(const Problem& problem) {
    std::vector<double> numbers;
    for (std::int64_t j = 0; j < problem.spec.vocab_size; ++j) append(codes_of_weight(problem, j), numbers);
    return numbers;
}

Fp8Truth fp8_truth(const Problem& problem, const std::vector<float>& lse, const std::vector<float>& logprobs,
                   const std::vector<double>& entropy, const Fp8Tolerance& tolerance, const Fp8Shards& shards) {
    return TruthMaker(problem, lse, logprobs, entropy, tolerance, shards).make();
}

}  // namespace flce::test
