// Standard output: written text arrives, or the command has failed.
#pragma once

#include <string_view>

namespace flce::cli {

/// Opens standard streams that the caller has closed, or files of ours would take their places. Writing to such an output fails.
void open_missing_streams();

/// Writes the buffer of standard output. Throws EnvironmentError where the text does not arrive.
void flush_output();

/// Whether errors of this run are reported as an object on stdout, too: it was asked for --json.
void report_errors_as_json(bool wanted);
/// print_json has been called: stdout has the run's one object.
void note_json_object();
/// "flce: error: …" on stderr, and {"error": {"exit_code", "message"}} on stdout where that is wanted and there is no object yet. Never
/// throws. Returns the code.
int report_error(int exit_code, std::string_view message) noexcept;

/// Exit code of the process after `exit_code`: kEnvironment, with a message, where a run that succeeded could not write to standard output.
[[nodiscard]] int finish_output(int exit_code) noexcept;

}  // namespace flce::cli
