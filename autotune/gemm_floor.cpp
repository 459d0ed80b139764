#include "autotune/gemm_floor.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <vector>

#include "runtime/cuda/nvrtc_search.hpp"

namespace flce {
namespace {

class Library {
public:
    /// The first of `names` that loads. Never closed: BLAS libraries own threads.
    static Library first_of(const std::vector<std::string>& names) {
        for (const std::string& name : names) {
            if (void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return {handle, name};
        }
        return {};
    }
    explicit operator bool() const { return handle_ != nullptr; }
    [[nodiscard]] const std::string& name() const { return name_; }
    template <class Function>
    Function symbol(const char* name) const {
        return reinterpret_cast<Function>(handle_ == nullptr ? nullptr : ::dlsym(handle_, name));
    }

private:
    Library() = default;
    Library(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}
    void* handle_ = nullptr;
    std::string name_;
};

// ---- cuBLAS
// ------------------------------------------------------------------------------------------------------------------------------

constexpr int kCudaR32F = 0;
constexpr int kCudaR16F = 2;
constexpr int kCudaR16BF = 14;
constexpr int kCompute32F = 68;
constexpr int kCompute32FPedantic = 69;

class CublasLibrary final : public GemmLibrary {
public:
    static std::unique_ptr<GemmLibrary> load(DeviceRef device, DType dtype, std::string* why) {
        make_context_current(device);
        const Library library = Library::first_of(candidates());
        if (!library) {
            *why =
                "no libcublas.so.13 or .12 in the loader's path, the CUDA toolkit or a Python environment (CUDA_PATH and VIRTUAL_ENV are "
                "looked at)";
            return nullptr;
        }
        std::unique_ptr<CublasLibrary> result(new CublasLibrary(dtype));
        using Create = int (*)(void**);
        using Version = int (*)(void*, int*);
        const auto create = library.symbol<Create>("cublasCreate_v2");
        result->gemm_ = library.symbol<Gemm>("cublasGemmEx");
        if (create == nullptr || result->gemm_ == nullptr) {
            *why = fmt::format("{} lacks cublasCreate_v2 or cublasGemmEx", library.name());
            return nullptr;
        }
        if (const int status = create(&result->handle_); status != 0) {
            *why = fmt::format("cublasCreate failed with status {}", status);
            return nullptr;
        }
        int number = 0;
        if (const auto get_version = library.symbol<Version>("cublasGetVersion_v2")) get_version(result->handle_, &number);
        result->description_ = fmt::format("cuBLAS {}.{}.{} ({})", number / 10000, number / 100 % 100, number % 100,
                                           std::filesystem::path(library.name()).filename().string());
        return result;
    }

    std::string description() const override {
        return fmt::format("{}, {}", description_,
                           dtype_ == ScalarType::fp32   ? "fp32 (pedantic)"
                           : dtype_ == ScalarType::bf16 ? "bf16, fp32 accumulation"
                                                        : "fp16, fp32 accumulation");
    }
    ScalarType dtype() const override { return dtype_; }
    void gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const void* a, std::int64_t lda,
              const void* b, std::int64_t ldb, void* c, std::int64_t ldc) const override {
        const float one = 1;
        const float zero = 0;
        const int type = dtype_ == ScalarType::fp32 ? kCudaR32F : dtype_ == ScalarType::bf16 ? kCudaR16BF : kCudaR16F;
        const int compute = dtype_ == ScalarType::fp32 ? kCompute32FPedantic : kCompute32F;
        const auto narrow = [](std::int64_t value) { return static_cast<int>(value); };
        constexpr int kDefaultAlgorithm = -1;
        const int status = gemm_(handle_, transpose_a ? 1 : 0, transpose_b ? 1 : 0, narrow(m), narrow(n), narrow(k), &one, a, type,
                                 narrow(lda), b, type, narrow(ldb), &zero, c, type, narrow(ldc), compute, kDefaultAlgorithm);
        if (status != 0) throw DeviceError(fmt::format("cublasGemmEx failed with status {}", status), "cublasGemmEx", status);
    }
    void copy(void* to, const void* from, std::size_t bytes) const override {
        constexpr const char* kName = "cuMemcpyDtoDAsync_v2";
        using Copy = int (*)(unsigned long long, unsigned long long, std::size_t, void*);
        const auto function = Library::first_of({"libcuda.so.1"}).symbol<Copy>(kName);
        const int status = function == nullptr
                               ? -1
                               : function(reinterpret_cast<std::uintptr_t>(to), reinterpret_cast<std::uintptr_t>(from), bytes, nullptr);
        if (status != 0) throw DeviceError(fmt::format("{} failed with status {}", kName, status), kName, status);
    }

private:
    using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*, void*, int,
                         int, int, int);

    explicit CublasLibrary(DType dtype)
        : dtype_(dtype == DType::fp32   ? ScalarType::fp32
                 : dtype == DType::bf16 ? ScalarType::bf16
                                        : ScalarType::fp16) {}

    /// cuBLAS works in the calling thread's current context; the kernels' memory is in the device's primary one.
    static void make_context_current(DeviceRef device) {
        const Library driver = Library::first_of({"libcuda.so.1"});
        using DeviceGet = int (*)(int*, int);
        using Retain = int (*)(void**, int);
        using SetCurrent = int (*)(void*);
        const auto get = driver.symbol<DeviceGet>("cuDeviceGet");
        const auto retain = driver.symbol<Retain>("cuDevicePrimaryCtxRetain");
        const auto set_current = driver.symbol<SetCurrent>("cuCtxSetCurrent");
        int handle = 0;
        void* context = nullptr;
        if (get != nullptr && retain != nullptr && set_current != nullptr && get(&handle, device.index) == 0 &&
            retain(&context, handle) == 0) {
            set_current(context);
        }
    }

    /// Names for the loader, then files of the toolkit and of Python's CUDA wheels.
    static std::vector<std::string> candidates() {
        namespace fs = std::filesystem;
        const std::array<std::string, 2> names{"libcublas.so.13", "libcublas.so.12"};
        std::vector<std::string> result(names.begin(), names.end());
        for (const fs::path& folder : cuda_library_folders()) {
            for (const std::string& name : names) {
                std::error_code error;
                if (!fs::exists(folder / name, error)) continue;
                // libcublas needs libcublasLt from its own folder, where the loader does not look by itself.
                const std::string lt = std::string(name).replace(0, 9, "libcublasLt");
                ::dlopen((folder / lt).c_str(), RTLD_NOW | RTLD_GLOBAL);
                result.push_back((folder / name).string());
            }
        }
        return result;
    }

    ScalarType dtype_;
    void* handle_ = nullptr;
    Gemm gemm_ = nullptr;
    std::string description_;
};

// ---- CBLAS
// -------------------------------------------------------------------------------------------------------------------------------

constexpr int kColumnMajor = 102;
constexpr int kNoTranspose = 111;
constexpr int kTranspose = 112;

class CpuBlas final : public GemmLibrary {
public:
    static std::unique_ptr<GemmLibrary> load(DType dtype, int threads, std::string* why) {
        const Library library = Library::first_of(
            {"libmkl_rt.so.2", "libmkl_rt.so", "libopenblas.so.0", "libopenblas.so", "libblis.so.4", "libcblas.so.3", "libblas.so.3"});
        const auto sgemm = library.symbol<Sgemm>("cblas_sgemm");
        if (sgemm == nullptr) {
            *why = "no CPU BLAS found (libmkl_rt, libopenblas, libblis or libblas with cblas_sgemm)";
            return nullptr;
        }
        std::unique_ptr<CpuBlas> result(new CpuBlas);
        result->sgemm_ = sgemm;
        result->name_ = library.name();
        if (dtype == DType::bf16) result->bf16_gemm_ = library.symbol<Bf16Gemm>("cblas_gemm_bf16bf16f32");
        using SetThreads = void (*)(int);
        for (const char* name : {"MKL_Set_Num_Threads", "openblas_set_num_threads", "bli_thread_set_num_threads"}) {
            const auto set = library.symbol<SetThreads>(name);
            if (set != nullptr && threads > 0) set(threads);
        }
        return result;
    }

    std::string description() const override {
        return fmt::format("{}, {}", name_, bf16_gemm_ != nullptr ? "bf16 inputs, fp32 results" : "fp32");
    }
    ScalarType dtype() const override { return bf16_gemm_ != nullptr ? ScalarType::bf16 : ScalarType::fp32; }
    void gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const void* a, std::int64_t lda,
              const void* b, std::int64_t ldb, void* c, std::int64_t ldc) const override {
        const auto op = [](bool transpose) { return transpose ? kTranspose : kNoTranspose; };
        const auto narrow = [](std::int64_t value) { return static_cast<int>(value); };
        if (bf16_gemm_ != nullptr) {
            bf16_gemm_(kColumnMajor, op(transpose_a), op(transpose_b), narrow(m), narrow(n), narrow(k), 1.0F, a, narrow(lda), b,
                       narrow(ldb), 0.0F, static_cast<float*>(c), narrow(ldc));
            return;
        }
        sgemm_(kColumnMajor, op(transpose_a), op(transpose_b), narrow(m), narrow(n), narrow(k), 1.0F, static_cast<const float*>(a),
               narrow(lda), static_cast<const float*>(b), narrow(ldb), 0.0F, static_cast<float*>(c), narrow(ldc));
    }
    void copy(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

private:
    using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
    using Bf16Gemm = void (*)(int, int, int, int, int, int, float, const void*, int, const void*, int, float, float*, int);

    CpuBlas() = default;
    Sgemm sgemm_ = nullptr;
    Bf16Gemm bf16_gemm_ = nullptr;
    std::string name_;
};

}  // namespace

std::unique_ptr<GemmLibrary> load_gemm_library(DeviceRef device, DType dtype, int threads, std::string* why) {
    if (device.kind == DeviceKind::cuda) return CublasLibrary::load(device, dtype, why);
    return CpuBlas::load(dtype, threads, why);
}

// A row-major [r, c] matrix is a column-major [c, r] one; everything below is the transposed product.

void floor_forward(const GemmLibrary& library, const FloorOperands& o) {
    const bool vocab_major = o.layout == WeightLayout::vocab_major;
    library.gemm(vocab_major, false, o.vocab_size, o.num_tokens, o.hidden_size, o.weight, vocab_major ? o.hidden_size : o.weight_stride,
                 o.hidden, o.hidden_size, o.logits, o.vocab_size);
}

void floor_backward(const GemmLibrary& library, const FloorOperands& o) {
    const bool vocab_major = o.layout == WeightLayout::vocab_major;
    library.gemm(!vocab_major, false, o.hidden_size, o.num_tokens, o.vocab_size, o.weight, vocab_major ? o.hidden_size : o.weight_stride,
                 o.logits, o.vocab_size, o.grad_hidden, o.hidden_size);
    if (vocab_major) {
        library.gemm(false, true, o.hidden_size, o.vocab_size, o.num_tokens, o.hidden, o.hidden_size, o.logits, o.vocab_size, o.grad_weight,
                     o.hidden_size);
    } else {
        library.gemm(false, true, o.vocab_size, o.hidden_size, o.num_tokens, o.logits, o.vocab_size, o.hidden, o.hidden_size, o.grad_weight,
                     o.weight_stride);
    }
}

}  // namespace flce
