#!/usr/bin/env bash
# syntax.py refuses a source that names what it does not include, and takes one that does not: sources_selftest.sh WORK_DIR CXX
set -euo pipefail
script=$(cd "$(dirname "$0")" && pwd)/syntax.py
mkdir -p "$1" && cd "$1"
echo 'int f() { return retained_at(0); }' >lacks.cpp
echo 'int retained_at(int); int f() { return retained_at(0); }' >has.cpp
for name in lacks has; do
    printf '[{"directory": "%s", "file": "%s.cpp", "command": "%s -O3 -o %s.o -c %s.cpp"}]' "$PWD" $name "$2" $name $name \
        >compile_commands.json
    if python3 "$script" . 2>$name.log; then echo takes; else echo refuses; fi >$name.said
done
grep -q 'lacks.cpp does not compile by itself' lacks.log
[[ $(tail -n 1 lacks.said) == refuses && $(tail -n 1 has.said) == takes ]]
# In a checkout a source is compiled where it changed within eight hours, or includes a header that lost an include.
git() { command git -c user.name=flce -c user.email=flce@localhost -c commit.gpgsign=false "$@"; }
git init -q checkout
cd checkout
echo '#include "declares.h"' >names.h
echo 'int retained_at(int);' >declares.h
printf '#include "names.h"\nint f() { return retained_at(0); }\n' >old.cpp
printf '[{"directory": "%s", "file": "%s/old.cpp", "command": "%s -O3 -o old.o -c old.cpp"}]' "$PWD" "$PWD" "$2" >compile_commands.json
git add -- *.h *.cpp
GIT_COMMITTER_DATE=$(($(date +%s) - 3 * 86400)) git commit -q -m 'a header includes what it names'
python3 "$script" . "$PWD" | grep -q '^0 of 1 sources'
: >names.h
if python3 "$script" . "$PWD" 2>../old.log; then exit 1; fi
git commit -q -a -m 'a header includes nothing'
if python3 "$script" . "$PWD" 2>>../old.log; then exit 1; fi
[[ $(grep -c 'old.cpp does not compile by itself' ../old.log) == 2 ]]
GIT_COMMITTER_DATE=$(($(date +%s) - 2 * 86400)) git commit -q --amend -m 'two days ago'
python3 "$script" . "$PWD" | grep -q '^0 of 1 sources'
echo >>old.cpp
if python3 "$script" . "$PWD" >/dev/null 2>&1; then exit 1; fi
