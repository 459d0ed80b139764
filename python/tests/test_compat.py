"""Behaviour common to the stand-ins for peers' losses."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch
from compat_support import ADAPTERS, DTYPES, Adapter, Layer, check_gradients
from support import assert_close
from torch import Tensor

adapters = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(adapter: Adapter, layer: Layer, dtype: torch.dtype, actual: Tensor | None = None) -> None:
    actual = adapter.loss(layer) if actual is None else actual
    exact = layer.in_double()
    expected = adapter.expected(exact)
    if adapter.own_dtype and dtype is not torch.float32:
        torch.testing.assert_close(actual, expected.to(dtype))
    else:
        assert actual.dtype is torch.float32
        assert_close(actual, expected, dtype, "loss", output=True)
    # Roundings of a single token's dz have nothing to average out with: each is up to a unit roundoff, as the gradient's own is.
    check_gradients([actual], [expected], layer, exact, factor=2.0 if layer.target.numel() == 1 else 1.0)


@adapters
@dtypes
@pytest.mark.parametrize(("num_tokens", "hidden_size", "vocab_size"), [(4, 8, 8), (63, 41, 41), (7, 5, 123), (1, 5, 2), (188, 31, 123)])
def test_no_size_needs_alignment(
    device: str, adapter: Adapter, dtype: torch.dtype, num_tokens: int, hidden_size: int, vocab_size: int
) -> None:
    layer = adapter.layer(device, dtype, shape=(num_tokens,), hidden_size=hidden_size, vocab_size=vocab_size)
    layer.target[0] = 1
    check(adapter, layer, dtype)


@adapters
@dtypes
def test_hidden_states_may_be_a_slice(device: str, adapter: Adapter, dtype: torch.dtype) -> None:
    layer = adapter.layer(device, dtype, shape=(3, 9))
    if adapter.name in ("liger", "torch"):  # these take [N, D]
        part = Layer(layer.hidden[:, 4], layer.weight, layer.target[:, 4], layer.bias)
    else:
        part = Layer(layer.hidden[:, :-1], layer.weight, layer.target[:, :-1], layer.bias)
    part.target[0].fill_(3)
    assert not part.hidden.is_contiguous()
    actual = adapter.loss(part)
    exact = layer.in_double()
    rows = (slice(None), 4) if adapter.name in ("liger", "torch") else (slice(None), slice(-1))
    expected = adapter.expected(Layer(exact.hidden[rows], exact.weight, part.target, exact.bias))
    check_gradients([actual], [expected], layer, exact)


@adapters
@dtypes
def test_gradients_are_of_those_inputs_alone_that_require_one(device: str, adapter: Adapter, dtype: torch.dtype) -> None:
    whole = adapter.layer(device, dtype)
    all_gradients = torch.autograd.grad(adapter.loss(whole), whole.leaves())
    for wanted in product([False, True], repeat=len(all_gradients)):
        if not any(wanted):
            continue
        leaves = [leaf.detach().requires_grad_(flag) for leaf, flag in zip(whole.leaves(), wanted, strict=True)]
        layer = Layer(leaves[0], leaves[1], whole.target, leaves[2] if adapter.takes_bias else None)
        adapter.loss(layer).backward()
        for leaf, flag, right in zip(leaves, wanted, all_gradients, strict=True):
            assert (leaf.grad is not None) == flag
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad, right, rtol=1e-3, atol=1e-5)


@adapters
@dtypes
def test_without_gradients_there_is_the_same_value_and_no_graph(device: str, adapter: Adapter, dtype: torch.dtype) -> None:
    layer = adapter.layer(device, dtype)
    expected = adapter.loss(layer)
    with torch.no_grad():
        value = adapter.loss(layer)
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-5)
    assert not value.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        value.backward()


@adapters
@dtypes
def test_backward_runs_twice_with_the_same_gradients(device: str, adapter: Adapter, dtype: torch.dtype) -> None:
    layer = adapter.layer(device, dtype)
    loss = adapter.loss(layer)
    first = torch.autograd.grad(loss, layer.leaves(), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, layer.leaves(), retain_graph=True), strict=True):
        torch.testing.assert_close(one, other)


@adapters
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_takes_fp32_parameters_and_gives_fp32_gradients(device: str, adapter: Adapter, dtype: torch.dtype) -> None:
    layer = adapter.layer(device)
    with torch.autocast(device, dtype=dtype):
        loss = adapter.loss(layer)
        assert loss.dtype is torch.float32
        loss.backward()
    exact = layer.in_double()
    expected = adapter.expected(exact)
    expected.backward()
    assert_close(loss, expected, dtype, "loss", output=True, factor=100.0)  # the inputs are rounded
    for leaf, right in zip(layer.leaves(), exact.leaves(), strict=True):
        assert leaf.grad is not None and leaf.grad.dtype is torch.float32
        assert_close(leaf.grad, right.grad, dtype, "gradient", factor=3.0)


@pytest.mark.parametrize("adapter", [each for each in ADAPTERS if each.name != "torchtune"], ids=lambda adapter: adapter.name)
def test_a_graph_without_breaks_computes_the_same(adapter: Adapter) -> None:
    layer = adapter.layer()

    def step(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        return adapter.call(hidden * 1.0, weight, target, bias)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    loss = compiled(layer.hidden, layer.weight, layer.target, layer.bias)
    expected = adapter.loss(layer)
    assert torch.equal(loss, expected)
    gradients = torch.autograd.grad(loss, layer.leaves())
    for gradient, right in zip(gradients, torch.autograd.grad(expected, layer.leaves()), strict=True):
        assert torch.equal(gradient, right)


PROBE = """
import sys
import torch
import flce
print("flce.compat" in sys.modules)
before = set(sys.modules)
print([getattr(flce.compat, name).__name__ for name in sorted(flce.compat.__all__)])
new = set(sys.modules) - before
peers = {"liger_kernel", "cut_cross_entropy", "verl", "torchtune", "quack", "sentence_transformers", "prime_rl", "skyrl", "triton"}
print(sorted(name for name in new if name.split(".")[0] in peers or name.startswith(("torch.distributed", "torch._dynamo"))))
"""


def test_stand_ins_are_imported_when_they_are_asked_for_and_bring_no_peer() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    names = ("cce", "liger", "prime_rl", "quack", "sentence_transformers", "skyrl", "torch", "torchtune", "verl")
    modules = [f"flce.compat.{name}" for name in names]
    assert done.stdout.splitlines() == ["False", str(modules), "[]"]
