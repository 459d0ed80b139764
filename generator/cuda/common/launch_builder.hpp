// Builds launches over the parameter structs of templates/common/params.cuh by member, not by number.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "flce/spec.hpp"
#include "generator/cuda/common/falls.hpp"
#include "generator/launch_program.hpp"
#include "generator/logit_transforms.hpp"
#include "generator/shard_layout.hpp"
#include "templates/common/output_params.cuh"

namespace flce {

/// A row-major matrix as a tensor map shows it.
struct MappedMatrix {
    Expr address;
    Expr columns;
    Expr rows;
    Expr row_elements;    ///< elements from one row to the next
    Expr blocks{0};       ///< TensorMapField's
    Expr block_bytes{0};  ///< TensorMapField's
};

/// Classes of the whole layer, from label `first` on, that a pass over a shard's spec has.
struct ClassRange {
    Expr first;
    Expr count;
};
[[nodiscard]] inline ClassRange classes_of_call() { return {slot(Slot::vocab_start), slot(Slot::vocab_columns)}; }
[[nodiscard]] inline ClassRange all_classes(const Spec& spec) { return {0, whole_vocab_size(spec)}; }

/// An address in the workspace.
[[nodiscard]] inline Expr workspace_at(const Expr& offset) { return slot(Slot::workspace) + offset; }
/// Address of the pass's PassScalars.
[[nodiscard]] inline Expr scalars_at() { return slot(Slot::workspace); }

template <class Params>
class LaunchBuilder {
public:
    LaunchBuilder(int kernel, Expr grid_x, Expr grid_y = Expr(1)) {
        launch_.kernel = kernel;
        launch_.grid = {std::move(grid_x), std::move(grid_y), Expr(1)};
        launch_.param_bytes = sizeof(Params);
    }
    /// The launch of a kernel whose parameters begin with those of `base`.
    template <class Base>
        requires(std::derived_from<Params, Base> && !std::same_as<Params, Base>)
    explicit LaunchBuilder(LaunchBuilder<Base> base) : launch_(std::move(base.launch_)) {
        static_assert(std::is_trivially_copyable_v<Params>, "a base lies at the beginning of what extends it");
        launch_.param_bytes = sizeof(Params);
    }

    /// `member` of Params or of a struct that it extends.
    template <class Member, class Holder>
    LaunchBuilder& set(Member Holder::* member, Expr value) {
        constexpr std::uint32_t kBytes = sizeof(Member);  // NOLINT(bugprone-sizeof-expression): of a pointer, where the member is one
        static_assert(kBytes == 4 || kBytes == 8, "a field of a launch program");
        return field(offset_of<Member>(member), kBytes, std::move(value));
    }
    /// `member` of the struct that `part` is.
    template <class Part, class Member, class Holder>
    LaunchBuilder& set(Part Holder::* part, Member Part::* member, Expr value) {
        constexpr std::uint32_t kBytes = sizeof(Member);  // NOLINT(bugprone-sizeof-expression)
        static_assert(kBytes == 4 || kBytes == 8, "a field of a launch program");
        return field(offset_of<Part>(part) + LaunchBuilder<Part>::offset_of(member), kBytes, std::move(value));
    }
    template <class Member, std::size_t kCount, class Holder>
    LaunchBuilder& set_element(Member* (Holder::*member)[kCount], std::size_t index, Expr value) {
        return field(offset_of<Member* [kCount]>(member) + static_cast<std::uint32_t>(index * sizeof(Member*)), sizeof(Member*),
                     std::move(value));
    }
    LaunchBuilder& set_float(float Params::* member, float value) { return field(offset_of(member), 4, float_bits(value)); }

    /// `box_rows` rows are copied at a time.
    LaunchBuilder& set_map(TensorMap Params::* member, const MappedMatrix& matrix, const Expr& box_rows, std::int64_t element_bytes = 2) {
        launch_.maps.push_back({offset_of(member), static_cast<std::uint32_t>(element_bytes), box_rows, matrix.address, matrix.columns,
                                matrix.rows, matrix.row_elements * element_bytes, matrix.blocks, matrix.block_bytes});
        return *this;
    }

    /// Labels from `first_row` on. `classes`: classes of the pass, where the spec is a shard's.
    template <class Holder>
    LaunchBuilder& set_targets(TargetParams Holder::* targets, const Spec& spec, const Expr& first_row,
                               const ClassRange& classes = classes_of_call()) {
        if (is_shard(spec)) {
            set(targets, &TargetParams::first_class, classes.first).set(targets, &TargetParams::columns, classes.count);
        }
        set(targets, &TargetParams::target, slot(Slot::target) + first_row * floor_div(slot(Slot::target_bits), 8));
        set(targets, &TargetParams::ignore_index, slot(Slot::ignore_index));
        return set(targets, &TargetParams::bits, slot(Slot::target_bits));
    }
    /// `rows` is an address in the workspace, or 0.
    template <class Holder>
    LaunchBuilder& set_list(RowList Holder::* list, const Expr& rows, const Expr& first) {
        set(list, &RowList::rows, rows);
        set(list, &RowList::valid, scalars_at() + static_cast<std::int64_t>(offsetof(PassScalars, valid_rows)));
        return set(list, &RowList::first, first);
    }
    /// The teacher of rows from `first_row` on, where the spec has one. `classes`: as in set_targets.
    template <class Holder>
    LaunchBuilder& set_teacher(TeacherParams Holder::* teacher, const Spec& spec, const Expr& first_row,
                               const ClassRange& classes = classes_of_call()) {
        if (spec.teacher_top_k == 0) return *this;
        if (is_shard(spec)) {
            set(teacher, &TeacherParams::first_class, classes.first).set(teacher, &TeacherParams::columns, classes.count);
        }
        const Expr first = first_row * std::int64_t{spec.teacher_top_k};
        set(teacher, &TeacherParams::ids, slot(Slot::teacher_ids) + first * floor_div(slot(Slot::teacher_bits), 8));
        set(teacher, &TeacherParams::probs, slot(Slot::teacher_probs) + first * 4);
        Expr logprobs = slot(Slot::teacher_logprobs) + first * 4;
        if (is_shard(spec)) {  // forward's logits are a part of its sums
            const Expr logits = slot(Slot::partial_sums) + (slot(Slot::num_tokens) * shard_fields(spec).teacher_logits + first_row) * 4;
            logprobs = select(equal(slot(Slot::partial_sums), 0), logprobs, logits);
            set(teacher, &TeacherParams::shard_rows, slot(Slot::num_tokens));
        }
        set(teacher, &TeacherParams::logprobs, logprobs).set(teacher, &TeacherParams::bits, slot(Slot::teacher_bits));
        return set(teacher, &TeacherParams::top_k, spec.teacher_top_k);
    }
    template <class Holder>
    LaunchBuilder& set_slope(LogitSlope Holder::* member, const LogitSlope& slope) {
        set(member, &LogitSlope::scale, float_bits(slope.scale));
        return set(member, &LogitSlope::inverse_softcap, float_bits(slope.inverse_softcap));
    }
    LaunchBuilder& set_count(CountParams Params::* count) {
        set(count, &CountParams::num_valid, slot(Slot::num_valid)).set(count, &CountParams::code, slot(Slot::num_valid_code));
        return set(count, &CountParams::reduction, slot(Slot::reduction));
    }
    template <class Holder>
    LaunchBuilder& set_transform(float (Holder::*member)[kMaxTransformParameters], const Spec& spec) {
        static_assert(ScaleTransform::parameter_count + SoftcapTransform::parameter_count <= kFallRate);
        static_assert(kFallSteepness == kFallRate + 1 && kFallSteepness < kMaxTransformParameters);
        const std::uint32_t base = offset_of<float[kMaxTransformParameters]>(member);
        const auto set_from = [&](std::uint32_t at, const auto& values) {
            for (const double value : values) field(base + 4 * at++, 4, float_bits(static_cast<float>(value)));
        };
        set_from(0, transform_parameters(spec));
        if (has_falls(spec)) set_from(kFallRate, fall_parameters(spec));
        return *this;
    }

    [[nodiscard]] Statement build() { return {std::move(launch_)}; }

private:
    template <class Other>
    friend class LaunchBuilder;

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

/// Addresses of a number of each row, where the spec has it.
struct RowNumbers {
    Expr temperatures;
    Expr groups{0};
};

template <class Params>
[[nodiscard]] Statement build_tempered(LaunchBuilder<Params> launch, const Spec& spec, const RowNumbers& rows) {
    if (!spec.temperature) return launch.build();
    LaunchBuilder<Tempered<Params>> tempered(std::move(launch));
    return tempered.set(&Tempered<Params>::temperatures, rows.temperatures).build();
}
/// The launch of a kernel that sees logits, with numbers of its rows.
template <class Params>
[[nodiscard]] Statement build_with_rows(LaunchBuilder<Params> launch, const Spec& spec, const RowNumbers& rows) {
    if (!spec.class_groups) return build_tempered(std::move(launch), spec, rows);
    LaunchBuilder<Grouped<Params>> grouped(std::move(launch));
    grouped.set(&Grouped<Params>::row_groups, rows.groups).set(&Grouped<Params>::class_groups, slot(Slot::class_group));
    return build_tempered(std::move(grouped), spec, rows);
}

/// Whether the call has the tensor.
[[nodiscard]] inline Expr present(Slot tensor) { return !equal(slot(tensor), 0); }

/// Whether the call asks for this reduction.
[[nodiscard]] inline Expr reduces_by(ReductionCode code) { return equal(slot(Slot::reduction), static_cast<std::int64_t>(code)); }

/// Whether the call does the part of a pass that comes first, and whether it does the rest: a whole call does both (StageCode).
[[nodiscard]] inline Expr does_first_stage() { return !equal(slot(Slot::stage), static_cast<std::int64_t>(StageCode::rest)); }
[[nodiscard]] inline Expr does_rest() { return !equal(slot(Slot::stage), static_cast<std::int64_t>(StageCode::first)); }

/// `pointer` moved by `elements` elements of `bytes`, or 0 where it is absent.
[[nodiscard]] inline Expr advanced(const Expr& pointer, const Expr& elements, std::int64_t bytes) {
    return select(equal(pointer, 0), 0, pointer + elements * bytes);
}

}  // namespace flce
