#!/usr/bin/env bash
# Builds the fuzzers (build-fuzz, clang++ of CXX or clang++-19) and runs each for SECONDS, one after another; findings lie in build-fuzz/findings.
#   tools/fuzz.sh [SECONDS] [READER…]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-600}
shift || true
readers=("${@:-entry pack record spec hf_config plan safetensors}")
[[ -f build-fuzz/build.ninja ]] || cmake -G Ninja -S . -B build-fuzz -DCMAKE_BUILD_TYPE=RelWithDebInfo -DFLCE_FUZZ=ON \
    -DCMAKE_C_COMPILER="${CC:-clang-19}" -DCMAKE_CXX_COMPILER="${CXX:-clang++-19}"
cmake --build build-fuzz --target fuzzers
mkdir -p build-fuzz/findings
for reader in ${readers[@]}; do
    corpus=build-fuzz/corpus/$reader
    mkdir -p "$corpus"
    build-fuzz/bin/fuzz_"$reader" --seeds "$corpus"
    kept=()
    [[ -d tests/fuzz/corpus/$reader ]] && kept=("tests/fuzz/corpus/$reader")
    echo "== $reader"
    build-fuzz/bin/fuzz_"$reader" -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=10 -print_final_stats=1 -verbosity=0 \
        -artifact_prefix=build-fuzz/findings/"$reader"- "$corpus" "${kept[@]}"
done
