"""Signatures of flce.compat are those of its peers: names, order, defaults, what is keyword-only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compat_signatures import (
    DECLARATIONS,
    DECLARED,
    RELEASED,
    REQUIRED,
    ROOT,
    Argument,
    StandIn,
    installed,
    of_callable,
    of_source,
    versions,
)

from flce.compat import torch as of_torch


def differences(actual: list[Argument], expected: list[Argument]) -> list[str]:
    found = [f"{one} instead of {other}" for one, other in zip(actual, expected, strict=False) if repr(one) != repr(other)]
    found += [f"{one} is not the peer's" for one in actual[len(expected) :]]
    return found + [f"{other} is missing" for other in expected[len(actual) :]]


@pytest.mark.parametrize("stand_in", RELEASED, ids=lambda stand_in: stand_in.label)
def test_a_released_peers(stand_in: StandIn) -> None:
    package = installed(stand_in.package)
    if package is None:
        pytest.skip(f"{stand_in.package} is not installed; tools/setup.sh --python fetches it")
    source = Path(str(package.locate_file(stand_in.file))).read_text()
    found = differences(of_callable(stand_in.function), of_source(source, stand_in.name))
    assert not found, f"{stand_in.package} {package.version}, tried with {versions()[stand_in.package]}: {'; '.join(found)}"


@pytest.mark.parametrize("stand_in", DECLARED, ids=lambda stand_in: stand_in.label)
def test_a_peers_of_which_there_is_no_release(stand_in: StandIn) -> None:
    assert not differences(of_callable(stand_in.function), of_source(DECLARATIONS, stand_in.name))


def test_torchs() -> None:
    peer = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if peer is None:
        pytest.skip(f"torch {torch.__version__} has no linear_cross_entropy; 2.13 has")
    assert not differences(of_callable(of_torch.linear_cross_entropy), of_callable(peer))


def test_the_page_names_the_versions() -> None:
    page = (ROOT / "docs/python.md").read_text()
    for package, version in versions().items():
        assert f"{package} {version}" in page
    for stand_in in DECLARED:
        repository, commit = stand_in.package.split("@")
        assert repository in page and commit in page


PEER = """
SIZE = 8
def loss(x, weight, *, size=SIZE, name="a", **rest): ...
class Loss:
    def forward(self, x, weight=None): ...
"""


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (("x, weight", "weight, x"), "x"),
        (("weight, *", "weight=None, *"), "weight"),
        (("*, size", "size"), "KEYWORD_ONLY"),
        (("SIZE = 8", "SIZE = 9"), "8"),
        (('name="a", ', ""), "missing"),
        (("**rest", "more, **rest"), "more"),
        (("**rest", ""), "rest"),
        (("size=SIZE", "scale=SIZE"), "scale"),
    ],
    ids=["order", "default", "keyword-only", "constant", "missing", "more", "rest", "name"],
)
def test_every_kind_of_difference_is_found(changed: tuple[str, str], what: str) -> None:
    expected = of_source(PEER, "loss")
    found = differences(of_source(PEER.replace(*changed), "loss"), expected)
    assert what in " ".join(found)


def test_a_source_is_read_as_the_function_that_it_defines() -> None:
    namespace: dict[str, object] = {}
    exec(PEER, namespace)
    assert of_source(PEER, "loss") == of_callable(namespace["loss"])  # type: ignore[arg-type]
    assert of_source(PEER, "Loss.forward") == [
        Argument("x", "POSITIONAL_OR_KEYWORD", REQUIRED),
        Argument("weight", "POSITIONAL_OR_KEYWORD", None),
    ]
    with pytest.raises(LookupError, match="Loss2"):
        of_source(PEER, "Loss2.forward")
