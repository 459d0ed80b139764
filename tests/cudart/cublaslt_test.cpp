// cuBLASLt as it is found and bound, and its numbers.
#include "runtime/cuda/cublaslt.hpp"

#include <gmock/gmock.h>

#include "flce/error.hpp"
#include "runtime/kernel_factory.hpp"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#endif

namespace flce {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(CublasLt, FileThatIsNone_ErrorNamesItAndWhatItLacks) {
    EXPECT_THAT([] { (void)CublasLt::open("/no/such/libcublasLt.so.13"); },
                ThrowsMessage<EnvironmentError>(HasSubstr("/no/such/libcublasLt.so.13 cannot be loaded")));
    EXPECT_THAT(
        [] { (void)CublasLt::open("libm.so.6"); },
        ThrowsMessage<EnvironmentError>(AllOf(HasSubstr("libm.so.6"), HasSubstr("is no cuBLASLt"), HasSubstr("cublasLtGetVersion"))));
}

TEST(CublasLt, Version_IsThatOfTheLibraryOrNone) {
    int version = 0;
    try {
        version = CublasLt::load()->version();
    } catch (const EnvironmentError& error) {
        EXPECT_THAT(error.what(), HasSubstr("pip install nvidia-cublas"));
    }
    EXPECT_EQ(cublaslt_version(), version);
}

#if __has_include(<cublasLt.h>)
static_assert(cublaslt::kCompute32F == CUBLAS_COMPUTE_32F && cublaslt::kTypeFp32 == CUDA_R_32F && cublaslt::kTypeFp16 == CUDA_R_16F &&
              cublaslt::kTypeBf16 == CUDA_R_16BF);
static_assert(cublaslt::kDescPointerMode == CUBLASLT_MATMUL_DESC_POINTER_MODE && cublaslt::kDescTransposeA == CUBLASLT_MATMUL_DESC_TRANSA &&
              cublaslt::kDescTransposeB == CUBLASLT_MATMUL_DESC_TRANSB && cublaslt::kPointerModeDevice == CUBLASLT_POINTER_MODE_DEVICE);
static_assert(cublaslt::kPreferenceWorkspaceBytes == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES &&
              cublaslt::kPreferenceReductions == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK &&
              cublaslt::kPreferenceAlignments[0] == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES &&
              cublaslt::kPreferenceAlignments[3] == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(cublaslt::kRepeatableReductions == (CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE));
static_assert(cublaslt::kStatusAllocationFailed == CUBLAS_STATUS_ALLOC_FAILED &&
              cublaslt::kStatusNotSupported == CUBLAS_STATUS_NOT_SUPPORTED);
static_assert(sizeof(CublasLtFunctions::Algorithm) == sizeof(cublasLtMatmulAlgo_t) &&
              sizeof(CublasLtFunctions::Heuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
#endif

}  // namespace
}  // namespace flce
