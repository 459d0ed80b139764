#include "cli/output.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "cli/command.hpp"

namespace flce::cli {
namespace {

bool errors_as_json = false;
bool has_json_object = false;

std::string cannot_be_written(int error) {
    return fmt::format("standard output cannot be written: {}", error == 0 ? "a write failed" : std::strerror(error));
}

}  // namespace

void open_missing_streams() {
    for (int stream = 0; stream < 3; ++stream) {
        if (::fcntl(stream, F_GETFD) >= 0 || errno != EBADF) continue;
        // The stream's number is the lowest free one, which open takes. Only messages may go nowhere.
        if (::open("/dev/null", stream == 2 ? O_WRONLY : O_RDONLY) != stream) return;
    }
}

void flush_output() {
    errno = 0;
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) throw EnvironmentError(cannot_be_written(errno));
}

void report_errors_as_json(bool wanted) { errors_as_json = wanted; }

void note_json_object() { has_json_object = true; }

int report_error(int exit_code, std::string_view message) noexcept try {
    // fmt::print would throw: where stderr is full, too, the exit code still tells the failure.
    std::fputs(fmt::format("flce: error: {}\n", message).c_str(), stderr);
    if (errors_as_json && !has_json_object) {
        has_json_object = true;
        const Json object{{"error", {{"exit_code", exit_code}, {"message", message}}}};
        std::fputs((object.dump(2, ' ', false, Json::error_handler_t::replace) + "\n").c_str(), stdout);
    }
    return exit_code;
} catch (...) {
    return exit_code;  // no memory for a message
}

int finish_output(int exit_code) noexcept try {
    errno = 0;
    const bool failed = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
    if (!failed || (exit_code != kDone && exit_code != kFailedCheck)) return exit_code;
    errors_as_json = false;  // there is nowhere to write it
    return report_error(kEnvironment, cannot_be_written(errno));
} catch (...) {
    return kEnvironment;
}

}  // namespace flce::cli
