# Links of a portable build (FLCE_PORTABLE, tools/dist.sh): the result runs on systems older than the one that makes it, and leaves a
# program's own libraries alone. tools/portable_inputs.sh makes FLCE_PORTABLE_INPUTS.
set(FLCE_PORTABLE_INPUTS ${CMAKE_SOURCE_DIR}/.tools/portable-${CMAKE_SYSTEM_PROCESSOR}
  CACHE PATH "Folder that tools/portable_inputs.sh made")
if(NOT EXISTS ${FLCE_PORTABLE_INPUTS}/link/libc.so)
  message(FATAL_ERROR "FLCE_PORTABLE needs ${FLCE_PORTABLE_INPUTS}, which tools/setup.sh --dist makes")
endif()
if(NOT FLCE_LLD_WORKS)
  # It takes a symbol from the first library that has it, shared or not.
  message(FATAL_ERROR "FLCE_PORTABLE needs the linker lld (Debian: lld-19)")
endif()

# Start files, glibc and libstdc++ of the link folder come before the compiler's own: with -B and -L they are looked for there first.
target_link_options(flce_build_flags INTERFACE -B${FLCE_PORTABLE_INPUTS}/link/ -L${FLCE_PORTABLE_INPUTS}/link)
set_property(TARGET flce_build_flags PROPERTY INTERFACE_LINK_DEPENDS ${FLCE_PORTABLE_INPUTS}/stamp)
# Before glibc 2.34 threads and dlopen were libraries of their own, and the compiler of a newer system does not name them.
add_library(flce_old_runtime STATIC ${CMAKE_SOURCE_DIR}/cmake/portable_runtime.c)
set_target_properties(flce_old_runtime PROPERTIES C_STANDARD 11 C_EXTENSIONS ON)
target_link_libraries(flce_build_flags INTERFACE $<LINK_ONLY:flce_old_runtime> -lpthread -ldl -lrt)

# oneTBB, compiled as its own CMakeLists.txt does: distributions have it as a shared library only, and a process cannot have it twice.
file(GLOB FLCE_TBB_SOURCES ${FLCE_PORTABLE_INPUTS}/onetbb/src/tbb/*.cpp)
add_library(flce_static_tbb STATIC ${FLCE_TBB_SOURCES})
target_include_directories(flce_static_tbb SYSTEM PUBLIC ${FLCE_PORTABLE_INPUTS}/onetbb/include)
target_compile_definitions(flce_static_tbb PRIVATE __TBB_BUILD __TBB_DYNAMIC_LOAD_ENABLED=0 __TBB_SOURCE_DIRECTLY_INCLUDED=1)
target_compile_options(flce_static_tbb PRIVATE -flifetime-dse=1 -w)
if(CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  target_compile_options(flce_static_tbb PRIVATE -mrtm -mwaitpkg)
endif()
target_link_libraries(flce_static_tbb PUBLIC Threads::Threads)

# The command takes the C++ runtime of this folder, which runs on every glibc from 2.28 on, so that the command needs nothing but glibc.
# libflce does not look there: a program brings the runtime that it was built for, and a newer one serves libflce as well.
list(APPEND CMAKE_INSTALL_RPATH "$ORIGIN/${flce_bin_to_lib}/flce/runtime")
install(DIRECTORY ${FLCE_PORTABLE_INPUTS}/runtime/ DESTINATION ${CMAKE_INSTALL_LIBDIR}/flce/runtime USE_SOURCE_PERMISSIONS)
