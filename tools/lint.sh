#!/usr/bin/env bash
# Style and suspicious code: clang-format as a check, then clang-tidy (.clang-tidy) over our sources. LINT_FILES narrows clang-tidy to some
# files.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/format.sh --check
for name in clang-tidy-19 clang-tidy-20 clang-tidy-18 clang-tidy; do
    if command -v "$name" >/dev/null; then tool=$name && break; fi
done
[[ ${tool:-} ]] || { echo "clang-tidy is missing: install clang-tidy-19 (18 or newer will do)" >&2 && exit 3; }
tools/configure.sh dev
cmake --build --preset dev --target flce_templates >/dev/null
if [[ ${LINT_FILES:-} ]]; then
    read -ra files <<<"$LINT_FILES"
else
    mapfile -t files < <(git ls-files 'generator/*.cpp' 'cache/*.cpp' 'records/*.cpp' 'runtime/*.cpp' 'autotune/*.cpp' 'prewarm/*.cpp' \
        'demo/*.cpp' 'cli/*.cpp')
fi
# -Wno-unknown-warning-option: the compile commands are GCC's.
printf '%s\0' "${files[@]}" | xargs -0 -n1 -P"$(nproc)" "$tool" -p build-dev --quiet --extra-arg=-Wno-unknown-warning-option
cmake -DSOURCE_DIR="$PWD" -P tests/structure/includes.cmake
cmake -DSOURCE_DIR="$PWD" -P tests/structure/pages.cmake
cmake -DSOURCE_DIR="$PWD" -P tests/structure/code_lines.cmake
python3 tests/structure/comments.py
# Python: ruff and mypy, with their caches out of the way.
mkdir -p build-dev/lint
tools=$PWD/tools
(cd build-dev/lint && "$tools/test_python.sh" typing .)
