#include "flce/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <span>

#include "flce/error.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/json_object.hpp"

namespace flce {
namespace {

[[noreturn]] void bad_value(std::string_view key, std::string_view value, std::string_view allowed) {
    throw PlanError(fmt::format("plan: {}={}: must be {}", key, value, allowed));
}

/// Reads an integer of type T off the front of `rest`; false where there is none.
template <class T>
bool take_integer(std::string_view& rest, T& value) {
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    if (error != std::errc()) return false;
    rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
    return true;
}

/// Reads numbers as `pattern` separates them ("x/": two separators, three numbers).
template <class T, std::size_t N>
bool read_numbers(std::string_view value, std::string_view separators, const std::array<T*, N>& numbers) {
    for (std::size_t i = 0; i < N; ++i) {
        if (i > 0) {
            if (value.empty() || value.front() != separators[i - 1]) return false;
            value.remove_prefix(1);
        }
        if (!take_integer(value, *numbers[i])) return false;
    }
    return value.empty();
}

std::string tile_text(const CudaPath& path, const GemmTile& t) {
    const TileWarps warps = path.warps(t);
    return fmt::format("{}x{}x{}x{}/{}x{}", t.block_m, t.block_n, t.block_k, t.stages, warps.m, warps.n);
}

GemmTile read_tile(const CudaPath& path, std::string_view key, std::string_view value) {
    GemmTile t;
    TileWarps warps;
    const std::array numbers = {&t.block_m, &t.block_n, &t.block_k, &t.stages, &warps.m, &warps.n};
    if (!read_numbers(value, "xxx/x", numbers)) {
        bad_value(key, value, "block_m x block_n x block_k x stages / warps_m x warps_n, for example 128x256x32x3/2x4");
    }
    return path.with_warps(t, warps);
}

template <class T>
void read_number(T& number, std::string_view key, std::string_view value) {
    if (!read_numbers(value, "", std::array{&number})) bad_value(key, value, "an integer");
}

/// A key of a plan's text: printing and reading it. JSON carries the same keys, numbers as numbers.
struct PlanKey {
    std::string_view name;
    bool number;
    std::string (*write)(const Plan& plan);
    void (*read)(Plan& plan, std::string_view key, std::string_view value);
    bool (*absent)(const Plan& plan) = nullptr;  ///< whether a text leaves the key out; null: no text does
};

using Text = std::string_view;

constexpr Text kCpuName = "cpu";

constexpr PlanKey kChunk{"chunk", true, [](const Plan& p) { return std::to_string(p.vocab_chunk); },
                         [](Plan& p, Text k, Text v) { read_number(p.vocab_chunk, k, v); }};
constexpr PlanKey kScratch{"scratch", true, [](const Plan& p) { return std::to_string(p.scratch_bytes); },
                           [](Plan& p, Text k, Text v) { read_number(p.scratch_bytes, k, v); }};

template <GemmTile CudaPlan::* tile>
constexpr PlanKey tile_key(std::string_view name) {
    return {name, false, [](const Plan& p) { return tile_text(cuda_path(p.path), p.cuda.*tile); },
            [](Plan& p, Text k, Text v) { p.cuda.*tile = read_tile(cuda_path(p.path), k, v); }};
}

constexpr std::array kCudaKeys = {
    kChunk,
    kScratch,
    tile_key<&CudaPlan::forward>("forward"),
    tile_key<&CudaPlan::dlogits>("dlogits"),
    tile_key<&CudaPlan::grad_hidden>("grad_hidden"),
    tile_key<&CudaPlan::grad_weight>("grad_weight"),
    PlanKey{"raster", true, [](const Plan& p) { return std::to_string(p.cuda.raster); },
            [](Plan& p, Text k, Text v) { read_number(p.cuda.raster, k, v); }},
};

/// A tile of which a plan's text has the first two numbers: what one call of a library computes.
template <GemmTile CudaPlan::* tile>
constexpr PlanKey call_key(std::string_view name) {
    return {name, false, [](const Plan& p) { return fmt::format("{}x{}", (p.cuda.*tile).block_m, (p.cuda.*tile).block_n); },
            [](Plan& p, Text k, Text v) {
                GemmTile t{1, 1, 1, 1, 1, 1};
                if (!read_numbers(v, "x", std::array{&t.block_m, &t.block_n})) bad_value(k, v, "tokens x columns, for example 4096x2048");
                p.cuda.*tile = t;
            }};
}

constexpr PlanKey lent_key() {
    PlanKey key = call_key<&CudaPlan::lent>("lent");
    key.absent = [](const Plan& p) { return !has_lent_tile(p); };
    return key;
}

constexpr std::array kLibraryKeys = {
    kChunk,
    kScratch,
    call_key<&CudaPlan::forward>("forward"),
    call_key<&CudaPlan::dlogits>("dlogits"),
    PlanKey{"cublaslt", true, [](const Plan& p) { return std::to_string(p.cuda.library.version); },
            [](Plan& p, Text k, Text v) { read_number(p.cuda.library.version, k, v); }},
    PlanKey{"algorithms", false,
            [](const Plan& p) {
                const LibraryPlan& l = p.cuda.library;
                return fmt::format("{}/{}/{}", l.logits, l.grad_hidden, l.grad_weight);
            },
            [](Plan& p, Text k, Text v) {
                LibraryPlan& l = p.cuda.library;
                if (!read_numbers(v, "//", std::array{&l.logits, &l.grad_hidden, &l.grad_weight})) {
                    bad_value(k, v, "logits / grad_hidden / grad_weight, for example 0/0/0");
                }
                p.cuda.grad_hidden = p.cuda.grad_weight = {1, 1, 1, 1, 1, 1};
            }},
    lent_key(),
};

constexpr std::array kCpuKeys = {
    PlanKey{"vector", true, [](const Plan& p) { return std::to_string(p.cpu.vector_bits); },
            [](Plan& p, Text k, Text v) { read_number(p.cpu.vector_bits, k, v); }},
    PlanKey{"bf16_dot", true, [](const Plan& p) { return std::string(p.cpu.bf16_dot ? "1" : "0"); },
            [](Plan& p, Text k, Text v) {
                if (v != "0" && v != "1") bad_value(k, v, "0 or 1");
                p.cpu.bf16_dot = v == "1";
            }},
    PlanKey{"micro", false, [](const Plan& p) { return fmt::format("{}x{}", p.cpu.micro_m, p.cpu.micro_n); },
            [](Plan& p, Text k, Text v) {
                if (!read_numbers(v, "x", std::array{&p.cpu.micro_m, &p.cpu.micro_n})) bad_value(k, v, "rows x columns, for example 14x32");
            }},
    PlanKey{"block", false, [](const Plan& p) { return fmt::format("{}x{}x{}", p.cpu.block_m, p.cpu.block_n, p.cpu.block_k); },
            [](Plan& p, Text k, Text v) {
                if (!read_numbers(v, "xx", std::array{&p.cpu.block_m, &p.cpu.block_n, &p.cpu.block_k})) {
                    bad_value(k, v, "block_m x block_n x block_k");
                }
            }},
    kChunk,
    kScratch,
};

bool is_absent(const PlanKey& key, const Plan& plan) { return key.absent != nullptr && key.absent(plan); }

std::span<const PlanKey> keys_of(PlanPath path) {
    if (path == PlanPath::cpu) return kCpuKeys;
    if (cuda_path(path).calls_library) return kLibraryKeys;
    return kCudaKeys;
}

PlanPath read_path(std::string_view value) {
    if (value == kCpuName) return PlanPath::cpu;
    std::string names(kCpuName);
    for (const CudaPath* path : cuda_paths()) {
        if (value == path->name) return path->id;
        names += fmt::format("{}{}", path == cuda_paths().back() ? " or " : ", ", path->name);
    }
    bad_value("path", value, names);
}

Strategy read_strategy(std::string_view value) {
    for (const Strategy strategy : {Strategy::recompute, Strategy::retain}) {
        if (value == to_string(strategy)) return strategy;
    }
    bad_value("strategy", value, "recompute or retain");
}

/// Reads keys in any order and knows which are still missing.
class PlanBuilder {
public:
    PlanBuilder(std::string_view path, std::string_view strategy) {
        plan_.path = read_path(path);
        plan_.strategy = read_strategy(strategy);
    }

    void set(std::string_view key, std::string_view value) {
        const auto keys = keys_of(plan_.path);
        const auto known = std::ranges::find(keys, key, &PlanKey::name);
        if (known == keys.end()) {
            throw PlanError(fmt::format("plan: unknown key '{}'; {} has {}", key, to_string(plan_.path), names()));
        }
        if (std::ranges::find(given_, key) != given_.end()) {
            throw PlanError(fmt::format("plan: key '{}' is given twice; each key is given once", key));
        }
        known->read(plan_, key, value);
        given_.push_back(known->name);
    }

    [[nodiscard]] Plan finish() const {
        for (const PlanKey& key : keys_of(plan_.path)) {
            if (key.absent == nullptr && std::ranges::find(given_, key.name) == given_.end()) {
                throw PlanError(fmt::format("plan: key '{}' is missing; {} has {}", key.name, to_string(plan_.path), names()));
            }
        }
        return plan_;
    }

private:
    [[nodiscard]] std::string names() const {
        std::string all;
        for (const PlanKey& key : keys_of(plan_.path)) all += (all.empty() ? "" : ", ") + std::string(key.name);
        return all;
    }

    Plan plan_;
    std::vector<std::string_view> given_;
};

/// Splits off what comes before `separator`, which is dropped; the whole rest where there is none.
std::string_view take_until(std::string_view& rest, char separator) {
    const std::size_t at = std::min(rest.find(separator), rest.size());
    const std::string_view front = rest.substr(0, at);
    rest.remove_prefix(std::min(at + 1, rest.size()));
    return front;
}

}  // namespace

std::string_view to_string(PlanPath path) noexcept {
    if (path == PlanPath::cpu) return kCpuName;
    for (const CudaPath* known : cuda_paths()) {
        if (known->id == path) return known->name;
    }
    return "?";
}

std::string_view to_string(Strategy strategy) noexcept {
    switch (strategy) {
        case Strategy::recompute: return "recompute";
        case Strategy::retain: return "retain";
    }
    return "?";
}

std::string Plan::text() const {
    std::string out = fmt::format("{}:{}", to_string(path), to_string(strategy));
    for (const PlanKey& key : keys_of(path)) {
        if (!is_absent(key, *this)) out += fmt::format(",{}={}", key.name, key.write(*this));
    }
    return out;
}

std::string Plan::json() const {
    nlohmann::ordered_json object;
    object["path"] = to_string(path);
    object["strategy"] = to_string(strategy);
    for (const PlanKey& key : keys_of(path)) {
        if (is_absent(key, *this)) continue;
        const std::string name(key.name);
        if (key.number) {
            object[name] = std::stoll(key.write(*this));
        } else {
            object[name] = key.write(*this);
        }
    }
    return object.dump();
}

Plan parse_plan(std::string_view text) {
    if (text.find(':') == std::string_view::npos) {
        throw PlanError(fmt::format("plan: '{}' must begin with a path and a strategy, for example cuda_sm80:recompute", text));
    }
    std::string_view rest = text;
    const std::string_view path = take_until(rest, ':');
    const std::string_view strategy = take_until(rest, ',');
    PlanBuilder builder(path, strategy);
    if (text.ends_with(',')) throw PlanError("plan: nothing follows the last comma");
    while (!rest.empty()) {
        std::string_view value = take_until(rest, ',');
        const std::string_view key = take_until(value, '=');
        builder.set(key, value);
    }
    return builder.finish();
}

Plan parse_plan_json(std::string_view text) {
    const auto object = parse_json_object<PlanError>(text, "plan");
    auto word = [&](const char* key) {
        const auto found = object.find(key);
        if (found == object.end() || !found->is_string()) throw PlanError(fmt::format("plan: key '{}' is missing or not a string", key));
        return found->get<std::string>();
    };
    PlanBuilder builder(word("path"), word("strategy"));
    for (const auto& [key, value] : object.items()) {
        if (key == "path" || key == "strategy") continue;
        builder.set(key, value.is_string() ? value.get<std::string>() : value.dump());
    }
    return builder.finish();
}

}  // namespace flce
