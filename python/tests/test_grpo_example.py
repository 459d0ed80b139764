"""The example of a GRPO step, which fails where it differs from materialised logits, and the pieces of docs/python.md beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flce

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "grpo_step.py"


def run(*arguments: str, expected: int = 0) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == expected, result.stdout[-3000:] + result.stderr[-6000:]
    return result.stdout + result.stderr


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fused_step_equals_the_materialised_one(dtype: str) -> None:
    output = run("--dtype", dtype)
    losses = re.findall(r"^ +(?:materialised|flce): loss (-?[\d.]+)", output, re.MULTILINE)
    assert len(losses) == 2
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-5 if dtype == "fp32" else 1e-2)
    assert float(re.findall(r"gradients differ by ([\d.e-]+)", output)[0]) < (1e-5 if dtype == "fp32" else 3e-2)
    assert "logits that did not exist: 8.0 MiB" in output


@pytest.mark.gpu
def test_fused_step_takes_less_memory(device: str) -> None:
    output = run("--device", device, "--dtype", "bf16", "--hidden", "256", "--vocab", "64000", "--sequence", "256")
    materialised, fused = map(float, re.findall(r"([\d.]+) MiB at the peak", output))
    assert fused < materialised / 4


def test_documented_pieces_run(device: str) -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    section = text.split("## Reinforcement learning and distillation\n")[1].split("\n## ")[0]
    pieces = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(pieces) == 8
    if device != "cpu":  # in fp32, which batch_invariant refuses on a GPU
        pieces = [piece for piece in pieces if "batch_invariant" not in piece]
    head, old_head = (torch.nn.Linear(16, 50, bias=False, device=device) for _ in range(2))
    labels = torch.randint(0, 50, (4, 12), device=device)
    rollouts = [(torch.randn(n, 16, device=device), torch.randint(0, 50, (n,), device=device)) for n in (3, 1, 7)]
    names: dict[str, Any] = {
        **{"torch": torch, "F": F, "flce": flce, "head": head, "old_head": old_head, "labels": labels},
        **{name: torch.randn(4, 12, 16, device=device) for name in ("hidden", "old_hidden")},
        **{"advantages": torch.randn(4, 1, device=device), "importance": torch.rand(4, 12, device=device)},
        **{"rollouts": rollouts, "packed_hidden": torch.cat([h for h, _ in rollouts])},
        **{"packed_targets": torch.cat([t for _, t in rollouts])},
        **{"mask": flce.shift_labels(labels) != -100, "model": SimpleNamespace(get_output_embeddings=lambda: head)},
    }
    for piece in pieces:
        exec(piece, names)
    assert head.weight.grad is not None
    assert (names["effective_tokens"] >= 1 - 1e-5).all()
