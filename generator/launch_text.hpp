// Launch programs as text, for error messages and logs.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "generator/launch_program.hpp"

namespace flce {

/// The program, a line for each statement at its number (numbered_statement's) and then one for each part of an expression that has a name
/// in them. Statements in a Loop or If are indented.
[[nodiscard]] std::vector<std::string> statement_texts(const LaunchProgram& program, const std::vector<KernelEntry>& kernels);

/// The line of one statement, not indented.
[[nodiscard]] std::string statement_text(const LaunchProgram& program, const std::vector<KernelEntry>& kernels, std::size_t number);

}  // namespace flce
