"""Sessions and kernels over torch tensors: one session a device, kernels found by what they compute, calls without any check of shapes.

Callers (`_op`, `functional`) have checked the tensors; the library checks them again. A call allocates with torch on hidden's device and runs on
torch's current stream of it.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from flce import _native, errors

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DTYPE_CODES = {
    torch.bfloat16: _native.BF16,
    torch.float16: _native.FP16,
    torch.float32: _native.FP32,
    torch.int32: _native.INT32,
    torch.int64: _native.INT64,
}
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_FP32_BYTES = 4
ROW_ALIGNMENT = 16  # bytes; of hidden, weight and their gradients
_WORKSPACE_ALIGNMENT = 256  # torch's CUDA allocator gives 512, its CPU allocator 64

_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_raw_delete: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)
# What torch.cuda.caching_allocator_alloc calls, on the current device.
_raw_alloc: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None) if _current_device and _raw_delete and _raw_stream else None


EXTRA_OUTPUTS = ("lse", "logprob", "entropy")


def extra_outputs(options: str) -> tuple[str, ...]:
    """Which outputs beside the loss a Spec's options ask for, in the order in which they lie behind it."""
    chosen = next((part for part in options.split(",") if part.startswith("outputs=")), "").removeprefix("outputs=").split("+")
    return tuple(name for name in EXTRA_OUTPUTS if name in chosen)


class Inputs(NamedTuple):
    """What forward and backward of one call share: the operators' arguments, in their order."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D] of hidden's dtype or fp32
    target: Tensor  # [N] int64 or int32
    bias: Tensor | None  # [V]
    class_weight: Tensor | None  # [V]
    num_valid: Tensor | None  # one element
    options: str  # the part of a Spec's canonical text that is neither a size nor a dtype: "softcap=30,outputs=loss+lse"
    ignore_index: int
    reduction: int
    workspace_limit_bytes: int  # 0: the default


class KernelKey(NamedTuple):
    """What a kernel is found by: the device, what a Spec says, and the planner's scratch."""

    device: torch.device
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    hidden_major: bool
    grad_weight_dtype: torch.dtype
    accumulate: bool
    bias: bool
    class_weight: bool
    options: str
    workspace_limit_bytes: int

    def spec(self) -> str:
        parts = [f"D={self.hidden_size}", f"V={self.vocab_size}", f"dtype={DTYPE_NAMES[self.dtype]}"]
        if self.hidden_major:
            parts.append("layout=hidden_major")
        if self.grad_weight_dtype != self.dtype:
            parts.append(f"grad_weight_dtype={DTYPE_NAMES[self.grad_weight_dtype]}")
        if self.accumulate:
            parts.append("grad_weight_mode=accumulate")
        parts += [name for name, present in (("bias", self.bias), ("class_weight", self.class_weight)) if present]
        if self.options:
            parts.append(self.options)
        return ",".join(parts)


class Frame:
    """The ABI's argument structs of one kernel, kept between calls of one thread: most of their fields never change."""

    PER_TOKEN = ("target", "loss", "lse", "logprob", "entropy", "grad_lse", "grad_logprob", "grad_entropy")
    VIEWS = ("hidden", "weight", "bias", "class_weight", "num_valid", "invalid_label", "grad_hidden", "grad_weight", "grad_bias", *PER_TOKEN)
    # Where a view's address lies in `words`.
    WORD: ClassVar = {name: i * (ctypes.sizeof(_native.TensorView) // 8) for i, name in enumerate(VIEWS)}
    hidden: _native.TensorView
    weight: _native.TensorView
    bias: _native.TensorView
    class_weight: _native.TensorView
    num_valid: _native.TensorView
    invalid_label: _native.TensorView
    grad_hidden: _native.TensorView
    grad_weight: _native.TensorView
    grad_bias: _native.TensorView
    target: _native.TensorView
    loss: _native.TensorView  # grad_loss has its shape and uses it too: no call has both
    lse: _native.TensorView
    logprob: _native.TensorView
    entropy: _native.TensorView

    def __init__(self, kernel: Kernel) -> None:
        key = kernel.key
        self.kernel = kernel
        self.dtype, self.hidden_major = key.dtype, key.hidden_major
        self.target_dtype = torch.int64
        self.rule: tuple[int, int] | None = None  # ignore_index and reduction, as the structs have them
        self._make_views(key)
        self.invalid_label.data = kernel.invalid_label.data_ptr()
        self.forward, self.backward = _native.ForwardArgs(), _native.BackwardArgs()
        for args in (self.forward, self.backward):
            args.struct_size = ctypes.sizeof(args)
            for name in ("hidden", "weight", "target", "lse"):
                setattr(args, name, self.address[name])
            for name, present in (("bias", key.bias), ("class_weight", key.class_weight)):
                setattr(args, name, self.address[name] if present else None)
        outputs = kernel.extra_outputs
        self.forward.invalid_label = self.address["invalid_label"]
        self.forward.loss = self.address["loss"]
        for name in ("logprob", "entropy"):
            setattr(self.forward, name, self.address[name] if name in outputs else None)
        self.backward.grad_loss = self.address["loss"]
        self.backward.entropy = self.address["entropy"] if "entropy" in outputs else None
        for name in EXTRA_OUTPUTS:
            setattr(self.backward, f"grad_{name}", self.address[f"grad_{name}"] if name in outputs else None)
        self.forward_address, self.backward_address = ctypes.addressof(self.forward), ctypes.addressof(self.backward)
        self.resize(0)

    def _make_views(self, key: KernelKey) -> None:
        dtype, wide = DTYPE_CODES[key.dtype], DTYPE_CODES[key.grad_weight_dtype]
        hidden_shape = (0, key.hidden_size)
        weight_shape = (key.hidden_size, key.vocab_size) if key.hidden_major else (key.vocab_size, key.hidden_size)
        forms: dict[str, tuple[int, tuple[int, ...]]] = {
            "hidden": (dtype, hidden_shape),
            "weight": (dtype, weight_shape),
            "bias": (dtype, (key.vocab_size,)),
            "class_weight": (_native.FP32, (key.vocab_size,)),
            "num_valid": (_native.FP32, ()),
            "invalid_label": (_native.UINT64, ()),
            "grad_hidden": (dtype, hidden_shape),
            "grad_weight": (wide, weight_shape),
            "grad_bias": (wide, (key.vocab_size,)),
            "target": (_native.INT64, (0,)),
        }
        device_type = _native.CUDA if key.device.type == "cuda" else _native.CPU
        memory = bytearray(len(self.VIEWS) * ctypes.sizeof(_native.TensorView))
        self.words = memoryview(memory).cast("Q")
        self.address = {}
        for i, name in enumerate(self.VIEWS):
            code, shape = forms.get(name, (_native.FP32, (0,)))
            view = _native.TensorView.from_buffer(memory, i * ctypes.sizeof(_native.TensorView))
            view.dtype, view.ndim = code, len(shape)
            view.rows, view.columns = (*shape, 0, 0)[:2]
            view.row_stride, view.column_stride = (view.columns if len(shape) == 2 else 1), 1
            view.device_type, view.device_index = device_type, key.device.index or 0
            setattr(self, name, view)
            self.address[name] = ctypes.addressof(view)

    def resize(self, num_tokens: int) -> None:
        self.forward_bytes = self.kernel.workspace_bytes(num_tokens, backward=False)
        self.backward_bytes = self.kernel.workspace_bytes(num_tokens, backward=True)
        self.hidden.rows = self.grad_hidden.rows = num_tokens
        for name in self.PER_TOKEN:
            getattr(self, name).rows = num_tokens
        self.num_tokens = num_tokens

    def set_rule(self, ignore_index: int, reduction: int) -> None:
        self.rule = (ignore_index, reduction)
        for args in (self.forward, self.backward):
            args.ignore_index, args.reduction = ignore_index, reduction
        self.loss.ndim = 1 if reduction == _native.REDUCTION_NONE else 0

    def set_target_dtype(self, dtype: torch.dtype) -> None:
        self.target_dtype = dtype
        self.target.dtype = DTYPE_CODES[dtype]

    def inputs(self, args: Any, given: Inputs) -> tuple[Tensor | None, ...]:
        """What forward and backward have in common, contiguous and in the kernel's dtypes. The result has to live until the call is made."""
        hidden, weight, target, bias, class_weight, num_valid, _, ignore_index, reduction, _ = given
        num_tokens = hidden.shape[0]
        if num_tokens != self.num_tokens:
            self.resize(num_tokens)
        address = hidden.data_ptr()
        if address % ROW_ALIGNMENT or not hidden.is_contiguous():
            hidden = _aligned(hidden.contiguous())
            address = hidden.data_ptr()
        self.hidden.data = address
        # An fp32 weight of 16-bit hidden states is rounded for this pass alone: what autograd saved is the weight itself.
        if weight.dtype is not self.dtype:
            weight = weight.to(self.dtype)
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
        if bias is not None:
            bias = bias.to(self.dtype).contiguous()
            self.bias.data = bias.data_ptr()
        if class_weight is not None:
            class_weight = class_weight.to(torch.float32).contiguous()
            self.class_weight.data = class_weight.data_ptr()
        if num_valid is None:
            args.num_valid = None
        else:
            self.num_valid.data = num_valid.data_ptr()
            self.num_valid.dtype = DTYPE_CODES[num_valid.dtype]
            args.num_valid = self.address["num_valid"]
        if (ignore_index, reduction) != self.rule:
            self.set_rule(ignore_index, reduction)
        return hidden, weight, target, bias, class_weight


class Kernel:
    """A compiled kernel set for one output layer on one device; shared by every thread. Made by `flce.get_kernel`."""

    def __init__(self, key: KernelKey, plan: str = "") -> None:
        self.key = key
        self.device = key.device
        self._library = _native.library()
        self._handle = _native.get_kernel(_session(key.device), key.spec(), plan, key.workspace_limit_bytes)
        # -1 has the bits of UINT64_MAX, "none". Filled before any stream can use it.
        self.invalid_label = torch.full((1,), -1, dtype=torch.int64, device=key.device)
        if key.device.type == "cuda":
            torch.cuda.current_stream(key.device).synchronize()
        self.extra_outputs = extra_outputs(key.options)
        self.forward_function, self.backward_function = self._library.flce_kernel_forward, self._library.flce_kernel_backward
        self._index = key.device.index if key.device.type == "cuda" else None
        self._allocates_raw = self._index is not None and _raw_alloc is not None
        # What outputs and workspace are made after: quicker than naming dtype and device each time.
        with torch.inference_mode(False):
            self.float_like = torch.empty((), dtype=torch.float32, device=key.device)
            self.new_floats: Callable[..., Tensor] = self.float_like.new_empty
            self._byte = torch.empty((), dtype=torch.uint8, device=key.device)
        self._local = threading.local()

    @property
    def spec(self) -> str:
        """Canonical text of what it computes."""
        return self._text(_native.TEXT_SPEC)

    @property
    def plan(self) -> str:
        """Canonical text of how it computes it."""
        return self._text(_native.TEXT_PLAN)

    def explain(self) -> str:
        """Spec, plan, device and the reasons, as lines for people."""
        return self._text(_native.TEXT_EXPLAIN)

    def explanation(self) -> dict[str, Any]:
        """The same as a dictionary: spec, plan, device, reasons."""
        result: dict[str, Any] = json.loads(self._text(_native.TEXT_EXPLAIN_JSON))
        return result

    def workspace_bytes(self, num_tokens: int, *, backward: bool = True) -> int:
        """Scratch bytes that a pass over num_tokens tokens takes."""
        return _native.workspace_bytes(self._handle, num_tokens, backward)

    def __repr__(self) -> str:
        return f"<flce.Kernel {self.spec} on {self.device}>"

    def _text(self, which: int) -> str:
        return _native.text(self._library.flce_kernel_text, self._handle, which)

    def _frame(self) -> Frame:
        try:
            frame: Frame = self._local.frame
        except AttributeError:
            frame = self._local.frame = Frame(self)
        return frame

    def run(self, function: Any, args_address: int, size: int) -> None:
        """One call, with `size` bytes of workspace: freed when this returns, handed out again by the allocator only behind this stream's work."""
        index = self._index
        if self._allocates_raw and _current_device() == index:  # less than half the time of making a tensor
            stream = _raw_stream(index)
            pointer = _raw_alloc(size, stream)
            try:
                status = function(self._handle, args_address, pointer, size, stream)
            finally:
                _raw_delete(pointer)
        elif index is not None:
            workspace = self._byte.new_empty(size)
            status = function(self._handle, args_address, workspace.data_ptr(), size, torch.cuda.current_stream(index).cuda_stream)
        else:
            workspace = self._byte.new_empty(size + _WORKSPACE_ALIGNMENT)
            pointer = -(-workspace.data_ptr() // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
            status = function(self._handle, args_address, pointer, size, None)
        if status:
            _native.raise_status(status)

    def forward(self, given: Inputs) -> tuple[Tensor, Tensor]:
        """(values, saved): values is the loss ([] or [N] fp32), with the extra outputs ([N] each) behind it in one flat tensor if there are any;
        saved is lse [N] fp32, followed by entropy [N] where that is among the outputs."""
        frame = self._frame()
        kept = frame.inputs(frame.forward, given)
        if self.extra_outputs:
            return self._forward_with_extra_outputs(frame, given, kept)
        saved = self.new_floats(frame.num_tokens)
        values = torch.empty_like(saved if given.reduction == _native.REDUCTION_NONE else self.float_like)
        frame.lse.data = saved.data_ptr()
        frame.loss.data = values.data_ptr()
        self.run(self.forward_function, frame.forward_address, frame.forward_bytes)
        return values, saved

    def _forward_with_extra_outputs(self, frame: Frame, given: Inputs, kept: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
        num_tokens, names = frame.num_tokens, self.extra_outputs
        with_entropy = "entropy" in names
        saved = self.new_floats(2 * num_tokens if with_entropy else num_tokens)
        first = num_tokens if given.reduction == _native.REDUCTION_NONE else 1
        values = self.new_floats(first + len(names) * num_tokens)
        parts = dict(zip(names, values[first:].view(len(names), num_tokens), strict=True))
        frame.lse.data = saved.data_ptr()
        frame.loss.data = values.data_ptr()
        if "logprob" in parts:
            frame.logprob.data = parts["logprob"].data_ptr()
        if with_entropy:
            frame.entropy.data = saved.data_ptr() + _FP32_BYTES * num_tokens
        self.run(self.forward_function, frame.forward_address, frame.forward_bytes)
        # Copies, so that the caller may change what it got in place.
        if "lse" in parts:
            parts["lse"].copy_(saved[:num_tokens])
        if with_entropy:
            parts["entropy"].copy_(saved[num_tokens:])
        return values, saved

    def backward(
        self,
        given: Inputs,
        saved: Tensor,
        grad_values: Tensor,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
        grad_bias: Tensor | None,
    ) -> None:
        """Writes (or, in an accumulating kernel, adds for weight and bias) the gradients that are not None. grad_values is like forward's values."""
        frame = self._frame()
        args, address = frame.backward, frame.address
        kept = frame.inputs(args, given)  # noqa: F841  # alive until the call is made
        frame.lse.data = saved.data_ptr()
        try:
            frame.loss.data = grad_values.data_ptr()
        except RuntimeError:
            refuse_batched(grad_values)
        if self.extra_outputs:
            num_tokens = frame.num_tokens
            if "entropy" in self.extra_outputs:
                frame.entropy.data = saved.data_ptr() + _FP32_BYTES * num_tokens
            first = num_tokens if given.reduction == _native.REDUCTION_NONE else 1
            for i, extra in enumerate(self.extra_outputs):
                getattr(frame, f"grad_{extra}").data = grad_values.data_ptr() + _FP32_BYTES * (first + i * num_tokens)
        if grad_hidden is None:
            args.grad_hidden = None
        else:
            frame.grad_hidden.data = grad_hidden.data_ptr()
            args.grad_hidden = address["grad_hidden"]
        if grad_weight is None:
            args.grad_weight = None
        else:
            frame.grad_weight.data = grad_weight.data_ptr()
            args.grad_weight = address["grad_weight"]
        if grad_bias is None:
            args.grad_bias = None
        else:
            frame.grad_bias.data = grad_bias.data_ptr()
            args.grad_bias = address["grad_bias"]
        self.run(self.backward_function, frame.backward_address, frame.backward_bytes)

    def take_invalid_label(self) -> None:
        """Waits for the device, raises LabelError if a label was out of range since the last time, and forgets it."""
        word = int(self.invalid_label.item()) & _native.NO_INVALID_LABEL
        if word == _native.NO_INVALID_LABEL:
            return
        self.invalid_label.fill_(-1)
        try:
            _native.check(self._library.flce_kernel_check_invalid_label(self._handle, word))
        except errors.ArgumentError as error:
            raise errors.LabelError(str(error), word) from None


_lock = threading.Lock()
_sessions: dict[torch.device, ctypes.c_void_p] = {}
_kernels: dict[KernelKey, Kernel] = {}


def _session(device: torch.device) -> ctypes.c_void_p:
    """The device's session; _lock is not held, the library compiles once for concurrent callers."""
    with _lock:
        session = _sessions.get(device)
        if session is None:
            name = f"cuda:{device.index}" if device.type == "cuda" else "cpu"
            threads = 0 if device.type == "cuda" else torch.get_num_threads()
            session = _sessions[device] = _native.create_session(name, threads)
        return session


def find_for(given: Inputs, grad_weight_out: Tensor | None = None) -> Kernel:
    """The kernel that computes such a call."""
    hidden, weight = given.hidden, given.weight
    return find(
        hidden.device,
        hidden.shape[1],
        weight.shape[0],
        hidden.dtype,
        is_hidden_major(weight),
        weight.dtype if grad_weight_out is None else grad_weight_out.dtype,
        grad_weight_out is not None,
        given.bias is not None,
        given.class_weight is not None,
        given.options,
        given.workspace_limit_bytes,
    )


def find(*fields: Any) -> Kernel:
    """The kernel for a KernelKey of these fields: from memory, from the disk cache, or compiled."""
    kernel = _kernels.get(fields)  # type: ignore[call-overload]  # a named tuple hashes as a plain one, which is made faster
    if kernel is not None:
        return kernel  # type: ignore[no-any-return]
    key = KernelKey(*fields)
    if key.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise errors.UnavailableError(
            f"the kernel for {key.spec()} is not loaded yet, and a CUDA graph is being captured: "
            "call flce.warmup with it, or run it once, before the capture"
        )
    made = Kernel(key)
    with _lock:
        return _kernels.setdefault(key, made)


def all_kernels() -> list[Kernel]:
    with _lock:
        return list(_kernels.values())


def is_hidden_major(weight: Tensor) -> bool:
    """Whether [V, D] is the view of a contiguous [D, V]."""
    return weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]


def refuse_batched(gradient: Tensor) -> NoReturn:
    raise errors.UnsupportedTransformError(
        f"the upstream gradient is a {type(gradient).__name__} without memory of its own: backward of flce.linear_cross_entropy cannot be "
        "batched (vmap, is_grads_batched=True); call it once for each gradient"
    )


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % ROW_ALIGNMENT else tensor
