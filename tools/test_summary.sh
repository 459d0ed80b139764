#!/usr/bin/env bash
# After the tests of several build trees: what was skipped and why, what failed and the end of what it printed, then the closing line of
# each tree's ctest.
set -euo pipefail
cd "$(dirname "$0")/.."
for tree in "$@"; do
    # GoogleTest prints the reason of a skip on the line after the place that skipped.
    reasons=$(grep -A1 -E ': Skipped$' "$tree/Testing/Temporary/LastTest.log" | grep -vE ': Skipped$|^--$' | sort | uniq -c || true)
    reasons+=$(grep -hE '^SKIPPED \[' "$tree/Testing/Temporary/LastTest.log" | sed -E 's/^SKIPPED \[([0-9]+)\] [^ ]+ /\1 /' |
        awk '{ count = $1; $1 = ""; total[$0] += count } 
             END { for (reason in total) printf "\n%7d %s (python)", total[reason], reason }' || true)
    if [[ $reasons ]]; then printf 'skipped in %s (tests, reason):\n%s\n' "$tree" "$reasons"; fi
done
# ctest prints a failed test's output where it ran, hundreds of lines above the end; who reads only the end of a log finds it here.
# ctest leaves the list of an earlier run's failures where there were none.
lines=60
for tree in "$@"; do
    [[ -s $tree/Testing/Temporary/LastTestsFailed.log ]] || continue
    ! grep -qE '^[0-9]+% tests passed, 0 tests failed' "$tree/ctest.log" || continue
    cut -d: -f2- "$tree/Testing/Temporary/LastTestsFailed.log" | head -n 10 | while IFS= read -r name; do
        printf '%s: %s failed; the last %d lines of its output:\n' "$tree" "$name" "$lines"
        awk -v command="\"$name\" start time:" -v over="\"$name\" end time:" \
            'index($0, over) == 1 { show = 0 } show && !/^SKIPPED \[/ { print "  " $0 } index($0, command) == 1 { show = 1 }' \
            "$tree/Testing/Temporary/LastTest.log" | tail -n "$lines"
    done
done
for tree in "$@"; do
    printf '%s: %s\n' "$tree" "$(grep -E '^[0-9]+% tests passed' "$tree/ctest.log" 2>/dev/null || echo 'its tests did not end')"
done
