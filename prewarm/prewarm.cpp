#include "flce/prewarm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>

#include "cache/private_folder.hpp"
#include "prewarm/pack.hpp"
#include "prewarm/requests.hpp"
#include "prewarm/worker.hpp"
#include "runtime/json.hpp"
#include "runtime/workers/worker_command.hpp"
#include "runtime/workers/worker_pool.hpp"
#include "runtime/workers/worker_room.hpp"

namespace flce {
namespace {

Json compile_set_request(const PrewarmItem& item) {
    return {{"spec", item.spec.text()}, {"device", Json::parse(item.device.json())}, {"plan", item.plan}};
}

/// Compiles every item in workers.
class Compilation {
public:
    Compilation(const PrewarmOptions& options, const PrewarmListener& listener, const std::vector<PrewarmItem>& items)
        : options_(options), listener_(listener), used_(items.size()) {
        for (const PrewarmItem& item : items) report_.items.push_back({item});
        if (!options.pack.empty()) entries_.emplace("prewarm");
    }

    PrewarmReport run() {
        std::vector<Json> requests;
        for (const PrewarmedItem& item : report_.items) requests.push_back(compile_set_request(item.item));
        WorkerPool pool({.command = command(), .workers = workers()});
        show();
        report_.stopped = !pool.run(
            requests,
            {.done = [this](std::size_t i, const Reply& reply) { done(i, reply); }, .tick = [this] { show(); }, .stop = listener_.stop});
        if (!report_.stopped && entries_ && report_.failed == 0) write_pack(*entries_);
        return std::move(report_);
    }

private:
    [[nodiscard]] WorkerCommand command() const {
        std::vector<std::string> words;
        if (!options_.cache_dir.empty()) words.insert(words.end(), {"--cache-dir", options_.cache_dir.string()});
        if (entries_) words.insert(words.end(), {"--entries", entries_->path().string()});
        return worker_command(options_.command, kPrewarmWorker, words);
    }

    [[nodiscard]] std::size_t workers() const {
        const std::size_t sets = report_.items.size();
        const int cores = resolve_device("cpu").cpu.cores;
        const std::int64_t memory = available_memory_bytes();
        const std::size_t chosen =
            options_.jobs > 0 ? std::min(static_cast<std::size_t>(options_.jobs), sets) : worker_count(cores, memory, sets);
        if (listener_.begin) listener_.begin({.sets = sets, .workers = chosen, .cores = cores, .memory_bytes = memory});
        return chosen;
    }

    void done(std::size_t which, const Reply& reply) {
        PrewarmedItem& item = report_.items[which];
        note(item, used_[which], reply);
        report_.compiled += item.compiled;
        report_.hits += item.hits;
        if (!item.error.empty()) {
            ++report_.failed;
            if (listener_.failed) listener_.failed(item.item);
        }
        ++done_;
        show();
    }

    static void note(PrewarmedItem& item, std::vector<std::string>& used, const Reply& reply) {
        item.environment = true;
        if (reply.kind != Reply::Kind::answer) {
            const char* const hint = reply.signal == SIGKILL ? ": out of memory? fewer jobs at a time need less" : "";
            item.error = fmt::format("its worker {}{}", reply.why, hint);
        } else if (!reply.answer.is_object()) {
            item.error = "its worker's answer cannot be read";
        } else if (reply.answer.contains("error")) {
            item.environment = static_cast<ErrorKind>(reply.answer.value("kind", 0)) == ErrorKind::environment;
            item.error = reply.answer["error"].get<std::string>();
        } else {
            item.environment = false;
            item.compiled = reply.answer.value("compiled", std::int64_t{0});
            item.hits = reply.answer.value("hits", std::int64_t{0});
            used = reply.answer.value("used", std::vector<std::string>());
        }
    }

    void show() const {
        if (!listener_.progress) return;
        listener_.progress(
            {.sets = report_.items.size(), .done = done_, .compiled = report_.compiled, .hits = report_.hits, .failed = report_.failed});
    }

    void write_pack(const PrivateFolder& entries) {
        std::vector<PrewarmItem> items;
        for (const PrewarmedItem& item : report_.items) items.push_back(item.item);
        (void)write_prewarm_pack(options_.pack, entries.path(), items, used_);
        report_.pack = options_.pack;
    }

    const PrewarmOptions& options_;
    const PrewarmListener& listener_;
    PrewarmReport report_;
    std::vector<std::vector<std::string>> used_;  ///< keys of cache entries by item
    std::optional<PrivateFolder> entries_;        ///< folder in which workers leave the entries that they used
    std::size_t done_ = 0;
};

/// Kernel sets that were compiled and that a run would miss after all: the directory is refused, full, off, or smaller than they are.
std::size_t count_not_kept(Session& session, const std::vector<PrewarmedItem>& items) {
    return static_cast<std::size_t>(std::ranges::count_if(items, [&](const PrewarmedItem& done) {
        return done.error.empty() && !session.missing(done.item.spec, done.item.device, {.plan = done.item.plan}).empty();
    }));
}

/// Bytes of file names need not be UTF-8.
std::string text_of(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace); }

}  // namespace

PrewarmReport prewarm(const PrewarmOptions& options, const PrewarmListener& listener) {
    // The session chooses plans and looks into caches; its own device does not matter.
    Session session({.device = "cpu", .cache_dir = options.cache_dir, .strict = false});
    PrewarmReport report = Compilation(options, listener, prewarm_items(session, prewarm_requests(options.wants))).run();
    report.cache_dir = session.cache_dir();
    if (!report.stopped && options.pack.empty()) report.not_kept = count_not_kept(session, report.items);
    return report;
}

MissingReport missing(const PrewarmWants& wants, const std::filesystem::path& cache_dir) {
    Session session({.device = "cpu", .cache_dir = cache_dir});
    const auto items = prewarm_items(session, prewarm_requests(wants));
    MissingReport report{.sets = items.size()};
    for (const PrewarmItem& item : items) {
        if (!session.missing(item.spec, item.device, {.plan = item.plan}).empty()) report.missing.push_back(item);
    }
    return report;
}

std::string PrewarmReport::json() const {
    Json list = Json::array();
    for (const PrewarmedItem& done : items) {
        list.push_back({{"spec", done.item.spec.text()},
                        {"device", done.item.device_name},
                        {"plan", done.item.plan},
                        {"compiled", done.compiled},
                        {"hits", done.hits},
                        {"error", done.error.empty() ? Json(nullptr) : Json(done.error)}});
    }
    return text_of({{"compiled", compiled},
                    {"hits", hits},
                    {"failed", failed},
                    {"not_kept", not_kept},
                    {"pack", pack ? Json(pack->string()) : Json(nullptr)},
                    {"cache_dir", cache_dir.string()},
                    {"items", list}});
}

std::string MissingReport::json() const {
    Json list = Json::array();
    for (const PrewarmItem& item : missing) {
        list.push_back({{"spec", item.spec.text()}, {"device", item.device_name}, {"plan", item.plan}});
    }
    return text_of({{"compiled", 0}, {"hits", sets - missing.size()}, {"failed", 0}, {"pack", nullptr}, {"missing", list}});
}

}  // namespace flce
