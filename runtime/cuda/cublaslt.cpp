#include "runtime/cuda/cublaslt.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "cache/dynamic_library.hpp"
#include "flce/error.hpp"
#include "runtime/cuda/nvrtc_search.hpp"
#include "runtime/environment.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

constexpr std::array kCublasLtNames = {"libcublasLt.so.13", "libcublasLt.so.12"};

using namespace cublaslt;

constexpr int kMostAlgorithms = 16;
constexpr std::size_t kMostKnown = 4096;
constexpr std::int64_t kMostAlignment = 256;

int type_of(std::int64_t dtype) {
    switch (static_cast<DType>(dtype)) {
        case DType::bf16: return kTypeBf16;
        case DType::fp16: return kTypeFp16;
        case DType::fp32: return kTypeFp32;
    }
    return kTypeFp32;
}

std::uint32_t alignment_of(std::int64_t address) {
    return static_cast<std::uint32_t>(
        std::min(kMostAlignment, std::int64_t{1} << std::countr_zero(static_cast<std::uint64_t>(address | kMostAlignment))));
}

std::shared_ptr<const CublasLt> search() {
    for (const char* name : kCublasLtNames) {
        void* loaded = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (loaded != nullptr) return CublasLt::open(name);
    }
    std::string tried;
    const auto open = [&tried](const fs::path& file) -> std::shared_ptr<const CublasLt> {
        try {
            return CublasLt::open(file);
        } catch (const EnvironmentError& error) {
            tried += fmt::format("; {}", error.what());
            return nullptr;
        }
    };
    for (const fs::path& folder : cuda_library_folders()) {
        for (const char* name : kCublasLtNames) {
            std::error_code ignored;
            if (!fs::exists(folder / name, ignored)) continue;
            if (auto found = open(folder / name)) return found;
        }
    }
    for (const char* name : kCublasLtNames) {
        std::string why;
        if (DynamicLibrary::open(name, &why)) return CublasLt::open(name);
    }
    throw EnvironmentError(fmt::format(
        "cuBLASLt (libcublasLt.so.13 or .12) was not found: install a CUDA toolkit or `pip install nvidia-cublas`, or set FLCE_CUBLASLT to "
        "the file{}",
        tried));
}

}  // namespace

std::shared_ptr<const CublasLt> CublasLt::load() {
    // Never destroyed, as libcuda: kernels that outlive main still multiply.
    static std::mutex mutex;
    static auto& loaded = *new std::shared_ptr<const CublasLt>();
    const std::scoped_lock lock(mutex);
    if (loaded == nullptr) loaded = environment().cublaslt.empty() ? search() : open(environment().cublaslt);
    return loaded;
}

std::shared_ptr<const CublasLt> CublasLt::open(const fs::path& file) {
    std::string why;
    const DynamicLibrary library = DynamicLibrary::open(file, &why);
    if (!library) throw EnvironmentError(fmt::format("{} cannot be loaded ({})", file.string(), why));
    std::shared_ptr<CublasLt> result(new CublasLt());
    CublasLtFunctions& f = result->functions_;
    const auto bind = [&](auto& function, const char* name) {
        if (library.bind(function, name)) return;
        throw EnvironmentError(fmt::format("{} is no cuBLASLt of CUDA 12 or newer: it has no {}", library.path().string(), name));
    };
    bind(f.version, "cublasLtGetVersion");
    bind(f.status_name, "cublasLtGetStatusName");
    bind(f.create, "cublasLtCreate");
    bind(f.destroy, "cublasLtDestroy");
    bind(f.desc_create, "cublasLtMatmulDescCreate");
    bind(f.desc_destroy, "cublasLtMatmulDescDestroy");
    bind(f.desc_set, "cublasLtMatmulDescSetAttribute");
    bind(f.layout_create, "cublasLtMatrixLayoutCreate");
    bind(f.layout_destroy, "cublasLtMatrixLayoutDestroy");
    bind(f.preference_create, "cublasLtMatmulPreferenceCreate");
    bind(f.preference_destroy, "cublasLtMatmulPreferenceDestroy");
    bind(f.preference_set, "cublasLtMatmulPreferenceSetAttribute");
    bind(f.heuristic, "cublasLtMatmulAlgoGetHeuristic");
    bind(f.matmul, "cublasLtMatmul");
    result->version_ = static_cast<int>(f.version());
    result->path_ = library.path();
    return result;
}

std::string CublasLt::describe(int status) const { return functions_.status_name(status); }

/// Descriptors of a product, which it frees.
struct LibraryGemms::Prepared {
    explicit Prepared(const CublasLtFunctions& functions) : f(functions) {}
    ~Prepared() {
        if (desc != nullptr) f.desc_destroy(desc);
        for (void* layout : {a, b, d}) {
            if (layout != nullptr) f.layout_destroy(layout);
        }
    }
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;

    const CublasLtFunctions& f;
    void* desc = nullptr;
    // The library's operands: its matrices are column-major, so that it multiplies bᵀ · aᵀ.
    void* a = nullptr;
    void* b = nullptr;
    void* d = nullptr;
    CublasLtFunctions::Algorithm algorithm{};
};

LibraryGemms::LibraryGemms(std::shared_ptr<const CublasLt> library, std::shared_ptr<const CudaContext> context)
    : library_(std::move(library)), context_(std::move(context)) {
    const ContextScope scope(*context_);
    if (const int status = library_->functions().create(&handle_); status != 0) {
        throw DeviceError(fmt::format("cublasLtCreate failed: {}", library_->describe(status)), "cublasLtCreate", status);
    }
}

const LibraryGemms& LibraryGemms::of(const std::shared_ptr<const CudaContext>& context) {
    static std::mutex mutex;
    static auto& devices = *new std::map<int, const LibraryGemms*>();
    const std::scoped_lock lock(mutex);
    const LibraryGemms*& gemms = devices[context->ordinal()];
    if (gemms == nullptr) gemms = new LibraryGemms(CublasLt::load(), context);
    return *gemms;
}

int LibraryGemms::run(const GemmCall& call, void* stream) const noexcept {
    try {
        int status = 0;
        const std::shared_ptr<const Prepared> with = prepared(call, status);
        if (with == nullptr) return status;
        const float one = 1;
        const float zero = 0;
        const auto* factors = reinterpret_cast<const float*>(call.factors);
        const float* alpha = factors != nullptr ? factors : &one;
        const float* beta = factors != nullptr ? factors + (call.adds != 0 ? 2 : 1) : call.adds != 0 ? &one : &zero;
        auto* result = reinterpret_cast<void*>(call.result);
        return library_->functions().matmul(handle_, with->desc, alpha, reinterpret_cast<const void*>(call.b), with->a,
                                            reinterpret_cast<const void*>(call.a), with->b, beta, result, with->d, result, with->d,
                                            &with->algorithm, reinterpret_cast<void*>(call.workspace), kGemmWorkspaceBytes, stream);
    } catch (...) {  // nothing may be thrown through a compiled launcher
        return kStatusAllocationFailed;
    }
}

std::shared_ptr<const LibraryGemms::Prepared> LibraryGemms::prepared(const GemmCall& call, int& status) const {
    const std::uint32_t aligned_a = alignment_of(call.a);
    const std::uint32_t aligned_b = alignment_of(call.b);
    const std::uint32_t aligned_result = alignment_of(call.result);
    const Key key = {call.transpose_a,
                     call.transpose_b,
                     call.operands,
                     call.result_type,
                     call.algorithm,
                     call.m,
                     call.n,
                     call.k,
                     call.lda,
                     call.ldb,
                     call.ld,
                     call.adds != 0 ? 1 : 0,
                     call.factors != 0 ? 1 : 0,
                     aligned_a,
                     aligned_b,
                     aligned_result};
    const std::scoped_lock lock(mutex_);
    if (const auto found = known_.find(key); found != known_.end()) return found->second;
    std::shared_ptr<const Prepared> made = prepare(call, status);
    if (made == nullptr) return nullptr;
    if (known_.size() >= kMostKnown) known_.clear();  // tokens of ever other numbers
    known_.emplace(key, made);
    return made;
}

std::shared_ptr<const LibraryGemms::Prepared> LibraryGemms::prepare(const GemmCall& call, int& status) const {
    const CublasLtFunctions& f = library_->functions();
    auto made = std::make_shared<Prepared>(f);
    const auto good = [&status](int result) {
        status = result;
        return result == 0;
    };
    const auto layout = [&](void*& to, std::int64_t type, std::int64_t rows, std::int64_t columns, std::int64_t ld) {
        return good(f.layout_create(&to, type_of(type), static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns), ld));
    };
    // A row-major [r, c] is a column-major [c, r].
    const int transpose_a = call.transpose_b != 0 ? 1 : 0;
    const int transpose_b = call.transpose_a != 0 ? 1 : 0;
    if (!good(f.desc_create(&made->desc, kCompute32F, kTypeFp32)) ||
        !good(f.desc_set(made->desc, kDescTransposeA, &transpose_a, sizeof(transpose_a))) ||
        !good(f.desc_set(made->desc, kDescTransposeB, &transpose_b, sizeof(transpose_b))) ||
        !layout(made->a, call.operands, transpose_a != 0 ? call.k : call.n, transpose_a != 0 ? call.n : call.k, call.ldb) ||
        !layout(made->b, call.operands, transpose_b != 0 ? call.m : call.k, transpose_b != 0 ? call.k : call.m, call.lda) ||
        !layout(made->d, call.result_type, call.n, call.m, call.ld)) {
        return nullptr;
    }
    if (call.factors != 0 && !good(f.desc_set(made->desc, kDescPointerMode, &kPointerModeDevice, sizeof(kPointerModeDevice))))
        return nullptr;
    void* preference = nullptr;
    if (!good(f.preference_create(&preference))) return nullptr;
    const std::unique_ptr<void, int (*)(void*)> owned(preference, f.preference_destroy);
    const auto prefer = [&](int attribute, const auto& value) {
        return good(f.preference_set(preference, attribute, &value, sizeof(value)));
    };
    const std::uint64_t workspace_bytes = kGemmWorkspaceBytes;
    if (!prefer(kPreferenceWorkspaceBytes, workspace_bytes) || !prefer(kPreferenceReductions, kRepeatableReductions)) return nullptr;
    const std::uint32_t aligned = alignment_of(call.result);
    const std::array<std::uint32_t, 4> alignments = {alignment_of(call.b), alignment_of(call.a), aligned, aligned};
    for (std::size_t i = 0; i < alignments.size(); ++i) {
        if (!prefer(kPreferenceAlignments[i], alignments[i])) return nullptr;
    }
    std::array<CublasLtFunctions::Heuristic, kMostAlgorithms> found{};
    int count = 0;
    if (!good(f.heuristic(handle_, made->desc, made->a, made->b, made->d, made->d, preference, kMostAlgorithms, found.data(), &count))) {
        return nullptr;
    }
    if (count == 0) return status = kStatusNotSupported, nullptr;
    const bool known = call.algorithm < count && found[static_cast<std::size_t>(call.algorithm)].state == 0;
    made->algorithm = found[known ? static_cast<std::size_t>(call.algorithm) : 0].algorithm;
    return made;
}

int cublaslt_version() {
    try {
        return CublasLt::load()->version();
    } catch (const EnvironmentError&) {
        return 0;
    }
}

int run_gemm(const LauncherContext* context, const GemmCall* call, void* stream) {
    return static_cast<const LibraryGemms*>(context->gemm_library)->run(*call, stream);
}

int run_favourite_gemm(const LauncherContext* context, const GemmCall* call, void* stream) {
    GemmCall favourite = *call;
    favourite.algorithm = 0;
    return run_gemm(context, &favourite, stream);
}

}  // namespace flce
