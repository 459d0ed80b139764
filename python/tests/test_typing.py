"""flce._signatures, which type checkers read, names the arguments that the functions have."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import flce
from flce import _signatures

POSITIONAL = ("hidden", "weight", "target", "teacher_ids", "teacher_probs")
FUNCTIONS = {  # and the names of what each returns
    "CrossEntropy": (flce.linear_cross_entropy, ("Lse", "Logprobs", "Entropy", "Top1", "LogSumSqProbs")),
    "Logprobs": (flce.linear_logprobs, ("Entropy", "Top1", "LogSumSqProbs")),
    "Distillation": (flce.linear_topk_distillation, ("Lse", "Entropy", "TeacherLogprobs")),
}


def snake(name: str) -> str:
    return re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()


@pytest.mark.parametrize("family", FUNCTIONS)
def test_names_are_the_functions_own(family: str) -> None:
    function, flags = FUNCTIONS[family]
    parameters = inspect.signature(function).parameters
    keywords = {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    assert sum(name.startswith("return_") for name in keywords) == len(flags)
    for suffix in ("Alone", *(f"With{flag}" for flag in flags), "OrMore"):
        named: Any = getattr(_signatures, family + suffix)
        assert named.__annotations__.keys() == keywords.keys(), suffix
        for name, parameter in keywords.items():
            if not name.startswith("return_"):
                assert named.__annotations__[name].__forward_arg__ == parameter.annotation, name
        set_flags = [name for name, kind in named.__annotations__.items() if kind.__forward_arg__ == "Required[Literal[True]]"]
        assert [name.removeprefix("return_") for name in set_flags] == [snake(suffix.removeprefix("With"))] * suffix.startswith("With")
    assert function.__doc__ and set(parameters) - set(keywords) <= {*POSITIONAL}


def test_names_of_a_heads_call_are_taken() -> None:
    head, hidden, labels = flce.FusedLMHead(8, 16), torch.randn(2, 3, 8), torch.randint(0, 16, (2, 3))
    for name in _signatures.HeadCallOrMore.__annotations__:
        given: Any = True if name.startswith("return_") else None
        made = head(hidden, labels=labels, **{name: given})
        assert isinstance(made, tuple) == name.startswith("return_"), name
