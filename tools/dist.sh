#!/usr/bin/env bash
# A release tree that runs on other distributions, from glibc 2.28 on: dist/flce, and dist/flce-<version>-<machine>.tar.gz of it. With
# --tests the test binaries are in it too, so that the same tests run on a machine without compilers (a GPU machine, say).
# Made on Debian 12, whose archives of LLVM, OpenSSL, zstd, hiredis and zlib go into libflce; tools/portable_inputs.sh has the rest of what
# it is linked with. tools/test_release.sh tries the tree before it is packed.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=OFF targets=(--target flce flce_cli)
[[ ${1:-} == --tests ]] && tests=ON targets=()
max_bytes=$((64 << 20))

tools/configure.sh dist -DFLCE_INSTALL_TESTS=$tests -DFLCE_BUILD_TESTS=$tests
cmake --build --preset dist "${targets[@]}"
tree=dist/flce
rm -rf "$tree"
cmake --install build-dist --prefix "$PWD/$tree" --strip >/dev/null
chmod -R u+w,a+rX "$tree"
tools/test_release.sh "$tree"

version=$(sed -nE 's/^project\(flce VERSION ([0-9.]+).*/\1/p' CMakeLists.txt)
archive=dist/flce-$version-$(uname -m)
[[ $tests == ON ]] && archive+=-tests
archive+=.tar.gz
tar -C dist --owner=0 --group=0 -cf - flce | gzip -9 >"$archive"
bytes=$(stat -c %s "$archive")
((bytes < max_bytes)) || { echo "$archive has $bytes bytes, more than $max_bytes" >&2 && exit 1; }
echo "$archive: $((bytes >> 20)) MiB, $(du -sm "$tree" | cut -f1) MiB unpacked"
