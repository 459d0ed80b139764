# libflce_jax beside libflce: custom calls of XLA for flce.jax. It is compiled against the headers of XLA's FFI and linked with nothing of
# XLA or jax; without those headers it is left out.
find_path(FLCE_XLA_INCLUDE xla/ffi/api/ffi.h HINTS ENV FLCE_XLA_INCLUDE PATHS ${CMAKE_SOURCE_DIR}/.tools/xla NO_DEFAULT_PATH)
if(NOT FLCE_XLA_INCLUDE)
  message(STATUS "flce.jax is left out: XLA's headers are not in .tools/xla (tools/setup.sh), nor in FLCE_XLA_INCLUDE")
  add_custom_target(flce_jax)
  return()
endif()
file(GLOB FLCE_JAX_SOURCES CONFIGURE_DEPENDS jax/*.cpp)
add_library(flce_jax SHARED ${FLCE_JAX_SOURCES})
target_include_directories(flce_jax PRIVATE ${CMAKE_SOURCE_DIR})
target_include_directories(flce_jax SYSTEM PRIVATE ${FLCE_XLA_INCLUDE})
target_link_libraries(flce_jax PRIVATE flce flce_build_flags nlohmann_json::nlohmann_json)
# A process has libflce already when Python loads this one; else it is looked for beside it.
set_target_properties(flce_jax PROPERTIES INSTALL_RPATH "$ORIGIN" LINK_DEPENDS ${CMAKE_SOURCE_DIR}/jax/flce_jax.map)
target_link_options(flce_jax PRIVATE LINKER:--gc-sections LINKER:--version-script=${CMAKE_SOURCE_DIR}/jax/flce_jax.map)
