// Progress of long work on stderr: a bar with rate and time left on a terminal, a plain line every now and then elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace flce::cli {

/// "12.5/s, 0:08 left" from the number done and the seconds it took; "" while nothing is done, or nothing is left.
[[nodiscard]] std::string render_pace(std::int64_t done, std::int64_t total, double seconds);

/// Columns of a bar.
inline constexpr int kBarColumns = 30;

/// One line of at most `width` columns: "training  ━━━━━━━━────  61 %  183/300  loss 5.12"; with a unit "183/300 s".
[[nodiscard]] std::string render_progress(std::string_view title, std::int64_t done, std::int64_t total, std::string_view note, int width,
                                          std::string_view unit = {}, int bar_columns = kBarColumns);

class Progress {
public:
    struct Options {
        std::FILE* stream = stderr;
        int terminal = -1;                      ///< 1 or 0 overrides what the stream says
        std::chrono::milliseconds redraw{100};  ///< between redraws of the bar
        int lines = 10;                         ///< plain lines over the whole work, the last included
        std::string_view unit = {};             ///< unit of `done`, a literal; "s": seconds, whose pace and rest need no saying
        int bar_columns = kBarColumns;
    };
    Progress(std::string title, std::int64_t total) : Progress(std::move(title), total, Options{}) {}
    Progress(std::string title, std::int64_t total, Options options);
    ~Progress();
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    /// `done` of the total are done; the note is free text, which may change every time.
    void update(std::int64_t done, std::string_view note = {});
    /// A line of its own, above the bar.
    void print(std::string_view line);
    /// Leaves the last state on the screen and ends the line.
    void finish();

private:
    void draw();

    std::string title_;
    std::int64_t total_;
    Options options_;
    bool terminal_;
    bool finished_ = false;
    bool drawn_ = false;
    std::int64_t done_ = 0;
    std::int64_t lines_printed_ = 0;
    std::string note_;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    std::chrono::steady_clock::time_point last_draw_{};
};

}  // namespace flce::cli
