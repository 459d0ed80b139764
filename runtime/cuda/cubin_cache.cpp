#include "runtime/cuda/cubin_cache.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cache/byte_io.hpp"

namespace flce {
namespace {

Artifact compiler_entry(const std::string& build_id, const std::string& arch) {
    const auto bytes = as_byte_span(build_id);
    return {
        nlohmann::ordered_json{{"kind", "compiler"}, {"arch", arch}, {"compiler_build_id", build_id}, {"created_by", "flce " FLCE_VERSION}}
            .dump(),
        {bytes.begin(), bytes.end()}};
}

}  // namespace

CacheKey recipe_key(const CubinRecipe& recipe) {
    KeyBuilder key("cubin recipe");
    key.add("arch", recipe.arch).add("source", recipe.source);
    for (const EmbeddedHeader& header : recipe.headers) key.add("header name", header.name).add("header", header.text);
    for (const std::string& option : recipe.options) key.add("option", option);
    for (const KernelEntry& kernel : recipe.kernels) key.add("kernel", kernel.name);
    return key.finish();
}

CacheKey cubin_key(const CacheKey& recipe, const std::string& compiler_build_id) {
    return KeyBuilder("cubin").add("recipe", as_text(std::as_bytes(std::span(recipe.digest)))).add("nvrtc", compiler_build_id).finish();
}

std::shared_ptr<const Artifact> cubin_by(const std::string& build_id, const CacheKey& recipe, const std::string& arch, ArtifactCache& cache,
                                         const std::function<Artifact()>& compile, const ArtifactCache::PayloadFault& fault) {
    if (cache.options().strict) {
        auto cubin = cache.find(cubin_key(recipe, build_id), {}, fault);
        return cubin ? cubin : cubin_by_any_compiler(recipe, cache, fault);
    }
    bool created = false;
    const auto compile_and_tell = [&] {
        Artifact cubin = compile();
        // Written before the cubin is there: a process killed in between leaves a miss, and the next that compiles writes both.
        cache.keep(recipe, compiler_entry(build_id, arch), ArtifactCache::Replace::always);
        return cubin;
    };
    auto cubin = cache.get_or_create(cubin_key(recipe, build_id), compile_and_tell, &created, fault);
    if (!created) cache.keep(recipe, compiler_entry(build_id, arch), ArtifactCache::Replace::if_absent);
    return cubin;
}

std::shared_ptr<const Artifact> cubin_by_any_compiler(const CacheKey& recipe, ArtifactCache& cache,
                                                      const ArtifactCache::PayloadFault& fault) {
    std::shared_ptr<const Artifact> cubin;
    // One tier's compiler may be one whose cubin is gone, another's not.
    const auto has_its_cubin = [&](const Artifact& compiler) {
        cubin = cache.find(cubin_key(recipe, std::string(as_text(compiler.payload))), {}, fault);
        return cubin != nullptr;
    };
    (void)cache.find(recipe, has_its_cubin, &compiler_fault);
    return cubin;
}

std::string compiler_fault(const Artifact& compiler) {
    constexpr std::size_t kMostBytes = 4096;
    const std::string_view build_id = as_text(compiler.payload);
    const bool printable = std::ranges::all_of(build_id, [](char c) { return c >= ' ' && c <= '~'; });
    return !build_id.empty() && build_id.size() <= kMostBytes && printable ? "" : "it names no compiler's build";
}

}  // namespace flce
