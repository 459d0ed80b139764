// A strict session on a pack: kernels that the build compiled are there, and one that it did not is an error that says what to do.
#include <cstdio>
#include <flce/flce.hpp>

int main() {
    flce::Session session({.device = "cpu", .disk_cache = false, .cache_packs = {KERNEL_PACK}, .strict = true});
    const auto first = session.get_kernel(flce::parse_spec("D=64,V=1000,dtype=fp32,softcap=30"));
    const auto second =
        session.get_kernel(flce::parse_spec("D=128,V=2000,dtype=bf16"), {.workspace_limit_bytes = 40 << 20, .num_tokens = 4});
    const flce::SessionStatistics statistics = session.statistics();
    std::printf("%s\n%s\n%lld kernels from the pack, %lld compiled\n", first->plan().text().c_str(), second->plan().text().c_str(),
                static_cast<long long>(statistics.pack_hits), static_cast<long long>(statistics.compiled));
    try {
        (void)session.get_kernel(flce::parse_spec("D=64,V=1000,dtype=fp16"));
    } catch (const flce::CacheMissError& miss) {
        std::printf("%s\n", miss.what());
        return statistics.compiled == 0 && statistics.pack_hits > 0 ? 0 : 1;
    }
    return 1;
}
