"""Private names of torch's autograd engine that flce calls, pinned for the torch at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.core import _autograd

VERSION = f"torch {torch.__version__}"
GONE = f"{VERSION}: flce/core/_autograd.py relies on it; without it see knows_what_is_wanted() and keep_node()"


class Ask(torch.autograd.Function):
    """A node of two inputs whose backward runs `question(node)`."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, question: Callable[[Any], Any], answers: list[Any]) -> Tensor:
        ctx.question, ctx.answers = question, answers
        return first + second

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.answers.append(ctx.question(ctx))
        return gradients[0], gradients[0], None, None


def will_run(node: Any) -> list[Any]:
    """The engine's answer for each neighbour; an exception's type where the engine refuses."""
    answers: list[Any] = []
    for neighbour, _ in node.next_functions[:2]:
        try:
            answers.append(torch._C._will_engine_execute_node(neighbour))
        except RuntimeError:
            answers.append(RuntimeError)
    return answers


def test_the_engine_says_which_nodes_a_run_executes() -> None:
    assert hasattr(torch._C, "_will_engine_execute_node"), GONE
    answers: list[Any] = []
    leaf, weight = (torch.zeros(3, requires_grad=True) for _ in range(2))
    hidden = leaf * 1
    output = Ask.apply(hidden, weight, will_run, answers).sum()
    output.backward(retain_graph=True)
    torch.autograd.grad(output, hidden, retain_graph=True)
    torch.autograd.grad(output, leaf, retain_graph=True)
    torch.autograd.grad(output, weight, retain_graph=True)
    torch.autograd.grad(output, (hidden, weight), retain_graph=True)
    torch.autograd.backward(output, inputs=[weight])
    assert answers == [
        [True, True],
        [True, False],
        [True, False],
        [False, RuntimeError],  # refused, of a leaf that grad() was asked for
        [True, RuntimeError],
        [False, True],  # added to .grad: a leaf that backward() was asked for is no result
    ], GONE
    with pytest.raises(RuntimeError):
        torch._C._will_engine_execute_node(hidden.grad_fn)  # outside of backward


def test_the_engine_says_what_is_a_result_of_grad() -> None:
    answers: list[Any] = []
    leaf, weight = torch.zeros(3, 3, requires_grad=True), torch.zeros(3, 3, requires_grad=True)
    question = lambda node: _autograd.is_asked_for_by_grad(node.next_functions[1][0])  # noqa: E731
    for of in (weight, weight.t(), weight.t().contiguous().view(9).view(3, 3)):
        output = Ask.apply(leaf * 1, of, question, answers).sum()
        output.backward(retain_graph=True)
        torch.autograd.grad(output, leaf, retain_graph=True)
        torch.autograd.grad(output, weight, retain_graph=True)
        torch.autograd.grad(output, (leaf, weight))
    assert answers == [False, False, True, True] * 3, GONE
    output = Ask.apply(leaf * 1, weight * leaf, question, answers).sum()  # a gradient of several leaves is none of theirs
    torch.autograd.grad(output, weight)
    assert answers[-1] is False


def test_the_engine_names_the_node_that_it_runs() -> None:
    assert hasattr(torch._C, "_current_autograd_node"), GONE
    answers: list[Any] = []
    leaf = torch.zeros(3, requires_grad=True)
    output = Ask.apply(leaf, leaf, lambda node: torch._C._current_autograd_node() is node, answers)
    above = output * 1
    seen: list[Any] = []
    marked: list[Any] = []

    def mark(grad_inputs: Any, grad_outputs: Any) -> None:
        seen.append(torch._C._current_autograd_node())
        grad_inputs[0].mark = "the one"

    above.grad_fn.register_hook(mark)
    output.grad_fn.register_prehook(lambda gradients: marked.append(gradients[0]))
    above.sum().backward()
    assert answers == [True], GONE
    assert seen == [above.grad_fn], GONE
    assert [gradient.mark for gradient in marked] == ["the one"], f"{VERSION}: a schedule keeps another tensor than a node hands on"


def test_which_torch_loses_nodes() -> None:
    """Whether the node that a custom Function leaves in the graph is kept by its Python object."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
        pytest.skip("asking an older torch may end the process")
    output = Ask.apply(torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True), id, [])
    node = output.grad_fn
    output.detach_()
    try:
        loses = node._input_metadata is None
    except RuntimeError:
        loses = True
    assert loses == _autograd.LOSES_NODES, f"{VERSION}: set LOSES_NODES of flce/core/_autograd.py by it"


def test_private_names_of_the_engine_stand_in_one_file() -> None:
    for file in Path(flce.__file__).parent.rglob("*.py"):
        text = file.read_text()
        for name in ("_will_engine_execute_node", "_current_autograd_node", "_current_graph_task", "_autograd_graph"):
            assert name not in text or file.name == "_autograd.py", f"{file.name} asks for {name}"
