"""A folder that comes into being whole, or replaces another one whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import TracebackType

from flce.errors import ArgumentError, CheckpointError

#: a folder that `overwrite` replaces has one of these; anything else is not a checkpoint, and is not removed
MARKS = ("model.safetensors", "model.safetensors.index.json", "flce-state.json")


def partial(target: Path) -> Path:
    """The folder in which the one that is to take `target`'s place is written."""
    return target.parent / f".{target.name}.flce-partial"


def present(target: Path) -> Path:
    """The folder to read for `target`: itself, or what it was where a process was killed between the two renames of a replacement."""
    old = _old(target)
    return old if not os.path.lexists(target) and old.is_dir() else target


def _old(target: Path) -> Path:
    return target.parent / f".{target.name}.flce-old"


class Replacement:
    """A folder that takes another's place whole. Files are written into `folder`, a sibling of `target` whose name begins with a dot;
    `commit` renames `target` away, and `folder` to `target`. Leaving the `with` block without `commit` removes it. The remains of a killed
    process are removed by the next one for the same target, but for a target that was renamed away, which gets its name back and is found
    by `present` before. Two processes that write one target at a time are told apart by a lock, and the second one gets a CheckpointError.

    ArgumentError: a target that exists and is not empty, unless `overwrite` is set and it is a checkpoint. It stays as it is until
    `commit`.
    """

    def __init__(self, target: str | os.PathLike[str], *, overwrite: bool = False):
        self.target = Path(os.path.realpath(target))
        self.folder = partial(self.target)
        self._overwrite = overwrite
        self._old = _old(self.target)
        self._lock: int | None = None
        check_target(self.target, overwrite=overwrite)

    def __enter__(self) -> Replacement:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            self.__exit__(None, None, None)
            raise CheckpointError(f"{self.folder} cannot be written: {error.strerror or error}") from error
        except ArgumentError:
            self.__exit__(None, None, None)
            raise
        return self

    def _take(self) -> None:
        """Locks the folder, which is made where it does not exist, and empties it."""
        while True:
            self.folder.mkdir(exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
            if not try_lock(self._lock):
                self._unlock()
                raise CheckpointError(f"another process is writing {self.target}: it holds {self.folder}")
            if self.folder.exists() and os.path.samestat(os.fstat(self._lock), os.stat(self.folder)):
                break
            self._unlock()  # its last owner renamed or removed it in between
        if present(self.target) != self.target:
            os.rename(self._old, self.target)
            check_target(self.target, overwrite=self._overwrite)
        shutil.rmtree(self._old, ignore_errors=True)
        for left in self.folder.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()

    def commit(self) -> None:
        """Gives the folder its name. An older one is gone afterwards. Every file in it has to be on the disk already."""
        sync_folder(self.folder)
        check_target(self.target, overwrite=self._overwrite)
        try:
            if self.target.is_dir() and any(self.target.iterdir()):
                os.rename(self.target, self._old)
            os.rename(self.folder, self.target)
        except OSError as error:
            raise CheckpointError(f"{self.target} cannot be made of {self.folder}: {error.strerror or error}") from error
        sync_folder(self.target.parent)
        shutil.rmtree(self._old, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock is not None:  # not committed
            if present(self.target) != self.target:
                os.rename(self._old, self.target)
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()


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


def try_lock(descriptor: int) -> bool:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # a file system without locks: processes have to keep off each other's targets
        pass
    return True


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
    partial = file.with_name(f".{file.name}.flce-partial")
    write_text(partial, text)
    os.replace(partial, file)
    sync_folder(file.parent)
