#!/usr/bin/env bash
# A release tree that runs on another distribution with only glibc: dist/flce, and dist/flce-<version>-<machine>.tar.gz of it. With --tests the
# test binaries are in it too, so that the same tests run on a machine without compilers (a GPU machine, say).
# Ends with what the tree asks of the system, and fails if that is more than glibc or too large to carry.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=OFF
[[ ${1:-} == --tests ]] && tests=ON
max_bytes=$((64 << 20)) max_glibc=2.36  # Debian 12; Ubuntu 24.04 has 2.39

tools/configure.sh dist -DFLCE_INSTALL_TESTS=$tests -DFLCE_BUILD_TESTS=$tests
if [[ $tests == ON ]]; then
    cmake --build --preset dist
else
    cmake --build --preset dist --target flce flce_cli
fi
tree=dist/flce
rm -rf "$tree"
cmake --install build-dist --prefix "$PWD/$tree" --strip >/dev/null
chmod -R u+w,a+rX "$tree"

# Everything that is not glibc's goes beside libflce, where its RUNPATH ($ORIGIN) finds it: oneTBB and fmt exist only as shared libraries, and they
# bring the C++ runtime with them. One shared copy of that: a static one in libflce would be a second, and exceptions cross between them.
is_glibc() { [[ $1 =~ ^(libc\.so\.6|libm\.so\.6|libdl\.so\.2|libpthread\.so\.0|librt\.so\.1|ld-linux.*)$ ]]; }
needed_by() { readelf -d "$@" | sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p' | sort -u; }
binaries() { find "$tree/bin" "$tree/lib" -type f \( -perm -u+x -o -name '*.so*' \); }
while true; do
    added=false
    mapfile -t present < <(binaries)
    while read -r name; do
        if is_glibc "$name" || [[ -e $tree/lib/$name ]]; then continue; fi
        path=$(ldd "${present[@]}" 2>/dev/null | sed -nE "s/^\s*${name//+/\\+} => (\/\S+).*/\1/p" | head -n1)
        [[ $path ]] || { echo "the tree needs $name, which is not found here" >&2 && exit 1; }
        cp -L "$path" "$tree/lib/$name" && strip --strip-unneeded "$tree/lib/$name" && added=true
        echo "bundled $name ($(basename "$(readlink -f "$path")"))"
    done < <(needed_by "${present[@]}")
    $added || break
done
mapfile -t binaries < <(binaries)
glibc=$(objdump -T "${binaries[@]}" 2>/dev/null | grep -oE 'GLIBC_[0-9]+\.[0-9.]+' | sort -Vu | tail -n1)
glibc=${glibc#GLIBC_}
if [[ $(printf '%s\n' "$glibc" "$max_glibc" | sort -V | tail -n1) != "$max_glibc" ]]; then
    echo "the tree needs glibc $glibc, newer than $max_glibc: make releases on an older distribution (Debian 12)" >&2
    exit 1
fi
archive=dist/flce-$(sed -nE 's/^project\(flce VERSION ([0-9.]+).*/\1/p' CMakeLists.txt)-$(uname -m)$([[ $tests == ON ]] && echo -tests || true).tar.gz
tar -C dist --owner=0 --group=0 -cf - flce | gzip -9 >"$archive"
bytes=$(stat -c %s "$archive")
((bytes < max_bytes)) || { echo "$archive has $bytes bytes, more than $max_bytes" >&2 && exit 1; }

env -i "$tree/bin/flce" --version >/dev/null
# Where it is allowed, the command at work in a root that holds glibc and nothing else: no shell, no /tmp, no home. $ORIGIN takes /proc, which is not
# there either.
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
cp -a "$tree" "$root/flce"
while read -r path; do
    if is_glibc "$(basename "$path")"; then install -D "$(readlink -f "$path")" "$root$path"; fi
done < <(ldd "${binaries[@]}" | grep -oE '/[^ :]+' | sort -u)
enter=(chroot "$root")
((EUID == 0)) || enter=(unshare --user --map-root-user chroot "$root")
in_root() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LD_LIBRARY_PATH=/flce/lib "${enter[@]}" /flce/bin/flce "$@" >/dev/null; }
if ((EUID == 0)) || in_root --version 2>/dev/null; then
    in_root info
    in_root check --spec D=64,V=500,dtype=bf16,bias,softcap=30 --device cpu --num-tokens 33
    where="; ran in a root with glibc alone"
else
    where="; not tried in another root, which this user may not enter"
fi
echo "$archive: $((bytes >> 20)) MiB, $(du -sm "$tree" | cut -f1) MiB unpacked; needs glibc $glibc or newer and nothing else$where"
