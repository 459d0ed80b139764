"""Labels to targets: padded rows and packed sequences."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

import pytest
import torch
from support import assert_close, make_problem, reference
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flce

IGNORED = -100


def test_packed_example(device: str) -> None:
    labels = torch.arange(10, 18, device=device)
    cu_seqlens = torch.tensor([0, 3, 4, 4, 8], device=device)
    assert flce.shift_labels(labels, cu_seqlens=cu_seqlens).tolist() == [11, 12, IGNORED, IGNORED, 15, 16, 17, IGNORED]


@pytest.mark.parametrize(
    ("bounds", "shift", "expected"),
    [
        ([0, 0, 3], 1, [11, 12, -1, -1, -1]),  # an empty first sequence; rows past the last boundary
        ([0], 1, [-1] * 5),
        ([0, 5], 2, [12, 13, 14, -1, -1]),
        ([0, 2, 5], 2, [-1, -1, 14, -1, -1]),
        ([0, 5], 5, [-1] * 5),
        ([0, 2, 5], 0, [10, 11, 12, 13, 14]),
        ([0, 2, 2], 0, [10, 11, -1, -1, -1]),
        ([0, 2, 9], 1, [11, -1, 13, 14, -1]),  # a boundary past the labels
    ],
)
def test_packed_boundaries(device: str, bounds: list[int], shift: int, expected: list[int]) -> None:
    labels = torch.arange(10, 15, device=device, dtype=torch.int32)
    cu_seqlens = torch.tensor(bounds, device=device, dtype=torch.int32)
    shifted = flce.shift_labels(labels, shift, ignore_index=-1, cu_seqlens=cu_seqlens)
    assert shifted.dtype == torch.int32
    assert shifted.tolist() == expected


NO_OFFSETS = [
    ([3, 4, 5], "[0] is 3"),
    ([0, 4, 2, 8], "[2] is 2 behind 4"),
    ([0, 4, 4, 3], "[3] is 3 behind 4"),
    ([1, 0], "[0] is 1"),
    ([0, -1], "[1] is -1 behind 0"),
]


@pytest.mark.parametrize(("offsets", "said"), NO_OFFSETS)
@pytest.mark.parametrize("shift", [0, 1])
def test_offsets_that_are_none(device: str, offsets: list[int], said: str, shift: int) -> None:
    """Refused on a CPU; on a GPU found without waiting for it, and reported as labels are."""
    flce.check_labels()
    labels, hidden, weight = torch.arange(8, device=device), torch.randn(8, 8, device=device), torch.randn(20, 8, device=device)
    cu_seqlens = torch.tensor(offsets, device=device, dtype=torch.int32)
    head = torch.nn.Linear(8, 20, bias=False, device=device)
    calls: list[Any] = [
        lambda: flce.linear_cross_entropy(hidden, weight, labels, shift=shift, cu_seqlens=cu_seqlens),
        lambda: flce.linear_logprobs(hidden, weight, labels, shift=shift, cu_seqlens=cu_seqlens).sum(),
        lambda: flce.LinearCrossEntropyLoss(head, shift=shift)(hidden, labels, cu_seqlens=cu_seqlens),
    ]
    for call in calls:
        if device == "cpu":
            with pytest.raises(flce.ArgumentError, match=re.escape(f"cu_seqlens{said}; it must hold offsets")):
                call()
        else:
            assert call() == 0
            with pytest.raises(flce.LabelError, match=r"target\[0\].*cu_seqlens does not begin with 0, or decreases"):
                flce.check_labels()


def test_offsets_that_are_none_in_compiled_code(device: str) -> None:
    hidden, weight, labels = torch.randn(8, 8, device=device), torch.randn(20, 8, device=device), torch.arange(8, device=device)

    @torch.compile(fullgraph=True, backend="eager")
    def loss(cu_seqlens: Tensor) -> Tensor:
        return flce.linear_cross_entropy(hidden, weight, labels, shift=1, cu_seqlens=cu_seqlens)

    right = torch.tensor([0, 3, 8], device=device)
    assert torch.equal(loss(right), flce.linear_cross_entropy(hidden, weight, labels, shift=1, cu_seqlens=right))
    flce.check_labels()
    assert loss(torch.tensor([0, 8, 3], device=device)) == 0
    with pytest.raises(flce.LabelError, match="cu_seqlens"):
        flce.check_labels()


def test_offsets_whose_numbers_are_nowhere_are_not_looked_at() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        labels, cu_seqlens = torch.zeros(8, dtype=torch.long), torch.tensor([0, 3, 8])
    assert flce.shift_labels(labels, cu_seqlens=cu_seqlens).shape == (8,)


@pytest.mark.parametrize("shift", [0, 1, 3, 6])
def test_padded_rows(device: str, shift: int) -> None:
    labels = torch.arange(12, device=device).view(2, 6)
    expected = [[row[t + shift] if t + shift < 6 else IGNORED for t in range(6)] for row in labels.tolist()]
    assert flce.shift_labels(labels, shift).tolist() == expected


def test_a_shift_beyond_every_sequence_is_refused(device: str) -> None:
    labels = torch.arange(12, device=device).view(2, 6)
    hidden, weight = torch.randn(2, 6, 8, device=device), torch.randn(20, 8, device=device)
    for loss in (
        lambda: flce.shift_labels(labels, 7),
        lambda: flce.linear_cross_entropy(hidden, weight, labels, shift=7),
        lambda: flce.LinearCrossEntropyLoss(torch.nn.Linear(8, 20, device=device), "pytorch", shift=7)(hidden, labels),
    ):
        with pytest.raises(flce.ArgumentError, match=r"shift is 7; target's sequences \(its last dimension\) are 6 long"):
            loss()
    with pytest.raises(flce.ArgumentError, match="shift is 13; all sequences of target together are 12 long"):
        flce.shift_labels(labels, 13, cu_seqlens=torch.tensor([0, 12], device=device))


def test_one_default_of_shift() -> None:
    """0, as in torch; none where a protocol's labels are unshifted and flce's are aligned."""
    functions = (flce.linear_cross_entropy, flce.linear_logprobs, flce.linear_topk_distillation)
    for takes_labels in (*functions, flce.FusedLMHead, flce.FusedLMHead.from_linear):
        assert inspect.signature(takes_labels).parameters["shift"].default == 0, takes_labels
    for kind in (flce.LinearCrossEntropyLoss, flce.PipelineFusedLoss):
        with pytest.raises(TypeError, match="shift"):
            kind(torch.nn.Linear(8, 20))  # type: ignore[call-arg]


def test_flattened_tokens_are_not_shifted_across_sequences(device: str) -> None:
    hidden, layer, labels = torch.randn(12, 8, device=device), torch.nn.Linear(8, 20, device=device), torch.arange(12, device=device)
    weight, ids, probs = layer.weight, labels[:, None], torch.ones(12, 1, device=device)
    loss, torchs = (flce.LinearCrossEntropyLoss(layer, impl, shift=1) for impl in ("flce", "pytorch"))
    head = flce.FusedLMHead.from_linear(layer, shift=1)
    for call in (
        lambda **more: flce.linear_cross_entropy(hidden, weight, labels, shift=1, **more),
        lambda **more: flce.linear_logprobs(hidden, weight, labels, shift=1, **more),
        lambda **more: flce.linear_topk_distillation(hidden, weight, ids, probs, target=labels, shift=1, **more),
        lambda **more: loss(hidden, labels, **more),
        lambda **more: torchs(hidden, labels, **more),
        lambda **more: head(hidden, labels=labels, **more),
        lambda **more: flce.PipelineFusedLoss(layer, shift=1).normalize_by(labels, **more),
    ):
        with pytest.raises(flce.ArgumentError, match=r"shift is 1 and target has shape \[12\], flattened tokens without cu_seqlens"):
            call()
        call(cu_seqlens=torch.tensor([0, 5, 12], device=device))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ignore_index", [1 << 40, -(1 << 31) - 1, 1 << 31])
def test_int32_labels_with_an_ignore_index_of_64_bits(device: str, packed: bool, ignore_index: int) -> None:
    labels = torch.arange(6, device=device, dtype=torch.int32)
    options = {"shift": 2, "cu_seqlens": torch.tensor([0, 6], device=device) if packed else None}
    assert flce.shift_labels(labels, ignore_index=ignore_index, **options).tolist() == [2, 3, 4, 5, ignore_index, ignore_index]
    for fits in (-(1 << 31), (1 << 31) - 1):
        assert flce.shift_labels(labels, ignore_index=fits, **options).dtype == torch.int32
    hidden, weight, labels = torch.randn(1, 6, 8, device=device), torch.randn(20, 8, device=device), labels[None]
    loss = flce.linear_cross_entropy(hidden, weight, labels, ignore_index=ignore_index, **options)
    assert torch.equal(loss, flce.linear_cross_entropy(hidden, weight, labels, **options))


@pytest.mark.parametrize(
    ("labels", "ignore_index", "kind", "message"),
    [
        (torch.zeros(3), -100, flce.DTypeError, r"target has dtype torch\.float32; allowed are int64 and int32"),
        (torch.zeros(3, dtype=torch.uint8), -100, flce.DTypeError, r"target has dtype torch\.uint8"),
        (torch.zeros(3, dtype=torch.long), None, flce.DTypeError, "ignore_index is a NoneType; it must be an integer"),
        (torch.zeros(3, dtype=torch.long), 1.5, flce.DTypeError, "ignore_index is a float"),
        (torch.zeros(3, dtype=torch.long), 1 << 63, flce.ArgumentError, "ignore_index is 9223372036854775808; it must fit 64 bits"),
    ],
)
def test_what_shift_labels_does_not_take(labels: torch.Tensor, ignore_index: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        flce.shift_labels(labels, ignore_index=ignore_index)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_hardly_any_tokens(device: str, num_tokens: int) -> None:
    labels = torch.ones(num_tokens, dtype=torch.long, device=device)
    cu_seqlens = torch.tensor([0, num_tokens], device=device)
    for bounds in (None, cu_seqlens):
        assert flce.shift_labels(labels, cu_seqlens=bounds).tolist() == [IGNORED] * num_tokens


def test_shifted_loss_equals_sliced_inputs(device: str) -> None:
    problem = make_problem(device, num_tokens=36)
    hidden, labels = problem.hidden.view(3, 12, -1), problem.target.view(3, 12)
    loss = flce.linear_cross_entropy(hidden, problem.weight, labels, shift=1)
    expected = reference(hidden[:, :-1], problem.weight, labels[:, 1:])["loss"]
    assert_close(loss, expected, torch.float32, output=True)
    gradient = torch.autograd.grad(loss, problem.hidden)[0].view(3, 12, -1)
    assert_close(gradient, torch.autograd.grad(expected, problem.hidden)[0].view(3, 12, -1), torch.float32)
    assert not gradient[:, -1].any()


def test_packed_loss_equals_each_sequence_by_itself(device: str) -> None:
    problem = make_problem(device, num_tokens=20, ignored=0.0)
    bounds = [0, 7, 8, 8, 17]
    cu_seqlens = torch.tensor(bounds, device=device)
    loss = flce.linear_cross_entropy(
        problem.hidden[None], problem.weight, problem.target[None], shift=1, cu_seqlens=cu_seqlens, reduction="sum"
    )
    parts = [
        reference(problem.hidden[a : b - 1], problem.weight, problem.target[a + 1 : b], reduction="sum")["loss"]
        for a, b in itertools.pairwise(bounds)
        if b - a > 1
    ]
    assert_close(loss, torch.stack(parts).sum(), torch.float32, output=True)
