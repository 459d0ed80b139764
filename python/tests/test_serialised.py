"""Hooks on saved tensors that write a retaining layer's tensors to a file: retained logits are left behind, and backward computes them
again."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable

import pytest
import torch
from retain_support import LENT, NONE, Watched, check, gradients_of, loss_of, make
from torch import Tensor

Change = Callable[[Tensor], Tensor]


def saved_by_torch(tensor: Tensor, *, weights_only: bool) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=weights_only)
    return loaded


SERIALISERS: dict[str, Change] = {
    "torch.save": lambda tensor: saved_by_torch(tensor, weights_only=False),
    "torch.save, weights_only": lambda tensor: saved_by_torch(tensor, weights_only=True),
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "pickle, protocol 5": lambda tensor: pickle.loads(pickle.dumps(tensor, protocol=5)),
}


@pytest.mark.parametrize("serialise", SERIALISERS.values(), ids=SERIALISERS)
def test_hooks_that_serialise_what_a_retaining_layer_saves(device: str, watched: Watched, serialise: Change) -> None:
    problem = make(device)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(serialise, lambda tensor: tensor):
            loss = loss_of(problem)
        assert watched.alive() == 0  # retained logits are left behind
        check(problem, gradients_of(problem, loss))
        assert watched.take()[0] == NONE
    check(problem, gradients_of(problem, loss_of(problem)))
    assert watched.take()[0] == LENT


def test_hooks_that_write_files_at_unpacking(device: str, watched: Watched) -> None:
    problem = make(device)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, SERIALISERS["torch.save"]):
        loss = loss_of(problem)
    check(problem, gradients_of(problem, loss))
    assert watched.take()[0] == NONE
