"""The quick level leaves out only cases whose pairs it has elsewhere."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import levels
import pytest

pytest_plugins = ["pytester"]


def pairs_of(cases: list[dict[str, Any]]) -> set[Any]:
    return {pair for case in cases for pair in itertools.combinations(sorted(case.items()), 2)}


@pytest.mark.parametrize("lengths", [(2, 2), (3, 5, 3, 2), (2, 2, 2, 2, 2, 2), (7, 3, 4)], ids=str)
def test_every_pair_is_chosen(lengths: tuple[int, ...]) -> None:
    cases = [dict(zip("abcdef", values, strict=False)) for values in itertools.product(*map(range, lengths))]
    chosen = [cases[number] for number in levels.pairwise(cases)]
    assert pairs_of(chosen) == pairs_of(cases)
    largest = sorted(lengths)[-2:]
    assert largest[0] * largest[1] <= len(chosen) <= min(len(cases), 2 * largest[0] * largest[1])


def test_cases_that_are_no_product_are_covered() -> None:
    cases = [{"dtype": 0, "option": 0}, {"dtype": 0, "option": 1}, {"dtype": 1, "option": 1}, {"dtype": 1, "option": 1, "way": 2}]
    assert levels.pairwise(cases) == [0, 1, 3]


def test_quick_leaves_out_repetitions_alone(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 of 2 x 2 x 3 combinations have every pair; a mark on a value keeps its meaning."""
    pytester.makeconftest("import levels\n\ndef pytest_collection_modifyitems(items): levels.mark_repetitions(items)\n")
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.pairwise
        @pytest.mark.parametrize("a", [0, 1])
        @pytest.mark.parametrize("b", [0, 1])
        @pytest.mark.parametrize("c", [0, 1, 2, pytest.param(3, marks=pytest.mark.nightly)])
        def test_product(a, b, c): pass
        def test_alone(): pass
        """
    )
    for expression, count in (("not full and not nightly", 7), ("full", 6), ("nightly", 4)):
        assert pytester.runpytest("-m", expression, "-p", "no:cacheprovider").parseoutcomes()["passed"] == count


def test_nightly_is_full_where_its_files_changed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeconftest("def pytest_configure(config): config.addinivalue_line('markers', 'nightly: x')")
    monkeypatch.setattr(levels, "of_late", lambda: ["examples/a.py"])
    each = {"always": "", "changed": "('examples/', 'tools/x.py')", "as_it_was": "('docs/')"}
    source = "".join(f"@pytest.mark.nightly{paths}\ndef test_{name}(): pass\n" for name, paths in each.items())
    for item in pytester.getitems("import pytest\n" + source):
        changed = item.name == "test_changed"
        assert levels.is_left_out(item, ["nightly"]) != changed
        assert levels.is_left_out(item, ["full"]) == changed  # quick leaves it out
        assert not levels.is_left_out(item, [])


def test_what_changed_of_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels.of_late(tmp_path) == []

    def git(*arguments: str, days: int = 0) -> None:
        date = {"GIT_COMMITTER_DATE": str(int(time.time()) - days * 86400)}
        identity = ["-c", "user.name=flce", "-c", "user.email=flce@localhost", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], env=os.environ | date, check=True, capture_output=True)

    git("init")
    for name, days in (("old", 3), ("new", 0)):
        (tmp_path / name).write_text("")
        git("add", name)
        git("commit", "-m", name, days=days)
    levels.of_late.cache_clear()
    assert levels.of_late(tmp_path) == ["new"]
    (tmp_path / "old").write_text("x")
    (tmp_path / "untracked").write_text("")
    levels.of_late.cache_clear()
    assert sorted(levels.of_late(tmp_path)) == ["new", "old", "untracked"]
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine without git
    levels.of_late.cache_clear()
    assert levels.of_late(tmp_path) == []
    levels.of_late.cache_clear()
