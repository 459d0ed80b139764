// Checks that every remote cache must pass.
#pragma once

#include <chrono>
#include <string>

#include "cache/remote_store.hpp"

namespace flce::test {

inline constexpr std::chrono::milliseconds kPatience{20'000};  // no test waits for it

/// Payload that was found; "fault" and "absent" where there is nothing.
[[nodiscard]] std::string payload_of(const Lookup& found);

/// In several packets.
[[nodiscard]] std::string big_payload();

/// Keeps and gives entries, to many threads at once, and none under another's name.
void expect_a_cache(const RemoteOptions& options);

}  // namespace flce::test
