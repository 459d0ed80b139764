"""Rules for the quick level: markers and cases that follow from numbers, so that nobody has to list them."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
QUICK = os.environ.get("FLCE_TEST_LEVEL") == "quick"
Case = TypeVar("Case")


def first_quick(values: Sequence[Any], count: int) -> list[Any]:
    """Marks a parameter's values: the first few are quick, the others full."""
    return [*values[:count], *(pytest.param(value, marks=pytest.mark.full) for value in values[count:])]


def in_turn(cases: Sequence[Case], every: int) -> list[Case]:
    """A worker's cases; in quick one out of `every`. A product's cases take turns where no axis' length shares a divisor with `every`."""
    return list(cases[::every] if QUICK else cases)


def by_ranks(cases: dict[int, int]) -> pytest.MarkDecorator:
    """Parametrizes `ranks` and `cases` from the number of cases by number of ranks: two ranks are quick, others full."""
    each = [pytest.param(ranks, count, id=f"{ranks} ranks", marks=() if ranks == 2 else pytest.mark.full) for ranks, count in cases.items()]
    return pytest.mark.parametrize(("ranks", "cases"), each)


@cache
def of_late(checkout: Path = ROOT) -> list[str]:
    """Paths of a checkout that changed within eight hours, by git's history and what is not committed; none where there is no history."""
    found: list[str] = []
    for command in (
        ["log", "--since=8 hours ago", "--name-only", "--format="],
        ["ls-files", "--modified", "--others", "--exclude-standard"],
    ):
        with contextlib.suppress(OSError):  # no git
            done = subprocess.run(["git", "-C", str(checkout), *command], capture_output=True, text=True, check=False)
            found += done.stdout.split("\n") if done.returncode == 0 else []
    return [path for path in found if path]


def is_left_out(item: pytest.Item, left_out: Sequence[str]) -> bool:
    """Whether a marker of the item is among `left_out`. `nightly(*paths)` is `full` where something in one of the paths changed of late."""
    markers = {marker.name: marker.args for marker in reversed(list(item.iter_markers()))}
    changed = [path for path in of_late() if path.startswith(markers.get("nightly", ()))]
    return bool({"full" if name == "nightly" and changed else name for name in markers}.intersection(left_out))


def pairwise(cases: Sequence[dict[str, Any]]) -> list[int]:
    """Numbers of cases, each a value by axis, that have every pair of values that any case has. Each has the most pairs that are new."""
    pairs = [set(itertools.combinations(sorted(case.items()), min(2, len(case)))) for case in cases]
    missing = set().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def mark_repetitions(items: list[pytest.Item]) -> None:
    """Marks as full what repeats pairs of values, among the cases of each test that is marked `pairwise`."""
    tests = defaultdict(list)
    for item in items:
        # Cases that quick leaves out cover nothing; on a GPU each case is another one.
        if item.get_closest_marker("pairwise") and not any(map(item.get_closest_marker, ("full", "nightly"))):
            tests[item.nodeid.split("[")[0], item.get_closest_marker("gpu") is None].append(item)
    for of_test in tests.values():
        parameters = [item.callspec.params.items() for item in of_test]  # type: ignore[attr-defined]
        # A decorator's values are the same objects in all cases.
        chosen = {of_test[number].name for number in pairwise([{name: id(value) for name, value in each} for each in parameters])}
        for item in of_test:
            if item.name not in chosen:
                item.add_marker(pytest.mark.full)
