#!/usr/bin/env bash
# test_torch_versions.sh LIBFLCE [VERSION…]: tests of the engine, of pipeline schedules and of torch.compile with other versions of torch,
# by default those of tools/torch_versions.txt. A version that is missing is fetched from PyPI into .tools/torch-VERSION: a CUDA build,
# about 5 GB with its libraries. Exit code 1 where tests have failed, or a version could not be fetched; the last lines say which.
set -euo pipefail
cd "$(dirname "$0")/.."
library=$(readlink -f "${1:?usage: test_torch_versions.sh LIBFLCE [VERSION…]}")
versions=("${@:2}")
((${#versions[@]})) || mapfile -t versions < <(sed -nE 's/^torch==//p' tools/torch_versions.txt)
python=$(tools/python.sh -c 'import sys; print(sys.executable)')
work=$PWD/build/test-work/torch
failed=()
for version in "${versions[@]}"; do
    folder=$PWD/.tools/torch-$version
    if [[ ! -e $folder ]]; then
        echo "flce: fetching torch $version from PyPI into $folder"
        rm -rf "$folder.tmp"
        if ! "$python" -m pip install --quiet --target "$folder.tmp" "torch==$version" </dev/null; then
            failed+=("torch $version could not be fetched (see above)")
            continue
        fi
        mv "$folder.tmp" "$folder"
    fi
    mkdir -p "$work"
    # Direct calls have a process of their own: before 2.13 a process that has imported pipelining makes none.
    others=$(echo python/tests/test_{engine,compile,split_backward}*.py python/tests/test_pipeline.py)
    for tests in python/tests/test_direct.py "$others"; do
        read -ra files <<<"$tests"
        FLCE_TORCH=$folder FLCE_LIBRARY=$library FLCE_CACHE_DIR=$work/cache OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
            tools/python.sh -m pytest \
            -o cache_dir="$work/pytest" "${files[@]}" </dev/null || failed+=("tests have failed with torch $version: ${files[0]}, …")
    done
done
for line in ${failed[@]+"${failed[@]}"}; do echo "FAILED $line"; done
((${#failed[@]} == 0))
