"""The quick level leaves out only cases whose pairs it has elsewhere."""

from __future__ import annotations

import itertools
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
