#include "cli/unknown_name.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "generator/nearest_name.hpp"

namespace flce::cli {
namespace {

const CLI::App* subcommand(const CLI::App& app, std::string_view name) {
    const auto is_it = [&](const CLI::App* candidate) { return candidate->get_name() == name; };
    const auto found = app.get_subcommands(is_it);
    return found.empty() ? nullptr : found.front();
}

/// Names of the subcommands that --help lists.
std::vector<std::string> subcommand_names(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::App* candidate : app.get_subcommands([](const CLI::App* any) { return !any->get_group().empty(); })) {
        names.push_back(candidate->get_name());
    }
    return names;
}

/// Names of the options with their dashes, without options for tests.
std::vector<std::string> option_names(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) {
        if (option->get_group().empty()) continue;
        for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
    return names;
}

}  // namespace

std::string unknown_name(const CLI::App& app, std::span<const char* const> arguments) {
    const CLI::App* current = &app;
    std::string command = app.get_name();
    bool is_value = false;  // whether the argument is the value of the option before it
    for (const std::string_view argument : arguments) {
        if (argument == "--") return {};
        if (std::exchange(is_value, false)) continue;
        if (!argument.starts_with('-')) {
            const std::vector<std::string> names = subcommand_names(*current);
            if (names.empty()) continue;  // a value
            const CLI::App* next = subcommand(*current, argument);
            if (next == nullptr) {
                return fmt::format("\"{}\" is not a command of {}{} ({} --help lists them)", argument, command, suggestion(argument, names),
                                   command);
            }
            current = next;
            command += fmt::format(" {}", argument);
            continue;
        }
        const std::string name(argument.substr(0, argument.find('=')));
        const CLI::Option* const option = current->get_option_no_throw(name);
        if (option != nullptr) is_value = name == argument && option->get_expected_min() > 0;
        if (option != nullptr || !argument.starts_with("--")) continue;
        return fmt::format("{} is not an option of {}{} ({} --help lists them)", name, command, suggestion(name, option_names(*current)),
                           command);
    }
    return {};
}

}  // namespace flce::cli
