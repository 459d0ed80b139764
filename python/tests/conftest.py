"""Fixtures: every numeric test runs on the CPU and, where there is one, on a GPU (marker `gpu`, skipped with the reason elsewhere)."""

from __future__ import annotations

import pytest
import torch


def _devices() -> list[object]:
    reason = "no CUDA device" if not torch.cuda.is_available() else ""
    gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(reason), reason=reason)]
    return [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=gpu)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _devices())


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
