"""The table of ways in (CONTRIBUTING.md) is true: table.py BUILD_TREE. A row's pages name the way, its tests exist, and no way that
README.md or docs/ name is without a row."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pages import PAGES, ROOT, blocks

HEADING = "### Ways in\n"


def rows(text: str) -> list[list[str]]:
    """The cells of each row behind the table's head."""
    lines = [line for line in text.split(HEADING)[1].split("\n#")[0].split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def tests_of(tree: str) -> dict[str, list[str]]:
    """ctest's, with their labels. The list is asked for in a folder of its own: in the tree it would take the place of the log of the run
    that this is a test of."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "CTestTestfile.cmake").write_text(f'subdirs("{tree}")\n')
        asked = subprocess.run(["ctest", "--show-only=json-v1"], cwd=folder, capture_output=True, text=True, check=True)
    listed = json.loads(asked.stdout)
    labels = {test["name"]: test.get("properties", []) for test in listed["tests"]}
    return {name: next((p["value"] for p in properties if p["name"] == "LABELS"), []) for name, properties in labels.items()}


def named_ways() -> set[str]:
    """Ways that pages tell a reader to take: make's targets, pip, find_package, a Dockerfile, examples."""
    found: set[str] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.name != "CONTRIBUTING.md":
            found |= {f"make {target}" for target in re.findall(r"(?:^    |`)make ([a-z0-9-]+)", text, re.MULTILINE)}
            found |= set(re.findall(r"`(examples/[a-z0-9_]+(?:\.py)?)", text))
            code = "\n".join(block.text for block in blocks(page))
            found |= set(re.findall(r'pip install "?\.(?:\[[a-z]+\])?|python -m build\b|find_package\(flce|FROM python\b', code))
    return found


def faults(text: str, tests: dict[str, list[str]]) -> list[str]:
    found = []
    known: set[str] = set()
    for way, named, walked, level in rows(text):
        known |= set(quoted(way))
        for page in quoted(named):
            if not any(name in (ROOT / page).read_text(encoding="utf-8") for name in quoted(way)):
                found.append(f"{page} does not name {way}")
        if not quoted(walked):
            found.append(f"{way} is walked by no test")
        for test in quoted(walked):
            if test not in tests and not (ROOT / test).exists():
                found.append(f"{way}: there is no test {test}")
        ways = [test for test in quoted(walked) if test in tests and test.startswith("ways.")]
        if ways and not any(level in tests[test] for test in ways):
            found.append(f"{way}: {', '.join(ways)} is not {level}")
    found += [
        f"no row has {way}" for way in sorted(named_ways()) if not any(re.match(re.escape(way) + r"(?![\w-])", name) for name in known)
    ]
    walkers = {test for row in rows(text) for test in quoted(row[2])}
    helpers = {"ways.table", "ways.a_source_that_lacks_a_header_is_found"}
    return found + [f"no row has the test {test}" for test in tests if test.startswith("ways.") and test not in walkers | helpers]


if __name__ == "__main__":
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    every = tests_of(sys.argv[1])
    wrong = faults(page, every)
    # Faults that the check has to find: a way without its test, a row that is gone.
    broken = page.replace("`ways.pip`", "`ways.pipe`"), re.sub(r"^\| .make demo. .*\n", "", page, flags=re.MULTILINE)
    wrong += [f"a broken table passes: {number}" for number, text in enumerate(broken) if not faults(text, every)]
    sys.exit("\n".join(wrong) if wrong else 0)
