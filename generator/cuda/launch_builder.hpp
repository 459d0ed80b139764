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

    /// `member` of Params or of a struct that it extends.
    template <class Member, class Holder>
    LaunchBuilder& set(Member Holder::* member, Expr value) {
        static_assert(sizeof(Member) == 4 || sizeof(Member) == 8, "a field of a launch program");
        return field(offset_of<Member>(member), sizeof(Member), std::move(value));
    }
    /// A field of a struct that is a field.
    template <class Part, class Member, class Holder>
    LaunchBuilder& set(Part Holder::* part, Member Part::* member, Expr value) {
        static const Part object{};
        const auto within = reinterpret_cast<const std::byte*>(&(object.*member)) - reinterpret_cast<const std::byte*>(&object);
        return field(offset_of<Part>(part) + static_cast<std::uint32_t>(within), sizeof(Member), std::move(value));
    }
    template <class Member, std::size_t kCount, class Holder>
    LaunchBuilder& set_element(Member* (Holder::*member)[kCount], std::size_t index, Expr value) {
        return field(offset_of<Member* [kCount]>(member) + static_cast<std::uint32_t>(index * sizeof(Member*)), sizeof(Member*),
                     std::move(value));
    }
    LaunchBuilder& set_float(float Params::* member, float value) { return field(offset_of(member), 4, float_bits(value)); }

    /// The matrix that a tensor map shows; `box_rows` of its rows are copied at a time.
    struct Matrix {
        Expr address;
        Expr columns;
        Expr rows;
        Expr row_elements;    ///< from one row to the next
        Expr blocks{0};       ///< TensorMapField's
        Expr block_bytes{0};  ///< likewise
    };
    LaunchBuilder& set_map(TensorMap Params::* member, const Matrix& matrix, const Expr& box_rows, int element_bytes = 2) {
        launch_.maps.push_back({offset_of(member), static_cast<std::uint32_t>(element_bytes), box_rows, matrix.address, matrix.columns,
                                matrix.rows, matrix.row_elements * element_bytes, matrix.blocks, matrix.block_bytes});
        return *this;
    }

    /// Labels from `first_row` on.
    template <class Holder>
    LaunchBuilder& set_targets(TargetParams Holder::* member, const Expr& first_row) {
        const std::uint32_t base = offset_of<TargetParams>(member);
        field(base + offsetof(TargetParams, target), 8, slot(Slot::target) + first_row * floor_div(slot(Slot::target_bits), 8));
        field(base + offsetof(TargetParams, ignore_index), 8, slot(Slot::ignore_index));
        return field(base + offsetof(TargetParams, bits), 4, slot(Slot::target_bits));
    }
    /// `list` is an address in the workspace, or 0.
    template <class Holder>
    LaunchBuilder& set_list(RowList Holder::* member, const Expr& list, const Expr& scalars, const Expr& first) {
        const std::uint32_t base = offset_of<RowList>(member);
        field(base + offsetof(RowList, rows), 8, list);
        field(base + offsetof(RowList, valid), 8, scalars + static_cast<std::int64_t>(offsetof(PassScalars, valid_rows)));
        return field(base + offsetof(RowList, first), 4, first);
    }
    LaunchBuilder& set_count(CountParams Params::* member) {
        const std::uint32_t base = offset_of(member);
        field(base + offsetof(CountParams, num_valid), 8, slot(Slot::num_valid));
        field(base + offsetof(CountParams, code), 4, slot(Slot::num_valid_code));
        return field(base + offsetof(CountParams, reduction), 4, slot(Slot::reduction));
    }
    template <class Holder>
    LaunchBuilder& set_transform(float (Holder::*member)[kMaxTransformParameters], const Spec& spec) {
        static_assert(ScaleTransform::parameter_count + SoftcapTransform::parameter_count <= kMaxTransformParameters);
        std::uint32_t at = offset_of<float[kMaxTransformParameters]>(member);
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
