# Kernels as a part of a build.
#
#     flce_prewarm(<target>
#                  SPECS <spec>... | MANIFEST <file>
#                  [DEVICES <name>...]
#                  [NUM_TOKENS <n>...]
#                  [WORKSPACE_LIMITS <bytes>...]
#                  [OUTPUT <file>])
#
# Adds <target>, part of `all`, which compiles the kernels of SPECS for DEVICES into the pack OUTPUT (default: <target>.flcepack in the
# current binary folder), with `flce prewarm`; see `flce prewarm --help` for what specs and devices may be called.
#
#     SPECS       specs ("D=2048,V=151936,dtype=bf16,tied", "@layer.json") and Hugging Face configs (anything that ends in .json without an
# @)
#     MANIFEST    a manifest in place of SPECS, or beside them
#     DEVICES     what sessions will run on: sm_90a, "NVIDIA H200", x86-64-v3, ...; needed unless the manifest names some
#     NUM_TOKENS  tokens of the calls
#     WORKSPACE_LIMITS  limits that calls have (workspace_limit_bytes), like 2G; 0 is none
#
# No GPU is needed; GPUs' kernels need NVRTC. The pack is made again when a file that it is made from (those that a
# manifest names too), or flce itself, changes; tuning records are not watched. Its path is the
# target's property FLCE_PACK. Compiled kernels are kept in flce's cache too, so that another build tree finds them there.
#
# At run time a session has to be told where the pack lies: SessionOptions::cache_packs or FLCE_CACHE_PACKS.
function(flce_prewarm target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "MANIFEST;OUTPUT" "SPECS;DEVICES;NUM_TOKENS;WORKSPACE_LIMITS;BUDGETS")
  if(DEFINED arg_BUDGETS)
    message(FATAL_ERROR "flce_prewarm(${target}): BUDGETS is now called WORKSPACE_LIMITS")
  endif()
  if(arg_UNPARSED_ARGUMENTS OR arg_KEYWORDS_MISSING_VALUES)
    message(FATAL_ERROR "flce_prewarm(${target}): not understood: ${arg_UNPARSED_ARGUMENTS} ${arg_KEYWORDS_MISSING_VALUES}")
  endif()
  if(NOT arg_SPECS AND NOT arg_MANIFEST)
    message(FATAL_ERROR "flce_prewarm(${target}): SPECS or MANIFEST is needed")
  endif()
  if(NOT arg_DEVICES AND NOT arg_MANIFEST)
    message(FATAL_ERROR "flce_prewarm(${target}): DEVICES is needed")
  endif()
  if(NOT arg_OUTPUT)
    set(arg_OUTPUT ${target}.flcepack)
  endif()
  cmake_path(ABSOLUTE_PATH arg_OUTPUT BASE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR} NORMALIZE)

  set(arguments "")
  set(files "")
  foreach(spec IN LISTS arg_SPECS)
    if(spec MATCHES "^@(.*)$")
      set(file ${CMAKE_MATCH_1})
      cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
      list(APPEND arguments --spec @${file})
      list(APPEND files ${file})
    elseif(spec MATCHES "\\.json$")
      cmake_path(ABSOLUTE_PATH spec BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
      list(APPEND arguments --hf-config ${spec})
      list(APPEND files ${spec})
    else()
      list(APPEND arguments --spec ${spec})
    endif()
  endforeach()
  if(arg_MANIFEST)
    cmake_path(ABSOLUTE_PATH arg_MANIFEST BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    list(APPEND arguments --manifest ${arg_MANIFEST})
    list(APPEND files ${arg_MANIFEST})
  endif()
  foreach(device IN LISTS arg_DEVICES)
    list(APPEND arguments --device ${device})
  endforeach()
  foreach(tokens IN LISTS arg_NUM_TOKENS)
    list(APPEND arguments --num-tokens ${tokens})
  endforeach()
  foreach(limit IN LISTS arg_WORKSPACE_LIMITS)
    list(APPEND arguments --workspace-limit ${limit})
  endforeach()

  add_custom_command(OUTPUT ${arg_OUTPUT}
    COMMAND flce::cli prewarm ${arguments} --out ${arg_OUTPUT} --depfile ${arg_OUTPUT}.d
    DEPENDS ${files} flce::cli $<TARGET_FILE:flce::flce>
    DEPFILE ${arg_OUTPUT}.d
    COMMENT "Compiling kernels into ${arg_OUTPUT}"
    VERBATIM)
  add_custom_target(${target} ALL DEPENDS ${arg_OUTPUT})
  set_target_properties(${target} PROPERTIES FLCE_PACK ${arg_OUTPUT})
endfunction()
