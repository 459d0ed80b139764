#include "cache/log.hpp"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

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

}  // namespace flce
