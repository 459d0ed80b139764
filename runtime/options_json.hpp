// Options of a library call as one JSON object: how C and Python give those that are lists.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "flce/spec.hpp"
#include "runtime/json.hpp"

namespace flce {

/// Reads one object key by key. An absent key, or null, is the fallback. Throws ArgumentError naming the key where its value is of another
/// kind.
class OptionsReader {
public:
    explicit OptionsReader(std::string_view json);

    [[nodiscard]] std::string text(const std::string& key);
    [[nodiscard]] std::int64_t integer(const std::string& key, std::int64_t fallback = 0);
    [[nodiscard]] double number(const std::string& key, double fallback);
    [[nodiscard]] bool flag(const std::string& key, bool fallback);
    [[nodiscard]] std::vector<std::string> texts(const std::string& key);
    [[nodiscard]] std::vector<std::int64_t> integers(const std::string& key);
    /// Specs: each a text, or an object with the spec's keys.
    [[nodiscard]] std::vector<Spec> specs(const std::string& key);

    /// Throws ArgumentError naming a key that nobody has read.
    void finish() const;

private:
    /// nullptr: absent.
    [[nodiscard]] const Json* find(const std::string& key);
    [[nodiscard]] const Json& list(const std::string& key);

    Json root_;
    std::set<std::string> read_;
};

}  // namespace flce
