"""libflce_jax beside libflce: its handlers among XLA's custom calls, kernels by device, and labels that were out of range."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int32, c_int64, c_size_t, c_void_p
from typing import Any

import jax
import numpy as np

from flce import errors
from flce.core import _locks, _native

CPU = -1  # number of the CPU among devices; a GPU's is its CUDA ordinal
PASSES = ("forward", "merge", "backward")
_WORDS = 1024  # words of each device, the last for all kernels that come later
_lock = _locks.new_lock()
_words: dict[int, jax.Array] = {}  # by GPU; memory that kernels write to


@functools.cache
def library() -> ctypes.CDLL:
    """libflce_jax, its handlers registered with XLA. Raises UnavailableError."""
    _native.library()
    path = _native.library_path()
    assert path is not None
    name = path.parent / "libflce_jax.so"
    try:
        lib = ctypes.CDLL(str(name))
    except OSError as error:
        raise errors.UnavailableError(
            f"{name} cannot be loaded: {error}; flce was built without XLA's headers: run tools/setup.sh, or name a folder that "
            "has xla/ffi/api/ffi.h (jax.ffi.include_dir()) in FLCE_XLA_INCLUDE, and build again"
        ) from error
    lib.flce_jax_kernel.restype, lib.flce_jax_kernel.argtypes = c_int32, (c_int32, ctypes.c_char_p, c_int64, c_int64, c_void_p)
    lib.flce_jax_label_words.restype, lib.flce_jax_label_words.argtypes = c_void_p, (c_int32, c_void_p)
    lib.flce_jax_kernel_at.restype, lib.flce_jax_kernel_at.argtypes = c_void_p, (c_int32, c_size_t)
    for each in PASSES:
        cuda = {"initialize": lib.flce_jax_cuda_prepare, "execute": lib[f"flce_jax_cuda_{each}"]}
        jax.ffi.register_ffi_target(f"flce_{each}", jax.ffi.pycapsule(lib[f"flce_jax_cpu_{each}"]), platform="cpu")
        jax.ffi.register_ffi_target(f"flce_{each}", {stage: jax.ffi.pycapsule(at) for stage, at in cuda.items()}, platform="CUDA")
    return lib


def device() -> int:
    """The device that calls are traced for: jax's default one."""
    given: Any = jax.config.jax_default_device
    if given is None:
        given = jax.local_devices()[0]
    elif isinstance(given, str):
        given = jax.local_devices(backend=given)[0]
    if given.platform == "cpu":
        return CPU
    if given.platform in ("gpu", "cuda") and "rocm" not in getattr(given.client, "platform_version", ""):
        index = int(getattr(given, "local_hardware_id", given.id))
        _prepare_words(index, given)
        return index
    raise errors.UnavailableError(f"the default device is {given}, of platform {given.platform}; flce has kernels for cpu and cuda")


def _prepare_words(index: int, given: Any) -> None:
    with _lock:
        if index not in _words:
            with jax.ensure_compile_time_eval():  # an array with memory, whatever is being traced
                _set_words(index, jax.device_put(np.full(2 * _WORDS, 0xFFFF_FFFF, np.uint32), given))


def _set_words(index: int, words: jax.Array) -> None:
    _words[index] = words
    library().flce_jax_label_words(index, words.unsafe_buffer_pointer())


def kernel(device_index: int, spec: str, workspace_limit_bytes: int, num_tokens: int) -> c_void_p:
    """The process's kernel for calls with these attributes. Raises what `flce.get_kernel` does."""
    handle = c_void_p()
    _native.check(library().flce_jax_kernel(device_index, spec.encode(), workspace_limit_bytes, num_tokens, ctypes.byref(handle)))
    return handle


def check_labels() -> None:
    """Raises LabelError if a call since the last check had a label that is neither a class nor ignore_index, or another number out of its
    range: such a row counts as ignored. Faults of several kernels are raised one a check. Wait for the calls first
    (`jax.block_until_ready` of their results)."""
    lib = library()
    with _lock:
        found = [(CPU, _of_cpu(lib))] + [(index, np.array(words + 0).view(np.uint64)) for index, words in _words.items()]
        for index, words in found:
            faults = np.flatnonzero(words != _native.NO_INVALID_LABEL)
            if not len(faults):
                continue
            number, word = int(faults[0]), int(words[faults[0]])
            if index == CPU:
                words[number] = _native.NO_INVALID_LABEL
            else:
                _set_words(index, _emptied(_words.pop(index), number))
            if number == _WORDS - 1:  # many kernels' word
                raise errors.LabelError(f"labels[{word}] is neither ignore_index nor a label (and it may not be the only row)", word)
            try:
                _native.check(_native.library().flce_kernel_check_invalid_label(lib.flce_jax_kernel_at(index, number), word))
            except errors.ArgumentError as error:
                raise errors.LabelError(_said(str(error), word), word) from None


def _said(fault: str, word: int) -> str:
    """The library's words for a faulty row, with JAX's names."""
    if "teacher_ids[" in fault:
        fault += "; or one of its teacher_probs is not between 0 and 1"
    if word == 0:
        fault += "; or cu_seqlens was given and does not begin with 0, or decreases"
    where = "labels are flattened here (of several hidden states one behind the other), and moved by a shift"
    return f"{fault.replace('target[', 'labels[', 1)}; {where}"


def _of_cpu(lib: ctypes.CDLL) -> np.ndarray[Any, np.dtype[np.uint64]]:
    address = lib.flce_jax_label_words(CPU, None)
    return np.ctypeslib.as_array((ctypes.c_uint64 * _WORDS).from_address(address))


@functools.partial(jax.jit, donate_argnums=0)
def _emptied(words: jax.Array, number: int) -> jax.Array:
    """Donated, so that the same memory is written and captured calls go on reporting."""
    return jax.lax.dynamic_update_slice(words, jax.numpy.full(2, 0xFFFF_FFFF, words.dtype), (2 * number,))
