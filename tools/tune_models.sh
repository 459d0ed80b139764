#!/usr/bin/env bash
# Measures the records that ship with the library, on the GPU of this machine: the output layers of eight well-known models.
#   tools/tune_models.sh PREFIX OUT COMMIT
# writes OUT/PREFIX-MODEL-TOKENS.json, for autotune/records. FLCE is the program (build/bin/flce), BUDGET_S the seconds for each of them, SECONDS_LEFT when to
# begin no more, TOKENS the numbers of tokens; ACCUMULATE=1 measures gradients that are added to, as those of tied layers are (…-accumulate-TOKENS.json).
# Compiling goes on beside the measuring, in as many processes as the machine has cores for.
set -euo pipefail
prefix=${1:?usage: tune_models.sh PREFIX OUT COMMIT} out=${2:?usage: tune_models.sh PREFIX OUT COMMIT} commit=${3:?usage: tune_models.sh PREFIX OUT COMMIT}
flce=${FLCE:-$(dirname "$0")/../build/bin/flce} budget=${BUDGET_S:-18} left=${SECONDS_LEFT:-3600} tokens=${TOKENS:-4096 8192}
models="
qwen3-1.7b D=2048,V=151936,dtype=bf16
llama-3-8b D=4096,V=128256,dtype=bf16
gemma-2-2b D=2304,V=256000,dtype=bf16,softcap=30
llama-3.2-1b D=2048,V=128256,dtype=bf16
qwen2.5-7b D=3584,V=152064,dtype=bf16
mistral-7b D=4096,V=32000,dtype=bf16
deepseek-v3 D=7168,V=129280,dtype=bf16
gpt-2 D=768,V=50257,dtype=bf16
"
if [[ ${ACCUMULATE:-} ]]; then models=$(sed -E 's/^([^ ]+) (.+)$/\1-accumulate \2,grad_weight_mode=accumulate/' <<<"$models"); fi
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
specs=()
while read -r name spec; do
    if [[ $name ]]; then specs+=(--spec "$spec"); fi
done <<<"$models"
nice "$flce" tune --compile-only --device cuda "${specs[@]}" >"$work/compile.log" 2>&1 &
compiling=$!
for n in $tokens; do
    while read -r name spec; do
        if [[ -z $name ]] || ((SECONDS + ${budget%.*} + 5 > left)); then continue; fi
        rm -rf "$work/records"
        "$flce" tune --spec "$spec" --num-tokens "$n" --device cuda --budget-s "$budget" --records-dir "$work/records" --commit "$commit" 2>/dev/null |
            grep -E "candidates,|times the best" || true
        find "$work/records" -name '*.json' -exec cp {} "$out/$prefix-$name-$n.json" \;
        echo "$prefix-$name-$n: done at $SECONDS s"
    done <<<"$models"
done
kill "$compiling" 2>/dev/null || true
wait "$compiling" 2>/dev/null || true
