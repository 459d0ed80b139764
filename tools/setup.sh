#!/usr/bin/env bash
# Makes the machine ready to build and test flce. Looks for installed packages; says which ones it will install and how, then installs them;
# quick when nothing is missing. Distribution packages come through apt-get (root, or sudo without a password); NVRTC and the CUDA headers,
# where no toolkit has them, come as PyPI wheels into .tools/nvidia, XLA's headers into .tools/xla. With --python also the packages that the
# Python package's tests need (torch and the rest, unless tools/python.sh finds them): from PyPI into .tools/python; and into .tools/peers
# the packages of tools/peers.txt, whose signatures a test reads. With --trainers also those of tools/trainers.txt, tools/jax.txt and
# tools/quantisers.txt, which tests run, into .tools/trainers, .tools/jax and .tools/quantisers. With --servers also the servers that tests
# of remote caches start: redis and nginx unpacked into .tools/servers, where the system has none (a package that is installed would run,
# and run after the next boot too), and moto's S3 from PyPI into .tools/moto; without them those tests are skipped. With --dist also the
# libraries that a release tree is linked with (tools/portable_inputs.sh, into .tools/portable-*); with --arm64 those of a release tree for
# 64-bit Arm, the cross compiler, and qemu, which runs what it makes.
# Exit code 3 and a list of packages to install by hand where it cannot.
set -euo pipefail
cd "$(dirname "$0")/.."
with_python=false with_trainers=false with_servers=false with_dist=false dist_machine=()
for flag in "$@"; do
    case $flag in
        --python) with_python=true ;;
        --trainers) with_trainers=true ;;
        --servers) with_servers=true ;;
        --dist) with_dist=true ;;
        --arm64) with_dist=true dist_machine=(aarch64) ;;
        *) echo "usage: setup.sh [--python] [--trainers] [--servers] [--dist] [--arm64]" >&2 && exit 2 ;;
    esac
done

fail() {
    printf '%s\n' "" "$@" >&2
    exit 3
}

# ── What is needed: a Debian/Ubuntu package, and how to see that it (or the same from elsewhere) is there.

include_roots=(/usr/include "/usr/include/$(uname -m)-linux-gnu" /usr/local/include)
[[ ${CONDA_PREFIX:-} ]] && include_roots+=("$CONDA_PREFIX/include")
IFS=: read -ra extra_roots <<<"${CPATH:-}"
for root in ${extra_roots[@]+"${extra_roots[@]}"}; do [[ $root ]] && include_roots+=("$root"); done
IFS=: read -ra prefix_roots <<<"${CMAKE_PREFIX_PATH:-}"
for root in ${prefix_roots[@]+"${prefix_roots[@]}"}; do [[ $root ]] && include_roots+=("$root/include"); done

packages=()
need_tool() { # package, command
    if ! command -v "$2" >/dev/null; then packages+=("$1"); fi
}
need_header() { # package, header, then other headers that do as well
    local package=$1 root header
    shift
    for header in "$@"; do
        for root in "${include_roots[@]}"; do
            if [[ -e $root/$header ]]; then return; fi
        done
    done
    packages+=("$package")
}
need_file() { # package, files of which one is enough
    local package=$1 file
    shift
    for file in "$@"; do
        if [[ -e $file ]]; then return; fi
    done
    packages+=("$package")
}

need_tool g++ c++
need_tool cmake cmake
need_tool ninja-build ninja
need_tool pkg-config pkg-config
need_tool ccache ccache
need_header libfmt-dev fmt/core.h
need_header libspdlog-dev spdlog/spdlog.h
need_header nlohmann-json3-dev nlohmann/json.hpp
need_header libcli11-dev CLI/CLI.hpp
need_header libtbb-dev tbb/version.h oneapi/tbb/version.h
need_header libzstd-dev zstd.h
need_header libxxhash-dev xxhash.h
need_header libssl-dev openssl/evp.h
need_header libcurl4-openssl-dev curl/curl.h
need_header libhiredis-dev hiredis/hiredis.h
need_header zlib1g-dev zlib.h # LLVM's CMake package asks for it
need_header libgtest-dev gtest/gtest.h
need_header libgmock-dev gmock/gmock.h
need_header libbenchmark-dev benchmark/benchmark.h
need_header libdlpack-dev dlpack/dlpack.h

llvm_prefixes=(/usr/lib/llvm-{19,20,21,22,18} /usr/lib64/llvm{19,20,21,22,18} /opt/llvm-{19,20,21,22,18})
find_llvm() {
    local prefix
    [[ ${LLVM_DIR:-} || ${LLVM_ROOT:-} ]] && return 0
    for prefix in "${llvm_prefixes[@]}"; do
        if [[ -e $prefix/lib/cmake/llvm/LLVMConfig.cmake ]]; then return 0; fi
    done
    return 1
}
llvm_missing=false
find_llvm || llvm_missing=true

# A release: Debian's packages of an old glibc and their keys, and lld where LLVM is there without it.
dist_missing=false
if $with_dist; then
    need_file debian-archive-keyring /usr/share/keyrings/debian-archive-keyring.gpg
    if ! $llvm_missing && ! command -v ld.lld >/dev/null && ! compgen -G '/usr/lib/llvm-*/bin/ld.lld' >/dev/null; then
        for prefix in "${llvm_prefixes[@]}"; do
            if [[ -e $prefix/lib/cmake/llvm/LLVMConfig.cmake ]]; then packages+=("lld-${prefix##*llvm-}") && break; fi
        done
    fi
    if ((${#dist_machine[@]})) && [[ $(c++ -dumpmachine 2>/dev/null) != aarch64-* ]]; then
        need_tool g++-aarch64-linux-gnu aarch64-linux-gnu-g++
        need_tool qemu-user-static qemu-aarch64-static
    fi
    tools/portable_inputs.sh --check "${dist_machine[@]}" || dist_missing=true
fi

# ── NVRTC and cuda.h: a toolkit's, the system's, or ours.
nvidia=.tools/nvidia
cuda_roots=(${CUDA_HOME:+"$CUDA_HOME"} ${CUDA_PATH:+"$CUDA_PATH"} /usr/local/cuda /usr)
has_nvrtc() {
    local root
    [[ ${FLCE_NVRTC:-} ]] && return 0
    for root in "${cuda_roots[@]}"; do
        compgen -G "$root/lib64/libnvrtc.so.1[2-9]*" >/dev/null && return 0
        compgen -G "$root/lib/$(uname -m)-linux-gnu/libnvrtc.so.1[2-9]*" >/dev/null && return 0
    done
    compgen -G "$nvidia/lib/libnvrtc.so.1[2-9]*" >/dev/null
}
has_cuda_headers() {
    local root
    for root in "${cuda_roots[@]}" "$nvidia"; do
        if [[ -e $root/include/cuda.h ]]; then return 0; fi
    done
    return 1
}
# A driver runs cubins of its own major version: one that knows only CUDA 12 gets the wheels of CUDA 12.
driver_major=$(nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA Version: ([0-9]+)\..*/\1/p' | head -n1 || true)
if [[ ${driver_major:-13} == 12 ]]; then
    nvrtc_wheel='nvidia-cuda-nvrtc-cu12>=12.8,<13' runtime_wheel='nvidia-cuda-runtime-cu12>=12.8,<13'
else
    nvrtc_wheel='nvidia-cuda-nvrtc==13.0.*' runtime_wheel='nvidia-cuda-runtime==13.0.*'
fi
wheels=()
has_nvrtc || wheels+=("$nvrtc_wheel")
has_cuda_headers || wheels+=("$runtime_wheel")

# ── XLA's headers, for libflce_jax: those of the oldest jaxlib that flce.jax is for, since XLA serves older callers and no newer ones.
xla=.tools/xla xla_wheel='jaxlib==0.8.1'
xla_missing=true
if [[ ${FLCE_XLA_INCLUDE:-} || -e $xla/xla/ffi/api/ffi.h ]]; then xla_missing=false; fi

# ── Python packages: reused where the interpreter of tools/python.sh has them.
python_folder=.tools/python
# Packages whose releases may change the tests are fetched at the version that the tests were last run with.
all_python_packages=(torch==2.13.0 numpy pytest transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 mypy==2.4.1 ruff==0.17.6
    scikit-build-core)
# One line for each that is missing: `requirement` as pip reads it.
missing_python() {
    tools/python.sh - "${all_python_packages[@]}" <<'PY'
import importlib.util, sys
if sys.version_info < (3, 10):
    sys.exit(f"flce needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}: set FLCE_PYTHON to another")
for requirement in sys.argv[1:]:
    module = requirement.split("==")[0].replace("-", "_")
    if importlib.util.find_spec(module) is None:
        print(requirement)
PY
}
# torch.compile builds C++ against the interpreter's headers; those of the distribution's interpreter are a package of their own.
lacks_headers() {
    tools/python.sh -c 'import os, sys, sysconfig
headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
sys.exit(sys.base_prefix != "/usr" or os.path.exists(headers))' 2>/dev/null
}
python_packages=()
if $with_python; then
    if ! command -v "${FLCE_PYTHON:-python3}" >/dev/null; then
        packages+=(python3 python3-pip python3-dev)
        python_packages=("${all_python_packages[@]}")
    else
        if lacks_headers; then packages+=(python3-dev); fi
        if missing=$(missing_python); then
            mapfile -t python_packages < <(grep . <<<"$missing" || true)
        elif ((${#packages[@]} == 0)); then
            exit 3
        else
            python_packages=("${all_python_packages[@]}")
        fi
    fi
fi
# Within pip's isolated builds PYTHONPATH hides the packages of an environment that is activated, its pip among them.
has_pip() { env -u PYTHONPATH "$1" -m pip --version >/dev/null 2>&1; }
if ((${#wheels[@]} + ${#python_packages[@]})) && ! has_pip python3 && ! command -v uv >/dev/null; then
    if [[ " ${packages[*]} " != *" python3-pip "* ]]; then packages+=(python3-pip); fi
fi

# ── What flce.compat stands in for, of which nothing is imported, and trainers: each package without its dependencies.
missing_lists=()
need_list() { cmp -s "tools/$1.txt" ".tools/$1/requirements.txt" || missing_lists+=("$1"); }
if $with_python; then need_list peers; fi
if $with_trainers; then
    need_list trainers
    need_list jax
    need_list quantisers
fi

# ── Servers for tests: none of them is installed in the system.
servers=.tools/servers moto=.tools/moto
server_packages=()
need_server() { # package, program
    local folder
    for folder in "$servers/usr/bin" "$servers/usr/sbin" /usr/bin /usr/sbin /usr/local/bin /usr/local/sbin; do
        if [[ -x $folder/$2 ]]; then return; fi
    done
    server_packages+=("$1")
}
moto_missing=false
if $with_servers; then
    need_server redis-server redis-server
    need_server nginx-light nginx
    look='import importlib.util, sys; sys.exit(any(importlib.util.find_spec(m) is None for m in ("moto", "flask", "boto3")))'
    PYTHONPATH=$moto python3 -c "$look" 2>/dev/null || moto_missing=true
fi

# Tests are skipped without the servers, so that nothing here is fatal.
unpack_servers() {
    local into=$PWD/$servers.tmp name
    echo "flce: unpacking into $servers, for tests of remote caches: ${server_packages[*]}, and libraries that they need"
    rm -rf "$into" && mkdir -p "$into/packages" || return
    # Dependencies come along, as far as the system lacks them.
    mapfile -t names < <(LC_ALL=C apt-get -s --no-install-recommends install "${server_packages[@]}" | sed -nE 's/^Inst ([^ ]+) .*/\1/p')
    ((${#names[@]})) || return
    (cd "$into/packages" && apt-get -qq -o APT::Sandbox::User=root download "${names[@]}") || return
    for name in "$into"/packages/*.deb; do dpkg -x "$name" "$into/root" || return; done
    mkdir -p "$servers" && cp -a "$into/root/." "$servers/" && rm -rf "$into"
}

get_servers() {
    if ((${#server_packages[@]})); then
        command -v apt-get >/dev/null && unpack_servers ||
            echo "flce: could not get ${server_packages[*]}: tests that need them are skipped"
    fi
    if $moto_missing; then
        echo "flce: fetching moto from PyPI into $moto, for tests of remote caches"
        fetch python3 --upgrade --target "$moto" 'moto[s3]' flask flask-cors ||
            echo "flce: could not fetch moto: tests that need it are skipped"
    fi
}

if ((${#packages[@]} + ${#wheels[@]} + ${#python_packages[@]} + ${#server_packages[@]} == 0)) &&
    ! $llvm_missing && ! $xla_missing && ! $moto_missing && ! $dist_missing && ((${#missing_lists[@]} == 0)); then exit 0; fi

# ── Distribution packages.
by_hand() {
    local lines=("flce needs packages that this script cannot install here: $1")
    if $llvm_missing; then packages+=("llvm-19-dev (18 or newer will do)"); fi
    ((${#packages[@]})) && lines+=("  distribution packages (Debian and Ubuntu names): ${packages[*]}")
    if command -v apt-get >/dev/null; then
        local plain=${packages[*]}
        lines+=("    as root: apt-get update && apt-get install --no-install-recommends ${plain// (18 or newer will do)/}")
    fi
    ((${#wheels[@]})) && lines+=("  afterwards this script fetches from PyPI into $nvidia: ${wheels[*]}")
    ((${#python_packages[@]})) && lines+=("  and into $python_folder: ${python_packages[*]}")
    fail "${lines[@]}" "Then run the same command again."
}
if ((${#packages[@]})) || $llvm_missing; then
    command -v apt-get >/dev/null || by_hand "there is no apt-get on this machine."
    as_root=()
    if ((EUID != 0)); then
        if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
            as_root=(sudo -n)
        else
            by_hand "you are not root, and sudo is missing or asks for a password."
        fi
    fi
    run_apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@" </dev/null; }
    has_candidate() { [[ $(LC_ALL=C apt-cache policy "$1" 2>/dev/null) =~ Candidate:\ [^\(] ]]; }

    echo "flce: refreshing the list of packages (apt-get update)"
    run_apt update || fail "apt-get update failed: check the machine's network and its apt sources."
    if $llvm_missing; then
        for version in 19 20 21 18; do
            if has_candidate "llvm-$version-dev"; then
                packages+=("llvm-$version-dev")
                # The linker is optional: it makes static links of LLVM quick.
                if has_candidate "lld-$version"; then packages+=("lld-$version"); fi
                break
            fi
        done
        [[ ${packages[*]} == *llvm-*-dev* ]] || by_hand "this distribution has no LLVM 18 or newer."
    fi
    echo "flce: installing distribution packages: ${packages[*]}"
    run_apt install -y --no-install-recommends "${packages[@]}" || fail "apt-get could not install: ${packages[*]}"
fi

fetch() { # PYTHON, then what pip install takes
    local python=$1
    shift
    if has_pip "$python"; then
        # Nothing is compiled: most modules of these packages are never imported, and the rest are compiled when they are.
        PIP_ROOT_USER_ACTION=ignore env -u PYTHONPATH "$python" -m pip install --no-compile --quiet --no-input --disable-pip-version-check \
            --no-warn-script-location "$@" </dev/null
    elif command -v uv >/dev/null; then
        uv pip install --quiet --python "$python" "$@" </dev/null
    else
        echo "flce: $(command -v "$python") has no pip, and there is no uv" >&2
        return 1
    fi
}

# ── Wheels: unpacked, never imported; a folder of libraries and headers is all that is wanted.
if ((${#wheels[@]})); then
    echo "flce: fetching from PyPI into $nvidia, as no CUDA toolkit here has them: ${wheels[*]}"
    rm -rf "$nvidia.tmp"
    mkdir -p "$nvidia.tmp"
    fetch python3 --no-deps --only-binary=:all: --target "$nvidia.tmp/site" "${wheels[@]}" ||
        fail "pip could not fetch ${wheels[*]}." \
            "By hand: put libnvrtc.so.1x with its libnvrtc-builtins into" \
            "$nvidia/lib and the CUDA headers into $nvidia/include, or install a CUDA toolkit (12.x or 13.x) and" \
            "set CUDA_HOME; FLCE_NVRTC names a libnvrtc to use."
    # cu12 wheels have nvidia/<part>/{lib,include}, cu13 wheels nvidia/cu13/{lib,include}.
    mkdir -p "$nvidia/lib" "$nvidia/include"
    for part in "$nvidia.tmp"/site/nvidia/*/; do
        if [[ -d $part/lib ]]; then cp -a "$part"/lib/. "$nvidia/lib/"; fi
        if [[ -d $part/include ]]; then cp -a "$part"/include/. "$nvidia/include/"; fi
    done
    rm -rf "$nvidia.tmp" "$nvidia"/lib/*.alt.so*
    has_nvrtc && has_cuda_headers || fail "the wheels ${wheels[*]} did not bring what was expected of them"
fi

if $xla_missing; then
    echo "flce: fetching from PyPI into $xla the headers of $xla_wheel, for flce.jax"
    rm -rf "$xla.tmp"
    # Headers are the same for every Python and machine. The build does without them.
    if fetch python3 --no-deps --only-binary=:all: --implementation cp --python-version 3.12 --abi cp312 \
        --platform manylinux_2_27_x86_64 --target "$xla.tmp" "$xla_wheel"; then
        mkdir -p "$xla" && cp -a "$xla.tmp/jaxlib/include/." "$xla/"
    else
        echo "flce: could not fetch $xla_wheel: flce.jax is left out of what is built"
    fi
    rm -rf "$xla.tmp"
fi

# ── Python packages, beside what the interpreter has.
if ((${#python_packages[@]})); then
    python=$(tools/python.sh -c 'import sys; print(sys.executable)')
    # All of it at once: a later pip call with the same target would replace folders that packages share (bin).
    rm -rf "$python_folder"
    mapfile -t python_packages < <(missing_python)
    echo "flce: fetching from PyPI into $python_folder, as $python does not have them: ${python_packages[*]}"
    # accelerate comes without its dependencies: it asks for torch by name, which must not bring another beside the one that is there.
    rest=()
    for package in "${python_packages[@]}"; do
        if [[ $package != accelerate ]]; then
            rest+=("$package")
        else
            rest+=(psutil packaging pyyaml huggingface_hub safetensors)
            fetch "$python" --no-deps --target "$python_folder" accelerate || fail "pip could not fetch accelerate."
        fi
    done
    fetch "$python" --upgrade --target "$python_folder" "${rest[@]}" ||
        fail "pip could not fetch ${rest[*]}." "By hand: install them for $python, or set FLCE_PYTHON to an interpreter that has them."
    still=$(missing_python)
    [[ -z $still ]] || fail "still missing for $python: ${still//$'\n'/ }"
fi
for list in ${missing_lists[@]+"${missing_lists[@]}"}; do
    echo "flce: fetching the packages of tools/$list.txt from PyPI into .tools/$list, for tests of the Python package"
    rm -rf ".tools/$list"
    python=$(tools/python.sh -c 'import sys; print(sys.executable)')
    if DS_BUILD_OPS=0 fetch "$python" --no-deps --only-binary=:all: --target ".tools/$list" -r "tools/$list.txt"; then
        cp "tools/$list.txt" ".tools/$list/requirements.txt"
    else
        echo "flce: could not fetch the packages of tools/$list.txt: tests that need them are skipped"
    fi
done
if $dist_missing; then
    echo "flce: fetching Debian's libc6, libstdc++6 and libgcc-s1 of bullseye and the source of oneTBB into .tools/portable-*"
    tools/portable_inputs.sh "${dist_machine[@]}" || fail "tools/portable_inputs.sh failed (see above)."
fi
get_servers
echo "flce: the machine is ready"
