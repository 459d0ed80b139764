#!/usr/bin/env bash
# Configures a preset's build tree, once: CMake itself reconfigures when its files change.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:?usage: configure.sh PRESET}
shift
case $preset in release | ci) tree=build ;; *) tree=build-$preset ;; esac
stamp="$preset $*"
if [[ ! -f $tree/build.ninja || $(cat "$tree/.preset" 2>/dev/null) != "$stamp" ]]; then
    cmake --preset "$preset" "$@"
    echo "$stamp" >"$tree/.preset"
fi
