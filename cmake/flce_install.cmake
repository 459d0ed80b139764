# Install rules: lib, the public headers, bin/flce and a CMake package, so that find_package(flce) gives flce::flce.
include(CMakePackageConfigHelpers)

if(SKBUILD)
  install(TARGETS flce LIBRARY DESTINATION flce/lib COMPONENT wheel)
  if(FLCE_XLA_INCLUDE)
    install(TARGETS flce_jax LIBRARY DESTINATION flce/lib COMPONENT wheel)
  endif()
  set_target_properties(flce_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
  install(TARGETS flce_cli RUNTIME DESTINATION flce/bin COMPONENT wheel)
  return()
endif()
install(TARGETS flce EXPORT flce_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(FLCE_XLA_INCLUDE)
  install(TARGETS flce_jax LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
# flce::cli is the command, for flce_prewarm.
set_target_properties(flce_cli PROPERTIES EXPORT_NAME cli)
install(TARGETS flce_cli EXPORT flce_targets RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY generator/include/ runtime/include/ autotune/include/ prewarm/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT flce_targets NAMESPACE flce:: FILE flce-targets.cmake DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flce)
configure_package_config_file(cmake/flce-config.cmake.in ${CMAKE_BINARY_DIR}/flce-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flce)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/flce-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/flce-config.cmake ${CMAKE_BINARY_DIR}/flce-config-version.cmake cmake/flce_prewarm.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/flce)
# Documentation with its examples, which is also the text that `flce demo` learns from.
install(FILES LICENSE README.md CHANGELOG.md CONTRIBUTING.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs examples DESTINATION ${CMAKE_INSTALL_DOCDIR} PATTERN __pycache__ EXCLUDE)
