#include "prewarm/worker.hpp"

#include <mutex>
#include <set>

#include "cache/disk_store.hpp"
#include "cache/log.hpp"
#include "prewarm/pack.hpp"
#include "runtime/session.hpp"
#include "runtime/workers/worker_process.hpp"

namespace flce {
namespace {

Json compile_set(Session& session, const std::filesystem::path& entries, const Json& item) {
    std::mutex mutex;
    std::set<std::string> used;  // several threads compile a set
    const auto on_use = [&](const CacheKey& key, std::span<const std::byte> entry) {
        leave_entry(entries, key, entry);
        const std::lock_guard lock(mutex);
        used.insert(key.hex());
    };
    const Device device = parse_device_json(item.at("device").dump());
    const PrewarmResult done =
        SessionAccess::prewarm(session, parse_spec(item.at("spec").get<std::string>()), device,
                               {.plan = item.at("plan").get<std::string>()}, entries.empty() ? SessionAccess::OnUse() : on_use);
    return {{"compiled", done.compiled}, {"hits", done.hits}, {"used", used}};
}

// The parent's session opens the same directory and reports its faults: once, and not once a worker.
void leave_the_directory_to_the_parent(const Session& session) {
    if (session.cache_dir().empty()) return;
    const auto level = logger().level();
    logger().set_level(spdlog::level::off);
    (void)DiskStore(session.cache_dir()).usable(false);
    logger().set_level(level);
}

}  // namespace

bool serve_prewarm(const std::filesystem::path& cache_dir, const std::filesystem::path& entries) {
    Session session({.device = "cpu", .cache_dir = cache_dir, .strict = false});
    leave_the_directory_to_the_parent(session);
    return serve_requests([&](const Json& item) { return compile_set(session, entries, item); });
}

}  // namespace flce
