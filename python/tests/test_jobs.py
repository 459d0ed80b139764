"""flce.tune, flce.prewarm and flce.missing: the command's results, callbacks, and what is raised."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from test_interrupts import Interrupt

import flce
from flce import _command, jobs

SPEC = "D=32,V=300,dtype=fp32"
CPU = "x86-64-v3"


@pytest.fixture
def command() -> str:
    try:
        return _command.path()
    except flce.UnavailableError as error:
        pytest.skip(str(error))


def small_tuning(folder: Path) -> dict[str, object]:
    return {
        "num_tokens": [64],
        "device": "cpu",
        "threads": 1,
        "coordinates": ["chunk"],
        "budget_s": 20,
        "cache_dir": folder / "cache",
        "records_dir": folder / "records",
    }


def run_json(command: str, *arguments: str) -> dict[str, object]:
    done = subprocess.run([command, *arguments, "--json"], capture_output=True, text=True, check=False)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_tune_small_layer_says_what_the_command_says(command: str, tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []
    result = flce.tune(SPEC, **small_tuning(tmp_path), progress=seen.append)
    assert result["complete"] and result["best_plan"] and result["measured"] > 1
    assert seen and {"spec", "num_tokens", "elapsed_s", "candidates", "best_ms"} <= set(seen[-1])
    again = run_json(
        command, "tune", "--spec", SPEC, "--num-tokens", "64", "--device", "cpu", "--threads", "1", "--coordinates", "chunk", "--cache-dir",
        str(tmp_path / "cache"), "--records-dir", str(tmp_path / "records"),
    )  # fmt: skip
    assert set(again) == set(result)
    assert (again["best_plan"], again["record"], again["measured"]) == (result["best_plan"], result["record"], 0)


def test_tune_takes_the_layers_of_well_known_models(command: str, tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []
    flce.tune(all_layers=True, **small_tuning(tmp_path), progress=seen.append, stop=lambda: bool(seen))
    assert str(seen[0]["spec"]).startswith("D=2048,V=151936")


def test_prewarm_then_missing_agree_with_the_command(command: str, tmp_path: Path) -> None:
    arguments = {"devices": [CPU], "cache_dir": tmp_path / "cache"}
    before = flce.missing(SPEC, **arguments)
    assert [item["device"] for item in before["missing"]] == [CPU]
    result = flce.prewarm({"D": 32, "V": 300, "dtype": "fp32"}, **arguments, pack=tmp_path / "k.flcepack")
    assert result["compiled"] > 0 and result["failed"] == 0 and Path(result["pack"]).exists()
    after = flce.missing(SPEC, **arguments)
    assert after["missing"] == []
    assert after == run_json(command, "prewarm", "--check", "--spec", SPEC, "--device", CPU, "--cache-dir", str(tmp_path / "cache"))


def test_stop_and_exceptions_of_callbacks_end_the_call(command: str, tmp_path: Path) -> None:
    assert flce.tune(SPEC, **small_tuning(tmp_path), stop=lambda: True)["items"] == []

    def fail(_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        flce.tune(SPEC, **small_tuning(tmp_path), progress=fail)


def test_interrupted_at_every_line(tmp_path: Path) -> None:
    """Interrupts lines of callbacks, too, from which ctypes lets no exception out."""
    for at in itertools.count():
        with Interrupt(at) as trace:
            try:
                result = flce.missing(SPEC, devices=[CPU], cache_dir=tmp_path)
            except KeyboardInterrupt:
                continue
        assert trace.count <= at, f"an interrupt at line {at} was lost"
        break
    assert at > 20 and result["missing"]


@pytest.mark.parametrize("code", ["<lambda>", "stopped", "guarded"])
def test_interrupted_in_the_first_line_of_a_callback(command: str, tmp_path: Path, code: str) -> None:
    """Nothing that is half done counts as done."""

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename == jobs.__file__ and frame.f_code.co_name == code:
            sys.settrace(None)
            raise KeyboardInterrupt

    def interrupted(work: Callable[..., object], **options: object) -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with pytest.raises(KeyboardInterrupt):
                work(SPEC, **options)
        finally:
            sys.settrace(before)

    pack = tmp_path / "k.flcepack"
    interrupted(flce.prewarm, devices=[CPU], cache_dir=tmp_path / "cache", pack=pack)
    assert not pack.exists()
    interrupted(flce.tune, **small_tuning(tmp_path))
    assert not list((tmp_path / "records").rglob("*.json"))


def test_other_exceptions_that_nobody_catches_are_told_and_end_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: told.append(one.exc_type))

    class Fails:
        def __del__(self) -> None:
            raise ZeroDivisionError

    seen: list[object] = []
    result = flce.missing([SPEC], devices=[CPU], cache_dir=tmp_path)
    flce.prewarm(SPEC, devices=[CPU], cache_dir=tmp_path, progress=lambda _: seen.append(Fails() and None))
    assert seen and result["missing"] and set(told) == {ZeroDivisionError}
    assert not flce.missing([SPEC], devices=[CPU], cache_dir=tmp_path)["missing"]


def test_bad_options_are_named(command: str, tmp_path: Path) -> None:
    with pytest.raises(flce.ArgumentError, match="colour"):
        flce.tune(SPEC, device="cpu", records_dir=tmp_path, coordinates=["colour"])
    with pytest.raises(flce.SpecError):
        flce.missing("D=banana", devices=[CPU])
    with pytest.raises(flce.ArgumentError, match="device"):
        flce.missing(SPEC)


def test_python_m_flce_is_the_command(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", "flce", "--version"], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == flce.__version__


@pytest.mark.parametrize("kind", [str, Path])
def test_a_single_value_is_one_value(tmp_path: Path, kind: type[str] | type[Path]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"hidden_size": 32, "vocab_size": 300, "torch_dtype": "float32"}))
    alone = flce.missing(SPEC, devices=CPU, hf_configs=kind(config), num_tokens=64, workspace_limits=0, cache_dir=tmp_path / "cache")
    several = flce.missing([SPEC], devices=[CPU], hf_configs=[config], num_tokens=[64], workspace_limits=[0], cache_dir=tmp_path / "cache")
    assert alone == several
    assert several["missing"]
