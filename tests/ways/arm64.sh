#!/usr/bin/env bash
# Tries what `make wheel-arm64` made on another machine, and test_cpu and test_matrix of the same build, with qemu: arm64.sh CHECKOUT
# BUILD_TREE WORK_FOLDER. BUILD_TREE is this machine's, whose command makes the packs. Prints how many cases passed.
set -euo pipefail
checkout=$(realpath "${1:?usage: arm64.sh CHECKOUT BUILD_TREE WORK_FOLDER}")
tree=$(realpath "${2:?usage: arm64.sh CHECKOUT BUILD_TREE WORK_FOLDER}")
work=$(realpath "${3:?usage: arm64.sh CHECKOUT BUILD_TREE WORK_FOLDER}")
emulated=(qemu-aarch64-static -L "$checkout/.tools/portable-aarch64/sysroot")
flce=("${emulated[@]}" "$checkout/dist/aarch64/flce/bin/flce")
quietly() { "$@" >"$work/arm64.log" 2>&1 || { tail -n 50 "$work/arm64.log" >&2 && echo "failed: $*" >&2 && exit 1; }; }

# ── The wheel holds this library and no other machine's.
mkdir "$work/wheel"
(cd "$work/wheel" && python3 -m zipfile -e "$checkout"/dist/flce-*-manylinux_2_28_aarch64.whl .)
mapfile -t libraries < <(find "$work/wheel" -name 'libflce*.so*' -type f)
((${#libraries[@]}))
for library in "${libraries[@]}"; do readelf -h "$library" | grep -q AArch64; done

# ── Every output against fp64, by NEON code that LLVM makes there.
export FLCE_CACHE_DIR=$work/arm64-cache FLCE_DEVICE=cpu
specs=(D=64,V=500,dtype=fp32 D=96,V=1001,dtype=bf16,bias,softcap=30 D=72,V=777,dtype=fp16,layout=hidden_major,label_smoothing=0.1
    D=256,V=2000,dtype=bf16,weight_dtype=fp32,grad_weight_mode=accumulate,class_weight)
for spec in "${specs[@]}"; do quietly "${flce[@]}" check --spec "$spec" --num-tokens 65; done

# ── Packs that are made here are complete there: a CPU's kernels run strictly, a GPU's cubins and launchers are all found.
pack=$work/both.flcepack
devices=(--device aarch64 --device sm_90a --device sm_121)
FLCE_CACHE_DIR=$work/here quietly "$tree/bin/flce" prewarm --spec "${specs[1]}" "${devices[@]}" --out "$pack"
export FLCE_NO_DISK_CACHE=1 FLCE_CACHE_PACKS=$pack FLCE_NVRTC=none FLCE_STRICT=1
quietly "${flce[@]}" prewarm --spec "${specs[1]}" "${devices[@]}" --check
quietly "${flce[@]}" check --spec "${specs[1]}" --num-tokens 65 --device aarch64
if "${flce[@]}" check --spec "${specs[0]}" --device aarch64 >"$work/arm64.log" 2>&1; then
    echo "a kernel that the pack has not was compiled in strict mode" >&2 && exit 1
fi
unset FLCE_NO_DISK_CACHE FLCE_CACHE_PACKS FLCE_NVRTC FLCE_STRICT

# ── Tests of the CPU backend, and a sample of the matrix of options, dtypes and layouts.
export FLCE_TEST_LEVEL=quick FLCE_TEST_CACHE=$work/arm64-kernels
export GTEST_TOTAL_SHARDS=1 GTEST_SHARD_INDEX=0
(cd "$work" && quietly "${emulated[@]}" "$checkout/build-dist-aarch64/bin/test_cpu" '--gtest_filter=-*Gpu*')
echo "test_cpu: $(grep -oE '[0-9]+ tests\.' "$work/arm64.log" | tail -n 1) passed under qemu"
export GTEST_TOTAL_SHARDS=${FLCE_ARM64_SHARDS:-12} # one of so many parts of the matrix
(cd "$work" && quietly "${emulated[@]}" "$checkout/build-dist-aarch64/bin/test_matrix" '--gtest_filter=-*Gpu*')
echo "test_matrix: $(grep -oE '[0-9]+ tests\.' "$work/arm64.log" | tail -n 1) passed under qemu"
