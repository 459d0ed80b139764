#include "tests/cache/remote_support.hpp"

#include <atomic>
#include <thread>
#include <vector>

#include "cache/artifact_format.hpp"
#include "tests/cache/cache_test_support.hpp"

namespace flce::test {

std::string payload_of(const Lookup& found) { return found.artifact ? payload_text(*found.artifact) : found.fault ? "fault" : "absent"; }

std::string big_payload() {
    std::string payload(300'000, '\0');  // in several packets
    for (std::size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<char>((i * i * 2654435761u) >> 13);
    return payload;
}

void expect_a_cache(const RemoteOptions& options) {
    const auto entry = [](const char* name, std::string_view payload) { return encode_artifact(key_of(name), artifact_of(payload)); };
    RemoteStore store(options);
    EXPECT_EQ(payload_of(store.get(key_of("small"))), "absent");
    EXPECT_EQ(store.put(key_of("small"), entry("small", "p"), Durability::now), Kept::yes);
    EXPECT_EQ(store.put(key_of("big"), entry("big", big_payload()), Durability::now), Kept::yes);
    EXPECT_EQ(store.put(key_of("empty"), entry("empty", ""), Durability::now), Kept::yes);
    EXPECT_EQ(payload_of(store.get(key_of("small"))), "p");
    EXPECT_EQ(payload_of(store.get(key_of("big"))), big_payload());
    EXPECT_EQ(payload_of(store.get(key_of("empty"))), "");
    EXPECT_EQ(store.put(key_of("small"), entry("small", "another"), Durability::now), Kept::yes);
    EXPECT_EQ(payload_of(RemoteStore(options).get(key_of("small"))), "another");

    RemoteOptions reader = options;
    reader.read_only = true;
    RemoteStore read_only(reader);
    EXPECT_EQ(read_only.put(key_of("new"), entry("new", "p"), Durability::now), Kept::no);
    EXPECT_EQ(payload_of(read_only.get(key_of("new"))), "absent");
    EXPECT_EQ(payload_of(read_only.get(key_of("small"))), "another");

    // Eight threads on one store.
    std::atomic<int> wrong{0};
    {
        std::vector<std::jthread> threads;
        for (int i = 0; i < 8; ++i) {
            threads.emplace_back([&] {
                for (int repeat = 0; repeat < 5; ++repeat) wrong += payload_of(store.get(key_of("big"))) == big_payload() ? 0 : 1;
            });
        }
    }
    EXPECT_EQ(wrong, 0);

    // An entry that somebody else put under the name of another.
    EXPECT_EQ(store.put(key_of("victim"), entry("small", "p"), Durability::now), Kept::yes);
    EXPECT_EQ(payload_of(store.get(key_of("victim"))), "fault");
    EXPECT_EQ(payload_of(store.get(key_of("small"))), "another");  // wrong bytes do not stop the rest
}

}  // namespace flce::test
