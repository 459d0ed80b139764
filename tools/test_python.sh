#!/usr/bin/env bash
# One check of the Python package: tests (pytest), ranks (those of them that start process groups), nightly (those that take long), typing
# (mypy and ruff) or wheel (built round a libflce that is there, installed by itself, used). Exit code 77 says that the interpreter of
# tools/python.sh lacks something for it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
check=${1:?usage: test_python.sh tests|ranks|nightly|typing|wheel LIBFLCE}
library=$(readlink -f "${2:?usage: test_python.sh CHECK LIBFLCE}")
work=$PWD/python-$check
export FLCE_LIBRARY=$library FLCE_CACHE_DIR=$work/cache
python=$root/tools/python.sh

need() {
    if ! "$python" -c "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(m) is None for m in sys.argv[1:]))" "$@"; then
        echo "SKIPPED [1] python.$check: $* not found; tools/setup.sh --python installs them"
        exit 77
    fi
}

of_ranks=("$root"/python/tests/test_{pipeline,compat_parallel,trl_ranks,torchtitan,zero3}.py
    "$root"/python/tests/test_{tensor_parallel,megatron}*.py "$root"/python/tests/test_engine_*_ranks.py)
pytest=("$python" -m pytest -o cache_dir="$work/pytest" --durations=30 --durations-min=3)
mkdir -p "$work"
case $check in
    tests)
        need torch pytest numpy
        # A thread a process: ctest runs a test a core.
        cd "$root" && OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "${pytest[@]}" "${of_ranks[@]/#/--ignore=}" python/tests
        ;;
    ranks)
        need torch pytest numpy
        cd "$root" && exec "${pytest[@]}" "${of_ranks[@]}"
        ;;
    nightly)
        need torch pytest numpy transformers
        cd "$root" && OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "${pytest[@]}" -m nightly python/tests
        ;;
    typing)
        need torch mypy ruff
        cd "$root"
        "$python" -m ruff check --cache-dir "$work/ruff" python examples
        "$python" -m ruff format --check --cache-dir "$work/ruff" python examples
        "$python" -m mypy --cache-dir "$work/mypy"
        "$python" -m mypy --cache-dir "$work/mypy" --warn-unused-ignores python/tests/typing_user_code.py
        ;;
    wheel)
        need torch scikit_build_core
        rm -rf "$work"/{libraries,wheels,site,build}
        mkdir -p "$work/libraries"
        ln -s "$library" "$work/libraries/libflce.so"
        (cd "$root" && "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/wheels" \
            --config-settings build-dir="$work/build" --config-settings cmake.define.FLCE_WHEEL_LIBRARIES="$work/libraries" .)
        wheel=$(echo "$work"/wheels/flce-*.whl)
        [[ $wheel == *-py3-none-linux_*.whl ]] || { echo "unexpected wheel: $wheel" >&2 && exit 1; }
        "$python" -m pip install --quiet --no-deps --no-index --target "$work/site" "$wheel"
        # From elsewhere, on the installed package alone.
        added=$root/.tools/python
        interpreter=$("$python" -c 'import sys; print(sys.executable)')
        cd / && unset FLCE_LIBRARY && PYTHONPATH="$work/site:$added" "$interpreter" "$root/python/tests/installed_package.py" "$work/site"
        ;;
    *) echo "unknown check: $check" >&2 && exit 2 ;;
esac
