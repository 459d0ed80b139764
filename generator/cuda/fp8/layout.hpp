// Layouts of cuda_fp8's passes: how the vocabulary is cut, and where codes, scales and exponentials lie.
#pragma once

#include "generator/cuda/common/workspace.hpp"

namespace flce::fp8 {

[[nodiscard]] bool is_hidden_major(const Spec& spec);

/// Bytes from one row of codes to the next.
[[nodiscard]] std::int64_t code_pitch(const Spec& spec);
/// Positions of all tokens in a turned copy.
[[nodiscard]] Expr token_positions();

/// Columns of the vocabulary that are worked on one after the other, all of one width but the last.
struct Cut {
    Expr first{0};
    Expr end{0};
    Expr width{0};
    Expr count{0};
};

/// Memory that forward leaves for backward: the largest number of the weight, the rows' powers, and exponentials of the first columns both
/// ways. A function of Slot::retained_bytes and retained_in_grad_weight, so that both passes agree.
struct RetainedFp8 {
    Expr columns{0};
    Expr pitch{0};   ///< bytes from one row of exponentials to the next
    Expr powers{0};  ///< offset, and so are the next three; the largest number lies at 0
    Expr target_logits{0};
    Expr exponentials{0};  ///< [N, pitch]
    Expr turned{0};        ///< [columns, token_positions]
    Expr most{0};          ///< most bytes that there is a use for
    Expr lendable{0};      ///< bytes of grad_weight that may be lent; 0 where its memory will not do, as that of a hidden_major one
    Expr lent{0};          ///< whether the memory is grad_weight's
};
[[nodiscard]] RetainedFp8 retained_layout(const Spec& spec, const Plan& plan);

struct ForwardLayoutFp8 : ForwardLayout {
    RetainedFp8 retained;
    Cut cut;  ///< stretches of the vocabulary whose codes exist at once
    // Offsets, bytes.
    Expr largest{0};       ///< Fp8Largest
    Expr powers{0};        ///< [N], where nothing is retained
    Expr again{0};         ///< Fp8StaleParams'
    Expr row_scales{0};    ///< [N]
    Expr hidden_codes{0};  ///< [N, code_pitch]
    Expr column_scales{0};
    Expr column_factors{0};  ///< [stretch], of a hidden_major weight
    Expr weight_codes{0};    ///< [stretch, code_pitch]
};
[[nodiscard]] ForwardLayoutFp8 forward_layout(const Spec& spec, const Plan& plan);

/// Places of a chunk of columns: addresses.
struct ChunkPlaces {
    Expr turned_weight{0};  ///< [D, width]
    Expr weight_codes{0};   ///< [width, code_pitch], and what follows where logits are made again
    Expr exponentials{0};   ///< [N, width]
    Expr turned{0};         ///< [width, token_positions]
};

struct BackwardLayoutFp8 : BackwardLayout {
    RetainedFp8 retained;
    Cut kept;                ///< chunks of the retained part, for grad_hidden
    std::vector<Cut> again;  ///< chunks of the rest
    std::vector<ChunkPlaces> again_places;
    ChunkPlaces kept_places;
    // Offsets, bytes.
    Expr largest{0};        ///< Fp8Largest
    Expr powers{0};         ///< [N], and so are the next five
    Expr factors{0};        //
    Expr target_dz{0};      //
    Expr target_logits{0};  //
    Expr order{0};          //
    Expr row_scales{0};     //
    Expr row_shares{0};     ///< [N], with the entropy
    Expr row_smoothing{0};  ///< [N], with label smoothing, and SmoothingSums' memory
    Expr smoothing{0};      //
    Expr class_scales{0};   ///< [V], of the most classes that a shard has, and so is the next one, where logits are made again
    Expr class_factors{0};  //
    Expr hidden_codes{0};   ///< [N, code_pitch]
    Expr hidden_turned{0};  ///< [D, token_positions]
    Expr sum{0};            ///< [N, D] fp32
};
[[nodiscard]] BackwardLayoutFp8 backward_layout(const Spec& spec, const Device& device, const Plan& plan);

/// CudaPath::least_scratch_bytes.
[[nodiscard]] std::int64_t least_scratch_bytes(const Spec& spec, const Plan& plan);

}  // namespace flce::fp8
