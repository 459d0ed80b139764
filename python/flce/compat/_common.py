"""Helpers of several stand-ins: reductions, and means over nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flce.core import checks


def check_reduction(given: Any, *allowed: str) -> None:
    """flce has reductions that peers do not have."""
    checks.choice("reduction", given, allowed)


def nan_unless(some: Tensor, loss: Tensor) -> Tensor:
    """`loss`, a mean of which `some`, a scalar, says whether it is over anything; NaN where it is not, and flce gives 0. Gradients stay 0
    there."""
    return torch.where(some, loss, math.nan)
