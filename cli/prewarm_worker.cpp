// The process that compiles for flce prewarm: one kernel set a request, cli/worker_pool.hpp.
#include <CLI/CLI.hpp>
#include <mutex>
#include <set>

#include "cache/disk_store.hpp"
#include "cache/log.hpp"
#include "cli/command.hpp"
#include "cli/prewarm_pack.hpp"
#include "runtime/session.hpp"
#include "runtime/workers/worker_process.hpp"

namespace flce::cli {
namespace {

struct WorkerFlags {
    std::filesystem::path cache_dir;
    std::filesystem::path entries;  // where used entries are left; empty: nowhere
};

Json compile(Session& session, const std::filesystem::path& entries, const Json& item) {
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

// The parent's session opens the same directory and says what is wrong with it: once, and not once a worker.
void leave_the_directory_to_the_parent(const Session& session) {
    if (session.cache_dir().empty()) return;
    const auto level = logger().level();
    logger().set_level(spdlog::level::off);
    (void)DiskStore(session.cache_dir()).usable(false);
    logger().set_level(level);
}

int work(const WorkerFlags& flags) {
    Session session({.device = "cpu", .cache_dir = flags.cache_dir, .strict = false});
    leave_the_directory_to_the_parent(session);
    return serve_requests([&](const Json& item) { return compile(session, flags.entries, item); }) ? kDone : kEnvironment;
}

}  // namespace

void add_prewarm_worker(CLI::App& app, Action& action) {
    auto flags = std::make_shared<WorkerFlags>();
    CLI::App* command = app.add_subcommand("prewarm-worker", "a worker of flce prewarm");
    command->group("");  // not for people
    command->add_option("--cache-dir", flags->cache_dir);
    command->add_option("--entries", flags->entries);
    command->callback([flags, &action] { action = [flags] { return work(*flags); }; });
}

}  // namespace flce::cli
