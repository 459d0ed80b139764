# Finds what flce stands on: the interface target flce_third_party for the library, flce::fmt and flce::spdlog for everyone,
# FLCE_CUDA_INCLUDE_DIR with cuda.h (types only: the driver and NVRTC are loaded at run time).
find_package(Threads REQUIRED)

if(FLCE_PORTABLE)
  set(FLCE_STATIC_LLVM ON)
  set(ZLIB_USE_STATIC_LIBS ON)
  set(OPENSSL_USE_STATIC_LIBS ON)
  include(flce_portable)
endif()

# LLVM: 19 first, then newer, then 18. Each is looked for in its own folder because a version request for "19" does not accept 19.1 (LLVM's
# version file wants the minor number too), and so that LLVM_DIR or LLVM_ROOT, when given, decide alone.
if(NOT LLVM_DIR AND NOT LLVM_ROOT AND NOT DEFINED ENV{LLVM_DIR})
  foreach(version 19 20 21 22 18)
    find_package(LLVM QUIET CONFIG NO_DEFAULT_PATH PATHS /usr/lib/llvm-${version} /usr/lib64/llvm${version} /opt/llvm-${version})
    if(LLVM_FOUND)
      break()
    endif()
  endforeach()
endif()
find_package(LLVM REQUIRED CONFIG)
if(LLVM_VERSION_MAJOR LESS 18)
  message(FATAL_ERROR
    "LLVM ${LLVM_VERSION} in ${LLVM_DIR} is too old: 18 or newer is needed (19 preferred); set LLVM_DIR to choose another")
endif()
message(STATUS "LLVM ${LLVM_VERSION}: ${LLVM_DIR}")

find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)

add_library(flce_third_party INTERFACE)
add_library(flce_fmt INTERFACE)
add_library(flce_spdlog INTERFACE)
add_library(flce_tbb INTERFACE)
add_library(flce::fmt ALIAS flce_fmt)
add_library(flce::spdlog ALIAS flce_spdlog)
add_library(flce::tbb ALIAS flce_tbb)

target_link_libraries(flce_spdlog INTERFACE flce_fmt)
if(FLCE_PORTABLE)
  # Distributions have zstd and xxHash as archives, fmt and spdlog as headers; oneTBB is compiled here.
  foreach(name zstd xxhash)
    find_library(FLCE_STATIC_${name} NAMES lib${name}.a REQUIRED)
    target_link_libraries(flce_third_party INTERFACE ${FLCE_STATIC_${name}})
  endforeach()
  target_link_libraries(flce_fmt INTERFACE fmt::fmt-header-only)
  target_compile_definitions(flce_spdlog INTERFACE SPDLOG_FMT_EXTERNAL)
  target_link_libraries(flce_tbb INTERFACE flce_static_tbb)
else()
  target_link_libraries(flce_fmt INTERFACE fmt::fmt)
  target_link_libraries(flce_spdlog INTERFACE spdlog::spdlog)
  find_package(TBB REQUIRED)
  target_link_libraries(flce_tbb INTERFACE TBB::tbb)
  pkg_check_modules(ZSTD REQUIRED IMPORTED_TARGET libzstd)
  pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
  target_link_libraries(flce_third_party INTERFACE PkgConfig::ZSTD PkgConfig::XXHASH)
endif()
target_link_libraries(flce_third_party INTERFACE flce::fmt flce::spdlog nlohmann_json::nlohmann_json OpenSSL::Crypto flce::tbb
  Threads::Threads ${CMAKE_DL_LIBS})

# Remote caches. libcurl is loaded at run time (cache/http_transport.cpp) and gives its header only; hiredis is small and needs nothing but
# libc. Without one of them flce builds all the same, and a URL that needs it is an error that says so.
find_path(FLCE_CURL_INCLUDE_DIR curl/curl.h)
if(FLCE_PORTABLE)
  find_library(FLCE_HIREDIS NAMES libhiredis.a)
else()
  find_library(FLCE_HIREDIS NAMES hiredis)
endif()
find_path(FLCE_HIREDIS_INCLUDE_DIR hiredis/hiredis.h)
if(FLCE_HIREDIS AND FLCE_HIREDIS_INCLUDE_DIR)
  target_link_libraries(flce_third_party INTERFACE ${FLCE_HIREDIS})
  set_source_files_properties(${CMAKE_SOURCE_DIR}/cache/redis_transport.cpp PROPERTIES COMPILE_DEFINITIONS FLCE_HAVE_HIREDIS)
else()
  message(STATUS "hiredis is not installed: no redis:// caches")
endif()
if(NOT FLCE_CURL_INCLUDE_DIR)
  message(STATUS "libcurl's headers are not installed: no http:// and s3:// caches")
endif()

# Code for hosts of both architectures, of which LLVM has one at least: a pack that is made on one serves the other, too.
set(flce_llvm_targets "")
foreach(target X86 AArch64)
  if(target IN_LIST LLVM_TARGETS_TO_BUILD)
    list(APPEND flce_llvm_targets ${target})
    string(TOUPPER "FLCE_LLVM_${target}" definition)
    set_property(SOURCE ${CMAKE_SOURCE_DIR}/runtime/host/host_code.cpp APPEND PROPERTY COMPILE_DEFINITIONS ${definition})
  endif()
endforeach()
if(FLCE_PORTABLE)
  # LLVM's solver, which none of its code here calls, is named by its place on LLVM's own machine.
  get_target_property(flce_llvm_links LLVMSupport INTERFACE_LINK_LIBRARIES)
  list(FILTER flce_llvm_links EXCLUDE REGEX "libz3")
  set_target_properties(LLVMSupport PROPERTIES INTERFACE_LINK_LIBRARIES "${flce_llvm_links}")
endif()
if(FLCE_STATIC_LLVM)
  llvm_map_components_to_libnames(FLCE_LLVM_LIBS core orcjit passes ${flce_llvm_targets})
  target_link_libraries(flce_third_party INTERFACE ${FLCE_LLVM_LIBS})
else()
  target_link_libraries(flce_third_party INTERFACE LLVM)
endif()

# The private folder that tools/setup.sh fills comes last: a toolkit, where there is one, matches the machine's driver. The header is the
# same for every host.
find_path(FLCE_CUDA_INCLUDE_DIR cuda.h NO_CMAKE_FIND_ROOT_PATH
  HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda ${CMAKE_SOURCE_DIR}/.tools/nvidia PATH_SUFFIXES include
  DOC "Folder that holds cuda.h" REQUIRED)
