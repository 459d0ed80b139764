#include "generator/launch_program.hpp"

#include <algorithm>
#include <bit>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "flce/error.hpp"

namespace flce {
namespace {

using Op = Expr::Op;

Expr make_node(Op op, std::int64_t value, std::vector<Expr> args) {
    return Expr(std::make_shared<const Expr::Node>(Expr::Node{op, value, std::move(args)}));
}

/// The value of a binary operation; false where it does not exist in 64 bits (overflow, division by zero).
bool apply(Op op, std::int64_t a, std::int64_t b, std::int64_t& result) {
    switch (op) {
        case Op::add: return !__builtin_add_overflow(a, b, &result);
        case Op::sub: return !__builtin_sub_overflow(a, b, &result);
        case Op::mul: return !__builtin_mul_overflow(a, b, &result);
        case Op::div:
            if (b == 0 || (b == -1 && a == INT64_MIN)) return false;
            result = a / b;
            return true;
        case Op::min: result = std::min(a, b); return true;
        case Op::max: result = std::max(a, b); return true;
        case Op::equal: result = a == b; return true;
        case Op::less: result = a < b; return true;
        case Op::constant:
        case Op::slot:
        case Op::variable:
        case Op::select: break;
    }
    throw InternalError("launch program: not a binary operation");
}

bool is_constant(const Expr& e, std::int64_t value) {
    const std::int64_t* c = e.constant();
    return c != nullptr && *c == value;
}

/// Folds constants and the identities that generated programs are full of; what cannot be folded stays an expression.
Expr binary(Op op, const Expr& a, const Expr& b) {
    const std::int64_t* ca = a.constant();
    const std::int64_t* cb = b.constant();
    std::int64_t folded = 0;
    if (ca != nullptr && cb != nullptr && apply(op, *ca, *cb, folded)) return Expr(folded);
    switch (op) {
        case Op::add:
            if (is_constant(a, 0)) return b;
            if (is_constant(b, 0)) return a;
            break;
        case Op::sub:
            if (is_constant(b, 0)) return a;
            break;
        case Op::mul:
            if (is_constant(a, 0) || is_constant(b, 1)) return a;
            if (is_constant(b, 0) || is_constant(a, 1)) return b;
            break;
        case Op::div:
            if (is_constant(b, 1)) return a;
            break;
        default: break;
    }
    return make_node(op, 0, {a, b});
}

[[noreturn]] void no_value(const Expr& e) {
    SharedTexts texts;  // written out in full it may be endless
    std::string text = texts.of(e);
    if (!texts.definitions().empty()) text = texts.definitions().back();
    throw ArgumentError("num_tokens: the value of " + text + " does not fit in 64 bits; pass fewer tokens");
}

/// How tightly an operator binds, as in C; calls and names bind tightest.
int precedence(Op op) {
    switch (op) {
        case Op::select: return 0;
        case Op::equal: return 1;
        case Op::less: return 2;
        case Op::add:
        case Op::sub: return 3;
        case Op::mul:
        case Op::div: return 4;
        default: return 5;
    }
}

std::string_view symbol(Op op) {
    switch (op) {
        case Op::add: return " + ";
        case Op::sub: return " - ";
        case Op::mul: return " * ";
        case Op::div: return " / ";
        case Op::equal: return " == ";
        case Op::less: return " < ";
        default: return "";
    }
}

/// Writes one operation; `part(e, least, out)` writes an operand, in parentheses if it binds less tightly than `least`.
template <class Part>
void append_operation(const Expr::Node& n, const Part& part, std::string& out) {
    switch (n.op) {
        case Op::constant: out += std::to_string(n.value); break;
        case Op::slot: out += kSlotNames.at(static_cast<std::size_t>(n.value)); break;
        case Op::variable: out += "i" + std::to_string(n.value); break;
        case Op::min:
        case Op::max:
            out += n.op == Op::min ? "min(" : "max(";
            part(n.args[0], 0, out);
            out += ", ";
            part(n.args[1], 0, out);
            out += ')';
            break;
        case Op::select:
            part(n.args[0], 1, out);
            out += " ? ";
            part(n.args[1], 1, out);
            out += " : ";
            part(n.args[2], 0, out);
            break;
        default:  // left associative
            part(n.args[0], precedence(n.op), out);
            out += symbol(n.op);
            part(n.args[1], precedence(n.op) + 1, out);
            break;
    }
}

/// The statement that `left` statements precede, of this body and of the bodies in it. Null where there are fewer: `left` has then become
/// less.
const Statement* find_statement(const std::vector<Statement>& body, std::size_t& left) {
    for (const Statement& statement : body) {
        if (left == 0) return &statement;
        --left;
        const std::vector<Statement>* inner = nullptr;
        if (const auto* loop = std::get_if<Loop>(&statement.value)) inner = &loop->body;
        if (const auto* branch = std::get_if<If>(&statement.value)) inner = &branch->then;
        if (inner == nullptr) continue;
        if (const Statement* found = find_statement(*inner, left)) return found;
    }
    return nullptr;
}

static_assert(std::endian::native == std::endian::little, "parameter blocks are written as a little-endian device reads them");

}  // namespace

Expr::Expr(std::int64_t constant) : node_(std::make_shared<const Node>(Node{Op::constant, constant, {}})) {}

const std::int64_t* Expr::constant() const noexcept { return node_->op == Op::constant ? &node_->value : nullptr; }

Expr slot(Slot slot) { return make_node(Op::slot, static_cast<std::int64_t>(slot), {}); }
Expr variable(int index) { return make_node(Op::variable, index, {}); }

Expr operator+(const Expr& a, const Expr& b) { return binary(Op::add, a, b); }
Expr operator-(const Expr& a, const Expr& b) { return binary(Op::sub, a, b); }
Expr operator*(const Expr& a, const Expr& b) { return binary(Op::mul, a, b); }
Expr floor_div(const Expr& a, const Expr& b) { return binary(Op::div, a, b); }
Expr ceil_div(const Expr& a, const Expr& b) { return floor_div(a + (b - 1), b); }
Expr round_up(const Expr& a, const Expr& multiple) { return ceil_div(a, multiple) * multiple; }
Expr round_down(const Expr& a, const Expr& multiple) { return floor_div(a, multiple) * multiple; }
Expr min(const Expr& a, const Expr& b) { return binary(Op::min, a, b); }
Expr max(const Expr& a, const Expr& b) { return binary(Op::max, a, b); }
Expr equal(const Expr& a, const Expr& b) { return binary(Op::equal, a, b); }
Expr less(const Expr& a, const Expr& b) { return binary(Op::less, a, b); }

// Conditions are 1 or 0, so that no operation of their own is needed.
Expr operator!(const Expr& a) { return equal(a, 0); }
Expr operator&&(const Expr& a, const Expr& b) { return min(a, b); }
Expr operator||(const Expr& a, const Expr& b) { return max(a, b); }
Expr and_not(const Expr& a, const Expr& b) { return less(b, a); }

Expr select(const Expr& condition, const Expr& then, const Expr& otherwise) {
    if (const std::int64_t* c = condition.constant()) return *c != 0 ? then : otherwise;
    return make_node(Op::select, 0, {condition, then, otherwise});
}

Expr float_bits(float value) { return Expr(std::int64_t{std::bit_cast<std::uint32_t>(value)}); }

namespace {

/// One evaluation: parts that occur several times are computed once.
class Evaluation {
public:
    Evaluation(const CallSlots& slots, const std::vector<std::int64_t>& variables) : slots_(slots), variables_(variables) {}

    std::int64_t value(const Expr& e) {
        const Expr::Node& n = e.node();
        switch (n.op) {
            case Op::constant: return n.value;
            case Op::slot: return slots_.at(static_cast<std::size_t>(n.value));
            case Op::variable: return variables_.at(static_cast<std::size_t>(n.value));
            default: break;
        }
        if (const auto known = known_.find(&n); known != known_.end()) return known->second;
        std::int64_t result = 0;
        if (n.op == Op::select) {
            result = value(value(n.args[0]) != 0 ? n.args[1] : n.args[2]);
        } else if (!apply(n.op, value(n.args[0]), value(n.args[1]), result)) {
            no_value(e);
        }
        known_.emplace(&n, result);
        return result;
    }

private:
    const CallSlots& slots_;
    const std::vector<std::int64_t>& variables_;
    std::unordered_map<const Expr::Node*, std::int64_t> known_;
};

}  // namespace

std::int64_t evaluate(const Expr& e, const CallSlots& slots, const std::vector<std::int64_t>& variables) {
    return Evaluation(slots, variables).value(e);
}

std::string SharedTexts::of(const Expr& e) {
    std::string out;
    append(e, 0, out);
    return out;
}

void SharedTexts::append(const Expr& e, int least_precedence, std::string& out) {
    const Expr::Node& n = e.node();
    auto known = parts_.find(&n);
    if (known == parts_.end()) {
        Part part{e, {}, precedence(n.op)};
        append_operation(n, [this](const Expr& operand, int least, std::string& to) { append(operand, least, to); }, part.text);
        if (part.text.size() > kLongest) {
            // Parts that were built twice are one, too.
            const auto [name, is_new] = names_.try_emplace(part.text, "t" + std::to_string(names_.size() + 1));
            if (is_new) definitions_.push_back(name->second + " = " + part.text);
            part = {e, name->second, precedence(Op::constant)};
        }
        known = parts_.emplace(&n, std::move(part)).first;
    }
    const bool parentheses = known->second.precedence < least_precedence;
    if (parentheses) out += '(';
    out += known->second.text;
    if (parentheses) out += ')';
}

const Statement& numbered_statement(const LaunchProgram& program, std::size_t number) {
    std::size_t left = number;
    const Statement* found = find_statement(program.body, left);
    if (found == nullptr) throw InternalError("launch program: no statement " + std::to_string(number));
    return *found;
}

void check_fields(const Launch& launch) {
    const auto outside = [&](std::uint32_t offset, std::uint32_t bytes) {
        return InternalError("launch program: parameter field at " + std::to_string(offset) + " of " + std::to_string(bytes) +
                             " bytes is outside a block of " + std::to_string(launch.param_bytes));
    };
    for (const ParamField& field : launch.params) {
        if ((field.bytes != 4 && field.bytes != 8) || std::size_t{field.offset} + field.bytes > launch.param_bytes) {
            throw outside(field.offset, field.bytes);
        }
    }
    for (const TensorMapField& map : launch.maps) {
        if (map.offset % 64 != 0 || std::size_t{map.offset} + TensorMapField::kBytes > launch.param_bytes) {
            throw outside(map.offset, TensorMapField::kBytes);
        }
    }
}

}  // namespace flce
