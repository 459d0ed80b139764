"""Compiles each source of a build tree by itself, and keeps nothing: syntax.py BUILD_TREE [CHECKOUT]. Commands are those of
compile_commands.json, without optimising; whether a folder is united, or a header precompiled, is the tree's affair. With a checkout only
sources are compiled that changed in it within eight hours, or that include a header which lost an include of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

INCLUDE = re.compile(r'#include [<"]([^">]+)[">]')


def git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True).stdout


def changed(checkout: Path) -> tuple[set[str], set[str]]:
    """Paths of what changed, and names of headers that lost an include, by git's history and what is not committed."""
    differences = git(checkout, "log", "--since=8 hours ago", "-p", "--format=") + git(checkout, "diff", "HEAD")
    paths, lost = set(git(checkout, "ls-files", "--others", "--exclude-standard").splitlines()), set()
    path = ""
    for line in differences.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
            paths.add(path)
        elif line.startswith("-#include ") and path.endswith((".h", ".hpp")):
            lost.add(Path(path).name)
    return paths, lost


def is_of_late(source: Path, checkout: Path, paths: set[str], lost: set[str]) -> bool:
    if not source.is_relative_to(checkout) or str(source.relative_to(checkout)) in paths:
        return True
    return any(Path(name).name in lost for name in INCLUDE.findall(source.read_text(encoding="utf-8")))


def refused(entry: dict[str, Any]) -> str:
    """Runs the compiler and returns its messages; nothing where it is content."""
    command = shlex.split(entry["command"])
    at = command.index("-o")
    command[at : at + 2] = ["-O0", "-w", "-fsyntax-only"]
    ran = subprocess.run([word for word in command if word != "-c"], cwd=entry["directory"], capture_output=True, text=True, check=False)
    return f"{entry['file']} does not compile by itself:\n{ran.stderr}" if ran.returncode else ""


def main() -> None:
    entries = json.loads((Path(sys.argv[1]) / "compile_commands.json").read_text())
    total = len(entries)
    for checkout in map(Path, sys.argv[2:]):
        of_late = changed(checkout)
        entries = [entry for entry in entries if is_of_late(Path(entry["file"]), checkout, *of_late)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [said for said in pool.map(refused, entries) if said]
    print(f"{len(entries)} of {total} sources, {len(faults)} of them do not compile by themselves")
    sys.exit("\n".join(faults) if faults else 0)


if __name__ == "__main__":
    main()
