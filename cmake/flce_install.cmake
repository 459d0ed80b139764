# Install rules: lib, the public headers, bin/flce and a CMake package, so that find_package(flce) gives flce::flce.
include(CMakePackageConfigHelpers)

install(TARGETS flce EXPORT flce_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET flce_cli)
  install(TARGETS flce_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY generator/include/ runtime/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT flce_targets NAMESPACE flce:: FILE flce-targets.cmake DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flce)
configure_package_config_file(cmake/flce-config.cmake.in ${CMAKE_BINARY_DIR}/flce-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flce)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/flce-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/flce-config.cmake ${CMAKE_BINARY_DIR}/flce-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flce)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(FLCE_PORTABLE)
  # oneTBB exists only as a shared library, which brings the C++ runtime with it; one copy of each, found through libflce's own folder.
  # A static C++ runtime in libflce beside TBB's shared one would leave two in the process, and exceptions cross between them.
  foreach(library libtbb.so.12 libstdc++.so.6 libgcc_s.so.1)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${library} OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT IS_ABSOLUTE "${path}")
      message(FATAL_ERROR "a portable tree bundles ${library}, which the compiler does not find")
    endif()
    get_filename_component(path ${path} REALPATH)
    install(FILES ${path} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME ${library})
  endforeach()
endif()
