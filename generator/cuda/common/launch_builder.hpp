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

/// The fields of a SumShare.
struct SumShareFields {
    Expr room;
    Expr cluster_rows;
    Expr column_tiles;
    Expr clusters;
    Expr slices;
};

/// The fields of a SplitSumsParams.
struct SplitSumsFields {
    Expr partials;
    Expr target_logits;
    Expr scalars;
    Expr references;
    Expr retained_target_logits;
    Expr stale;
    Expr partial_rows;
    Expr splits;
};

/// Classes of the whole layer, from label `first` on, that a pass over a shard's spec has.
struct ClassRange {
    Expr first;
    Expr count;
};
[[nodiscard]] inline ClassRange classes_of_call() { return {slot(Slot::vocab_start), slot(Slot::vocab_columns)}; }
[[nodiscard]] inline ClassRange all_classes(const Spec& spec) { return {0, whole_vocab_size(spec)}; }

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
    LaunchBuilder& set_targets(TargetParams Holder::* member, const Spec& spec, const Expr& first_row,
                               const ClassRange& classes = classes_of_call()) {
        const std::uint32_t base = offset_of<TargetParams>(member);
        if (is_shard(spec)) {
            field(base + offsetof(TargetParams, first_class), 8, classes.first);
            field(base + offsetof(TargetParams, columns), 4, classes.count);
        }
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
    /// The teacher of rows from `first_row` on, where the spec has one. `classes`: as in set_targets.
    template <class Holder>
    LaunchBuilder& set_teacher(TeacherParams Holder::* member, const Spec& spec, const Expr& first_row,
                               const ClassRange& classes = classes_of_call()) {
        if (spec.teacher_top_k == 0) return *this;
        const std::uint32_t base = offset_of<TeacherParams>(member);
        if (is_shard(spec)) {
            field(base + offsetof(TeacherParams, first_class), 8, classes.first);
            field(base + offsetof(TeacherParams, columns), 4, classes.count);
        }
        const Expr first = first_row * std::int64_t{spec.teacher_top_k};
        field(base + offsetof(TeacherParams, ids), 8, slot(Slot::teacher_ids) + first * floor_div(slot(Slot::teacher_bits), 8));
        field(base + offsetof(TeacherParams, probs), 8, slot(Slot::teacher_probs) + first * 4);
        Expr logprobs = slot(Slot::teacher_logprobs) + first * 4;
        if (is_shard(spec)) {  // forward's logits are a part of its sums
            const Expr logits = slot(Slot::partial_sums) + (slot(Slot::num_tokens) * shard_fields(spec).teacher_logits + first_row) * 4;
            logprobs = select(equal(slot(Slot::partial_sums), 0), logprobs, logits);
            field(base + offsetof(TeacherParams, shard_rows), 8, slot(Slot::num_tokens));
        }
        field(base + offsetof(TeacherParams, logprobs), 8, logprobs);
        field(base + offsetof(TeacherParams, bits), 4, slot(Slot::teacher_bits));
        return field(base + offsetof(TeacherParams, top_k), 4, spec.teacher_top_k);
    }
    template <class Holder>
    LaunchBuilder& set_found(SplitSumsParams Holder::* member, const SplitSumsFields& found) {
        const std::uint32_t base = offset_of<SplitSumsParams>(member);
        field(base + offsetof(SplitSumsParams, partials), 8, found.partials);
        field(base + offsetof(SplitSumsParams, target_logits), 8, found.target_logits);
        field(base + offsetof(SplitSumsParams, scalars), 8, found.scalars);
        field(base + offsetof(SplitSumsParams, references), 8, found.references);
        field(base + offsetof(SplitSumsParams, retained_target_logits), 8, found.retained_target_logits);
        field(base + offsetof(SplitSumsParams, stale), 8, found.stale);
        field(base + offsetof(SplitSumsParams, partial_rows), 8, found.partial_rows);
        return field(base + offsetof(SplitSumsParams, splits), 4, found.splits);
    }
    template <class Holder>
    LaunchBuilder& set_slope(LogitSlope Holder::* member, const LogitSlope& slope) {
        const std::uint32_t base = offset_of<LogitSlope>(member);
        field(base + offsetof(LogitSlope, scale), 4, float_bits(slope.scale));
        return field(base + offsetof(LogitSlope, inverse_softcap), 4, float_bits(slope.inverse_softcap));
    }
    template <class Holder>
    LaunchBuilder& set_share(SumShare Holder::* member, const SumShareFields& share) {
        const std::uint32_t base = offset_of<SumShare>(member);
        field(base + offsetof(SumShare, room), 4, share.room);
        field(base + offsetof(SumShare, cluster_rows), 4, share.cluster_rows);
        field(base + offsetof(SumShare, column_tiles), 4, share.column_tiles);
        field(base + offsetof(SumShare, clusters), 4, share.clusters);
        return field(base + offsetof(SumShare, slices), 4, share.slices);
    }
    LaunchBuilder& set_count(CountParams Params::* member) {
        const std::uint32_t base = offset_of(member);
        field(base + offsetof(CountParams, num_valid), 8, slot(Slot::num_valid));
        field(base + offsetof(CountParams, code), 4, slot(Slot::num_valid_code));
        return field(base + offsetof(CountParams, reduction), 4, slot(Slot::reduction));
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

/// The launch of a kernel that sees logits. `temperatures`: of its rows, where the spec has them.
template <class Params>
[[nodiscard]] Statement build_tempered(LaunchBuilder<Params> launch, const Spec& spec, const Expr& temperatures) {
    if (!spec.temperature) return launch.build();
    LaunchBuilder<Tempered<Params>> tempered(std::move(launch));
    return tempered.set(&Tempered<Params>::temperatures, temperatures).build();
}

/// An address in the workspace.
[[nodiscard]] inline Expr workspace_at(const Expr& offset) { return slot(Slot::workspace) + offset; }

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
