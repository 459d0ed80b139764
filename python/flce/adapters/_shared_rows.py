"""Logits of which few rows differ: a loss function of a whole batch runs on them in the memory of those rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce import errors

_aten = torch.ops.aten
# Elements of whole logits that a function which is not followed may be given.
_MOST_ELEMENTS = 1 << 23
# Functions of the positions alone.
_OF_POSITIONS = frozenset(
    (_aten.view.default, _aten._unsafe_view.default, _aten.index.Tensor, _aten.slice.Tensor, _aten.select.int, _aten.unsqueeze.default)
)
_SAME = frozenset((_aten.clone.default, _aten.alias.default, _aten.detach.default, _aten.contiguous.default, _aten.lift_fresh.default))


class SharedRows(Tensor):
    """Logits [..., V]: position p has the row `rows[places[p]]`. `rows` [K, V] are in fp64 for every dtype of the logits, so that a loss of
    16-bit logits has no rounding of its own. Functions that are not followed get whole logits where these are few, and raise ArgumentError
    where they are many or are changed in place."""

    rows: Tensor
    places: Tensor

    @staticmethod
    def __new__(cls, rows: Tensor, places: Tensor, dtype: torch.dtype) -> SharedRows:
        shape = (*places.shape, rows.shape[-1])
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.device)  # type: ignore[attr-defined]
        made.rows, made.places = rows.double() if rows.is_floating_point() else rows, places
        return made  # type: ignore[no-any-return]

    def whole(self) -> Tensor:
        return self.rows[self.places].to(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SharedRows(shape={list(self.shape)}, dtype={self.dtype}, rows={self.rows.shape[0]})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        every = [value for value in (*args, *kwargs.values()) if isinstance(value, SharedRows)]
        if torch.Tag.pointwise in func.tags:
            followed = _pointwise(func, every, args, kwargs)
        else:
            followed = _follow(func, args, kwargs) if isinstance(args[0], SharedRows) else None
        if followed is not None:
            return followed
        most = max((value.numel() for value in every), default=0)
        if func._schema.is_mutable or most > _MOST_ELEMENTS:
            how = "changes them in place" if func._schema.is_mutable else f"is given all {most:,} of them"
            raise errors.ArgumentError(f"what is done with logits cannot be followed: {func} {how}")
        return func(*torch.utils._pytree.tree_map(_whole, args), **torch.utils._pytree.tree_map(_whole, kwargs))


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, SharedRows) else value


def _follow(func: Any, args: Any, kwargs: Any) -> Any:
    given: SharedRows = args[0]
    if func is _aten._to_copy.default:
        device = kwargs.get("device") or given.rows.device
        return SharedRows(given.rows.to(device), given.places.to(device), kwargs.get("dtype") or given.dtype)
    if func in _SAME:
        return SharedRows(given.rows, given.places, given.dtype)
    if func in _OF_POSITIONS:
        return _of_positions(func, given, args[1:], kwargs)
    if func in (_aten._log_softmax.default, _aten._softmax.default):
        return SharedRows(func(given.rows, 1, False), given.places, given.dtype) if args[1] in (-1, given.dim() - 1) else None
    if func is _aten.nll_loss_forward.default:
        return _nll_loss(given, *args[1:])
    return None


def _of_positions(func: Any, given: SharedRows, rest: Any, kwargs: Any) -> Any:
    index, last = given.places, given.dim() - 1
    if func in (_aten.view.default, _aten._unsafe_view.default):
        if not rest[0] or rest[0][-1] not in (-1, given.shape[-1]) or index.numel() == 0:
            return None
        shape = list(rest[0])[:-1]
        if rest[0][-1] == -1 and torch.Size(shape).numel() != index.numel():
            return None
        return SharedRows(given.rows, index.reshape(shape), given.dtype)
    if func is _aten.index.Tensor:
        if len(rest[0]) > index.dim():
            return None
        return SharedRows(given.rows, index[tuple(slice(None) if each is None else each for each in rest[0])], given.dtype)
    dim = rest[0] if rest else 0
    dim = dim + given.dim() + (func is _aten.unsqueeze.default) if dim < 0 else dim
    if func is _aten.slice.Tensor and dim == last:
        return SharedRows(func(given.rows, 1, *rest[1:], **kwargs), index, given.dtype)
    if dim >= last + (func is _aten.unsqueeze.default):
        return None
    return SharedRows(given.rows, func(index, dim, *rest[1:], **kwargs), given.dtype)


def _pointwise(func: Any, every: list[SharedRows], args: Any, kwargs: Any) -> Any:
    """A function of each logit alone, and of tensors that are the same for all positions."""
    given = every[0]

    def of_rows(value: Any) -> Any:
        if isinstance(value, SharedRows):
            return value.rows
        return value.reshape(-1) if isinstance(value, Tensor) and value.dim() > 1 else value

    for value in (*args, *kwargs.values()):
        if isinstance(value, SharedRows):
            alike = value.places is given.places or torch.equal(value.places, given.places)
        else:
            alike = not isinstance(value, Tensor) or torch.Size(value.shape[:-1]).numel() == 1
        if not alike:
            return None
    if func._schema.is_mutable:
        if args[0] is not given:
            return None
        given.rows = given.rows.clone()
    made = func(*map(of_rows, args), **{name: of_rows(value) for name, value in kwargs.items()})
    if func._schema.is_mutable:
        return given
    return SharedRows(made, given.places, given.dtype if made.is_floating_point() else made.dtype)


def _nll_loss(given: SharedRows, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Any:
    counted = (target != ignore_index) & (target >= 0) & (target < given.shape[-1])
    classes = torch.where(counted, target, 0)
    share = counted.double() if weight is None else torch.where(counted, weight[classes].double(), 0.0)
    losses = torch.where(counted, -given.rows[given.places, classes], 0.0) * share
    count = share.sum()
    if reduction == 0:
        return losses, count
    return losses.sum() / count if reduction == 1 else losses.sum(), count
