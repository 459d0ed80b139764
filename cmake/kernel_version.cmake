# Writes OUTPUT: flce::kernel_version(), digests of what kernels are made of. Measurements of other kernels are told apart by it.
#   CUDA_FILES, CPU_FILES: the sources that a kernel's machine code or its launches follow from.
include(${CMAKE_CURRENT_LIST_DIR}/code_digest.cmake)
list(SORT CUDA_FILES)
list(SORT CPU_FILES)
code_digest(cuda ${CUDA_FILES})
code_digest(cpu ${CPU_FILES})
file(WRITE ${OUTPUT} "// Generated from the sources of kernels. Do not edit.\n#include \"records/kernel_version.hpp\"\n\nnamespace flce {\n
std::string_view kernel_version(DeviceKind kind) noexcept { return kind == DeviceKind::cuda ? \"${cuda}\" : \"${cpu}\"; }\n
}  // namespace flce\n")
