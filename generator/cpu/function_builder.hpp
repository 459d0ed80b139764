// The thin structured layer over IRBuilder that host code is emitted with: counted loops with carried values, conditions, vectors of
// floats, loads and stores of every dtype. The emitted code is in SSA form and already vectorised, so no optimisation pass has to run.
//
// Only forward declarations of LLVM are needed here, so that tests can emit code without linking LLVM themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "flce/spec.hpp"

namespace llvm {
class IRBuilderBase;
class Module;
class Type;
class Value;
}  // namespace llvm

namespace flce {

/// Features of the machine that emitted code may use.
struct VectorTarget {
    int vector_bits = 128;  ///< 128, 256 or 512
    bool fma = false;       ///< fused multiply-add; CPUs that have it convert fp16 in hardware too
    bool bf16_dot = false;  ///< VDPBF16PS
    [[nodiscard]] int lanes() const noexcept { return vector_bits / 32; }  ///< floats of a vector
    friend bool operator==(const VectorTarget&, const VectorTarget&) = default;
};

/// Emits one extern "C" function that returns nothing.
class FunctionBuilder {
public:
    enum class Arg : std::uint8_t { pointer, i64 };
    using Values = std::vector<llvm::Value*>;

    FunctionBuilder(llvm::Module& module, const VectorTarget& target, const std::string& symbol, const std::vector<Arg>& args);
    ~FunctionBuilder();
    FunctionBuilder(const FunctionBuilder&) = delete;
    FunctionBuilder& operator=(const FunctionBuilder&) = delete;

    [[nodiscard]] const VectorTarget& target() const noexcept { return target_; }
    [[nodiscard]] llvm::Value* arg(int index);
    [[nodiscard]] llvm::IRBuilderBase& ir() noexcept;
    [[nodiscard]] llvm::Module& module() noexcept { return module_; }
    /// Ends the function. Nothing can be emitted after it.
    void finish();
    /// Calls an extern "C" function `void symbol()` that the loader finds in the process.
    void call_external(const std::string& symbol);

    // Types: `lanes` == 0 is a scalar.
    [[nodiscard]] llvm::Type* float_type(int lanes);
    [[nodiscard]] llvm::Type* int_type(int bits, int lanes);
    [[nodiscard]] llvm::Value* i64(std::int64_t value);
    [[nodiscard]] llvm::Value* i32_splat(std::int32_t value, int lanes);
    [[nodiscard]] llvm::Value* float_splat(float value, int lanes);
    /// A scalar in every lane.
    [[nodiscard]] llvm::Value* splat(llvm::Value* scalar, int lanes);

    /// for (i = begin; i < end; i += step) carried = body(i, carried); returns the carried values at the end.
    Values loop(llvm::Value* begin, llvm::Value* end, std::int64_t step, const Values& carried,
                const std::function<Values(llvm::Value* index, const Values& carried)>& body);
    void loop(llvm::Value* begin, llvm::Value* end, std::int64_t step, const std::function<void(llvm::Value* index)>& body);
    /// if (condition) then(); else otherwise(); either may be empty.
    void branch(llvm::Value* condition, const std::function<void()>& then, const std::function<void()>& otherwise = {});
    /// condition ? then(carried) : carried
    Values branch_carried(llvm::Value* condition, const Values& carried, const std::function<Values(const Values&)>& then);

    [[nodiscard]] llvm::Value* byte_offset(llvm::Value* pointer, llvm::Value* bytes);
    /// pointer + index · element_bytes
    [[nodiscard]] llvm::Value* at(llvm::Value* pointer, llvm::Value* index, std::int64_t element_bytes);
    [[nodiscard]] llvm::Value* at(llvm::Value* pointer, std::int64_t index, std::int64_t element_bytes);

    // Memory operands need only their element's alignment.
    [[nodiscard]] llvm::Value* load_float(llvm::Value* pointer, DType dtype, int lanes);  ///< converted to fp32
    void store_float(llvm::Value* value, llvm::Value* pointer, DType dtype, int lanes);   ///< rounded to nearest even
    [[nodiscard]] llvm::Value* load_bits(llvm::Value* pointer, int bits, int lanes);
    void store_bits(llvm::Value* value, llvm::Value* pointer, int bits);
    /// fp32 to the bits of bf16, rounded to nearest even, NaN kept: i16 or a vector of i16.
    [[nodiscard]] llvm::Value* bf16_bits(llvm::Value* value, int lanes);

    /// fp32 rounded to what a 16-bit dtype holds, to nearest even.
    [[nodiscard]] llvm::Value* round_to(llvm::Value* value, DType dtype, int lanes);

    /// a·b + c, fused where the target fuses.
    [[nodiscard]] llvm::Value* multiply_add(llvm::Value* a, llvm::Value* b, llvm::Value* c);
    [[nodiscard]] llvm::Value* max(llvm::Value* a, llvm::Value* b);
    /// Reductions over the lanes, as a balanced tree: a fixed order.
    [[nodiscard]] llvm::Value* reduce_max(llvm::Value* vector, int lanes);
    [[nodiscard]] llvm::Value* reduce_add(llvm::Value* vector, int lanes);
    /// i1 per lane: first + lane < end (i64 scalars).
    [[nodiscard]] llvm::Value* lanes_below(llvm::Value* first, llvm::Value* end, int lanes);

private:
    struct State;
    llvm::Value* bits_to_float(llvm::Value* bits, DType dtype, int lanes);
    llvm::Value* half_to_float(llvm::Value* bits, int lanes);
    llvm::Value* float_to_half_bits(llvm::Value* value, int lanes);
    llvm::Value* reduce(llvm::Value* vector, int lanes, const std::function<llvm::Value*(llvm::Value*, llvm::Value*)>& combine);

    llvm::Module& module_;
    VectorTarget target_;
    std::unique_ptr<State> state_;
};

}  // namespace flce
