# Writes OUTPUT, the version script of libflce: the symbols that it shows. They are
#   - declarations of the installed HEADERS: functions, and classes with the members that are declared there;
#   - internals that the command needs besides: symbols that its parts (the archive COMMAND) leave undefined.
# All else stays inside: internals, LLVM, and other libraries' templates and inline functions (fmt, spdlog, oneTBB, the C++ library), so
# that libflce's versions of them and a program's do not meet. Nothing is listed by hand, so nothing is forgotten.
#   cmake -DOUTPUT=… "-DHEADERS=…" -DCOMMAND=….a -DNM=nm -P exports.cmake
cmake_minimum_required(VERSION 3.25)
set(patterns "")

# A name as the C++ ABI writes it: its length, then itself.
function(mangle name out)
  string(LENGTH ${name} length)
  set(${out} ${length}${name} PARENT_SCOPE)
endfunction()

function(export_from_header header)
  file(READ ${header} text)
  string(REGEX REPLACE "/\\*[^*]*\\*+([^/*][^*]*\\*+)*/" "" text "${text}")
  string(REGEX REPLACE "//[^\n]*" "" text "${text}")
  string(REGEX REPLACE "[][;]" " " text "${text}")  # they mean something in a list of lines
  string(REPLACE "\n" ";" lines "${text}")
  set(class "")
  foreach(line IN LISTS lines)
    if(line MATCHES "^(class|struct) ([A-Za-z0-9]+)[^{}]*{ *$")
      set(class ${CMAKE_MATCH_2})
      mangle(${class} scope)
      list(APPEND patterns _ZT[ISV]N4flce${scope}E)  # names for casts, exceptions and virtual calls
    elseif(line MATCHES "^}")
      set(class "")
      set(scope "")
    endif()
    # Words before a parenthesis, but for names that another scope or object has and for the initialisers of members. A word that is not a
    # function matches no symbol.
    string(REGEX MATCHALL "(^|[^A-Za-z0-9_:.>])~?[A-Za-z][A-Za-z0-9_]*\\(" names "${line}")
    foreach(name IN LISTS names)
      string(REGEX REPLACE "[^~A-Za-z0-9_]" "" name ${name})
      if(name MATCHES "_$")
        continue()
      elseif(name MATCHES "^flce_")
        list(APPEND patterns ${name})
        continue()
      elseif(name STREQUAL "${class}")
        set(name C[0-9])
      elseif(name STREQUAL "~${class}")
        set(name D[0-9])
      else()
        mangle(${name} name)
      endif()
      list(APPEND patterns _ZN4flce${scope}${name}*)
      if(class)
        list(APPEND patterns _ZNK4flce${scope}${name}*)
      endif()
    endforeach()
    if(line MATCHES "operator" AND NOT line MATCHES "= (default|delete)")
      list(APPEND patterns _ZN4flce${scope}[a-z]* _ZNK4flce${scope}[a-z]*)  # letters, where a name begins with its length
    endif()
  endforeach()
  set(patterns ${patterns} PARENT_SCOPE)
endfunction()

# Names in the table of ARCHIVE whose letter is one of `kinds` and that are flce's.
function(symbols_of archive kinds out)
  execute_process(COMMAND ${NM} -P ${archive} OUTPUT_VARIABLE table RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "${NM} cannot read ${archive}")
  endif()
  string(REGEX MATCHALL "_Z[^ \n]*4flce[^ \n]* [${kinds}]" symbols "${table}")
  list(TRANSFORM symbols REPLACE " .$" "")
  list(REMOVE_DUPLICATES symbols)
  set(${out} ${symbols} PARENT_SCOPE)
endfunction()

foreach(header IN LISTS HEADERS)
  export_from_header(${header})
endforeach()
list(REMOVE_DUPLICATES patterns)
list(SORT patterns)
symbols_of(${COMMAND} U taken)
symbols_of(${COMMAND} A-TV-Z own)
list(REMOVE_ITEM taken ${own})
list(SORT taken)
if(NOT patterns OR NOT taken)
  message(FATAL_ERROR "no declaration found in HEADERS, or nothing of flce that ${COMMAND} takes")
endif()

list(JOIN patterns ";\n    " public)
list(JOIN taken ";\n    " private)
# Written where it changes only, so that a change of the command does not link the library again.
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "/* Written by cmake/exports.cmake. */
{
  global:
    /* Installed headers */
    ${public};

    /* The flce command */
    ${private};
  local:
    *;
};
")
