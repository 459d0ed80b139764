# Fails on a line of a page (README.md, CHANGELOG.md, CONTRIBUTING.md, docs) of more than 300 bytes: nobody reads it in a terminal, and a
# difference in it shows nothing. Text is wrapped; text that is too long for a table's row stands in a sentence below the table.
#   cmake -DSOURCE_DIR=… -P pages.cmake
cmake_minimum_required(VERSION 3.25)

set(max_bytes 300)
math(EXPR too_long "${max_bytes} + 1")
file(GLOB_RECURSE pages RELATIVE ${SOURCE_DIR} ${SOURCE_DIR}/docs/*.md)
file(GLOB root_pages RELATIVE ${SOURCE_DIR} ${SOURCE_DIR}/README.md ${SOURCE_DIR}/CHANGELOG.md
  ${SOURCE_DIR}/CONTRIBUTING.md)
list(APPEND pages ${root_pages})
set(faults "")
foreach(page IN LISTS pages)
  file(STRINGS ${SOURCE_DIR}/${page} lines ENCODING UTF-8 LENGTH_MINIMUM ${too_long})
  if(lines)
    string(SUBSTRING "${lines}" 0 80 start)
    string(APPEND faults "  ${page}: a line of more than ${max_bytes} bytes begins with \"${start}\"\n")
  endif()
endforeach()
list(LENGTH pages count)
if(count EQUAL 0)
  message(FATAL_ERROR "no pages below ${SOURCE_DIR}")
endif()
if(faults)
  message(FATAL_ERROR "lines that are too long:\n${faults}")
endif()
message(STATUS "${count} pages, no line over ${max_bytes} bytes")
