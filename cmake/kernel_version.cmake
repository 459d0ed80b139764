# Writes OUTPUT: flce::kernel_version(), digests of what kernels are made of. Measurements of other kernels are told apart by it.
#   CUDA_FILES, CPU_FILES: the sources that a kernel's machine code or its launches follow from.
function(digest_of files out)
  set(text "")
  list(SORT files)
  foreach(file IN LISTS files)
    file(SHA256 ${file} digest)
    string(APPEND text "${digest}")
  endforeach()
  string(SHA256 digest "${text}")
  string(SUBSTRING ${digest} 0 16 digest)
  set(${out} ${digest} PARENT_SCOPE)
endfunction()
digest_of("${CUDA_FILES}" cuda)
digest_of("${CPU_FILES}" cpu)
file(WRITE ${OUTPUT} "// Generated from the sources of kernels. Do not edit.\n#include \"autotune/kernel_version.hpp\"\n\nnamespace flce {\n
std::string_view kernel_version(DeviceKind kind) noexcept { return kind == DeviceKind::cuda ? \"${cuda}\" : \"${cpu}\"; }\n
}  // namespace flce\n")
