#include "cli/progress.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace flce::cli {
namespace {

int terminal_columns(std::FILE* stream) {
    winsize size{};
    if (::ioctl(::fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
    return 80;
}

std::string clipped(std::string_view text, std::size_t width) {
    std::size_t seen = 0;
    std::size_t end = 0;
    while (end < text.size()) {
        if ((text[end] & 0xc0) != 0x80 && seen++ == width) break;
        ++end;
    }
    return std::string(text.substr(0, end));
}

}  // namespace

std::string render_pace(std::int64_t done, std::int64_t total, double seconds) {
    if (done <= 0 || done >= total || seconds <= 0) return {};
    const double rate = static_cast<double>(done) / seconds;
    const std::int64_t left = std::lround(static_cast<double>(total - done) / rate);
    const std::string time =
        left < 3600 ? fmt::format("{}:{:02}", left / 60, left % 60) : fmt::format("{}:{:02}:{:02}", left / 3600, left / 60 % 60, left % 60);
    return fmt::format("{:.3g}/s, {} left", rate, time);
}

std::string render_progress(std::string_view title, std::int64_t done, std::int64_t total, std::string_view note, int width,
                            std::string_view unit, int bar_columns) {
    const double fraction = total > 0 ? std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0) : 1.0;
    const auto filled = static_cast<int>(fraction * bar_columns);
    std::string bar;
    for (int i = 0; i < bar_columns; ++i) bar += i < filled ? "━" : "─";
    std::string line = fmt::format("{}  {}  {:3.0f} %  {}/{}{}{}", title, bar, fraction * 100, done, total, unit.empty() ? "" : " ", unit);
    if (!note.empty()) line += fmt::format("  {}", note);
    return clipped(line, static_cast<std::size_t>(std::max(width, 1)));
}

Progress::Progress(std::string title, std::int64_t total, Options options)
    : title_(std::move(title)),
      total_(total),
      options_(options),
      terminal_(options.terminal >= 0 ? options.terminal == 1 : ::isatty(::fileno(options.stream)) == 1) {}

Progress::~Progress() {
    if (terminal_ && drawn_ && !finished_) fmt::print(options_.stream, "\n");
}

void Progress::update(std::int64_t done, std::string_view note) {
    done_ = done;
    note_ = note;
    if (terminal_) {
        const auto now = std::chrono::steady_clock::now();
        if (drawn_ && now - last_draw_ < options_.redraw) return;
        last_draw_ = now;
        draw();
        return;
    }
    const std::int64_t due = total_ > 0 ? done * options_.lines / total_ : options_.lines;
    if (due <= lines_printed_) return;
    lines_printed_ = due;
    fmt::print(options_.stream, "{}: {}/{}{}{}{}{}\n", title_, done_, total_, options_.unit.empty() ? "" : " ", options_.unit,
               note_.empty() ? "" : "  ", note_);
    std::fflush(options_.stream);
}

void Progress::print(std::string_view line) {
    if (terminal_ && drawn_) fmt::print(options_.stream, "\r\x1b[K");
    fmt::print(options_.stream, "{}\n", line);
    if (terminal_ && drawn_) draw();
    std::fflush(options_.stream);
}

void Progress::finish() {
    if (finished_) return;
    finished_ = true;
    if (!terminal_) return;
    draw();
    fmt::print(options_.stream, "\n");
    std::fflush(options_.stream);
}

void Progress::draw() {
    // One column is left free: a character in the last one makes some terminals wrap.
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    std::string note = options_.unit == "s" ? "" : render_pace(done_, total_, seconds);
    if (!note.empty() && !note_.empty()) note += "  ";
    note += note_;
    const std::string line =
        render_progress(title_, done_, total_, note, terminal_columns(options_.stream) - 1, options_.unit, options_.bar_columns);
    fmt::print(options_.stream, "\r{}\x1b[K", line);
    std::fflush(options_.stream);
    drawn_ = true;
}

}  // namespace flce::cli
