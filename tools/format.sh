#!/usr/bin/env bash
# Formats our C++ in place; `--check` only says what is not formatted, and fails.
set -euo pipefail
cd "$(dirname "$0")/.."
for name in clang-format-19 clang-format-20 clang-format-18 clang-format; do
    if command -v "$name" >/dev/null; then tool=$name && break; fi
done
[[ ${tool:-} ]] || { echo "clang-format is missing: install clang-format-19 (18 or newer will do)" >&2 && exit 3; }
mapfile -t files < <(git ls-files --cached --others --exclude-standard '*.cpp' '*.hpp' '*.h' '*.c' '*.cuh')
if [[ ${1:-} == --check ]]; then
    "$tool" --dry-run -Werror "${files[@]}"
else
    "$tool" -i "${files[@]}"
fi
