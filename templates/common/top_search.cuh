// Search for a bound that about as many logits of a token reach as classes are wanted. Plain C++, as row_math.cuh.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/top_classes.cuh"
#else
#include <cmath>

#include "templates/common/top_classes.cuh"
#endif

namespace flce {

/// Classes that are kept of a token while further columns of the vocabulary follow. Any bound that top_k to this many logits reach will
/// do, so that few bounds have to be tried.
FLCE_HOST_DEVICE constexpr int most_kept_classes(int top_k) { return top_k + top_k / 4 > 64 ? top_k + top_k / 4 : 64; }

/// Numbers of logits with which a search ends.
struct TopWanted {
    int least;
    int most;

    /// Logarithm of the number to aim at, to the base 2: near the least one where the two are close, else halfway.
    FLCE_HOST_DEVICE float target() const {
        return 2 * most >= 3 * least ? (log2_of(least) + log2_of(most)) / 2 : log2_of(least + least / 16);
    }
    static FLCE_HOST_DEVICE float log2_of(int count) {
#if defined(__CUDACC__)
        return __log2f(static_cast<float>(count));
#else
        return std::log2(static_cast<float>(count));
#endif
    }
};

/// State of a search. Bounds are tried as order_of has them. The logarithm of the number of logits above a bound falls about evenly where
/// few are left, so a line through two points tells the next bound. After some bounds that missed, halves of the interval are taken: 32
/// more end any search.
struct TopBoundSearch {
    enum : int { kLineRounds = 8 };
    enum : int { kAboveLeastMaximum = 105 };  ///< logits above the least of 32 equal parts' maxima, about, of logits in any order

    struct Point {
        float bound;
        float log;  ///< log2 of the number of logits that reach the bound; −1: none does
    };
    unsigned low;   ///< more logits reach this order than are wanted
    unsigned high;  ///< fewer reach this one
    Point upper;    ///< points of the line
    Point lower;
    int rounds;

    /// `largest`, `least`: order_of of the largest logit, and of the least maximum of 32 parts.
    FLCE_HOST_DEVICE TopBoundSearch(unsigned largest, unsigned least)
        : low(order_of_nothing()),
          high(largest + 1u),
          upper{logit_of_order(largest), 0.f},
          lower{logit_of_order(least), TopWanted::log2_of(kAboveLeastMaximum)},
          rounds(0) {}

    /// Whether no bound is left between the two: logits of order `low` are equal, and too many.
    FLCE_HOST_DEVICE bool ended() const { return high - low <= 1u; }
    /// The next bound to try, between low and high.
    FLCE_HOST_DEVICE unsigned next(float target) const {
        const unsigned guess = order_of(lower.bound + (lower.log - target) * quotient(upper.bound - lower.bound, lower.log - upper.log));
        const bool between = guess > low && guess < high;  // NaN's order is 0
        return between && rounds < kLineRounds ? guess : low + (high - low) / 2u;
    }
    /// Tells how many logits reach a bound that was tried. `most`: TopWanted's.
    FLCE_HOST_DEVICE void tell(unsigned tried, int count, int most, float target) {
        (count > most ? low : high) = tried;
        const Point found{logit_of_order(tried), count > 0 ? TopWanted::log2_of(count) : -1.f};
        if (!(found.log > target)) upper = lower.log > target ? found : lower;
        if (found.log > target || !(lower.log > target)) lower = found;
        ++rounds;
    }

private:
    static FLCE_HOST_DEVICE unsigned order_of_nothing() { return order_of(float_of(0xff800000u)); }  // −∞, which all logits reach
    static FLCE_HOST_DEVICE float quotient(float a, float b) {
#if defined(__CUDACC__)
        return __fdividef(a, b);
#else
        return a / b;
#endif
    }
};

}  // namespace flce
