#!/usr/bin/env bash
# Makes .tools/portable-<machine>, what a portable build for x86_64 or aarch64 (tools/dist.sh) links against beside a compiler:
#   link/     start files, and libraries with the symbols of glibc 2.28 and of GCC 8's C++ runtime only: the linker takes them, not the
# system's
#   onetbb/   the source of oneTBB, to be compiled into libflce
#   runtime/  libstdc++ and libgcc_s that run from glibc 2.28 on, for systems that have none
#   root/     a system of an old glibc (2.31) and nothing else, in which tools/test_release.sh tries the result
#   sysroot/  headers and archives of that machine, where it is not the machine's own compiler that builds for it
# They come from Debian's mirror (bullseye; bookworm's source of oneTBB, and its packages for a sysroot), checked by apt, and need no root.
# With --check the script only says, by its exit code, whether the folder is there and as this script makes it.
#
#     tools/portable_inputs.sh [--check] [x86_64|aarch64]    default: the machine that the compiler, cc, builds for
set -euo pipefail
cd "$(dirname "$0")/.."
native=$(cc -dumpmachine 2>/dev/null || uname -m) && native=${native%%-*}
machine=$native check=false
for argument; do
    case $argument in
        --check) check=true ;;
        x86_64 | aarch64) machine=$argument ;;
        *) echo "usage: portable_inputs.sh [--check] [x86_64|aarch64]" >&2 && exit 2 ;;
    esac
done
case $machine in
    x86_64) architecture=amd64 loader=lib64/ld-linux-x86-64.so.2 ;;
    aarch64) architecture=arm64 loader=lib/ld-linux-aarch64.so.1 ;;
    *) echo "releases are made for x86_64 and aarch64, not for $machine" >&2 && exit 3 ;;
esac
compiler=cc
if [[ $machine != "$native" ]]; then compiler=$machine-linux-gnu-gcc; fi
inputs=$PWD/.tools/portable-$machine
glibc=2.28 glibcxx=3.4.25 cxxabi=1.3.11 gcc=7.0.0 # newest symbol versions that a release asks for; RHEL 8's, as PyTorch's wheels
mirror=${FLCE_DEBIAN_MIRROR:-http://deb.debian.org/debian}
stamp=$(sha256sum "$0" | cut -d' ' -f1)
if [[ $(cat "$inputs/stamp" 2>/dev/null) == "$stamp" ]]; then exit 0; fi
if $check; then exit 1; fi

work=$inputs.tmp
rm -rf "$work" && mkdir -p "$work"/{debs,lists/partial,cache/archives/partial,root,link,runtime}
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "a portable build takes Debian's packages through apt-get and dpkg, which are missing here" >&2
    exit 3
fi
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[[ -e $keyring ]] || { echo "$keyring is missing: install debian-archive-keyring" >&2 && exit 3; }
cat >"$work/sources.list" <<LIST
deb [arch=$architecture signed-by=$keyring] $mirror bullseye main
deb [arch=$architecture signed-by=$keyring] $mirror bookworm main
deb-src [signed-by=$keyring] $mirror bookworm main
LIST
apt() {
    apt-get -qq -o APT::Architecture=$architecture -o APT::Architectures=$architecture \
        -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$work/lists" \
        -o Dir::State::status=/dev/null -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Acquire::Languages=none "$@"
}
fail() {
    echo "could not get Debian's packages for a portable build from $mirror" \
        "(FLCE_DEBIAN_MIRROR names another, like http://archive.debian.org/debian)" >&2
    exit 3
}
apt update || fail
(cd "$work/debs" && apt download libc6/bullseye libc6-dev/bullseye libstdc++6/bullseye libgcc-s1/bullseye gcc-10-base/bullseye &&
    apt source --download-only onetbb/bookworm) || fail
for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root"; done
mkdir "$work/onetbb" && tar -C "$work/onetbb" --strip-components=1 -xf "$work"/debs/onetbb_*.orig.tar.*

# A library of the same name with the same symbols, each in its newest version up to the limit, and no code. Objects that share an address
# keep sharing one: an executable that takes a copy of `environ` takes `__environ` with it.
stub() { # LIBRARY
    local library=$1 name
    name=$(basename "$library")
    readelf -W --dyn-syms "$library" | awk -v limits="GLIBC=$glibc GLIBCXX=$glibcxx CXXABI=$cxxabi GCC=$gcc" -v script="$work/$name.map" '
        function number(version, part) { split(version, part, "."); return part[1] * 1000000 + part[2] * 1000 + part[3] }
        BEGIN {
            count = split(limits, each, " ")
            for (i = 1; i <= count; i++) { split(each[i], pair, "="); limit[pair[1]] = number(pair[2]) }
        }
        $7 != "UND" && $8 ~ /@(GLIBC|GLIBCXX|CXXABI|GCC)_[0-9.]+$/ {
            symbol = $8; sub(/@.*/, "", symbol); node = $8; sub(/.*@/, "", node)
            family = node; sub(/_.*/, "", family); version = node; sub(/.*_/, "", version); version = number(version)
            if (version > limit[family] || (symbol in best && best[symbol] >= version)) next
            best[symbol] = version; nodes[symbol] = node
            address[symbol] = $2; size[symbol] = $3; type[symbol] = $4; weak[symbol] = $5 == "WEAK"
        }
        END {
            for (symbol in nodes) {
                print (weak[symbol] ? ".weak " : ".globl ") symbol
                exported[nodes[symbol]] = exported[nodes[symbol]] " " symbol ";"
                if (type[symbol] == "OBJECT" || type[symbol] == "TLS") {
                    place = type[symbol] " " address[symbol]
                    labels[place] = labels[place] symbol ":\n"
                    if (size[symbol] > bytes[place]) bytes[place] = size[symbol]
                    print ".type " symbol (type[symbol] == "TLS" ? ",@tls_object" : ",@object") "\n.size " symbol "," size[symbol]
                } else print ".text\n.type " symbol ",@function\n" symbol ": ret"
            }
            for (place in labels) {
                print (place ~ /^TLS/ ? ".section .tbss,\"awT\",@nobits" : ".bss") "\n.balign 32"
                print labels[place] ".zero " (bytes[place] ? bytes[place] : 1)
            }
            for (node in exported) print node " {" exported[node] " };" >script
        }' >"$work/$name.s"
    "$compiler" -shared -nostdlib -Wl,-soname,"$name" -Wl,--version-script="$work/$name.map" -o "$work/link/$name" "$work/$name.s"
}
system=$work/root/lib/$machine-linux-gnu developer=$work/root/usr/lib/$machine-linux-gnu
glibc_libraries=("$system"/{libc.so.6,libm.so.6,libpthread.so.0,libdl.so.2,librt.so.1})
for library in "${glibc_libraries[@]}" "$system"/{"${loader##*/}",libgcc_s.so.1} "$developer/libstdc++.so.6"; do
    stub "$library"
done
cp "$developer"/{Scrt1.o,crt1.o,crti.o,crtn.o,libc_nonshared.a} "$work/link/"
echo "GROUP(libc.so.6 libc_nonshared.a AS_NEEDED(${loader##*/}))" >"$work/link/libc.so"
# Symbols of the C++ runtime beyond the limit, which a newer compiler's code asks for, come from that compiler's archive and stay hidden.
echo 'INPUT(libstdc++.so.6 libstdc++.a)' >"$work/link/libstdc++.so"
ln -s libm.so.6 "$work/link/libm.so"
ln -s libpthread.so.0 "$work/link/libpthread.so"
ln -s libdl.so.2 "$work/link/libdl.so"
ln -s librt.so.1 "$work/link/librt.so"
cp -L "$developer/libstdc++.so.6" "$system/libgcc_s.so.1" "$work/runtime/"
cp "$work/root/usr/share/doc/gcc-10-base/copyright" "$work/runtime/COPYRIGHT"
mkdir -p "$work/glibc/${loader%/*}" "$work/glibc/lib/$machine-linux-gnu"
cp -L "${glibc_libraries[@]}" "$work/glibc/lib/$machine-linux-gnu/"
cp -L "$system/${loader##*/}" "$work/glibc/$loader"

# Headers and archives are those that tools/setup.sh installs where a machine builds for itself. LLVM's CMake package looks for its tools.
if [[ $machine != "$native" ]]; then
    mkdir "$work/sysroot" "$work/debs/sysroot"
    (cd "$work/debs/sysroot" && apt download {libc6,libstdc++6,libgcc-s1,libc6-dev,linux-libc-dev}/bookworm \
        {libfmt9,libfmt-dev,libspdlog1.10,libspdlog-dev}/bookworm \
        {nlohmann-json3-dev,libcli11-dev,libzstd{1,-dev},libxxhash-dev,libssl-dev,libcurl4-openssl-dev,libhiredis-dev,zlib1g-dev}/bookworm \
        {libgtest-dev,libgmock-dev,libdlpack-dev,libllvm19,llvm-19{,-dev,-tools,-linker-tools}}/bookworm) || fail
    for deb in "$work"/debs/sysroot/*.deb; do dpkg -x "$deb" "$work/sysroot"; done
fi

rm -rf "$work"/{root,debs,lists,cache,sources.list,*.s,*.map}
mv "$work/glibc" "$work/root"
echo "$stamp" >"$work/stamp"
rm -rf "$inputs" && mv "$work" "$inputs"
