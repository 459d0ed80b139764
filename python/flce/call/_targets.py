"""Labels to targets on the device: tensor arithmetic of the tokens' number, no value read back, no shape that depends on data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.call import _formats
from flce.core import _autograd, _zero3

_REQUIRED = ("hidden", "weight", "target")
_DTYPES = (torch.int64, torch.int32)
_WEIGHTS = ("weight", "weight_scale", "weight_tensor_scale", "student_weight", "teacher_weight")
_INT, _LONG = 1 << 31, 1 << 63
_MOST_PROBABILITY = 1 + 2**-6  # 1, as 16 bits may round it


def check_tensors(**given: Any) -> None:
    """Raises, naming the argument, for what is no dense tensor; optional ones may be None."""
    for name, value in given.items():
        if value is None and name not in _REQUIRED:
            continue
        if not isinstance(value, Tensor):
            raise errors.DTypeError(f"{name} is a {type(value).__name__}; it must be a tensor")
        if value.layout != torch.strided or value.is_nested:
            kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
            raise errors.ArgumentError(f"{name} is {kind}; it must be dense (torch.strided)")
        _formats.refuse_quantised(name, value)
        if name in _WEIGHTS:
            _formats.refuse_foreign(name, value)
        _zero3.refuse_ungathered(name, value)


def check_target_dtype(target: Tensor) -> None:
    if target.dtype not in _DTYPES:
        raise errors.DTypeError(f"target has dtype {target.dtype}; allowed are int64 and int32 (class probabilities are not supported)")


def check_ignore_index(given: Any) -> int:
    if isinstance(given, Tensor) or not hasattr(given, "__index__"):
        raise errors.DTypeError(f"ignore_index is a {type(given).__name__}; it must be an integer")
    number = int(given)
    if not -_LONG <= number < _LONG:
        raise errors.ArgumentError(f"ignore_index is {number}; it must fit 64 bits")
    return number


def _check_shift(target: Tensor, shift: int, cu_seqlens: Tensor | None) -> None:
    if not isinstance(shift, int) or shift < 0:
        raise errors.ArgumentError(f"shift is {shift!r}; it must be an integer of 0 or more")
    if target.dim() < 1:
        raise errors.ShapeError("target is a scalar; shift needs a dimension to shift along")
    _check_length(target, shift, packed=cu_seqlens is not None)
    if cu_seqlens is None:
        return
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise errors.ArgumentError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; it must be [num_sequences + 1], int32 or int64"
        )
    if cu_seqlens.device != target.device:
        raise errors.PlacementError(f"cu_seqlens is on {cu_seqlens.device}; it must be on target's device, {target.device}")
    _check_offsets(cu_seqlens)


def _check_length(target: Tensor, shift: int, *, packed: bool) -> None:
    """Refuses a shift that leaves no label for any labels. The ends of packed sequences are known to the device alone, which is not waited
    for."""
    length = target.numel() if packed else target.shape[-1]
    if 0 < length < shift:
        where = "all sequences of target together are" if packed else "target's sequences (its last dimension) are"
        raise errors.ArgumentError(f"shift is {shift}; {where} {length} long, and shift must not be more")


def targets_of(labels: Tensor, shift: int, *, ignore_index: int, cu_seqlens: Tensor | None) -> Tensor:
    """`shift_labels` for labels that lie as hidden states do. Raises ArgumentError for flattened ones whose sequences are not known: the
    last position of each would predict the first label of the next."""
    if isinstance(shift, int) and shift > 0 and cu_seqlens is None and isinstance(labels, Tensor) and labels.dim() == 1:
        raise errors.ArgumentError(
            f"shift is {shift!r} and target has shape {list(labels.shape)}, flattened tokens without cu_seqlens: where a sequence ends is "
            "not known, and its last position would predict the next sequence's label. Give cu_seqlens, or hidden [batch, sequence, "
            "hidden_size] and target [batch, sequence], or leave shift at 0 for targets that are aligned already"
        )
    return shift_labels(labels, shift, ignore_index=ignore_index, cu_seqlens=cu_seqlens)


def _check_offsets(cu_seqlens: Tensor) -> None:
    """Where its numbers are on the host, and may be looked at."""
    if (
        cu_seqlens.device.type != "cpu"
        or type(cu_seqlens) is not Tensor
        or not _autograd.is_eager()
        or not bool(_are_no_offsets(cu_seqlens))
    ):
        return
    offsets = cu_seqlens.tolist()
    found = f"cu_seqlens[0] is {offsets[0]}"
    if offsets[0] == 0:
        at = next(i for i in range(1, len(offsets)) if offsets[i] < offsets[i - 1])
        found = f"cu_seqlens[{at}] is {offsets[at]} behind {offsets[at - 1]}"
    raise errors.ArgumentError(
        f"{found}; it must hold offsets, which begin with 0 and do not decrease: of lengths, F.pad(lengths.cumsum(0), (1, 0))"
    )


def _are_no_offsets(cu_seqlens: Tensor) -> Tensor:
    return (cu_seqlens[0] != 0) | (cu_seqlens[1:] < cu_seqlens[:-1]).any()


def _impossible(ignore_index: int) -> int:
    """A label that no vocabulary has, for rows that are at fault: kernels take them for ignored ones and report them."""
    return -_INT + (ignore_index == -_INT)


def refuse_impossible_teachers(target: Tensor, teacher_ids: Tensor, teacher_probs: Tensor, ignore_index: int) -> Tensor:
    """`target`, at fault where what a teacher has at a class is negative or more than 1. One that fits nothing is left to other checks."""
    ignore_index = check_ignore_index(ignore_index)
    if not isinstance(target, Tensor) or (target.shape, target.device) != (teacher_ids.shape[:-1], teacher_ids.device):
        return target
    wrong = ((teacher_probs < 0) | (teacher_probs > _MOST_PROBABILITY)) & (teacher_ids != -1)
    return torch.where(wrong.any(-1) & (target != ignore_index), _impossible(ignore_index), target)


def shift_labels(labels: Tensor, shift: int = 1, *, ignore_index: int = -100, cu_seqlens: Tensor | None = None) -> Tensor:
    """The label that each position has to predict: the one `shift` positions later in the same sequence, ignore_index where there is none.

    labels [..., S] are sequences along the last dimension. With cu_seqlens [num_sequences + 1] (non-decreasing, from 0) labels are one row
    of packed sequences, sequence i at cu_seqlens[i] to cu_seqlens[i + 1]; labels past the last sequence are ignored. Where cu_seqlens
    begins with another number or decreases, on a CPU it raises; on a GPU, and in compiled code, every label is one that no vocabulary has,
    which `check_labels` reports. Returns a new tensor of labels' shape and dtype (int64 for an ignore_index that labels' dtype cannot
    hold). Raises ArgumentError, also for a shift that is more than the length of labels that are there, ShapeError, DTypeError,
    PlacementError.
    """
    check_tensors(target=labels, cu_seqlens=cu_seqlens)
    check_target_dtype(labels)
    ignore_index = check_ignore_index(ignore_index)
    _check_shift(labels, shift, cu_seqlens)
    if not -_INT <= ignore_index < _INT:
        labels = labels.long()
    if cu_seqlens is None:
        target = torch.full_like(labels, ignore_index, memory_format=torch.contiguous_format)
        length = labels.shape[-1]
        if shift < length:
            target[..., : length - shift] = labels[..., shift:]
        return target
    flat = labels.reshape(-1)
    positions = torch.arange(flat.shape[0], device=flat.device, dtype=cu_seqlens.dtype)
    # The end of the sequence that a position is in: the first boundary beyond it; past the last boundary, a place it is already behind.
    ends = cu_seqlens[torch.bucketize(positions, cu_seqlens, right=True).clamp(max=cu_seqlens.shape[0] - 1)].clamp(max=flat.shape[0])
    moved = torch.where(positions + shift < ends, torch.roll(flat, -shift), ignore_index)
    return torch.where(_are_no_offsets(cu_seqlens), _impossible(ignore_index), moved).view(labels.shape)
