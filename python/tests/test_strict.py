"""Strict mode and counters: what a run on prewarmed kernels may rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flce

# Processes of their own with an empty cache: sessions read the environment once.
FIRST = """
import torch, flce
try:
    flce.get_kernel(72, 91, "fp32", device="cpu", workspace_limit_bytes=1 << 30, num_tokens=7, strict=True)
except flce.CacheMissError as error:
    print(error)
flce.warmup([{"hidden_size": 72, "vocab_size": 91, "dtype": torch.float32}], device="cpu", strict=False)
print(flce.get_kernel(72, 91, "fp32", device="cpu", strict=True).spec)
"""
SECOND = """
import torch, flce
h, w, t = torch.randn(4, 72, requires_grad=True), torch.randn(91, 72), torch.tensor([1, 2, 3, 4])
print(flce.linear_cross_entropy(h, w, t).item() > 0)
try:
    flce.linear_cross_entropy(h, w, t, softcap=30.0)
except flce.CacheMissError as error:
    print(error)
offset = torch.zeros(91, requires_grad=True)
flce.get_kernel(72, 91, "fp32", device="cpu", softcap=9.0, class_offset=True, strict=False)
try:
    flce.linear_cross_entropy(h, w, t, softcap=9.0, class_offset=offset)  # the kernel is there, and that of the offset's gradient is not
except flce.CacheMissError as error:
    print(error)
"""


SWITCH = """
import threading, torch, flce
def step(**options):
    h, w, t = torch.randn(4, 72, requires_grad=True), torch.randn(91, 72), torch.tensor([1, 2, 3, 4])
    try:
        flce.linear_cross_entropy(h, w, t, **options).backward()
        print("computed")
    except flce.CacheMissError as error:
        print(error)
flce.warmup([{"hidden_size": 72, "vocab_size": 91, "dtype": torch.float32}], device="cpu", strict=False)
flce.set_strict(True)
step()
other = threading.Thread(target=step, kwargs={"softcap": 30.0})
other.start()
other.join()
print(flce.get_kernel(72, 91, "fp32", device="cpu", softcap=30.0, strict=False).spec)  # a call's own word
flce.set_strict(False)
step(softcap=20.0, z_loss=1e-4)
flce.set_strict(None)
step(label_smoothing=0.1)
"""


def lines(script: str, **environment: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | environment, check=True, capture_output=True, text=True)
    return done.stdout.strip().split("\n")


def test_strict_never_compiles_and_names_the_command(tmp_path: Path) -> None:
    miss, spec = lines(FIRST, FLCE_CACHE_DIR=str(tmp_path))
    assert "flce prewarm --spec 'D=72,V=91,dtype=fp32' --device " in miss
    assert miss.endswith("--workspace-limit 1073741824 --num-tokens 7")
    assert spec == "D=72,V=91,dtype=fp32"
    computed, miss, of_offset = lines(SECOND, FLCE_CACHE_DIR=str(tmp_path), FLCE_STRICT="1")
    assert computed == "True"
    assert "flce prewarm --spec 'D=72,V=91,dtype=fp32,bias,class_offset,offset_gradient,softcap=9' --device " in of_offset
    assert "flce prewarm --spec 'D=72,V=91,dtype=fp32,softcap=30' --device " in miss


@pytest.mark.full
def test_switch_for_the_whole_process(tmp_path: Path) -> None:
    warm, miss, spec, compiled, as_before = lines(SWITCH, FLCE_CACHE_DIR=str(tmp_path), FLCE_STRICT="0")
    assert warm == compiled == as_before == "computed"
    assert "flce prewarm --spec 'D=72,V=91,dtype=fp32,softcap=30' --device " in miss
    assert spec == "D=72,V=91,dtype=fp32,softcap=30"
    *_, as_before = lines(SWITCH, FLCE_CACHE_DIR=str(tmp_path / "another"), FLCE_STRICT="1")
    assert "flce prewarm --spec 'D=72,V=91,dtype=fp32,label_smoothing=0.1' --device " in as_before


@pytest.mark.parametrize("strict", ["yes", "0", 1, 0.0])
def test_strictness_is_true_false_or_none(strict: Any) -> None:
    for call in (
        lambda: flce.set_strict(strict),
        lambda: flce.get_kernel(8, 11, "fp32", device="cpu", strict=strict),
        lambda: flce.warmup([{"hidden_size": 8, "vocab_size": 11, "dtype": "fp32"}], device="cpu", strict=strict),
    ):
        with pytest.raises(flce.ArgumentError, match=f"strict is {strict!r}; allowed are True, False and None"):
            call()


def test_statistics_count_by_tier() -> None:
    flce.get_kernel(8, 4801, torch.float32, device="cpu")
    before = flce.cache_statistics()
    assert set(before["tiers"]) == {"memory", "local", "packs", "remote"}
    flce.get_kernel(8, 4802, torch.bfloat16, device="cpu", hidden_major=True, grad_weight_dtype=torch.float32)
    after = flce.cache_statistics()

    def asked(counts: dict[str, dict[str, dict[str, int]]], tier: str) -> int:
        return counts["tiers"][tier]["hits"] + counts["tiers"][tier]["misses"]

    assert asked(after, "memory") > asked(before, "memory")
    assert after["tiers"]["local"]["faults"] == 0
    assert asked(after, "remote") == 0
