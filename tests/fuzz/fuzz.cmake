# libFuzzer targets fuzz_<reader> of tests/fuzz/readers.cpp, with AddressSanitizer and UndefinedBehaviorSanitizer: FLCE_FUZZ=ON with clang++
# as the compiler. They hold the readers alone, instrumented, and not libflce.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "FLCE_FUZZ needs clang++ (libFuzzer): -DCMAKE_CXX_COMPILER=clang++-19")
endif()
set(sources records/record.cpp records/record_json.cpp cache/artifact_format.cpp cache/artifact_key.cpp cache/pack_format.cpp
  cache/signature.cpp cli/safetensors.cpp tests/fuzz/readers.cpp)
file(GLOB generator_sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/generator/*.cpp)
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/generator/cuda/*.cpp)
list(APPEND sources ${generator_sources} ${cuda_sources} generator/cpu/blocks.cpp generator/cpu/code.cpp generator/cpu/cost.cpp
  generator/cpu/layout.cpp generator/cpu/rules.cpp)
list(TRANSFORM sources PREPEND ${CMAKE_SOURCE_DIR}/)
set(fuzz_flags -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1 -g1)

add_library(flce_fuzz_code STATIC EXCLUDE_FROM_ALL ${sources} ${CMAKE_BINARY_DIR}/records/kernel_version.cpp)
add_dependencies(flce_fuzz_code flce_record_sources)
set_source_files_properties(${CMAKE_BINARY_DIR}/records/kernel_version.cpp PROPERTIES GENERATED ON)
target_include_directories(flce_fuzz_code PUBLIC
  ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/generator/include ${CMAKE_SOURCE_DIR}/runtime/include)
target_include_directories(flce_fuzz_code SYSTEM PUBLIC ${LLVM_INCLUDE_DIRS})
target_compile_features(flce_fuzz_code PUBLIC cxx_std_20)
target_compile_definitions(flce_fuzz_code PUBLIC FLCE_VERSION="${PROJECT_VERSION}")
target_compile_options(flce_fuzz_code PUBLIC ${fuzz_flags} -ffunction-sections PRIVATE -fsanitize=fuzzer-no-link)
target_link_libraries(flce_fuzz_code PUBLIC flce_third_party)

add_custom_target(fuzzers)
foreach(reader entry pack record spec hf_config plan safetensors)
  add_executable(fuzz_${reader} EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/tests/fuzz/libfuzzer.cc)
  target_compile_definitions(fuzz_${reader} PRIVATE FLCE_FUZZ_READER="${reader}")
  target_link_libraries(fuzz_${reader} PRIVATE flce_fuzz_code)
  target_link_options(fuzz_${reader} PRIVATE ${fuzz_flags} -fsanitize=fuzzer LINKER:--gc-sections)
  add_dependencies(fuzzers fuzz_${reader})
endforeach()
