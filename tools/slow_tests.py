#!/usr/bin/env python3
"""Prints the slowest tests of build trees whose ctest has run, and names those that are slow without a reason.

    python3 tools/slow_tests.py build [build-sanitize ...]

A test is a case of Google Test or pytest, or what ctest runs where that has no cases. In a quick run none takes more than 20 s, or a
twentieth of a run that lasts longer than 400 s, so that a slow machine is not at fault: what does stands in the table below with its
reason, or gets a smaller form in quick and keeps its length in full or nightly (CONTRIBUTING.md, "Levels"). A time fails no run: that is
left to who reads the names at its end.
"""

import os
import pathlib
import re
import sys

LISTED = 20
LIMIT_SECONDS = 20.0
LARGEST_SHARE = 1 / 20
# Slow in a quick run: the beginning of a name, and why it is worth its time.
ALLOWED = {
    "python.typing": "mypy reads torch's types, for the package and for a user's code",
    "python.ranks: python/tests/test_tensor_parallel.py::test_compiled_and_dtensors": "compiles graphs, on two ranks",
    "python.ranks: python/tests/test_compat_parallel.py::test_slices_equal_the_whole_layer": "compiles graphs; its server imports for all",
    "python.engine_ranks: python/tests/test_engine_failures_ranks.py": "waits until ranks notice that another is gone",
}

BLOCK = re.compile(r'^"(?P<name>[^"]+)" start time: .*?^Test time = +(?P<seconds>[\d.]+) sec', re.MULTILINE | re.DOTALL)
GTEST_CASE = re.compile(r"^\[ +(?:OK|FAILED) +\] (\S+?\.\S+?)(?:, where .*?)? \((\d+) ms\)$", re.MULTILINE)
PYTEST_CASE = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +(\S.*)$", re.MULTILINE)


def cases_of(log):
    """{name: seconds} of every case in a LastTest.log."""
    seconds = {}
    for block in BLOCK.finditer(log):
        part = re.sub(r"\.\d+of\d+$", "", block["name"])
        cases = [(f"{part}: {name}", int(ms) / 1000) for name, ms in GTEST_CASE.findall(block[0])]
        cases += [(f"{part}: {name.strip()}", float(took)) for took, name in PYTEST_CASE.findall(block[0])]
        for name, took in cases or [(block["name"], float(block["seconds"]))]:
            seconds[name] = seconds.get(name, 0.0) + took
    return seconds


def unexplained(seconds, run_seconds):
    """Names of the cases over the limit that the table does not have."""
    limit = max(LIMIT_SECONDS, run_seconds * LARGEST_SHARE)
    return [name for name, took in seconds.items() if took > limit and not any(name.startswith(allowed) for allowed in ALLOWED)]


def main():
    faults = []
    for tree in map(pathlib.Path, sys.argv[1:]):
        log = tree / "Testing/Temporary/LastTest.log"
        if not log.exists():
            continue
        seconds = cases_of(log.read_text(errors="replace"))
        slowest = sorted(seconds.items(), key=lambda case: -case[1])[:LISTED]
        print(f"{tree}: the {len(slowest)} slowest tests (seconds):")
        for name, took in slowest:
            print(f"{took:9.1f} {name}")
        total = re.search(r"^Total Test time \(real\) = +([\d.]+) sec", (tree / "ctest.log").read_text(errors="replace"), re.MULTILINE)
        if os.environ.get("FLCE_TEST_LEVEL") == "quick" and total is not None:
            faults += [f"{name}: {seconds[name]:.0f} s" for name in unexplained(seconds, float(total[1]))]
    for fault in faults:
        print(f"{fault} is too long for a quick test: make it smaller, or give it a reason in tools/slow_tests.py")


if __name__ == "__main__":
    main()
