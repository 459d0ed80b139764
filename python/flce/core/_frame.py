"""One call's arguments as the C ABI has them: the inputs, and the structs filled from them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce import errors
from flce.core import _native, _retain
from flce.core._kernel_key import DTYPE_NAMES, OF_CLASSES, OPTIONAL_INPUTS, KernelKey

if TYPE_CHECKING:
    from flce.core._kernels import LoadedKernel

DTYPE_CODES = {
    torch.bfloat16: _native.BF16,
    torch.float16: _native.FP16,
    torch.float32: _native.FP32,
    torch.int32: _native.INT32,
    torch.int64: _native.INT64,
    torch.uint8: _native.UINT8,
    torch.float8_e4m3fn: _native.E4M3,
}
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
ROW_ALIGNMENT = 16  # bytes; of hidden, weight and their gradients
GROUPS = ("class_group", "row_group")  # tensors of the flag class_groups


DIFFERENTIABLE = ("lse", "logprobs", "entropy")  # per token, beside the loss
VALUES = ("loss", *DIFFERENTIABLE, "log_sum_sq_probs")  # fp32, in the order in which they lie in one tensor; top1 has one of its own


# The view of Frame's that holds an output's gradient: loss's is also its gradient's, since no call has both.
GRADIENT_VIEWS = {"loss": "loss", **{name: f"grad_{name}" for name in DIFFERENTIABLE}}
_FP32_BYTES = 4
_TOP_K = "teacher_top_k="
_TEACHER = ("teacher_ids", "teacher_probs", "teacher_logprobs")


class Outputs(NamedTuple):
    """The numbers that a kernel's forward writes."""

    values: tuple[str, ...]  # some of VALUES
    top1: bool
    saved: tuple[str, ...]  # names of backward's inputs from forward, [N] fp32 each, in the order in which they lie in one tensor
    teacher_top_k: int = 0  # K; behind them in that tensor then lie teacher_logprobs, [N, K]
    class_weight_total: bool = False  # one number more lies behind all of them, which a shard's backward reads

    def shape(self, token_shape: Sequence[int], num_tokens: int, reduction: int) -> Sequence[int]:
        """Shape of the one tensor of all values: a lone value has its own shape, several lie flat, see `split_values`."""
        per_token = reduction == _native.REDUCTION_NONE
        if len(self.values) == 1:
            return token_shape if per_token or self.values[0] != "loss" else ()
        if per_token or "loss" not in self.values:
            return (len(self.values) * num_tokens,)
        return ((len(self.values) - 1) * num_tokens + 1,)

    def saved_size(self, num_tokens: int) -> int:
        size = (len(self.saved) + self.teacher_top_k) * num_tokens
        return size + 1 if self.class_weight_total else size  # torch 2.11's symbolic sizes add no bool

    def teacher_logprobs(self, saved: Tensor) -> Tensor:
        """The part [N, K] of the tensor of all that backward reads."""
        columns = len(self.saved) + self.teacher_top_k
        num_tokens = saved.shape[0] // columns
        return saved[len(self.saved) * num_tokens :].view(num_tokens, self.teacher_top_k)


def outputs_of(options: str, *, shard_class_weight: bool = False) -> Outputs:
    """Outputs of a Spec with these options. `shard_class_weight`: a shard with class weights. Its backward reads a target's class weight
    and the total, both from merge."""
    parts = options.split(",")
    chosen = next((part for part in parts if part.startswith("outputs=")), "outputs=loss").removeprefix("outputs=").split("+")
    saved = ["lse", *(name for name, kept in (("entropy", "entropy" in chosen), ("logprobs", "dft" in parts)) if kept)]
    teacher_top_k = next((int(part.removeprefix(_TOP_K)) for part in parts if part.startswith(_TOP_K)), 0)
    if shard_class_weight:
        saved.append("target_class_weight")
    total = shard_class_weight and any(part.startswith("label_smoothing=") for part in parts)
    return Outputs(tuple(name for name in VALUES if name in chosen), "top1" in chosen, tuple(saved), teacher_top_k, total)


def split_values(values: Tensor, num_tokens: int, names: Sequence[str]) -> dict[str, Tensor]:
    """Views of contiguous `values` (or of their gradients) by name: the loss ([N], or [1] where it is one number), behind it the others
    [N]. A lone one is all of them, as it is."""
    if len(names) == 1:
        return {names[0]: values}
    rest = [name for name in names if name != "loss"]
    first = values.shape[0] - len(rest) * num_tokens
    parts = dict(zip(rest, values[first:].view(len(rest), num_tokens).unbind(0), strict=True))
    return {"loss": values[:first], **parts} if "loss" in names else parts


class Parallel(NamedTuple):
    """How a weight's rows lie over a process group."""

    ranks: int
    sequence: bool  # hidden is this rank's part of the tokens
    vocab_start: int  # label of the first row of this rank's weight; -1: the rows of lower ranks added up
    vocab_size: int  # classes of all ranks; -1: all of their rows
    all_rows: int  # rows of all ranks' weights, as a DTensor says it; -1: not known
    reduce_dtype: torch.dtype | None  # dtype in which grad_hidden is made and added up; None: hidden's
    reduce_grad_hidden: bool  # grad_hidden is added up; else this rank's part
    group: str  # name

    @property
    def sequence_ranks(self) -> int:
        """The factor by which target has more rows than hidden."""
        return self.ranks if self.sequence else 1

    def text(self) -> str:
        """The text by which operators know it."""
        sums = f"{DTYPE_NAMES[self.reduce_dtype] if self.reduce_dtype else '-'} {int(self.reduce_grad_hidden)}"
        return f"{self.ranks} {int(self.sequence)} {self.vocab_start} {self.vocab_size} {self.all_rows} {sums} {self.group}"

    @staticmethod
    def of_text(text: str) -> Parallel | None:
        if not text:
            return None
        ranks, sequence, vocab_start, vocab_size, all_rows, reduce_dtype, reduces, group = text.split(" ", 7)
        wide = next((dtype for dtype, name in DTYPE_NAMES.items() if name == reduce_dtype), None)
        return Parallel(int(ranks), sequence == "1", int(vocab_start), int(vocab_size), int(all_rows), wide, reduces == "1", group)

    def resolved(self) -> Any:
        """The process group. Raises PlacementError where there is none any more."""
        try:
            return dist.distributed_c10d._resolve_process_group(self.group)  # type: ignore[attr-defined,arg-type]
        except RuntimeError as error:
            raise errors.PlacementError(f"process_group {self.group!r} is gone, or this process is not in it: {error}") from None


@dataclass(frozen=True)
class CallOptions:
    """A call's arguments that are no tensors, checked. Its hash is made once."""

    spec: str  # the part of a Spec's canonical text beside sizes and dtypes: "softcap=30,outputs=loss+lse"
    outputs: Outputs  # outputs of a whole layer's kernel
    ignore_index: int
    reduction: int
    workspace_limit_bytes: int  # bytes for everything beyond inputs and gradients; 0: the default
    retain: _retain.Retain
    parallel: Parallel | None = None  # None: weight is whole
    named_logprobs: bool = False  # values end with teacher_logprobs, and the teacher's probabilities are their negative gradient
    # The rest is for the caller of a function; operators do not know it.
    asked: tuple[str, ...] = ()  # outputs that the caller gets
    teacher_logprobs: bool = False  # whether the caller gets them, behind the others
    temperature: float | None = None  # one for all tokens

    def number(self, name: str, absent: float = 0.0) -> float:
        """An option of the Spec."""
        return next((float(part.partition("=")[2]) for part in self.spec.split(",") if part.startswith(f"{name}=")), absent)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(vars(self).values()))

    def __hash__(self) -> int:
        return self._hash


class Inputs(NamedTuple):
    """Inputs that forward and backward of one call share."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D] of hidden's dtype or fp32
    target: Tensor  # [N] int64 or int32
    options: CallOptions
    bias: Tensor | None = None  # [V]
    class_weight: Tensor | None = None  # [V]
    num_valid: Tensor | None = None  # one element
    temperature: Tensor | None = None  # [N] fp32
    token_weight: Tensor | None = None  # [N] fp32
    teacher_ids: Tensor | None = None  # [N, K] int64 or int32, as many as the options say, as the next one
    teacher_probs: Tensor | None = None  # [N, K] fp32
    class_offset: Tensor | None = None  # [V] fp32
    class_group: Tensor | None = None  # [V] int32
    row_group: Tensor | None = None  # [N] int32
    group: Any = None  # the process group of options.parallel, once a pass has begun (`with_group`)

    def tensors(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in TENSORS}

    def retained_of(self) -> tuple[Tensor | None, ...]:
        return self.hidden, self.weight, self.target, self.temperature

    def of_classes(self) -> dict[str, Tensor | None]:
        """Tensors with a number for every class, by name."""
        return {name: getattr(self, name) for name in OF_CLASSES}

    @staticmethod
    def of(tensors: Sequence[Tensor | None], options: CallOptions) -> Inputs:
        return Inputs(**dict(zip(TENSORS, tensors, strict=True)), options=options)  # type: ignore[arg-type]

    def asks_gradient(self) -> bool:
        """Whether any input requires a gradient."""
        given = (self.hidden, self.weight, self.bias, self.class_offset)
        return any(tensor is not None and tensor.requires_grad for tensor in given)

    def with_group(self) -> Inputs:
        """For one pass: the group may be gone at the next."""
        parallel = self.options.parallel
        return self if parallel is None else self._replace(group=parallel.resolved())

    def retaining(self, retain: _retain.Retain) -> Inputs:
        return self._replace(options=replace(self.options, retain=retain))

    def outputs(self) -> Outputs:
        """Outputs that this call's forward writes."""
        if self.options.parallel is None or self.class_weight is None:
            return self.options.outputs
        return outputs_of(self.options.spec, shard_class_weight=True)


TENSORS = tuple(name for name in Inputs._fields if name not in ("options", "group"))


class Frame:
    """The ABI's argument structs of one kernel, for one call at a time and kept between calls: most fields never change.

    Fields that remember the last call are emptied before the structs are changed and set after."""

    # Views that direct calls write by their place in `words`; the library's other tensors come behind them.
    DIRECT = ("hidden", "weight", "target", "lse", "loss", "logprobs", "grad_logprobs", "grad_hidden", "grad_weight")
    WORD: ClassVar = {name: i * (ctypes.sizeof(_native.TensorView) // 8) for i, name in enumerate(DIRECT)}
    hidden: _native.TensorView
    weight: _native.TensorView
    bias: _native.TensorView
    class_weight: _native.TensorView
    class_offset: _native.TensorView
    class_group: _native.TensorView
    row_group: _native.TensorView
    temperature: _native.TensorView
    token_weight: _native.TensorView
    num_valid: _native.TensorView
    invalid_label: _native.TensorView
    grad_hidden: _native.TensorView
    grad_weight: _native.TensorView
    grad_bias: _native.TensorView
    target: _native.TensorView
    loss: _native.TensorView  # and of grad_loss
    lse: _native.TensorView
    logprobs: _native.TensorView
    entropy: _native.TensorView
    top1: _native.TensorView
    log_sum_sq_probs: _native.TensorView
    teacher_ids: _native.TensorView
    teacher_probs: _native.TensorView
    teacher_logprobs: _native.TensorView
    target_class_weight: _native.TensorView
    class_weight_total: _native.TensorView
    partial_sums: _native.TensorView
    all_partial_sums: _native.TensorView

    def __init__(self, kernel: LoadedKernel) -> None:
        key = kernel.key
        self.kernel = kernel
        self.dtype, self.weight_dtype, self.hidden_major = key.dtype, key.weight_dtype, key.hidden_major
        self.target_dtype: torch.dtype | None = torch.int64
        self.rule: tuple[int, int] | None = None  # ignore_index and reduction, as the structs have them
        self._make_views(key)
        self.invalid_label.data = kernel.invalid_label.data_ptr()
        arguments = _native.call_arguments()
        self.forward: Any = arguments.forward()
        self.backward: Any = arguments.backward()
        for args in (self.forward, self.backward):
            args.struct_size = ctypes.sizeof(args)
            for name in ("hidden", "weight", "target", "lse"):
                setattr(args, name, self.address[name])
            for name in OPTIONAL_INPUTS:
                setattr(args, name, self.address[name] if getattr(key, name) else None)
            for name in GROUPS:
                setattr(args, name, self.address[name] if key.class_groups else None)
        values, _, saved, teacher_top_k, _ = kernel.outputs
        for name in _TEACHER:
            for args in (self.forward, self.backward):
                setattr(args, name, self.address[name] if teacher_top_k else None)
        self.forward.invalid_label = self.address["invalid_label"]
        for name in VALUES:
            if name != "lse":
                setattr(self.forward, name, self.address[name] if name in values else None)
        self.backward.grad_loss = self.address["loss"] if "loss" in values else None
        for name in ("entropy", "logprobs"):
            setattr(self.backward, name, self.address[name] if name in saved else None)
        for name in DIFFERENTIABLE:
            setattr(self.backward, f"grad_{name}", self.address[f"grad_{name}"] if name in values else None)
        self.forward_address, self.backward_address = ctypes.addressof(self.forward), ctypes.addressof(self.backward)
        self.resize(0)

    def _make_views(self, key: KernelKey) -> None:
        codes = {
            "spec": DTYPE_CODES[key.dtype],
            "weight": DTYPE_CODES[key.weight_dtype],
            "grad_hidden": DTYPE_CODES[key.grad_hidden_dtype or key.dtype],
            "grad_weight": DTYPE_CODES[key.grad_weight_dtype],
            "scale": _native.FP32,
            "fp32": _native.FP32,
            "int32": _native.INT32,
            "label": _native.INT64,
            "count": _native.FP32,
            "uint64": _native.UINT64,
            "int64": _native.INT64,
        }
        rows = self.kernel.weight_rows
        shapes: dict[str, tuple[int, ...]] = {
            "scalar": (),
            "tokens": (0,),
            "loss": (0,),
            "classes": (rows,),
            "hidden": (0, key.hidden_size),
            "teacher": (0, self.kernel.outputs.teacher_top_k),
            "weight": (key.hidden_size, rows) if key.hidden_major else (rows, key.hidden_size),
            "weight_scale": (0,),  # calls of quantised weights have structs of their own
            "teacher_hidden": (0, 0),  # a divergence's calls have structs of their own
            "teacher_weight": (0, 0),
            "top": (0, 0),  # and so have those of a top_k
            "partial_sums": (0, 0),  # a ShardFrame's
            "all_partial_sums": (0, 0),
        }
        device_type = _native.CUDA if key.device.type == "cuda" else _native.CPU
        tensors = _native.call_arguments().tensors
        # grad_loss has loss's shape and uses its view: no call has both.
        names = [*self.DIRECT, *(name for name in tensors if name not in self.DIRECT and name != "grad_loss")]
        memory = bytearray(len(names) * ctypes.sizeof(_native.TensorView))
        self.words = memoryview(memory).cast("Q")
        self.address = {}
        self._per_token = []
        for i, name in enumerate(names):
            elements, extent = tensors[name]
            shape = shapes[extent]
            view = _native.TensorView.from_buffer(memory, i * ctypes.sizeof(_native.TensorView))
            view.dtype, view.ndim = codes[elements], len(shape)
            view.rows, view.columns = (*shape, 0, 0)[:2]
            view.row_stride, view.column_stride = (view.columns if len(shape) == 2 else 1), 1
            view.device_type, view.device_index = device_type, key.device.index or 0
            setattr(self, name, view)
            self.address[name] = ctypes.addressof(view)
            if extent in ("hidden", "tokens", "loss", "teacher"):
                self._per_token.append(view)

    def resize(self, num_tokens: int) -> None:
        self.num_tokens = -1
        self.choices: _retain.Choices | None = None
        least = self.kernel.workspace_bytes(num_tokens, backward=False)
        self.backward_bytes = self.kernel.workspace_bytes(num_tokens, backward=True)
        # Forward has a use for room in which to bring the hidden states of tokens that are not ignored together; backward takes as much.
        together = self.kernel.key.hidden_bytes(num_tokens) + 256 if self.kernel.key.device.type == "cuda" else 0
        self.forward_bytes = max(least, min(least + together, self.backward_bytes))
        for view in self._per_token:
            view.rows = num_tokens
        self.num_tokens = num_tokens

    def retain(self, args: Any, memory: Tensor | None, *, lent: bool = False) -> None:
        """Points the next call to memory that forward and backward share. `lent`: the memory is the weight's gradient."""
        args.retained, args.retained_bytes = (None, 0) if memory is None else (memory.data_ptr(), memory.nbytes)
        args.retained_place = _native.RETAINED_GRAD_WEIGHT if lent else _native.RETAINED_OWN

    def point_to_saved(self, address: int, outputs: Outputs) -> None:
        """Points to forward's statistics for backward, which lie at `address`, one behind the other."""
        self.lse.data = address
        names = outputs.saved
        if len(names) > 1:
            for i, name in enumerate(names):
                getattr(self, name).data = address + i * _FP32_BYTES * self.num_tokens
        behind = address + len(names) * _FP32_BYTES * self.num_tokens
        if outputs.teacher_top_k:
            self.teacher_logprobs.data = behind
        if outputs.class_weight_total:
            self.class_weight_total.data = behind

    def set_top1(self, memory: Tensor | None) -> None:
        if memory is not None:
            self.top1.data = memory.data_ptr()
        self.forward.top1 = None if memory is None else self.address["top1"]

    def set_rule(self, ignore_index: int, reduction: int) -> None:
        self.rule = None
        for args in (self.forward, self.backward):
            args.ignore_index, args.reduction = ignore_index, reduction
        self.loss.ndim = 1 if reduction == _native.REDUCTION_NONE else 0
        self.rule = (ignore_index, reduction)

    def set_target_dtype(self, dtype: torch.dtype) -> None:
        self.target_dtype = None
        self.target.dtype = DTYPE_CODES[dtype]
        self.target_dtype = dtype

    def inputs(self, args: Any, given: Inputs) -> tuple[Tensor | None, ...]:
        """Fills in the inputs of forward and of backward, contiguous and in the kernel's dtypes. The returned tensors have to outlive the
        call."""
        hidden, weight, target, num_valid = given.hidden, given.weight, given.target, given.num_valid
        teacher_ids, teacher_probs = given.teacher_ids, given.teacher_probs
        rule = given.options.ignore_index, given.options.reduction
        num_tokens = hidden.shape[0]
        if num_tokens != self.num_tokens:
            self.resize(num_tokens)
        address = hidden.data_ptr()
        if address % ROW_ALIGNMENT or not hidden.is_contiguous():
            hidden = _aligned(hidden.contiguous())
            address = hidden.data_ptr()
        self.hidden.data = address
        if weight.dtype is not self.weight_dtype:  # a hook on saved tensors gave back another
            weight = weight.to(self.weight_dtype)
        address = weight.data_ptr()
        if address % ROW_ALIGNMENT or not (is_hidden_major(weight) if self.hidden_major else weight.is_contiguous()):
            weight = _aligned(weight.t().contiguous().t() if self.hidden_major else weight.contiguous())
            address = weight.data_ptr()
        self.weight.data = address
        if not target.is_contiguous():
            target = target.contiguous()
        self.target.data = target.data_ptr()
        if target.dtype is not self.target_dtype:
            self.set_target_dtype(target.dtype)
        bias = _numbers(self.bias, given.bias, self.dtype)
        class_weight, class_offset = _numbers(self.class_weight, given.class_weight), _numbers(self.class_offset, given.class_offset)
        temperature, token_weight = _numbers(self.temperature, given.temperature), _numbers(self.token_weight, given.token_weight)
        class_group = _numbers(self.class_group, given.class_group, torch.int32)
        row_group = _numbers(self.row_group, given.row_group, torch.int32)
        if teacher_ids is not None and teacher_probs is not None:
            teacher_ids, teacher_probs = teacher_ids.contiguous(), teacher_probs.contiguous()
            self.teacher_ids.data, self.teacher_probs.data = teacher_ids.data_ptr(), teacher_probs.data_ptr()
            self.teacher_ids.dtype = DTYPE_CODES[teacher_ids.dtype]
        if num_valid is None:
            args.num_valid = None
        else:
            self.num_valid.data = num_valid.data_ptr()
            self.num_valid.dtype = DTYPE_CODES[num_valid.dtype]
            args.num_valid = self.address["num_valid"]
        if rule != self.rule:
            self.set_rule(*rule)
        of_classes = bias, class_weight, class_offset, class_group
        return hidden, weight, target, *of_classes, row_group, temperature, token_weight, teacher_ids, teacher_probs


def is_hidden_major(weight: Tensor) -> bool:
    """Whether [V, D] is the view of a contiguous [D, V]."""
    return weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]


def _numbers(view: _native.TensorView, tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """A number for each class or token, as kernels read them; `view` points there."""
    if tensor is None:
        return None
    tensor = tensor.to(dtype).contiguous()
    view.data = tensor.data_ptr()
    return tensor


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % ROW_ALIGNMENT else tensor
