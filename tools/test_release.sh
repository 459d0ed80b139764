#!/usr/bin/env bash
# Tries a release tree (tools/dist.sh): its needs of a system, its effects on a program that uses it, and whether it runs on an old system
# with glibc alone. A tree for another machine is tried by qemu. Fails with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."
tree=$(realpath "${1:?usage: test_release.sh TREE MACHINE}")
machine=${2:?usage: test_release.sh TREE MACHINE}
native=$(cc -dumpmachine) && native=${native%%-*}
inputs=$PWD/.tools/portable-$machine
tool= toolchain=() run=()
if [[ $machine != "$native" ]]; then
    tool=$machine-linux-gnu-
    toolchain=(-DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/${machine}_linux.cmake" -DCMAKE_FIND_ROOT_PATH="$tree")
    run=("qemu-$machine-static" -L "$inputs/sysroot")
fi
max_GLIBC=2.28 max_GLIBCXX=3.4.25 max_CXXABI=1.3.11 max_GCC=7.0.0 # the limits of tools/portable_inputs.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

# ── Symbols: none newer than the oldest system's, and none but libflce's own for others to find.
mapfile -t binaries < <(find "$tree/bin" "$tree/lib" -maxdepth 1 -type f \( -perm -u+x -o -name '*.so*' \))
for family in GLIBC GLIBCXX CXXABI GCC; do
    limit=max_$family
    newest=$("${tool}objdump" -T "${binaries[@]}" 2>/dev/null | grep -oE "\b${family}_[0-9][0-9.]*" | sort -Vu | tail -n1)
    [[ $(printf '%s\n' "${newest#*_}" "${!limit}" | sort -V | tail -n1) == "${!limit}" ]] ||
        fail "the tree needs $newest, newer than ${!limit}:" "$("${tool}objdump" -T "${binaries[@]}" 2>/dev/null | grep -F "$newest")"
done
allowed='^lib(c\.so\.6|m\.so\.6|dl\.so\.2|pthread\.so\.0|rt\.so\.1|stdc\+\+\.so\.6|gcc_s\.so\.1|flce\.so\.[0-9]+)$'
allowed+='|^libflce_internals\.so$|^ld-linux-(x86-64\.so\.2|aarch64\.so\.1)$'
foreign=$(readelf -d "${binaries[@]}" | sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p' | sort -u | grep -vE "$allowed" || true)
[[ -z $foreign ]] || fail "the tree needs libraries that are neither glibc's nor the C++ runtime:" "$foreign"
library=$(realpath "$tree/lib/libflce.so")
shown=$("${tool}nm" -D --defined-only "$library" | awk '{ print $3 }' | grep -vE '^flce_|4flce' || true)
[[ -z $shown ]] || fail "libflce shows symbols of other libraries, which a program's own may meet:" "$(c++filt <<<"$shown" | head -n 20)"

# ── Programs: the examples on nothing but the tree, with the system's C++ runtime.
# A program that is told to look in lib for libflce looks there for everything
# else first, too.
rest=$(find "$tree/lib" -maxdepth 1 -name '*.so*' ! -name 'libflce.so*' ! -name libflce_internals.so ! -name libflce_jax.so)
[[ -z $rest ]] || fail "lib holds libraries that would replace a program's own:" "$rest"
cmake -G Ninja -S "$tree/examples/minimal" -B "$work/minimal" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$tree" \
    -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF "${toolchain[@]}" >"$work/log" &&
    cmake --build "$work/minimal" >>"$work/log" || fail "$(cat "$work/log")"
for name in minimal_cpp minimal_c; do
    FLCE_CACHE_DIR=$work/cache FLCE_DEVICE=cpu "${run[@]}" "$work/minimal/$name" >"$work/log" ||
        fail "$name of the examples failed:" "$(cat "$work/log")"
    if ((${#run[@]})); then continue; fi # ldd is for programs of this machine
    runtime=$(ldd "$work/minimal/$name" | sed -nE 's/^\s*libstdc\+\+\.so\.6 => (\S+).*/\1/p')
    [[ -n $runtime && $runtime != "$tree"/* ]] || fail "$name takes its C++ runtime from the tree: $runtime"
done

# ── Where it is allowed, the command at work in a root that holds glibc 2.31 and nothing else: no shell, no /tmp, no home, no /proc.
root=$work/root
cp -a "$inputs/root" "$root"
cp -a "$tree" "$root/flce"
if ((${#run[@]})); then cp "$(command -v "${run[0]}")" "$root/qemu"; fi
enter=(chroot "$root")
((EUID == 0)) || enter=(unshare --user --map-root-user chroot "$root")
# $ORIGIN takes /proc, which is not there.
in_root() {
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LD_LIBRARY_PATH=/flce/lib:/flce/lib/flce/runtime "${enter[@]}" \
        ${run[@]:+/qemu} /flce/bin/flce "$@" >"$work/log" 2>&1 ||
        fail "flce $*:" "$(cat "$work/log")"
}
demo=(demo --device cpu --steps 2 --num-tokens 64 --hidden-size 32 --no-architectures)
env -i "${run[@]}" "$tree/bin/flce" --version >/dev/null
if ((EUID == 0)) || (in_root --version) 2>/dev/null; then
    in_root info
    in_root check --spec D=64,V=500,dtype=bf16,bias,softcap=30 --device cpu --num-tokens 33
    mkdir "$root/tmp"
    in_root "${demo[@]}" --text /flce
    where="; ran in a root with glibc 2.31 alone"
else
    where="; not tried in another root, which this user may not enter"
fi
# The text of `flce demo` comes with the tree.
(cd / && "${run[@]}" "$tree/bin/flce" "${demo[@]}" --cache-dir "$work/cache" >"$work/log" 2>&1) || fail "flce demo:" "$(cat "$work/log")"
echo "$tree: libflce.so needs glibc 2.28 and GCC 8's libstdc++ or newer, bin/flce glibc alone$where"
