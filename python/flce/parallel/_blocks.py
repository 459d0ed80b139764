"""A cross entropy whose classes are taken in blocks of one size, so that loss and gradients have the same bits over however many ranks the
blocks lie.

forward   gather rows · partial sums of each of this rank's blocks · gather all blocks' · merge them
backward  gather rows · of each block the gradients of all rows and of its classes · add up all blocks' gradients of rows

A block's kernel calls are the same ones on whichever rank it lies, and partial sums are merged in the order of blocks. Gradients of rows
are added up in fp64 as whole multiples of a unit: such a sum is exact, so that no order of its additions shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce import errors
from flce.call import _arguments, _call, _op
from flce.core import _kernels, _native, _retain, checks
from flce.core._frame import CallOptions, Inputs, Parallel
from flce.parallel import _parallel
from flce.parallel._layouts import Shard
from flce.parallel._shards import ShardKernel

_EXACT_BITS = 52  # whole numbers whose sum is below 2^53 are added up exactly in fp64; one bit is for their rounding
_CHUNK = 1 << 22  # numbers that are computed in fp64 at a time


class Blocks(NamedTuple):
    """How classes lie over ranks, in blocks of `size`."""

    size: int
    classes: tuple[int, ...]  # numbers of each rank's classes, multiples of `size`
    rank: int = 0
    group: Any = None  # None: there is one rank

    @property
    def total(self) -> int:
        return sum(self.classes)

    @property
    def first(self) -> int:
        """The label of this rank's first class."""
        return sum(self.classes[: self.rank])

    @property
    def all_blocks(self) -> int:
        return self.total // self.size

    def gathered(self, part: Tensor) -> Tensor:
        """All ranks' parts, of one size, along dimension 0."""
        return part if self.group is None else _parallel.gathered(self.group, part, len(self.classes))

    def of_all_blocks(self, mine: Tensor) -> Tensor:
        """All blocks' numbers along dimension 0, of this rank's, in the order of blocks."""
        if self.group is None:
            return mine
        told = mine.new_zeros((max(self.classes) // self.size, *mine.shape[1:]))
        told[: mine.shape[0]] = mine
        everyone = self.gathered(told).view(len(self.classes), *told.shape)
        return torch.cat([part[: count // self.size] for part, count in zip(everyone, self.classes, strict=True)])

    def summed_rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks'."""
        if self.group is None:
            return whole
        mine = whole.new_empty((whole.shape[0] // len(self.classes), *whole.shape[1:]))
        _parallel._reduce_scatter(mine, whole, group=self.group)
        return mine

    def over_ranks(self, number: Tensor, operation: Any) -> Tensor:
        """One number of all ranks' numbers."""
        if self.group is not None:
            dist.all_reduce(number, operation, group=self.group)
        return number


class _Call(NamedTuple):
    """Facts of a call that both passes know beside its tensors."""

    blocks: Blocks
    options: CallOptions
    columns: int  # columns of rows from which a scale's gradient is computed
    number: float  # the scale, where it is no tensor


class _Labels(NamedTuple):
    """Labels of all ranks' rows, and groups."""

    target: Tensor
    row_group: Tensor | None = None  # groups of all ranks' rows
    class_group: Tensor | None = None  # groups of this rank's classes


class _BlockKernel(ShardKernel):
    """A kernel of one block's classes; `ranks` is the number of blocks."""

    def write_partial_sums(self, given: Inputs, partial_sums: Tensor) -> None:
        frame: Any = self._take_frame()
        kept = frame.inputs(frame.forward, given)  # noqa: F841  # alive until the call is made
        frame.retain(frame.forward, None)
        frame.partial_sums.data = partial_sums.data_ptr()
        self.run(self.forward_function, frame.forward_address, frame.forward_bytes)
        self.frames.append(frame)

    def merge(self, given: Inputs, all_partial_sums: Tensor, values: Tensor) -> Tensor:
        """Writes `values`. Returns the tensor that backward needs."""
        frame: Any = self._take_frame()
        kept = frame.inputs(frame.forward, given)  # noqa: F841
        frame.merge.num_valid = None
        saved = self.new_floats(self.outputs.saved_size(frame.num_tokens))
        self.point_to_outputs(frame, saved, values, None)
        frame.all_partial_sums.data = all_partial_sums.data_ptr()
        self.run(self.merge_function, frame.merge_address, frame.merge_bytes)
        self.frames.append(frame)
        return saved


def cross_entropy(
    rows: Tensor,
    classes: Tensor,
    target: Tensor,
    scale: Tensor | float,
    blocks: Blocks,
    options: CallOptions,
    columns: int,
    groups: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Cross entropy of scale · rows · classesᵀ, of this rank's rows [N, D], classes [M, D] and all ranks' labels [ranks · N]. The first
    `columns` of rows give a scale its gradient, which the first rank has for all of them, and the others' is 0. `options` have the scale
    where it is a number. `groups`: those of `functional.cross_entropy_of_groups`, of all ranks' rows and of this rank's classes."""
    if torch.compiler.is_compiling():
        raise errors.UnsupportedTransformError("documents_per_block is for eager mode; leave it out under torch.compile")
    given = Inputs(rows, classes, target, replace(options, retain=_retain.Retain()))
    if not _call._is_plain(given):
        raise errors.ArgumentError(
            "documents_per_block takes plain tensors in eager mode; leave it out under dispatch modes and for others"
        )
    for name, tensor in (("queries", rows), ("documents", classes)):
        _arguments.refuse_tangent(name, tensor)
    given = _call._autocast(given)
    _arguments.check_inputs(given.hidden, given.weight, target, {}, len(blocks.classes))
    given = _call._as_kernels_read(given)
    number = math.nan if isinstance(scale, Tensor) else float(scale)
    call = _Call(blocks, given.options, columns, number)
    labels = _Labels(target, *(groups or ()))
    loss: Tensor = _CrossEntropy.apply(given.hidden, given.weight.contiguous(), scale, labels, call)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, classes: Tensor, scale: Tensor | float, labels: _Labels, call: _Call) -> Tensor:
        blocks, number = call.blocks, scale.detach() if isinstance(scale, Tensor) else None
        everyone, tokens = blocks.gathered(rows.detach()), labels.target.shape
        merger = _kernel(_given(call, everyone, classes, labels, number, 0), 0, call)
        partial_sums = merger.new_floats((classes.shape[0] // blocks.size, merger.fields, tokens[0]))
        for index, mine in enumerate(partial_sums):
            given = _given(call, everyone, classes, labels, number, index)
            _kernel(given, blocks.first + index * blocks.size, call).write_partial_sums(given, mine)
        given = _given(call, everyone, classes, labels, number, 0)
        loss = merger.new_values(given, tokens)
        saved = merger.merge(given, blocks.of_all_blocks(partial_sums), loss)
        ctx.call = call
        ctx.save_for_backward(rows, classes, saved, number, *labels)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        rows, classes, saved, number, *labels = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        made = _Gradients(ctx.call, rows, classes, _Labels(*labels), saved, number).made(grad_loss.resolve_neg().contiguous(), wanted)
        if torch.is_grad_enabled():
            made = tuple(_op.refuse_second_derivative(made, (grad_loss, rows, classes, number)))
        return *made, None, None


def _given(call: _Call, everyone: Tensor, classes: Tensor, labels: _Labels, number: Tensor | None, index: int) -> Inputs:
    """Inputs of the kernel calls of this rank's block number `index`. A rank without any has memory for one, for the merge alone, which
    does not read it."""
    blocks = call.blocks
    of_block = slice(index * blocks.size, (index + 1) * blocks.size)
    block, target = classes.detach()[of_block], labels.target
    groups = None if labels.class_group is None else labels.class_group[of_block]
    if block.shape[0] == 0:
        block = classes.new_empty((blocks.size, classes.shape[1]))
        groups = None if groups is None else groups.new_empty(blocks.size)
    start = blocks.first + index * blocks.size
    parallel = Parallel(blocks.all_blocks, False, start, blocks.total, -1, torch.float32, False, "")
    temperature = None if number is None else (1 / number.to(torch.float32).reshape(())).expand(target.shape).contiguous()
    options = replace(call.options, parallel=parallel)
    return Inputs(everyone, block, target, options, temperature=temperature, class_group=groups, row_group=labels.row_group)


def _kernel(given: Inputs, start: int, call: _Call) -> _BlockKernel:
    size, total = call.blocks.size, call.blocks.total
    key = _kernels.key_of(given, None, size)._replace(whole_vocab_size=total, padded_vocab_size=size, grad_hidden_dtype=torch.float32)
    shard = Shard(start, size, size, size, size, total)
    kernel: Any = _kernels.find(key, of=(shard, call.blocks.all_blocks), make=_BlockKernel)
    return kernel  # type: ignore[no-any-return]


class _Gradients:
    """One backward."""

    def __init__(self, call: _Call, rows: Tensor, classes: Tensor, labels: _Labels, saved: Tensor, number: Tensor | None) -> None:
        self.call, self.blocks = call, call.blocks
        self.rows, self.classes, self.labels, self.saved, self.number = rows.contiguous(), classes.contiguous(), labels, saved, number
        self.target = labels.target

    def made(self, grad_loss: Tensor, wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        want_rows, want_classes, want_scale = wanted
        of_rows = want_rows or want_scale
        everyone = self.blocks.gathered(self.rows.detach())
        grad_classes = torch.empty_like(self.classes) if want_classes else None
        part = torch.empty(everyone.shape, dtype=torch.float32, device=everyone.device) if of_rows else None
        whole = torch.zeros(everyone.shape, dtype=torch.float64, device=everyone.device) if of_rows else None
        bounds = self._bounds(grad_loss) if of_rows else None
        size = self.blocks.size
        for index in range(self.classes.shape[0] // size):
            given = _given(self.call, everyone, self.classes, self.labels, self.number, index)
            of_block = None if grad_classes is None else grad_classes[index * size : (index + 1) * size]
            kernel = _kernel(given, self.blocks.first + index * size, self.call)
            kernel.backward(given, self.saved.contiguous(), grad_loss, part, of_block, None)
            if whole is not None and part is not None and bounds is not None:
                unit = _units(bounds, _EXACT_BITS)[:, None]
                for some in _chunks(part):
                    whole[some] += part[some].double().div_(unit[some]).round_()
        if whole is None or bounds is None:
            return None, grad_classes, None
        del part
        mine = self.blocks.summed_rows(whole)
        begin = self.blocks.rank * mine.shape[0]
        mine.mul_(_units(bounds, _EXACT_BITS)[begin : begin + mine.shape[0], None])
        grad_scale = self._grad_scale(mine, bounds) if want_scale else None
        return mine.to(self.rows.dtype) if want_rows else None, grad_classes, grad_scale

    def _bounds(self, grad_loss: Tensor) -> Tensor:
        """Bounds of all ranks' rows, for elements of a row's gradient and for sums of blocks' parts of it: twice the largest
        class, times what reaches the row from above, and as much again for rounding."""
        scale = self.call.number if self.number is None else self.number.double().abs().reshape(())
        counts = (self.target >= 0) & (self.target < self.blocks.total)
        above = torch.where(counts, grad_loss.double().abs(), 0.0)  # nothing reaches a row that is left out
        if self.call.options.reduction == _native.REDUCTION_MEAN:
            above = above / counts.sum().clamp(min=1)
        return above * scale * 4 * self._largest(self.classes)

    def _largest(self, tensor: Tensor) -> Tensor:
        """The largest of all ranks' numbers."""
        number = tensor.detach().abs().amax() if tensor.numel() else tensor.new_zeros(())
        return self.blocks.over_ranks(number.double(), dist.ReduceOp.MAX)

    def _grad_scale(self, grad_rows: Tensor, bounds: Tensor) -> Tensor:
        """Σ rows · grad_rows / scale over all ranks, added up exactly, on the first rank; 0 on the others."""
        assert self.number is not None
        columns = self.call.columns
        count = max(self.target.shape[0] * columns, 1)
        largest = bounds.amax() if bounds.numel() else bounds.new_zeros(())
        unit = _units(self._largest(self.rows[:, :columns]) * largest, _EXACT_BITS - math.ceil(math.log2(count)))
        total = torch.zeros((), dtype=torch.float64, device=self.rows.device)
        for some in _chunks(grad_rows):
            total += (self.rows[some, :columns].double() * grad_rows[some, :columns]).div_(unit).round_().sum()
        total = self.blocks.over_ranks(total, dist.ReduceOp.SUM) * unit
        number = self.number.double().reshape(())
        # Where the scale is no number that the kernels take, nothing counts.
        counts = (number >= checks.LEAST_TEMPERATURE) & (number <= checks.MOST_TEMPERATURE)
        found = torch.where(counts, total / torch.where(counts, number, 1), 0)
        if self.blocks.rank:
            found = torch.zeros_like(found)
        return found.to(self.number.dtype).reshape(self.number.shape)


def _units(bounds: Tensor, bits: int) -> Tensor:
    """Powers of two of which a number within its bound is at most 2^bits."""
    _, exponents = torch.frexp(bounds)
    units = torch.exp2(exponents.double() - bits)
    return torch.where(torch.isfinite(bounds) & (bounds > 0), units, 1)


def _chunks(tensor: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK // max(tensor.shape[1], 1))
    for begin in range(0, tensor.shape[0], step):
        yield slice(begin, begin + step)
