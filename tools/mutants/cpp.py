#!/usr/bin/env python3
"""Puts faults into the C++ code that guards everything else, one at a time, and counts those that a test finds.

    tools/mutants/cpp.py check               every edit of cpp.toml applies still
    tools/mutants/cpp.py run BUILD [PART…]   the faults of these parts, or of all, against a build tree that is up to date

A fault is an edit of a source file's copy. The copy is compiled by itself, with the flags that the tree's own compile commands have, into a
library that is preloaded before a test binary: its functions stand in for those of libflce_internals. The checkout and the tree stay
untouched, and a fault costs one compile and the tests named for it. An unchanged copy of each file is tried first.

Exit code 1: of a part fewer than nine of ten faults were found, one listed as changing nothing was found, an edit does not apply, or
tests fail without a fault.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("cpp.toml")
LEAST_SCORE = 0.9


@dataclass
class Edit:
    """One fault."""

    part: str
    path: str
    test: str  # "PART:GTEST_FILTER", one or several
    sources: list[str]  # files to compile: the file itself, or those that include it
    find: str
    replace: str
    equivalent: str  # why no test can find it; empty: one has to

    def apply(self) -> str:
        text = (ROOT / self.path).read_text()
        if text.count(self.find) != 1:
            raise LookupError(f"{self.path}: {self.find!r} is there {text.count(self.find)} times, not once")
        return text.replace(self.find, self.replace)

    def __str__(self) -> str:
        return f"{self.path}: {self.find!r} -> {self.replace!r}"


def edits() -> list[Edit]:
    found = []
    for group in tomllib.loads(LIST.read_text())["file"]:
        for find, replace, *rest in group["edits"]:
            options = rest[0] if rest else {}
            found.append(
                Edit(
                    group["part"],
                    group["path"],
                    options.get("test", group["test"]),
                    group.get("sources", [group["path"]]),
                    find,
                    replace,
                    options.get("equivalent", ""),
                )
            )
    return found


def check(all_edits: list[Edit]) -> int:
    faults = []
    for edit in all_edits:
        try:
            if edit.apply() == (ROOT / edit.path).read_text():
                faults.append(f"{edit}: changes nothing")
        except (LookupError, OSError) as error:
            faults.append(str(error))
    print(*faults, f"{len(all_edits)} edits, {len(faults)} of them do not apply", sep="\n")
    return 1 if faults else 0


class Tree:
    """A build tree, whose compile commands say how the library's sources are compiled."""

    def __init__(self, build: Path) -> None:
        self.build = build
        commands = json.loads((build / "compile_commands.json").read_text())
        self.command = next(c for c in commands if "/flce_code.dir/" in c["command"] and "cmake_pch" not in c["file"])

    def compile(self, source: Path, overlay: Path, to: Path) -> str:
        """Into an object; what the compiler says where it fails."""
        words = shlex.split(self.command["command"])
        if "ccache" in words[0]:
            words = words[1:]
        flags = []
        skip = False
        for word in words:
            if not skip and word not in ("-o", "-c"):
                flags.append(word)
            skip = word in ("-o", "-c")
        made = [flags[0], f"-I{overlay}", *flags[1:], "-O1", "-w", "-o", str(to), "-c", str(source)]
        result = subprocess.run(made, cwd=self.command["directory"], capture_output=True, text=True, check=False)
        return result.stderr[-2000:] if result.returncode else ""

    def library(self, edit: Edit, text: str, folder: Path) -> tuple[Path, str]:
        """The library of the file with this text, and why there is none."""
        changed = folder / "overlay" / edit.path
        changed.parent.mkdir(parents=True)
        changed.write_text(text)
        objects = []
        for i, source in enumerate(edit.sources):
            objects.append(folder / f"{i}.o")
            error = self.compile(changed if source == edit.path else ROOT / source, folder / "overlay", objects[-1])
            if error:
                return folder, error
        library = folder / "fault.so"
        subprocess.run(["c++", "-shared", "-o", str(library), *map(str, objects)], check=True)
        return library, ""

    def test(self, edit: Edit, library: Path, folder: Path, limit_s: float) -> bool:
        """Whether the edit's tests pass."""
        work = folder / "work"
        work.mkdir()
        environment = os.environ | {
            "LD_PRELOAD": str(library),
            "FLCE_TEST_CACHE": str(work / "kernels"),
            "FLCE_CACHE_DIR": str(work / "cache"),
            "TMPDIR": str(work),
            "FLCE_TEST_LEVEL": "quick",  # a fault that no case of a kind finds has no test, only repetitions
        }
        for test in edit.test.split():
            part, tests = test.split(":", 1)
            command = [self.build / "bin" / f"test_{part}", f"--gtest_filter={tests}", "--gtest_fail_fast"]
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            try:
                result = subprocess.run(command, cwd=work, env=environment, timeout=limit_s, check=False, **output)
            except subprocess.TimeoutExpired:
                return False
            if result.returncode != 0 or b"PASSED  ] 0 tests" in result.stdout:
                return False
        return True


def attempt(tree: Tree, edit: Edit, text: str, limit_s: float) -> str:
    """ "found", "not found", or what the compiler says."""
    folder = Path(tempfile.mkdtemp(prefix="flce-fault-"))
    try:
        library, error = tree.library(edit, text, folder)
        return f"does not compile: {error}" if error else "not found" if tree.test(edit, library, folder, limit_s) else "found"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(build: Path, parts: list[str]) -> int:
    tree = Tree(build)
    chosen = [edit for edit in edits() if not parts or edit.part in parts]
    began = time.monotonic()
    unchanged = {(edit.path, edit.test): edit for edit in chosen}
    with ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count() or 1))) as pool:
        first = pool.map(lambda edit: attempt(tree, edit, (ROOT / edit.path).read_text(), 300), unchanged.values())
        for edit, outcome in zip(unchanged.values(), first, strict=True):
            if outcome != "not found":
                print(f"{edit.path} as it is: its tests, {edit.test}, do not pass, or nothing is run: {outcome}")
                return 1
        outcomes = []
        for edit, outcome in zip(chosen, pool.map(lambda edit: attempt(tree, edit, edit.apply(), 120), chosen), strict=True):
            outcomes.append(outcome)
            if outcome != "found" and not edit.equivalent:
                print(f"{outcome}: {edit}", flush=True)
    wrong = False
    for part in dict.fromkeys(edit.part for edit in chosen):
        of_part = [(edit, outcome) for edit, outcome in zip(chosen, outcomes, strict=True) if edit.part == part]
        counted = [outcome == "found" for edit, outcome in of_part if not edit.equivalent]
        print(f"{part:<28} {sum(counted)} of {len(counted)} found, {len(of_part) - len(counted)} change nothing")
        wrong = wrong or sum(counted) < LEAST_SCORE * len(counted)
        for edit, outcome in of_part:
            if edit.equivalent and outcome == "found":
                wrong = True
                print(f"found, though listed as one that changes nothing: {edit}")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def main() -> int:
    match sys.argv[1:]:
        case ["check"]:
            return check(edits())
        case ["run", build, *parts]:
            return run(Path(build).resolve(), parts)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
