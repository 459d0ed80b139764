# Shows that code_lines.cmake takes a line of 140 characters, of whatever bytes, and refuses one of 141 by file and number.
cmake_minimum_required(VERSION 3.25)

function(expect file character count refused)
  file(REMOVE_RECURSE ${SELF_TEST_DIR})
  string(REPEAT "${character}" ${count} line)
  string(REPEAT x 100 continued)  # by the next: two lines all the same
  file(WRITE ${SELF_TEST_DIR}/${file} "first; [line\n${line}\n${continued}\\\n${continued}\n")
  execute_process(COMMAND ${CMAKE_COMMAND} -DSOURCE_DIR=${SELF_TEST_DIR} -P ${SOURCE_DIR}/tests/structure/code_lines.cmake
    RESULT_VARIABLE result ERROR_VARIABLE error OUTPUT_QUIET)
  string(FIND "${error}" "${file}:2: ${count} columns" position)
  if(refused AND (result EQUAL 0 OR position EQUAL -1))
    message(FATAL_ERROR "a line of ${count} '${character}' in ${file} was not refused: ${error}")
  elseif(NOT refused AND NOT result EQUAL 0)
    message(FATAL_ERROR "a line of ${count} '${character}' in ${file} was refused: ${error}")
  endif()
endfunction()

foreach(file templates/sm90/some.cuh python/flce/some.py tools/some.sh tests/CMakeLists.txt)
  foreach(character x [ · ₀ 😀)
    expect(${file} "${character}" 140 FALSE)
    expect(${file} "${character}" 141 TRUE)
  endforeach()
endforeach()
