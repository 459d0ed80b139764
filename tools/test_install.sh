#!/usr/bin/env bash
# Installs a build tree into <tree>/prefix, then builds and runs the examples that are projects of their own on nothing but that prefix.
set -euo pipefail
cd "$(dirname "$0")/.."
tree=${1:?usage: test_install.sh BUILD_TREE}
prefix=$PWD/$tree/prefix
rm -rf "$prefix"
cmake --install "$tree" --prefix "$prefix" >"$tree/install.log"
for name in minimal prewarm; do
    example=$tree/example-$name
    cmake -G Ninja -S "examples/$name" -B "$example" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix" \
        -DCMAKE_C_FLAGS="-std=c99 -Wall -Wextra -pedantic -Werror" -DCMAKE_CXX_FLAGS="-Wall -Wextra -pedantic -Werror" \
        -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF >"$tree/example.log"
    # Kernels that an example compiles stay in the build tree.
    FLCE_CACHE_DIR=$PWD/$example/cache cmake --build "$example" >>"$tree/example.log" || { cat "$tree/example.log" && exit 1; }
    (cd "$example" && ctest --output-on-failure --no-tests=error --verbose)
done
# The installed command runs in place, from anywhere, and names no folder of this machine.
(cd / && "$prefix/bin/flce" info >/dev/null)
# `flce demo` learns from the documentation that was installed.
(cd / && FLCE_CACHE_DIR=$prefix/cache "$prefix/bin/flce" demo --device cpu --steps 2 --num-tokens 64 --hidden-size 32 --no-architectures \
    2>"$prefix/demo.log" >/dev/null) || { cat "$prefix/demo.log" && exit 1; }
grep -F "text        $prefix/" "$prefix/demo.log" >/dev/null || { echo "flce demo took another text:" && cat "$prefix/demo.log" && exit 1; }
library=$(readlink -f "$(find "$prefix" -name libflce.so -print -quit)")
for binary in "$library" "$prefix/bin/flce"; do
    if readelf -d "$binary" | grep -E 'RPATH|RUNPATH' | grep -F "$PWD"; then
        echo "$binary looks for libraries in the build's own folder" >&2
        exit 1
    fi
done
