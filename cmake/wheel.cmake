# What differs when pip builds the Python package (scikit-build-core sets SKBUILD).
set(FLCE_WHEEL_LIBRARIES "" CACHE PATH "Folder with a built libflce.so to put in the wheel instead of building one")

# libflce as flce/lib/libflce.so in the wheel, without links. The C++ runtime stays out: torch needs the system's already.
function(install_wheel_libraries)
  add_custom_target(flce)  # what pyproject.toml has built
  if(NOT EXISTS ${FLCE_WHEEL_LIBRARIES}/libflce.so)
    message(FATAL_ERROR "FLCE_WHEEL_LIBRARIES is ${FLCE_WHEEL_LIBRARIES}, which has no libflce.so")
  endif()
  file(REAL_PATH ${FLCE_WHEEL_LIBRARIES}/libflce.so library)
  install(PROGRAMS ${library} DESTINATION flce/lib RENAME libflce.so COMPONENT wheel)
endfunction()

# Distribution packages that the build needs, as make installs them; fails with the list where it may not.
function(prepare_machine)
  execute_process(COMMAND ${CMAKE_SOURCE_DIR}/tools/setup.sh WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "tools/setup.sh could not install what the build of libflce needs (see above)")
  endif()
endfunction()
