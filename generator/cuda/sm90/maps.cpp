#include "generator/cuda/sm90/maps.hpp"

namespace flce::sm90 {

MappedMatrix weight_matrix(const Spec& spec, const Expr& address, const Expr& columns) {
    if (spec.layout == WeightLayout::vocab_major) return {address, spec.hidden_size, columns, spec.hidden_size};
    return {address, columns, spec.hidden_size, spec.padded_vocab_size};
}

MappedMatrix rounded_matrix(const Spec& spec, const Expr& address, const Expr& columns) {
    return {address, spec.hidden_size, columns, spec.hidden_size};
}

Expr retained_at(const Expr& offset) { return slot(Slot::retained) + offset; }

bool reads_vocab_major(const Spec& spec) noexcept { return spec.layout == WeightLayout::vocab_major || rounds_weight(spec); }

}  // namespace flce::sm90
