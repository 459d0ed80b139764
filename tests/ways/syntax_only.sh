#!/usr/bin/env bash
# A compiler launcher that looks whether a source compiles and leaves an empty object: syntax_only.sh COMPILER ARGUMENT… -o OBJECT …
set -euo pipefail
object=
for ((i = 1; i <= $#; i++)); do
    if [[ ${!i} == -o ]]; then next=$((i + 1)) && object=${!next}; fi
done
"$@" -O0 -w -fsyntax-only
: >"$object"
