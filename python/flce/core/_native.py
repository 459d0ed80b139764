"""The C ABI (runtime/include/flce/flce.h) in ctypes: structs, functions, and status codes as exceptions."""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p, create_string_buffer
from pathlib import Path
from typing import Any, NamedTuple

from flce import errors
from flce.core import _locks

ABI_VERSION = 17

CPU, CUDA = 1, 2
INT32, INT64, UINT64, UINT8, E4M3 = 0x0020, 0x0040, 0x0140, 0x0108, 0x0A08
FP16, FP32, BF16 = 0x0210, 0x0220, 0x0410
REDUCTION_NONE, REDUCTION_SUM, REDUCTION_MEAN, REDUCTION_WEIGHTED_MEAN = 0, 1, 2, 3
FORWARD, BACKWARD, MERGE = 0, 1, 3
STAGE_WHOLE, STAGE_UNTIL_GRAD_HIDDEN, STAGE_REST = 0, 1, 2
RETAINED_OWN, RETAINED_GRAD_WEIGHT = 0, 1
TIERS = ("memory", "local", "packs", "remote")
TEXT_SPEC, TEXT_PLAN, TEXT_PLAN_JSON, TEXT_EXPLAIN, TEXT_EXPLAIN_JSON = 0, 2, 3, 5, 6
NO_INVALID_LABEL = 0xFFFF_FFFF_FFFF_FFFF


class TensorView(Structure):
    """flce_tensor; its arrays are spelt out, because a scalar field is set several times faster than an array's element."""

    _fields_ = (
        ("data", c_void_p),
        ("dtype", c_int32),
        ("ndim", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("row_stride", c_int64),
        ("column_stride", c_int64),
        ("device_type", c_int32),
        ("device_index", c_int32),
    )


class CallTensor(NamedTuple):
    """A tensor of a call, as flce_call_arguments_json describes it."""

    elements: str
    extent: str


class CallArguments(NamedTuple):
    """The structs and tensors that the library takes for a call."""

    forward: type[Structure]  # flce_forward_args
    merge: type[Structure]  # flce_merge_args
    backward: type[Structure]  # flce_backward_args
    tensors: dict[str, CallTensor]


class SessionOptions(Structure):
    """flce_session_options"""

    _fields_ = (
        ("struct_size", c_size_t),
        ("device", c_char_p),
        ("cache_dir", c_char_p),
        ("scratch_bytes", c_int64),
        ("threads", c_int32),
        ("no_disk_cache", c_int32),
        ("workspace_limit_bytes", c_int64),
        ("strict", c_int32),
        ("reserved", c_int32),
    )  # fields behind these are the environment's to say


class KernelOptions(Structure):
    """flce_kernel_options"""

    _fields_ = (
        ("struct_size", c_size_t),
        ("plan", c_char_p),
        ("scratch_bytes", c_int64),
        ("workspace_limit_bytes", c_int64),
        ("num_tokens", c_int64),
    )


class RetainOptions(Structure):
    """flce_retain_options"""

    _fields_ = (
        ("struct_size", c_size_t),
        ("workspace_limit_bytes", c_int64),
        ("least_work", c_int64),
        ("retain_in_grad_weight", c_int32),
        ("reserved", c_int32),
        ("vocab_columns", c_int64),
    )


class Statistics(Structure):
    """flce_statistics"""

    _fields_ = (
        ("struct_size", c_size_t),
        ("memory_hits", c_int64),
        ("disk_hits", c_int64),
        ("compiled", c_int64),
        ("disk_faults", c_int64),
    )


class TierStatistics(Structure):
    """flce_tier_statistics"""

    _fields_ = (
        ("struct_size", c_size_t),
        ("hits", c_int64),
        ("misses", c_int64),
        ("faults", c_int64),
        ("stored", c_int64),
    )


_ERRORS: dict[int, type[errors.FlceError]] = {
    1: errors.SpecError,
    2: errors.PlanError,
    3: errors.ArgumentError,
    4: errors.CompileError,
    5: errors.DeviceError,
    6: errors.UnavailableError,
    7: errors.InternalError,
    8: errors.CacheMissError,
}

JOB_TEXT = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)
JOB_STOP = ctypes.CFUNCTYPE(c_int32, c_void_p)


class Job(Structure):
    """flce_job"""

    _fields_ = (
        ("struct_size", c_size_t),
        ("user", c_void_p),
        ("progress", JOB_TEXT),
        ("warning", JOB_TEXT),
        ("stop", JOB_STOP),
        ("report", JOB_TEXT),
    )


# name: (result, arguments). Functions that return a status are checked by `check`.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "flce_abi_version": (c_int32, ()),
    "flce_version": (c_char_p, ()),
    "flce_token_bucket": (c_int64, (c_int64,)),
    "flce_last_error": (c_char_p, ()),
    "flce_last_error_log": (c_char_p, ()),
    "flce_session_create": (c_int32, (POINTER(SessionOptions), POINTER(c_void_p))),
    "flce_session_statistics": (c_int32, (c_void_p, POINTER(Statistics))),
    "flce_session_tier_statistics": (c_int32, (c_void_p, c_int32, POINTER(TierStatistics))),
    "flce_get_kernel": (c_int32, (c_void_p, c_char_p, POINTER(KernelOptions), POINTER(c_void_p))),
    "flce_spec_text": (c_int32, (c_char_p, c_char_p, c_size_t, POINTER(c_size_t))),
    "flce_hf_config_spec": (c_int32, (c_char_p, c_char_p, c_size_t, POINTER(c_size_t))),
    "flce_kernel_workspace_bytes": (c_int32, (c_void_p, c_int64, c_int32, POINTER(c_size_t))),
    "flce_kernel_retained_bytes": (c_int32, (c_void_p, c_int64, c_int32, POINTER(c_size_t))),
    "flce_kernel_reads_hidden_late": (c_int32, (c_void_p, c_int64, c_int32, c_size_t, c_int64, POINTER(c_int32))),
    "flce_kernel_choose_retained": (c_int32, (c_void_p, c_int64, POINTER(RetainOptions), POINTER(c_int32), POINTER(c_size_t))),
    "flce_kernel_release": (None, (c_void_p,)),
    "flce_kernel_text": (c_int32, (c_void_p, c_int32, c_char_p, c_size_t, POINTER(c_size_t))),
    "flce_plan_digest": (c_int32, (POINTER(c_void_p), c_size_t, c_char_p, c_size_t, POINTER(c_size_t))),
    "flce_tune": (c_int32, (c_char_p, POINTER(Job))),
    "flce_prewarm_sets": (c_int32, (c_char_p, POINTER(Job))),
    "flce_missing_sets": (c_int32, (c_char_p, POINTER(Job))),
    "flce_kernel_forward": (c_int32, (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p)),
    "flce_kernel_merge": (c_int32, (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p)),
    "flce_kernel_partial_sum_fields": (c_int32, (c_void_p, POINTER(c_int32))),
    "flce_kernel_backward": (c_int32, (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p)),
    "flce_kernel_check_invalid_label": (c_int32, (c_void_p, c_uint64)),
    "flce_call_arguments_json": (c_int32, (c_char_p, c_size_t, POINTER(c_size_t))),
}

_lock = _locks.new_lock()
_library: ctypes.CDLL | None = None
_load_error: str | None = None


def _candidates() -> list[Path]:
    given = os.environ.get("FLCE_LIBRARY")
    if given:
        return [Path(given)]
    here = Path(__file__).resolve().parent.parent
    # A wheel of a release tree has it under its soname, by which the command asks for it.
    return [here / folder / name for folder in ("lib", "lib64") for name in ("libflce.so", "libflce.so.0")]


def library_path() -> Path | None:
    """Path of the library that `library` loads; None where there is none."""
    return next((candidate for candidate in _candidates() if candidate.exists()), None)


def _check_abi(lib: ctypes.CDLL, name: str) -> None:
    """Checks the version before any other function is looked for: an older library may lack some."""
    try:
        asked = lib.flce_abi_version
    except AttributeError as error:
        raise errors.UnavailableError(f"{name} is not libflce: it has no flce_abi_version") from error
    asked.restype, asked.argtypes = _SIGNATURES["flce_abi_version"]
    if (version := asked()) < ABI_VERSION:
        raise errors.UnavailableError(f"{name} has ABI version {version}; this package needs {ABI_VERSION} or newer")


def _load() -> ctypes.CDLL:
    paths = _candidates()
    path = library_path()
    if path is None:
        places = " or ".join(_shown(bytes(candidate)) for candidate in paths)
        raise errors.UnavailableError(f"libflce.so is not at {places}: install flce with pip, or set FLCE_LIBRARY to a built libflce.so")
    name = _shown(bytes(path))
    try:
        # The CUDA driver reports errors that torch should not see differently for it: symbols stay local (RTLD_LOCAL is the default).
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise errors.UnavailableError(f"{name} cannot be loaded: {_shown(os.fsencode(str(error)))}") from error
    _check_abi(lib, name)
    for function_name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, function_name)
        function.restype = result
        function.argtypes = arguments
    return lib


def library() -> ctypes.CDLL:
    """libflce, loaded once. Raises UnavailableError, with the same text each time, where it cannot be."""
    global _library, _load_error
    if _library is not None:
        return _library
    with _lock:
        if _library is None and _load_error is None:
            try:
                _library = _load()
            except errors.UnavailableError as error:
                _load_error = str(error)
        if _library is None:
            assert _load_error is not None
            raise errors.UnavailableError(_load_error)
        return _library


def _shown(raw: bytes) -> str:
    """Text of the library's. It may name paths, which are bytes; those that are no UTF-8 are shown as \\xff, so that it can be printed."""
    return raw.decode(errors="backslashreplace")


def raise_status(status: int) -> None:
    """Raises what the last call on this thread failed with."""
    lib = library()
    message = _shown(lib.flce_last_error())
    kind = _ERRORS.get(status, errors.InternalError)
    if kind is errors.CompileError:
        raise errors.CompileError(message, _shown(lib.flce_last_error_log()))
    raise kind(message)


def check(status: int) -> None:
    if status != 0:
        raise_status(status)


def text(call: Callable[..., int], *leading: Any) -> str:
    """Text of a function that writes it to (buffer, capacity, needed)."""
    needed = c_size_t()
    check(call(*leading, None, 0, byref(needed)))
    buffer = create_string_buffer(needed.value)
    check(call(*leading, buffer, needed.value, None))
    return _shown(buffer.value)


_FIELD_TYPES: dict[str, Any] = {"tensor": c_void_p, "pointer": c_void_p, "size": c_size_t, "int32": c_int32, "int64": c_int64}


def _struct(name: str, description: dict[str, Any]) -> type[Structure]:
    fields = sorted(description["fields"], key=lambda field: field["offset"])
    made = type(name, (Structure,), {"_fields_": [(field["name"], _FIELD_TYPES[field["type"]]) for field in fields]})
    offsets = [getattr(made, field["name"]).offset for field in fields]
    if offsets != [field["offset"] for field in fields] or ctypes.sizeof(made) != description["size"]:
        raise errors.InternalError(f"{name} of this library is laid out in another way than its description says")
    return made


@functools.cache
def call_arguments() -> CallArguments:
    """The structs of a call and its tensors, as the library describes them: a tensor that it gains needs no line here."""
    description = json.loads(text(library().flce_call_arguments_json))
    return CallArguments(
        _struct("flce_forward_args", description["forward"]),
        _struct("flce_merge_args", description["merge"]),
        _struct("flce_backward_args", description["backward"]),
        {tensor["name"]: CallTensor(tensor["elements"], tensor["extent"]) for tensor in description["tensors"]},
    )


def create_session(device: str, threads: int, strict: bool | None) -> c_void_p:
    strictness = 0 if strict is None else 1 if strict else -1
    options = SessionOptions(struct_size=ctypes.sizeof(SessionOptions), device=device.encode(), threads=threads, strict=strictness)
    handle = c_void_p()
    check(library().flce_session_create(byref(options), byref(handle)))
    return handle


@functools.lru_cache(maxsize=4096)
def token_bucket(num_tokens: int) -> int:
    """The number of tokens that calls over num_tokens tokens are planned for."""
    bucket: int = library().flce_token_bucket(num_tokens)
    return bucket


@functools.cache
def token_buckets() -> tuple[int, ...]:
    """All of them, ascending."""
    largest = token_bucket((1 << 63) - 1)
    return tuple(size for shift in range(largest.bit_length()) if (size := 1 << shift) == token_bucket(size))


def get_kernel(session: c_void_p, spec: str, workspace_limit_bytes: int, num_tokens: int) -> c_void_p:
    options = KernelOptions(struct_size=ctypes.sizeof(KernelOptions), workspace_limit_bytes=workspace_limit_bytes, num_tokens=num_tokens)
    handle = c_void_p()
    check(library().flce_get_kernel(session, spec.encode(), byref(options), byref(handle)))
    return handle


def session_statistics(session: c_void_p) -> tuple[int, dict[str, dict[str, int]]]:
    """How many artifacts it compiled, and hits, misses, faults and entries stored of each tier."""
    total = Statistics(struct_size=ctypes.sizeof(Statistics))
    check(library().flce_session_statistics(session, byref(total)))
    tiers = {}
    for number, name in enumerate(TIERS):
        tier = TierStatistics(struct_size=ctypes.sizeof(TierStatistics))
        check(library().flce_session_tier_statistics(session, number, byref(tier)))
        tiers[name] = {"hits": tier.hits, "misses": tier.misses, "faults": tier.faults, "stored": tier.stored}
    return total.compiled, tiers


def workspace_bytes(kernel: c_void_p, num_tokens: int, which: int) -> int:
    """`which`: FORWARD, BACKWARD or MERGE."""
    result = c_size_t()
    check(library().flce_kernel_workspace_bytes(kernel, num_tokens, which, byref(result)))
    return result.value


def partial_sum_fields(kernel: c_void_p) -> int:
    """Fields of a shard's partial sums; 0 where the kernel is no shard's."""
    result = c_int32()
    check(library().flce_kernel_partial_sum_fields(kernel, byref(result)))
    return result.value


def retained_bytes(kernel: c_void_p, num_tokens: int, place: int) -> int:
    result = c_size_t()
    check(library().flce_kernel_retained_bytes(kernel, num_tokens, place, byref(result)))
    return result.value


def reads_hidden_late(kernel: c_void_p, num_tokens: int, place: int, retained_bytes: int, vocab_columns: int) -> bool:
    """Whether the last stage of backward alone reads hidden. `vocab_columns`: classes of this rank's shard, at least one."""
    result = c_int32()
    check(library().flce_kernel_reads_hidden_late(kernel, num_tokens, place, retained_bytes, vocab_columns, byref(result)))
    return bool(result.value)


def choose_retained(
    kernel: c_void_p, num_tokens: int, workspace_limit_bytes: int, retain_in_grad_weight: bool, least_work: int, vocab_columns: int = 0
) -> tuple[int, int]:
    """(place, bytes) of what forward should leave to backward. `vocab_columns`: classes of this rank's shard; 0: all that the spec has."""
    options = RetainOptions(
        struct_size=ctypes.sizeof(RetainOptions),
        workspace_limit_bytes=workspace_limit_bytes,
        least_work=least_work,
        retain_in_grad_weight=1 if retain_in_grad_weight else -1,
        vocab_columns=vocab_columns,
    )
    place, size = c_int32(), c_size_t()
    check(library().flce_kernel_choose_retained(kernel, num_tokens, byref(options), byref(place), byref(size)))
    return place.value, size.value
