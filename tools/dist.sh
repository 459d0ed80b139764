#!/usr/bin/env bash
# A release tree that runs on other distributions, from glibc 2.28 on: dist/flce, and dist/flce-<version>-<machine>.tar.gz of it. With
# --tests the test binaries are in it too, so that the same tests run on a machine without compilers (a GPU machine, say). With --arm64 the
# tree is dist/aarch64/flce, for 64-bit Arm, and a cross compiler makes it where the machine is another.
# Made on Debian 12, whose archives of LLVM, OpenSSL, zstd, hiredis and zlib go into libflce; tools/portable_inputs.sh has the rest of what
# it is linked with. tools/test_release.sh tries the tree before it is packed.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=OFF targets=(--target flce flce_cli flce_jax)
machine=$(cc -dumpmachine) && machine=${machine%%-*}
preset=dist tree=dist/flce
for argument; do
    case $argument in
        --tests) tests=ON targets=() ;;
        --arm64)
            if [[ $machine != aarch64 ]]; then preset=dist-aarch64; fi
            machine=aarch64 tree=dist/aarch64/flce
            ;;
        *) echo "usage: dist.sh [--tests] [--arm64]" >&2 && exit 2 ;;
    esac
done
max_bytes=$((64 << 20))

tools/configure.sh $preset -DFLCE_INSTALL_TESTS=$tests -DFLCE_BUILD_TESTS=$tests
cmake --build --preset $preset "${targets[@]}"
rm -rf "$tree"
cmake --install build-$preset --prefix "$PWD/$tree" --strip >/dev/null
chmod -R u+w,a+rX "$tree"
tools/test_release.sh "$tree" "$machine"

version=$(sed -nE 's/^project\(flce VERSION ([0-9.]+).*/\1/p' CMakeLists.txt)
archive=dist/flce-$version-$machine
[[ $tests == ON ]] && archive+=-tests
archive+=.tar.gz
tar -C "${tree%/*}" --owner=0 --group=0 -cf - flce | gzip -9 >"$archive"
bytes=$(stat -c %s "$archive")
((bytes < max_bytes)) || { echo "$archive has $bytes bytes, more than $max_bytes" >&2 && exit 1; }
echo "$archive: $((bytes >> 20)) MiB, $(du -sm "$tree" | cut -f1) MiB unpacked"
