// A launch program as bytes: its statements, with every expression written once and named by its number from then on.
#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "generator/launch_program.hpp"

namespace flce {
namespace {

class IdentityWriter {
public:
    std::string write(const LaunchProgram& program) {
        number(program.variable_count);
        write(program.body);
        return std::move(bytes_);
    }

private:
    enum class Tag : std::uint8_t { launch = 'L', loop = 'F', branch = 'I', memset = 'M', gemm = 'G', node = 'N' };
    static constexpr std::size_t kMostArgs = 3;

    /// An operation on numbered expressions; 0 is none.
    struct Operation {
        Expr::Op op{};
        std::int64_t value = 0;
        std::array<std::uint32_t, kMostArgs> args{};
        friend bool operator==(const Operation&, const Operation&) = default;
    };
    struct OperationHash {
        std::size_t operator()(const Operation& operation) const noexcept {
            constexpr std::size_t kOdd = 0x9E3779B97F4A7C15ULL;
            std::size_t hash = static_cast<std::size_t>(operation.op) * kOdd ^ static_cast<std::size_t>(operation.value);
            for (const std::uint32_t arg : operation.args) hash = (hash ^ arg) * kOdd;
            return hash ^ (hash >> 32U);
        }
    };

    template <class Number>
    void number(Number value) {
        const auto wide = static_cast<std::uint64_t>(value);
        std::array<char, sizeof(wide)> little{};
        for (unsigned byte = 0; byte < sizeof(wide); ++byte) little[byte] = static_cast<char>(wide >> (8 * byte));
        bytes_.append(little.data(), little.size());
    }
    void tag(Tag tag) { bytes_ += static_cast<char>(tag); }

    /// The expression's number; its definition stands before its first use.
    std::uint32_t define(const Expr& e) {
        const Expr::Node& node = e.node();
        if (node.args.empty()) return number_of({.op = node.op, .value = node.value});
        if (const auto known = numbers_.find(&node); known != numbers_.end()) return known->second;
        Operation operation{.op = node.op, .value = node.value};
        for (std::size_t i = 0; i < node.args.size(); ++i) operation.args.at(i) = define(node.args[i]);
        return numbers_.emplace(&node, number_of(operation)).first->second;
    }
    std::uint32_t number_of(const Operation& operation) {
        const auto next = static_cast<std::uint32_t>(operations_.size() + 1);
        const auto [at, is_new] = operations_.try_emplace(operation, next);
        if (is_new) {
            tag(Tag::node);
            bytes_ += static_cast<char>(operation.op);
            number(operation.value);
            for (const std::uint32_t arg : operation.args) number(arg);
        }
        return at->second;
    }
    template <class... Exprs>
    void define_all(const Exprs&... exprs) {
        const std::array<std::uint32_t, sizeof...(exprs)> numbers{define(exprs)...};  // in this order: definitions stand before the uses
        for (const std::uint32_t which : numbers) number(which);
    }

    void write(const std::vector<Statement>& body) {
        number(body.size());
        for (const Statement& statement : body) std::visit([this](const auto& s) { write(s); }, statement.value);
    }
    void write(const Launch& launch) {
        tag(Tag::launch);
        number(launch.kernel);
        number(launch.param_bytes);
        define_all(launch.grid[0], launch.grid[1], launch.grid[2]);
        number(launch.params.size());
        for (const ParamField& field : launch.params) {
            number(field.offset);
            number(field.bytes);
            define_all(field.value);
        }
        number(launch.maps.size());
        for (const TensorMapField& map : launch.maps) {
            number(map.offset);
            number(map.element_bytes);
            define_all(map.box_rows, map.address, map.columns, map.rows, map.row_bytes, map.blocks, map.block_bytes);
        }
    }
    void write(const Loop& loop) {
        tag(Tag::loop);
        number(loop.variable);
        define_all(loop.count);
        write(loop.body);
    }
    void write(const If& branch) {
        tag(Tag::branch);
        define_all(branch.condition);
        write(branch.then);
    }
    void write(const MemsetZero& memset) {
        tag(Tag::memset);
        define_all(memset.address, memset.bytes);
    }

    void write(const Gemm& gemm) {
        tag(Tag::gemm);
        const GemmKind& kind = gemm.kind;
        number(kind.name.size());
        bytes_ += kind.name;
        for (const int fact : {int{kind.transpose_a}, int{kind.transpose_b}, static_cast<int>(kind.operands), static_cast<int>(kind.result),
                               kind.algorithm}) {
            number(fact);
        }
        define_all(gemm.m, gemm.n, gemm.k, gemm.a, gemm.lda, gemm.b, gemm.ldb, gemm.result, gemm.ld, gemm.adds, gemm.factors,
                   gemm.workspace);
    }

    std::string bytes_;
    std::unordered_map<const Expr::Node*, std::uint32_t> numbers_;
    std::unordered_map<Operation, std::uint32_t, OperationHash> operations_;
};

}  // namespace

std::string program_identity(const LaunchProgram& program) { return IdentityWriter().write(program); }

}  // namespace flce
