#!/usr/bin/env bash
# Summary after the tests of several build trees: skipped tests with reasons, the slowest tests, failed cases with their output, then the
# closing line of each tree's ctest.
set -euo pipefail
cd "$(dirname "$0")/.."
for tree in "$@"; do
    # GoogleTest prints the reason of a skip on the line after the place that skipped.
    reasons=$(grep -A1 -E ': Skipped$' "$tree/Testing/Temporary/LastTest.log" | grep -vE ': Skipped$|^--$' | sort | uniq -c || true)
    reasons+=$(grep -hE '^SKIPPED \[' "$tree/Testing/Temporary/LastTest.log" | sed -E 's/^SKIPPED \[([0-9]+)\] [^ ]+ /\1 /' |
        awk '{ count = $1; $1 = ""; total[$0] += count } 
             END { for (reason in total) printf "\n%7d %s (python)", total[reason], reason }' || true)
    # ctest has no test of the suites for a GPU where there is none.
    if [[ ! -e /dev/nvidiactl && ! -e /dev/dxg ]]; then
        gpu=0 suites=$(sed -nE 's/^set\(gpu_suites "(.*)"\)$/\1/p' tests/CMakeLists.txt)
        for name in $(grep -oE '^"[a-z_]+\.1of[0-9]+" start' "$tree/Testing/Temporary/LastTest.log" | sed -E 's/^"([a-z_]+)\..*/\1/'); do
            gpu=$((gpu + $("$tree/bin/test_$name" --gtest_list_tests --gtest_filter="$suites" | grep -c '^  ' || true)))
        done
        if ((gpu)); then reasons+=$(printf '\n%7d no GPU here: suites for one are run by tools/gpu_tests.py' "$gpu"); fi
    fi
    if [[ $reasons ]]; then printf 'skipped in %s (tests, reason):\n%s\n' "$tree" "$reasons"; fi
done
python3 tools/slow_tests.py "$@"
# ctest prints a failed test's output where it ran, hundreds of lines above the end; who reads only the end of a log finds it here.
# ctest leaves the list of an earlier run's failures where there were none.
lines=60
for tree in "$@"; do
    [[ -s $tree/Testing/Temporary/LastTestsFailed.log ]] || continue
    ! grep -qE '^[0-9]+% tests passed, 0 tests failed' "$tree/ctest.log" || continue
    cut -d: -f2- "$tree/Testing/Temporary/LastTestsFailed.log" | head -n 10 | while IFS= read -r name; do
        printf '%s: %s failed; the last %d lines of its output, or of each failed case of its:\n' "$tree" "$name" "$lines"
        # Google Test's failed cases, and the one that a process died or was ended in; all of other tests.
        awk -v command="\"$name\" start time:" -v over="\"$name\" end time:" -v most="$lines" '
            function print_end(  i) { for (i = count > most ? count - most : 0; i < count; i++) print "  " line[i] }
            index($0, over) == 1 { show = 0 }
            !show { if (index($0, command) == 1) show = 1; next }
            /^SKIPPED \[/ { next }
            /^\[ RUN      \] / { count = 0; within = 1 }
            { line[count++] = $0 }
            within && /^\[ +(OK|FAILED|SKIPPED) +\] .*\([0-9]+ ms\)$/ {
                if (/FAILED/ && shown++ < 10) print_end()
                count = within = 0
            }
            END { if (!shown || within) print_end() }' "$tree/Testing/Temporary/LastTest.log"
    done
done
for tree in "$@"; do
    printf '%s: %s\n' "$tree" "$(grep -E '^[0-9]+% tests passed' "$tree/ctest.log" 2>/dev/null || echo 'its tests did not end')"
done
