#include "tests/support/interpreter.hpp"

#include <cstring>
#include <variant>

#include "flce/error.hpp"

namespace flce::test {
namespace {

class Interpreter {
public:
    Interpreter(const LaunchProgram& program, const CallSlots& slots, const std::function<void(const InterpretedLaunch&)>& on_launch,
                const std::function<void(std::int64_t, std::int64_t)>& on_memset,
                const std::function<void(const InterpretedGemm&)>& on_gemm)
        : slots_(slots),
          on_launch_(on_launch),
          on_memset_(on_memset),
          on_gemm_(on_gemm),
          variables_(static_cast<std::size_t>(program.variable_count), 0) {}

    void run(const std::vector<Statement>& body) {
        for (const Statement& statement : body) std::visit([this](const auto& s) { execute(s); }, statement.value);
    }

private:
    [[nodiscard]] std::int64_t value(const Expr& e) const { return evaluate(e, slots_, variables_); }

    void execute(const Launch& launch) {
        InterpretedLaunch result{launch.kernel, {}, std::vector<std::byte>(launch.param_bytes), {}};
        for (std::size_t i = 0; i < 3; ++i) {
            result.grid[i] = value(launch.grid[i]);
            if (result.grid[i] <= 0) return;
        }
        check_fields(launch);
        for (const ParamField& field : launch.params) {
            const std::int64_t v = value(field.value);  // little endian: the first four bytes are the low half
            std::memcpy(result.params.data() + field.offset, &v, field.bytes);
        }
        for (const TensorMapField& map : launch.maps) {
            result.maps.push_back({map.offset, static_cast<std::uint32_t>(value(map.box_rows)), map.element_bytes, value(map.address),
                                   value(map.columns), value(map.rows), value(map.row_bytes), value(map.blocks), value(map.block_bytes)});
        }
        on_launch_(result);
    }

    void execute(const Loop& loop) {
        const std::int64_t count = value(loop.count);
        for (std::int64_t i = 0; i < count; ++i) {
            variables_.at(static_cast<std::size_t>(loop.variable)) = i;
            run(loop.body);
        }
    }

    void execute(const If& branch) {
        if (value(branch.condition) != 0) run(branch.then);
    }

    void execute(const MemsetZero& memset) {
        const std::int64_t bytes = value(memset.bytes);
        if (bytes > 0) on_memset_(value(memset.address), bytes);
    }

    void execute(const Gemm& gemm) {
        const InterpretedGemm result{gemm.kind,
                                     value(gemm.m),
                                     value(gemm.n),
                                     value(gemm.k),
                                     value(gemm.a),
                                     value(gemm.lda),
                                     value(gemm.b),
                                     value(gemm.ldb),
                                     value(gemm.result),
                                     value(gemm.ld),
                                     value(gemm.adds) != 0,
                                     value(gemm.factors),
                                     value(gemm.workspace)};
        if (result.m <= 0 || result.n <= 0) return;
        if (!on_gemm_) throw InternalError("a program with a Gemm, and nobody to take it");
        on_gemm_(result);
    }

    const CallSlots& slots_;
    const std::function<void(const InterpretedLaunch&)>& on_launch_;
    const std::function<void(std::int64_t, std::int64_t)>& on_memset_;
    const std::function<void(const InterpretedGemm&)>& on_gemm_;
    std::vector<std::int64_t> variables_;
};

}  // namespace

void interpret(const LaunchProgram& program, const CallSlots& slots, const std::function<void(const InterpretedLaunch&)>& on_launch,
               const std::function<void(std::int64_t address, std::int64_t bytes)>& on_memset,
               const std::function<void(const InterpretedGemm&)>& on_gemm) {
    Interpreter(program, slots, on_launch, on_memset, on_gemm).run(program.body);
}

}  // namespace flce::test
