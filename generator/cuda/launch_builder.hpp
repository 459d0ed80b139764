// Builds launches over the parameter structs of templates/params.cuh by member, not by number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "flce/spec.hpp"
#include "generator/launch_program.hpp"
#include "generator/logit_transforms.hpp"
#include "templates/params.cuh"

namespace flce {

template <class Params>
class LaunchBuilder {
public:
    LaunchBuilder(int kernel, Expr grid_x, Expr grid_y = Expr(1)) {
        launch_.kernel = kernel;
        launch_.grid = {std::move(grid_x), std::move(grid_y), Expr(1)};
        launch_.param_bytes = sizeof(Params);
    }

    template <class Member>
    LaunchBuilder& set(Member Params::* member, Expr value) {
        static_assert(sizeof(Member) == 4 || sizeof(Member) == 8, "a field of a launch program");
        return field(offset_of(member), sizeof(Member), std::move(value));
    }
    LaunchBuilder& set_float(float Params::* member, float value) { return field(offset_of(member), 4, float_bits(value)); }

    /// Labels from `first_row` on.
    LaunchBuilder& set_targets(TargetParams Params::* member, const Expr& first_row) {
        const std::uint32_t base = offset_of(member);
        field(base + offsetof(TargetParams, target), 8, slot(Slot::target) + first_row * floor_div(slot(Slot::target_bits), 8));
        field(base + offsetof(TargetParams, ignore_index), 8, slot(Slot::ignore_index));
        return field(base + offsetof(TargetParams, bits), 4, slot(Slot::target_bits));
    }
    LaunchBuilder& set_count(CountParams Params::* member) {
        const std::uint32_t base = offset_of(member);
        field(base + offsetof(CountParams, num_valid), 8, slot(Slot::num_valid));
        field(base + offsetof(CountParams, code), 4, slot(Slot::num_valid_code));
        return field(base + offsetof(CountParams, reduction), 4, slot(Slot::reduction));
    }
    LaunchBuilder& set_transform(float (Params::*member)[kMaxTransformParameters], const Spec& spec) {
        static_assert(ScaleTransform::parameter_count + SoftcapTransform::parameter_count <= kMaxTransformParameters);
        std::uint32_t at = offset_of(member);
        for (const double value : transform_parameters(spec)) {
            field(at, 4, float_bits(static_cast<float>(value)));
            at += 4;
        }
        return *this;
    }

    [[nodiscard]] Statement build() { return {std::move(launch_)}; }

private:
    template <class Member>
    static std::uint32_t offset_of(Member Params::* member) {
        static const Params object{};
        return static_cast<std::uint32_t>(reinterpret_cast<const std::byte*>(&(object.*member)) -
                                          reinterpret_cast<const std::byte*>(&object));
    }
    LaunchBuilder& field(std::uint32_t offset, std::uint32_t bytes, Expr value) {
        launch_.params.push_back({offset, bytes, std::move(value)});
        return *this;
    }

    Launch launch_;
};

/// `pointer` moved by `elements` elements of `bytes`, or 0 where it is absent.
[[nodiscard]] inline Expr advanced(const Expr& pointer, const Expr& elements, std::int64_t bytes) {
    return select(equal(pointer, 0), 0, pointer + elements * bytes);
}

}  // namespace flce
