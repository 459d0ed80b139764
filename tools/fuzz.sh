#!/usr/bin/env bash
# Builds the fuzzers (build-fuzz, clang++ of CXX or clang++-19) and runs each for SECONDS, one after another; findings lie in
# build-fuzz/findings, logs beside them. Prints what libFuzzer reports at the end: executions, edges covered (cov).
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
    log=build-fuzz/log-$reader.txt
    build-fuzz/bin/fuzz_"$reader" -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=10 -reload=0 -dict=tests/fuzz/readers.dict \
        -print_final_stats=1 -artifact_prefix=build-fuzz/findings/"$reader"- "$corpus" "${kept[@]}" >"$log" 2>&1 ||
        { tail -n 50 "$log"; exit 1; }
    grep -E '^#[0-9]+\s+DONE|^stat::' "$log"
done
