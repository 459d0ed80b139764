"""Kernels by name: `get_kernel`, `warmup`, `explain`, `check_labels`, `cache_statistics`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from flce import errors
from flce.call import _options, _spec_text
from flce.call._checks import HIDDEN_MULTIPLE
from flce.core import _kernel_key, _kernels, _native, checks
from flce.core._kernel_key import KernelKey
from flce.core._kernels import Kernel
from flce.fp8 import Fp8

_NAMED_DTYPES = {name: dtype for dtype, short in _kernel_key.DTYPE_NAMES.items() for name in (short, str(dtype).removeprefix("torch."))}
_FORMATS = {"e4m3": "e4m3", "float8_e4m3fn": "e4m3", torch.float8_e4m3fn: "e4m3", "nvfp4": "nvfp4"}  # forms of weights that are codes


def _device(given: torch.device | str | int | None) -> torch.device:
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError, ValueError):
        raise errors.PlacementError(
            f"device is {given!r}; allowed are cpu, cuda, cuda:N, a number of a GPU, a torch.device and None. The command explains for a "
            "device that is not here: `flce explain --device h100`"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise errors.UnavailableError(f"device is {given!r}, and torch sees no GPU here; `flce explain --device h100` needs none")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise errors.PlacementError(f"device is {device}; allowed are cpu and cuda")
    return device if device.type == "cuda" else torch.device("cpu")


def _dtype(name: str, given: torch.dtype | str) -> torch.dtype:
    dtype = _NAMED_DTYPES.get(given) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or dtype not in _kernel_key.DTYPE_NAMES:
        names = "'bfloat16' ('bf16'), 'float16' ('fp16'), 'float32' ('fp32')"
        raise errors.DTypeError(f"{name} is {given}; allowed are torch.bfloat16, torch.float16, torch.float32 and the names {names}")
    return dtype


def _padded(hidden_size: int) -> int:
    """Columns that a kernel has of hidden and weight."""
    return -(-hidden_size // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE


def get_kernel(
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype | str = torch.bfloat16,
    *,
    device: torch.device | str | int | None = None,
    hidden_major: bool = False,
    weight_dtype: torch.dtype | str | None = None,
    weight_block: int = 0,
    grad_weight_dtype: torch.dtype | str | None = None,
    accumulate: bool = False,
    bias: bool = False,
    class_weight: bool = False,
    class_offset: bool = False,
    class_groups: bool = False,
    temperature: bool = False,
    token_weight: bool = False,
    logit_scale: float | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dft: bool = False,
    batch_invariant: bool = False,
    fp8: Fp8 | None = None,
    teacher_top_k: int = 0,
    hard_weight: float = 0.0,
    return_loss: bool = True,
    return_lse: bool = False,
    return_logprobs: bool = False,
    return_entropy: bool = False,
    return_top1: bool = False,
    return_log_sum_sq_probs: bool = False,
    workspace_limit_bytes: int | None = None,
    num_tokens: int | None = None,
    strict: bool | None = None,
) -> Kernel:
    """The kernel that `linear_cross_entropy`, or with return_loss=False, return_logprobs=True `linear_logprobs`, or with teacher_top_k (K
    of its teacher_ids) `linear_topk_distillation`, uses for such a layer: compiled now unless memory or the disk cache has it.

    dtype is hidden's, bf16 where none is given, weight_dtype the weight's where it differs (fp32 under autocast; torch.float8_e4m3fn or
    "nvfp4" where a call has weight_scale, with weight_block=128 for e4m3's scales of blocks), grad_weight_dtype grad_weight_out's where
    that differs from the weight's; hidden_major: the weight is the view `w.t()` of a [D, V]; accumulate: with grad_weight_out;
    fp8: a call's; temperature: a call has one that is not the number 1; token_weight: a call has them; class_groups: `info_nce` has a mask.
    num_tokens: rows of the call's hidden; their token bucket (docs/tuning.md) chooses the plan, and what workspace_limit_bytes leaves for
    scratch depends on their number. None: a plan for 4096 tokens. device: None means the current CUDA device, or the CPU where there is
    none.
    strict: a kernel that no cache has is a CacheMissError that names the `flce prewarm` to run, and a cache that cannot be used an
        UnavailableError;
    None: as `set_strict` or FLCE_STRICT says. Raises ArgumentError, DTypeError, SpecError, PlanError, UnavailableError, CompileError,
        DeviceError,
    CacheMissError.
    """
    kind = _dtype("dtype", dtype)
    weight_format = _FORMATS.get(weight_dtype, "") if isinstance(weight_dtype, (str, torch.dtype)) else ""
    weight_kind = kind if weight_dtype is None or weight_format else _dtype("weight_dtype", weight_dtype)
    wide = weight_kind if grad_weight_dtype is None else _dtype("grad_weight_dtype", grad_weight_dtype)
    asked = _options.asked_outputs(
        {
            "return_loss": return_loss,
            "return_lse": return_lse,
            "return_logprobs": return_logprobs,
            "return_entropy": return_entropy,
            "return_top1": return_top1,
            "return_log_sum_sq_probs": return_log_sum_sq_probs,
        }
    )
    for name, size in (("hidden_size", hidden_size), ("vocab_size", vocab_size), ("teacher_top_k", teacher_top_k)):
        if not isinstance(size, int):
            raise errors.DTypeError(f"{name} is a {type(size).__name__}; it must be an integer")
    spec = _spec_text.spec_text(
        _options.written_outputs(asked, dft),
        logit_scale=logit_scale,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        dft=dft,
        batch_invariant=batch_invariant,
        fp8=fp8,
        teacher_top_k=teacher_top_k,
        hard_weight=hard_weight,
    )
    of_classes = {"bias": bias, "class_weight": class_weight, "class_offset": class_offset, "class_groups": class_groups}
    of_tokens = {"temperature": temperature, "token_weight": token_weight}
    flags = {"hidden_major": hidden_major, "accumulate": accumulate, **of_classes, **of_tokens}
    for name, flag in flags.items():
        checks.flag(name, flag)
    if num_tokens is not None and (not isinstance(num_tokens, int) or num_tokens < 0):
        raise errors.ArgumentError(f"num_tokens is {num_tokens!r}; it must be an integer of 0 or more, or None")
    limit = _spec_text.workspace_limit(workspace_limit_bytes)
    device, strict = _device(device), _kernels.checked_strict(strict)
    key = KernelKey(
        device=device,
        hidden_size=_padded(hidden_size),
        vocab_size=vocab_size,
        dtype=kind,
        weight_dtype=weight_kind,
        grad_weight_dtype=wide,
        options=spec,
        workspace_limit_bytes=limit,
        num_tokens=_kernel_key.planned_tokens(num_tokens or 0, limit),
        weight_format=weight_format,
        weight_block=int(checks.integer("weight_block", weight_block, 0)),
        **flags,  # type: ignore[arg-type]
    )
    return _kernels.find(key, strict=strict)


def warmup(
    layers: Iterable[Mapping[str, Any]],
    *,
    num_tokens: int | Iterable[int] | None = None,
    device: torch.device | str | int | None = None,
    strict: bool | None = None,
) -> list[Kernel]:
    """Compiles and loads the kernels of `layers`, each the arguments of `get_kernel`: warmup([{"hidden_size": 2048, "vocab_size":
    151936}], num_tokens=[4096]). Returns them, each once, in the order of layers and numbers of tokens.

    Do it before a CUDA graph is captured and where the first step should not pay for compilers.
    num_tokens: of the calls that will follow, the rows of hidden, one number or several; a layer's own `num_tokens` comes before it. None:
        any number, so a kernel for each token bucket whose plan differs (docs/tuning.md), which may take several times as long. With a
        layer's workspace_limit_bytes name the numbers: the limit holds for them.
    strict: as for `get_kernel`; afterwards, kernels that were warmed up are found for any `set_strict` and FLCE_STRICT."""
    kernels: dict[Kernel, None] = {}  # in order
    if isinstance(layers, Mapping) or not isinstance(layers, Iterable):
        raise errors.ArgumentError(f"layers is a {type(layers).__name__}; it must be a list of layers, each a mapping: warmup([layer])")
    for layer in layers:
        if not isinstance(layer, Mapping):
            raise errors.ArgumentError(f"a layer is a {type(layer).__name__}; it must be a mapping of get_kernel's arguments")
        asked = {"device": device, "strict": strict, **layer}
        _check_names(asked)
        for tokens in _tokens_of(asked.pop("num_tokens", num_tokens), limited=asked.get("workspace_limit_bytes") is not None):
            kernels[get_kernel(**asked, num_tokens=tokens)] = None
    return list(kernels)


_GET_KERNEL = inspect.signature(get_kernel).parameters


def _check_names(layer: Mapping[Any, Any]) -> None:
    """Raises where get_kernel has no such arguments, or needs others."""
    unknown = [name for name in layer if name not in _GET_KERNEL]
    if unknown:
        raise errors.ArgumentError(f"a layer has {unknown[0]!r}; allowed are {', '.join(_GET_KERNEL)}")
    missing = [name for name, parameter in _GET_KERNEL.items() if parameter.default is parameter.empty and name not in layer]
    if missing:
        raise errors.ArgumentError(f"a layer has no {missing[0]}; it must have hidden_size and vocab_size")


def _tokens_of(given: int | Iterable[int] | None, *, limited: bool) -> Iterable[int | None]:
    if given is None:
        return (None,) if limited else _native.token_buckets()
    return given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def explain(
    hidden_size: int, vocab_size: int, dtype: torch.dtype | str = torch.bfloat16, *, num_tokens: int | None = None, **layer: Any
) -> str:
    """Why `linear_cross_entropy` does what it does for this layer: spec, plan, device and reasons, as lines. Arguments as for `get_kernel`,
    whose device is one that is here: for others there is the command, `flce explain --device h100`. With num_tokens also the memory that a
    step of num_tokens tokens takes."""
    _check_names({"hidden_size": hidden_size, "vocab_size": vocab_size, **layer})
    kernel = get_kernel(hidden_size, vocab_size, dtype, num_tokens=num_tokens, **layer)
    text = kernel.explain()
    if (padded := _padded(hidden_size)) != hidden_size:
        text += (
            f"hidden_size {hidden_size} is no multiple of {HIDDEN_MULTIPLE}: a call copies hidden and weight with zeros for columns "
            f"{hidden_size} to {padded - 1}, and keeps the copies until backward\n"
        )
    if num_tokens is not None:
        forward, backward = (kernel.workspace_bytes(num_tokens, backward=which) for which in (False, True))
        text += f"workspace at {num_tokens} tokens: forward {forward} bytes, backward {backward} bytes\n"
        limit = layer.get("workspace_limit_bytes") or 0
        if kernel.choose_retained(num_tokens, workspace_limit_bytes=1 << 62).size:
            own = kernel.choose_retained(num_tokens, workspace_limit_bytes=limit, retain_in_grad_weight=False).size
            lendable = kernel.retained_bytes(num_tokens, in_grad_weight=True)
            text += (
                f"retained at {num_tokens} tokens: up to {kernel.retained_bytes(num_tokens)} bytes of which this limit allows {own}, "
                f"or what fits in {lendable} bytes of the weight's gradient\n"
            )
    return text


def cache_statistics() -> dict[str, Any]:
    """Counts of this process's kernel caches: {"compiled": artifacts compiled, "tiers": {tier: {"hits", "misses", "faults", "stored"}}}
    with the tiers memory, local (the directory), packs and remote."""
    return _kernels.statistics()


def check_labels() -> None:
    """Waits for all work on all streams of the devices that flce has used, and raises LabelError if any call since the last check met a
    label that is outside the vocabulary and not ignore_index, or a teacher's id that is outside it and not -1. Not while a CUDA graph is
    being captured: nothing can be waited for then.

    Such rows were computed as ignored ones, and such an id as none. `LabelError.row` is the smallest row of the flattened (and, with shift,
    shifted) target that had one; kernels report no more, so the label itself is in the caller's batch: `target.flatten()[error.row]`."""
    for kernel in _kernels.all_kernels():
        kernel.take_invalid_label()
