// Captures the messages of the library's logger.
#pragma once

#include <spdlog/sinks/ostream_sink.h>

#include <memory>
#include <sstream>
#include <string>

#include "cache/log.hpp"

namespace flce::test {

class LogCapture {
public:
    LogCapture() { logger().sinks().push_back(sink_); }
    ~LogCapture() { logger().sinks().pop_back(); }
    LogCapture(const LogCapture&) = delete;
    LogCapture& operator=(const LogCapture&) = delete;

    [[nodiscard]] std::string text() const { return log_.str(); }
    void clear() { log_.str(""); }
    [[nodiscard]] int warnings() const {
        const std::string lines = log_.str();
        int count = 0;
        for (std::size_t at = lines.find("[warning]"); at != std::string::npos; at = lines.find("[warning]", at + 1)) ++count;
        return count;
    }

private:
    std::ostringstream log_;
    std::shared_ptr<spdlog::sinks::ostream_sink_mt> sink_ = std::make_shared<spdlog::sinks::ostream_sink_mt>(log_);
};

}  // namespace flce::test
