#include "generator/launch_text.hpp"

#include <fmt/format.h>

#include <array>
#include <utility>
#include <variant>

namespace flce {
namespace {

class ProgramText {
public:
    struct Line {
        std::size_t depth;  ///< Loops and Ifs that hold the statement
        std::string text;
    };

    ProgramText(const LaunchProgram& program, const std::vector<KernelEntry>& kernels) : kernels_(kernels) { append(program.body, 0); }
    [[nodiscard]] const std::vector<Line>& lines() const { return lines_; }
    [[nodiscard]] const std::vector<std::string>& definitions() const { return parts_.definitions(); }

private:
    void append(const std::vector<Statement>& body, std::size_t depth) {
        for (const Statement& statement : body) {
            lines_.push_back({depth, std::visit([this](const auto& s) { return text_of(s); }, statement.value)});
            if (const auto* loop = std::get_if<Loop>(&statement.value)) append(loop->body, depth + 1);
            if (const auto* branch = std::get_if<If>(&statement.value)) append(branch->then, depth + 1);
        }
    }

    // Texts of parts are made one by one, in braces: their names are given in this order, whatever the compiler.
    std::string text_of(const Launch& launch) {
        const std::array<std::string, 3> grid = {parts_.of(launch.grid[0]), parts_.of(launch.grid[1]), parts_.of(launch.grid[2])};
        std::string text = fmt::format("launch {} grid({}, {}, {}) params[{}]", kernels_.at(static_cast<std::size_t>(launch.kernel)).name,
                                       grid[0], grid[1], grid[2], launch.param_bytes);
        for (const ParamField& field : launch.params) text += fmt::format(" {}+{}: {};", field.offset, field.bytes, parts_.of(field.value));
        for (const TensorMapField& map : launch.maps) text += text_of(map);
        return text;
    }
    std::string text_of(const TensorMapField& map) {
        const std::array<std::string, 7> of = {parts_.of(map.rows),    parts_.of(map.columns), parts_.of(map.row_bytes),
                                               parts_.of(map.address), parts_.of(map.blocks),  parts_.of(map.block_bytes),
                                               parts_.of(map.box_rows)};
        const std::string matrix = fmt::format(" {}: map {} x {} of {} bytes every {} from {} by {}", map.offset, of[0], of[1],
                                               map.element_bytes, of[2], of[3], of[6]);
        return matrix + (of[4] == "0" ? ";" : fmt::format(", {} blocks every {};", of[4], of[5]));
    }
    std::string text_of(const Loop& loop) { return fmt::format("for i{} < {}", loop.variable, parts_.of(loop.count)); }
    std::string text_of(const If& branch) { return fmt::format("if {}", parts_.of(branch.condition)); }
    std::string text_of(const MemsetZero& memset) {
        const std::array<std::string, 2> of = {parts_.of(memset.address), parts_.of(memset.bytes)};
        return fmt::format("memset {}, {} bytes", of[0], of[1]);
    }
    std::string text_of(const Gemm& gemm) {
        std::array<std::string, 12> of;
        std::size_t next = 0;
        for (const Expr* e : {&gemm.m, &gemm.n, &gemm.k, &gemm.a, &gemm.lda, &gemm.b, &gemm.ldb, &gemm.result, &gemm.ld, &gemm.adds,
                              &gemm.factors, &gemm.workspace}) {
            of.at(next++) = parts_.of(*e);
        }
        return fmt::format(
            "gemm {} [{}, {}, {}] of {} from {} every {}{} and {} every {}{} to {} from {} every {}, adds {}, factors {}, "
            "workspace {}, algorithm {}",
            gemm.kind.name, of[0], of[1], of[2], to_string(gemm.kind.operands), of[3], of[4], gemm.kind.transpose_a ? " transposed" : "",
            of[5], of[6], gemm.kind.transpose_b ? " transposed" : "", to_string(gemm.kind.result), of[7], of[8], of[9], of[10], of[11],
            gemm.kind.algorithm);
    }

    const std::vector<KernelEntry>& kernels_;
    SharedTexts parts_;
    std::vector<Line> lines_;
};

}  // namespace

std::vector<std::string> statement_texts(const LaunchProgram& program, const std::vector<KernelEntry>& kernels) {
    const ProgramText text(program, kernels);
    std::vector<std::string> lines;
    for (const ProgramText::Line& line : text.lines()) lines.push_back(std::string(2 * line.depth, ' ') + line.text);
    lines.insert(lines.end(), text.definitions().begin(), text.definitions().end());
    return lines;
}

std::string statement_text(const LaunchProgram& program, const std::vector<KernelEntry>& kernels, std::size_t number) {
    return ProgramText(program, kernels).lines().at(number).text;
}

}  // namespace flce
