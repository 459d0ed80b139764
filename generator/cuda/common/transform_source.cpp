#include "generator/cuda/common/transform_source.hpp"

#include <fmt/format.h>

#include <memory>
#include <regex>
#include <utility>
#include <vector>

#include "generator/logit_transforms.hpp"

namespace flce {
namespace {

/// Statements written so far; every operation becomes one, so that nothing is computed twice.
struct Statements {
    std::string text{};
    std::string math{};
    std::string indent{};
    int count = 0;
};

/// A number that writes down the operations on it.
class TextNumber {
public:
    TextNumber(float literal) : name_(fmt::format("{:#}f", literal)) {}  // NOLINT(google-explicit-constructor): formulas mix numbers
    TextNumber(std::string name, std::shared_ptr<Statements> statements) : name_(std::move(name)), statements_(std::move(statements)) {}

    [[nodiscard]] const std::string& name() const { return name_; }

    friend TextNumber operator+(const TextNumber& a, const TextNumber& b) { return binary(a, "+", b); }
    friend TextNumber operator-(const TextNumber& a, const TextNumber& b) { return binary(a, "-", b); }
    friend TextNumber operator*(const TextNumber& a, const TextNumber& b) { return binary(a, "*", b); }
    friend TextNumber tanh(const TextNumber& a) { return define(a, a, fmt::format("{}::tanh({})", a.statements_->math, a.name_)); }

private:
    static TextNumber binary(const TextNumber& a, const char* op, const TextNumber& b) {
        return define(a, b, fmt::format("{} {} {}", a.name_, op, b.name_));
    }
    static TextNumber define(const TextNumber& a, const TextNumber& b, const std::string& value) {
        const std::shared_ptr<Statements>& statements = a.statements_ ? a.statements_ : b.statements_;
        std::string name = fmt::format("t{}", statements->count++);
        statements->text += fmt::format("{}const float {} = {};\n", statements->indent, name, value);
        return {std::move(name), statements};
    }

    std::string name_;
    std::shared_ptr<Statements> statements_;
};

std::vector<TextNumber> parameter_names(const Spec& spec, const std::shared_ptr<Statements>& statements) {
    std::vector<TextNumber> parameters;
    for (std::size_t i = 0; i < transform_parameters(spec).size(); ++i) parameters.emplace_back(fmt::format("p[{}]", i), statements);
    return parameters;
}

}  // namespace

std::string transform_source(const Spec& spec, const std::string& math, const std::string& indent) {
    const auto statements = std::make_shared<Statements>(Statements{.math = math, .indent = indent});
    const std::vector<TextNumber> parameters = parameter_names(spec, statements);
    const TransformedLogit<TextNumber> z = transform_logit(spec, TextNumber("x", statements), std::span<const TextNumber>(parameters));
    std::string text = statements->text + fmt::format("{}return {{{}, {}}};\n", indent, z.logit.name(), z.derivative.name());
    // The gradient of an offset has a derivative of 1, whatever the transform's is: NVRTC warns of numbers that nobody reads.
    for (int i = statements->count - 1; i >= 0; --i) {
        const std::string begin = fmt::format("{}const float t{} = ", indent, i);
        const std::size_t at = text.find(begin);
        const std::size_t end = text.find('\n', at) + 1;
        const std::regex use(fmt::format("\\bt{}\\b", i));
        if (!std::regex_search(text.begin() + static_cast<std::ptrdiff_t>(end), text.end(), use)) text.erase(at, end - at);
    }
    return text;
}

std::string derivative_source(const Spec& spec, const std::string& indent) {
    const auto statements = std::make_shared<Statements>(Statements{.indent = indent});
    const std::vector<TextNumber> parameters = parameter_names(spec, statements);
    const TextNumber derivative = derivative_at_logit(spec, TextNumber("z", statements), std::span<const TextNumber>(parameters));
    return statements->text + fmt::format("{}return {};\n", indent, derivative.name());
}

}  // namespace flce
