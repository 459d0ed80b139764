"""Fixtures: every numeric test runs on the CPU and, where there is one, on a GPU (marker `gpu`, skipped with the reason elsewhere)."""

from __future__ import annotations

import importlib.util
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import levels
import pytest
import rank_support
import torch
from retain_support import watched, way  # noqa: F401  # fixtures

import flce
from flce.call import _call

if importlib.util.find_spec("jax") is None:
    collect_ignore_glob = ["test_jax*"]  # tools/setup.sh --trainers fetches it into .tools/jax


def _devices() -> list[object]:
    return [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        devices = _devices()
        metafunc.parametrize("device", devices[1:] if metafunc.definition.get_closest_marker("gpu") else devices)
    marks = metafunc.definition.get_closest_marker
    if marks("first_and_direct") is not None and marks("another_process") is None:
        metafunc.parametrize("calls", ["first", "direct"], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked `nightly`, and at FLCE_TEST_LEVEL=quick tests marked `full`, unless -m asks for them."""
    levels.mark_repetitions(items)
    left_out = ["nightly", "full"] if levels.QUICK else ["nightly"]
    left_out = [marker for marker in left_out if marker not in config.getoption("markexpr")]
    left = [item for item in items if levels.is_left_out(item, left_out)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Reports a nightly run: how many cases of each test passed, were skipped and failed, and their seconds."""
    if config.getoption("markexpr") != "nightly":
        return
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "skipped", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            name = report.nodeid.split("::", 1)[-1].split("[")[0]
            counts[name]["failed" if outcome == "error" else outcome] += 1
            seconds[name] += report.duration
    terminalreporter.section("nightly: passed, skipped, failed, seconds")
    for name, of in counts.items():
        terminalreporter.write_line(f"{of['passed']:5} {of['skipped']:5} {of['failed']:5} {seconds[name]:7.0f}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")
    config.addinivalue_line("markers", "full: repeats in more combinations what a quick test has; deselected at FLCE_TEST_LEVEL=quick")
    config.addinivalue_line("markers", "pairwise: of its parameters' combinations, quick has enough that every pair of values is in one")
    config.addinivalue_line("markers", "nightly(*paths): takes long; run with -m nightly, deselected without; full where a path changed")
    config.addinivalue_line("markers", "first_and_direct: also with every call a direct one, as from the third of its kind")
    config.addinivalue_line("markers", "another_process: whose calls are of a process of its own, which first_and_direct would only repeat")
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """A file with ON_DEVICE makes its models and tensors on the device that trainers' tests run on."""
    chosen = getattr(request.module, "ON_DEVICE", False) and rank_support.device() != "cpu"
    if chosen:
        torch.set_default_device(rank_support.device())
    yield
    if chosen:
        torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    _call.forget()


@pytest.fixture(autouse=True)
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request, "param", "first") == "first":
        return

    def third(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                original(*args, **kwargs)
                original(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    for name in ("linear_cross_entropy", "linear_logprobs"):
        monkeypatch.setattr(flce, name, third(getattr(flce, name)))
