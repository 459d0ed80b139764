#!/usr/bin/env bash
# After the tests of several build trees: what was skipped and why, then the closing line of each tree's ctest.
set -euo pipefail
cd "$(dirname "$0")/.."
for tree in "$@"; do
    # GoogleTest prints the reason of a skip on the line after the place that skipped.
    reasons=$(grep -A1 -E ': Skipped$' "$tree/Testing/Temporary/LastTest.log" | grep -vE ': Skipped$|^--$' | sort | uniq -c || true)
    reasons+=$(grep -hE '^SKIPPED \[' "$tree/Testing/Temporary/LastTest.log" | sed -E 's/^SKIPPED \[([0-9]+)\] [^ ]+ /\1 /' |
        awk '{ count = $1; $1 = ""; total[$0] += count } END { for (reason in total) printf "\n%7d %s (python)", total[reason], reason }' || true)
    if [[ $reasons ]]; then printf 'skipped in %s (tests, reason):\n%s\n' "$tree" "$reasons"; fi
done
for tree in "$@"; do
    printf '%s: %s\n' "$tree" "$(grep -E '^[0-9]+% tests passed' "$tree/ctest.log")"
done
