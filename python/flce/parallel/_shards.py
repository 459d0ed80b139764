"""Kernels of a layer whose classes lie over a group's ranks: a rank's part of a call, and the collectives between its passes.

forward   (gather hidden) · partial sums of this rank's classes · gather all ranks' beside what is left · merge them into the outputs
backward  (gather hidden) · grad_hidden, this rank's part · add up all ranks' while grad_weight is made
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.call import _options
from flce.core import _kernels, _native, _retain
from flce.core._frame import GROUPS, VALUES, Frame, Inputs, Parallel, is_hidden_major
from flce.core._kernel_key import DTYPE_NAMES, OF_CLASSES, KernelKey
from flce.parallel import _layouts, _parallel
from flce.parallel._layouts import Shard

_OF_BOTH = ("temperature", "token_weight")
_OF_TOKENS = ("target", "temperature", "token_weight", "num_valid", "teacher_ids", "teacher_probs")
_OF_MERGE = ("target", "all_partial_sums", "lse", "invalid_label")


class ShardFrame(Frame):
    """A Frame with the struct of merge, too, which has the outputs that a whole layer's forward has."""

    def __init__(self, kernel: ShardKernel) -> None:
        self.merge: Any = _native.call_arguments().merge()
        super().__init__(kernel)
        key, address, shard = kernel.key, self.address, kernel.shard
        merge, forward, backward = self.merge, self.forward, self.backward
        merge.struct_size = ctypes.sizeof(merge)
        for name in _OF_MERGE:
            setattr(merge, name, address[name])
        for name in _OF_BOTH:
            setattr(merge, name, address[name] if getattr(key, name) else None)
        values, _, saved, teacher_top_k, total = kernel.outputs
        for name in ("teacher_ids", "teacher_probs", "teacher_logprobs"):
            setattr(merge, name, address[name] if teacher_top_k else None)
        for name in VALUES:
            if name != "lse":
                setattr(merge, name, address[name] if name in values else None)
            setattr(forward, name, None)
        forward.teacher_logprobs = forward.invalid_label = None
        forward.partial_sums = address["partial_sums"]
        for name, there in (("target_class_weight", "target_class_weight" in saved), ("class_weight_total", total)):
            for args in (merge, backward):
                setattr(args, name, address[name] if there else None)
        forward.vocab_start = backward.vocab_start = shard.vocab_start
        self.merge_address = ctypes.addressof(merge)

    def resize(self, num_tokens: int) -> None:
        super().resize(num_tokens)
        kernel: Any = self.kernel
        for name, ranks in (("partial_sums", 1), ("all_partial_sums", kernel.ranks)):
            view = getattr(self, name)
            view.rows, view.columns, view.row_stride = ranks * kernel.fields, num_tokens, num_tokens
        self.merge_bytes = _native.workspace_bytes(kernel._handle, num_tokens, _native.MERGE)

    def retain(self, args: Any, memory: Tensor | None, *, lent: bool = False) -> None:
        """Points the next call to shared memory. The weight's gradient lends its rows of classes, not its rows of padding."""
        super().retain(args, memory, lent=lent)
        if lent and memory is not None:
            shard = self.kernel.shard  # type: ignore[attr-defined]
            args.retained_bytes = memory.nbytes // shard.rows * shard.classes

    def set_top1(self, memory: Tensor | None) -> None:
        if memory is not None:
            self.top1.data = memory.data_ptr()
        self.merge.top1 = None if memory is None else self.address["top1"]

    def set_rule(self, ignore_index: int, reduction: int) -> None:
        super().set_rule(ignore_index, reduction)
        self.merge.ignore_index, self.merge.reduction = ignore_index, reduction


class ShardKernel(_kernels.LoadedKernel):
    """A kernel with the place of one rank's weight in the vocabulary, among so many ranks."""

    frame_type: type[Frame] = ShardFrame
    retains_unasked = True

    def __init__(self, key: KernelKey, handle: ctypes.c_void_p, shard: Shard, ranks: int) -> None:
        self.shard, self.ranks = self.of = shard, ranks
        self.fields = _native.partial_sum_fields(handle)
        super().__init__(key, handle)
        self.weight_rows = shard.rows
        self.retains = self.retains and shard.classes > 0
        self.merge_function = self._library.flce_kernel_merge

    def saved_anew(self, given: Inputs, saved: Tensor) -> Tensor:
        """Forward's: another forward would wait for ranks that have kept what they retained. Gradients may differ in their last bits."""
        return saved.contiguous()

    def choose_retained(self, num_tokens: int, *, workspace_limit_bytes: int = 0, retain_in_grad_weight: bool = True) -> _retain.Choice:
        """Chooses as for a whole layer, for this rank's classes."""
        place, size = _native.choose_retained(
            self._handle, num_tokens, workspace_limit_bytes, retain_in_grad_weight, _retain.LEAST_WORK, self.shard.classes
        )
        return _retain.Choice(place == _native.RETAINED_GRAD_WEIGHT, size)

    def as_read(self, given: Inputs) -> Inputs:
        """Gathers all ranks' hidden states of a call with sequence parallel."""
        parallel = given.options.parallel
        if parallel is None or not parallel.sequence:
            return given
        return given._replace(hidden=_parallel.gathered(given.group, given.hidden.detach(), parallel.ranks))

    def run_forward(self, frame: Any, given: Inputs) -> None:
        """Forward of this rank's shard, and the merge of all ranks' partial sums."""
        self.merge_sums(frame, given.group, self.launch_forward(frame))

    def launch_forward(self, frame: Any) -> Tensor:
        """Forward of this rank's shard alone. Returns its partial sums."""
        partial_sums = self.new_floats((self.fields, frame.num_tokens))
        frame.partial_sums.data = partial_sums.data_ptr()
        self.run(self.forward_function, frame.forward_address, frame.forward_bytes)
        return partial_sums

    def merge_sums(self, frame: Any, group: Any, partial_sums: Tensor) -> None:
        """Gathers all ranks' partial sums, and merges them into the outputs."""
        everyone = _parallel.gathered(group, partial_sums, self.ranks)
        frame.all_partial_sums.data = everyone.data_ptr()
        frame.merge.num_valid = frame.forward.num_valid
        self.run(self.merge_function, frame.merge_address, frame.merge_bytes)

    def backward(
        self,
        given: Inputs,
        saved: Tensor,
        grad_values: Tensor,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
        grad_bias: Tensor | None,
        retained: Tensor | None = None,
        *,
        lent: bool = False,
        entropy: bool = True,
    ) -> None:
        """Runs backward of this rank's shard. grad_hidden is the sum over ranks, which all of them have to ask for, unless `parallel` says
        that it is this rank's part."""
        group, parallel = given.group, given.options.parallel
        assert parallel is not None
        gather = None
        if parallel.sequence:
            hidden, gather = _parallel.start_gather(group, given.hidden, parallel.ranks)
            given = given._replace(hidden=hidden)
            late = grad_hidden is not None and parallel.reduce_grad_hidden and not lent and self._reads_hidden_late(given, retained)
            if not late:
                gather.wait()
                gather = None
        part = None
        if grad_hidden is not None:
            wide = self.key.grad_hidden_dtype or self.key.dtype
            alike = not parallel.sequence and wide is grad_hidden.dtype and grad_hidden.is_contiguous()
            part = grad_hidden if alike else given.hidden.new_empty(given.hidden.shape, dtype=wide)
        frame: Any = self._take_frame()
        kept = self.fill_backward(frame, given, saved, grad_values, (part, grad_weight, grad_bias), entropy=entropy)  # noqa: F841
        frame.retain(frame.backward, retained, lent=lent)
        mine = self.run_backward(frame, group, parallel, part, gather)
        if grad_hidden is not None and mine is not None and mine is not grad_hidden:
            grad_hidden.copy_(mine)
        self.frames.append(frame)

    def run_backward(self, frame: Any, group: Any, parallel: Parallel, part: Tensor | None, gather: Any = None) -> Tensor | None:
        """Backward of a filled frame. `part`: where this rank's part of grad_hidden is made. Returns the sum over ranks, or `part` where
        that is wanted. `gather`: what to wait for before grad_weight, where hidden states may come late."""
        args = frame.backward
        if part is None or not parallel.reduce_grad_hidden:
            args.stage = _native.STAGE_WHOLE
            self.run(self.backward_function, frame.backward_address, frame.backward_bytes)
            return part
        size = frame.backward_bytes
        workspace = self.new_workspace(size)
        args.stage = _native.STAGE_UNTIL_GRAD_HIDDEN
        args.hidden_ready = 1 if gather is None else 0
        self.run_in(workspace, size, self.backward_function, frame.backward_address)
        if gather is not None:
            gather.wait()
        mine, work = _parallel.start_sum(group, part, parallel)
        args.stage = _native.STAGE_REST
        self.run_in(workspace, size, self.backward_function, frame.backward_address)
        work.wait()
        return mine

    def _reads_hidden_late(self, given: Inputs, retained: Tensor | None) -> bool:
        """Whether hidden states may be on their way from other ranks while grad_hidden is made."""
        if retained is None or self.shard.classes == 0:
            return False
        num_tokens, size = given.target.shape[0], retained.nbytes
        return _native.reads_hidden_late(self._handle, num_tokens, _native.RETAINED_OWN, size, self.shard.classes)


def find_for(given: Inputs, grad_weight_out: Tensor | None = None, *, backward: bool = False, shard: Shard | None = None) -> ShardKernel:
    """The kernel of this rank's part of such a call. Once in each forward: ranks tell each other what they have."""
    parallel = given.options.parallel
    assert parallel is not None
    if shard is not None and shard.rows == given.weight.shape[0]:
        return kernel_of(given, shard, grad_weight_out)
    shard = _layouts.shard_of(given.group, parallel, given.weight, tokens_of(given), layer_of(given), backward=backward)
    return kernel_of(given, shard, grad_weight_out)


def layer_of(given: Inputs) -> tuple[tuple[str, Any], ...]:
    """Facts of a call that have to be the same on every rank, as (name, value)."""
    parallel, hidden, weight = given.options.parallel, given.hidden, given.weight
    assert parallel is not None
    if _wide(given) not in (hidden.dtype, torch.float32):
        raise errors.DTypeError(f"reduce_dtype is {_wide(given)}; with hidden in {hidden.dtype} it must be that, torch.float32 or None")
    return (
        ("hidden_size", hidden.shape[1]),
        ("hidden's dtype", str(hidden.dtype)),
        ("weight's dtype", str(weight.dtype)),
        ("the options", given.options.spec),
        ("ignore_index", given.options.ignore_index),
        ("reduction", _options.REDUCTION_NAMES[given.options.reduction]),
        ("sequence_parallel", parallel.sequence),
        ("reduce_dtype", parallel.reduce_dtype and DTYPE_NAMES[parallel.reduce_dtype]),
        ("reduce_grad_hidden", parallel.reduce_grad_hidden),
        *((f"whether {name} is given", getattr(given, name) is not None) for name in (*OF_CLASSES, *GROUPS, *_OF_TOKENS)),
    )


def tokens_of(given: Inputs) -> dict[str, Tensor | None]:
    """Tensors of a call that have to be the same on every rank, by name."""
    return {name: getattr(given, name) for name in _OF_TOKENS}


def kernel_of(given: Inputs, shard: Shard, grad_weight_out: Tensor | None = None) -> ShardKernel:
    """The kernel of a call whose rank has that shard."""
    # A hidden-major weight's rows are as long as it has classes, so that ranks' kernels may differ.
    alone = is_hidden_major(given.weight)
    key = _kernels.key_of(given, grad_weight_out, max(shard.classes if alone else shard.most_classes, 1))._replace(
        whole_vocab_size=shard.vocab_size,
        padded_vocab_size=max(shard.rows if alone else shard.most_rows, 1),
        grad_hidden_dtype=_wide(given),
    )
    parallel = given.options.parallel
    assert parallel is not None
    kernel: Any = _kernels.find(key, of=(shard, parallel.ranks), make=ShardKernel)
    return kernel  # type: ignore[no-any-return]


def _wide(given: Inputs) -> torch.dtype:
    """The dtype in which ranks' parts of grad_hidden are added up."""
    parallel = given.options.parallel
    return given.hidden.dtype if parallel is None or parallel.reduce_dtype is None else parallel.reduce_dtype
