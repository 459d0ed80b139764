# code_digest(OUT FILE…): sixteen digits that change with the code of any of the files, in this order. Comments behind // and how much white
# space there is do not count: another word in a comment makes no other kernel.
function(code_digest out)
  set(text "")
  foreach(file IN LISTS ARGN)
    file(READ ${file} code)
    # Behind white space alone: within a string, as in an address, // is no comment.
    string(REGEX REPLACE "(^|[ \t\n])//[^\n]*" "\\1" code "${code}")
    string(REGEX REPLACE "[ \t\r\n]+" " " code "${code}")
    string(STRIP "${code}" code)
    string(SHA256 digest "${code}")
    string(APPEND text "${digest}")
  endforeach()
  string(SHA256 digest "${text}")
  string(SUBSTRING ${digest} 0 16 digest)
  set(${out} ${digest} PARENT_SCOPE)
endfunction()
