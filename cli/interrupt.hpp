// Ctrl-C on long work: the first one asks it to stop at the next safe point, a second one ends the process the hard way.
#pragma once

#include <exception>

namespace flce::cli {

class Interrupted : public std::exception {
public:
    [[nodiscard]] const char* what() const noexcept override { return "interrupted"; }
};

/// Handles SIGINT and SIGTERM from now on.
void handle_interrupts();
[[nodiscard]] bool interrupted() noexcept;
/// Throws Interrupted after the first signal.
void stop_if_interrupted();

}  // namespace flce::cli
