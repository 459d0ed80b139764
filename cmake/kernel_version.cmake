# Writes OUTPUT: flce::kernel_version(), digests of what kernels are made of. Measurements of other kernels are told apart by it.
#   CUDA_FILES, CPU_FILES: the sources that a kernel's machine code or its launches follow from.
include(${CMAKE_CURRENT_LIST_DIR}/source_digest.cmake)
list(SORT CUDA_FILES)
list(SORT CPU_FILES)
source_digest(cuda CODE_ALONE ${CUDA_FILES})
source_digest(cpu CODE_ALONE ${CPU_FILES})
file(WRITE ${OUTPUT} "// Generated from the sources of kernels. Do not edit.\n#include \"records/kernel_version.hpp\"\n\nnamespace flce {\n
std::string_view kernel_version(DeviceKind kind) noexcept { return kind == DeviceKind::cuda ? \"${cuda}\" : \"${cpu}\"; }\n
}  // namespace flce\n")
