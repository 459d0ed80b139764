#!/usr/bin/env bash
# Measures the records that ship with the library, on the GPU of this machine: the output layers of eight well-known models.
#   tools/tune_models.sh PREFIX OUT COMMIT
# writes OUT/PREFIX-MODEL-TOKENS.json, for records/shipped. FLCE is the program (build/bin/flce), BUDGET_S the seconds for each of them,
# SECONDS_LEFT when to begin no more, TOKENS the numbers of tokens; ACCUMULATE=1 measures gradients that are added to, as those of tied
# layers are (…-accumulate-TOKENS.json); DEVICE and MODELS (lines of a name and a spec) are for trying it.
# Kernels are compiled a layer at a time, ahead of the measuring and on the cores that it leaves: a layer is measured when all of its own
# are there.
set -euo pipefail
prefix=${1:?usage: tune_models.sh PREFIX OUT COMMIT} out=${2:?usage: tune_models.sh PREFIX OUT COMMIT}
commit=${3:?usage: tune_models.sh PREFIX OUT COMMIT}
flce=${FLCE:-$(dirname "$0")/../build/bin/flce} budget=${BUDGET_S:-18} left=${SECONDS_LEFT:-3600}
tokens=${TOKENS:-4096 8192} device=${DEVICE:-cuda}
models=${MODELS:-"
qwen3-1.7b D=2048,V=151936,dtype=bf16
llama-3-8b D=4096,V=128256,dtype=bf16
gemma-2-2b D=2304,V=256000,dtype=bf16,softcap=30
llama-3.2-1b D=2048,V=128256,dtype=bf16
qwen2.5-7b D=3584,V=152064,dtype=bf16
mistral-7b D=4096,V=32000,dtype=bf16
deepseek-v3 D=7168,V=129280,dtype=bf16
gpt-2 D=768,V=50257,dtype=bf16
"}
if [[ ${ACCUMULATE:-} ]]; then models=$(sed -E 's/^([^ ]+) (.+)$/\1-accumulate \2,grad_weight_mode=accumulate/' <<<"$models"); fi
mkdir -p "$out"
work=$(mktemp -d)

compile_all() {
    trap 'kill "${pid:-}" 2>/dev/null; exit 0' TERM
    for n in $tokens; do
        while read -r name spec; do
            if [[ -z $name ]]; then continue; fi
            nice "$flce" tune --compile-only --spec "$spec" --num-tokens "$n" --device "$device" >"$work/$name-$n.log" 2>&1 &
            pid=$!
            wait "$pid" || true  # a plan that does not compile says so when it is measured
            touch "$work/$name-$n.compiled"
        done <<<"$models"
    done
}
compile_all &
compiling=$!
trap 'kill "$compiling" 2>/dev/null || true; wait "$compiling" 2>/dev/null || true; rm -rf "$work"' EXIT

too_late() { ((SECONDS + ${budget%.*} + 5 > left)); }
# Returns when the kernels of a layer are there, or there is no time for it left.
await_kernels() {
    local waited=0
    while [[ ! -e $work/$1.compiled ]] && ! too_late; do
        if ((waited++ % 50 == 0)); then echo "$1: compiling at $SECONDS s, $(tail -n 1 "$work/$1.log" 2>/dev/null || true)"; fi
        sleep 0.2
    done
    if ((waited)); then echo "$1: compiled at $SECONDS s, $(tail -n 1 "$work/$1.log" 2>/dev/null || true)"; fi
}

for n in $tokens; do
    while read -r name spec; do
        if [[ -z $name ]]; then continue; fi
        await_kernels "$name-$n"
        if too_late; then continue; fi
        rm -rf "$work/records"
        "$flce" tune --spec "$spec" --num-tokens "$n" --device "$device" --budget-s "$budget" --records-dir "$work/records" \
            --commit "$commit" 2>/dev/null |
            grep -E "candidates,|times the best" || true
        find "$work/records" -name '*.json' -exec cp {} "$out/$prefix-$name-$n.json" \;
        echo "$prefix-$name-$n: done at $SECONDS s"
    done <<<"$models"
done
