#!/usr/bin/env bash
# One check of the Python package: a group of pytest's files (adapters, engine, ranks, engine_ranks, trainers, examples, jax, quantisers;
# core has all files that no other group names), nightly (what is marked so), typing (mypy and ruff) or wheel (built round a libflce that is
# there, installed by itself, used). Exit code 77 says that the interpreter of tools/python.sh lacks something for it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
check=${1:?usage: test_python.sh GROUP|nightly|typing|wheel LIBFLCE}
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

# Patterns of the files of each group, a core's work for some minutes.
declare -A groups=(
    [adapters]="compat* causal_lms huggingface* patch* lm_head"
    [engine]="engine*"
    [ranks]="tensor_parallel* pipeline compat_parallel"
    [engine_ranks]="engine_*_ranks"
    [trainers]="trl* torchtitan* megatron* zero3 sentence_transformers"
    [examples]="engine_examples* grpo_example retrieval_example distill_example"
    [jax]="jax*"
    [quantisers]="quantisers"
)
# A file is of the last of these groups that names it.
order=(adapters engine ranks engine_ranks trainers examples jax quantisers)
files_of() {
    local group pattern file
    declare -A found=()
    for file in "$root"/python/tests/test_*.py; do found[$file]=core; done
    for group in "${order[@]}"; do
        for pattern in ${groups[$group]}; do
            for file in "$root"/python/tests/test_$pattern.py; do found[$file]=$group; done
        done
    done
    for file in "${!found[@]}"; do
        if [[ ${found[$file]} == "$1" ]]; then echo "$file"; fi
    done | sort
}
pytest=("$python" -m pytest -o cache_dir="$work/pytest" --durations=0 --durations-min=1)
mkdir -p "$work"
case $check in
    core | adapters | engine | ranks | engine_ranks | trainers | examples | jax | quantisers)
        need torch pytest numpy
        if [[ $check == quantisers ]]; then export PYTHONPATH=$root/.tools/quantisers${PYTHONPATH:+:$PYTHONPATH}; fi
        if [[ $check == jax ]]; then
            export PYTHONPATH=$root/.tools/jax${PYTHONPATH:+:$PYTHONPATH}
            need jax flax optax scipy
        fi
        mapfile -t files < <(files_of "$check")
        # A thread a process: ctest runs a test a core.
        cd "$root" && OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "${pytest[@]}" "${files[@]}"
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
        "$python" -m mypy --cache-dir "$work/mypy" python/flce python/tests/typing_user_code.py
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
        interpreter=$("$python" -c 'import sys; print(sys.executable)')
        # Setup as pip's isolated builds run it in an activated environment, whose packages pip hides.
        isolated=$work/isolated
        rm -rf "$isolated" && mkdir -p "$isolated"/{root,site}
        cp -r "$root/tools" "$root/CMakeLists.txt" "$isolated/root/"
        "$interpreter" -m venv "$isolated/venv"
        echo 'import sys; sys.path = [each for each in sys.path if not each.endswith(("site-packages", "dist-packages"))]' \
            >"$isolated/site/sitecustomize.py"
        PATH=$isolated/venv/bin:$PATH PYTHONPATH=$isolated/site "$isolated/root/tools/setup.sh"
        rm -rf "$isolated"
        # Runs from elsewhere, on the installed package alone.
        added=$root/.tools/python
        cd / && unset FLCE_LIBRARY && PYTHONPATH="$work/site:$added" \
            "$interpreter" "$root/python/tests/installed_package.py" "$work/site" "$work/site/bin"
        ;;
    *) echo "unknown check: $check" >&2 && exit 2 ;;
esac
