// The text of a CUDA program: one configuration and an instantiation of every kernel it needs, in units that are compiled side by side.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/kernel_role.hpp"
#include "generator/cuda_program.hpp"
#include "templates/common/params.cuh"

namespace flce {

struct CudaSource {
    std::vector<CudaUnit> units;
    std::vector<std::string> options;
    std::vector<KernelEntry> kernels;
    int named_threads = 32;  ///< threads that have a row of kernels over the rows' named classes (NamedOf)

    /// Number of the role's kernel in `kernels`, by which launches name it. Throws InternalError where the set has none.
    [[nodiscard]] int kernel(KernelRole role) const;
    /// Adds `entry` to `kernels` as the role's kernel.
    void add(KernelRole role, const KernelEntry& entry);

private:
    std::array<int, kKernelRoleCount> numbers_{};  ///< numbers of the roles' kernels, counted from 1; 0: the set has none
};

/// Whether an FP8 head's exponentials are read by classes: a gradient of the weight or of a bias is made of them.
[[nodiscard]] bool turns_exponentials(const Spec& spec);

/// A kernel over tiles, by its names in the path's templates.
struct GemmKernel {
    KernelRole role{};
    std::string params;    ///< parameter block, without temperatures and groups: "ForwardSm90Params"
    std::string function;  ///< function that the kernel calls: "forward_sm90"
    std::string stated;    ///< type that states kSmemBytes and kThreads: "ForwardSm90"
    std::string tile;      ///< type: "TileSm90<128, 192, 5, 2, true>"
    KernelBlock block{};
    std::string problem = "Problem";  ///< type that the kernel is an instance for
    bool overlaps_previous = false;   ///< KernelEntry's; the kernel waits by itself
    std::string_view header = {};     ///< file of templates/ that has the function, where KernelFamily's does not
};

/// A path's kernels, as far as the text of their units depends on it.
struct KernelFamily {
    std::string_view header;  ///< file of templates/ that includes everything that the path instantiates
    /// Whether kernels over rows may be brought onto the GPU while the kernel before them on the stream still runs, and wait there for its
    /// end (sm_90 and newer).
    bool overlaps = false;
    bool lists_rows = false;                  ///< whether kernels may leave ignored tokens out by a list of the others
    int segment_tiles = 0;                    ///< tiles of forward that are summed up apart from all others, with batch_invariant
    int retained_columns = kRetainedColumns;  ///< CudaPath's
    bool stretches = false;                   ///< whether a launch of forward may compute some columns of the vocabulary
    bool picks_named = false;                 ///< whether forward picks the logits of a teacher's classes from its tiles
    bool tells_falls = true;                  ///< whether kernels have Falls where a spec allows them
};

/// Collects kernels, and for each the extern "C" function that instantiates it: GEMM kernels in units of their own, the small ones in the
/// first.
class KernelWriter {
public:
    KernelWriter(const Spec& spec, const Device& device, const Plan& plan, const KernelFamily& family);

    void gemm(const GemmKernel& kernel);
    /// Kernels over rows that every path's forward and backward have.
    void row_kernels();
    /// Kernels over rows that options ask for: for a rounded weight, a teacher, a bias, and columns past the vocabulary.
    void option_kernels();
    /// Who waits for the end of the launch before, where launches overlap. before_it_calls: as `before`, and then the next launch's blocks
    /// may come onto free SMs. Not of a kernel that leaves SMs free for a collective's blocks.
    enum class Waits : std::uint8_t { before, before_it_calls, itself };
    /// A kernel over rows. `function`: the template's name, where that is not the role's. `per_sm`: KernelBlock's.
    void rows(KernelRole role, std::string_view params, int threads = kRowThreads, Waits waits = Waits::before,
              std::string_view function = {}, int per_sm = 1);
    /// The kernel that ranks classes, where the spec has a top_k. Up to 64 classes leave room for so many blocks on an SM that all of
    /// 4096 rows are worked on at once.
    void top_classes(Waits waits);

    [[nodiscard]] CudaSource finish() && { return std::move(source_); }

private:
    void add(CudaUnit& unit, KernelRole role, std::string_view params, const std::string& body, const KernelBlock& block);

    const Spec& spec_;
    CudaSource source_;
    std::string configuration_;
    std::string problem_of_rows_;  ///< type that kernels over rows are instances for
    bool overlaps_;
};

/// Whether backward must zero columns past the vocabulary one by one (a hidden_major gradient that is overwritten).
[[nodiscard]] bool zeroes_columns(const Spec& spec);

}  // namespace flce
