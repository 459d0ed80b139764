"""A folder that comes into being whole, or replaces another one whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from flce.errors import ArgumentError, CheckpointError

#: a folder that `overwrite` replaces has one of these; anything else is not a checkpoint, and is not removed
MARKS = ("model.safetensors", "model.safetensors.index.json", "flce-state.json")


def partial(target: Path) -> Path:
    """Where the folder or file that is to take `target`'s place is written."""
    return target.parent / f".{target.name}.flce-partial"


def present(target: Path) -> Path:
    """The folder to read for `target`: itself, or what it was where a process was killed between the two renames of a replacement."""
    old = _old(target)
    return old if not os.path.lexists(target) and old.is_dir() else target


def _old(target: Path) -> Path:
    return target.parent / f".{target.name}.flce-old"


@contextlib.contextmanager
def replacement(target: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """A folder that takes another's place whole. The `with` block writes files, which have to be on the disk at its end, into the folder
    that it is given, a sibling of `target` whose name begins with a dot. Its end renames `target` away, and the folder to `target`; an
    error removes the folder. The remains of a killed process are removed by the next one for the same target, but for a target that was
    renamed away, which gets its name back and is found by `present` before. Two processes that write one target at a time are told apart
    by a lock, and the second one gets a CheckpointError.

    ArgumentError: a target that exists and is not empty, unless `overwrite` is set and it is a checkpoint.
    """
    real = Path(os.path.realpath(target))
    folder, old = partial(real), _old(real)
    check_target(real, overwrite=overwrite)
    lock: int | None = None
    try:
        try:
            real.parent.mkdir(parents=True, exist_ok=True)
            lock = _locked(folder, real)
            if present(real) != real:
                os.rename(old, real)
                check_target(real, overwrite=overwrite)
            shutil.rmtree(old, ignore_errors=True)
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error
        yield folder
        _commit(folder, real, overwrite)
    except BaseException:
        if lock is not None:
            if present(real) != real:
                os.rename(old, real)
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _locked(folder: Path, target: Path) -> int:
    """Makes the folder where it does not exist, and locks it. Returns the lock's descriptor."""
    while True:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise CheckpointError(f"another process is writing {target}: it holds {folder}") from error
        except OSError:  # a file system without locks: processes have to keep off each other's targets
            pass
        if folder.exists() and os.path.samestat(os.fstat(lock), os.stat(folder)):
            return lock
        os.close(lock)  # its last owner renamed or removed it in between


def _commit(folder: Path, target: Path, overwrite: bool) -> None:
    sync_folder(folder)
    check_target(target, overwrite=overwrite)
    try:
        if target.is_dir() and any(target.iterdir()):
            os.rename(target, _old(target))
        os.rename(folder, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be made of {folder}: {error.strerror or error}") from error
    sync_folder(target.parent)
    shutil.rmtree(_old(target), ignore_errors=True)


def check_target(target: Path, *, overwrite: bool) -> None:
    """ArgumentError where a checkpoint must not be written to `target`."""
    if os.path.lexists(target) and not target.is_dir():
        raise ArgumentError(f"{target} is a file; a checkpoint is a folder")
    if target.is_dir() and os.path.ismount(target):
        raise ArgumentError(f"{target} is a mount point, which cannot be replaced as a whole; name a folder in it")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise ArgumentError(f"{target} exists and is not empty; remove it, or ask for it to be replaced (--overwrite, overwrite=True)")
        if not any((target / mark).is_file() for mark in MARKS):
            raise ArgumentError(f"{target} has neither {' nor '.join(MARKS)}: it is no checkpoint, and overwriting would remove its files")


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last through a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(file: Path, text: str) -> None:
    """A file that is on the disk when this returns."""
    with open(file, "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def copy_file(source: Path, target: Path) -> None:
    """A copy, without the source's permissions, that is on the disk when this returns."""
    shutil.copyfile(source, target)
    with open(target, "rb") as copied:
        os.fsync(copied.fileno())


def replace_text(file: Path, text: str) -> None:
    """A file with a new text, or with the old one where the process dies."""
    write_text(partial(file), text)
    os.replace(partial(file), file)
    sync_folder(file.parent)
