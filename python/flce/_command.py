"""The flce command that comes with this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flce import errors
from flce.core import _native


def path() -> str:
    """Path of the command that belongs to the library in use: beside it in the package, an install or a build tree. Raises UnavailableError
    where there is none."""
    library = _native.library_path()
    found = Path(library).resolve().parent.parent / "bin" / "flce" if library else None
    if found is None or not found.is_file():
        raise errors.UnavailableError(f"there is no flce command beside {library or 'libflce'}: it is bin/flce beside the library's folder")
    return os.fspath(found)


def main() -> None:
    """`flce …` and `python -m flce …`: the command takes this process's place."""
    try:
        program = path()
    except errors.UnavailableError as error:
        sys.exit(f"flce: error: {error}")
    os.execv(program, ["flce", *sys.argv[1:]])
