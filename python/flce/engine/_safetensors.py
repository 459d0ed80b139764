"""Tensors in safetensors files, which the safetensors library reads, and files that are written a tensor at a time."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flce import errors
from flce.errors import CheckpointError

#: dtypes by their names in headers
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor that `read` gives: of a file the part of it that the tensor is, mapped and not copied."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def digest(self) -> str:
        """SHA-256 of the tensor's bytes."""
        return hashlib.sha256(bytes_of(self.read())).hexdigest()


def read_entries(file: Path) -> list[Entry]:
    """The tensors of a safetensors file by its header. CheckpointError for a file that is missing, unreadable, truncated or no safetensors
    file, and for a tensor of another dtype than DTYPES has."""
    try:
        import safetensors
    except ImportError as error:
        raise errors.UnavailableError("checkpoints need the package safetensors: pip install safetensors") from error

    def read(name: str) -> Tensor:
        with safetensors.safe_open(os.fspath(file), framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    try:
        with safetensors.safe_open(os.fspath(file), framework="pt") as opened:
            told = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118
            found = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in told]
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{file} ({file.stat().st_size} bytes) is truncated or no safetensors file: {error}") from error
    for name, dtype, _ in found:
        if dtype not in DTYPES:
            raise CheckpointError(f"{file}: tensor {name!r} is {dtype}; known are {', '.join(DTYPES)}")
    return [Entry(name, DTYPES[dtype], shape, functools.partial(read, name)) for name, dtype, shape in found]


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes on the host. The view keeps them alive, also where they are a copy that nothing else has."""
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def check_equal(one: Entry, other: Entry, why: str) -> None:
    """CheckpointError, with `why` they must be, where two tensors differ."""
    if (one.dtype, one.shape) != (other.dtype, other.shape) or one.digest() != other.digest():
        raise CheckpointError(f"{one.name!r} and {other.name!r} differ, and {why}")


def write_file(target: Path, entries: Sequence[Entry]) -> None:
    """Writes a safetensors file and syncs it to the disk: the header's length (8 bytes, little-endian), the header (JSON) and the tensors'
    bytes one after another, wide elements first, so that each is aligned."""
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        offsets = [offset, offset + entry.num_bytes]
        content[entry.name] = {"dtype": NAMES_OF_DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for entry in ordered:
            out.write(bytes_of(entry.read()))
        out.flush()
        os.fsync(out.fileno())
