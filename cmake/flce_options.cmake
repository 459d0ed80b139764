# Options of the build and what they mean for the compiler and the linker: the interface target flce_build_flags.
option(FLCE_STATIC_LLVM "Link LLVM statically into libflce" ON)
option(FLCE_PORTABLE "For tools/dist.sh: other people's code inside libflce, and symbols of an old glibc and libstdc++ only" OFF)
option(FLCE_INSTALL_TESTS "Install the test binaries beside flce" OFF)
option(FLCE_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(FLCE_BUILD_BENCHMARKS "Build the benchmarks where Google Benchmark is installed" ${PROJECT_IS_TOP_LEVEL})
option(FLCE_PRECOMPILE_HEADERS "Precompile the headers that most sources include" ${PROJECT_IS_TOP_LEVEL})
option(FLCE_UNITY_BUILD "Compile the sources of a folder as one: a full build is quicker, the next one after a change slower" OFF)
option(FLCE_FUZZ "libFuzzer targets of the readers (needs clang++): tools/fuzz.sh" OFF)
option(FLCE_WERROR "Treat warnings as errors" OFF)
set(FLCE_SANITIZE "" CACHE STRING "Sanitizers, comma separated: address, undefined, thread")

# CMake's own switch unites any eight sources of a target, whose unnamed namespaces may have the same names. It stands for the project's.
if(CMAKE_UNITY_BUILD)
  set(FLCE_UNITY_BUILD ON)
  set(CMAKE_UNITY_BUILD OFF)
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, RelWithDebInfo or Debug" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
# Relative to the binary, in the build tree as in an install: both run in place, wherever they are moved.
file(RELATIVE_PATH flce_bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN/${flce_bin_to_lib}")

add_library(flce_build_flags INTERFACE)
target_compile_options(flce_build_flags INTERFACE -Wall -Wextra -Wno-missing-field-initializers $<$<BOOL:${FLCE_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(flce_build_flags INTERFACE -Wno-restrict)  # GCC 12 reports its own std::string operator+ (GCC bug 105651)
endif()

# The sanitizers' run-time options live in code, so that a binary behaves the same under ctest and by hand.
set(FLCE_EXECUTABLE_SOURCES "")
if(FLCE_SANITIZE)
  set(flce_sanitize_flags -fsanitize=${FLCE_SANITIZE} -fno-omit-frame-pointer -g1)
  if(FLCE_SANITIZE MATCHES "undefined")
    # vptr needs RTTI of every class that is cast, and LLVM may come without.
    list(APPEND flce_sanitize_flags -fno-sanitize=vptr -fno-sanitize-recover=undefined)
  endif()
  target_compile_options(flce_build_flags INTERFACE ${flce_sanitize_flags})
  target_link_options(flce_build_flags INTERFACE ${flce_sanitize_flags})
  set(FLCE_EXECUTABLE_SOURCES ${CMAKE_SOURCE_DIR}/cmake/sanitizer_defaults.cpp)
endif()

if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(FLCE_CCACHE ccache)
  if(FLCE_CCACHE)
    set(CMAKE_C_COMPILER_LAUNCHER ${FLCE_CCACHE})
    set(CMAKE_CXX_COMPILER_LAUNCHER ${FLCE_CCACHE})
  endif()
endif()

# Headers of others that most of a target's sources read: half of a build's time otherwise. Sources still include what they use: the
# dev preset with -DFLCE_PRECOMPILE_HEADERS=OFF shows an include that only this header brought. REUSE_FROM takes the header of a target that
# is compiled with the same options, in place of one more of its own.
function(flce_precompile target)
  if(NOT FLCE_PRECOMPILE_HEADERS)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 precompile "" "REUSE_FROM" "")
  if(precompile_REUSE_FROM)
    target_precompile_headers(${target} REUSE_FROM ${precompile_REUSE_FROM})
  else()
    foreach(header IN ITEMS algorithm filesystem fstream functional map memory optional span string unordered_map vector
                            fmt/format.h spdlog/spdlog.h nlohmann/json.hpp ${precompile_UNPARSED_ARGUMENTS})
      target_precompile_headers(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<${header}$<ANGLE-R>>")
    endforeach()
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)  # lets ccache see what the header holds
    if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      # It forgets that a precompiled header is a system header, and warns of the standard library.
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread>)
    endif()
  endif()
endfunction()

# The sources of a folder become one translation unit where FLCE_UNITY_BUILD is on: their headers and templates are compiled once for all of
# them. So names in the unnamed namespaces of a folder differ, and a source that cannot share says SKIP_UNITY_BUILD_INCLUSION. A source
# whose UNITY_GROUP is set keeps it.
function(flce_unite target)
  if(NOT FLCE_UNITY_BUILD)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    file(RELATIVE_PATH folder ${CMAKE_SOURCE_DIR} ${source})
    get_source_file_property(group ${source} UNITY_GROUP)
    cmake_path(IS_PREFIX CMAKE_BINARY_DIR ${source} generated)  # stays by itself: its folder has another name in each tree
    if(NOT group AND NOT generated AND folder MATCHES "^[a-z].*\\.cpp$")
      get_filename_component(folder ${folder} DIRECTORY)
      string(MAKE_C_IDENTIFIER "${folder}" group)
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # GCC takes a source that is included for a header, whose unnamed namespaces would be others' too.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endfunction()

# lld links static LLVM several times faster than GNU ld. A compiler looks for `ld.lld` beside -B's folder; distributions put it beside
# LLVM.
include(CheckCXXSourceCompiles)
find_program(FLCE_LLD NAMES ld.lld
  HINTS /usr/lib/llvm-19/bin /usr/lib/llvm-20/bin /usr/lib/llvm-21/bin /usr/lib/llvm-18/bin)
if(FLCE_LLD)
  get_filename_component(flce_lld_dir ${FLCE_LLD} DIRECTORY)
  set(CMAKE_REQUIRED_LINK_OPTIONS -fuse-ld=lld -B${flce_lld_dir})
  check_cxx_source_compiles("int main() { return 0; }" FLCE_LLD_WORKS)
  unset(CMAKE_REQUIRED_LINK_OPTIONS)
  if(FLCE_LLD_WORKS)
    target_link_options(flce_build_flags INTERFACE -fuse-ld=lld -B${flce_lld_dir})
  endif()
endif()
