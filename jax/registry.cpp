#include "jax/registry.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <vector>

namespace flce::xla_calls {
namespace {

constexpr std::uint64_t kNoLabel = std::numeric_limits<std::uint64_t>::max();

struct Device {
    flce_session* session = nullptr;
    std::vector<const Entry*> entries;
    std::uint64_t* words = nullptr;  // kLabelWords of them, in the device's memory
};

std::array<std::uint64_t, kLabelWords>& words_of_cpu() {
    static auto words = [] {
        std::array<std::uint64_t, kLabelWords> made;
        made.fill(kNoLabel);
        return made;
    }();
    return words;
}

struct Registry {
    using Key = std::tuple<std::int32_t, std::string, std::int64_t, std::int64_t>;

    std::shared_mutex mutex;
    std::map<std::int32_t, Device> devices;
    std::map<Key, std::unique_ptr<Entry>> entries;

    Device& device(std::int32_t index) {
        Device& found = devices[index];
        if (index < 0 && found.words == nullptr) found.words = words_of_cpu().data();
        return found;
    }
};

// Never destroyed: XLA's threads may still run calls while the process ends.
Registry& registry() {
    static auto* made = new Registry;
    return *made;
}

flce_status session_of(std::int32_t index, flce_session*& session) {
    Registry& all = registry();
    {
        const std::unique_lock lock(all.mutex);
        session = all.device(index).session;
    }
    if (session != nullptr) return FLCE_OK;
    const std::string name = index < 0 ? "cpu" : "cuda:" + std::to_string(index);
    flce_session_options options = FLCE_SESSION_OPTIONS_INIT;
    options.device = name.c_str();
    flce_session* made = nullptr;
    if (const flce_status status = flce_session_create(&options, &made)) return status;
    const std::unique_lock lock(all.mutex);
    flce_session*& kept = all.device(index).session;
    if (kept == nullptr) {
        kept = made;
    } else {
        flce_session_release(made);  // another thread was first
    }
    session = kept;
    return FLCE_OK;
}

}  // namespace

flce_status find(const Request& request, const Entry*& entry) {
    Registry& all = registry();
    const Registry::Key key{request.device_index, request.spec, request.workspace_limit_bytes, request.num_tokens};
    {
        const std::shared_lock lock(all.mutex);
        if (const auto found = all.entries.find(key); found != all.entries.end()) {
            entry = found->second.get();
            return FLCE_OK;
        }
    }
    flce_session* session = nullptr;
    if (const flce_status status = session_of(request.device_index, session)) return status;
    flce_kernel_options options = FLCE_KERNEL_OPTIONS_INIT;
    options.workspace_limit_bytes = request.workspace_limit_bytes;
    options.num_tokens = request.num_tokens;
    auto made = std::make_unique<Entry>();
    if (const flce_status status = flce_get_kernel(session, request.spec.c_str(), &options, &made->kernel)) return status;
    if (const flce_status status = flce_kernel_device(made->kernel, &made->device_type, &made->device_index)) return status;
    const std::unique_lock lock(all.mutex);
    const auto [place, is_new] = all.entries.try_emplace(key, std::move(made));
    if (is_new) {
        Device& device = all.device(request.device_index);
        place->second->number = device.entries.size();
        device.entries.push_back(place->second.get());
    } else {
        flce_kernel_release(made->kernel);  // try_emplace has left it
    }
    entry = place->second.get();
    return FLCE_OK;
}

void* label_word(const Entry& entry) {
    Registry& all = registry();
    const std::shared_lock lock(all.mutex);
    const auto device = all.devices.find(entry.device_type == FLCE_CUDA ? entry.device_index : -1);
    return device == all.devices.end() || device->second.words == nullptr ? nullptr
                                                                          : device->second.words + std::min(entry.number, kLabelWords - 1);
}

}  // namespace flce::xla_calls

// ── What Python calls ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

#pragma GCC visibility push(default)
extern "C" {

/// The kernel for a call. `device_index`: CUDA ordinal, -1 for the CPU. The kernel is the process's, not a new reference.
flce_status flce_jax_kernel(std::int32_t device_index, const char* spec, std::int64_t workspace_limit_bytes, std::int64_t num_tokens,
                            flce_kernel** kernel) {
    const flce::xla_calls::Entry* entry = nullptr;
    const flce_status status = flce::xla_calls::find({device_index, spec, workspace_limit_bytes, num_tokens}, entry);
    *kernel = entry == nullptr ? nullptr : entry->kernel;
    return status;
}

/// The device's words for labels out of range, which its kernels write from now on; null for memory that has been freed. The CPU's are
/// returned where `words` is null.
void* flce_jax_label_words(std::int32_t device_index, void* words) {
    using flce::xla_calls::registry;
    const std::unique_lock lock(registry().mutex);
    auto& device = registry().device(device_index);
    if (device_index >= 0) device.words = static_cast<std::uint64_t*>(words);
    return device.words;
}

/// The kernel whose word is the `number`-th of the device's; null where there are fewer.
flce_kernel* flce_jax_kernel_at(std::int32_t device_index, std::size_t number) {
    using flce::xla_calls::registry;
    const std::unique_lock lock(registry().mutex);
    const auto& entries = registry().device(device_index).entries;
    return number < entries.size() ? entries[number]->kernel : nullptr;
}
}
#pragma GCC visibility pop
