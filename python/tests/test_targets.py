"""Labels to targets: padded rows and packed sequences."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import assert_close, make_problem, reference

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
        ([0, 5], 9, [-1] * 5),
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


@pytest.mark.parametrize("shift", [0, 1, 3, 6, 9])
def test_padded_rows(device: str, shift: int) -> None:
    labels = torch.arange(12, device=device).view(2, 6)
    expected = [[row[t + shift] if t + shift < 6 else IGNORED for t in range(6)] for row in labels.tolist()]
    assert flce.shift_labels(labels, shift).tolist() == expected


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
    assert_close(loss, expected, torch.float32)
    gradient = torch.autograd.grad(loss, problem.hidden)[0].view(3, 12, -1)
    assert_close(gradient, torch.autograd.grad(expected, problem.hidden)[0].view(3, 12, -1), torch.float32)
    assert not gradient[:, -1].any()


def test_packed_loss_equals_each_sequence_by_itself(device: str) -> None:
    problem = make_problem(device, num_tokens=20, ignored=0.0)
    bounds = [0, 7, 8, 8, 17]
    cu_seqlens = torch.tensor(bounds, device=device)
    loss = flce.linear_cross_entropy(problem.hidden[None], problem.weight, problem.target[None], shift=1, cu_seqlens=cu_seqlens, reduction="sum")
    parts = [
        reference(problem.hidden[a : b - 1], problem.weight, problem.target[a + 1 : b], reduction="sum")["loss"]
        for a, b in itertools.pairwise(bounds)
        if b - a > 1
    ]
    assert_close(loss, torch.stack(parts).sum(), torch.float32)
