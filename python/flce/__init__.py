"""flce: the output layer's linear + cross-entropy, fused, without logits in memory.

loss = flce.linear_cross_entropy(hidden, head.weight, labels, shift=1)
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from flce.errors import (
    ArgumentError,
    CacheMissError,
    CompileError,
    DeviceError,
    DTypeError,
    FlceError,
    InternalError,
    LabelError,
    PipelineError,
    PlacementError,
    PlanError,
    PlanMismatchError,
    ShapeError,
    SpecError,
    UnavailableError,
    UnsupportedTransformError,
)

_has_torch = importlib.util.find_spec("torch") is not None
if TYPE_CHECKING or _has_torch:  # flce.jax stands without it
    from flce.budget import MemoryBudget
    from flce.call._targets import shift_labels
    from flce.contrastive import info_nce
    from flce.core._kernels import Kernel, set_strict
    from flce.divergence import linear_divergence
    from flce.fp8 import Fp8
    from flce.functional import linear_cross_entropy, linear_logprobs, linear_logprobs_at, linear_topk_distillation
    from flce.jobs import missing, prewarm, tune
    from flce.kernels import cache_statistics, check_labels, explain, get_kernel, warmup
    from flce.lm_head import FusedLMHead
    from flce.loss import FusedOutputLoss, LinearCrossEntropyLoss, extract_hidden_states
    from flce.pipeline import PipelineFusedLoss, sum_tied_gradient
    from flce.plans import check_same_plans, plan_digest
    from flce.topk import linear_topk

if TYPE_CHECKING:
    from flce import bench, compat, engine, huggingface, megatron, trl
    from flce import jax as jax
    from flce import torchtitan as torchtitan
    from flce.adapters._patch import patch, unpatch

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CacheMissError",
    "CompileError",
    "DTypeError",
    "DeviceError",
    "FlceError",
    "Fp8",
    "FusedLMHead",
    "FusedOutputLoss",
    "InternalError",
    "Kernel",
    "LabelError",
    "LinearCrossEntropyLoss",
    "MemoryBudget",
    "PipelineError",
    "PipelineFusedLoss",
    "PlacementError",
    "PlanError",
    "PlanMismatchError",
    "ShapeError",
    "SpecError",
    "UnavailableError",
    "UnsupportedTransformError",
    "bench",
    "cache_statistics",
    "check_labels",
    "check_same_plans",
    "compat",
    "engine",
    "explain",
    "extract_hidden_states",
    "get_kernel",
    "huggingface",
    "info_nce",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_logprobs",
    "linear_logprobs_at",
    "linear_topk",
    "linear_topk_distillation",
    "megatron",
    "missing",
    "patch",
    "plan_digest",
    "prewarm",
    "set_strict",
    "shift_labels",
    "sum_tied_gradient",
    "trl",
    "tune",
    "unpatch",
    "warmup",
]

# Imported when they are first asked for, as what comes from the next one. jax and torchtitan are not in __all__: they import what they
# are for.
_SUBMODULES = ("bench", "compat", "engine", "huggingface", "jax", "megatron", "torchtitan", "trl")
_OF_PATCH = ("patch", "unpatch")
_OF_TORCH = {*__all__, *_SUBMODULES, *_OF_PATCH} - {*globals(), "jax"}


if not _has_torch:
    __all__ = [name for name in __all__ if name in globals()]


def __getattr__(name: str) -> Any:
    if not _has_torch and name in _OF_TORCH:
        raise AttributeError(f"flce.{name} needs torch, which is not installed; the functions for JAX are in flce.jax")
    if name in _SUBMODULES:
        try:
            return importlib.import_module(f"flce.{name}")
        except ImportError as error:
            raise AttributeError(f"flce.{name} cannot be imported: {error}; is what it is for installed?") from error
    if name in _OF_PATCH:
        return getattr(importlib.import_module("flce.adapters._patch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    later = {*_SUBMODULES, *_OF_PATCH}
    return sorted({*globals(), *(later if _has_torch else later - _OF_TORCH)})
