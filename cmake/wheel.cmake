# What differs when pip builds the Python package (scikit-build-core sets SKBUILD).
set(FLCE_WHEEL_LIBRARIES "" CACHE PATH "Folder with a built libflce.so, and what it needs, to put in the wheel instead of building one")

# The libraries as flce/lib in the wheel, without links. The C++ runtime stays out: torch needs the system's already.
function(install_wheel_libraries)
  add_custom_target(flce)  # what pyproject.toml has built
  file(GLOB candidates ${FLCE_WHEEL_LIBRARIES}/*.so ${FLCE_WHEEL_LIBRARIES}/*.so.*)
  set(seen "")
  foreach(candidate IN LISTS candidates)
    file(REAL_PATH ${candidate} library)
    get_filename_component(name ${candidate} NAME)
    if(name MATCHES "^(libstdc\\+\\+|libgcc_s)" OR library IN_LIST seen)
      continue()
    endif()
    # Of a library's names its users ask for the SONAME; for libflce.so that is whatever Python opens.
    if(name MATCHES "^libflce\\.so")
      set(name libflce.so)
    endif()
    list(APPEND seen ${library})
    install(PROGRAMS ${library} DESTINATION flce/lib RENAME ${name} COMPONENT wheel)
  endforeach()
  if(NOT EXISTS ${FLCE_WHEEL_LIBRARIES}/libflce.so)
    message(FATAL_ERROR "FLCE_WHEEL_LIBRARIES is ${FLCE_WHEEL_LIBRARIES}, which has no libflce.so")
  endif()
endfunction()

# Distribution packages that the build needs, as make installs them; fails with the list where it may not.
function(prepare_machine)
  execute_process(COMMAND ${CMAKE_SOURCE_DIR}/tools/setup.sh WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "tools/setup.sh could not install what the build of libflce needs (see above)")
  endif()
endfunction()
