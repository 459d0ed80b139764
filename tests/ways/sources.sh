#!/usr/bin/env bash
# Every source compiles by itself, without precompiled headers, as in a build that unites none: sources.sh WORK_DIR CXX CC
# So does every public header, in C++20, and those of C in C99.
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
work=${1:?usage: sources.sh WORK_DIR CXX CC} CXX=$2 CC=$3
tree=$work/by-themselves
mkdir -p "$work"
configure() { # tree, settings
    cmake -G Ninja -S "$source" -B "$1" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$CXX" -DCMAKE_C_COMPILER="$CC" "${@:2}" \
        >"$1.log" 2>&1 || { cat "$1.log" >&2 && return 1; }
}

configure "$tree" -DFLCE_PRECOMPILE_HEADERS=OFF -DFLCE_UNITY_BUILD=OFF
ninja -C "$tree" flce_templates flce_record_sources >"$work/generated.log" || { cat "$work/generated.log" >&2 && exit 1; }
# Two hundred sources take ten minutes: all of them in nightly, before it those that may have been broken of late.
of_late=()
if [[ ${FLCE_TEST_LEVEL:-} == full ]] && git -C "$source" rev-parse -q --verify HEAD >/dev/null 2>&1; then of_late=("$source"); fi
python3 "$source/tests/ways/syntax.py" "$tree" "${of_late[@]}"

# Checks that no source is missing. Examples are projects of their own, documented_idioms.cc has its own test, and sources of a portable
# build or a fuzzer alone come below.
(cd "$source" && find . -path './build*' -prune -o -path './.*/*' -prune -o -path ./dist -prune -o \
    \( -name '*.cpp' -o -name '*.cc' -o -name '*.c' \) -print | sed 's|^\./||' |
    grep -vE '^examples/|documented_idioms\.cc$|^cmake/portable_runtime\.c$|^tests/fuzz/libfuzzer\.cc$') | sort >"$work/all.txt"
sed -nE "s|^ *\"file\": \"$source/(.*)\",?$|\1|p" "$tree/compile_commands.json" | sort -u >"$work/compiled.txt"
if ! missing=$(comm -23 "$work/all.txt" "$work/compiled.txt") || [[ $missing ]]; then
    printf 'no target compiles %s\n' $missing >&2 && exit 1
fi
"$CC" -std=gnu11 -fsyntax-only "$source/cmake/portable_runtime.c"
"$CXX" -std=c++20 -DFLCE_FUZZ_READER='"pack"' -I "$source" -fsyntax-only "$source/tests/fuzz/libfuzzer.cc"

includes=() headers=0
for folder in generator runtime autotune prewarm; do includes+=(-I "$source/$folder/include"); done
for header in "$source"/{generator,runtime,autotune,prewarm}/include/flce/*; do
    printf '#include <flce/%s>\n' "$(basename "$header")" >"$work/header.cpp"
    "$CXX" -std=c++20 -Wall -Wextra -pedantic -Werror -fsyntax-only "${includes[@]}" "$work/header.cpp"
    if [[ $header == *.h ]]; then
        "$CC" -std=c99 -Wall -Wextra -pedantic -Werror -fsyntax-only "${includes[@]}" -x c "$work/header.cpp"
    fi
    headers=$((headers + 1))
done

# CMake's own switch for united sources stands for the project's: the two trees compile the same.
for setting in CMAKE_UNITY_BUILD FLCE_UNITY_BUILD; do
    configure "$work/$setting" -D$setting=ON
    sed "s|$work/$setting|TREE|g" "$work/$setting/compile_commands.json" >"$work/$setting.json"
done
cmp "$work/CMAKE_UNITY_BUILD.json" "$work/FLCE_UNITY_BUILD.json"
echo "$headers headers"
