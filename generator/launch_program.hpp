// A launch program: the host side of a pass over a kernel set, as data. The generator writes it, the runtime lowers it to machine code with
// LLVM (one indirect call per pass, constants of Spec and Plan folded in), and tests interpret it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "flce/spec.hpp"
#include "generator/call_slots.hpp"

namespace flce {

/// An integer expression over call slots and loop variables, 64-bit, wrapping never expected. Division rounds towards zero and is only used
/// on non-negative numbers. Built with operators: ceil_div(slot(Slot::num_tokens), 128) * 4.
class Expr {
public:
    enum class Op : std::uint8_t { constant, slot, variable, add, sub, mul, div, min, max, equal, less, select };
    struct Node {
        Op op;
        std::int64_t value = 0;  // constant; slot or variable index
        std::vector<Expr> args;
    };

    Expr(std::int64_t constant);  // NOLINT(google-explicit-constructor): numbers mix with expressions
    explicit Expr(std::shared_ptr<const Node> node) : node_(std::move(node)) {}
    [[nodiscard]] const Node& node() const noexcept { return *node_; }
    /// The value if the expression is a constant (operators fold), else nullptr.
    [[nodiscard]] const std::int64_t* constant() const noexcept;

private:
    std::shared_ptr<const Node> node_;
};

[[nodiscard]] Expr slot(Slot slot);
[[nodiscard]] Expr variable(int index);
[[nodiscard]] Expr operator+(const Expr& a, const Expr& b);
[[nodiscard]] Expr operator-(const Expr& a, const Expr& b);
[[nodiscard]] Expr operator*(const Expr& a, const Expr& b);
[[nodiscard]] Expr floor_div(const Expr& a, const Expr& b);
[[nodiscard]] Expr ceil_div(const Expr& a, const Expr& b);
[[nodiscard]] Expr round_up(const Expr& a, const Expr& multiple);
[[nodiscard]] Expr round_down(const Expr& a, const Expr& multiple);
[[nodiscard]] Expr min(const Expr& a, const Expr& b);
[[nodiscard]] Expr max(const Expr& a, const Expr& b);
[[nodiscard]] Expr equal(const Expr& a, const Expr& b);  ///< 1 or 0
[[nodiscard]] Expr less(const Expr& a, const Expr& b);   ///< 1 or 0

// Logic over conditions, which are 1 or 0. Both sides of && and || are evaluated; only select leaves a side out.
[[nodiscard]] Expr operator!(const Expr& a);
[[nodiscard]] Expr operator&&(const Expr& a, const Expr& b);
[[nodiscard]] Expr operator||(const Expr& a, const Expr& b);
[[nodiscard]] Expr and_not(const Expr& a, const Expr& b);  ///< a && !b, in one operation

[[nodiscard]] Expr select(const Expr& condition, const Expr& then, const Expr& otherwise);
/// The bits of a float as a constant, for 4-byte parameter fields.
[[nodiscard]] Expr float_bits(float value);

/// Value of `e` for these slots and loop variables. The argument that select does not take is not evaluated and may be a division by zero.
/// Throws ArgumentError where a value does not fit in 64 bits (too many tokens) and for a division by zero.
[[nodiscard]] std::int64_t evaluate(const Expr& e, const CallSlots& slots, const std::vector<std::int64_t>& variables = {});

/// C-like texts of expressions. Parts that they share would grow with every use if they were written out in full: a part longer than
/// kLongest gets a name (t1, t2, …).
class SharedTexts {
public:
    static constexpr std::size_t kLongest = 100;

    [[nodiscard]] std::string of(const Expr& e);
    /// "t1 = num_tokens * …" in the order of the names, of what has been asked for so far.
    [[nodiscard]] const std::vector<std::string>& definitions() const { return definitions_; }

private:
    struct Part {
        Expr expr;  ///< kept, so that its address stays its own
        std::string text;
        int precedence = 0;
    };
    void append(const Expr& e, int least_precedence, std::string& out);

    std::unordered_map<const Expr::Node*, Part> parts_;
    std::unordered_map<std::string, std::string> names_;
    std::vector<std::string> definitions_;
};

/// One field of a kernel's parameter block.
struct ParamField {
    std::uint32_t offset = 0;
    std::uint32_t bytes = 8;  ///< 4 or 8
    Expr value;
};

/// A tensor map in a kernel's parameter block: how the copy engine sees a row-major matrix, copied in boxes of 128 bytes (swizzled) and
/// box_rows rows. Elements outside the matrix read as 0 and are not written. With `blocks` it is three-dimensional: that many such matrices
/// of the same size.
struct TensorMapField {
    static constexpr std::uint32_t kBytes = 128;
    static constexpr std::uint32_t kBoxBytes = 128;
    std::uint32_t offset = 0;         ///< a multiple of 64
    std::uint32_t element_bytes = 2;  ///< 1: any 8-bit type; 2: any 16-bit type; 4: fp32
    Expr box_rows{0};                 ///< 1 to 256
    Expr address{0};                  ///< a multiple of 16
    Expr columns{0};
    Expr rows{0};
    Expr row_bytes{0};    ///< bytes from one row to the next, a multiple of 16
    Expr blocks{0};       ///< 0: two dimensions
    Expr block_bytes{0};  ///< bytes from one block to the next, a multiple of 16
};

/// Launches kernel number `kernel` of the set. Grids with a zero dimension launch nothing.
struct Launch {
    int kernel = 0;
    std::array<Expr, 3> grid{Expr(1), Expr(1), Expr(1)};
    std::uint32_t param_bytes = 0;
    std::vector<ParamField> params;  ///< fields not named are zero
    std::vector<TensorMapField> maps;
};

/// Facts of a Gemm that are the same in every call.
struct GemmKind {
    std::string_view name;  ///< for people: "grad_weight"; a literal
    bool transpose_a = false;
    bool transpose_b = false;
    DType operands = DType::bf16;
    DType result = DType::fp32;
    int algorithm = 0;  ///< number among the algorithms that the library names for the product, its favourite first
    friend bool operator==(const GemmKind&, const GemmKind&) = default;
};
/// A product of row-major matrices by the vendor's library: result[m, n] = factor · a · b, or added to what is there. A matrix that is
/// transposed lies in memory as [k, m] or [n, k]. Nothing where m or n is 0; k is at least 1.
struct Gemm {
    GemmKind kind;
    Expr m{0};
    Expr n{0};
    Expr k{0};
    Expr a{0};    ///< address
    Expr lda{0};  ///< elements from one row in memory to the next, and so are ldb and ld
    Expr b{0};
    Expr ldb{0};
    Expr result{0};
    Expr ld{0};
    Expr adds{0};       ///< not 0: the product is added
    Expr factors{0};    ///< address of three floats on the device: the factor, 0 and 1; 0: the factor is 1
    Expr workspace{0};  ///< address of kGemmWorkspaceBytes
};
/// Bytes of scratch that the library may use in a call.
inline constexpr std::int64_t kGemmWorkspaceBytes = 4 << 20;

struct Statement;
struct Loop {  ///< for (variable = 0; variable < count; ++variable) body
    int variable = 0;
    Expr count{0};
    std::vector<Statement> body;
};
struct If {
    Expr condition{0};
    std::vector<Statement> then;
};
struct MemsetZero {  ///< asynchronous on the call's stream; nothing where bytes is 0
    Expr address{0};
    Expr bytes{0};
};
struct Statement {
    std::variant<Launch, Loop, If, MemsetZero, Gemm> value;
};

struct LaunchProgram {
    std::vector<Statement> body;
    int variable_count = 0;
};

/// Statement `number` of the program: they are counted from 0 in order, a Loop or If before its body. Throws InternalError where there is
/// none.
[[nodiscard]] const Statement& numbered_statement(const LaunchProgram& program, std::size_t number);

/// The program as bytes, for cache keys: equal for programs of equal statements, and for no others. Parts that are alike are one, however
/// they were built.
[[nodiscard]] std::string program_identity(const LaunchProgram& program);

/// A kernel of the set, by the facts that a launch needs besides parameters.
struct KernelEntry {
    std::string name;  ///< extern "C" symbol in the cubin
    std::uint32_t block_threads = 0;
    std::uint32_t dynamic_smem_bytes = 0;
    /// Launched with programmatic stream serialization: it may come onto SMs that the kernel before it has left, and waits itself for that
    /// one's end.
    bool overlaps_previous = false;
};

/// Throws InternalError where a field or a map reaches past the parameter block, or a map is not aligned.
void check_fields(const Launch& launch);

}  // namespace flce
