"""The table of options, the functions' signatures, flce.call._signatures (for type checkers) and the page of options say the same."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import flce
from flce.call import _signatures
from flce.call._options import OPTIONS, call_options, taken_by
from flce.core._retain import ALWAYS, Retain
from flce.engine._output import HEAD_OPTIONS

FUNCTIONS = {  # and the names of what each returns
    "CrossEntropy": (flce.linear_cross_entropy, ("Lse", "Logprobs", "Entropy", "Top1", "LogSumSqProbs")),
    "Logprobs": (flce.linear_logprobs, ("Entropy", "Top1", "LogSumSqProbs")),
    "LogprobsAt": (flce.linear_logprobs_at, ("Lse", "Entropy")),
    "Distillation": (flce.linear_topk_distillation, ("Lse", "Entropy", "TeacherLogprobs")),
}
PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def snake(name: str) -> str:
    return re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()


@pytest.mark.parametrize("family", FUNCTIONS)
def test_signatures_have_the_options_of_the_table(family: str) -> None:
    function, flags = FUNCTIONS[family]
    parameters = inspect.signature(function).parameters
    keywords = {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    taken = {name: OPTIONS[name] for name in taken_by(function.__name__.removeprefix("linear_"))}
    assert {name: (each.annotation, each.default) for name, each in keywords.items()} == {
        name: (option.annotation, option.default) for name, option in taken.items()
    }
    described = f"{flce.linear_cross_entropy.__doc__} {function.__doc__}"
    assert all(name in described for name in taken)
    for suffix in ("Alone", *(f"With{flag}" for flag in flags), "OrMore"):
        named: Any = getattr(_signatures, family + suffix)
        assert named.__annotations__.keys() == taken.keys(), suffix
        for name, option in taken.items():
            if option.kind != "outputs":
                assert named.__annotations__[name].__forward_arg__ == option.annotation, name
        required = {f"return_{snake(suffix.removeprefix('With'))}"} if suffix.startswith("With") else set()
        assert named.__required_keys__ == required
        kinds = {"Alone": Literal[False], "OrMore": bool}
        for name in (name for name, option in taken.items() if option.kind == "outputs"):
            assert named.__annotations__[name] == (Literal[True] if name in required else kinds.get(suffix, bool)), (suffix, name)


def test_the_page_has_the_table() -> None:
    rows = []
    for name, option in OPTIONS.items():
        rows.append(f"| `{name}` | `{option.default!r}` | {option.allowed} | {option.places.replace(' ', ', ')} |")
    text = PAGE.read_text()
    assert "\n".join(rows) in text, "docs/python.md is to have\n" + "\n".join(rows)


def test_equal_options_are_one_key() -> None:
    said, unsaid = call_options(return_loss=True, softcap=None, temperature=1.0), call_options(return_loss=True)
    assert said == unsaid and hash(said) == hash(unsaid) and call_options(return_loss=True) is unsaid
    for other in ({"softcap": 3.0}, {"reduction": "sum"}, {"ignore_index": -1}, {"workspace_limit_bytes": 7}, {"temperature": 2.0}):
        assert call_options(return_loss=True, **other) != unsaid, other
    with pytest.raises(dataclasses.FrozenInstanceError):
        unsaid.spec = "softcap=3.0"  # type: ignore[misc]


def test_options_are_written_into_a_spec() -> None:
    for given, spec in (
        ({}, ""),
        ({"dft": True}, "dft,outputs=loss+logprobs"),  # backward reads the log-probabilities
        ({"teacher_top_k": 6, "hard_weight": 0.5}, "hard_weight=0.5,teacher_top_k=6"),
    ):
        assert call_options(return_loss=True, **given).spec == spec


def test_a_budget_goes_with_what_is_retained() -> None:
    budget = flce.MemoryBudget(1 << 20)
    options = call_options(return_loss=True, workspace_limit_bytes=budget, retain_in_grad_weight=True)
    assert options.workspace_limit_bytes == 1 << 20 and options.retain == Retain.within(True, budget)
    assert call_options(return_loss=True, retain_in_grad_weight=True).retain == Retain(ALWAYS)


def test_types_of_options_are_told_apart() -> None:
    call_options(return_loss=True, dft=False)
    with pytest.raises(flce.DTypeError, match="dft is 0; it must be True or False"):
        call_options(return_loss=True, dft=0)
    with pytest.raises(flce.DTypeError, match="softcap is a list"):  # a list has no hash
        call_options(return_loss=True, softcap=[3.0])


@pytest.mark.parametrize("family", FUNCTIONS)
def test_an_option_of_another_function_is_refused(family: str) -> None:
    function, _ = FUNCTIONS[family]
    rows = (torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1))
    given: Any = rows if family == "Distillation" else rows[:3]
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'memory_limit_bytes'"):
        function(*given, memory_limit_bytes=7)


def test_names_of_a_heads_call_are_taken() -> None:
    head, hidden, labels = flce.FusedLMHead(8, 16), torch.randn(2, 3, 8), torch.randint(0, 16, (2, 3))
    for name in _signatures.HeadCallOrMore.__annotations__:
        given: Any = True if name.startswith("return_") else None
        made = head(hidden, labels=labels, **{name: given})
        assert isinstance(made, tuple) == name.startswith("return_"), name


def test_the_engine_takes_the_options_that_the_table_says() -> None:
    assert sorted(HEAD_OPTIONS) == sorted(taken_by("engine"))
