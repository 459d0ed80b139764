"""Headers of safetensors files, and files made of byte ranges of others.

The library validates a header and reads tensors. Two things that it does not offer are here: where a tensor's bytes lie, and a file that is
written piece by piece. A file is the header's length (8 bytes, little-endian), the header (JSON) and the data, which the header's offsets
cover without gaps.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from flce import errors
from flce.errors import CheckpointError

#: bytes that are in memory at a time
CHUNK_BYTES = 4 << 20
#: the library's own limit; a larger length is no safetensors file
MAX_HEADER_BYTES = 100_000_000
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
Advance = Callable[[int], None]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: the `num_bytes` bytes from `offset` on, counted from the file's beginning."""

    name: str
    dtype: str  #: safetensors' name: "BF16"
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Header:
    """Contents of a file by its header, in the order of the data."""

    file: Path
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]


def library() -> Any:
    """The safetensors package. UnavailableError where it is not installed."""
    try:
        import safetensors
    except ImportError as error:
        raise errors.UnavailableError("checkpoints need the package safetensors: pip install safetensors") from error
    return safetensors


def _without_duplicates(file: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{file}: its header has {twice!r} twice")
        return built

    return build


def read_header(file: Path) -> Header:
    """The header of a safetensors file, validated by the library: offsets without gaps, sizes that fit dtype and shape, a file as long as
    the header says. CheckpointError for a file that is missing, unreadable, truncated or no safetensors file."""
    safetensors = library()
    try:
        with safetensors.safe_open(os.fspath(file), framework="np") as opened:
            names = set(opened.keys())
        with open(file, "rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            text = raw.read(min(length, MAX_HEADER_BYTES))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        size = file.stat().st_size
        raise CheckpointError(f"{file} ({size} bytes) is truncated or no safetensors file: {error}") from error
    content = json.loads(text, object_pairs_hook=_without_duplicates(file))
    metadata = content.pop("__metadata__", None) or {}
    start = 8 + length
    entries = [
        TensorEntry(name, told["dtype"], tuple(told["shape"]), file, start + begin, end - begin)
        for name, told in content.items()
        for begin, end in [told["data_offsets"]]
    ]
    if {entry.name for entry in entries} != names:
        raise CheckpointError(f"{file}: the safetensors library reads other names than its header has")
    return Header(file, tuple(sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes))), metadata)


def encode_header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file that has these tensors' bytes one after another; its length is a multiple of 8."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        content[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, offset + entry.num_bytes]}
        offset += entry.num_bytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_range(file: BinaryIO, entry: TensorEntry, use: Callable[[memoryview], object]) -> None:
    """Hands a tensor's bytes to `use`, CHUNK_BYTES at a time."""
    file.seek(entry.offset)
    left = entry.num_bytes
    buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
    while left:
        count = file.readinto(buffer[: min(left, len(buffer))])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{entry.file} ended {left} bytes before the end of tensor {entry.name!r}: it changed while it was read")
        use(buffer[:count])
        left -= count


def digest_of(file: BinaryIO, entry: TensorEntry, advance: Advance = lambda _: None) -> str:
    """SHA-256 of a tensor's bytes."""
    digest = hashlib.sha256()

    def add(chunk: memoryview) -> None:
        digest.update(chunk)
        advance(len(chunk))

    read_range(file, entry, add)
    return digest.hexdigest()


def check_equal(one: TensorEntry, other: TensorEntry, why: str) -> None:
    """CheckpointError, with `why` they must be, where two tensors differ."""
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    if same:
        with open(one.file, "rb", buffering=0) as first, open(other.file, "rb", buffering=0) as second:
            same = digest_of(first, one) == digest_of(second, other)
    if not same:
        raise CheckpointError(f"{one.file.parent}: {one.name!r} and {other.name!r} differ, and {why}")


def write_file(
    target: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str], *, digests: bool = False, advance: Advance = lambda _: None
) -> dict[str, str]:
    """Writes a safetensors file of tensors of other files and syncs it to the disk. Returns each tensor's SHA-256 where `digests` asks for
    them. `advance` is called with the number of bytes that were copied since its last call."""
    made: dict[str, str] = {}
    sources: dict[Path, BinaryIO] = {}
    try:
        with open(target, "wb", buffering=0) as out:
            write_all(out, memoryview(encode_header(entries, metadata)))
            for entry in entries:
                if entry.file not in sources:
                    sources[entry.file] = open(entry.file, "rb", buffering=0)  # noqa: SIM115
                digest = hashlib.sha256() if digests else None

                def use(chunk: memoryview, digest: Any = digest, out: Any = out) -> None:
                    write_all(out, chunk)
                    if digest is not None:
                        digest.update(chunk)
                    advance(len(chunk))

                read_range(sources[entry.file], entry, use)
                if digest is not None:
                    made[entry.name] = digest.hexdigest()
            os.fsync(out.fileno())
    finally:
        for source in sources.values():
            source.close()
    return made


def write_all(out: Any, data: memoryview) -> None:
    while data:
        data = data[out.write(data) :]


def verify_file(target: Path, entries: Sequence[TensorEntry], digests: Mapping[str, str], advance: Advance = lambda _: None) -> None:
    """Reads a written file again and compares names, dtypes, shapes and digests. CheckpointError for the first that differs."""
    written = {entry.name: entry for entry in read_header(target).entries}
    expected = {entry.name: entry for entry in entries}
    if written.keys() != expected.keys():
        raise CheckpointError(f"{target} reads back with other tensors than were written: {sorted(written.keys() ^ expected.keys())[:5]}")
    with open(target, "rb", buffering=0) as raw:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
        for name, entry in written.items():
            same = (entry.dtype, entry.shape) == (expected[name].dtype, expected[name].shape)
            if not same or digest_of(raw, entry, advance) != digests[name]:
                raise CheckpointError(f"{target}: tensor {name!r} reads back differently than it was written; the disk may be failing")
