"""Work of minutes, done before a run: `tune` measures plans, `prewarm` compiles kernels, `missing` says which are not there. They do
what `flce tune`, `flce prewarm` and `flce prewarm --check` do, and return the objects that these print with --json."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flce import _command, errors
from flce.core import _native

Spec = str | Mapping[str, Any]
"""One output layer: "D=2048,V=151936,dtype=bf16", or its keys in a mapping."""
Progress = Callable[[dict[str, Any]], None]
"""Told several times a second how far the work is."""
Stop = Callable[[], bool]
"""Asked several times a second; after True the call ends with what it has."""
Path = str | os.PathLike[str]


def tune(
    specs: Spec | Iterable[Spec] = (),
    *,
    hf_configs: Path | Iterable[Path] = (),
    all_layers: bool = False,
    num_tokens: int | Iterable[int] = (),
    device: str = "",
    workspace_limit_bytes: int = 0,
    retain: bool = True,
    plans: Iterable[str] = (),
    budget_s: float = 60,
    candidate_timeout_s: float = 30,
    coordinates: Iterable[str] = (),
    exhaustive: int = 0,
    scratch_bytes: int | None = None,
    threads: int = 0,
    cache_dir: Path = "",
    records_dir: Path = "",
    commit: str = "",
    fresh: bool = False,
    progress: Progress | None = None,
    warning: Callable[[str], None] | None = None,
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Measures plans of output layers on this machine's device and keeps the best in tuning records (docs/tuning.md). It takes at most
    `budget_s` seconds for each spec and number of tokens. `all_layers`: also the bf16 layers of eight well-known models. Ctrl-C keeps what
    has been measured and raises KeyboardInterrupt. A layer that cannot be tuned is in the result's "errors"."""
    options = {
        "specs": _specs(specs),
        "hf_configs": _paths("hf_configs", hf_configs),
        "all_layers": all_layers,
        "num_tokens": _several("num_tokens", num_tokens),
        "device": device,
        "workspace_limit_bytes": workspace_limit_bytes,
        "retain": retain,
        "plans": _several("plans", plans),
        "budget_s": budget_s,
        "candidate_timeout_s": candidate_timeout_s,
        "coordinates": _several("coordinates", coordinates),
        "exhaustive": exhaustive,
        "scratch_bytes": scratch_bytes,
        "threads": threads,
        "cache_dir": _path("cache_dir", cache_dir),
        "records_dir": _path("records_dir", records_dir),
        "commit": commit,
        "fresh": fresh,
        "command": _command.path(),
    }
    return _run("flce_tune", options, progress, warning, stop)


def prewarm(
    specs: Spec | Iterable[Spec] = (),
    *,
    devices: Iterable[str] = (),
    hf_configs: Path | Iterable[Path] = (),
    autocast: Iterable[str] = (),
    manifests: Path | Iterable[Path] = (),
    num_tokens: int | Iterable[int] = (),
    workspace_limits: int | Iterable[int] = (),
    scratch_bytes: int | Iterable[int] = (),
    plan: str = "",
    cache_dir: Path = "",
    pack: Path = "",
    jobs: int = 0,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Compiles the kernels of `specs` for `devices`, which need not be here, into the cache and, with `pack`, into one file to ship
    (docs/prewarm.md). Kernels that fail are in the result; "failed" counts them."""
    options = _wants(specs, devices, hf_configs, autocast, manifests, num_tokens, workspace_limits, scratch_bytes, plan)
    options |= {"cache_dir": _path("cache_dir", cache_dir), "pack": _path("pack", pack), "jobs": jobs, "command": _command.path()}
    return _run("flce_prewarm_sets", options, progress, None, stop)


def missing(
    specs: Spec | Iterable[Spec] = (),
    *,
    devices: Iterable[str] = (),
    hf_configs: Path | Iterable[Path] = (),
    autocast: Iterable[str] = (),
    manifests: Path | Iterable[Path] = (),
    num_tokens: int | Iterable[int] = (),
    workspace_limits: int | Iterable[int] = (),
    scratch_bytes: int | Iterable[int] = (),
    plan: str = "",
    cache_dir: Path = "",
) -> dict[str, Any]:
    """Looks for the kernels of `prewarm` with these arguments. The result's "missing" lists those that a run in this environment would not
    find. Compiles nothing."""
    options = _wants(specs, devices, hf_configs, autocast, manifests, num_tokens, workspace_limits, scratch_bytes, plan)
    return _run("flce_missing_sets", options | {"cache_dir": _path("cache_dir", cache_dir)}, None, None, None)


def _specs(specs: Spec | Iterable[Spec]) -> list[str | dict[str, Any]]:
    several = [specs] if isinstance(specs, Mapping) else _several("specs", specs)
    for spec in several:
        if not isinstance(spec, str | Mapping):
            raise errors.DTypeError(f"specs has a {type(spec).__name__}; a spec is a text or a mapping")
    return [spec if isinstance(spec, str) else dict(spec) for spec in several]


def _several(name: str, given: Any) -> list[Any]:
    """The values of an argument that takes several; a single text, path or number is one value."""
    if isinstance(given, str | os.PathLike | int):
        return [given]
    if not isinstance(given, Iterable):
        raise errors.DTypeError(f"{name} is a {type(given).__name__}; it must be one value or several")
    return list(given)


def _paths(name: str, paths: Path | Iterable[Path]) -> list[str]:
    return [_path(name, path) for path in _several(name, paths)]


def _path(name: str, path: Any) -> str:
    if not isinstance(path, str | os.PathLike):
        raise errors.DTypeError(f"{name} is a {type(path).__name__}; a path is a text or an os.PathLike")
    return os.fspath(path)


def _wants(
    specs: Spec | Iterable[Spec],
    devices: Iterable[str],
    hf_configs: Path | Iterable[Path],
    autocast: Iterable[str],
    manifests: Path | Iterable[Path],
    num_tokens: int | Iterable[int],
    workspace_limits: int | Iterable[int],
    scratch_bytes: int | Iterable[int],
    plan: str,
) -> dict[str, Any]:
    return {
        "specs": _specs(specs),
        "devices": _several("devices", devices),
        "hf_configs": _paths("hf_configs", hf_configs),
        "autocast": _several("autocast", autocast),
        "manifests": _paths("manifests", manifests),
        "num_tokens": _several("num_tokens", num_tokens),
        "workspace_limits": _several("workspace_limits", workspace_limits),
        "scratch_bytes": _several("scratch_bytes", scratch_bytes),
        "plan": plan,
    }


def _run(
    function: str,
    options: dict[str, Any],
    progress: Progress | None,
    warning: Callable[[str], None] | None,
    stop: Stop | None,
) -> dict[str, Any]:
    try:
        given = json.dumps(options).encode()
    except TypeError as error:
        raise errors.DTypeError(f"an argument is neither text nor number nor several of them: {error}") from None
    raised: list[BaseException] = []
    reports: list[str] = []

    # An exception of a callback, Ctrl-C among them, ends the work and is raised when it has ended.
    def guarded(call: Callable[[], Any]) -> Any:
        try:
            return None if raised else call()
        except BaseException as error:
            raised.append(error)
            return None

    def stopped() -> bool:
        return bool(guarded(lambda: bool(stop()) if stop else False) or raised or any(map(_is_of_a_callback, lost)))

    job = _native.Job(
        struct_size=ctypes.sizeof(_native.Job),
        progress=_native.JOB_TEXT(lambda _, text: guarded(lambda: progress(json.loads(text)) if progress else None)),
        warning=_native.JOB_TEXT(lambda _, text: guarded(lambda: warning(text.decode()) if warning else None)),
        stop=_native.JOB_STOP(lambda _: int(stopped())),
        report=_native.JOB_TEXT(lambda _, text: reports.append(text.decode())),
    )
    with _lost_in_callbacks() as lost:
        status = getattr(_native.library(), function)(given, ctypes.byref(job))
    if first := [*(one.exc_value for one in lost), *raised]:
        raise first[0]
    _native.check(status)
    result: dict[str, Any] = json.loads(reports[0])
    return result


@contextmanager
def _lost_in_callbacks() -> Iterator[list[Any]]:
    """Collects exceptions that ctypes loses meanwhile: they leave a callback, as a signal's handler raises them before the callback's first
    line or behind its last. The list grows without a line of Python, where the next signal might come. Others go to the hook afterwards."""
    lost: list[Any] = []
    if threading.current_thread() is not threading.main_thread():  # where signals are handled
        yield lost
        return
    hook = sys.unraisablehook
    try:
        sys.unraisablehook = lost.append
        yield lost
    finally:
        sys.unraisablehook = hook
        for one in [one for one in lost if not _is_of_a_callback(one)]:
            lost.remove(one)
            hook(one)


def _is_of_a_callback(lost: Any) -> bool:
    traceback = lost.exc_traceback
    return traceback is not None and traceback.tb_frame.f_code.co_filename == __file__ and lost.exc_value is not None
