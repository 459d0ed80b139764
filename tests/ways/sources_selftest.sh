#!/usr/bin/env bash
# syntax_only.sh refuses a source that names what it does not include, and takes one that does not: sources_selftest.sh WORK_DIR CXX
set -euo pipefail
launcher=$(cd "$(dirname "$0")" && pwd)/syntax_only.sh
mkdir -p "$1" && cd "$1" && rm -f ./*.o
echo 'int f() { return retained_at(0); }' >lacks.cpp
echo 'int retained_at(int); int f() { return retained_at(0); }' >has.cpp
if "$launcher" "$2" -o lacks.o -c lacks.cpp 2>lacks.log; then echo "a source that lacks a header passes" >&2 && exit 1; fi
grep -q retained_at lacks.log
[[ ! -e lacks.o ]]
"$launcher" "$2" -o has.o -c has.cpp
[[ -e has.o ]]
