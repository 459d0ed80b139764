# The C++ of README.md and docs/, of the examples and of documented_idioms.cc compiles without a warning of -Wall -Wextra.
#   cmake -DSOURCE_DIR=… -DWORK_DIR=… -DCXX=… -P documented_idioms.cmake
cmake_minimum_required(VERSION 3.25)
file(MAKE_DIRECTORY ${WORK_DIR})

function(compile name file)
  execute_process(
    COMMAND ${CXX} -std=c++20 -Wall -Wextra -Werror -fsyntax-only -I${SOURCE_DIR}/generator/include -I${SOURCE_DIR}/runtime/include
            -I${SOURCE_DIR}/autotune/include -I${SOURCE_DIR}/prewarm/include
            -DKERNEL_PACK="kernels.flcepack" ${file}
    RESULT_VARIABLE result ERROR_VARIABLE error)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${name} does not compile without warnings:\n${error}")
  endif()
endfunction()

# Names that the documentation's pieces take for granted.
set(names "[[maybe_unused]] const flce::TensorView hidden, weight, target, loss, lse, grad_hidden, grad_weight, grad_embedding;\n\
[[maybe_unused]] void* const workspace = nullptr;\n[[maybe_unused]] void* const stream = nullptr;\n
[[maybe_unused]] const std::int64_t num_tokens = 4;\n")

file(GLOB pages ${SOURCE_DIR}/README.md ${SOURCE_DIR}/docs/*.md)
set(pieces 0)
foreach(page IN LISTS pages)
  file(READ ${page} text)
  # Lists end at semicolons, which code is full of.
  string(REPLACE ";" "<semicolon>" text "${text}")
  string(REPLACE "[" "<open>" text "${text}")
  string(REPLACE "]" "<close>" text "${text}")
  set(includes "#include <cstdio>\n#include <flce/flce.hpp>\n#include <flce/prewarm.hpp>\n#include <flce/tune.hpp>\n")
  string(REGEX MATCHALL "```cpp\n[^`]*```" found "${text}")
  foreach(piece IN LISTS found)
    string(REGEX REPLACE "```(cpp\n)?" "" piece "${piece}")
    string(REGEX REPLACE "#include <flce/[a-z]*\\.hpp>\n" "" piece "${piece}")
    string(REPLACE "<semicolon>" ";" piece "${piece}")
    string(REPLACE "<open>" "[" piece "${piece}")
    string(REPLACE "<close>" "]" piece "${piece}")
    file(WRITE ${WORK_DIR}/piece${pieces}.cpp "${includes}int main() {\n${names}${piece}}\n")
    compile("a piece of ${page}" ${WORK_DIR}/piece${pieces}.cpp)
    math(EXPR pieces "${pieces} + 1")
  endforeach()
endforeach()
if(pieces EQUAL 0)
  message(FATAL_ERROR "no C++ was found in README.md and docs/")
endif()
file(GLOB examples ${SOURCE_DIR}/examples/*/*.cpp)
foreach(file IN LISTS examples ITEMS ${SOURCE_DIR}/tests/structure/documented_idioms.cc)
  compile(${file} ${file})
endforeach()
