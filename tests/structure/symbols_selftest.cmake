# Shows that symbols.cmake takes libflce's symbols as they are, and refuses them with one too many or one too few, by its name.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND ${NM} -D -C --defined-only ${LIBRARY} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)

function(expect text fault)
  file(WRITE ${SELF_TEST_DIR}/symbols.txt "${text}")
  execute_process(COMMAND ${CMAKE_COMMAND} -DSOURCE_DIR=${SOURCE_DIR} -DNM=${NM} -DLIBRARY=${SELF_TEST_DIR}/symbols.txt
      -DINTERNALS=${INTERNALS} -DCOMMAND=${COMMAND} -P ${SOURCE_DIR}/tests/structure/symbols.cmake
    RESULT_VARIABLE result ERROR_VARIABLE error OUTPUT_QUIET)
  string(FIND "${error}" "${fault}" position)
  if(fault AND (result EQUAL 0 OR position EQUAL -1))
    message(FATAL_ERROR "not refused for '${fault}': ${error}")
  elseif(NOT fault AND NOT result EQUAL 0)
    message(FATAL_ERROR "refused: ${error}")
  endif()
endfunction()

expect("${symbols}" "")
foreach(stray "flce::Tuner::keep(flce::Record const&)" "flce::Session::State::get(int)" "flce::kernel_digest()" "flce_helper"
        "typeinfo for flce::CudaKernel" "std::vector<flce::Spec>::push_back(flce::Spec const&)" "llvm::Module::dump() const")
  expect("${symbols}0000000000001000 T ${stray}\n" "does not need it: ${stray}")
endforeach()
foreach(name "flce::Session::get_kernel(flce::Spec const&, flce::KernelOptions const&)" "flce::Spec::normalized() const"
        "flce::illegal_reason" flce_session_create "flce::SpecHash::operator()")
  string(FIND "${symbols}" " T ${name}" position)
  if(position EQUAL -1)
    message(FATAL_ERROR "libflce does not show ${name}")
  endif()
  string(REPLACE " T ${name}" " T flce::parse_spec" fewer "${symbols}")  # parse_spec is there anyway
  expect("${fewer}" "but not shown: ${name}")
endforeach()
