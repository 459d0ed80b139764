#!/usr/bin/env bash
# Everything that several GPUs of one host have to show, in some ten minutes: the ranks' tests over NCCL with a GPU each, the examples,
# then the benchmarks one after another, with nothing beside them. NVLink multicast stays off.
#
#     tools/several_gpus.sh FOLDER [PART...]
#
# FOLDER gets a log of each part and the benchmarks' JSON; with names of parts only these run. CUDA_VISIBLE_DEVICES chooses GPUs (default:
# all); COMMIT is what the figures are of, where this is no clone. Ends with a line a part, and with 1 if one failed. Needs a libflce
# (FLCE_LIBRARY, or a build tree) and a Python with torch (FLCE_PYTHON, as tools/python.sh has it); where jax or liger-cute-kernels is
# installed it is measured too.
set -uo pipefail
if (($# == 0)) || [[ $1 == -* ]]; then
    echo "usage: tools/several_gpus.sh FOLDER [PART...]; the script's first lines say what it runs" >&2
    exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd) || exit 2
python=$root/tools/python.sh
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') ||
    { echo "several_gpus.sh: $python finds no torch; FLCE_PYTHON names a Python that has it" >&2 && exit 2; }
((gpus >= 2)) || { echo "several_gpus.sh: $gpus GPUs here; it takes 2 or more" >&2 && exit 2; }
capability=$("$python" -c 'import torch; print(torch.cuda.get_device_capability())')
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
parts=("${@:2}")
cd "$root" || exit 2
python=tools/python.sh
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 NVSHMEM_REMOTE_TRANSPORT=none
export OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1
export FLCE_CACHE_DIR=${FLCE_CACHE_DIR:-$out/cache}

# run PART SECONDS COMMAND...: its log, and its result.
run() {
    local name=$1 seconds=$2 status=0 begin=$SECONDS
    shift 2
    [[ ${#parts[@]} == 0 || " ${parts[*]} " == *" $name "* ]] || return 0
    timeout --kill-after=10 "$seconds" "$@" >"$out/$name.log" 2>&1 || status=$?
    echo "$status $((SECONDS - begin))" >"$out/$name.status"
}
ranks() { run "$1" "$2" "$python" -m torch.distributed.run --standalone --nproc-per-node="$gpus" "${@:3}"; }

# A test's worker, PART_worker.py, and its limit in seconds.
worker() { FLCE_TEST_RANKS_ON=cuda ranks "$1" "$2" "python/tests/$1_worker.py"; }

rm -f "$out"/*.status
echo "tests of ranks over NCCL, $gpus GPUs" >&2
worker tensor_parallel 270 &
worker tensor_parallel_property 270 &
{
    worker tensor_parallel_nccl 60
    worker tensor_parallel_heads 150
    [[ $capability != "(9, 0)" ]] || worker tensor_parallel_fp8 60  # an FP8 head's GPUs
    worker compat_parallel 150
    worker engine 60
} &
{
    worker tensor_parallel_compile 80
    worker schedules 60
    worker pipeline 60
    worker tensor_parallel_docs 40
    worker tensor_parallel_layouts 40
    worker tensor_parallel_direct 120
    worker tensor_parallel_direct_ways 60
} &
wait
worker tensor_parallel_receive 90
((gpus != 4)) || worker lm_head_mesh 90

echo "examples" >&2
run pipeline_1f1b 60 "$python" examples/pipeline_last_stage.py --tiny &
run pipeline_zbv 60 "$python" examples/pipeline_last_stage.py --tiny --schedule zbv &
wait
ranks example_tensor_parallel 60 examples/tensor_parallel.py --shape 4096x2048x151936

echo "benchmarks" >&2
of=(--commit "${COMMIT:-}")
ranks bench_tensor_parallel 150 benchmarks/tensor_parallel.py "${of[@]}" --rounds 16 --timeline --out "$out/tensor-parallel.json"
ranks bench_beside_nccl 60 benchmarks/beside_nccl.py "${of[@]}" --out "$out/beside-nccl.json"
ranks bench_tensor_parallel_calls 100 benchmarks/tensor_parallel_calls.py "${of[@]}" --out "$out/tensor-parallel-calls.json"
if "$python" -c 'import jax' 2>/dev/null; then
    run bench_jax_mesh 100 "$python" benchmarks/jax_mesh.py "${of[@]}" --out "$out/jax-mesh.json"
fi
if "$python" -c 'import liger_cute_kernels, liger_kernel' 2>/dev/null; then
    ranks bench_liger 60 benchmarks/tensor_parallel.py "${of[@]}" --contenders floor6 "floor6, reduced" "flce, retained" liger \
        --shapes 8192x4096x128256 4096x2048x151936 --out "$out/tensor-parallel-liger.json"
fi

failed=0
for status in "$out"/*.status; do
    read -r code seconds <"$status"
    name=$(basename "$status" .status)
    said=$(grep -hE 'cases passed|^flce: loss' "$out/$name.log" | tail -n 1)
    printf '%-28s %-10s %4d s  %s\n' "$name" "$([[ $code == 0 ]] && echo passed || echo "FAILED $code")" "$seconds" "$said"
    [[ $code == 0 ]] || { failed=1 && tail -n 12 "$out/$name.log" | cut -c1-300; }
done
grep -hE '^ *(floor|flce|loss_parallel|one GPU|liger|linear_|all retained|info_nce|vocabulary|tokens)|^[0-9]+x|^\|' "$out"/bench_*.log
exit $failed
