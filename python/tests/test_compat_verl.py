"""flce.compat.verl: log-probabilities of labels and of top-k classes, entropies and gradients against their formulas in fp64."""

from __future__ import annotations

import pytest
import torch
from compat_support import DTYPES, Layer, check_gradients, make_layer
from support import assert_close
from torch import Tensor

import flce
from flce.compat.verl import linear_cross_entropy, linear_topk_log_probs
from flce.core import _kernels

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def expected(layer: Layer, temperature: float = 1.0, reduction: str = "none") -> tuple[Tensor, Tensor]:
    log_softmax = layer.logits(temperature=temperature).flatten(0, -2).log_softmax(-1)
    logprobs = log_softmax.gather(1, layer.target.flatten()[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return {"none": logprobs, "sum": logprobs.sum(), "mean": logprobs.mean()}[reduction], entropy


@dtypes
@pytest.mark.parametrize("shape", [(33,), (3, 7)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "MEAN"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_outputs_and_their_gradients(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], reduction: str, temperature: float
) -> None:
    """Flat outputs, one backward for both, an upstream gradient of its own for each row."""
    layer = make_layer(device, dtype, shape=shape, ignore_index=None)
    actual = linear_cross_entropy(layer.hidden, layer.weight, layer.target, temperature, reduction)
    exact = layer.in_double()
    right = expected(exact, temperature, reduction.lower())
    assert actual[1].shape == (layer.target.numel(),)
    for value, wanted, name in zip(actual, right, ("logprobs", "entropy"), strict=True):
        assert value.dtype is torch.float32
        assert_close(value, wanted, dtype, name, output=True, factor=4.0)
    for used in ([0, 1], [0], [1]):  # either output may be left out
        actual = linear_cross_entropy(layer.hidden, layer.weight, layer.target, temperature, reduction)
        right = expected(exact, temperature, reduction.lower())
        check_gradients([actual[i] for i in used], [right[i] for i in used], layer, exact)


def test_logits_are_not_rounded_to_bf16(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = ((torch.rand(*shape, generator=generator) - 0.5).to(device, torch.bfloat16) for shape in ((64, 896), (4096, 896)))
    target = torch.randint(0, 4096, (64,), generator=generator).to(device)
    layer = Layer(hidden.requires_grad_(), weight.requires_grad_(), target, None)
    logprobs, entropy = linear_cross_entropy(hidden, weight, target)
    right, right_entropy = expected(layer.in_double())
    torch.testing.assert_close(logprobs, right.float(), atol=1e-3, rtol=2e-4)
    torch.testing.assert_close(entropy, right_entropy.float(), atol=5e-3, rtol=5e-4)


def test_a_temperature_must_be_a_float_and_a_reduction_a_str() -> None:
    layer = make_layer(ignore_index=None)
    with pytest.raises(AssertionError, match="temperature is a int"):
        linear_cross_entropy(layer.hidden, layer.weight, layer.target, 1)
    with pytest.raises(AssertionError, match="reduction is a NoneType"):
        linear_cross_entropy(layer.hidden, layer.weight, layer.target, 1.0, None)  # type: ignore[arg-type]
    for unknown in ("batchmean", "weighted_mean"):
        with pytest.raises(ValueError, match=unknown):
            linear_cross_entropy(layer.hidden, layer.weight, layer.target, 1.0, unknown)
    with pytest.raises(ValueError, match="temperature"):
        linear_cross_entropy(layer.hidden, layer.weight, layer.target, 0.0)


def test_a_label_that_is_no_class_is_reported(device: str) -> None:
    layer = make_layer(device, ignore_index=None)
    layer.target[4] = -100
    for kernel in _kernels.all_kernels():  # other tests' labels
        kernel.invalid_label.fill_(-1)
    logprobs, _ = linear_cross_entropy(layer.hidden, layer.weight, layer.target)
    assert logprobs[4] == 0
    with pytest.raises(flce.LabelError) as caught:
        flce.check_labels()
    assert caught.value.row == 4


@dtypes
@pytest.mark.parametrize("shape", [(33,), (3, 7)], ids=str)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_log_probabilities_of_top_k_classes(device: str, dtype: torch.dtype, shape: tuple[int, ...], integer: torch.dtype) -> None:
    layer = make_layer(device, dtype, shape=shape, ignore_index=None)
    classes = layer.weight.shape[0]
    ids = torch.randint(0, classes, (*shape, 5), generator=torch.Generator().manual_seed(1)).to(device, integer)
    ids[..., 1] = ids[..., 0]  # equal ids are places of their own
    actual = linear_topk_log_probs(layer.hidden, layer.weight, ids, 0.7, chunk_size=4)
    exact = layer.in_double()
    right = exact.logits(temperature=0.7).log_softmax(-1).gather(-1, ids.long())
    assert actual.dtype is torch.float32 and actual.shape == ids.shape
    assert_close(actual, right, dtype, "logprobs", output=True, factor=4.0)
    check_gradients([actual], [right], layer, exact)


def test_top_k_classes_are_checked() -> None:
    layer = make_layer(ignore_index=None)
    classes = layer.weight.shape[0]
    ids = layer.target[..., None].repeat_interleave(3, -1)
    for wrong in (-1, classes):
        with pytest.raises(ValueError, match=rf"not in \[0, {classes}\)"):
            linear_topk_log_probs(layer.hidden, layer.weight, torch.where(ids == ids[0], wrong, ids))
    with pytest.raises(TypeError, match="temperature is a int"):
        linear_topk_log_probs(layer.hidden, layer.weight, ids, 1)
    with pytest.raises(ValueError, match="temperature"):
        linear_topk_log_probs(layer.hidden, layer.weight, ids, 0.0)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        linear_topk_log_probs(layer.hidden, layer.weight, ids, chunk_size=0)
    with pytest.raises(ValueError, match="ids has shape"):
        linear_topk_log_probs(layer.hidden, layer.weight, ids[1:])
    with pytest.raises(TypeError, match="float"):
        linear_topk_log_probs(layer.hidden, layer.weight, ids.float())
