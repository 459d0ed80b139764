"""Sessions and kernels over torch tensors: one session a device, kernels found by what they compute, calls without any check of shapes.

Callers (`_op`, `_call`) have checked the tensors; the library checks them again. A call allocates with torch on hidden's device and
runs on torch's current stream of it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flce import errors
from flce.core import _locks, _memory, _native, _retain
from flce.core._frame import GRADIENT_VIEWS, Frame, Inputs, is_hidden_major, outputs_of, split_values
from flce.core._kernel_key import KernelKey, planned_tokens

_WORKSPACE_ALIGNMENT = 256  # torch's CUDA allocator gives 512, its CPU allocator 64

_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_raw_delete: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)
# The function under torch.cuda.caching_allocator_alloc, called on the current device.
_raw_alloc: Any = (
    getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None) if _current_device and _raw_delete and _raw_stream else None
)


def _stream(index: int) -> Any:
    """The number of the current stream, which torch says sooner than it makes a Stream."""
    return torch.cuda.current_stream(index).cuda_stream if _raw_stream is None else _raw_stream(index)


class Kernel:
    """A compiled kernel set for one output layer on one device; shared by every thread. Made by `flce.get_kernel`."""

    _device: torch.device
    _handle: ctypes.c_void_p

    @property
    def device(self) -> torch.device:
        return self._device

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
        """Spec, plan, device and reasons, as a dictionary."""
        result: dict[str, Any] = json.loads(self._text(_native.TEXT_EXPLAIN_JSON))
        return result

    def workspace_bytes(self, num_tokens: int, *, backward: bool = True) -> int:
        """Scratch bytes that a pass over num_tokens tokens takes."""
        return _native.workspace_bytes(self._handle, num_tokens, _native.BACKWARD if backward else _native.FORWARD)

    def retained_bytes(self, num_tokens: int, *, in_grad_weight: bool = False) -> int:
        """Bytes in which forward can spare backward the logits of num_tokens tokens, in memory of their own (any smaller number spares a
        part) or in the weight gradient's; 0 where this kernel retains nothing."""
        place = _native.RETAINED_GRAD_WEIGHT if in_grad_weight else _native.RETAINED_OWN
        return _native.retained_bytes(self._handle, num_tokens, place)

    def choose_retained(self, num_tokens: int, *, workspace_limit_bytes: int = 0, retain_in_grad_weight: bool = True) -> _retain.Choice:
        """Chooses what forward of a step over num_tokens tokens leaves to backward, (lent, size): `size` bytes, 0 for nothing, in the
        memory of the weight's gradient where `lent`, else in memory of its own. `workspace_limit_bytes`: on workspace and retained bytes
        together; 0: no limit, and no memory of its own. `retain_in_grad_weight`: the gradient will be written, and its memory may hold the
        retained bytes until then."""
        place, size = _native.choose_retained(self._handle, num_tokens, workspace_limit_bytes, retain_in_grad_weight, _retain.LEAST_WORK)
        return _retain.Choice(place == _native.RETAINED_GRAD_WEIGHT, size)

    def __repr__(self) -> str:
        return f"<flce.Kernel {self.spec} on {self.device}>"

    def _text(self, which: int) -> str:
        return _native.text(_native.library().flce_kernel_text, self._handle, which)


class LoadedKernel(Kernel):
    """The class of every kernel: its calls, beside what users ask of a Kernel."""

    frame_type: type[Frame] = Frame
    of: tuple[Any, ...] = ()  # arguments beside the key by which it is found
    retains_unasked = False  # whether a call without a limit may have memory of its own for what is retained

    def __dir__(self) -> list[str]:
        """Names that users ask for, of an instance as of the class."""
        return dir(Kernel)

    def __init__(self, key: KernelKey, handle: ctypes.c_void_p) -> None:
        self.key = key
        self._device = key.device
        self._library = _native.library()
        self._handle = handle
        # Tensors that outlive this call are ordinary ones, also where the first call comes under inference mode or beside fake tensors.
        with torch.inference_mode(False), _disable_current_modes():
            # -1 has the bits of UINT64_MAX, "none".
            self.invalid_label = _memory.make_once(key.device, lambda: torch.full((1,), -1, dtype=torch.int64, device=key.device))
            # Outputs and workspace are made like this one: quicker than naming dtype and device each time.
            self.float_like = self.invalid_label.detach().view(torch.float32)[0]
            self.new_floats: Callable[..., Tensor] = self.float_like.new_empty
            self._byte = self.invalid_label.detach().view(torch.uint8)[0]
        self.outputs = outputs_of(key.options, shard_class_weight=bool(key.whole_vocab_size) and key.class_weight)
        self.weight_rows = key.vocab_size  # rows of the weight that its calls have
        self.forward_function, self.backward_function = self._library.flce_kernel_forward, self._library.flce_kernel_backward
        self._index = key.device.index if key.device.type == "cuda" else None
        self._allocates_raw = self._index is not None and _raw_alloc is not None
        self.frames: list[Frame] = []  # frames that no call is using
        # A kernel retains nothing where the tokens are too few to gain from it.
        self.retains = _native.retained_bytes(handle, 1 << 12, _native.RETAINED_OWN) > 0
        # A GPU's forward that retains adds up the exponentials that it retains, relative to another number than a row's largest logit.
        self.retaining_changes_saved = self.retains and key.device.type == "cuda"
        # Whether the last backward had an entropy's gradient, as the next one then will have.
        self.trains_entropy = False
        with _lock:
            self.alive = _alive.setdefault((key.device, key.vocab_size, key.hidden_size), _retain.Alive())

    def of_offsets(self, given: Inputs) -> LoadedKernel:
        """The kernel whose grad_bias is the gradient of the call's class_offset, in fp32."""
        limit = given.options.workspace_limit_bytes
        key = self.key._replace(
            bias=True,
            options=",".join(part for part in (self.key.options, "offset_gradient") if part),
            accumulate=False,
            grad_weight_dtype=torch.float32,
            workspace_limit_bytes=limit,
            num_tokens=planned_tokens(given.target.shape[0], limit),
        )
        return find(key, make=type(self), of=self.of)

    def may_retain(self) -> bool:
        """Whether a forward may leave anything to backward. A GPU's exponentials are no use where an entropy has a gradient."""
        return self.retains and not (self.trains_entropy and self.retaining_changes_saved)

    def new_grad_weight(self, weight: Tensor) -> Tensor:
        """Memory for weight's gradient, which lies as weight does."""
        wide = self.key.grad_weight_dtype
        if self.key.hidden_major:
            return weight.new_empty(weight.shape[::-1], dtype=wide).t()
        if weight.dtype is wide and weight.is_contiguous():
            return torch.empty_like(weight)
        return weight.new_empty(weight.shape, dtype=wide)

    def new_bytes(self, size: int) -> Tensor:
        return self._byte.new_empty(size)

    def _take_frame(self) -> Frame:
        """A frame for one call, which appends it to `frames` when it ends well. After an exception, a KeyboardInterrupt at any line
        included, nobody knows how far the frame was filled, so it is not used again."""
        try:
            return self.frames.pop()
        except IndexError:
            return self.frame_type(self)

    def run(self, function: Any, args_address: int, size: int) -> None:
        """One call, with `size` bytes of workspace: freed when this returns, handed out again only behind this stream's work."""
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
            status = function(self._handle, args_address, workspace.data_ptr(), size, _stream(index))
        else:
            workspace = self._byte.new_empty(size + _WORKSPACE_ALIGNMENT)
            pointer = -(-workspace.data_ptr() // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
            status = function(self._handle, args_address, pointer, size, None)
        if status:
            _native.raise_status(status)

    def run_in(self, workspace: Tensor, size: int, function: Any, args_address: int) -> None:
        """One call with the workspace of `new_workspace(size)`, which other calls may go on from."""
        pointer = -(-workspace.data_ptr() // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        status = function(self._handle, args_address, pointer, size, None if self._index is None else _stream(self._index))
        if status:
            _native.raise_status(status)

    def new_workspace(self, size: int) -> Tensor:
        return self._byte.new_empty(size + _WORKSPACE_ALIGNMENT)

    def new_values(self, given: Inputs, token_shape: torch.Size) -> Tensor:
        """Memory for what forward writes in fp32: a lone value as itself, the loss as token_shape or []; else one flat tensor, see
        `split_values`."""
        shape = self.outputs.shape(token_shape, given.target.shape[0], given.options.reduction)
        return self.new_floats(shape) if shape else torch.empty_like(self.float_like)

    def new_top1(self, token_shape: torch.Size) -> Tensor | None:
        """Memory for top1, int64; None where it is no output."""
        return self.invalid_label.new_empty(token_shape) if self.outputs.top1 else None

    def new_teacher_logprobs(self, token_shape: torch.Size) -> Tensor:
        """Memory for the teacher's classes' log-probabilities, for a caller who wants them."""
        return self.new_floats((*token_shape, self.outputs.teacher_top_k))

    def forward(self, given: Inputs, values: Tensor, top1: Tensor | None = None, teacher_logprobs: Tensor | None = None) -> Tensor:
        """Writes `values` (`new_values`), `top1` (`new_top1`) and teacher_logprobs (None: not wanted). Returns the tensor that backward
        needs: `outputs.saved` and teacher_logprobs one behind the other, with a `Retained` attached where there is one (`_retain.of`)."""
        frame = self._take_frame()
        kept = frame.inputs(frame.forward, self.as_read(given))  # noqa: F841  # alive until the call is made
        retained = self.prepare_retained(frame, given)  # known again by the hidden states that backward is given
        saved = self.new_floats(self.outputs.saved_size(frame.num_tokens))
        outputs = self.point_to_outputs(frame, saved, values, top1)
        self.run_forward(frame, given)
        self.copy_statistics(outputs, saved, frame.num_tokens, teacher_logprobs)
        self.frames.append(frame)
        if retained is not None:
            _retain.attach(retained, saved)
        return saved

    def as_read(self, given: Inputs) -> Inputs:
        """`given` as forward reads it."""
        return given

    def run_forward(self, frame: Frame, given: Inputs) -> None:
        """Forward of a filled frame."""
        self.run(self.forward_function, frame.forward_address, frame.forward_bytes)

    def prepare_retained(self, frame: Frame, given: Inputs) -> _retain.Retained | None:
        """Prepares the memory that forward leaves to backward, and points the frame's struct to it."""
        retained = memory = None
        retain = given.options.retain
        if self.retains and (retain.gradient or retain.budget):
            if frame.choices is None:
                frame.choices = _retain.Choices(self, frame.num_tokens)
            retained, memory = _retain.prepare(self, given, frame.choices)
        frame.retain(frame.forward, memory, lent=retained is not None and retained.lent)
        return retained

    def point_to_outputs(self, frame: Frame, saved: Tensor, values: Tensor, top1: Tensor | None) -> dict[str, Tensor]:
        """Where outputs are to be written, in the frame. Returns the views of `values` by name."""
        frame.point_to_saved(saved.data_ptr(), self.outputs)
        outputs = split_values(values, frame.num_tokens, self.outputs.values)
        for name, output in outputs.items():
            if name not in self.outputs.saved:
                getattr(frame, name).data = output.data_ptr()
        frame.set_top1(top1)
        return outputs

    def copy_statistics(self, outputs: dict[str, Tensor], saved: Tensor, num_tokens: int, teacher_logprobs: Tensor | None) -> None:
        """Copies statistics of backward to outputs of the same name: the caller may change an output in place."""
        for i, name in enumerate(self.outputs.saved):
            if name in outputs:
                outputs[name].copy_(saved[i * num_tokens : (i + 1) * num_tokens])
        if teacher_logprobs is not None:
            teacher_logprobs.copy_(self.outputs.teacher_logprobs(saved).view(teacher_logprobs.shape))

    def saved_anew(self, given: Inputs, saved: Tensor) -> Tensor:
        """`saved` as a forward that retains nothing makes it: with it, backward has the bits of a call that retained nothing."""
        return self.forward(given.retaining(_retain.Retain()), self.new_values(given, given.target.shape))

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
        """Writes (or, in an accumulating kernel, adds for weight and bias) the gradients that are not None. grad_values is like forward's
        values, contiguous. `retained`: the memory that forward filled, `lent`: that of a weight's gradient; where it is grad_weight, that
        is all it is afterwards. `entropy`: not all of an entropy's gradient is 0, as far as the caller knows; without one a GPU has a use
        for what is retained."""
        frame = self._take_frame()
        kept = self.fill_backward(frame, given, saved, grad_values, (grad_hidden, grad_weight, grad_bias), entropy=entropy)  # noqa: F841
        frame.retain(frame.backward, retained, lent=lent)
        self.run(self.backward_function, frame.backward_address, frame.backward_bytes)
        self.frames.append(frame)

    def fill_backward(
        self,
        frame: Frame,
        given: Inputs,
        saved: Tensor,
        grad_values: Tensor,
        gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
        *,
        entropy: bool,
    ) -> tuple[Tensor | None, ...]:
        """backward's arguments in the frame's struct, but for what is retained. `gradients`: of hidden, weight and bias. The result has to
        outlive the call."""
        args, address = frame.backward, frame.address
        kept = frame.inputs(args, given)
        frame.point_to_saved(saved.data_ptr(), self.outputs)
        refuse_batched(grad_values)
        for name, gradient in split_values(grad_values, frame.num_tokens, self.outputs.values).items():
            if name in GRADIENT_VIEWS:
                getattr(frame, GRADIENT_VIEWS[name]).data = gradient.data_ptr()
        if "entropy" in self.outputs.values:
            args.grad_entropy = address["grad_entropy"] if entropy else None
        for name, made in zip(("grad_hidden", "grad_weight", "grad_bias"), gradients, strict=True):
            if made is None:
                setattr(args, name, None)
            else:
                getattr(frame, name).data = made.data_ptr()
                setattr(args, name, address[name])
        return kept

    def take_invalid_label(self) -> None:
        """Waits for all streams of the device, raises LabelError if a label was out of range since the last time, and forgets it."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
        word = int(self.invalid_label.item()) & _native.NO_INVALID_LABEL
        if word == _native.NO_INVALID_LABEL:
            return
        self.invalid_label.fill_(-1)
        if on_gpu:  # before a call on another stream can report the next one
            torch.cuda.current_stream(self.device).synchronize()
        try:
            _native.check(self._library.flce_kernel_check_invalid_label(self._handle, word))
        except errors.ArgumentError as error:
            if "target[" not in str(error):  # a divergence, which has no labels
                raise errors.LabelError(f"{error}; tokens are flattened here", word) from None
            if any(option.startswith("top_k=") for option in self.key.options.split(",")):  # labels of its own
                fault = f"temperature[{word}] is not between 2^-100 and 2^100 (and it may not be the only such row)"
                raise errors.LabelError(f"{fault}; tokens are flattened here", word) from None
            more = f"; or teacher_probs[{word}] holds a number that is not from 0 to 1" if self.outputs.teacher_top_k else ""
            more += "; or cu_seqlens does not begin with 0, or decreases" if word == 0 else ""
            where = "target is flattened here (of several hidden states one depth behind the other), and with a shift what "
            where += "flce.shift_labels makes of labels"
            raise errors.LabelError(f"{error}{more}; {where}", word) from None


_lock = _locks.new_lock()
_sessions: dict[tuple[torch.device, bool | None], ctypes.c_void_p] = {}  # by device, and strict
_kernels: dict[tuple[Any, ...], LoadedKernel] = {}  # by key without a limit, plan, and other arguments
_found: dict[tuple[Any, ...], LoadedKernel] = {}  # by key, and other arguments
_strict: bool | None = None  # for lookups that do not say; None: FLCE_STRICT decides
_MOST_FOUND = 4096  # limits with numbers of tokens
_alive: dict[tuple[torch.device, int, int], _retain.Alive] = {}


def _session(device: torch.device, strict: bool | None) -> ctypes.c_void_p:
    """The device's session; _lock is not held, the library compiles once for concurrent callers."""
    with _lock:
        session = _sessions.get((device, strict))
        if session is None:
            name = f"cuda:{device.index}" if device.type == "cuda" else "cpu"
            threads = 0 if device.type == "cuda" else torch.get_num_threads()
            session = _sessions[device, strict] = _native.create_session(name, threads, strict)
        return session


def set_strict(strict: bool | None) -> None:
    """Sets whether from now on a kernel that no cache has is a CacheMissError, in every thread of this process. None, the value at the
    start: FLCE_STRICT decides.

    For a trainer that cannot set its ranks' environment: once `warmup` has made the run's kernels, `set_strict(True)` makes sure that no
    step compiles. Kernels that this process already has are found in any case. `get_kernel` and `warmup` go by their own `strict` where it
    is given. Raises ArgumentError for anything but True, False and None."""
    global _strict
    _strict = checked_strict(strict)


def checked_strict(strict: Any) -> bool | None:
    if strict is not None and not isinstance(strict, bool):
        raise errors.ArgumentError(f"strict is {strict!r}; allowed are True, False and None (as FLCE_STRICT says)")
    return strict


find_shard: Callable[..., LoadedKernel] | None = None  # find_for of a weight that lies over ranks; set by what knows of ranks


def find_for(given: Inputs, grad_weight_out: Tensor | None = None, *, backward: bool = False, shard: Any = None) -> LoadedKernel:
    """The kernel that computes such a call, or its backward. `shard`: the shard of forward's kernel, for a backward that knows it."""
    if given.options.parallel is not None:
        assert find_shard is not None
        return find_shard(given, grad_weight_out, backward=backward, shard=shard)
    return find(key_of(given, grad_weight_out, given.weight.shape[0]))


def key_of(given: Inputs, grad_weight_out: Tensor | None, vocab_size: int) -> KernelKey:
    """The key of the kernel of such a call, for a weight of that many rows."""
    hidden, weight, limit = given.hidden, given.weight, given.options.workspace_limit_bytes
    return KernelKey(
        device=hidden.device,
        hidden_size=hidden.shape[1],
        vocab_size=vocab_size,
        dtype=hidden.dtype,
        hidden_major=is_hidden_major(weight),
        weight_dtype=weight.dtype,
        grad_weight_dtype=weight.dtype if grad_weight_out is None else grad_weight_out.dtype,
        accumulate=grad_weight_out is not None,
        bias=given.bias is not None,
        class_weight=given.class_weight is not None,
        class_offset=given.class_offset is not None,
        class_groups=given.class_group is not None,
        temperature=given.temperature is not None,
        token_weight=given.token_weight is not None,
        options=given.options.spec,
        workspace_limit_bytes=limit,
        num_tokens=planned_tokens(given.target.shape[0], limit),
    )


def find(
    key: KernelKey, *, strict: bool | None = None, make: Callable[..., LoadedKernel] = LoadedKernel, of: tuple[Any, ...] = ()
) -> LoadedKernel:
    """The kernel of that key: from memory, the caches, or compiled (unless `strict`; None: as `set_strict` says). `make`: what makes it, of
    its key, handle and `of`."""
    asked = (key, make, of)
    kernel = _found.get(asked)
    if kernel is not None:
        return kernel
    if key.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise errors.UnavailableError(
            f"the kernel for {key.spec()} with {key.num_tokens} tokens is not loaded yet, and a CUDA graph is being captured: "
            "call flce.warmup with it, or run it once with as many tokens, before the capture"
        )
    handle = _native.get_kernel(
        _session(key.device, _strict if strict is None else strict), key.spec(), key.workspace_limit_bytes, key.num_tokens
    )
    # Limits and numbers of tokens that come to the same plan share its kernel.
    shared = key._replace(workspace_limit_bytes=0, num_tokens=0)
    name = (shared, _native.text(_native.library().flce_kernel_text, handle, _native.TEXT_PLAN), make, *of)
    kernel = _kernels.get(name)
    if kernel is None:
        made = make(shared, handle, *of)
        with _lock:
            kernel = _kernels.setdefault(name, made)
    else:
        _native.library().flce_kernel_release(handle)
    if len(_found) >= _MOST_FOUND:
        _found.clear()
    return _found.setdefault(asked, kernel)


def statistics() -> dict[str, Any]:
    """Counts of all sessions: artifacts compiled, and each tier's hits, misses, faults and stored entries."""
    with _lock:
        sessions = list(_sessions.values())
    tiers = {name: dict.fromkeys(("hits", "misses", "faults", "stored"), 0) for name in _native.TIERS}
    compiled = 0
    for session in sessions:
        made, did = _native.session_statistics(session)
        compiled += made
        for name, counts in did.items():
            for what, count in counts.items():
                tiers[name][what] += count
    return {"compiled": compiled, "tiers": tiers}


def all_kernels() -> list[LoadedKernel]:
    with _lock:
        return list(_kernels.values())


def refuse_batched(gradient: Tensor) -> None:
    """Raises where the upstream gradient has no memory of its own."""
    try:
        gradient.data_ptr()
    except RuntimeError:
        raise_batched(gradient)


def raise_batched(gradient: Tensor) -> NoReturn:
    raise errors.UnsupportedTransformError(
        f"the upstream gradient is a {type(gradient).__name__} without memory of its own: backward of flce.linear_cross_entropy cannot be "
        "batched (vmap, is_grads_batched=True); call it once for each gradient"
    )
