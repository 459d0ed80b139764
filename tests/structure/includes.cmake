# Fails on an include that points against templates <- generator <- cache <- records <- runtime <- autotune, prewarm <- cli (jax has flce.h
# alone), on one that reaches a layer's libraries from a layer that must not know them, on one of a GPU path's file from common code or from
# another path, on one of a header of cli/ from outside of it, and on a source file of more than 500 lines.
#   cmake -DSOURCE_DIR=… -P includes.cmake
cmake_minimum_required(VERSION 3.25)

set(layers templates generator cache records runtime autotune prewarm jax demo cli)
set(siblings autotune prewarm)  # layers of which none includes another
set(outermost tests benchmarks examples python)
set(max_lines 500)
# The command stands on the public headers and on these: things that people look at (entries, packs, records, settings, plans) and parts
# that the library shares with it. An internal header that is not here stays the library's.
set(command_layers demo cli)
set(internals_of_the_command
  generator/nearest_name.hpp
  cache/byte_io.hpp cache/cleanup.hpp cache/disk_store.hpp cache/pack_store.hpp cache/private_folder.hpp cache/signature.hpp
  cache/statistics_file.hpp
  records/kernel_version.hpp records/named_records.hpp records/record_store.hpp
  runtime/cuda/nvrtc.hpp runtime/environment.hpp runtime/explained_call.hpp runtime/first_use.hpp runtime/hf_config.hpp
  runtime/host/host_code.hpp runtime/json.hpp runtime/kernel_factory.hpp runtime/layer/layer.hpp runtime/layer/number_formats.hpp
  runtime/layer/parallel_blocks.hpp runtime/payload_check.hpp runtime/scratch_steps.hpp runtime/setup_report.hpp runtime/text.hpp
  runtime/workers/worker_command.hpp runtime/workers/worker_room.hpp
  autotune/buffer_sets.hpp autotune/compile_candidates.hpp autotune/gemm_floor.hpp autotune/judge.hpp autotune/output_check.hpp
  autotune/reference.hpp autotune/tune_json.hpp autotune/tune_worker.hpp autotune/tuner.hpp
  prewarm/requests.hpp prewarm/worker.hpp)
# Headers that a layer may not include at all: the generator is text in, text out; the cache knows neither CUDA nor LLVM.
set(forbidden_templates "^llvm/|^cuda\\.h$|^fstream$|^filesystem$|^chrono$|^thread$")
set(forbidden_generator "^cuda\\.h$|^nvrtc\\.h$|^fstream$|^chrono$|^thread$|^dlfcn\\.h$")
set(forbidden_cache "^llvm/|^cuda\\.h$|^nvrtc\\.h$")
set(forbidden_records "^llvm/|^cuda\\.h$|^nvrtc\\.h$")
set(forbidden_autotune "^llvm/|^cuda\\.h$|^nvrtc\\.h$")
set(forbidden_prewarm "^llvm/|^cuda\\.h$|^nvrtc\\.h$")
set(forbidden_jax "^llvm/|^cuda\\.h$|^nvrtc\\.h$|^(templates|generator|cache|records|runtime|autotune|prewarm)/")  # flce.h alone
set(forbidden_demo "^llvm/|^cuda\\.h$|^nvrtc\\.h$")
set(forbidden_cli "^llvm/|^cuda\\.h$|^nvrtc\\.h$")

set(faults "")
set(files_seen 0)

# The layer in which a public header flce/<name> lies, since its include does not say so.
function(layer_of_public_header name out)
  foreach(layer IN LISTS layers)
    if(EXISTS ${SOURCE_DIR}/${layer}/include/flce/${name})
      set(${out} ${layer} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
endfunction()

list(LENGTH layers count)
math(EXPR last "${count} - 1")
foreach(position RANGE ${last})
  list(GET layers ${position} layer)
  file(GLOB_RECURSE files RELATIVE ${SOURCE_DIR} ${SOURCE_DIR}/${layer}/*.cpp ${SOURCE_DIR}/${layer}/*.hpp ${SOURCE_DIR}/${layer}/*.h
    ${SOURCE_DIR}/${layer}/*.cuh ${SOURCE_DIR}/${layer}/*.c)
  foreach(file IN LISTS files)
    math(EXPR files_seen "${files_seen} + 1")
    file(STRINGS ${SOURCE_DIR}/${file} includes REGEX "^[ \t]*#[ \t]*include[ \t]*[<\"]")
    foreach(line IN LISTS includes)
      string(REGEX REPLACE "^[^<\"]*[<\"]([^>\"]*)[>\"].*$" "\\1" target "${line}")
      set(target_layer "")
      if(target MATCHES "^flce/(.*)$" AND NOT layer STREQUAL "templates")
        layer_of_public_header(${CMAKE_MATCH_1} target_layer)
      elseif(target MATCHES "^([a-z]+)/")
        set(first ${CMAKE_MATCH_1})
        if(first IN_LIST layers OR first IN_LIST outermost)
          set(target_layer ${first})
        endif()
      endif()
      if(target_layer)
        list(FIND layers ${target_layer} target_position)
        set(sibling FALSE)
        if(layer IN_LIST siblings AND target_layer IN_LIST siblings AND NOT layer STREQUAL target_layer)
          set(sibling TRUE)
        endif()
        if(sibling OR target_position EQUAL -1 OR target_position GREATER position)
          list(APPEND faults "${file} includes ${target}: ${layer} may not depend on ${target_layer}")
        endif()
      endif()
      if(layer IN_LIST command_layers AND target_layer AND NOT target_layer IN_LIST command_layers AND NOT target MATCHES "^flce/"
         AND NOT target IN_LIST internals_of_the_command)
        list(APPEND faults "${file} includes ${target}: not one of the internal headers that the command may include")
      endif()
      # A path is a folder of templates/ and one of generator/cuda/: only itself includes it, and the table of paths.
      if(target MATCHES "^(flce|templates|generator/cuda)/([a-z0-9_]+)/[a-z0-9_]+\\.(cuh|hpp)$")
        set(target_path ${CMAKE_MATCH_2})
        set(own_path "no path")
        if(file MATCHES "^(templates|generator/cuda)/([a-z0-9_]+)/")
          set(own_path ${CMAKE_MATCH_2})
        endif()
        # The main loop, and what stores its results, is of sm_90a's paths, not of one.
        if(own_path STREQUAL "fp8" AND target MATCHES "^flce/sm90/(mainloop|store)\\.cuh$")
          continue()
        endif()
        if(NOT target_path STREQUAL "common" AND NOT target_path STREQUAL own_path AND NOT file STREQUAL "generator/cuda/paths.cpp")
          list(APPEND faults "${file} includes ${target}: ${own_path} may not include a file of path ${target_path}")
        endif()
      endif()
      if(file STREQUAL "generator/spec_file.cpp" AND target STREQUAL "fstream")
        continue()  # parse_spec("@file.json"): the one file that the generator reads
      endif()
      if(forbidden_${layer} AND target MATCHES "${forbidden_${layer}}")
        list(APPEND faults "${file} includes ${target}: not in ${layer}")
      endif()
    endforeach()
  endforeach()
endforeach()

# Headers of the command are for the command and its tests alone.
foreach(folder IN LISTS outermost)
  file(GLOB_RECURSE files RELATIVE ${SOURCE_DIR} ${SOURCE_DIR}/${folder}/*.cpp ${SOURCE_DIR}/${folder}/*.hpp ${SOURCE_DIR}/${folder}/*.cc)
  foreach(file IN LISTS files)
    if(file MATCHES "^tests/(cli|fuzz)/")
      continue()
    endif()
    file(STRINGS ${SOURCE_DIR}/${file} includes REGEX "^[ \t]*#[ \t]*include[ \t]*[<\"]cli/")
    foreach(line IN LISTS includes)
      list(APPEND faults "${file} includes a header of cli/: it belongs to the command alone")
    endforeach()
  endforeach()
endforeach()

foreach(folder IN LISTS layers outermost)
  file(GLOB_RECURSE files RELATIVE ${SOURCE_DIR} ${SOURCE_DIR}/${folder}/*.cpp ${SOURCE_DIR}/${folder}/*.hpp ${SOURCE_DIR}/${folder}/*.h
    ${SOURCE_DIR}/${folder}/*.cuh ${SOURCE_DIR}/${folder}/*.c)
  foreach(file IN LISTS files)
    file(READ ${SOURCE_DIR}/${file} text)
    string(REGEX REPLACE "[^\n]" "" newlines "${text}")
    string(LENGTH "${newlines}" lines)
    if(lines GREATER max_lines)
      list(APPEND faults "${file} has ${lines} lines: at most ${max_lines}")
    endif()
  endforeach()
endforeach()

if(files_seen EQUAL 0)
  list(APPEND faults "no source file found under ${SOURCE_DIR}")
endif()
if(faults)
  list(JOIN faults "\n  " text)
  message(FATAL_ERROR "\n  ${text}")
endif()
message(STATUS "${files_seen} files, every include points inwards")
