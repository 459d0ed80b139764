#include "tests/fuzz/readers.hpp"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cache/artifact_format.hpp"
#include "cache/pack_format.hpp"
#include "cli/safetensors.hpp"
#include "flce/error.hpp"
#include "records/record.hpp"

namespace flce::fuzz {
namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::abort();
}

std::string text_of(std::span<const std::byte> bytes) { return std::string(as_text(bytes)); }

/// The input with its checksum as it should be: no fuzzer finds one by chance, and what lies behind it is to be read too. A checksum ends
/// the part of `size` bytes.
std::vector<std::byte> mended(std::span<const std::byte> input, std::size_t size) {
    std::vector<std::byte> bytes(input.begin(), input.end());
    if (size < kChecksumBytes || size > bytes.size()) return bytes;
    const auto checksum = checksum_of(std::span(bytes).first(size - kChecksumBytes));
    std::memcpy(bytes.data() + size - kChecksumBytes, checksum.data(), checksum.size());
    return bytes;
}

void read_entry(std::string_view input) {
    const auto whole = as_byte_span(input);
    const auto key = key_of_entry(whole);
    for (const auto& bytes : {std::vector(whole.begin(), whole.end()), mended(whole, whole.size())}) {
        std::string why;
        const auto artifact = decode_artifact(key.value_or(CacheKey{}), bytes, why);
        require(artifact.has_value() == why.empty(), "an entry is refused with a reason, or taken without one");
        if (!artifact) continue;
        const auto again = decode_artifact(*key, encode_artifact(*key, *artifact), why);
        require(again && again->metadata == artifact->metadata && again->payload == artifact->payload, "an entry reads back");
    }
}

std::vector<std::string> entry_seeds() {
    const CacheKey key = KeyBuilder("fuzz").finish();
    std::vector<std::string> seeds;
    for (const std::size_t size : {0, 1, 300}) {
        const Artifact artifact{R"({"kind":"cubin"})", std::vector<std::byte>(size, std::byte{7})};
        seeds.push_back(text_of(encode_artifact(key, artifact)));
    }
    return seeds;
}

void read_pack(std::string_view input) {
    const auto bytes = as_byte_span(input);
    std::string why;
    const auto head_bytes = pack_head_bytes(bytes.first(std::min(bytes.size(), kPackHeaderBytes)), bytes.size(), why);
    if (!head_bytes) return;
    require(*head_bytes <= bytes.size(), "a pack's head lies in the pack");
    const auto head = bytes.first(*head_bytes);
    for (const auto& candidate : {std::vector(head.begin(), head.end()), mended(head, head.size())}) {
        const auto index = decode_pack_head(candidate, bytes.size(), why);
        if (!index) continue;
        std::uint64_t end = *head_bytes;
        for (const PackedEntry& entry : *index) {
            require(entry.offset >= end && entry.bytes <= bytes.size() - entry.offset, "a pack's entries lie in it, one behind another");
            end = entry.offset + entry.bytes;
            (void)decode_artifact(entry.key, bytes.subspan(entry.offset, entry.bytes), why);
        }
        require(end == bytes.size(), "a pack's entries fill it");
    }
}

std::vector<std::string> pack_seeds() {
    std::vector<std::string> seeds;
    for (int count = 0; count < 3; ++count) {
        PackContents contents;
        for (int i = 0; i < count; ++i) {
            const CacheKey key = KeyBuilder("fuzz").add("i", std::to_string(i)).finish();
            contents[key] = encode_artifact(key, {R"({"kind":"cubin"})", std::vector<std::byte>(static_cast<std::size_t>(10 * i))});
        }
        const PackHead head = encode_pack_head(contents);
        std::string pack = text_of(head.bytes);
        auto place = head.index.begin();
        for (const auto& [key, entry] : contents) {
            pack.resize(place->offset);
            pack += text_of(entry);
            ++place;
        }
        seeds.push_back(std::move(pack));
    }
    return seeds;
}

void read_record(std::string_view input) {
    std::string why;
    const auto record = parse_record(input, why);
    (void)peek_subject(input);
    if (!record) return;
    (void)record->best_plan();
    const std::string text = record_text(*record);
    const auto again = parse_record(text, why);
    require(again && record_text(*again) == text, "a record reads back");
    require(record_text(merged(*record, *again)) == text, "a record merged with itself is itself");
}

std::vector<std::string> record_seeds() {
    Record record{.key = record_key(parse_spec("D=64,V=500,dtype=fp32"), describe_device("x86-64-v3"), {.num_tokens = 4096})};
    record.runs["r1"] = {.date = "2026-01-01T00:00:00Z", .version = "0.1.0", .device = "x86-64-v3", .searched = "all"};
    const std::vector<Plan> plans = candidate_plans(parse_spec("D=64,V=500,dtype=fp32"), describe_device("x86-64-v3"));
    for (std::size_t i = 0; i < std::min<std::size_t>(plans.size(), 3); ++i) {
        Candidate& candidate = record.candidates[plans[i].text()];
        candidate.rank = static_cast<int>(i);
        candidate.outcome = static_cast<Outcome>(i);
        if (i > 0) candidate.why = "it did not end";
        candidate.times_ms["r1"] = {1.5, 1.25, 1.5};
    }
    return {record_text(record)};
}

void read_spec(std::string_view input) {
    const std::size_t first = input.find_first_not_of(" \t\r\n");
    if (first != std::string_view::npos && input[first] == '@') return;  // names a file
    const auto check = [](const Spec& spec) {
        require(parse_spec(spec.text()) == spec, "a spec's text reads back");
        require(parse_spec_json(spec.json()) == spec, "a spec's JSON reads back");
    };
    try {
        check(input.starts_with('{') ? parse_spec_json(input) : parse_spec(input));
    } catch (const SpecError&) {
    }
}

void read_hf_config(std::string_view input) {
    try {
        const Spec spec = spec_from_hf_config(input);
        require(parse_spec(spec.text()) == spec, "a config's spec reads back");
    } catch (const SpecError&) {
    }
}

void read_plan(std::string_view input) {
    static const std::array kSpecs{parse_spec("D=4096,V=128256,dtype=bf16,softcap=30"), parse_spec("D=64,V=500,dtype=fp32")};
    static const std::array kDevices{describe_device("sm_80"), describe_device("sm_90a"), describe_device("x86-64-v4")};
    try {
        const Plan plan = input.starts_with('{') ? parse_plan_json(input) : parse_plan(input);
        require(parse_plan(plan.text()) == plan, "a plan's text reads back");
        require(parse_plan_json(plan.json()) == plan, "a plan's JSON reads back");
        for (const Spec& spec : kSpecs) {
            for (const Device& device : kDevices) (void)illegal_reason(spec, device, plan);
        }
    } catch (const PlanError&) {
    }
}

void read_safetensors(std::string_view input) {
    const auto bytes = as_byte_span(input);
    for (const std::uint64_t beyond : {0ULL, 1ULL << 20, ~0ULL - (1ULL << 32)}) {
        try {
            std::uint64_t data = 0;
            for (const cli::TensorEntry& entry : cli::parse_safetensors_header(bytes, bytes.size() + beyond, "input")) {
                require(entry.begin <= entry.end && entry.end <= bytes.size() + beyond, "a tensor lies in its file");
                data += entry.end - entry.begin;
                (void)cli::describe(entry);
            }
            require(data <= bytes.size() + beyond, "tensors do not overlap");
        } catch (const cli::UsageError&) {
        }
    }
}

std::vector<std::string> safetensors_seeds() {
    std::vector<std::string> seeds;
    for (const std::string header : {R"({})", R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})",
                                     R"({"__metadata__":{"k":"v"},"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},)"
                                     R"("b":{"dtype":"I64","shape":[0],"data_offsets":[2,2]}})"}) {
        std::string file(8, '\0');
        const std::uint64_t size = header.size();
        std::memcpy(file.data(), &size, sizeof size);
        seeds.push_back(file + header + std::string(header.size() > 80 ? 2 : header.size() > 2 ? 24 : 0, 'x'));
    }
    return seeds;
}

std::vector<std::string> no_seeds() { return {}; }

constexpr std::array kReaders{
    Reader{"entry", read_entry, entry_seeds},
    Reader{"pack", read_pack, pack_seeds},
    Reader{"record", read_record, record_seeds},
    Reader{"spec", read_spec, no_seeds},
    Reader{"hf_config", read_hf_config, no_seeds},
    Reader{"plan", read_plan, no_seeds},
    Reader{"safetensors", read_safetensors, safetensors_seeds},
};

}  // namespace

std::span<const Reader> readers() { return kReaders; }

}  // namespace flce::fuzz
