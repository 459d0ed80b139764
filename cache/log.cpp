#include "cache/log.hpp"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <mutex>
#include <unordered_set>

namespace flce {

spdlog::logger& logger() {
    static auto* const kept = new std::shared_ptr<spdlog::logger>([] {
        if (auto registered = spdlog::get("flce")) return registered;
        auto made = std::make_shared<spdlog::logger>("flce", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
        made->set_level(spdlog::level::warn);
        made->set_pattern("[%n] %^%l%$: %v");
        return made;
    }());
    return **kept;
}

void warn_once_in_process(const std::string& message) {
    static auto& mutex = *new std::mutex;
    static auto& said = *new std::unordered_set<std::string>;
    const auto first = [&] {
        const std::lock_guard lock(mutex);
        return said.insert(message).second;
    }();
    logger().log(first ? spdlog::level::warn : spdlog::level::debug, "{}", message);
}

}  // namespace flce
