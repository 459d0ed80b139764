# FLCE_HOST_GENERATOR_DIGEST: what the host code generator is made of, as one digest. It is part of the key of every host object, so that an object
# in a cache is never mistaken for what a changed generator would emit. A change of these files configures again.
file(GLOB digest_sources CONFIGURE_DEPENDS generator/host/*.cpp generator/host/*.hpp)
list(APPEND digest_sources ${CMAKE_SOURCE_DIR}/generator/logit_transforms.hpp ${CMAKE_SOURCE_DIR}/templates/row_math.cuh)
set(digest_text "")
foreach(source IN LISTS digest_sources)
  file(SHA256 ${source} digest)
  string(APPEND digest_text "${digest}")
endforeach()
string(SHA256 FLCE_HOST_GENERATOR_DIGEST "${digest_text}")
string(SUBSTRING ${FLCE_HOST_GENERATOR_DIGEST} 0 16 FLCE_HOST_GENERATOR_DIGEST)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${digest_sources})
set_source_files_properties(generator/host/cpu_code.cpp PROPERTIES
  COMPILE_DEFINITIONS "FLCE_HOST_GENERATOR_DIGEST=\"${FLCE_HOST_GENERATOR_DIGEST}\"")
