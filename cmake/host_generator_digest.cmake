# Digests of the sources that make host objects. The digests are part of the objects' keys: an object in a cache is never mistaken for one
# of changed code, nor called by code that passes other arguments. A change of these files configures again.
#   FLCE_HOST_GENERATOR_DIGEST  the CPU backend's code generator
#   FLCE_LAUNCHER_DIGEST        the lowering of launch programs, and the layouts that compiled launchers read
include(source_digest)

function(flce_digest name user)
  source_digest(digest ${ARGN})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${ARGN})
  set_source_files_properties(${user} DIRECTORY ${CMAKE_SOURCE_DIR} PROPERTIES COMPILE_DEFINITIONS "${name}=\"${digest}\"")
endfunction()

file(GLOB generator_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/generator/cpu/*.cpp ${CMAKE_SOURCE_DIR}/generator/cpu/*.hpp)
list(FILTER generator_sources EXCLUDE REGEX "/(blocks|rules|cost)\\.[ch]pp$")  # the planner's candidates are in no object
file(GLOB compiler_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/runtime/host/host_code.*)
flce_digest(FLCE_HOST_GENERATOR_DIGEST generator/cpu/code.cpp ${generator_sources} ${compiler_sources}
  ${CMAKE_SOURCE_DIR}/generator/logit_transforms.hpp ${CMAKE_SOURCE_DIR}/templates/common/row_math.cuh)
file(GLOB launcher_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/runtime/cuda/launcher.* ${CMAKE_SOURCE_DIR}/generator/launch_program.*)
flce_digest(FLCE_LAUNCHER_DIGEST runtime/cuda/launcher.cpp ${launcher_sources} ${compiler_sources}
  ${CMAKE_SOURCE_DIR}/generator/call_slots.hpp
  ${CMAKE_SOURCE_DIR}/generator/call_tensors.hpp)
