"""Compiles each source of a build tree by itself, and keeps nothing: syntax.py BUILD_TREE [LEFT_OUT]. Commands are those of
compile_commands.json, without optimising; whether a folder is united, or a header precompiled, is the tree's affair. LEFT_OUT: a file with
the paths of sources that are not compiled."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def refused(entry: dict[str, Any]) -> str:
    """Runs the compiler and returns its messages; nothing where it is content."""
    command = shlex.split(entry["command"])
    at = command.index("-o")
    command[at : at + 2] = ["-O0", "-w", "-fsyntax-only"]
    ran = subprocess.run([word for word in command if word != "-c"], cwd=entry["directory"], capture_output=True, text=True, check=False)
    return f"{entry['file']} does not compile by itself:\n{ran.stderr}" if ran.returncode else ""


def main() -> None:
    left_out = {line for path in sys.argv[2:] for line in Path(path).read_text().splitlines()}
    entries = [entry for entry in json.loads((Path(sys.argv[1]) / "compile_commands.json").read_text()) if entry["file"] not in left_out]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [said for said in pool.map(refused, entries) if said]
    print(f"{len(entries)} sources, {len(faults)} of them do not compile by themselves")
    sys.exit("\n".join(faults) if faults else 0)


if __name__ == "__main__":
    main()
