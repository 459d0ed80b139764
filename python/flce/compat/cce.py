"""Cut cross-entropy's functions (`cut_cross_entropy`) on flce's kernels. Gradients are never filtered, and are accumulated in fp32."""

from __future__ import annotations

import copy
import enum
import numbers
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce import errors, functional
from flce.call import _arguments
from flce.call._targets import shift_labels
from flce.compat._common import check_reduction, nan_unless

__all__ = ["LinearCrossEntropy", "LinearCrossEntropyImpl", "VocabParallelOptions", "compute_z_loss", "linear_cross_entropy"]


class LinearCrossEntropyImpl(enum.IntEnum):
    """Names of implementations; here all mean the same one."""

    CCE = 1
    TORCH_COMPILE = 2
    CCE_KAHAN_FULL_C = 3
    CCE_KAHAN_FULL_E = 4
    CCE_EXACT = 5
    CCE_KAHAN_FULL_C_FULL_E = 6
    CCE_KAHAN_FULL = 7


_IMPLEMENTATIONS = frozenset(impl.name.lower() for impl in LinearCrossEntropyImpl)


@dataclass
class VocabParallelOptions:
    """Rows [start, stop) of the whole weight that this rank of `group` has (None: the default group), and whether e's gradient is the sum
    over its ranks or this rank's part of it."""

    start: int
    stop: int
    group: Any = None
    reduce_e_grad: bool = True
    _cut: ClassVar[Any] = None  # from_vocab's own (start, stop, vocab_size)

    def __deepcopy__(self, memo: Any) -> VocabParallelOptions:
        return copy.copy(self)  # with the same group, which cannot be copied

    @classmethod
    def from_vocab(cls, vocab_size: int, group: Any = None, reduce_e_grad: bool = True) -> VocabParallelOptions:
        """This rank's slice: the first vocab_size % world_size ranks have one row more."""
        rank, (each, more) = dist.get_rank(group), divmod(vocab_size, dist.get_world_size(group))
        start = rank * each + min(rank, more)
        options = cls(start, start + each + (rank < more), group, reduce_e_grad)
        vars(options)["_cut"] = (options.start, options.stop, vocab_size)
        return options


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str | LinearCrossEntropyImpl = "cce",
    vocab_parallel_options: VocabParallelOptions | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss of e [..., D] with c [V, D] against targets [...], or (loss, lse), fp32 and both differentiable.

    shift: position t predicts targets[..., t + shift]; per-token outputs have the shape of targets[..., shift:]. The mean is NaN where no
    row is valid. filter_*, accum_* and impl are looked at and change nothing.

    vocab_parallel_options: c and bias are this rank's slice of the vocabulary, e and targets the same on every rank, targets of the whole
    vocabulary. Loss and lse are those of the whole layer, the same bits on every rank; ranks' parts of e's gradient are added up in fp32.
    """
    for name, tensor in (("e", e), ("c", c), ("targets", targets), ("bias", bias)):
        _arguments.refuse_dtensor(name, tensor)
    _check_choices(impl, filter_eps)
    check_reduction(reduction, "none", "sum", "mean")
    length = targets.shape[-1] if targets.dim() else 1
    if not 0 <= shift < length:
        raise errors.ArgumentError(f"shift is {shift!r}; it must be in [0, {length}), which is targets' last dimension")
    shift = int(shift)
    over_ranks = {} if vocab_parallel_options is None else _over_ranks(vocab_parallel_options, c, bias)
    settings: dict[str, Any] = {"ignore_index": ignore_index, "softcap": softcap, "reduction": reduction}
    # The peer shifts flattened targets, too, as one sequence.
    shifted = shift_labels(targets, shift, ignore_index=ignore_index) if shift else targets
    outputs = functional.linear_cross_entropy(e, c, shifted, bias=bias, return_lse=return_lse, **settings, **over_ranks)
    loss, lse = outputs if return_lse else (outputs, None)
    if reduction == "mean":
        loss = nan_unless((targets[..., shift:] != ignore_index).any(), loss)
    elif reduction == "none":
        loss = _without_end(loss, shift)
    return loss if lse is None else (loss, _without_end(lse, shift))


def _over_ranks(options: VocabParallelOptions, c: Tensor, bias: Tensor | None) -> dict[str, Any]:
    """The options as flce has them. Raises where this rank's tensors are not the slice that they say."""
    size = options.stop - options.start
    for name, tensor in (("c", c), ("bias", bias)):
        if tensor is not None and tensor.shape[:1] != (size,):
            raise errors.ShapeError(
                f"{name} has shape {list(tensor.shape)}; vocab_parallel_options say [{options.start}, {options.stop}), so it must have "
                f"{size} rows"
            )
    group = dist.group.WORLD if options.group is None else options.group
    if group is None:
        raise errors.ArgumentError(
            "vocab_parallel_options.group is None, which is the default process group, and there is none yet: call "
            "torch.distributed.init_process_group first"
        )
    # Ranks compare the whole's size where they know it.
    cut, summed = options._cut, options.reduce_e_grad
    return {
        "process_group": group,
        "vocab_start": options.start,
        "vocab_size": cut[2] if cut is not None and cut[:2] == (options.start, options.stop) else None,
        "reduce_grad_hidden": summed,
        "reduce_dtype": torch.float32 if summed else None,
    }


def _without_end(values: Tensor, shift: int) -> Tensor:
    """Drops the last `shift` positions, which predict nothing, from values that lie as hidden does."""
    return values[..., :-shift] if shift else values


def _check_choices(impl: str | LinearCrossEntropyImpl, filter_eps: float | str | None) -> None:
    name = impl.name.lower() if isinstance(impl, LinearCrossEntropyImpl) else impl
    if name not in _IMPLEMENTATIONS:
        raise NotImplementedError(f"impl is {impl!r}; allowed are {', '.join(sorted(_IMPLEMENTATIONS))}")
    if filter_eps is not None and not isinstance(filter_eps, numbers.Real) and filter_eps not in ("auto", "high"):
        raise errors.ArgumentError(
            f"filter_eps is {filter_eps!r}; it must be a number, 'auto', 'high' or None (gradients are not filtered)"
        )


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its options stored."""

    def __init__(
        self,
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: str = "mean",
        shift: bool | int = 0,
        filter_eps: float | str | None = "auto",
        accum_e_fp32: bool = False,
        accum_c_fp32: bool = False,
        filter_e_grad: bool = True,
        filter_c_grad: bool = True,
        impl: str | LinearCrossEntropyImpl = "cce",
        return_lse: bool = False,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.softcap = softcap
        self.reduction = reduction
        self.shift = shift
        self.filter_eps = filter_eps
        self.accum_e_fp32 = accum_e_fp32
        self.accum_c_fp32 = accum_c_fp32
        self.filter_e_grad = filter_e_grad
        self.filter_c_grad = filter_c_grad
        self.impl = impl
        self.return_lse = return_lse

    def forward(self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return linear_cross_entropy(
            e,
            c,
            targets,
            bias=bias,
            ignore_index=self.ignore_index,
            softcap=self.softcap,
            reduction=self.reduction,
            shift=self.shift,
            return_lse=self.return_lse,
            filter_eps=self.filter_eps,
            accum_e_fp32=self.accum_e_fp32,
            accum_c_fp32=self.accum_c_fp32,
            filter_e_grad=self.filter_e_grad,
            filter_c_grad=self.filter_c_grad,
            impl=self.impl,
        )


def compute_z_loss(
    lse: Tensor, targets: Tensor | None = None, shift: bool | int = False, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """lse² over the positions whose target is not ignore_index (over all of them without targets), of lse's dtype. `shift` moves targets
    alone: lse is what `linear_cross_entropy` returned with the same shift."""
    check_reduction(reduction, "none", "sum", "mean")
    squares = lse.square()
    if targets is not None:
        valid = targets[..., int(shift) :] != ignore_index
        if valid.shape != lse.shape:
            raise errors.ShapeError(f"lse has shape {list(lse.shape)}; with these targets it must be {list(valid.shape)}")
        squares = torch.where(valid, squares, 0.0)
        if reduction == "mean":
            return squares.sum() / valid.sum()
    if reduction == "none":
        return squares
    return squares.sum() if reduction == "sum" else squares.mean()
