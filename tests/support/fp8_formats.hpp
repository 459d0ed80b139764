// Formats of 8 bits in fp64, by definition.
#pragma once

#include <algorithm>
#include <cmath>

namespace flce::test {

/// A floating-point format of 8 bits.
struct Format {
    int bits;   ///< behind the leading one
    int least;  ///< exponent of the smallest normal number
    double most;
};
inline constexpr Format kE4m3{3, -6, 448};
inline constexpr Format kE5m2{2, -14, 57344};

inline double quantum(const Format& format, double size) {
    const int exponent = size > 0 ? std::max(std::ilogb(size), format.least) : format.least;
    return std::ldexp(1.0, exponent - format.bits);
}
/// The nearest number, of two the even one, and the largest for everything beyond.
inline double nearest(const Format& format, double x) {
    if (std::isnan(x)) return x;
    const double size = std::min(std::fabs(x), format.most);
    const double unit = quantum(format, size);
    return std::copysign(std::min(std::nearbyint(size / unit) * unit, format.most), x);
}
/// How far the number of something between `low` and `high` may be from `number`.
inline double doubt(const Format& format, double number, double low, double high) {
    return std::max(std::fabs(nearest(format, high) - number), std::fabs(nearest(format, low) - number));
}

/// Further error of a number that another kernel may have `octaves` lower in the format's range. `higher`: the kernel's may also be higher,
/// so that numbers too small for this one have a rounding of their own there.
inline double below_range(const Format& format, double size, double number, int octaves, bool higher) {
    if (octaves == 0 || !(size < std::ldexp(1.0, format.least + octaves))) return 0;
    const double unit = std::ldexp(1.0, format.least - format.bits + octaves);
    const double all = higher ? size * (1 + std::ldexp(1.0, -format.bits - 1)) : size;
    return std::min(unit / 2 + quantum(format, std::fabs(number)), all + std::fabs(number));
}

/// The largest power of two with which `largest` stays within e4m3's range.
inline int power_for(double largest) {
    int power = -120;
    if (!(largest > 0)) return 0;
    while (power < 120 && std::ldexp(largest, power + 1) <= kE4m3.most) ++power;
    return power;
}

}  // namespace flce::test
