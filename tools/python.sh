#!/usr/bin/env bash
# Runs the Python that has torch: FLCE_PYTHON, else that of an active virtual environment, else python3; with python/, what tools/setup.sh
# --python fetched (.tools/python, .tools/trainers) and the build tree's libflce. FLCE_TORCH is a folder with another torch than that one's.
# Arguments are the interpreter's.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${FLCE_PYTHON:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}}
export PYTHONPATH="$root/python${FLCE_TORCH:+:$FLCE_TORCH}:$root/.tools/python:$root/.tools/trainers${PYTHONPATH:+:$PYTHONPATH}"
export FLCE_LIBRARY=${FLCE_LIBRARY:-$root/build/lib/libflce.so}
exec "${python:-python3}" "$@"
