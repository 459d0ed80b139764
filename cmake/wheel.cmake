# Differences of a build by pip for the Python package (scikit-build-core sets SKBUILD).
set(FLCE_WHEEL_LIBRARIES "" CACHE PATH "Folder with a built libflce.so, bin/flce beside it, to put in the wheel instead of building them")

# libflce as flce/lib/<soname> in the wheel, without links, and the command, which asks for it by that name, as flce/bin/flce. The C++
# runtime of a release tree's command comes with it; libflce itself takes the process's, since torch needs one already.
function(install_wheel_libraries)
  foreach(target IN ITEMS flce flce_cli flce_jax)  # targets that pyproject.toml has built
    add_custom_target(${target})
  endforeach()
  if(NOT EXISTS ${FLCE_WHEEL_LIBRARIES}/libflce.so)
    message(FATAL_ERROR "FLCE_WHEEL_LIBRARIES is ${FLCE_WHEEL_LIBRARIES}, which has no libflce.so")
  endif()
  file(REAL_PATH ${FLCE_WHEEL_LIBRARIES}/libflce.so library)
  string(REGEX REPLACE "^.*/(libflce\\.so(\\.[0-9]+)?)[.0-9]*$" "\\1" soname ${library})
  install(PROGRAMS ${library} DESTINATION flce/lib RENAME ${soname} COMPONENT wheel)
  if(EXISTS ${FLCE_WHEEL_LIBRARIES}/libflce_jax.so)
    install(PROGRAMS ${FLCE_WHEEL_LIBRARIES}/libflce_jax.so DESTINATION flce/lib COMPONENT wheel)
  endif()
  cmake_path(GET library PARENT_PATH folder)
  file(REAL_PATH ${folder}/../bin/flce command)
  if(NOT EXISTS ${command})
    message(FATAL_ERROR "there is no flce command beside ${folder}: ${command}")
  endif()
  install(PROGRAMS ${command} DESTINATION flce/bin COMPONENT wheel)
  if(IS_DIRECTORY ${folder}/flce/runtime)
    install(DIRECTORY ${folder}/flce/runtime DESTINATION flce/lib/flce USE_SOURCE_PERMISSIONS COMPONENT wheel)
  endif()
endfunction()

# Distribution packages that the build needs, as make installs them; fails with the list where it may not.
function(prepare_machine)
  execute_process(COMMAND ${CMAKE_SOURCE_DIR}/tools/setup.sh WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "tools/setup.sh could not install what the build of libflce needs (see above)")
  endif()
endfunction()
