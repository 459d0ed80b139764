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
# A source that is left out is not compiled.
echo lacks.cpp >left_out.txt
sed 's/has.cpp/lacks.cpp/g' compile_commands.json >other.json && mv other.json compile_commands.json
python3 "$script" . left_out.txt
