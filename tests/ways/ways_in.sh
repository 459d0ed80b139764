#!/usr/bin/env bash
# Walks one way in that README.md and docs/ name, in a clean place and as it is written there: ways_in.sh NAME BUILD_TREE
#   pip      `pip install .` in a clean clone, into an empty environment, and a training step
#   sdist    the source distribution, built in a clean clone and installed from
#   wheel    `make wheel` in a clean clone, and its wheel in another environment
#   image    the Dockerfile of docs/prewarm.md, whose steps image.py does in folders
#   cmake    the CMake project of docs/prewarm.md on an installed flce
#   demos    make's demos in a clean clone
#   arm64    `make wheel-arm64` in a clean clone, and its release tree, tests and packs under qemu
# At FLCE_TEST_LEVEL=full a way whose files have not changed of late is skipped. Exit code 77: it cannot be walked here.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
way=${1:?usage: ways_in.sh NAME BUILD_TREE}
tree=$(cd "${2:?usage: ways_in.sh NAME BUILD_TREE}" && pwd)

skip() {
    echo "SKIPPED [1] ways.$way: $*"
    exit 77
}
# Files that a way hangs on. Without a history everything has changed.
declare -A files=([pip]="" [wheel]="" [demos]="" [arm64]="" [cmake]="docs/prewarm.md cmake examples/prewarm tests/ways"
    [sdist]="pyproject.toml CMakeLists.txt cmake tools/setup.sh python/flce/core/_native.py python/flce/_command.py tests/ways"
    [image]="docs/prewarm.md prewarm cli/prewarm.cpp cmake tests/ways")
if [[ ${FLCE_TEST_LEVEL:-} == full && ${files[$way]} ]] && git -C "$root" rev-parse -q --verify HEAD >/dev/null 2>&1; then
    read -ra paths <<<"${files[$way]}"
    if [[ -z $(git -C "$root" log -1 --since='8 hours ago' --format=%h -- "${paths[@]}") &&
        -z $(git -C "$root" status --porcelain -- "${paths[@]}") ]]; then
        skip "its files (${paths[*]}) are as they were eight hours ago; make test-nightly walks it"
    fi
fi

# Everything happens in a folder of its own, with the compiler and the compiler cache of the build tree. The compiler's warnings are errors
# where they are in that tree, whose objects then serve here: the cache tells compilers apart by their names, and pip would take Python's.
work=$(mktemp -d -t "flce-way-$way-XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/tmp"
export TMPDIR=$work/tmp FLCE_CACHE_DIR=$work/cache PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
unset FLCE_LIBRARY PYTHONPATH VIRTUAL_ENV
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1 CCACHE_COMMENTS=1 CCACHE_DEPEND=1
export CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
if [[ ! ${CXX:-} ]]; then
    CC=$(sed -n 's/^CMAKE_C_COMPILER:[A-Z]*=//p' "$tree/CMakeCache.txt")
    CXX=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$tree/CMakeCache.txt")
    export CC CXX
fi
if grep -qs '^FLCE_WERROR:[A-Z]*=ON' "$tree/CMakeCache.txt"; then export SKBUILD_CMAKE_DEFINE=FLCE_WERROR=ON; fi

quietly() { # command: its output where it fails
    "$@" >"$work/log" 2>&1 || { tail -n 200 "$work/log" >&2 && echo "failed: $*" >&2 && exit 1; }
}
clone() { # into the folder: what git has, changes that are not committed included
    mkdir -p "$1"
    (cd "$root" && git ls-files -z --cached --others --exclude-standard | tar --null --ignore-failed-read -T - -cf -) 2>"$work/log" |
        tar -xf - -C "$1"
}
# In the clone, which lies where the checkout does for as long as the command runs, if this user may do that: what CMake unites has absolute
# paths in it, so the compiler cache serves it there and nowhere else. Of the checkout a folder that setup fetched is lent to it.
in_clone() { # lent folder, command
    local as=(unshare --mount) lent=$1
    shift
    ((EUID == 0)) || as=(unshare --user --map-root-user --mount)
    if "${as[@]}" mount --bind "$work/clone" "$root" 2>/dev/null; then
        mkdir -p "$root/$lent" "$work/clone/$lent"
        quietly "${as[@]}" bash -euc 'mount --bind "$2/$3" "$1/$3" && mount --rbind "$1" "$2" && cd "$2" && shift 3 && exec "$@"' - \
            "$work/clone" "$root" "$lent" "$@"
    else
        mkdir -p "$(dirname "$work/clone/$lent")" && ln -sfn "$root/$lent" "$work/clone/$lent"
        (cd "$work/clone" && CCACHE_BASEDIR=$work quietly "$@")
    fi
}
python=$("$root/tools/python.sh" -c 'import sys; print(sys.executable)')
torch=$("$root/tools/python.sh" -c 'import importlib.util as u; s = u.find_spec("torch"); print(s.origin if s else "")')
packages_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; } # environment
# An environment with nothing in it. pip finds torch, which would be gigabytes, where the tests have it.
environment() { # folder
    "$python" -m venv "$1" >"$work/log" 2>&1 || skip "$python has no venv: $(tail -n 1 "$work/log")"
    if [[ $torch ]]; then dirname "$(dirname "$torch")" >"$(packages_of "$1")/torch.pth"; fi
}
used() { # environment: a training step, and the commands that came with the package
    (cd / && "$1/bin/python" "$root/python/tests/installed_package.py" "$(packages_of "$1")" "$1/bin")
    (cd / && quietly "$1/bin/flce" check --spec D=64,V=500,dtype=fp32 --num-tokens 8 --device cpu)
}
wheel() { # folder with lib/libflce.so, folder for the wheel: what `make wheel` does with a release tree
    quietly "$root/tools/python.sh" -m pip wheel --no-deps --no-build-isolation -w "$2" --config-settings build-dir="$work/wheel-build" \
        --config-settings cmake.define.FLCE_WHEEL_LIBRARIES="$1/lib" --config-settings wheel.tags=py3-none-linux_x86_64 "$work/clone"
}
[[ $torch || $way == cmake ]] || skip "torch not found; tools/setup.sh --python installs it"

case $way in
    pip)
        clone "$work/clone"
        environment "$work/venv"
        in_clone .tools/python "$work/venv/bin/pip" install .
        rm -rf "$work/clone" # the package stands by itself
        used "$work/venv"
        ;;
    sdist)
        clone "$work/clone"
        environment "$work/builder"
        quietly "$work/builder/bin/pip" install build
        (cd "$work/clone" && quietly "$work/builder/bin/python" -m build --sdist)
        cp "$work"/clone/dist/flce-*.tar.gz "$work"
        rm -rf "$work/clone"
        environment "$work/venv"
        # pip unpacks the file into a folder whose name it draws, where the compiler cache serves nothing: ten minutes of a core.
        if [[ ${FLCE_TEST_LEVEL:-} == nightly ]]; then
            (cd "$work" && CCACHE_BASEDIR=$work quietly "$work/venv/bin/pip" install ./flce-*.tar.gz)
        else
            mkdir "$work/clone" && tar -xf "$work"/flce-*.tar.gz -C "$work/clone" --strip-components=1
            in_clone .tools/python "$work/venv/bin/pip" install .
            rm -rf "$work/clone"
        fi
        used "$work/venv"
        ;;
    wheel)
        clone "$work/clone"
        in_clone .tools make wheel
        environment "$work/venv"
        (cd "$work/clone" && quietly "$work/venv/bin/pip" install dist/flce-*-manylinux_2_28_x86_64.whl)
        # An environment with jax and without torch, for the same wheel.
        torch="" environment "$work/jax"
        (cd "$work/clone" && quietly "$work/jax/bin/pip" install --no-deps dist/flce-*-manylinux_2_28_x86_64.whl)
        quietly "$work/jax/bin/pip" install jax flax optax
        cp -a "$work/clone/examples" "$work/clone/docs" "$work"
        rm -rf "$work/clone"
        used "$work/venv"
        (cd / && quietly "$work/jax/bin/python" "$work/examples/jax_train.py" --steps 5 --plain)
        ;;
    arm64)
        clone "$work/clone"
        in_clone .tools bash -euc 'make wheel-arm64 && tools/configure.sh dist-aarch64 -DFLCE_BUILD_TESTS=ON &&
            cmake --build --preset dist-aarch64 --target test_cpu test_matrix'
        mkdir -p "$work/clone/.tools"
        ln -sfn "$root"/.tools/* "$work/clone/.tools/"
        "$root/tests/ways/arm64.sh" "$work/clone" "$tree" "$work"
        ;;
    image)
        clone "$work/clone"
        mkdir -p "$work/context/dist"
        quietly cmake --install "$tree" --prefix "$work/context/dist/flce"
        wheel "$work/context/dist/flce" "$work/context/dist"
        environment "$work/venv"
        "$python" "$root/tests/ways/image.py" "$root/docs/prewarm.md" "$work/context" "$work/images" "$work/venv"
        ;;
    cmake)
        quietly cmake --install "$tree" --prefix "$work/prefix"
        if [[ ! ${FLCE_NVRTC:-} && -d $root/.tools/nvidia/lib ]]; then export FLCE_NVRTC=$root/.tools/nvidia/lib; fi # setup's
        "$python" "$root/tests/ways/cmake_block.py" "$root/docs/prewarm.md" "$work/project"
        quietly cmake -G Ninja -S "$work/project" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" \
            -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF -DCMAKE_INSTALL_PREFIX="$work/out"
        quietly cmake --build "$work/build"
        quietly cmake --install "$work/build"
        [[ -s $work/out/share/my_trainer/kernels.flcepack ]]
        ;;
    demos)
        clone "$work/clone"
        for demo in demo demo-pipeline demo-engine; do in_clone .tools make "$demo"; done
        ;;
    *) echo "unknown way: $way" >&2 && exit 2 ;;
esac
