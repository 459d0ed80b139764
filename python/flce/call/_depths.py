"""Several hidden states on one weight: the rows of all depths in one call, so that the weight's gradient is written once, and each depth's
loss from the rows' losses.

Depth d has hidden[d] [..., D] and target[d] [...], of any shape. With sequence_parallel a rank's hidden[d] is its part of the tokens, and
ranks' rows lie one rank behind the other: the rows of all depths of the first rank, then those of the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.call import _arguments
from flce.call._checks import is_dtensor
from flce.call._spec_text import number, reduction_code
from flce.call._targets import check_target_dtype, check_tensors, targets_of
from flce.core import checks
from flce.core._frame import Parallel

_OF_ROWS = ("temperature", "token_weight")
_OF_DEPTHS = ("shift", "cu_seqlens", "num_valid_tokens", *_OF_ROWS)  # options that are one for all depths, or a list


def are_several(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def of_each(name: str, value: Any, count: int) -> list[Any]:
    """The items of a list, or one value `count` times."""
    if not are_several(value):
        return [value] * count
    if len(value) != count:
        for_all = "" if name == "loss_weights" else ", or one for all"
        raise errors.ArgumentError(f"{name} has {len(value)} items and hidden has {count}; give one for each hidden state{for_all}")
    return list(value)


def split_options(options: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Takes from `options` those that a depth may have of its own; returns each depth's."""
    if count == 0:
        raise errors.ArgumentError("hidden is an empty list; give at least one hidden state")
    each: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in _OF_DEPTHS:
        for of_depth, value in zip(each, of_each(name, options.pop(name, None), count), strict=True):
            of_depth[name] = value
    return each


def check_stated(hidden: Sequence[Any], target: Any, shift: Any) -> None:
    """Refuses a list that is none of hidden states, and labels of which it is not said which one a depth predicts."""
    count = len(hidden)
    if hidden and not isinstance(hidden[0], Tensor):
        raise errors.DTypeError(f"hidden is a {type(hidden).__name__}; it must be a tensor, or a list of tensors")
    if hidden and not are_several(target) and not are_several(shift):
        raise errors.ArgumentError(
            f"hidden is a list of {count}, and target and shift are one for all: give a target for each, aligned with it, or a list of "
            f"shifts: {[1 + depth for depth in range(count)]} where depth d predicts the label 1 + d positions on, {[0] * count} where all "
            "predict the same"
        )


def check_weights(loss_weights: Any, reduction: str, count: int) -> list[Any] | None:
    if loss_weights is None:
        return None
    if not are_several(loss_weights):
        raise errors.DTypeError(f"loss_weights is a {type(loss_weights).__name__}; it must be a list of numbers")
    if reduction == "none":
        raise errors.ArgumentError("loss_weights is given with reduction 'none', whose losses are not added up; take 'sum' or a mean")
    return [number(f"loss_weights[{at}]", value) for at, value in enumerate(of_each("loss_weights", loss_weights, count))]


def check_divisors(each: list[dict[str, Any]], reduction: Any, class_weight: Any, z_loss: Any, parallel: Parallel | None) -> None:
    """Refuses means whose divisor is not one number that is known here."""
    reduction_code(reduction)
    if reduction == "weighted_mean" and any(of_depth["token_weight"] is None for of_depth in each):
        raise errors.ArgumentError("reduction is 'weighted_mean' and a depth has no token_weight; it divides by the sum of token_weight")
    if reduction in ("none", "sum"):
        if any(of_depth["num_valid_tokens"] is not None for of_depth in each):
            raise errors.ArgumentError(f"num_valid_tokens is given with reduction {reduction!r}; only 'mean' divides by it")
        return
    if class_weight is not None and z_loss:
        raise errors.ArgumentError(
            f"class_weight is given with z_loss={z_loss} and several hidden states: the mean divides cross entropies by class weights and "
            "z-losses by rows. Leave z_loss at 0 and add z_loss * lse.square().sum() / rows of return_lse=True, or make a call a depth"
        )
    if class_weight is not None and parallel is not None:
        raise errors.ArgumentError(
            f"class_weight is given with process_group, several hidden states and reduction {reduction!r}: a depth's sum of class weights "
            "lies over ranks. Take reduction='sum' and divide, or make a call a depth"
        )


def check_alike(at: int, states: Tensor, first: Tensor) -> None:
    """Refuses hidden states of which torch.cat would make another dtype, or an error of its own."""
    if states.shape[-1] != first.shape[-1]:
        raise errors.ShapeError(f"hidden[{at}] has shape {list(states.shape)} and hidden[0] {list(first.shape)}; hidden sizes are one")
    if states.dtype != first.dtype:
        raise errors.DTypeError(f"hidden[{at}] has dtype {states.dtype} and hidden[0] {first.dtype}; all have one")
    if states.device != first.device:
        raise errors.PlacementError(f"hidden[{at}] is on {states.device} and hidden[0] on {first.device}; all are on one device")


class Depths:
    """The depths of one call: `hidden` [rows, D] and `target` [rows] of all of them."""

    def __init__(
        self, hidden: Sequence[Tensor], target: Any, each: list[dict[str, Any]], parallel: Parallel | None, ignore_index: int
    ) -> None:
        self.each = each
        self.parallel = parallel
        self.ignore_index = ignore_index
        self.ranks = 1 if parallel is None else parallel.sequence_ranks
        self.targets: list[Tensor] = []
        for at, labels in enumerate(of_each("target", target, len(hidden))):
            self._check(at, hidden[at], labels)
            check_alike(at, hidden[at], hidden[0])
            shift, cu_seqlens = each[at]["shift"] or 0, each[at]["cu_seqlens"]
            moved = type(shift) is not int or shift != 0 or cu_seqlens is not None
            self.targets.append(targets_of(labels, shift, ignore_index=ignore_index, cu_seqlens=cu_seqlens) if moved else labels)
        self.hidden = torch.cat([states.reshape(-1, states.shape[-1]) for states in hidden])
        self.target = self._rows(self.targets)

    def _check(self, at: int, states: Tensor, labels: Tensor) -> None:
        for name, tensor in ((f"hidden[{at}]", states), (f"target[{at}]", labels)):
            if not isinstance(tensor, Tensor):
                raise errors.DTypeError(f"{name} is a {type(tensor).__name__}; it must be a tensor")
            check_tensors(**{name: tensor})
            if is_dtensor(tensor):
                raise errors.PlacementError(f"{name} is a DTensor; several hidden states are given as local tensors (to_local())")
        check_target_dtype(labels)
        if self.ranks > 1 and labels.dim() != 1:
            raise errors.ShapeError(
                f"target[{at}] has shape {list(labels.shape)}; with sequence_parallel tokens of several hidden states lie in one dimension"
            )
        expected = [size * self.ranks for size in states.shape[:-1]] if self.ranks > 1 else list(states.shape[:-1])
        if states.dim() < 1 or list(labels.shape) != expected:
            raise errors.ShapeError(
                f"target[{at}] has shape {list(labels.shape)} and hidden[{at}] {list(states.shape)}; target[{at}] must have {expected}"
            )

    def _rows(self, of_depths: Iterable[Tensor]) -> Tensor:
        """A number for each row, of a tensor for each depth."""
        return torch.cat([numbers.reshape(self.ranks, -1) for numbers in of_depths], dim=1).reshape(-1)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """A tensor of each depth's shape, of a number for each row."""
        parts = rows.view(self.ranks, -1).split([target.numel() // self.ranks for target in self.targets], dim=1)
        return tuple(part.reshape(target.shape) for part, target in zip(parts, self.targets, strict=True))

    def row_numbers(self) -> dict[str, Any]:
        """The options that have a number for each row; a temperature that is all depths' stays one number."""
        made: dict[str, Any] = {}
        for name in _OF_ROWS:
            given = [of_depth[name] for of_depth in self.each]
            if all(value is None for value in given):
                continue
            if name == "temperature" and not any(isinstance(value, Tensor) for value in given) and len(set(given)) == 1:
                made[name] = given[0]
            else:
                made[name] = self._rows(self._numbers_of(name, at, value) for at, value in enumerate(given))
        return made

    def _numbers_of(self, name: str, at: int, value: Any) -> Tensor:
        target = self.targets[at]
        if not isinstance(value, Tensor):
            plain = 1.0 if value is None else number(f"{name}[{at}]", value)
            if name == "temperature":
                checks.temperature(plain)
            return torch.full(target.shape, plain, dtype=torch.float32, device=target.device)
        if value.shape != target.shape:
            raise errors.ShapeError(f"{name}[{at}] has shape {list(value.shape)}; it must be target[{at}]'s, {list(target.shape)}")
        return value

    def losses(self, rows: tuple[Tensor, ...], reduction: str, weight: Tensor, class_weight: Tensor | None) -> tuple[Tensor, ...]:
        """Each depth's loss of its rows' losses."""
        if reduction == "none":
            return rows
        sums = tuple(losses.sum() for losses in rows)
        if reduction == "sum":
            return sums
        divisors = [self._divisor(at, reduction, weight, class_weight) for at in range(len(rows))]
        # Where there is nothing to divide by, loss and gradients are 0, as in a call of one hidden state.
        factors = [torch.where(divisor > 0, 1 / torch.where(divisor > 0, divisor, 1), 0) for divisor in divisors]
        return tuple(total * factor for total, factor in zip(sums, factors, strict=True))

    def _divisor(self, at: int, reduction: str, weight: Tensor, class_weight: Tensor | None) -> Tensor:
        given, target = self.each[at], self.targets[at]
        if given["num_valid_tokens"] is not None:
            return _arguments.num_valid(given["num_valid_tokens"], reduction, target)
        valid = (target != self.ignore_index) & (target >= 0)
        # Ranks that say no vocab_size are asked for theirs by the call alone: a label past all of them is a fault that it reports.
        classes = weight.shape[0] if self.parallel is None or is_dtensor(weight) else self.parallel.vocab_size
        if self.parallel is not None and self.parallel.vocab_size >= 0:
            classes = self.parallel.vocab_size
        if classes >= 0:
            valid = valid & (target < classes)
        if isinstance(given["temperature"], Tensor):
            valid = valid & (given["temperature"] >= checks.LEAST_TEMPERATURE) & (given["temperature"] <= checks.MOST_TEMPERATURE)
        if class_weight is None and reduction == "mean":
            return valid.sum()
        counted = valid.to(torch.float32)
        if class_weight is not None:
            counted = counted * class_weight.detach().to(torch.float32)[torch.where(valid, target, 0).long()]
        if reduction == "weighted_mean":
            weights = given["token_weight"]
            weights = weights.detach().to(torch.float32) if isinstance(weights, Tensor) else number("token_weight", weights)
            counted = torch.where(valid, counted * weights, 0)
        return counted.sum()
