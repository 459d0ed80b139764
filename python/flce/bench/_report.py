"""A comparison's report: the machine and versions, the table, the plot."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flce
from flce import errors
from flce.core import _native

MIB = 1 << 20
PLOT_ENDINGS = (".png", ".svg", ".pdf")


def _output(*command: str, folder: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _commit() -> str | None:
    """Commit of the checkout that this package is in; None for an installed one."""
    package = Path(flce.__file__).resolve().parent
    tracked = _output("git", "ls-files", "--error-unmatch", "__init__.py", folder=package)
    return _output("git", "describe", "--always", "--dirty", folder=package) if tracked else None


def context(device: str) -> dict[str, Any]:
    """Versions, the device and its driver."""
    about: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "flce": flce.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _processor(),
        "cpu_threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }
    try:
        about["libflce"] = _native._shown(_native.library().flce_version())
    except errors.UnavailableError as error:
        about["libflce"] = str(error)
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        about |= {"gpu": properties.name, "sms": properties.multi_processor_count, "gpu_bytes": properties.total_memory}
        about |= {"cuda_of_torch": torch.version.cuda, "allow_tf32": torch.backends.cuda.matmul.allow_tf32, **gpu_state(device)}
    return about


def gpu_state(device: str) -> dict[str, Any]:
    """Driver, and clock, power and temperature as nvidia-smi says them now; without nvidia-smi nothing."""
    fields = {"driver": "driver_version", "sm_clock_mhz": "clocks.sm", "power_w": "power.draw", "temperature_c": "temperature.gpu"}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = [f"--id=GPU-{uuid}"] if uuid is not None else []
    line = _output("nvidia-smi", *which, f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits")
    values = [part.strip() for part in line.splitlines()[0].split(",")] if line else []
    return dict(zip(fields, values, strict=False))


def device_of(about: dict[str, Any]) -> str:
    if "gpu" in about:
        return f"{about['gpu']}, driver {about.get('driver', 'unknown')}"
    return f"{about['cpu']}, {about['cpu_threads']} threads"


def _title(problem: dict[str, Any]) -> str:
    words = [f"hidden size {problem['hidden_size']}", f"vocabulary {problem['vocab_size']}", problem["dtype"]]
    words.append("forward and backward" if problem["pass"] == "forward_backward" else "forward alone")
    words += ["bias"] if problem["bias"] else []
    words += [f"{name} {problem[name]:g}" for name in ("softcap", "logit_scale") if problem[name] is not None]
    words += [f"{problem['ignored']:.0%} of the tokens ignored"] if problem["ignored"] else []
    words += [f"{problem['frozen']} frozen"] if problem["frozen"] else []
    return ", ".join(words)


def _of_error(row: dict[str, Any], name: str) -> str:
    if name not in row["errors"]:
        return ""
    times = row["errors_to_torch"].get(name)
    return f"{row['errors'][name]:.1e}" + ("" if times is None else f" ({times:.2g}x)")


def _cells(row: dict[str, Any]) -> list[str]:
    timed = row["ms"] is not None
    held = row["memory_bytes"]
    return [
        row["name"],
        row["version"] or "",
        f"{row['ms']:.2f}" if timed else row["status"].upper() if row["status"] == "wrong" else row["status"],
        f"{100 * row['spread']:.0f} %" if timed else "",
        "" if row["to_floor"] is None else f"{row['to_floor']:.2f}",
        "" if row["to_flce"] is None else f"{row['to_flce']:.2f}",
        "" if held is None else f"{held / MIB:.1f}",
        *(_of_error(row, name) for name in ("loss", "grad_hidden", "grad_weight")),
    ]


_HEAD = ["", "version", "ms", "spread", "to floor", "to flce", "MiB", "loss error", "grad_hidden", "grad_weight"]


def table(result: dict[str, Any]) -> str:
    """The table as text, with what was measured above it and reasons below."""
    shapes, about = result["shapes"], result["context"]
    in_jax = result.get("framework") == "jax"
    several = len(shapes) > 1
    lines, notes = [[*(["tokens"] if several else []), *_HEAD]], []
    for shape in shapes:
        tokens, floor = shape["problem"]["num_tokens"], shape["floor"]
        first = [str(tokens)] if several else []
        if "ms" in floor:
            gemms = {1: "1 GEMM"}.get(floor["gemms"], f"{floor['gemms']} GEMMs")
            name = f"floor: {gemms}, {'XLA' if in_jax else 'cuBLAS' if 'gpu' in about else 'torch.mm'}"
            lines.append([*first, name, "", f"{floor['ms']:.2f}", f"{100 * floor['spread']:.0f} %", "1.00", *[""] * 5])
        for row in shape["rows"]:
            lines.append([*first, *_cells(row)])
            where = f"{row['name']}, {tokens} tokens" if several else row["name"]
            notes += [f"{where}: {row[key]}" for key in ("reason", "memory_reason") if row[key]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    left = 3 if several else 2
    text = [
        "  ".join(cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    problem = shapes[0]["problem"]
    tokens = ", ".join(str(shape["problem"]["num_tokens"]) for shape in shapes)
    exact = ", ".join(dict.fromkeys(shape["reference"]["dtype"] for shape in shapes))
    head = [
        f"{device_of(about)}; torch {about['torch']}, flce {about['flce']}" + (f" ({about['commit']})" if about["commit"] else ""),
        f"{tokens} tokens, {_title(problem)}",
        "ms: median of interleaved rounds. MiB: peak beyond inputs and gradients. "
        f"Errors: relative, to {exact}; (x: of {'optax' if in_jax else 'torch'}'s)",
        "",
    ]
    return "\n".join([*head, *(line.rstrip() for line in text), *(["", *dict.fromkeys(notes)] if notes else [])]) + "\n"


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raises ArgumentError for another ending, UnavailableError without matplotlib: before anything is measured."""
    if Path(path).suffix.lower() not in PLOT_ENDINGS:
        raise errors.ArgumentError(f"plot is {os.fspath(path)!r}; its name must end with {', '.join(PLOT_ENDINGS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise errors.UnavailableError(f"plot needs matplotlib, which is not installed ({error}): pip install matplotlib") from error


def _points(result: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    return [(shape["problem"]["num_tokens"], row) for shape in result["shapes"] for row in shape["rows"] if row["ms"] is not None]


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draws it to a .png, .svg or .pdf: time against memory for one number of tokens, both over the number of tokens for several. Raises
    as `check_plot`."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    several = len(result["shapes"]) > 1
    figure: Any = Figure(figsize=(11 if several else 8.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    (_over_tokens if several else _time_against_memory)(figure, result)
    figure.suptitle(f"{device_of(result['context'])}\n{_title(result['shapes'][0]['problem'])}", fontsize=9)
    figure.savefig(path, dpi=150)


_MARKERS = "osD^v<>PX*"


def _time_against_memory(figure: Any, result: dict[str, Any]) -> None:
    rows = [row for _, row in _points(result)]
    floor = result["shapes"][0]["floor"].get("ms")
    axes = figure.subplots()
    if floor:
        (axes.axhline if all(row["memory_bytes"] is not None for row in rows) else axes.axvline)(
            floor, color="0.4", linewidth=1, label="floor: the bare GEMMs"
        )
    if any(row["memory_bytes"] is None for row in rows):  # times alone
        axes.barh([row["name"] for row in rows], [row["ms"] for row in rows], color="tab:blue")
        axes.set_xlabel("ms")
        axes.invert_yaxis()
        return
    held = {row["name"]: max(row["memory_bytes"], MIB) / MIB for row in rows}
    own = sorted((row for row in rows if row["compare"] == "flce"), key=lambda row: held[row["name"]])
    axes.plot([held[row["name"]] for row in own], [row["ms"] for row in own], "-", color="tab:blue", linewidth=1)
    for i, row in enumerate(rows):
        colour = "tab:blue" if row["compare"] == "flce" else f"C{1 + i % 9}"
        axes.plot(
            held[row["name"]], row["ms"], _MARKERS[i % len(_MARKERS)], color=colour, markersize=6, linestyle="none", label=row["name"]
        )
    axes.set_xscale("log")
    axes.margins(x=0.15)
    times = [row["ms"] for row in rows]
    if times and max(times) > 10 * min(times):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("MiB beyond inputs and gradients, at least 1")
    axes.set_ylabel("ms")
    figure.legend(loc="outside right upper", fontsize=7)


def _over_tokens(figure: Any, result: dict[str, Any]) -> None:
    points = _points(result)
    names = list(dict.fromkeys(row["name"] for _, row in points))
    left, right = figure.subplots(1, 2)
    floors = {shape["problem"]["num_tokens"]: shape["floor"].get("ms") for shape in result["shapes"]}
    relative = all(floors.values())

    def line(axes: Any, value: Callable[[dict[str, Any]], Any]) -> None:
        for name in names:
            found = [(tokens, value(row)) for tokens, row in points if row["name"] == name and value(row) is not None]
            if found:
                axes.plot(*zip(*found, strict=True), "o-" if name.startswith("flce") else "s--", markersize=4, linewidth=1, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens")

    def time(row: dict[str, Any]) -> Any:
        return row["to_floor"] if relative else row["ms"]

    line(left, time)
    times = [time(row) for _, row in points]
    if times and max(times) > 10 * min(times):
        left.set_yscale("log")
    left.set_ylabel("time, to the bare GEMMs" if relative else "ms")
    if relative:
        left.axhline(1, color="0.4", linewidth=1)
    line(right, lambda row: None if row["memory_bytes"] is None else max(row["memory_bytes"], MIB) / MIB)
    right.set_yscale("log")
    right.set_ylabel("MiB beyond inputs and gradients, at least 1")
    left.legend(fontsize=7)


def say(text: str, *, began: float, now: float) -> None:
    """A line of progress on stderr."""
    print(f"flce.bench: {now - began:6.1f} s  {text}", file=sys.stderr, flush=True)
